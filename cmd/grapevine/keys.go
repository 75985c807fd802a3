package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/gossip"
)

// runKeys shows and changes the gossip keys of all agents, or with --here of one. A key is never an argument: those can be
// seen by everybody on a host.
func runKeys(ctx context.Context, p *process, args []string) error {
	f := p.flags("keys")
	url := f.String("url", "", "status listener of the agent (default: GRAPEVINE_STATUS_LISTEN on this host)")
	here := f.Bool("here", false, "that agent alone, not all of the cluster")
	if err := p.parseFlags(f, args); err != nil {
		return err
	}
	verb, arg := f.Arg(0), f.Arg(1)
	c, err := newConsoleClient(*url, p.environ)
	if err != nil {
		return err
	}
	all, limit := "?all=1", 20*time.Second
	if *here {
		all, limit = "", 5*time.Second
	}
	var b []byte
	switch {
	case f.NArg() <= 1 && (verb == "" || verb == "list"):
		b, err = c.do(ctx, http.MethodGet, "/keys"+all, limit)
	case f.NArg() == 2 && verb == "install":
		if arg, err = readKey(arg); err == nil {
			b, err = c.send(ctx, http.MethodPost, "/keys/install"+all, strings.NewReader(arg), limit)
		}
	case f.NArg() == 2 && (verb == "use" || verb == "remove"):
		b, err = c.send(ctx, http.MethodPost, "/keys/"+verb+all, strings.NewReader(arg), limit)
	default:
		return fmt.Errorf("grapevine keys [--url URL] [--here] list | install FILE | use ID | remove ID: %w", errUsage)
	}
	if err != nil {
		return err
	}
	if *here {
		var keys []gossip.KeyInfo
		if err := json.Unmarshal(b, &keys); err != nil {
			return err
		}
		return printKeys(p.out, keys)
	}
	var agents []agent.AgentKeys
	if err := json.Unmarshal(b, &agents); err != nil {
		return err
	}
	return printAllKeys(p.out, agents)
}

func printKeys(out io.Writer, keys []gossip.KeyInfo) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "KEY\tKNOWN BY\tUSE")
	for _, k := range keys {
		fmt.Fprintf(w, "%s\t%d\t%s\n", k.ID, k.KnownBy, use(k))
	}
	return w.Flush()
}

// printAllKeys prints a line for each key and one for each agent that does not have what it was told; the latter make an error.
func printAllKeys(out io.Writer, agents []agent.AgentKeys) error {
	var ids []string
	read, send := map[string]int{}, map[string]int{}
	var bad []string
	for _, a := range agents {
		if a.Error != "" {
			bad = append(bad, a.Node+": "+a.Error)
		}
		for _, k := range a.Keys {
			if read[k.ID] == 0 {
				ids = append(ids, k.ID)
			}
			read[k.ID]++
			if k.Sending {
				send[k.ID]++
			}
		}
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "KEY\tREAD BY\tSENT WITH BY")
	for _, id := range ids {
		fmt.Fprintf(w, "%s\t%d of %d\t%d of %d\n", id, read[id], len(agents), send[id], len(agents))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(bad) > 0 {
		return fmt.Errorf("%d of %d agents:\n  %s", len(bad), len(agents), strings.Join(bad, "\n  "))
	}
	return nil
}

func use(k gossip.KeyInfo) string {
	if k.Sending {
		return "sending"
	}
	return "reading"
}

// readKey reads a key from a file, or from standard input if the name is -.
func readKey(name string) (string, error) {
	if name == "-" {
		b, err := io.ReadAll(io.LimitReader(os.Stdin, 1<<10))
		return strings.TrimSpace(string(b)), err
	}
	b, err := os.ReadFile(name)
	return strings.TrimSpace(string(b)), err
}
