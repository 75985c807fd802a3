package gpu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// EngineFiles finds our cards by the /dev/nvidia* files that the engine holds open: the process that listens on
// the given TCP port, or on the Unix socket of that path if the port is 0, and its descendants. It needs a
// process name space shared with the engine and the right to look at its open files (same user, or
// CAP_SYS_PTRACE).
func EngineFiles(port int, socket string) Finder { return engineFiles("/proc", port, socket) }

func engineFiles(proc string, port int, socket string) Finder {
	return Finder{Method: "device files held open by the engine's process", Find: func() ([]string, error) {
		inodes, err := listeners(proc, port, socket)
		if err != nil {
			return nil, err
		}
		return devicesOf(proc, inodes)
	}}
}

// listeners are the inodes of the sockets that listen on the engine's address.
func listeners(proc string, port int, socket string) (map[string]bool, error) {
	out := map[string]bool{}
	if port == 0 {
		b, err := os.ReadFile(filepath.Join(proc, "net/unix"))
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(b)) {
			// Num RefCount Protocol Flags Type St Inode Path
			if f := strings.Fields(line); len(f) == 8 && f[7] == socket {
				out[f[6]] = true
			}
		}
	} else {
		for _, name := range []string{"net/tcp", "net/tcp6"} {
			b, err := os.ReadFile(filepath.Join(proc, name))
			if err != nil {
				continue // no IPv6
			}
			for line := range strings.Lines(string(b)) {
				// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
				f := strings.Fields(line)
				if len(f) < 10 || f[3] != "0A" {
					continue
				}
				_, p, _ := strings.Cut(f[1], ":")
				if n, err := strconv.ParseUint(p, 16, 16); err == nil && int(n) == port {
					out[f[9]] = true
				}
			}
		}
	}
	if len(out) == 0 {
		return nil, errors.New("nobody listens on the engine's address")
	}
	return out, nil
}

// process is what one /proc entry tells.
type process struct {
	parent  int
	listens bool
	devices []string
}

// processes reads what /proc shows of all processes, and counts those whose open files may not be seen.
func processes(proc string, inodes map[string]bool) (all map[int]process, denied int, err error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, 0, err
	}
	all = map[int]process{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join(proc, e.Name())
		p := process{parent: parentOf(dir)}
		fds, err := os.ReadDir(filepath.Join(dir, "fd"))
		if errors.Is(err, os.ErrPermission) {
			denied++
		}
		for _, fd := range fds {
			to, err := os.Readlink(filepath.Join(dir, "fd", fd.Name()))
			if err != nil {
				continue // closed meanwhile
			}
			if s, ok := strings.CutPrefix(to, "socket:["); ok && inodes[strings.TrimSuffix(s, "]")] {
				p.listens = true
			}
			if n, ok := strings.CutPrefix(to, "/dev/nvidia"); ok && isNumber(n) {
				p.devices = append(p.devices, to)
			}
		}
		all[pid] = p
	}
	return all, denied, nil
}

// EngineProcesses tells whether a process belongs to the engine that listens on the given address: the process itself or a
// descendant. It looks around again every ten seconds. Where the engine's process is not in our process name space it
// says so of none.
func EngineProcesses(port int, socket string) func(pid uint32) bool {
	return engineProcesses("/proc", port, socket, time.Now)
}

func engineProcesses(proc string, port int, socket string, now func() time.Time) func(pid uint32) bool {
	var (
		mu   sync.Mutex
		at   time.Time
		ours map[uint32]bool
	)
	return func(pid uint32) bool {
		mu.Lock()
		defer mu.Unlock()
		if t := now(); ours == nil || t.Sub(at) >= askAgain {
			at, ours = t, map[uint32]bool{}
			if inodes, err := listeners(proc, port, socket); err == nil {
				all, _, _ := processes(proc, inodes) // nothing seen: none are ours
				for p := range all {
					if below(all, p) {
						ours[uint32(p)] = true
					}
				}
			}
		}
		return ours[pid]
	}
}

// devicesOf gathers the card files of the processes that hold one of the sockets, and of their descendants.
func devicesOf(proc string, inodes map[string]bool) ([]string, error) {
	all, denied, err := processes(proc, inodes)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	var out []string
	found := false
	for pid := range all {
		if !below(all, pid) {
			continue
		}
		found = true
		for _, d := range all[pid].devices {
			if !seen[d] {
				seen[d] = true
				out = append(out, d)
			}
		}
	}
	switch {
	case found:
		return out, nil
	case denied > 0:
		return nil, fmt.Errorf("no permission to see the open files of %d processes", denied)
	}
	return nil, errors.New("the engine's process is not in our process name space")
}

// below reports whether a process listens on the engine's address or descends from one that does.
func below(all map[int]process, pid int) bool {
	for range 64 { // generations; /proc is read while it changes, so a loop is possible
		p, ok := all[pid]
		if !ok {
			return false
		}
		if p.listens {
			return true
		}
		pid = p.parent
	}
	return false
}

// parentOf reads the parent's id from a stat file, whose second field may hold spaces and brackets.
func parentOf(dir string) int {
	b, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return 0
	}
	s := string(b)
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(f) < 2 {
		return 0
	}
	n, _ := strconv.Atoi(f[1])
	return n
}

func isNumber(s string) bool {
	_, err := strconv.ParseUint(s, 10, 16)
	return err == nil
}
