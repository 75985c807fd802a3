// Command judge lets simlab judge the routing package: it speaks simlab's JSON-lines protocol on stdin and stdout, with
// one routing.Table per agent and the real policy behind it.
//
//	go build -o judge ./test/bench/judge
//	simlab judge -p ext@gate=0.1,steal -ext ./judge
//
// The pick alone is judged: gate and stealing are the simulator's. Flags choose another policy or switch parts off.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/grapevine-lb/grapevine/routing"
)

func main() {
	policy := flag.String("policy", "auto", "the policy under test")
	ask := flag.Int("ask", -1, "how many replicas are asked, in any fleet; -1 = as the product: all of up to 16, three of more")
	digests := flag.Bool("digests", true, "use prefix digests and owners")
	flag.Parse()
	opts := []routing.PolicyOption{routing.WithDigests(*digests)}
	if *ask >= 0 {
		opts = append(opts, routing.WithAsk(*ask))
	}
	p, err := routing.NewPolicy(*policy, opts...)
	if err == nil {
		err = serve(os.Stdin, os.Stdout, p)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "judge:", err)
		os.Exit(1)
	}
}

// serve answers messages until the input ends.
func serve(in io.Reader, out io.Writer, policy routing.Policy) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 1<<16), 1<<22)
	w := bufio.NewWriter(out)
	var f *fleet
	for lines.Scan() {
		var m message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return fmt.Errorf("line %.80q: %w", lines.Text(), err)
		}
		if m.Op == "hello" {
			f = newFleet(m.N, m.Seed, policy)
			continue
		}
		if f == nil {
			return errors.New("no hello")
		}
		switch m.Op {
		case "update":
			f.update(m)
		case "local":
			f.local(m)
		case "shortlist":
			writeLine(w, map[string][]int{"ask": f.shortlist(m)})
		case "pick":
			writeLine(w, map[string]int{"peer": f.pick(m)})
		case "sent":
			f.sent(m)
		case "first":
			f.first(m)
		case "done":
			f.done(m)
		default:
			return fmt.Errorf("unknown op %q", m.Op)
		}
		if m.Op == "shortlist" || m.Op == "pick" {
			if err := w.Flush(); err != nil {
				return err
			}
		}
	}
	return lines.Err()
}

func writeLine(w *bufio.Writer, v any) {
	b, _ := json.Marshal(v) // maps of ints: cannot fail
	w.Write(b)
	w.WriteByte('\n')
}
