//go:build !linux

package main

// noCoreDump is for Linux only.
func noCoreDump() {}
