package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
)

// runExplain says where a request would go now and why, or where a past one went. The argument is a file with the
// request's body (- is standard input), or the id of one of the last requests of that agent; without one, --model and
// --tokens stand for a request.
func runExplain(ctx context.Context, p *process, args []string) error {
	f := p.flags("explain")
	addr := f.String("url", "", "status listener of the agent (default: GRAPEVINE_STATUS_LISTEN on this host)")
	asJSON := f.Bool("json", false, "print the agent's JSON as it is")
	path := f.String("path", "/v1/chat/completions", "path that the request would have")
	model := f.String("model", "", "model, where there is no file")
	tokens := f.Int("tokens", 1000, "prompt tokens, where there is no file")
	what, err := p.parseOne(f, args)
	if err != nil {
		return err
	}
	c, err := newConsoleClient(*addr, p.environ)
	if err != nil {
		return err
	}
	var b []byte
	switch body, ferr := readRequest(what); {
	case what == "":
		b, err = c.do(ctx, http.MethodGet, "/explain?"+url.Values{"model": {*model}, "tokens": {fmt.Sprint(*tokens)}}.Encode(), 5*time.Second)
	case ferr == nil:
		b, err = c.send(ctx, http.MethodPost, "/explain?path="+url.QueryEscape(*path), bytes.NewReader(body), 10*time.Second)
	case strings.ContainsAny(what, "/.") && os.IsNotExist(ferr):
		return ferr // it was meant as a file
	default:
		return explainPast(ctx, p, c, what, *asJSON)
	}
	if err != nil {
		return err
	}
	if *asJSON {
		_, err = p.out.Write(b)
		return err
	}
	var e proxy.Explanation
	if err := json.Unmarshal(b, &e); err != nil {
		return fmt.Errorf("%s/explain: %w", c.base, err)
	}
	printExplanation(p.out, &e, p.terminal)
	return nil
}

func readRequest(name string) ([]byte, error) {
	switch name {
	case "":
		return nil, os.ErrNotExist
	case "-":
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(name)
}

// printExplanation writes the decision in a sentence and the candidates as a table, cheapest first.
func printExplanation(w io.Writer, e *proxy.Explanation, colour bool) {
	model := e.Model
	if model == "" {
		model = "any model"
	}
	fmt.Fprintf(w, "request   %s, about %d prompt tokens", model, e.PromptTokens)
	if e.MaxTokens > 0 {
		fmt.Fprintf(w, ", at most %d new ones", e.MaxTokens)
	}
	fmt.Fprintf(w, ", class %d", e.Class)
	if e.Session {
		fmt.Fprint(w, ", in a session")
	}
	if e.PrefixBlocks > 0 {
		fmt.Fprintf(w, ", %s of prefix", plural(e.PrefixBlocks, "block"))
	}
	fmt.Fprintln(w)
	switch {
	case e.Decision == "":
		fmt.Fprintln(w, "decision  "+paint("nobody: "+e.Reason, "suspect", colour))
	default:
		fmt.Fprintf(w, "decision  %s, by policy %s: %s, %s to its first token\n", paint(e.Decision, "ready", colour), e.Policy, e.Reason, milliseconds(e.ScoreMS))
	}
	if e.RunnerUp != "" {
		fmt.Fprintf(w, "runner-up %s, %s\n", e.RunnerUp, milliseconds(e.RunnerUpMS))
	}
	if len(e.Asked) > 0 {
		fmt.Fprintf(w, "asked     a real request would first ask %s for the exact score\n", strings.Join(e.Asked, ", "))
	}
	fmt.Fprintln(w)
	t := table{right: []bool{false, false, true, true, true, true, true, true, true, true, true, true, false}}
	t.add("CANDIDATE", "STATE", "SCORE", "QUEUE", "PREFILL", "HARM", "KV", "LIMIT", "WAY", "FACTOR", "CACHED", "AGE", "WHY NOT")
	for _, x := range e.Candidates {
		name, age := x.Node, opt(x.AgeMS, "%.0f ms")
		if x.Self {
			name, age = name+" *", "-"
		}
		k := x.Terms
		factor := 1.0
		if k.SlowStart > 0 {
			factor = k.Slowness / k.SlowStart
		}
		t.add(name, x.State, milliseconds(x.ScoreMS), milliseconds(1000*k.Queue), milliseconds(1000*k.Prefill), milliseconds(1000*k.Harm),
			milliseconds(1000*k.KV), milliseconds(1000*k.Limit), milliseconds(1000*(k.RoundTrip+k.Penalty)), fmt.Sprintf("%.2f", factor),
			fmt.Sprint(x.CachedTokens), age, x.Excluded)
	}
	t.write(w, func(col int, cell string) string {
		if col == 1 {
			return paint(cell, strings.TrimSpace(cell), colour)
		}
		return cell
	})
}

// milliseconds prints a time in ms, or in seconds where it is long.
func milliseconds(ms float64) string {
	switch {
	case ms >= 10000:
		return fmt.Sprintf("%.1f s", ms/1000)
	case ms >= 10 || ms == 0:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.1f ms", ms)
}

// explainPast prints what was recorded of a request that passed through the agent.
func explainPast(ctx context.Context, p *process, c *consoleClient, id string, asJSON bool) error {
	b, err := c.do(ctx, http.MethodGet, "/picks?id="+url.QueryEscape(id), 5*time.Second)
	if err != nil {
		return err
	}
	var recs []proxy.PickRecord
	if err := json.Unmarshal(b, &recs); err != nil {
		return fmt.Errorf("%s/picks: %w", c.base, err)
	}
	if len(recs) == 0 {
		return fmt.Errorf("%q is no file, and none of the last requests of this agent; try the agent that it entered at", id)
	}
	if asJSON {
		_, err = p.out.Write(b)
		return err
	}
	for _, r := range recs {
		fmt.Fprintf(p.out, "request   %s at %s as %s: %s, model %s, about %d prompt tokens, %s known\n", r.ID, r.At.Format(time.RFC3339Nano), r.Role, r.Route,
			r.Model, r.PromptTokens, plural(r.Candidates, "replica"))
		for i, a := range r.Attempts {
			fmt.Fprintf(p.out, "attempt %d %s: %s, predicted %s, record %s old, ended %s\n", i+1, a.Node, a.Reason, milliseconds(a.ScoreMS), milliseconds(max(a.AgeMS, 0)), a.Result)
			if a.RunnerUp != "" {
				fmt.Fprintf(p.out, "          runner-up %s, predicted %s\n", a.RunnerUp, milliseconds(a.RunnerUpMS))
			}
			if a.Asked > 0 {
				fmt.Fprintf(p.out, "          asked %d for their exact score, %d answered in %s\n", a.Asked, a.Answered, milliseconds(a.AskMS))
			}
		}
		fmt.Fprintf(p.out, "outcome   %s, status %d, first token after %s, over after %s\n", r.Outcome, r.Status, milliseconds(r.TTFTMS), milliseconds(r.DurationMS))
	}
	return nil
}
