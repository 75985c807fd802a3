package choosing

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// The engines: steps of 20 ms real time at least, so that the machine's own delays weigh little.
const (
	engines     = 8
	slots       = 8
	prefillRate = 10_000 // prompt tokens/s
	decodeStep  = 20 * time.Millisecond
	share       = 0.85 // of the fleet's capacity
)

// arrival is one request of the trace.
type arrival struct {
	At     float64 `json:"t"` // s since the start
	Prompt int     `json:"i"` // tokens
	Output int     `json:"o"`
	entry  int
}

// load reads n arrivals of the Azure conversation trace and makes them come at the given share of the engines' capacity.
func load(t testing.TB, n int, seed uint64) []arrival {
	f, err := os.Open("testdata/azure23-conv.jsonl.gz")
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	var all []arrival
	for d := json.NewDecoder(z); ; {
		var a arrival
		if err := d.Decode(&a); err == io.EOF {
			break
		}
		require.NoError(t, err)
		all = append(all, a)
	}
	rnd := rand.New(rand.NewPCG(seed, 1))
	from := rnd.IntN(len(all) - n)
	list := slices.Clone(all[from : from+n])
	span := list[n-1].At - list[0].At
	rate := share * engines * capacity(t, list)
	scale := float64(n) / span / rate
	first := list[0].At
	for i := range list {
		list[i].At = (list[i].At - first) * scale
		list[i].entry = rnd.IntN(engines)
	}
	return list
}

// capacity is how many of these requests one engine finishes in a second when it never runs out of work, in virtual time.
func capacity(t testing.TB, list []arrival) float64 {
	e := enginesim.New(enginesim.Rates(prefillRate, decodeStep, slots))
	for i, a := range list {
		_, err := e.Submit(0, enginesim.Job{ID: uint64(i + 1), Prompt: a.Prompt, Output: a.Output})
		require.NoError(t, err)
	}
	var last time.Duration
	for at, ok := e.NextEvent(); ok; at, ok = e.NextEvent() {
		for _, ev := range e.Advance(at) {
			last = ev.At
		}
	}
	return float64(len(list)) / last.Seconds()
}

// fleet is one policy's engines with their agents, and what its clients saw.
type fleet struct {
	name   string
	agents []string // URLs
	all    []*harness.Process

	mu     sync.Mutex
	ttft   []time.Duration // sorted in the end
	errors int
	last   error
}

// newFleet starts fresh engines and agents of that program beside them.
func newFleet(t testing.TB, name, program string, env harness.Env) *fleet {
	s := harness.New(t).Program(program)
	f := &fleet{name: name}
	var urls []string
	for i := range engines {
		e := s.FakeEngine(i+1, "-slots", fmt.Sprint(slots), "-prefill-rate", fmt.Sprint(prefillRate), "-decode-step", decodeStep.String())
		urls = append(urls, e.URL)
		f.all = append(f.all, e.Process)
	}
	for _, a := range s.Mesh(urls, env) {
		f.agents = append(f.agents, a.URL)
		f.all = append(f.all, a.Process)
	}
	return f
}

func (f *fleet) stop() {
	for _, p := range f.all {
		p.Kill()
	}
}

func (f *fleet) mean() time.Duration {
	var sum time.Duration
	for _, d := range f.ttft {
		sum += d
	}
	return sum / time.Duration(max(1, len(f.ttft)))
}

func (f *fleet) p99() time.Duration {
	if len(f.ttft) == 0 {
		return 0
	}
	return f.ttft[min(len(f.ttft)-1, len(f.ttft)*99/100)]
}

// play sends each request to every fleet at its time, whatever became of those before. It returns the share of all cores
// that the processes of all fleets took, the clients included.
func play(fleets []*fleet, list []arrival) (cpu float64) {
	hc := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1000, DisableCompression: true, IdleConnTimeout: 3 * time.Second}}
	defer hc.CloseIdleConnections()
	busy, start := cpuTime(fleets), time.Now()
	var wg sync.WaitGroup
	for i, a := range list {
		body := chat(i, a)
		time.Sleep(time.Until(start.Add(time.Duration(a.At * float64(time.Second)))))
		for _, f := range fleets {
			wg.Go(func() {
				begin := time.Now()
				at, err := ask(hc, f.agents[a.entry], body)
				f.mu.Lock()
				defer f.mu.Unlock()
				if err != nil {
					f.errors++
					f.last = err
					return
				}
				f.ttft = append(f.ttft, at.Sub(begin))
			})
		}
	}
	wg.Wait()
	for _, f := range fleets {
		slices.Sort(f.ttft)
	}
	return (cpuTime(fleets) - busy).Seconds() / time.Since(start).Seconds() / float64(runtime.NumCPU())
}

// chat is the request's body. Prompts share no prefix.
func chat(i int, a arrival) []byte {
	text := fmt.Sprintf("%08d ", i) + strings.Repeat("word", max(0, a.Prompt-3))
	b, _ := json.Marshal(map[string]any{"model": harness.FakeModel, "stream": true, "max_tokens": a.Output, "ignore_eos": true,
		"messages": []map[string]string{{"role": "user", "content": text}}})
	return b
}

// ask sends one request and reads its stream to the end; it returns when the first content came.
func ask(hc *http.Client, url string, body []byte) (at time.Time, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return at, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := hc.Do(req)
	if err != nil {
		return at, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return at, fmt.Errorf("%s: %s", resp.Status, b)
	}
	done := false
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		line := lines.Bytes()
		if at.IsZero() && bytes.Contains(line, []byte(`"content":"`)) && !bytes.Contains(line, []byte(`"content":""`)) {
			at = time.Now()
		}
		done = done || bytes.Equal(line, []byte("data: [DONE]"))
	}
	if !done || at.IsZero() {
		return at, fmt.Errorf("stream without an end or content")
	}
	return at, nil
}

// cpuTime is what the fleets' processes and ourselves have taken so far.
func cpuTime(fleets []*fleet) (sum time.Duration) {
	pids := []int{os.Getpid()}
	for _, f := range fleets {
		for _, p := range f.all {
			pids = append(pids, p.Pid())
		}
	}
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(b), ") ")
		f := strings.Fields(rest)
		for _, i := range []int{11, 12} { // utime, stime in ticks of 10 ms
			if n, err := strconv.Atoi(f[i]); err == nil {
				sum += time.Duration(n) * 10 * time.Millisecond
			}
		}
	}
	return sum
}
