package main

import (
	"bufio"
	"io/fs"
	"math"
	"os"
	"path"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
)

// memoryShare is how much of its control group's memory the process lets Go use before it collects harder; the rest is for
// what Go does not see.
const memoryShare = 0.9

// confine sets what the process may cost and reveal. Go follows the CPU limit of the control group by itself; its memory
// limit it follows only if told, and then collects garbage instead of being killed (GOMEMLIMIT stands above it). Prompts and
// keys stay out of core dumps, unless GOTRACEBACK=crash asks for one.
//
// Go is told of one CPU more than there are, unless GOMAXPROCS is set: streams are read by a thread that waits in the kernel without
// handing its place on (proxy.Config.StreamThread), and must not take it from the others. It reports whether that was done.
func confine(environ []string) (streamThread bool) {
	if !isSet(environ, "GOMAXPROCS") {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
		streamThread = true
	}
	if !isSet(environ, "GOMEMLIMIT") {
		if limit, ok := groupMemory(os.DirFS("/")); ok {
			debug.SetMemoryLimit(int64(float64(limit) * memoryShare))
		}
	}
	if !slices.Contains(environ, "GOTRACEBACK=crash") {
		noCoreDump()
	}
	return streamThread
}

func isSet(environ []string, name string) bool {
	return slices.ContainsFunc(environ, func(e string) bool { return strings.HasPrefix(e, name+"=") && len(e) > len(name)+1 })
}

// groupMemory is the memory limit of our control group in bytes, the least on the way to the root, of version 2 or 1.
func groupMemory(root fs.FS) (limit uint64, ok bool) {
	f, err := root.Open("proc/self/cgroup")
	if err != nil {
		return 0, false
	}
	defer func() { _ = f.Close() }() // it was only read from
	limit = math.MaxUint64
	for lines := bufio.NewScanner(f); lines.Scan(); {
		part := strings.SplitN(lines.Text(), ":", 3) // id, controllers, path
		if len(part) != 3 {
			continue
		}
		var base, file string
		switch {
		case part[1] == "":
			base, file = "sys/fs/cgroup", "memory.max"
		case slices.Contains(strings.Split(part[1], ","), "memory"):
			base, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		default:
			continue
		}
		// In a container the path may be the host's, while the group is mounted as the root: then only the root is there.
		for dir := path.Clean("/" + part[2]); ; dir = path.Dir(dir) {
			if b, err := fs.ReadFile(root, path.Join(base, dir, file)); err == nil {
				n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64) // "max" is no number
				if err == nil && n < 1<<60 {                                      // version 1 writes none as a huge number
					limit = min(limit, n)
				}
			}
			if dir == "/" {
				break
			}
		}
	}
	return limit, limit != math.MaxUint64
}
