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

	"github.com/grapevine-lb/grapevine/gossip"
)

// runKeys shows and changes the gossip keys of one agent. A key is never an argument: those can be seen by everybody on a
// host.
func runKeys(ctx context.Context, p *process, args []string) error {
	f := p.flags("keys")
	url := f.String("url", "", "status listener of the agent (default: GRAPEVINE_STATUS_LISTEN on this host)")
	if err := p.parseFlags(f, args); err != nil {
		return err
	}
	verb, arg := f.Arg(0), f.Arg(1)
	c, err := newConsoleClient(*url, p.environ)
	if err != nil {
		return err
	}
	var b []byte
	switch {
	case f.NArg() <= 1 && (verb == "" || verb == "list"):
		b, err = c.do(ctx, http.MethodGet, "/keys", 5*time.Second)
	case f.NArg() == 2 && verb == "install":
		if arg, err = readKey(arg); err == nil {
			b, err = c.send(ctx, http.MethodPost, "/keys/install", strings.NewReader(arg), 5*time.Second)
		}
	case f.NArg() == 2 && (verb == "use" || verb == "remove"):
		b, err = c.send(ctx, http.MethodPost, "/keys/"+verb, strings.NewReader(arg), 5*time.Second)
	default:
		return fmt.Errorf("grapevine keys [--url URL] list | install FILE | use ID | remove ID: %w", errUsage)
	}
	if err != nil {
		return err
	}
	var keys []gossip.KeyInfo
	if err := json.Unmarshal(b, &keys); err != nil {
		return err
	}
	w := tabwriter.NewWriter(p.out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "KEY\tKNOWN BY\tUSE")
	for _, k := range keys {
		use := "reading"
		if k.Sending {
			use = "sending"
		}
		fmt.Fprintf(w, "%s\t%d\t%s\n", k.ID, k.KnownBy, use)
	}
	return w.Flush()
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
