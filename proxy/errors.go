package proxy

import (
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"
)

// Header names of ours that a client sees on errors.
const (
	headerReason = "x-grapevine-reason"
)

// apiError is an error of the agent's own, in OpenAI's shape. Errors of an engine are never turned into
// one: they pass unchanged. A value is immutable once built, so the ready-made ones below are shared.
//
// The status says what a client should do: 400, 404, 413 its request must change; 429 replicas exist, but
// it or all of them are full; 503 no replica is usable; 504 a replica took the work and sent nothing in
// time. 408 is never used: clients take it for their own fault and repeat at once.
type apiError struct {
	Status  int
	Type    string // OpenAI's error type, derived from Status if empty
	Code    string // null in the body if empty
	Param   string // null in the body if empty
	Message string // plain words; no addresses, no prompts, no keys
	Reason  string // the x-grapevine-reason header, one of a small fixed set

	// RetryAfter is how long waiting should help; 0 = it does not, and no header is sent.
	RetryAfter time.Duration
	// Final asks official clients not to repeat the request (x-should-retry: false).
	Final bool
}

// Error makes apiError usable where an error travels through core code.
func (e *apiError) Error() string { return e.Reason + ": " + e.Message }

// errorType is OpenAI's type for a status.
func errorType(status int) string {
	switch {
	case status == http.StatusUnauthorized:
		return "authentication_error"
	case status == http.StatusForbidden:
		return "permission_error"
	case status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case status == http.StatusServiceUnavailable:
		return "overloaded_error"
	case status >= 400 && status < 500:
		return "invalid_request_error"
	}
	return "api_error"
}

// errorBody is {"error":{"message","type","param","code"}} without a final line feed. Empty param and
// code become null, an empty type is derived from the status.
func errorBody(status int, typ, code, param, message string) []byte {
	if typ == "" {
		typ = errorType(status)
	}
	type object struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	}
	null := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	b, err := json.Marshal(struct {
		Error object `json:"error"`
	}{object{message, typ, null(param), null(code)}})
	if err != nil { // strings always marshal
		panic(err)
	}
	return b
}

// Body is the error's JSON document.
func (e *apiError) Body() []byte { return errorBody(e.Status, e.Type, e.Code, e.Param, e.Message) }

// Event is the error as one server-sent event, for a stream whose head has gone out. It may only be
// written on an event boundary, and the connection must then end without the final chunk.
func (e *apiError) Event() []byte {
	b := append([]byte("data: "), e.Body()...)
	return append(b, '\n', '\n')
}

// Headers calls set for each header of the error, names in lower case. Waits are spread by ± 20 % so that
// the refused do not come back together: rnd is a number in [0, 1), such as rand.Float64().
func (e *apiError) Headers(rnd float64, set func(name, value string)) {
	set("content-type", "application/json")
	if e.Reason != "" {
		set(headerReason, e.Reason)
	}
	if e.RetryAfter > 0 {
		ms := retryAfterMs(e.RetryAfter, rnd)
		set("retry-after", strconv.Itoa((ms+999)/1000))
		set("retry-after-ms", strconv.Itoa(ms))
	}
	if e.Final {
		set("x-should-retry", "false")
	}
}

// retryAfterMs spreads d by ± 20 % and keeps it within 1 to 60 s, the range that clients obey.
func retryAfterMs(d time.Duration, rnd float64) int {
	ms := int(float64(d.Milliseconds()) * (0.8 + 0.4*rnd))
	return min(max(ms, 1000), 60_000)
}

// write sends e as the whole answer of w.
func (e *apiError) write(w http.ResponseWriter) {
	body := e.Body()
	h := w.Header()
	e.Headers(rand.Float64(), h.Set)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(e.Status)
	_, _ = w.Write(body) // the client is gone; nothing to tell it
}

// with returns a copy with another message, and another wait if d > 0.
func (e apiError) with(message string, d time.Duration) *apiError {
	e.Message = message
	if d > 0 {
		e.RetryAfter = d
	}
	return &e
}

// The errors of our own, one for each reason.
var (
	errModelNotFound = &apiError{Status: 404, Code: "model_not_found", Param: "model", Reason: "unknown_model",
		Message: "The model does not exist on any replica of this cluster."}
	errModelUnavailable = &apiError{Status: 503, Code: "model_unavailable", Reason: "no_model", RetryAfter: 2 * time.Second,
		Message: "No replica serves this model at the moment."}
	errNoService = &apiError{Status: 404, Code: "not_found", Reason: "no_service",
		Message: "No replica of this model serves this path."}
	errTooLong = &apiError{Status: 400, Code: "context_length_exceeded", Reason: "too_long",
		Message: "The prompt is longer than the context of every replica of this model."}
	errAllFull = &apiError{Status: 429, Code: "overloaded", Reason: "all_full", RetryAfter: 2 * time.Second,
		Message: "All replicas are full. Repeat the request after the given time."}
	errNoneUsable = &apiError{Status: 503, Code: "no_replica", Reason: "none_usable", RetryAfter: 2 * time.Second,
		Message: "No replica is usable at the moment."}
	errDraining = &apiError{Status: 503, Code: "draining", Reason: "draining", RetryAfter: time.Second,
		Message: "This replica is draining and no other can take the request."}
	errTooLarge = &apiError{Status: 413, Code: "request_too_large", Reason: "too_large",
		Message: "The request body is larger than the limit of the grapevine agent (GRAPEVINE_MAX_BODY)."}
	errBodyMemory = &apiError{Status: 503, Code: "overloaded", Reason: "body_memory", RetryAfter: time.Second,
		Message: "The agent holds as many request bodies as it may."}
	errTooManyRequests = &apiError{Status: 429, Code: "too_many_requests", Reason: "max_inflight", RetryAfter: time.Second,
		Message: "The agent has as many requests under way as it may."}
	errPathNotAllowed = &apiError{Status: 404, Code: "path_not_allowed", Reason: "path_not_allowed",
		Message: "This path is not served here. Administrative paths of the engine need GRAPEVINE_ALLOW_PATHS."}
	errFirstByte = &apiError{Status: 504, Code: "first_byte_timeout", Reason: "first_byte_timeout",
		Message: "The replica accepted the request and sent nothing in time."}
	errBroken = &apiError{Status: 502, Code: "upstream_broken", Reason: "upstream_broken",
		Message: "The replica broke off before it answered."}
	errStreamBroken = &apiError{Status: 502, Code: "stream_broken", Reason: "stream_broken",
		Message: "The replica broke off in the middle of the answer. What was received is incomplete."}
	errDeadly = &apiError{Status: 500, Code: "request_refused", Reason: "deadly", Final: true,
		Message: "Replicas died while they worked on this request. It is not tried again."}
	errLoop = &apiError{Status: 508, Code: "loop_detected", Reason: "loop", Final: true,
		Message: "The request has passed through an agent before."}
	errForgedHop = &apiError{Status: 403, Code: "hop_mismatch", Reason: "forged_hop", Final: true,
		Message: "The request names another agent than the one that it comes from."}
	errMethod = &apiError{Status: 405, Code: "method_not_allowed", Reason: "method", Final: true,
		Message: "CONNECT and TRACE are not served here."}
	errBadRequest = &apiError{Status: 400, Reason: "bad_request",
		Message: "The request could not be understood."}
)
