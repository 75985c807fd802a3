//go:build !linux

package harness

import "syscall"

// ownGroup puts a process into a group of its own, so that its children can be ended with it.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
