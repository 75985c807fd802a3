//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// bursts lets 400 streams begin at once, ten times, and counts those that were cut: where one goroutine runs at a time, where the
// thread for streams has no P of its own, as the agent sets it itself, and where other work takes most of the CPU away.
func (b *bench) bursts() error {
	const times, conc, chunks = 10, 400, 25
	fmt.Print("| candidate | GOMAXPROCS | busy loops beside it | streams | not whole | p50 to the first token, ms |\n|---|---|--:|--:|--:|--:|\n")
	cut := 0
	for _, p := range b.peers {
		if !strings.HasPrefix(p.name, "grapevine") {
			continue
		}
		for _, at := range []struct {
			procs string
			loops int
		}{{"1", 0}, {"2", 0}, {"", 0}, {"", 4}} {
			bad, first, err := b.burst(p, at.procs, at.loops, times, conc, chunks)
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			name := at.procs
			if name == "" {
				name = "unset"
			}
			fmt.Printf("| %s | %s | %d | %d | %d | %.0f |\n", p.name, name, at.loops, times*conc, bad, first)
			cut += bad
		}
	}
	if cut > 0 {
		return fmt.Errorf("%d streams were cut", cut)
	}
	return nil
}

func (b *bench) burst(p peer, procs string, loops, times, conc, chunks int) (bad int, first float64, err error) {
	start := p.start
	p.start = func(b *bench, at *place) ([]command, error) {
		cmds, err := start(b, at)
		for i := range cmds {
			if procs != "" {
				cmds[i].env = append(cmds[i].env, "GOMAXPROCS="+procs)
			}
		}
		return cmds, err
	}
	_, at, stop, err := b.start(p)
	if err != nil {
		return 0, 0, err
	}
	defer stop()
	for range loops {
		c := pinned(1, "sh", "-c", "while :; do :; done")
		if err := c.Start(); err != nil {
			return 0, 0, err
		}
		defer func() { _ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL); _ = c.Wait() }()
	}
	for range times {
		c := pinned(0, b.load, "-url", fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", at.port),
			"-mode", "stream", "-conc", fmt.Sprint(conc), "-chunks", fmt.Sprint(chunks), "-interval", "20ms", "-ramp", "1ms", "-dur", "30s")
		c.Stderr = os.Stderr
		out, err := c.Output()
		if err != nil {
			return 0, 0, err
		}
		var r struct {
			Errors, Missing int
			TTFTUs          struct{ P50 float64 }
		}
		if err := json.Unmarshal(out, &r); err != nil {
			return 0, 0, fmt.Errorf("load generator said %q", out)
		}
		bad += max(r.Errors, min(r.Missing, conc))
		first += r.TTFTUs.P50 / 1000 / float64(times)
	}
	return bad, first, nil
}
