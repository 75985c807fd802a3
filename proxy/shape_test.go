package proxy

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestShape(t *testing.T) {
	event := []byte(`data: {"id":"a1b2","created":17,"delta":{"content":"word"},"n":9}` + "\n\n")
	at := bytes.Index(event, []byte("word"))
	var s shape
	s.learn(event, []byte("word"))
	assert.Zero(t, s.at, "a text that was decoded lies elsewhere")
	s.learn(event, event[at:at+4])
	require.Equal(t, at, s.at)
	for _, c := range []struct {
		p, text string
	}{
		{`data: {"id":"a1b2","created":17,"delta":{"content":"x"},"n":9}` + "\n\ndata: ", "x"},
		{`data: {"id":"a100b3","created":9,"delta":{"content":"two words"},"n":12345678901234567890}` + "\n\n", "two words"},
		{`data: {"id":"a1b2","created":17,"delta":{"content":""},"n":9}` + "\n\n", ""},
		{`data: {"id":"a1b2","created":17,"delta":{"content":"a\"b"},"n":9}` + "\n\n", ""},
		{`data: {"id":"a1b2","created":17,"delta":{"content":"a` + "\n" + `b"},"n":9}` + "\n\n", ""},
		{`data: {"id":"ab2","created":17,"delta":{"content":"x"},"n":9}` + "\n\n", ""},
		{`data: {"id":"a1b2","created":,"delta":{"content":"x"},"n":9}` + "\n\n", ""},
		{`data: {"id":"a1b2","created":17,"delta":{"content":"x"},"n":9,"usage":{}}` + "\n\n", ""},
		{`data: {"id":"a1b2","created":17,"delta":{"content":"x"},"n":9}` + "\n", ""},
		{`data: {"id":"a1b2","created":1`, ""},
		{"", ""},
	} {
		n, text := s.fits([]byte(c.p))
		assert.Equal(t, c.text, string(text), c.p)
		assert.Equal(t, c.text != "", n > 0, c.p)
		if n > 0 {
			assert.Equal(t, "\n\n", c.p[n-2:n], "it ends with the event")
		}
	}
}

// Read event by event, where events of one shape are not read as JSON, a stream says the same as byte by byte, where all are.
func TestShapesTwin(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	pick := func(from ...string) string { return from[rnd.IntN(len(from))] }
	like, all := 0, 0
	for range 300 {
		base := pick(
			`data: {"id":"c1","created":%d,"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}],"usage":null}`,
			`data: {"choices":[{"text":"%[2]s","index":%[1]d,"logprobs":null}]}`,
			"event: content_block_delta\ndata: "+`{"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":"%s"}}`,
			`data: {"type":"response.output_text.delta","sequence_number":%d,"delta":"%s"}`,
			`data: {"index":%d,"token":{"id":5,"text":"%s","logprob":-0.5},"generated_text":null}`,
			`data: {"id":"c1","choices":[{"delta":{"content":"%[2]s"}}],"usage":{"prompt_tokens":3,"completion_tokens":%[1]d}}`,
			`data: {"error":null,"message":"m%d","content":"%s","stop":false}`,
		)
		end := pick("\n\n", "\n\n", "\r\n\r\n", "\r\r")
		var pieces [][]byte
		for range 2 + rnd.IntN(20) {
			text := pick("a", "word", "two words", "ü", "", `\n`, `a\"b`, `\u0041`, "5", "[DONE]", `\`, "a\tb")
			e := []byte(fmt.Sprintf(base, rnd.IntN(1000), text) + end)
			switch rnd.IntN(12) {
			case 0: // anything may be broken
				e[rnd.IntN(len(e))] = `"\{}[]:,5x`[rnd.IntN(10)]
			case 1:
				e = append([]byte(pick(": ping\n\n", "data\n", "\n", "id: 7\n", "data: [DONE]\n\n")), e...)
			case 2:
				e = e[:rnd.IntN(len(e))]
			case 3:
				e = bytes.ReplaceAll(e, []byte("null"), []byte(pick(`"stop"`, `"abort"`, "{}", "7")))
			}
			pieces = append(pieces, e)
		}
		whole, single := new(replyScan), new(replyScan)
		for _, r := range []*replyScan{whole, single} {
			r.keepText, r.wantID = 1<<10, true
			r.start(formatEvents)
		}
		for i, p := range pieces {
			var got, want replyEvent
			for q := p; len(q) > 0; {
				if n, _ := whole.shape.fits(q); n > 0 {
					like++
				}
				n, ev := whole.next(q)
				got |= ev
				q = q[n:]
			}
			for j := range p {
				_, ev := single.next(p[j : j+1])
				want |= ev
			}
			all++
			require.Equal(t, want, got, "%q", pieces[:i+1])
			require.Equal(t, single.reading(), whole.reading(), "%q", pieces[:i+1])
		}
	}
	assert.Greater(t, like, all/8, "many are of the shape")
}
