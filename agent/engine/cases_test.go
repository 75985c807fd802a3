package engine

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// expectation is one file of testdata/cases/expected.json. Numbers may be "unknown", "keep-previous", or a range
// from the mean to the largest of several engines, of which this package takes the mean of vLLM's.
type expectation struct {
	SHA256          string   `json:"sha256"`
	Running         any      `json:"running"`
	Waiting         any      `json:"waiting"`
	KV              any      `json:"kv_use"`
	Tokens          *float64 `json:"generation_tokens"`
	AdaptersRunning []string `json:"adapters_running"`
	AdaptersWaiting []string `json:"adapters_waiting"`
	AdaptersMax     int      `json:"adapters_max"`
	ModelNames      []string `json:"model_names"`
	Strict          string   `json:"strict_go_text_parser"`
}

func expectations(t *testing.T) map[string]expectation {
	b, err := os.ReadFile("testdata/cases/expected.json")
	require.NoError(t, err)
	var all map[string]expectation
	require.NoError(t, json.Unmarshal(b, &all))
	require.Len(t, all, 16)
	return all
}

func caseFile(t *testing.T, name string) string {
	b, err := os.ReadFile(filepath.Join("testdata/cases", name))
	require.NoError(t, err)
	return string(b)
}

// kindOfCase is configured for nothing: it is what detection must say.
func kindOfCase(name string) Kind {
	switch name {
	case "llamacpp.txt":
		return LlamaCpp
	case "sglang-colon-names.txt":
		return SGLang
	case "tgi.txt":
		return TGI
	}
	return VLLM
}

// checkCase compares a reading with expected.json.
func checkCase(t *testing.T, name string, rd *Reading) {
	t.Helper()
	want, ok := expectations(t)[name]
	require.True(t, ok, name)
	check := func(field Field, want any) {
		got := rd.Field(field)
		switch w := want.(type) {
		case string:
			require.Equal(t, "unknown", w)
			assert.False(t, got.Value.OK, "%s: %s is unknown, got %v", name, field, got.Value.V)
			assert.NotEmpty(t, got.Why)
		case float64:
			assert.Equal(t, routing.Some(w), got.Value, "%s: %s (%s)", name, field, got.Why)
		case map[string]any:
			assert.InDelta(t, w["min"], got.Value.V, 1e-9, "%s: %s is the mean", name, field)
			assert.True(t, got.Value.OK)
		default:
			t.Fatalf("%s: %s: unexpected %T", name, field, want)
		}
	}
	check(FieldRunning, want.Running)
	check(FieldWaiting, want.Waiting)
	check(FieldKVUsed, want.KV)
	if want.Tokens != nil {
		check(FieldGenerationTokens, *want.Tokens)
	}
	if want.AdaptersMax > 0 {
		assert.Equal(t, Adapters{Known: true, Running: want.AdaptersRunning, Waiting: want.AdaptersWaiting,
			Max: routing.Some(want.AdaptersMax)}, rd.Adapters)
	}
}

func TestCasesEveryMetricsFile(t *testing.T) {
	for name, want := range expectations(t) {
		body := caseFile(t, name)
		sum := sha256.Sum256([]byte(body))
		require.Equal(t, want.SHA256, hex.EncodeToString(sum[:]), name)
		if want.Running == "keep-previous" {
			continue // TestC62
		}
		rd := readText(t, kindOfCase(name), body)
		checkCase(t, name, &rd)
		compare(t, filepath.Join("testdata/golden/cases", strings.TrimSuffix(name, ".txt")+".json"), printed(t, &rd, nil))

		_, _, err := bothWays(tableOf(kindOfCase(name)), []byte(body))
		assert.Equal(t, want.Strict == "accepts", err == nil, "%s: prometheus/common says %v", name, err)
		if ours, twin, err := bothWays(tableOf(kindOfCase(name)), []byte(body)); err == nil {
			assert.Equal(t, twin, ours, name)
		}
	}
}

func TestC50WedgedEngineShowsWaitingWorkAndStillCounters(t *testing.T) {
	f := newFake(t, map[string]page{"/metrics": text(caseFile(t, "wedged-1.txt"))})
	r := f.reader(t, VLLM)
	first, err := r.Read(t.Context())
	require.NoError(t, err)
	f.set("/metrics", text(caseFile(t, "wedged-2.txt")))
	second, err := r.Read(t.Context())
	require.NoError(t, err)

	var p Progress
	start := time.Now()
	assert.Zero(t, p.Observe(&first, start), "the first look cannot tell")
	assert.Equal(t, 30*time.Second, p.Observe(&second, start.Add(30*time.Second)), "work waits, nothing moved")

	moved := second
	moved.GenerationTokens.V++
	assert.Zero(t, p.Observe(&moved, start.Add(31*time.Second)))

	idle := moved
	idle.Waiting, idle.Running = routing.Some(0), routing.Some(0)
	p = Progress{}
	p.Observe(&idle, start)
	assert.Zero(t, p.Observe(&idle, start.Add(time.Hour)), "an idle engine is never stalled")

	unknown := Reading{}
	p = Progress{}
	p.Observe(&unknown, start)
	assert.Zero(t, p.Observe(&unknown, start.Add(time.Hour)), "nor one of which nothing is known")
}

func TestC56EnginesAreSummedInAnyOrder(t *testing.T) {
	lines := strings.SplitAfter(caseFile(t, "vllm-two-engines.txt"), "\n")
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		rnd.Shuffle(len(lines), func(i, j int) { lines[i], lines[j] = lines[j], lines[i] })
		rd := readText(t, VLLM, strings.Join(lines, ""))
		checkCase(t, "vllm-two-engines.txt", &rd)
	}
}

func TestC57AllNamesOfCacheUse(t *testing.T) {
	for _, name := range []string{"vllm-kv-old-name.txt", "vllm-kv-new-name.txt", "vllm-kv-both-names.txt"} {
		rd := readText(t, VLLM, caseFile(t, name))
		checkCase(t, name, &rd)
	}
	rd := readText(t, VLLM, "vllm:num_requests_running 1\n")
	assert.False(t, rd.KVUsed.OK)
	s := rd.Field(FieldKVUsed)
	assert.Equal(t, "not on the page", s.Why)
	assert.Equal(t, "vllm:kv_cache_usage_perc", s.Metric)
}

func TestC58NaNIsUnknownForItsFieldOnly(t *testing.T) {
	rd := readText(t, VLLM, caseFile(t, "nan-and-inf.txt"))
	checkCase(t, "nan-and-inf.txt", &rd)
	assert.Equal(t, routing.Some(77.0), rd.PrefixHits)
	assert.Equal(t, "not a finite number", rd.Field(FieldKVUsed).Why)

	for _, value := range []string{"NaN", "nan", "-nan", "+NaN", "Inf", "+Inf", "-Inf", "inf", "1e999", "-1", "1e300"} {
		rd := readText(t, VLLM, "vllm:num_requests_running "+value+"\nvllm:num_requests_waiting 2\n")
		assert.False(t, rd.Running.OK, value)
		assert.Equal(t, routing.Some(2), rd.Waiting, value)
	}
	for value, want := range map[string]routing.Opt[float64]{
		"42": {}, "-0.5": {}, "-1": {}, "1.0000001": routing.Some(1.0), "-1e-9": routing.Some(0.0), "1": routing.Some(1.0),
	} {
		rd := readText(t, VLLM, "vllm:kv_cache_usage_perc "+value+"\n")
		assert.Equal(t, want, rd.KVUsed, value)
	}
}

func TestC60EmptyPageIsUnknown(t *testing.T) {
	rd := readText(t, VLLM, "")
	for _, s := range rd.Fields() {
		assert.False(t, s.Value.OK, s.Field)
		assert.NotEmpty(t, s.Why, s.Field)
	}
}

func TestC61RepeatedTypeLines(t *testing.T) {
	rd := readText(t, VLLM, caseFile(t, "repeated-type-lines.txt"))
	checkCase(t, "repeated-type-lines.txt", &rd)
}

func TestC62CutPageIsThrownAway(t *testing.T) {
	cut := caseFile(t, "truncated.txt")
	for name, reply := range map[string]string{
		"content-length": fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s", len(cut)+200, cut),
		"chunked":        fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(cut), cut),
		"until close":    "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + cut,
	} {
		t.Run(name, func(t *testing.T) {
			whole := "vllm:num_requests_running 7\nvllm:num_requests_waiting 180\n"
			replies := make(chan string, 2)
			replies <- fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(whole), whole)
			replies <- reply
			r := New(Config{URL: rawServer(t, replies), Kind: VLLM})
			first, err := r.Read(t.Context())
			require.NoError(t, err)
			assert.Equal(t, routing.Some(180), first.Waiting)

			second, err := r.Read(t.Context())
			require.ErrorIs(t, err, ErrTruncated)
			assert.True(t, second.Stale)
			assert.Equal(t, routing.Some(180), second.Waiting, "never the 1 of the cut 18")
			assert.Equal(t, routing.Some(7), second.Running, "not the 4 before the cut either")
			assert.Equal(t, first.At, second.At, "the age keeps growing")
		})
	}
}

func TestC63ContentTypeDoesNotMatter(t *testing.T) {
	for _, ct := range []string{"text/plain; version=0.0.4", "text/plain; version=1.0.0; charset=utf-8",
		"application/openmetrics-text; version=1.0.0", "application/octet-stream", ""} {
		for _, name := range []string{"tricky-labels.txt", "openmetrics.txt"} {
			p := text(caseFile(t, name))
			p.header = http.Header{"Content-Type": {ct}}
			f := newFake(t, map[string]page{"/metrics": p})
			rd, err := f.reader(t, VLLM).Read(t.Context())
			require.NoError(t, err)
			checkCase(t, name, &rd)
		}
	}
}

func TestC64TrickyLabels(t *testing.T) {
	var found []string
	for _, line := range strings.Split(caseFile(t, "tricky-labels.txt"), "\n") {
		_, labels, ok := strings.Cut(line, "{")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		end := labelsEnd([]byte("{" + labels))
		require.Positive(t, end)
		raw, ok := findLabel([]byte("{" + labels)[1:end], "model_name")
		require.True(t, ok)
		if v := unescape(raw); len(found) == 0 || found[len(found)-1] != v {
			found = append(found, v)
		}
		assert.True(t, equalUnescaped(raw, unescape(raw)))
	}
	assert.Equal(t, expectations(t)["tricky-labels.txt"].ModelNames, found)
}

func TestC65OpenMetrics(t *testing.T) {
	rd := readText(t, VLLM, caseFile(t, "openmetrics.txt"))
	checkCase(t, "openmetrics.txt", &rd)
}

func TestC66OnlyTheListedPagesAreCalled(t *testing.T) {
	f := newFake(t, map[string]page{
		"/metrics":   captured(t, "pages/llamacpp-b11434/metrics-idle.txt"),
		"/slots":     captured(t, "pages/llamacpp-b11434/get_slots.txt"),
		"/health":    captured(t, "pages/llamacpp-b11434/get_health.txt"),
		"/v1/models": captured(t, "pages/llamacpp-b11434/get_v1_models.txt"),
	})
	r := f.reader(t, LlamaCpp)
	for range 10 {
		_, err := r.Read(t.Context())
		require.NoError(t, err)
		assert.Equal(t, Healthy, r.Health(t.Context()).State)
	}
	seen := map[string]int{}
	for _, c := range f.asked() {
		seen[c]++
	}
	assert.Equal(t, map[string]int{"GET /metrics": 10, "GET /props": 1, "GET /slots": 1, "GET /health": 10}, seen)
	for _, p := range llamacppTable.paths() {
		delete(seen, "GET "+p)
	}
	assert.Empty(t, seen, "all of them are in the table")

	off := New(Config{URL: f.url(t), Kind: LlamaCpp, MetricsURL: "off"})
	_, err := off.Read(t.Context())
	require.NoError(t, err)
	assert.Empty(t, f.asked(), "reading can be switched off")
}

func TestC67KindsAreFoundByTheirPages(t *testing.T) {
	for _, name := range []string{"sglang-colon-names.txt", "tgi.txt", "llamacpp.txt", "vllm-two-engines.txt"} {
		f := newFake(t, map[string]page{"/metrics": text(caseFile(t, name))})
		r := f.reader(t, Auto)
		rd, err := r.Read(t.Context())
		require.NoError(t, err)
		assert.Equal(t, kindOfCase(name), r.Kind())
		checkCase(t, name, &rd)
	}
}

func TestC110NewestAdapterSeriesDecides(t *testing.T) {
	rd := readText(t, VLLM, caseFile(t, "lora-info.txt"))
	checkCase(t, "lora-info.txt", &rd)
}

// rawServer answers each connection with the next reply, byte for byte, and closes it.
func rawServer(t *testing.T, replies <-chan string) *url.URL {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = c.Write([]byte(<-replies))
			}
			_ = c.Close()
		}
	}()
	return parseURL(t, "http://"+l.Addr().String())
}
