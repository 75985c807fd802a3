package main

import "syscall"

// noCoreDump makes the kernel write no core of this process and hand none to a core handler; nor may another process of the
// same user look into its memory. Errors are ignored: it is done where it can be.
func noCoreDump() {
	const setDumpable = 4 // PR_SET_DUMPABLE
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, setDumpable, 0, 0)
	_ = syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
}
