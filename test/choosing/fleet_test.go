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

// result is what the clients of one run saw.
type result struct {
	name   string
	ttft   []time.Duration // sorted
	errors int
	last   error
	cpu    float64 // share of two cores that all processes took, the clients included
}

func (r *result) mean() time.Duration {
	var sum time.Duration
	for _, d := range r.ttft {
		sum += d
	}
	return sum / time.Duration(max(1, len(r.ttft)))
}

func (r *result) p99() time.Duration {
	if len(r.ttft) == 0 {
		return 0
	}
	return r.ttft[min(len(r.ttft)-1, len(r.ttft)*99/100)]
}

// picker says to which URL a request goes; done is called with the time of its first content (zero: none) and its end.
type picker func(a arrival) (url string, first, done func())

// play sends each request at its time, whatever became of those before.
func play(t testing.TB, name string, list []arrival, pick picker, pids []int) *result {
	hc := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1000, DisableCompression: true, IdleConnTimeout: 3 * time.Second}}
	defer hc.CloseIdleConnections()
	r := &result{name: name}
	var mu sync.Mutex
	var wg sync.WaitGroup
	busy, start := cpuTime(pids), time.Now()
	for i, a := range list {
		body := chat(i, a)
		time.Sleep(time.Until(start.Add(time.Duration(a.At * float64(time.Second)))))
		wg.Go(func() {
			begin := time.Now()
			url, first, done := pick(a)
			at, err := ask(hc, url, body, first)
			done()
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				r.errors++
				r.last = err
				return
			}
			r.ttft = append(r.ttft, at.Sub(begin))
		})
	}
	wg.Wait()
	r.cpu = (cpuTime(pids) - busy).Seconds() / time.Since(start).Seconds() / 2
	slices.Sort(r.ttft)
	return r
}

// chat is the request's body. Prompts share no prefix.
func chat(i int, a arrival) []byte {
	text := fmt.Sprintf("%08d ", i) + strings.Repeat("word", max(0, a.Prompt-3))
	b, _ := json.Marshal(map[string]any{"model": harness.FakeModel, "stream": true, "max_tokens": a.Output, "ignore_eos": true,
		"messages": []map[string]string{{"role": "user", "content": text}}})
	return b
}

// ask sends one request and reads its stream to the end; it returns when the first content came.
func ask(hc *http.Client, url string, body []byte, first func()) (at time.Time, err error) {
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
			first()
		}
		done = done || bytes.Equal(line, []byte("data: [DONE]"))
	}
	if !done || at.IsZero() {
		return at, fmt.Errorf("stream without an end or content")
	}
	return at, nil
}

// cpuTime is what the processes and ourselves have taken so far.
func cpuTime(pids []int) (sum time.Duration) {
	for _, pid := range append([]int{os.Getpid()}, pids...) {
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

// fleet is fresh engines, and agents beside them if env is not nil.
func fleet(t testing.TB, env harness.Env) (engineURLs, agentURLs []string, pids []int, stop func()) {
	s := harness.New(t)
	var all []*harness.Process
	for i := range engines {
		e := s.FakeEngine(i+1, "-slots", fmt.Sprint(slots), "-prefill-rate", fmt.Sprint(prefillRate), "-decode-step", decodeStep.String())
		engineURLs = append(engineURLs, e.URL)
		all = append(all, e.Process)
	}
	if env != nil {
		for _, a := range s.Mesh(engineURLs, env) {
			agentURLs = append(agentURLs, a.URL)
			all = append(all, a.Process)
		}
	}
	for _, p := range all {
		pids = append(pids, p.Pid())
	}
	return engineURLs, agentURLs, pids, func() {
		for _, p := range all {
			p.Kill()
		}
	}
}
