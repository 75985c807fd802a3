package enginesim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
)

// llamacpp speaks like llama.cpp's server, build 11434.
type llamacpp struct{ s *Server }

func (llamacpp) name() string        { return "llamacpp" }
func (llamacpp) finishInDelta() bool { return false }
func (llamacpp) lateHeader() bool    { return true }
func (llamacpp) opensFinal() bool    { return true }
func (llamacpp) repeatsPrefix() bool { return true }
func (llamacpp) checksModel() bool   { return false }
func (llamacpp) ignoresClose() bool  { return true }
func (llamacpp) defaultMax() int     { return 0 }

func (llamacpp) header(h http.Header, status int) {
	h["Date"] = nil // it sends none
	h.Set("Server", "llama.cpp")
	h.Set("Access-Control-Allow-Origin", "")
	if status >= 400 {
		h.Set("Connection", "close")
	} else {
		h.Set("Keep-Alive", "timeout=5, max=100")
	}
	switch h.Get("Content-Type") {
	case "application/json":
		h.Set("Content-Type", "application/json; charset=utf-8")
	case "text/event-stream; charset=utf-8":
		h.Set("Content-Type", "text/event-stream")
		h.Set("X-Accel-Buffering", "no")
	}
}

func (llamacpp) tail(b []byte, a *answer, object string) []byte {
	b = appendInt(append(b, ','), "created", int(a.created))
	if a.chat {
		b = appendField(append(b, ','), "id", a.id)
	}
	b = appendField(append(b, ','), "model", a.model)
	return appendField(append(b, `,"system_fingerprint":"b0-unknown",`...), "object", object)
}

// chunk is a chat chunk; delta is its JSON.
func (d llamacpp) chunk(b []byte, a *answer, delta, finish string) []byte {
	return event(b, func(b []byte) []byte {
		b = append(b, `{"choices":[{"finish_reason":`+finish+`,"index":`+strconv.Itoa(a.index)+`,"delta":`+delta+`}]`...)
		b = d.tail(b, a, "chat.completion.chunk")
		if a.running {
			b = d.counts(append(b, ','), a)
		}
		return append(b, '}')
	})
}

func (d llamacpp) role(b []byte, a *answer) []byte {
	return d.chunk(b, a, `{"role":"assistant","content":null}`, "null")
}

func (d llamacpp) delta(b []byte, a *answer, text, finish string) []byte {
	if a.chat {
		return d.chunk(b, a, string(append(appendField([]byte{'{'}, "content", text), '}')), "null")
	}
	return event(b, func(b []byte) []byte {
		b = appendField(append(b, `{"choices":[{`...), "text", text)
		b = append(appendInt(append(b, ','), "index", a.index), `,"logprobs":null,"finish_reason":null}]`...)
		b = d.tail(b, a, "text_completion")
		return append(appendField(append(b, ','), "id", a.id), '}')
	})
}

func (d llamacpp) finish(b []byte, a *answer, reason string) []byte {
	if a.chat {
		return d.chunk(b, a, `{}`, strconv.Quote(reason))
	}
	return event(b, func(b []byte) []byte {
		b = appendInt(append(b, `{"choices":[{"text":"",`...), "index", a.index)
		b = appendField(append(b, `,"logprobs":null,`...), "finish_reason", reason)
		b = d.tail(append(b, `}]`...), a, "text_completion")
		b = d.counts(append(b, ','), a)
		b = appendField(append(b, ','), "id", a.id)
		return append(d.timings(append(b, ','), a), '}')
	})
}

func (llamacpp) counts(b []byte, a *answer) []byte {
	b = appendInt(append(b, `"usage":{`...), "completion_tokens", a.output)
	b = appendInt(append(b, ','), "prompt_tokens", a.prompt)
	b = appendInt(append(b, ','), "total_tokens", a.prompt+a.output)
	if !a.hide {
		b = append(appendInt(append(b, `,"prompt_tokens_details":{`...), "cached_tokens", a.cached), '}')
	}
	return append(b, '}')
}

func (llamacpp) timings(b []byte, a *answer) []byte {
	n, m := a.prompt-a.cached, a.output
	return fmt.Appendf(b, `"timings":{"cache_n":%d,"prompt_n":%d,"prompt_ms":%.3f,"prompt_per_token_ms":%.4f,"prompt_per_second":%.4f,"predicted_n":%d,"predicted_ms":%.3f,"predicted_per_token_ms":%.4f,"predicted_per_second":%.4f}`,
		a.cached, n, a.promptS*1e3, ratio(a.promptS*1e3, float64(n)), ratio(float64(n), a.promptS), m, a.outputS*1e3, ratio(a.outputS*1e3, float64(m)), ratio(float64(m), a.outputS))
}

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

func (d llamacpp) usage(b []byte, a *answer) []byte {
	if !a.chat { // its last chunk has it in any case
		return b
	}
	return event(b, func(b []byte) []byte {
		b = d.counts(append(d.tail(append(b, `{"choices":[]`...), a, "chat.completion.chunk"), ','), a)
		return append(d.timings(append(b, ','), a), '}')
	})
}

func (d llamacpp) whole(b []byte, a *answer, choices []choice) []byte {
	b = append(b, `{"choices":[`...)
	for i, c := range choices {
		if i > 0 {
			b = append(b, ',')
		}
		if a.chat {
			b = appendField(append(b, '{'), "finish_reason", c.finish)
			b = appendInt(append(b, ','), "index", i)
			b = append(appendField(append(b, `,"message":{"role":"assistant",`...), "content", c.text), `}}`...)
		} else {
			b = appendField(append(b, '{'), "text", c.text)
			b = appendInt(append(b, ','), "index", i)
			b = append(appendField(append(b, `,"logprobs":null,`...), "finish_reason", c.finish), '}')
		}
	}
	object := "chat.completion"
	if !a.chat {
		object = "text_completion"
	}
	b = appendInt(append(b, `],`...), "created", int(a.created))
	b = appendField(append(b, ','), "model", a.model)
	b = appendField(append(b, `,"system_fingerprint":"b0-unknown",`...), "object", object)
	b = d.counts(append(b, ','), a)
	b = appendField(append(b, ','), "id", a.id)
	return append(d.timings(append(b, ','), a), '}')
}

func (d llamacpp) problem(p problem) (int, []byte) {
	coded := func(status int, typ, message string) (int, []byte) {
		b := appendInt([]byte(`{"error":{`), "code", status)
		b = appendField(append(b, ','), "message", message)
		return status, append(appendField(append(b, ','), "type", typ), `}}`...)
	}
	switch p.kind {
	case badJSON:
		return coded(400, "invalid_request_error", "[json.exception.parse_error.101] parse error at line 1, column 1: "+p.detail)
	case missingField:
		return coded(400, "invalid_request_error", "'"+p.param+"' is required")
	case badValue:
		return coded(400, "invalid_request_error", p.detail)
	case promptTooLong, outputTooLong:
		return 400, fmt.Appendf(nil, `{"error":{"code":400,"message":"request (%d tokens) exceeds the available context size (%d tokens), try increasing it","type":"exceed_context_size_error","n_prompt_tokens":%d,"n_ctx":%d}}`,
			p.tokens, d.s.params.Context, p.tokens, d.s.params.Context)
	case loading:
		return 503, []byte(`{"error":{"message":"Loading model","type":"unavailable_error","code":503}}`)
	case queueFull, shuttingDown:
		return coded(503, "unavailable_error", "Server is busy")
	case notFound, wrongMethod:
		return 404, []byte(`{"error":{"message":"File Not Found","type":"not_found_error","code":404}}`)
	case unauthorized:
		return coded(401, "authentication_error", "Invalid API Key")
	}
	return coded(500, "server_error", "internal error")
}

func (d llamacpp) models() []byte {
	id := appendString(nil, d.s.cfg.Model)
	aliases := []byte{'['}
	for i, a := range d.s.names() {
		if i > 0 {
			aliases = append(aliases, ',')
		}
		aliases = appendString(aliases, a)
	}
	aliases = append(aliases, ']')
	return fmt.Appendf(nil, `{"models":[{"name":%s,"model":%s,"modified_at":"","size":"","digest":"","type":"model","description":"","tags":[""],"capabilities":["completion"],"parameters":"","details":{"parent_model":"","format":"gguf","family":"","families":[""],"parameter_size":"","quantization_level":""}}],"object":"list","data":[{"id":%s,"aliases":%s,"tags":[],"object":"model","architecture":{"input_modalities":["text"],"output_modalities":["text"]},"created":%d,"owned_by":"llamacpp","meta":{"vocab_type":1,"n_vocab":262144,"n_ctx":%d,"n_ctx_train":%d,"n_embd":640,"n_params":268098176,"size":246587904,"ftype":"Q4_K - Medium"}}]}`,
		id, id, id, aliases, d.s.origin.Unix(), d.s.params.Context, d.s.params.Context)
}

func (d llamacpp) routes() map[string]route {
	return map[string]route{
		"/v1/health":        {"GET", d.s.health},
		"/models":           {"GET", d.s.page(d.models)},
		"/slots":            {"GET", d.s.page(d.slotList)},
		"/props":            {"GET", d.s.page(d.props)},
		"/tokenize":         {"POST", d.tokenize},
		"/chat/completions": {"POST", d.s.chat},
		"/completions":      {"POST", d.s.completions},
	}
}

func (d llamacpp) props() []byte {
	return fmt.Appendf(nil, `{"default_generation_settings":{"params":{"seed":4294967295,"temperature":0.8,"max_tokens":-1,"n_predict":-1,"ignore_eos":false,"stream":false},"n_ctx":%d},"total_slots":%d,"model_alias":%s,"model_ftype":"Q4_K - Medium","model_path":"models/sim.gguf","modalities":{"vision":false,"video":false,"audio":false},"endpoint_slots":true,"endpoint_props":true,"endpoint_metrics":true,"build_info":"b0-unknown","is_sleeping":%t}`,
		d.s.params.Context, d.s.params.Slots, appendString(nil, d.s.cfg.Model), d.s.active("sleep"))
}

func (d llamacpp) slotList() []byte {
	s := d.s
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	s.nudge()
	b := []byte{'['}
	for i, o := range s.slots {
		if i > 0 {
			b = append(b, ',')
		}
		if o == nil {
			b = fmt.Appendf(b, `{"id":%d,"n_ctx":%d,"speculative":false,"is_processing":false}`, i, s.params.Context)
			continue
		}
		tokens := s.engine.Tokens(o.handle)
		b = fmt.Appendf(b, `{"id":%d,"n_ctx":%d,"speculative":false,"is_processing":true,"id_task":%d,"n_prompt_tokens":%d,"n_prompt_tokens_processed":%d,"n_prompt_tokens_cache":%d,"params":{"max_tokens":%d,"n_predict":%d,"stream":%t},"next_token":[{"has_next_token":true,"has_new_line":false,"n_remain":%d,"n_decoded":%d}]}`,
			i, s.params.Context, o.job, o.promptTokens+tokens, o.promptTokens-o.cached, o.cached, o.limit, o.limit, o.call.request.Stream, o.limit-tokens, tokens)
	}
	return append(b, ']')
}

// tokenize answers {"content":...} with token numbers.
func (d llamacpp) tokenize(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Content string `json:"content"`
	}
	if !d.s.decode(w, r, &in) {
		return
	}
	d.s.reply(w, 200, "application/json", append(append([]byte(`{"tokens":`), tokenList(in.Content)...), '}'))
}

func tokenList(s string) []byte {
	b, _ := json.Marshal(tokenNumbers(s))
	return bytes.TrimSpace(b)
}

func tokenNumbers(s string) []int {
	out := make([]int, 0, tokensOf(len(s)))
	for i := 0; i < len(s); i += bytesPerToken {
		n := 0
		for _, c := range []byte(s[i:min(i+bytesPerToken, len(s))]) {
			n = n<<8 | int(c)
		}
		out = append(out, n)
	}
	return out
}

func (d llamacpp) metrics() []byte {
	st, seen, _ := d.s.sample()
	var p page
	one := func(name, typ, help string, v float64) { p.one("llamacpp:"+name, typ, help, "", v) }
	one("prompt_tokens_total", "counter", "Number of prompt tokens processed, excluding cached tokens", float64(st.Prefilled))
	one("prompt_tokens_cached_total", "counter", "Number of prompt tokens reused from the cache", float64(st.Cached))
	one("prompt_seconds_total", "counter", "Total time spent processing prompts", seen.promptS)
	one("tokens_predicted_total", "counter", "Number of generation tokens processed", float64(st.Generated))
	one("tokens_predicted_seconds_total", "counter", "Total time spent generating tokens", seen.outputS)
	one("n_decode_total", "counter", "Total number of llama_decode() calls, excluding speculative decoding and multimodal decoding", float64(st.Steps))
	one("n_tokens_max", "counter", "Largest observed sequence length (prompt + generation)", float64(seen.longest))
	one("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s", ratio(float64(st.Prefilled), seen.promptS))
	one("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s", ratio(float64(st.Generated), seen.outputS))
	one("requests_processing", "gauge", "Number of requests processing", float64(st.Running))
	one("requests_deferred", "gauge", "Number of requests deferred", float64(st.Waiting))
	one("n_busy_slots_per_decode", "gauge", "Average number of busy slots per llama_decode() call", ratio(float64(st.Generated), float64(st.Steps)))
	return p.b
}
