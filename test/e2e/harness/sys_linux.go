package harness

import "syscall"

// ownGroup puts a process into a group of its own, so that its children can be ended with it, and lets the kernel end it
// when the test binary dies.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
