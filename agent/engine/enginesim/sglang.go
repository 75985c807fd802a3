package enginesim

import (
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// sglang speaks like SGLang 0.5.23. Its pages follow captures made with the engine's own collector; its chunks follow the
// source of entrypoints/openai/protocol.py, for no SGLang server could be run.
type sglang struct{ s *Server }

func (sglang) name() string        { return "sglang" }
func (sglang) finishInDelta() bool { return false }
func (sglang) lateHeader() bool    { return false }
func (sglang) opensFinal() bool    { return false }
func (sglang) repeatsPrefix() bool { return false }
func (sglang) checksModel() bool   { return false }
func (sglang) ignoresClose() bool  { return false }
func (sglang) defaultMax() int     { return 16 }

func (sglang) header(h http.Header, _ int) { h.Set("Server", "uvicorn") }

// choice is one chunk with one choice; text and role are JSON values.
func (d sglang) choice(b []byte, a *answer, role, text, finish string) []byte {
	return event(b, func(b []byte) []byte {
		b = appendInt(append(openChunk(b, a), `"choices":[{`...), "index", a.index)
		if a.chat {
			b = append(b, `,"delta":{"role":`+role+`,"content":`+text+`,"reasoning_content":null,"tool_calls":null}`...)
		} else {
			b = append(b, `,"text":`+text...)
		}
		b = append(b, `,"logprobs":null,"finish_reason":`+finish+`,"matched_stop":null}],`...)
		if a.running {
			return append(d.counts(b, a), '}')
		}
		return append(b, `"usage":null}`...)
	})
}

func (d sglang) role(b []byte, a *answer) []byte {
	return d.choice(b, a, `"assistant"`, `""`, "null")
}

func (d sglang) delta(b []byte, a *answer, text, finish string) []byte {
	f := "null"
	if finish != "" {
		f = strconv.Quote(finish)
	}
	return d.choice(b, a, "null", string(appendString(nil, text)), f)
}

func (d sglang) finish(b []byte, a *answer, reason string) []byte {
	text := "null"
	if !a.chat {
		text = `""`
	}
	return d.choice(b, a, "null", text, strconv.Quote(reason))
}

func (sglang) counts(b []byte, a *answer) []byte {
	b = appendInt(append(b, `"usage":{`...), "prompt_tokens", a.prompt)
	b = appendInt(append(b, ','), "total_tokens", a.prompt+a.output)
	b = appendInt(append(b, ','), "completion_tokens", a.output)
	if a.hide {
		b = append(b, `,"prompt_tokens_details":null`...)
	} else {
		b = append(appendInt(append(b, `,"prompt_tokens_details":{`...), "cached_tokens", a.cached), '}')
	}
	return append(b, `,"reasoning_tokens":0}`...)
}

func (d sglang) usage(b []byte, a *answer) []byte {
	return event(b, func(b []byte) []byte { return append(d.counts(append(openChunk(b, a), `"choices":[],`...), a), '}') })
}

func (d sglang) whole(b []byte, a *answer, choices []choice) []byte {
	object := "chat.completion"
	if !a.chat {
		object = "text_completion"
	}
	b = append(openHead(b, a, object), `"choices":[`...)
	for i, c := range choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendInt(append(b, '{'), "index", i)
		if a.chat {
			b = appendField(append(b, `,"message":{"role":"assistant",`...), "content", c.text)
			b = append(b, `,"reasoning_content":null,"tool_calls":null}`...)
		} else {
			b = appendField(append(b, ','), "text", c.text)
		}
		b = appendField(append(b, `,"logprobs":null,`...), "finish_reason", c.finish)
		b = append(b, `,"matched_stop":null}`...)
	}
	return append(d.counts(append(b, `],`...), a), `,"metadata":{"weight_version":"default"}}`...)
}

func (d sglang) problem(p problem) (int, []byte) {
	flat := func(status int, typ, message string) (int, []byte) {
		b := appendField([]byte(`{"object":"error",`), "message", message)
		b = appendField(append(b, ','), "type", typ)
		return status, append(appendInt(append(b, `,"param":null,`...), "code", status), '}')
	}
	switch p.kind {
	case badJSON, missingField:
		return flat(400, "Bad Request", "[{'type': 'missing', 'loc': ('body', '"+p.param+"'), 'msg': 'Field required'}]")
	case badValue:
		return flat(400, "BadRequestError", p.detail)
	case mediaType:
		return flat(400, "Bad Request", "Unsupported Media Type: Only 'application/json' is allowed")
	case promptTooLong:
		return flat(400, "BadRequestError", fmt.Sprintf("The input (%d tokens) is longer than the model's context length (%d tokens).", p.tokens, d.s.params.Context))
	case outputTooLong:
		return flat(400, "BadRequestError", fmt.Sprintf("Requested token count exceeds the model's maximum context length of %d tokens.", d.s.params.Context))
	case queueFull:
		return flat(503, "service_unavailable", "The request queue is full.")
	case loading, shuttingDown:
		return flat(503, "service_unavailable", "The server is not ready.")
	case notFound:
		return 404, statusDetail(404)
	case wrongMethod:
		return 405, statusDetail(405)
	case unauthorized:
		return 401, []byte(`{"error":"Unauthorized"}`)
	}
	return flat(500, "InternalServerError", "Internal server error")
}

func (d sglang) models() []byte {
	b := []byte(`{"object":"list","data":[`)
	for i, id := range d.s.names() {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendField(append(b, '{'), "id", id)
		b = appendInt(append(b, `,"object":"model",`...), "created", int(d.s.origin.Unix()))
		b = appendField(append(b, `,"owned_by":"sglang",`...), "root", d.s.cfg.Model)
		b = append(appendInt(append(b, `,"parent":null,`...), "max_model_len", d.s.params.Context), '}')
	}
	return append(b, `]}`...)
}

func (d sglang) routes() map[string]route {
	return map[string]route{
		"/health_generate": {"GET", d.s.health},
		"/ready":           {"GET", d.s.health},
		"/v1/loads":        {"GET", d.loads},
		"/server_info":     {"GET", d.s.page(func() []byte { return []byte(`{"version":"0.5.23","status":"ready"}`) })},
	}
}

// loads is the cheap load page, JSON or metrics text.
func (d sglang) loads(w http.ResponseWriter, r *http.Request) {
	st, _, _ := d.s.sample()
	share := float64(st.KVUsed) / float64(d.s.params.KVTokens)
	if r.URL.Query().Get("format") == "prometheus" {
		p := page{float: true}
		p.one("sglang_num_running_reqs", "gauge", "Running requests.", `dp_rank="0"`, float64(st.Running))
		p.one("sglang_num_waiting_reqs", "gauge", "Waiting requests.", `dp_rank="0"`, float64(st.Waiting))
		p.one("sglang_token_usage", "gauge", "Token usage.", `dp_rank="0"`, share)
		d.s.reply(w, 200, "text/plain; charset=utf-8", p.b)
		return
	}
	now := time.Now()
	d.s.reply(w, 200, "application/json", fmt.Appendf(nil, `{"timestamp":%q,"version":"0.5.23","accelerator":"NVIDIA H200","num_accelerators":1,"loads":[{"timestamp":%.2f,"dp_rank":0,"num_running_reqs":%d,"num_waiting_reqs":%d,"num_waiting_uncached_tokens":%d,"num_used_tokens":%d,"num_total_tokens":%d,"num_active_tokens":%d,"max_total_num_tokens":%d,"max_running_requests":%d,"token_usage":%.4f,"gen_throughput":0.0,"cache_hit_rate":%.4f,"utilization":0.0,"total_prefill_uncached_tokens":%d,"queues":{"waiting":%d,"grammar":0,"paused":0,"retracted":0,"prealloc_ready":0}}]}`,
		now.UTC().Format("2006-01-02T15:04:05.000000+00:00"), float64(now.UnixMilli())/1000, st.Running, st.Waiting, st.Pending, st.KVUsed, st.KVUsed+st.Pending, st.KVUsed,
		d.s.params.KVTokens, d.s.params.Slots, share, hitRate(st.Counters), st.Prefilled, st.Waiting))
}

func hitRate(c Counters) float64 {
	if c.Queried == 0 {
		return 0
	}
	return float64(c.Cached) / float64(c.Queried)
}

func (d sglang) metrics() []byte {
	st, seen, _ := d.s.sample()
	l := `engine_type="unified",model_name="` + d.s.cfg.Model + `",moe_ep_rank="0",pp_rank="0",tp_rank="0"`
	p := page{float: true}
	p.process(d.s.bornAt())
	gauge := func(name, help string, v float64) { p.one("sglang:"+name, "gauge", help, l, v) }
	gauge("num_running_reqs", "The number of running requests.", float64(st.Running))
	gauge("num_queue_reqs", "The number of requests in the waiting queue.", float64(st.Waiting))
	gauge("num_grammar_queue_reqs", "The number of requests in the grammar waiting queue.", 0)
	gauge("cache_hit_rate", "The prefix cache hit rate.", hitRate(st.Counters))
	gauge("token_usage", "The token usage.", float64(st.KVUsed)/float64(d.s.params.KVTokens))
	gauge("num_used_tokens", "The number of used tokens.", float64(st.KVUsed))
	gauge("kv_available_tokens", "Number of free token slots in the KV cache pool.", float64(d.s.params.KVTokens-st.KVUsed-st.KVIdle))
	gauge("kv_evictable_tokens", "Number of evictable (radix-cached) token slots in the KV cache pool.", float64(st.KVIdle))
	gauge("kv_used_tokens", "Number of actively used token slots in the KV cache pool.", float64(st.KVUsed))
	gauge("num_retracted_reqs", "The number of retracted requests.", float64(st.Preempted))
	gauge("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", float64(d.s.params.KVTokens))
	gauge("page_size", "KV cache page size in tokens.", 1)
	p.one("sglang:num_retracted_requests_total", "counter", "Total number of retracted requests.", l, float64(st.Preemptions))
	p.one("sglang:prompt_tokens_total", "counter", "Number of prefill tokens processed.", l, float64(st.Prefilled+st.Cached))
	p.one("sglang:generation_tokens_total", "counter", "Number of generation tokens processed.", l, float64(st.Generated))
	p.one("sglang:cached_tokens_total", "counter", "Number of cached prompt tokens.", l, float64(st.Cached))
	p.one("sglang:num_requests_total", "counter", "Number of requests processed.", l, float64(st.Done))
	p.histogram("sglang:time_to_first_token_seconds", "Histogram of time to first token in seconds.", l, &seen.ttft)
	p.histogram("sglang:e2e_request_latency_seconds", "Histogram of End-to-end request latency in seconds", l, &seen.e2e)
	return p.b
}
