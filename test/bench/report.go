//go:build linux

package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// target is a ratio to keep: of one candidate's figure to another's, in the same repetition.
type target struct {
	what     string
	scenario string
	peer     string
	base     string
	most     float64 // of base
	envoy    float64 // of Envoy; 0 = none
	of       func(sample) float64
	gate     bool // the short form fails far above it
}

func cpu(s sample) float64 { return s.CPU }
func p50(s sample) float64 { return s.Added[0] }
func p90(s sample) float64 { return s.Added[1] }
func rss(s sample) float64 { return s.RSS }

// What is gated stays far below gateAt of its target in every run: memory, and chunks where streams keep the CPU busy. The others are
// printed only: a request costs more than the target allows, and what a chunk costs on a CPU that rests between two of them depends
// on what else the machine does, so a gate there would fail changes that have nothing to do with it.
var targets = []target{
	{"CPU per request, 16 connections", "c16", "grapevine", "nginx", 1, 0.4, cpu, false},
	{"CPU per request, 64 connections", "c64", "grapevine", "nginx", 1, 0.4, cpu, false},
	{"the same, engine on a Unix socket", "c16", "grapevine-uds", "nginx", 0.75, 0.4, cpu, false},
	{"the same, engine on a Unix socket", "c64", "grapevine-uds", "nginx", 0.75, 0.4, cpu, false},
	{"CPU per request, 32 KB prompts", "b32k", "grapevine", "nginx", 1.1, 0.6, cpu, false},
	{"CPU per request, 1 MB prompts", "b1m", "grapevine", "nginx", 1.1, 0.6, cpu, false},
	{"CPU per chunk, 200 streams", "s200", "grapevine", "nginx", 1, 0.75, cpu, false},
	{"CPU per chunk, 200 streams, engine emitting all at once", "s200b", "grapevine", "nginx", 1, 0.75, cpu, false},
	{"CPU per chunk, 1,000 streams", "s1000", "grapevine", "nginx", 1, 0.75, cpu, false},
	{"CPU per chunk, 1,000 fast streams", "s1000x", "grapevine", "nginx", 1, 0.75, cpu, true},
	{"p50 of a chunk's delay, 1,000 streams", "s1000", "grapevine", "nginx", 1.2, 0.5, p50, false},
	{"p90 of a chunk's delay, 1,000 streams", "s1000", "grapevine", "nginx", 1.2, 0.5, p90, false},
	{"two agents: CPU per request", "c16", "grapevine-two", "nginx", 1.3, 0.6, cpu, false},
	{"two agents: CPU per chunk", "s200", "grapevine-two", "nginx", 1.3, 0.6, cpu, false},
	{"two agents, TLS: CPU per request", "c16", "grapevine-two-tls", "nginx-tls", 1.3, 0.7, cpu, false},
	{"two agents, TLS: CPU per chunk", "s200", "grapevine-two-tls", "nginx-tls", 1.3, 0.7, cpu, false},
	{"memory with 1,000 streams", "idle", "grapevine", "nginx", 1, 0.35, rss, true},
}

// gateAt is by how much a target may be missed before the short form fails: less is the noise of a shared machine.
const gateAt = 1.5

// gate fails when a gated ratio is far above its target, twice: it is measured once more, alone with its base.
func (b *bench) gate(all map[string]map[string][]sample) error {
	for _, t := range targets {
		if !t.gate || !t.missed(all) {
			continue
		}
		fmt.Printf("%s is far above its target and measured once more\n", t.what)
		again := *b
		again.peers = slices.DeleteFunc(slices.Clone(b.peers), func(p peer) bool { return p.name != t.peer && p.name != t.base })
		again.scenarios = slices.DeleteFunc(slices.Clone(b.scenarios), func(s scenario) bool { return s.name != t.scenario })
		second, err := again.measure()
		if err != nil {
			return err
		}
		if t.missed(second) {
			r, text := ratio(second[t.peer][t.scenario], second[t.base][t.scenario], t.of)
			return fmt.Errorf("%s is %s of %s, %.1f times the target of %.2f and more, twice", t.what, text, t.base, r/t.most, t.most)
		}
	}
	return nil
}

func (t *target) missed(all map[string]map[string][]sample) bool {
	r, _ := ratio(all[t.peer][t.scenario], all[t.base][t.scenario], t.of)
	return r > t.most*gateAt // not so where nothing was measured
}

// report prints the tables.
func report(b *bench, all map[string]map[string][]sample) {
	fmt.Printf("\nRatios within a repetition: median (lowest to highest) of %d. Gated: `-short` fails at %.1f of the target.\n\n", b.reps, gateAt)
	fmt.Println("| measure | | × nginx | target | × Envoy | target | gated |")
	fmt.Println("|---|---|--:|--:|--:|--:|---|")
	for _, t := range targets {
		mine := all[t.peer][t.scenario]
		if len(mine) == 0 {
			continue
		}
		_, text := ratio(mine, all[t.base][t.scenario], t.of)
		_, envoy := ratio(mine, all[strings.Replace(t.base, "nginx", "envoy", 1)][t.scenario], t.of)
		most, gated := "", ""
		if t.envoy > 0 {
			most = fmt.Sprintf("≤ %.2f", t.envoy)
		}
		if t.gate {
			gated = "yes"
		}
		fmt.Printf("| %s | %s %s | %s | ≤ %.2f | %s | %s | %s |\n", t.what, t.peer, t.scenario, text, t.most, envoy, most, gated)
	}
	fmt.Println("\nMedians of the same runs: CPU in µs for each request or chunk, memory in MB; only ratios can be compared between machines.")
	fmt.Print("\n| candidate |")
	for _, s := range b.scenarios {
		fmt.Printf(" %s |", s.name)
	}
	fmt.Print(" memory, idle | errors |\n|---|" + strings.Repeat("--:|", len(b.scenarios)+2) + "\n")
	for _, p := range b.peers {
		fmt.Printf("| %s |", p.name)
		errs, base := 0, 0.0
		for _, s := range b.scenarios {
			v := all[p.name][s.name]
			for _, x := range v {
				errs, base = errs+x.Errors, x.Start
			}
			if s.name == "idle" {
				fmt.Printf(" %.1f MB |", median(v, rss)/1e6)
			} else {
				fmt.Printf(" %.1f |", median(v, cpu)*1e6)
			}
		}
		fmt.Printf(" %.1f MB | %d |\n", base/1e6, errs)
	}
	if g := all["grapevine"]["idle"]; len(g) > 0 {
		fmt.Printf("\nMemory of 1,000 silent streams at one agent: %.1f MB over idle (target ≤ 10).\n",
			median(g, func(s sample) float64 { return s.RSS - s.Start })/1e6)
	}
}

// ratio is the median over repetitions of a's figure to b's, NaN without figures.
func ratio(a, b []sample, of func(sample) float64) (float64, string) {
	var r []float64
	for i := range min(len(a), len(b)) {
		if d := of(b[i]); d > 0 {
			r = append(r, of(a[i])/d)
		}
	}
	if len(r) == 0 {
		return math.NaN(), "–"
	}
	slices.Sort(r)
	m := (r[(len(r)-1)/2] + r[len(r)/2]) / 2
	return m, fmt.Sprintf("%.2f (%.2f–%.2f)", m, r[0], r[len(r)-1])
}

func median(v []sample, of func(sample) float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	f := make([]float64, len(v))
	for i := range v {
		f[i] = of(v[i])
	}
	slices.Sort(f)
	return (f[(len(f)-1)/2] + f[len(f)/2]) / 2
}
