package proxy

import (
	"fmt"
	"strings"

	"github.com/grapevine-lb/grapevine/routing"
)

// pathKind says what may happen with a request to a path.
type pathKind uint8

const (
	// pathUnknown is a path that no table lists. It does not pass the client port unless allowed.
	pathUnknown pathKind = iota
	// pathInference is work for any replica that has the model. Unlisted paths under /v1/ count as such.
	pathInference
	// pathModels is GET /v1/models or /v1/models/{id}: answered by the agent from what it knows.
	pathModels
	// pathStateful names an object that one replica made (pathClass.Object): it goes back there, never replayed.
	pathStateful
	// pathAdmin changes the engine or shows its inside. It passes only to our own engine, and only if allowed.
	pathAdmin
)

// String is the name used in logs and metric labels.
func (k pathKind) String() string {
	return [...]string{"unknown", "inference", "models", "stateful", "admin"}[k]
}

// pathClass is what a method and a path say about a request before its body is read.
type pathClass struct {
	Kind    pathKind
	Service routing.Service // one bit; 0 = do not filter
	Route   string          // bounded label for metrics: a listed path, "grpc", "/v1/*" or "other"
	Object  string          // id in the path of pathStateful, as written; for pathModels the model's name, decoded
	// Ungated marks work that the gate in front of the engine does not hold (design 5.3).
	Ungated bool
}

// Inference paths, by exact match with the cleaned path.
var inferencePaths = map[string]routing.Service{
	"/v1/chat/completions":      routing.ServeChat,
	"/chat/completions":         routing.ServeChat,
	"/invocations":              0, // SageMaker's name for any of them
	"/v1/completions":           routing.ServeCompletions,
	"/completions":              routing.ServeCompletions,
	"/completion":               routing.ServeCompletions, // llama.cpp
	"/infill":                   routing.ServeCompletions,
	"/generate":                 routing.ServeCompletions, // TGI, SGLang, vLLM's demo server
	"/generate_stream":          routing.ServeCompletions,
	"/inference/v1/generate":    routing.ServeCompletions, // vLLM, token ids in and out
	"/api/generate":             routing.ServeCompletions, // Ollama
	"/api/chat":                 routing.ServeChat,
	"/v1/responses":             routing.ServeResponses,
	"/v1/messages":              routing.ServeMessages,
	"/v1/messages/count_tokens": routing.ServeTokenize,
	"/v1/embeddings":            routing.ServeEmbeddings,
	"/embeddings":               routing.ServeEmbeddings,
	"/embedding":                routing.ServeEmbeddings,
	"/embed":                    routing.ServeEmbeddings, // TEI
	"/embed_all":                routing.ServeEmbeddings,
	"/embed_sparse":             routing.ServeEmbeddings,
	"/encode":                   routing.ServeEmbeddings, // SGLang
	"/api/embed":                routing.ServeEmbeddings,
	"/api/embeddings":           routing.ServeEmbeddings,
	"/pooling":                  routing.ServeEmbeddings,
	"/classify":                 routing.ServeEmbeddings,
	"/predict":                  routing.ServeEmbeddings, // TEI's classifier
	"/similarity":               routing.ServeEmbeddings,
	"/v1/rerank":                routing.ServeRerank,
	"/v2/rerank":                routing.ServeRerank,
	"/rerank":                   routing.ServeRerank,
	"/reranking":                routing.ServeRerank,
	"/v1/reranking":             routing.ServeRerank,
	"/v1/score":                 routing.ServeRerank,
	"/score":                    routing.ServeRerank,
	"/v1/audio/transcriptions":  routing.ServeAudio,
	"/v1/audio/translations":    routing.ServeAudio,
	"/v1/audio/speech":          routing.ServeAudio,
	"/v1/realtime":              routing.ServeAudio,
	"/v1/images/generations":    routing.ServeImages,
	"/v1/images/edits":          routing.ServeImages,
	"/v1/images/variations":     routing.ServeImages,
	"/v1/moderations":           routing.ServeOther,
	"/tokenize":                 routing.ServeTokenize,
	"/detokenize":               routing.ServeTokenize,
	"/v1/tokenize":              routing.ServeTokenize,
	"/v1/detokenize":            routing.ServeTokenize,
	"/apply-template":           routing.ServeTokenize,
	"/infer":                    routing.ServeOther,
}

// inferenceClasses are the classes of inferencePaths; their routes outlive the request's head.
var inferenceClasses = func() map[string]pathClass {
	m := make(map[string]pathClass, len(inferencePaths))
	for path, s := range inferencePaths {
		m[path] = pathClass{Kind: pathInference, Service: s, Route: path, Ungated: !gated(s)}
	}
	return m
}()

// Collections whose members live on one replica. The first segment behind /v1/ decides.
var statefulPrefixes = []string{"responses", "files", "batches", "conversations", "uploads", "vector_stores", "fine_tuning",
	"chat/completions", "threads", "assistants", "containers", "videos"}

// Paths of engines that change them or show their inside. An entry that ends in / covers all below it.
var adminPaths = []string{
	"/sleep", "/wake_up", "/wakeup", "/is_sleeping", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
	"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter", "/lora-adapters",
	"/start_profile", "/stop_profile", "/collective_rpc", "/server_info", "/get_server_info", "/get_model_info", "/model_info",
	"/scale_elastic_ep", "/is_scaling_elastic_ep", "/pause", "/resume", "/is_paused", "/abort_requests", "/abort_request",
	"/init_weight_transfer_engine", "/update_weights", "/get_world_size",
	"/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk",
	"/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weight_version", "/init_weights_update_group",
	"/destroy_weights_update_group", "/get_weights_by_name", "/weights_checker", "/get_internal_state", "/set_internal_state",
	"/start_expert_distribution_record", "/stop_expert_distribution_record", "/dump_expert_distribution_record",
	"/configure_logging", "/freeze_gc", "/slow_down", "/open_session", "/close_session", "/pause_generation",
	"/continue_generation", "/clear_hicache_storage_backend", "/hicache/", "/v1/loads", "/get_load",
	"/slots", "/slots/", "/props", "/models/load", "/models/unload", "/load", "/metrics", "/health", "/health_generate",
	"/ping", "/version", "/ready", "/info", "/docs", "/redoc", "/openapi.json",
	"/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/ps", "/api/tags", "/api/show", "/api/blobs/",
	"/busy_threshold", "/engines", "/v2/repository/", "/v2/models/", "/v2/logging", "/v2/trace/", "/kv_cache_events", "/perf_metrics",
	"/distserve/", "/terminate", "/update_params",
}

var adminExact, adminBelow = func() (map[string]bool, []string) {
	exact := make(map[string]bool, len(adminPaths))
	var below []string
	for _, p := range adminPaths {
		if strings.HasSuffix(p, "/") {
			below = append(below, p)
		} else {
			exact[p] = true
		}
	}
	return exact, below
}()

// allowedPaths is GRAPEVINE_ALLOW_PATHS: paths that pass although no table lists them as inference, or
// although they are administrative. An entry is an exact path, or a prefix if it ends in "*".
type allowedPaths []string

// parseAllowedPaths reads a comma list. Each entry starts with a slash; "/*" allows everything.
func parseAllowedPaths(s string) (allowedPaths, error) {
	var out allowedPaths
	for e := range strings.SplitSeq(s, ",") {
		e = strings.TrimSpace(e)
		switch {
		case e == "":
			continue
		case e[0] != '/':
			return nil, fmt.Errorf("%q does not start with a slash", e)
		case strings.Contains(strings.TrimSuffix(e, "*"), "*"):
			return nil, fmt.Errorf("%q has a star that is not its last character", e)
		case strings.ContainsAny(e, "?# "):
			return nil, fmt.Errorf("%q is not a path", e)
		}
		out = append(out, e)
	}
	return out, nil
}

func (a allowedPaths) allow(path string) bool {
	for _, e := range a {
		if p, ok := strings.CutSuffix(e, "*"); ok && strings.HasPrefix(path, p) || e == path {
			return true
		}
	}
	return false
}

// classify tells what a request to path is. path is the raw, still escaped path without the query, and is
// only looked at: what goes on is what came in. It is compared in its cleaned form (escapes, doubled
// slashes, dot segments), since an engine may clean it: neither may an administrative path hide behind a
// spelling, nor a client's doubled slash fail here where the engine would take it.
func classify(method, path string) pathClass {
	if c, ok := inferenceClasses[path]; ok && method == "POST" {
		return c // the usual ones are clean, and no administrative path is among them
	}
	clean := cleanPath(path)
	if admin(path) || admin(clean) {
		return pathClass{Kind: pathAdmin, Route: "admin", Ungated: true}
	}
	if clean == "/v1/models" && (method == "GET" || method == "HEAD") {
		return pathClass{Kind: pathModels, Route: "/v1/models"}
	}
	if id, ok := strings.CutPrefix(path, "/v1/models/"); ok && id != "" && (method == "GET" || method == "HEAD") {
		return pathClass{Kind: pathModels, Route: "/v1/models/{id}", Object: unescape(id)}
	}
	if c, ok := inferenceClasses[clean]; ok && !(method == "GET" && clean == "/v1/chat/completions") {
		return c
	}
	rest, v1 := strings.CutPrefix(clean, "/v1/")
	if v1 {
		for _, p := range statefulPrefixes {
			sub, ok := strings.CutPrefix(rest, p)
			if !ok || sub != "" && sub[0] != '/' {
				continue
			}
			sub = strings.Trim(sub, "/")
			id, _, _ := strings.Cut(sub, "/")
			return pathClass{Kind: pathStateful, Service: routing.ServeOther, Route: "/v1/" + p, Object: id, Ungated: true}
		}
		return pathClass{Kind: pathInference, Service: routing.ServeOther, Route: "/v1/*", Ungated: true}
	}
	// gRPC: /package.Service/Method. The content type decides in the end; the shape is enough here.
	if svc, m, ok := strings.Cut(strings.TrimPrefix(path, "/"), "/"); ok && method == "POST" &&
		strings.Contains(svc, ".") && m != "" && !strings.Contains(m, "/") {
		return pathClass{Kind: pathInference, Route: "grpc", Ungated: true}
	}
	return pathClass{Kind: pathUnknown, Route: "other", Ungated: true}
}

// gated reports whether work of this kind waits at the gate in front of the engine. Others have no first
// token, so nothing would tell when their prefill is over.
func gated(s routing.Service) bool {
	return s&(routing.ServeChat|routing.ServeCompletions|routing.ServeResponses|routing.ServeMessages) != 0
}

// passes reports whether a request of this class may pass the client port.
func (c pathClass) passes(path string, allow allowedPaths) bool {
	switch c.Kind {
	case pathInference, pathModels, pathStateful:
		return true
	}
	return allow.allow(path)
}

func admin(path string) bool {
	if adminExact[path] {
		return true
	}
	for _, p := range adminBelow {
		if strings.HasPrefix(path, p) {
			return !(p == "/v2/models/" && strings.Contains(path, "/generate")) // Triton's inference
		}
	}
	return false
}

// cleanPath is path with escapes decoded, runs of slashes as one, dot segments resolved and without a final
// slash. It allocates only where there is something to clean.
func cleanPath(path string) string {
	if !strings.ContainsRune(path, '%') && !strings.Contains(path, "//") && !strings.Contains(path, "/.") &&
		!strings.HasSuffix(path, "/") && !strings.ContainsRune(path, ';') {
		return path
	}
	var out []string
	for s := range strings.SplitSeq(unescape(path), "/") {
		s, _, _ = strings.Cut(s, ";")
		switch s {
		case "", ".":
		case "..":
			if len(out) > 0 {
				out = out[:len(out)-1]
			}
		default:
			out = append(out, s)
		}
	}
	return "/" + strings.Join(out, "/")
}

// unescape decodes %XX; what is no valid escape stays as it is.
func unescape(s string) string {
	if !strings.ContainsRune(s, '%') {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) && hexDigit(s[i+1]) >= 0 && hexDigit(s[i+2]) >= 0 {
			b = append(b, byte(hexDigit(s[i+1])<<4|hexDigit(s[i+2])))
			i += 2
			continue
		}
		b = append(b, s[i])
	}
	return string(b)
}

// hexDigit is the value of a hexadecimal digit, or -1.
func hexDigit(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}
