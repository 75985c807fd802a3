package engine

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

func TestScannerOddPages(t *testing.T) {
	const running, waiting = "vllm:num_requests_running", "vllm:num_requests_waiting"
	for name, c := range map[string]struct {
		page             string
		running, waiting routing.Opt[int]
		bad              int
	}{
		"byte order mark":     {"\xef\xbb\xbf" + running + " 1\n", routing.Some(1), routing.Opt[int]{}, 0},
		"no final newline":    {running + " 1\n" + waiting + " 2", routing.Some(1), routing.Some(2), 0},
		"carriage returns":    {running + " 1\r\n" + waiting + "{a=\"b\"} 2\r\n", routing.Some(1), routing.Some(2), 0},
		"trailing blanks":     {running + " 1 \t \n" + waiting + "\t2  \n", routing.Some(1), routing.Some(2), 0},
		"leading blanks":      {"  " + running + " 1\n", routing.Some(1), routing.Opt[int]{}, 0},
		"timestamp":           {running + " 1 1700000000000\n", routing.Some(1), routing.Opt[int]{}, 0},
		"exemplar":            {running + ` 1 # {trace_id="x"} 5 17.5` + "\n", routing.Some(1), routing.Opt[int]{}, 0},
		"exponent":            {running + " 1.2e+01\n", routing.Some(12), routing.Opt[int]{}, 0},
		"the same line twice": {running + `{a="1",b="2"} 3` + "\n" + running + `{b="2",a="1"} 4` + "\n", routing.Some(4), routing.Opt[int]{}, 0},
		"quoted name":         {`{"` + running + `",engine="0"} 3` + "\n", routing.Some(3), routing.Opt[int]{}, 0},
		"quoted label":        {running + `{"eng.ine"="0",} 3` + "\n", routing.Some(3), routing.Opt[int]{}, 0},
		"brace in a value":    {running + `{m="} 9\" {"} 3` + "\n", routing.Some(3), routing.Opt[int]{}, 0},
		"longer name":         {running + "_total 7\n" + running + " 1\n", routing.Some(1), routing.Opt[int]{}, 0},
		"no value":            {running + "\n" + running + `{a="b"}` + "\n" + waiting + " 2\n", routing.Opt[int]{}, routing.Some(2), 2},
		"words for a value":   {running + " many\n" + waiting + " 2\n", routing.Opt[int]{}, routing.Some(2), 1},
		"hexadecimal":         {running + " 0x10\n", routing.Opt[int]{}, routing.Opt[int]{}, 1},
		"unclosed label":      {running + `{a="b 1` + "\n" + waiting + " 2\n", routing.Opt[int]{}, routing.Some(2), 1},
		"end mark":            {running + " 1\n# EOF \n" + running + " 5\n", routing.Some(1), routing.Opt[int]{}, 0},
		"end mark in a word":  {running + " 1\n# EOFx\n" + waiting + " 5\n", routing.Some(1), routing.Some(5), 0},
		"one engine is NaN":   {running + `{e="0"} NaN` + "\n" + running + `{e="1"} 5` + "\n", routing.Some(5), routing.Opt[int]{}, 0},
		"binary":              {"\x00\x01\x02{{{\n" + running + " 1\n", routing.Some(1), routing.Opt[int]{}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, map[string]page{"/metrics": text(c.page)})
			r := f.reader(t, VLLM)
			rd, err := r.Read(t.Context())
			require.NoError(t, err)
			assert.Equal(t, c.running, rd.Running)
			assert.Equal(t, c.waiting, rd.Waiting)
			assert.Equal(t, c.bad, r.Problems())
		})
	}
}

func TestExpfmtIsTheFallback(t *testing.T) {
	s := newScanner()
	s.add("up", &Term{Names: []string{"up"}})
	s.read([]byte("up 1\n"))
	assert.Equal(t, []int{1, 0}, []int{s.hits, s.bad})
	// Nothing but a line beyond the scanner: the fallback has its turn, and the problem stays counted.
	s.read([]byte("up{a=b} 1\n"))
	assert.Equal(t, []int{0, 1}, []int{s.hits, s.bad})
}

// vLLM, SGLang and others: the folds that the research names.
func TestFolds(t *testing.T) {
	t.Run("vllm data parallel", func(t *testing.T) {
		rd := readText(t, VLLM, `vllm:cache_config_info{engine="0",num_gpu_blocks="160",block_size="32",kv_cache_size_tokens="2560"} 1
vllm:cache_config_info{engine="1",num_gpu_blocks="160",block_size="32",kv_cache_size_tokens="2560"} 1
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 0
vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0
vllm:engine_sleep_state{engine="1",sleep_state="weights_offloaded"} 1
`)
		assert.Equal(t, routing.Some(5120), rd.KVCapacity, "160 blocks are the total of both engines, the tokens are each engine's")
		assert.Equal(t, routing.Some(true), rd.Asleep)
	})
	t.Run("vllm blocks are not summed", func(t *testing.T) {
		rd := readText(t, VLLM, `vllm:cache_config_info{engine="0",num_gpu_blocks="160",block_size="32",kv_cache_size_tokens="None"} 1
vllm:cache_config_info{engine="1",num_gpu_blocks="160",block_size="32",kv_cache_size_tokens="None"} 1
`)
		assert.Equal(t, routing.Some(5120), rd.KVCapacity)
	})
	t.Run("vllm V0 hit rate", func(t *testing.T) {
		assert.False(t, readText(t, VLLM, "vllm:gpu_prefix_cache_hit_rate -1\n").PrefixHitRate.OK)
		assert.Equal(t, routing.Some(0.5), readText(t, VLLM, "vllm:gpu_prefix_cache_hit_rate 0.5\n").PrefixHitRate)
	})
	t.Run("sglang ranks and priorities", func(t *testing.T) {
		var b strings.Builder
		for dp := range 2 {
			for tp := range 4 {
				for _, prio := range []struct {
					label string
					n     int
				}{{"", 3 + dp}, {"0", 1}, {"5", 2 + dp}} {
					fmt.Fprintf(&b, "sglang:num_running_reqs{dp_rank=\"%d\",tp_rank=\"%d\",priority=%q} %d\n", dp, tp, prio.label, prio.n)
				}
			}
			fmt.Fprintf(&b, "sglang:token_usage{dp_rank=\"%d\"} 0.%d\nsglang:num_queue_reqs{dp_rank=\"%d\"} NaN\n", dp, dp+2, dp)
		}
		rd := readText(t, SGLang, b.String())
		assert.Equal(t, routing.Some(7), rd.Running)
		assert.InDelta(t, 0.25, rd.KVUsed.V, 1e-9)
		assert.Equal(t, "not a finite number", rd.Field(FieldWaiting).Why)
	})
	t.Run("dynamo", func(t *testing.T) {
		rd := readText(t, Dynamo, `dynamo_frontend_active_requests{model="m"} 5
dynamo_frontend_active_requests{model="unknown_model"} 50
dynamo_frontend_inflight_requests{model="m"} 6
dynamo_frontend_queued_requests{model="m"} 2
dynamo_frontend_model_total_kv_blocks{model="m"} 100
dynamo_frontend_model_kv_cache_block_size{model="m"} 16
`)
		assert.Equal(t, routing.Some(3), rd.Running)
		assert.Equal(t, routing.Some(2), rd.Waiting)
		assert.Equal(t, routing.Some(1600), rd.KVCapacity)
	})
	t.Run("lmdeploy queues add up", func(t *testing.T) {
		rd := readText(t, LMDeploy, "lmdeploy:num_requests_waiting 2\nlmdeploy:num_api_requests_waiting 3\n")
		assert.Equal(t, routing.Some(5), rd.Waiting)
		rd = readText(t, LMDeploy, "lmdeploy:num_requests_waiting 2\n")
		assert.Equal(t, routing.Some(2), rd.Waiting, "an older version has one of them")
		rd = readText(t, LMDeploy, "lmdeploy:num_requests_waiting 2\nlmdeploy:num_api_requests_waiting NaN\n")
		assert.False(t, rd.Waiting.OK, "NaN is not nothing")
	})
	t.Run("two gauges of different instants", func(t *testing.T) {
		rd := readText(t, Dynamo, "dynamo_frontend_active_requests 1\ndynamo_frontend_queued_requests 2\n")
		assert.Equal(t, routing.Some(0), rd.Running, "never negative")
	})
	t.Run("older triton", func(t *testing.T) {
		rd := readText(t, Triton, `nv_trt_llm_request_metrics{request_type="scheduled"} 20
nv_trt_llm_request_metrics{request_type="active"} 21
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"} 10
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 40
`)
		assert.Equal(t, routing.Some(1), rd.Waiting)
		assert.Equal(t, routing.Some(0.25), rd.KVUsed)
	})
	t.Run("division by zero", func(t *testing.T) {
		rd := readText(t, TGI, "tgi_batch_current_max_tokens 0\ntgi_batch_max_total_tokens 0\n")
		assert.False(t, rd.KVUsed.OK)
		assert.Equal(t, "divided by zero", rd.Field(FieldKVUsed).Why)
	})
	t.Run("newer NIM", func(t *testing.T) {
		rd := readText(t, NIM, "vllm:num_requests_running 4\nvllm:kv_cache_usage_perc 0.5\n")
		assert.Equal(t, routing.Some(4), rd.Running)
		assert.Equal(t, routing.Some(0.5), rd.KVUsed)
	})
}

// Random pages of a regular form: the scanner and expfmt must agree, whatever stands in labels.
func TestTwinOnRandomPages(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	names := []string{"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
		"vllm:generation_tokens_total", "other", "vllm:cache_config_info", "vllm:engine_sleep_state"}
	labelNames := []string{"engine", "model_name", "sleep_state", "num_gpu_blocks", "block_size"}
	values := []string{"0", "1", "awake", "160", "a}b{", `q\"q`, `\\`, `\n`, "模型", "", "# x", "16"}
	for range 300 {
		var b strings.Builder
		for _, name := range names {
			fmt.Fprintf(&b, "# HELP %s text \\\\ \\n {\n# TYPE %s gauge\n", name, name)
			for range rnd.IntN(4) {
				b.WriteString(name)
				var labels []string
				for _, l := range labelNames {
					if rnd.IntN(2) == 0 {
						labels = append(labels, fmt.Sprintf(`%s="%s"`, l, values[rnd.IntN(len(values))]))
					}
				}
				if len(labels) > 0 {
					b.WriteString("{" + strings.Join(labels, ",") + "}")
				}
				v := []string{"0", "1", "0.25", "NaN", "+Inf", "-1", "17", "1e3"}[rnd.IntN(8)]
				fmt.Fprintf(&b, " %s\n", v)
			}
		}
		ours, twin, err := bothWays(&vllmTable, []byte(b.String()))
		require.NoError(t, err, b.String())
		require.Equal(t, len(twin), len(ours))
		for i := range ours {
			if !closeTo(ours[i], twin[i]) {
				t.Fatalf("%+v, twin %+v\n%s", ours[i], twin[i], b.String())
			}
		}
	}
}

// closeTo allows for sums in another order.
func closeTo(a, b result) bool {
	return a.ok == b.ok && a.why == b.why && a.metric == b.metric && math.Abs(a.value-b.value) <= 1e-9*math.Abs(b.value)
}

func FuzzScanner(f *testing.F) {
	files, _ := filepath.Glob("testdata/cases/*.txt")
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"vllm:num_requests_running",a="\"} 1` + "\n"))
	f.Fuzz(func(t *testing.T, page []byte) {
		for _, table := range []*Table{&vllmTable, &sglangTable} {
			ours, twin, err := bothWays(table, page)
			for _, res := range ours {
				if !res.ok {
					require.NotEqual(t, whyKnown, res.why)
					continue
				}
				require.False(t, math.IsNaN(res.value) || math.IsInf(res.value, 0) || res.value < 0)
			}
			if err == nil && regular(string(page)) {
				for i := range ours {
					require.True(t, closeTo(ours[i], twin[i]), "%+v, twin %+v", ours[i], twin[i])
				}
			}
		}
		r := &Reader{}
		st := r.newState(&llamacppTable)
		_ = st.page("slots").scanner.scanJSON(page)
	})
}

// regular tells whether the twin must agree: it reads on behind # EOF, and takes histograms apart by their TYPE.
func regular(page string) bool {
	return !strings.Contains(page, "# EOF") && !strings.Contains(page, "histogram") && !strings.Contains(page, "summary") &&
		!strings.Contains(page, "#\t")
}

func loadPage(tb testing.TB) []byte {
	return captured(tb, "pages/vllm-0.32.0/metrics-busy.txt").body
}

func TestScanAllocatesNothing(t *testing.T) {
	body := loadPage(t)
	st := (&Reader{}).newState(&vllmTable)
	p := st.page(mainPage)
	n := testing.AllocsPerRun(100, func() {
		p.scanner.read(body)
		for _, i := range p.entries {
			st.results[i] = st.compiled[i].evaluate(p.scanner.wants)
		}
	})
	assert.Zero(t, n)
	assert.Equal(t, 3.0, st.results[p.entries[0]].value)
}

func BenchmarkScrapeScanner(b *testing.B) {
	body := loadPage(b)
	st := (&Reader{}).newState(&vllmTable)
	p := st.page(mainPage)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		p.scanner.read(body)
		for _, i := range p.entries {
			st.results[i] = st.compiled[i].evaluate(p.scanner.wants)
		}
	}
}

func BenchmarkScrapeExpfmt(b *testing.B) {
	body := loadPage(b)
	st := (&Reader{}).newState(&vllmTable)
	p := st.page(mainPage)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if err := p.scanner.scanExpfmt(body); err != nil {
			b.Fatal(err)
		}
		for _, i := range p.entries {
			st.results[i] = st.compiled[i].evaluate(p.scanner.wants)
		}
	}
}
