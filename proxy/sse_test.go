package proxy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// reading is what a test compares of a reply.
type reading struct {
	All      replyEvent
	Usage    replyUsage
	Finish   string
	ID       string
	Events   int
	Tokens   int
	Text     string
	Error    replyError
	Boundary bool
}

func readReply(f replyFormat, pieces ...[]byte) reading {
	r := new(replyScan)
	r.keepText, r.wantID = 1<<20, true
	r.start(f)
	for _, p := range pieces {
		r.scanAll(p)
	}
	r.finish()
	return r.reading()
}

func (r *replyScan) reading() reading {
	text, _ := r.said()
	out := reading{All: r.seen(), Usage: r.usage, Finish: r.finishReason(), ID: r.id, Events: r.events, Tokens: r.tokens,
		Text: string(text), Boundary: r.atBoundary()}
	if r.err != nil {
		out.Error = *r.err
	}
	return out
}

func chatUsage(prompt, completion int) replyUsage {
	return replyUsage{Prompt: routing.Some(prompt), Completion: routing.Some(completion)}
}

// C03 to C06, C08, C106: each file whole, cut at every offset, byte by byte, and with other line ends.
func TestReplyCaseFilesC03C04C05C06C08C106(t *testing.T) {
	var expected map[string]struct {
		EndMarker bool `json:"end_marker"`
		SHA256    string
		Outcome   string
		Text      string
		Usage     any
	}
	b, err := os.ReadFile("testdata/sse/expected.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &expected))
	require.Len(t, expected, 8)
	for name, want := range expected {
		body, err := os.ReadFile(filepath.Join("testdata/sse", name))
		require.NoError(t, err)
		before := sha256.Sum256(body)
		require.Equal(t, want.SHA256, hex.EncodeToString(before[:]))

		whole := readReply(formatEvents, body)
		assert.Equal(t, want.EndMarker, whole.All&eventDone != 0, name)
		assert.Equal(t, want.Outcome == "stream_error", whole.All&eventError != 0, name)
		assert.Equal(t, want.Outcome != "stream_cut", whole.Boundary, name)
		assert.NotZero(t, whole.All&eventContent, name)
		assert.Zero(t, whole.All&(eventMalformed|eventRich|eventAbort), name)
		usage := replyUsage{}
		if _, ok := want.Usage.(map[string]any); ok {
			usage = chatUsage(11, 7)
		}
		assert.Equal(t, usage, whole.Usage, name)
		assert.Equal(t, "chatcmpl-1", whole.ID, name)
		if want.Text != "" {
			assert.Equal(t, want.Text, whole.Text, name)
		}

		for cut := range body {
			require.Equal(t, whole, readReply(formatEvents, body[:cut], body[cut:]), "%s cut at %d", name, cut)
		}
		var single [][]byte
		for i := range body {
			single = append(single, body[i:i+1])
		}
		require.Equal(t, whole, readReply(formatEvents, single...), "%s byte by byte", name)
		lf := strings.ReplaceAll(string(body), "\r\n", "\n")
		for _, end := range []string{"\r", "\r\n"} {
			other := []byte(strings.ReplaceAll(lf, "\n", end))
			for cut := range other {
				require.Equal(t, whole, readReply(formatEvents, other[:cut], other[cut:]), "%s with %q cut at %d", name, end, cut)
			}
		}
		require.Equal(t, whole, readReply(formatEvents, append([]byte("\xef\xbb\xbf"), body...)), "%s with a byte order mark", name)
		after := sha256.Sum256(body)
		require.Equal(t, before, after, "the scanner must not change what it looks at")
	}
	e := readReply(formatEvents, mustRead(t, "testdata/sse/error-mid-stream.sse")).Error
	assert.Equal(t, replyError{Code: "429", Type: "rate_limit_error", Message: "engine busy, try later"}, e)
	assert.Equal(t, 429, e.status())
}

func mustRead(t testing.TB, path string) []byte {
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return b
}

func TestReplyCapturedStreams(t *testing.T) {
	files, err := filepath.Glob("testdata/replies/*.sse")
	require.NoError(t, err)
	require.Len(t, files, 5)
	for _, f := range files {
		body := mustRead(t, f)
		whole := readReply(formatEvents, body)
		assert.NotZero(t, whole.All&eventContent, f)
		assert.NotZero(t, whole.All&eventDone, f)
		assert.NotZero(t, whole.All&eventFinish, f)
		assert.Zero(t, whole.All&(eventMalformed|eventError|eventAbort|eventRich), f)
		assert.NotEmpty(t, whole.Text, f)
		assert.NotEmpty(t, whole.ID, f)
		assert.Equal(t, strings.Contains(string(body), `"usage":{`), whole.Usage.Completion.OK, f)
		if whole.Usage.Completion.OK {
			assert.InDelta(t, whole.Usage.Completion.V, whole.Tokens, 1, f)
		}
		for cut := 0; cut < len(body); cut += 13 {
			require.Equal(t, whole, readReply(formatEvents, body[:cut], body[cut:]), "%s cut at %d", f, cut)
		}
	}
}

func TestReplyEvents(t *testing.T) {
	const quiet = eventEnd | eventData
	for _, c := range []struct {
		data string
		want replyEvent
	}{
		{`{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`, quiet},
		{`{"choices":[{"delta":{"role":"assistant","content":null}}]}`, quiet},
		{`{"choices":[{"delta":{"content":"a"}}]}`, quiet | eventContent},
		{`{"choices":[{"delta":{"content":"a","token_ids":[1,2]}}]}`, quiet | eventContent},
		{`{"choices":[{"delta":{"content":"\u4f60"}}]}`, quiet | eventContent},
		{`{"choices":[{"delta":{"reasoning_content":"a"}}]}`, quiet | eventContent | eventRich},
		{`{"choices":[{"delta":{"reasoning":"a"}}]}`, quiet | eventContent | eventRich},
		{`{"choices":[{"delta":{"reasoning":"","tool_calls":[],"function_call":{}}}]}`, quiet},
		{`{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":""}}]}}]}`, quiet | eventContent | eventRich},
		{`{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[]}}]}`, quiet | eventContent | eventRich},
		{`{"choices":[{"text":"a"}]}`, quiet | eventContent},
		{`{"choices":[{"text":"","finish_reason":"length"}]}`, quiet | eventFinish},
		{`{"choices":[{"delta":{},"finish_reason":"abort"}]}`, quiet | eventFinish | eventAbort},
		{`{"text":"a","meta_info":{"prompt_tokens":3,"finish_reason":{"type":"abort","message":"m","status_code":503}}}`, quiet | eventContent | eventUsage | eventFinish | eventAbort},
		{`{"choices":[{"delta":{},"finish_reason":{"type":"abort"}}]}`, quiet | eventFinish | eventAbort},
		{`{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}`, quiet | eventUsage},
		{`{"choices":[],"usage":null}`, quiet},
		{`{"error":{"message":"m","code":500}}`, quiet | eventError},
		{`{"error":"Model is overloaded","error_type":"overloaded"}`, quiet | eventError},
		{`{"error":null}`, quiet},
		{`{"object":"error","message":"m","type":"BadRequestError","code":400}`, quiet | eventError},
		{`[DONE]`, quiet | eventDone},
		{`[DONE] `, quiet | eventDone},
		{`[DON`, quiet | eventMalformed},
		{`{"cut":`, quiet | eventMalformed},
		{`plain`, quiet | eventMalformed},
		{`{"type":"response.output_text.delta","delta":"a"}`, quiet | eventContent},
		{`{"type":"response.created","response":{"id":"resp_1","error":null,"usage":null}}`, quiet},
		{`{"type":"response.completed","response":{"id":"resp_1","usage":{"input_tokens":1,"output_tokens":2,"input_tokens_details":{"cached_tokens":0}}}}`, quiet | eventDone | eventUsage},
		{`{"type":"response.failed","response":{"error":{"code":"server_error","message":"m"}}}`, quiet | eventDone | eventError},
		{`{"type":"error","code":"c","message":"m"}`, quiet | eventError},
		{`{"type":"message_start","message":{"id":"msg_1","content":[],"usage":{"input_tokens":5,"output_tokens":1}}}`, quiet | eventUsage},
		{`{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`, quiet},
		{`{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}`, quiet | eventContent | eventRich},
		{`{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}`, quiet | eventContent},
		{`{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}`, quiet | eventContent | eventRich},
		{`{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":9}}`, quiet | eventFinish | eventUsage},
		{`{"type":"message_stop"}`, quiet | eventDone},
		{`{"type":"ping"}`, quiet},
		{`{"content":"a","stop":false}`, quiet | eventContent},
		{`{"content":"","stop":true,"tokens_predicted":4,"tokens_evaluated":2}`, quiet | eventFinish | eventUsage},
		{`{"token":{"id":1,"text":"a"},"generated_text":null}`, quiet | eventContent},
	} {
		r := new(replyScan)
		r.start(formatEvents)
		ev := r.scanAll([]byte("event: x\nid: 1\ndata: " + c.data + "\n\n"))
		assert.Equal(t, c.want, ev, "%s", c.data)
		// The same, told before the event ends wherever possible.
		r.start(formatEvents)
		ev = r.scanAll([]byte("data: " + c.data))
		assert.Zero(t, ev&eventEnd)
		assert.Equal(t, c.want&eventContent, ev&eventContent, c.data)
	}
}

func TestReplyNextEndsAtEachEvent(t *testing.T) {
	stream := []byte(": hello\n\ndata: {\"a\":1}\n\n\ndata:{\ndata:\"choices\":[{\"text\":\"x\"}]\ndata\ndata: }\nretry: 3\n\r\ndata: [DONE]\n\n")
	r := new(replyScan)
	r.start(formatEvents)
	var ends []string
	var evs []replyEvent
	for p := stream; len(p) > 0; {
		n, ev := r.next(p)
		ends, evs = append(ends, string(p[:n])), append(evs, ev)
		p = p[n:]
		assert.True(t, r.atBoundary())
	}
	assert.Equal(t, string(stream), strings.Join(ends, ""))
	require.Len(t, ends, 3)
	assert.Equal(t, ": hello\n\ndata: {\"a\":1}\n\n", ends[0])
	assert.Equal(t, []replyEvent{eventEnd | eventData, eventEnd | eventData | eventContent, eventEnd | eventData | eventDone}, evs)
}

func TestReplyCommentsAreNoProgress(t *testing.T) {
	r := new(replyScan)
	r.start(formatEvents)
	assert.Zero(t, r.scanAll([]byte(": still here\n\n:\n\n: x\n")))
	assert.True(t, r.atBoundary())
	assert.Zero(t, r.scanAll([]byte("id: 7\n")), "other fields are no progress either")
	assert.Equal(t, eventData, r.scanAll([]byte("data: {")))
	assert.False(t, r.atBoundary())
}

// The text that a continuation builds on is that of whole events only.
func TestReplyTextIsCutAtEvents(t *testing.T) {
	r := new(replyScan)
	r.keepText = 6
	r.start(formatEvents)
	r.scanAll([]byte("data: {\"choices\":[{\"delta\":{\"content\":\"abc\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"def\"}}]}\n"))
	text, all := r.said()
	assert.Equal(t, "abc", string(text))
	assert.True(t, all)
	r.scanAll([]byte("\n"))
	text, _ = r.said()
	assert.Equal(t, "abcdef", string(text))
	r.scanAll([]byte("data: {\"choices\":[{\"delta\":{\"content\":\"g\"}}]}\n\n"))
	_, all = r.said()
	assert.False(t, all, "beyond the budget the text is not all of it")
}

func TestReplyJSONAndLines(t *testing.T) {
	body := []byte(`{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":4,"completion_tokens":2}}`)
	for cut := range body {
		k := readReply(formatJSON, body[:cut], body[cut:])
		require.Equal(t, chatUsage(4, 2), k.Usage)
		require.Equal(t, "stop", k.Finish)
		require.Equal(t, "hi", k.Text)
		require.Equal(t, eventEnd|eventData|eventContent|eventUsage|eventFinish, k.All)
	}
	k := readReply(formatJSON, body[:50])
	assert.NotZero(t, k.All&eventMalformed)
	k = readReply(formatJSON, []byte(`{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","code":500}}`))
	assert.Equal(t, replyError{Code: "500", Type: "InternalServerError", Message: "cannot schedule new futures after shutdown"}, k.Error)
	k = readReply(formatLines, []byte("{\"response\":\"a\",\"done\":false}\n{\"response\":\"b\",\"done\":tr"), []byte("ue,\"eval_count\":2}\n"))
	assert.Equal(t, "ab", k.Text)
	assert.Equal(t, 2, k.Events)
	assert.Equal(t, "stop", k.Finish)
}

func TestReplyFormatOf(t *testing.T) {
	for ct, want := range map[string]replyFormat{
		"text/event-stream": formatEvents, "Text/Event-Stream;charset=utf-8": formatEvents, "text/event-stream; charset": formatEvents,
		"application/json; charset=utf-8": formatJSON, "application/x-ndjson": formatLines, "audio/wav": formatOther, "": formatOther,
	} {
		assert.Equal(t, want, replyFormatOf(ct, ""), ct)
	}
	assert.Equal(t, formatOther, replyFormatOf("application/json", "gzip"))
}

func TestReplyScanAllocatesNothing(t *testing.T) {
	if raceOn {
		t.Skip("the race detector empties pools")
	}
	body := mustRead(t, "testdata/replies/vllm-0.32.0-chat-stream-usage-continuous.sse")
	r := new(replyScan)
	r.start(formatEvents)
	assert.Zero(t, testing.AllocsPerRun(50, func() {
		r.start(formatEvents)
		for p := body; len(p) > 0; {
			n := min(len(p), 300)
			r.scanAll(p[:n])
			p = p[n:]
		}
	}))
}

func FuzzReply(f *testing.F) {
	for _, n := range []string{"crlf-lines", "comments-keepalive", "error-mid-stream", "utf8-multibyte"} {
		f.Add(mustRead(f, "testdata/sse/"+n+".sse"), 30)
	}
	f.Add([]byte("data: {\"type\":\"error\",\"error\":{}}\r\rdata"), 20)
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		cut = min(max(cut, 0), len(b))
		for _, format := range []replyFormat{formatEvents, formatJSON, formatLines, formatOther} {
			require.Equal(t, readReply(format, b), readReply(format, b[:cut], b[cut:]))
		}
	})
}

func BenchmarkReplyChunk(b *testing.B) {
	chunk := []byte(`data: {"id":"chatcmpl-951a691bb6c5aec5","object":"chat.completion.chunk","created":1795964460,"model":"tiny","choices":[{"index":0,"delta":{"content":"ction"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n")
	r := new(replyScan)
	r.start(formatEvents)
	b.SetBytes(int64(len(chunk)))
	b.ReportAllocs()
	for b.Loop() {
		r.scanAll(chunk)
	}
}
