package enginesim

import (
	"fmt"
	"net/http"
	"strconv"
)

// vllm speaks like vLLM 0.32.0 (V1 engine, one API process).
type vllm struct{ s *Server }

const vllmFingerprint = `"system_fingerprint":"vllm-0.32.0-24e078fe"`

func (vllm) name() string        { return "vllm" }
func (vllm) finishInDelta() bool { return true }
func (vllm) lateHeader() bool    { return false }
func (vllm) opensFinal() bool    { return false }
func (vllm) repeatsPrefix() bool { return false }
func (vllm) checksModel() bool   { return true }
func (vllm) ignoresClose() bool  { return false }
func (vllm) defaultMax() int     { return 16 }

func (vllm) header(h http.Header, _ int) {
	h.Set("Server", "uvicorn")
	h.Set("Vary", "Origin")
}

// openHead begins an answer in the order of fields that vLLM and SGLang share.
func openHead(b []byte, a *answer, object string) []byte {
	b = appendField(append(b, '{'), "id", a.id)
	b = appendField(append(b, ','), "object", object)
	b = appendInt(append(b, ','), "created", int(a.created))
	return append(appendField(append(b, ','), "model", a.model), ',')
}

// openChunk begins a chunk of a stream as openHead does an answer.
func openChunk(b []byte, a *answer) []byte {
	if a.chat {
		return openHead(b, a, "chat.completion.chunk")
	}
	return openHead(b, a, "text_completion")
}

func (d vllm) role(b []byte, a *answer) []byte {
	return event(b, func(b []byte) []byte {
		b = append(openChunk(b, a), `"choices":[{`...)
		b = appendInt(b, "index", a.index)
		b = append(b, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],`...)
		if a.running {
			b = append(d.counts(b, a, `"completion_tokens_details":null`), ',')
		}
		return append(b, `"prompt_token_ids":null,"prompt_text":null}`...)
	})
}

func (d vllm) delta(b []byte, a *answer, text, finish string) []byte {
	return event(b, func(b []byte) []byte {
		b = appendInt(append(openChunk(b, a), `"choices":[{`...), "index", a.index)
		if a.chat {
			b = append(appendField(append(b, `,"delta":{`...), "content", text), '}')
		} else {
			b = appendField(append(b, ','), "text", text)
		}
		b = append(b, `,"logprobs":null,`...)
		switch {
		case finish == "":
			b = append(b, `"finish_reason":null`...)
		default:
			b = appendField(b, "finish_reason", finish)
		}
		if finish != "" || !a.chat {
			b = append(b, `,"stop_reason":null`...)
		}
		if !a.chat {
			b = append(b, `,"prompt_token_ids":null`...)
		}
		b = append(b, `,"token_ids":null}]`...)
		if a.running {
			b = d.counts(append(b, ','), a, `"completion_tokens_details":null`)
		}
		if finish == "abort" {
			b = append(append(b, ','), vllmFingerprint...)
		}
		return append(b, '}')
	})
}

func (d vllm) finish(b []byte, a *answer, reason string) []byte { return d.delta(b, a, "", reason) }

// counts is the usage object.
func (vllm) counts(b []byte, a *answer, details string) []byte {
	b = appendInt(append(b, `"usage":{`...), "prompt_tokens", a.prompt)
	b = appendInt(append(b, ','), "total_tokens", a.prompt+a.output)
	b = appendInt(append(b, ','), "completion_tokens", a.output)
	return append(append(append(b, ','), details...), '}')
}

func (vllm) details(a *answer, more string) string {
	if a.hide {
		return `"prompt_tokens_details":null`
	}
	return `"prompt_tokens_details":{"cached_tokens":` + strconv.Itoa(a.cached) + more + `}`
}

func (d vllm) usage(b []byte, a *answer) []byte {
	more := ""
	if a.chat {
		more = `,"created_cache_tokens":0`
	}
	return event(b, func(b []byte) []byte {
		b = d.counts(append(openChunk(b, a), `"choices":[],`...), a, d.details(a, more))
		return append(append(append(b, ','), vllmFingerprint...), '}')
	})
}

func (d vllm) whole(b []byte, a *answer, choices []choice) []byte {
	object, created := "chat.completion", "0"
	if !a.chat {
		object, created = "text_completion", "null"
	}
	b = append(openHead(b, a, object), `"choices":[`...)
	for i, c := range choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendInt(append(b, '{'), "index", i)
		if a.chat {
			b = appendField(append(b, `,"message":{"role":"assistant",`...), "content", c.text)
			b = append(b, `,"refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,`...)
			b = appendField(b, "finish_reason", c.finish)
			b = append(b, `,"stop_reason":null,"token_ids":null,"routed_experts":null}`...)
		} else {
			b = appendField(append(b, ','), "text", c.text)
			b = appendField(append(b, `,"logprobs":null,`...), "finish_reason", c.finish)
			b = append(b, `,"stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}`...)
		}
	}
	b = append(append(append(b, `],"service_tier":null,`...), vllmFingerprint...), ',')
	b = d.counts(b, a, d.details(a, `,"created_cache_tokens":`+created+`,"multimodal_tokens":null`)+`,"completion_tokens_details":null`)
	if a.chat {
		b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null`...)
	}
	return append(b, `,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`...)
}

func (d vllm) problem(p problem) (int, []byte) {
	bad := func(message, typ, param string) (int, []byte) { return 400, openAIError(message, typ, param, 400) }
	switch p.kind {
	case badJSON:
		return bad("1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.0', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {'error': '"+p.detail+"'}}", "Bad Request", "body.0")
	case missingField:
		return bad("1 validation error:\n  {'type': 'missing', 'loc': 'body."+p.param+"', 'msg': 'Field required', 'input': '<dict of 0 items>'}", "Bad Request", "body."+p.param)
	case mediaType:
		return bad("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request", "")
	case badValue:
		return bad(p.detail, "BadRequestError", p.param)
	case unknownModel:
		return 404, openAIError(fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", p.detail, d.s.cfg.Model), "NotFoundError", "model", 404)
	case promptTooLong:
		return bad(fmt.Sprintf("This model's maximum context length is %d tokens. However, your prompt contains at least %d input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%d)",
			d.s.params.Context, d.s.params.Context+1, d.s.params.Context+1), "BadRequestError", "input_tokens") // it stops counting there
	case outputTooLong:
		return bad(fmt.Sprintf("max_tokens=%d cannot be greater than max_model_len=%d. Please request fewer output tokens. (parameter=max_tokens, value=%d)",
			p.tokens, d.s.params.Context, p.tokens), "BadRequestError", "max_tokens")
	case queueFull:
		return 503, openAIError("The engine is currently busy and cannot accept new requests. Please try again later.", "Service Unavailable", "", 503)
	case loading:
		return 503, openAIError("The engine is loading.", "Service Unavailable", "", 503)
	case shuttingDown:
		return 500, openAIError("cannot schedule new futures after shutdown", "InternalServerError", "", 500)
	case engineDead:
		return 500, openAIError("EngineCore encountered an issue. See stack trace (above) for the root cause.", "InternalServerError", "", 500)
	case unauthorized:
		return 401, []byte(`{"error":"Unauthorized"}`)
	case notFound:
		return 404, statusDetail(404)
	case wrongMethod:
		return 405, statusDetail(405)
	}
	return 500, openAIError("Internal Server Error", "InternalServerError", "", 500)
}

func (d vllm) models() []byte {
	b := []byte(`{"object":"list","data":[`)
	for i, id := range d.s.names() {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendField(append(b, '{'), "id", id)
		b = appendInt(append(b, `,"object":"model",`...), "created", int(d.s.origin.Unix()))
		b = appendField(append(b, `,"owned_by":"vllm",`...), "root", "/models/"+d.s.cfg.Model)
		b = appendInt(append(b, `,"parent":null,`...), "max_model_len", d.s.params.Context)
		b = append(b, `,"permission":[{"id":"modelperm-9b75ad89f749fdfa","object":"model_permission",`...)
		b = appendInt(b, "created", int(d.s.origin.Unix()))
		b = append(b, `,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}`...)
	}
	return append(b, `]}`...)
}

func (d vllm) routes() map[string]route {
	return map[string]route{
		"/ping":        {"GET", d.s.health},
		"/version":     {"GET", d.s.page(func() []byte { return []byte(`{"version":"0.32.0"}`) })},
		"/load":        {"GET", d.s.page(func() []byte { return append(appendInt([]byte{'{'}, "server_load", d.s.Stats().Calls), '}') })},
		"/is_sleeping": {"GET", d.s.page(func() []byte { return []byte(`{"is_sleeping":` + strconv.FormatBool(d.s.active("sleep")) + `}`) })},
	}
}

func (d vllm) metrics() []byte {
	st, seen, asleep := d.s.sample()
	l := `engine="0",model_name="` + d.s.cfg.Model + `"`
	p := page{float: true}
	capacity := 0
	if st.Waiting > 0 {
		capacity = st.Waiting
	}
	p.process(d.s.bornAt())
	p.one("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", l, float64(st.Running))
	p.one("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", l, float64(st.Waiting))
	p.head("vllm:num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.")
	p.row("vllm:num_requests_waiting_by_reason", l+`,reason="capacity"`, float64(capacity))
	p.row("vllm:num_requests_waiting_by_reason", l+`,reason="deferred"`, 0)
	p.head("vllm:engine_sleep_state", "gauge", "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake.")
	p.row("vllm:engine_sleep_state", l+`,sleep_state="awake"`, bit(!asleep))
	p.row("vllm:engine_sleep_state", l+`,sleep_state="weights_offloaded"`, bit(asleep))
	p.row("vllm:engine_sleep_state", l+`,sleep_state="discard_all"`, 0)
	p.one("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", l, float64(st.KVUsed)/float64(d.s.params.KVTokens))
	counter := func(name, help string, v uint64) {
		p.one("vllm:"+name+"_total", "counter", help, l, float64(v))
	}
	counter("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", st.Queried)
	counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", st.Cached)
	counter("num_preemptions", "Cumulative number of preemption from the engine.", st.Preemptions)
	counter("prompt_tokens", "Number of prefill tokens processed.", st.Prefilled+st.Cached)
	counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", st.Cached)
	counter("generation_tokens", "Number of generation tokens processed.", st.Generated)
	p.head("vllm:request_success_total", "counter", "Count of successfully processed requests.")
	for _, reason := range []string{"stop", "length", "abort", "error", "repetition"} {
		p.row("vllm:request_success_total", `engine="0",finished_reason="`+reason+`",model_name="`+d.s.cfg.Model+`"`, float64(seen.finished[reason]))
	}
	p.head("vllm:admission_rejections_total", "counter", "Requests rejected at admission.")
	p.row("vllm:admission_rejections_total", `model_name="`+d.s.cfg.Model+`",reason="max_num_queued_reqs"`, float64(st.Rejected))
	p.row("vllm:admission_rejections_total", `model_name="`+d.s.cfg.Model+`",reason="max_num_queued_tokens"`, 0)
	p.histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", l, &seen.prompt)
	p.histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", l, &seen.output)
	p.histogram("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", l, &seen.ttft)
	p.histogram("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", l, &seen.e2e)
	p.histogram("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", l, &seen.queue)
	const block = 16
	p.head("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
	p.row("vllm:cache_config_info", fmt.Sprintf(`block_size="%d",cache_dtype="auto",enable_prefix_caching="%s",engine="0",gpu_memory_utilization="0.92",kv_cache_size_tokens="%d",num_cpu_blocks="None",num_gpu_blocks="%d"`,
		block, python(!d.s.params.NoCache), d.s.params.KVTokens, d.s.params.KVTokens/block), 1)
	return p.b
}

func python(v bool) string {
	if v {
		return "True"
	}
	return "False"
}
