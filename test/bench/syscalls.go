//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// countCalls runs requests and streams under strace and prints the system calls for each. Tracing slows a candidate
// down, so that chunks come in fewer pieces than they were sent in; reads and writes are what to compare.
func (b *bench) countCalls() error {
	if path, _ := exec.LookPath("strace"); path == "" {
		fmt.Println("skipped: strace is not installed")
		return nil
	}
	fmt.Print("| candidate | scenario | reads | writes | epoll | futex | other | for each |\n|---|---|--:|--:|--:|--:|--:|---|\n")
	for _, p := range b.peers {
		under, at, stop, err := b.start(p)
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		for _, s := range []scenario{
			{"c16", "-mode closed -conc 16 -dur 1s"},
			{"s50", "-mode stream -conc 50 -chunks 100 -interval 40ms -ramp 300ms -dur 10s"},
		} {
			n, err := b.traced(s, under, at.port)
			if err != nil {
				stop()
				return fmt.Errorf("%s: %w", p.name, err)
			}
			fmt.Printf("| %s | %s | %s |\n", p.name, s.name, n)
		}
		stop()
	}
	return nil
}

func (b *bench) traced(s scenario, under []int, port int) (string, error) {
	file := filepath.Join(b.dir, "strace")
	args := []string{"-c", "-f", "-o", file}
	for _, g := range under {
		for _, pid := range members(g) {
			args = append(args, "-p", pid)
		}
	}
	st := exec.Command("strace", args...)
	st.Stderr = b.log
	if err := st.Start(); err != nil {
		return "", err
	}
	time.Sleep(500 * time.Millisecond)
	c := pinned(0, append([]string{b.load, "-url", fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)}, strings.Fields(s.args)...)...)
	out, err := c.Output()
	_ = st.Process.Signal(syscall.SIGINT)
	_ = st.Wait()
	if err != nil {
		return "", err
	}
	what, n := "chunk", field(out, "Chunks")
	if n == 0 {
		what, n = "request", field(out, "Requests")
	}
	table, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	var sum [5]float64
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		calls, err := strconv.ParseFloat(f[3], 64)
		if err != nil {
			continue
		}
		switch name := f[len(f)-1]; {
		case name == "total":
		case strings.HasPrefix(name, "read") || strings.HasPrefix(name, "recv"):
			sum[0] += calls
		case strings.HasPrefix(name, "write") || strings.HasPrefix(name, "send"):
			sum[1] += calls
		case strings.HasPrefix(name, "epoll"):
			sum[2] += calls
		case name == "futex":
			sum[3] += calls
		default:
			sum[4] += calls
		}
	}
	var o []string
	for _, v := range sum {
		o = append(o, fmt.Sprintf("%.2f", v/max(n, 1)))
	}
	return strings.Join(append(o, what), " | "), nil
}

// members are the processes of a group.
func members(group int) (pids []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		stat, err := os.ReadFile(d + "/stat")
		if err != nil {
			continue
		}
		f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+2:]))
		if f[2] == strconv.Itoa(group) {
			pids = append(pids, filepath.Base(d))
		}
	}
	return pids
}

// field is a number in the load generator's line.
func field(line []byte, name string) float64 {
	_, rest, _ := strings.Cut(string(line), `"`+name+`":`)
	end := strings.IndexAny(rest, ",}")
	v, _ := strconv.ParseFloat(rest[:max(end, 0)], 64)
	return v
}
