package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// hops runs a test on the one-hop path (entry is target) and through a peer's agent.
func hops(t *testing.T, f func(t *testing.T, order []uint64, target int)) {
	for _, c := range []struct {
		name  string
		order []uint64
	}{{"own engine", []uint64{1}}, {"peer", []uint64{2}}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, c.order, int(c.order[0])-1) })
		})
	}
}

// pair makes two engines of which only the target is given.
func pair(target int, e http.Handler) []http.Handler {
	h := []http.Handler{answers(500, "wrong engine"), answers(500, "wrong engine")}
	h[target] = e
	return h
}

// C01: each piece goes out at once, whatever the content type.
func TestC01EachPieceAtOnce(t *testing.T) {
	for _, ctype := range []string{"text/event-stream;charset=utf-8", "Text/Event-Stream", "", "application/x-ndjson"} {
		t.Run(ctype, func(t *testing.T) {
			hops(t, func(t *testing.T, order []uint64, target int) {
				e := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
					w.Header()["Content-Type"] = nil
					if ctype != "" {
						w.Header().Set("Content-Type", ctype)
					}
					for i := range 5 {
						if i > 0 {
							time.Sleep(200 * time.Millisecond)
						}
						say(w, "data: {\"n\":1}\n\n")
					}
				})
				f := newFleet(t, order, nil, pair(target, e)...)
				start := time.Now()
				resp, err := f.post(t.Context(), chatBody(true))
				require.NoError(t, err)
				text, at, err := arrivals(resp.Body, start)
				require.NoError(t, err)
				assert.Equal(t, strings.Repeat("data: {\"n\":1}\n\n", 5), text)
				assert.Equal(t, []time.Duration{0, 200e6, 400e6, 600e6, 800e6}, at, "no time passes in the agent")
				assert.Equal(t, ctype, resp.Header.Get("Content-Type"))
				assert.Equal(t, "no", resp.Header.Get("X-Accel-Buffering"))
				f.idle()
			})
		})
	}
}

// C02: the head goes out before the first byte of the body, and a death in the silence is replayed behind it.
func TestC02HeadBeforeFirstByte(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
			eventHead(w)
			time.Sleep(3 * time.Second)
			say(w, chunk("a")+finishChunk+doneChunk)
		})
		f := newFleet(t, order, nil, pair(target, e)...)
		start := time.Now()
		resp, err := f.post(t.Context(), chatBody(true))
		require.NoError(t, err)
		assert.Zero(t, time.Since(start), "head at once")
		text, at, err := arrivals(resp.Body, start)
		require.NoError(t, err)
		assert.Equal(t, chunk("a")+finishChunk+doneChunk, text)
		assert.Equal(t, 3*time.Second, at[0])
		assert.Equal(t, 1, e.count())
		f.idle()
	})
}

func TestC02ReplayBehindHead(t *testing.T) {
	for _, c := range []struct {
		name  string
		order []uint64
		role  bool // the role chunk had gone out
	}{{"engine", []uint64{1, 2}, false}, {"peer", []uint64{2, 3}, false}, {"role sent", []uint64{1, 2}, true}, {"role sent by peer", []uint64{2, 1}, true}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dying := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
					eventHead(w)
					if c.role {
						say(w, roleChunk)
					}
					time.Sleep(time.Second)
					die()
				})
				good := streams(0, roleChunk+chunk("x"), finishChunk+doneChunk)
				es := []http.Handler{good, good, good}
				es[c.order[0]-1] = dying
				f := newFleet(t, c.order, nil, es...)
				resp, text, err := f.get(chatBody(true))
				require.NoError(t, err)
				assert.Equal(t, 200, resp.StatusCode)
				assert.Equal(t, roleChunk+chunk("x")+finishChunk+doneChunk, text, "one role, nothing twice")
				assert.Equal(t, 1, dying.count())
				assert.Equal(t, 1, good.count())
				assert.EqualValues(t, 1, f.metrics(0).Retries[retryCut])
				f.idle()
			})
		})
	}
}

// C03, C04, C08, C106: a stream comes out as it went in, wherever it is cut, and is understood on the way.
func TestC03BytesUnchangedForEveryCut(t *testing.T) {
	for _, name := range []string{"sse/utf8-multibyte.sse", "sse/no-space-after-colon.sse", "sse/crlf-lines.sse",
		"sse/comments-keepalive.sse", "sse/usage-last-chunk.sse", "sse/no-usage.sse"} {
		in := readCase(t, name)
		check := func(step string, pieces ...[]byte) {
			var s sift
			s.start(formatEvents)
			var out []byte
			content := false
			for _, p := range pieces {
				pass, ev, stop := s.push(p, content)
				out = append(out, pass...)
				content = content || ev&eventContent != 0
				require.False(t, stop, "%s %s", name, step)
			}
			out = append(out, s.tail()...)
			require.Equal(t, string(in), string(out), "%s %s", name, step)
			require.NotZero(t, s.scan.seen()&eventContent, "%s %s", name, step)
		}
		for cut := range in {
			check("two pieces", in[:cut], in[cut:])
		}
		var bytes [][]byte
		for i := range in {
			bytes = append(bytes, in[i:i+1])
		}
		check("bytes", bytes...)
	}
}

// C05: a cut in the middle is no finish: no final chunk, no [DONE], no retry.
func TestC05CutAfterContent(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		in := string(readCase(t, "sse/cut-before-done.sse"))
		e := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
			eventHead(w)
			say(w, in)
			die()
		})
		f := newFleet(t, append(order, 3-order[0]), nil, pair(target, e)...)
		resp, text, err := f.get(chatBody(true))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.Equal(t, 200, resp.StatusCode)
		events := in[:strings.LastIndex(in, "\n\n")+2]
		require.True(t, strings.HasPrefix(text, events), "whole events are all there: %q", text)
		assert.Equal(t, string(errStreamBroken.Event()), text[len(events):], "an error event at the boundary, and nothing more")
		assert.NotContains(t, text, "[DONE]")
		assert.Len(t, f.lastPick().Attempts, 1, "no retry")
		assert.Equal(t, outcomeCut, f.lastPick().Outcome)
		f.idle()
	})
}

// C06: an error behind content goes on byte for byte and is counted as a failure.
func TestC06ErrorInsideStream(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		in := string(readCase(t, "sse/error-mid-stream.sse"))
		f := newFleet(t, append(order, 3-order[0]), nil, pair(target, streams(0, in))...)
		resp, text, err := f.get(chatBody(true))
		require.NoError(t, err)
		assert.Equal(t, 200, resp.StatusCode)
		assert.Equal(t, in, text)
		assert.Equal(t, outcomeStreamError, f.lastPick().Outcome)
		f.idle()
	})
}

// An abort is not an end: its chunk and the false [DONE] stay behind.
func TestAbortIsHeldBack(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := streams(0, roleChunk+chunk("a"), chunk("b")+abortChunk+doneChunk)
		f := newFleet(t, append(order, 3-order[0]), nil, pair(target, e)...)
		_, text, err := f.get(chatBody(true))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.Equal(t, roleChunk+chunk("a")+chunk("b")+string(errStreamBroken.Event()), text)
	})
}

func TestAbortBeforeContentIsReplayed(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		good := streams(0, roleChunk+chunk("x")+finishChunk+doneChunk)
		es := []http.Handler{good, good}
		es[target] = streams(0, roleChunk+abortChunk+doneChunk)
		f := newFleet(t, append(order, 3-order[0]), nil, es...)
		_, text, err := f.get(chatBody(true))
		require.NoError(t, err)
		assert.Equal(t, roleChunk+chunk("x")+finishChunk+doneChunk, text)
		f.idle()
	})
}

// An error object as the first thing in a 200 stream is replayed; where nobody else can, the engine's words are passed on.
func TestErrorBeforeContent(t *testing.T) {
	bad := "data: {\"error\":{\"message\":\"out of memory\",\"code\":500}}\n\n"
	synctest.Test(t, func(t *testing.T) {
		good := streams(0, roleChunk+chunk("x")+finishChunk+doneChunk)
		f := newFleet(t, []uint64{1, 2}, nil, streams(0, bad+doneChunk), good)
		_, text, err := f.get(chatBody(true))
		require.NoError(t, err)
		assert.Equal(t, roleChunk+chunk("x")+finishChunk+doneChunk, text)

		f.agents[0].cfg.Policy = inOrder{1}
		_, text, err = f.get(chatBody(true))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.Equal(t, bad, text)
	})
	synctest.Test(t, func(t *testing.T) { // the client's own fault is not moved
		own := "data: {\"error\":{\"message\":\"too long\",\"code\":400}}\n\n"
		second := streams(0, chunk("x")+finishChunk+doneChunk)
		f := newFleet(t, []uint64{1, 2}, nil, streams(0, own+doneChunk), second)
		_, text, err := f.get(chatBody(true))
		require.NoError(t, err)
		assert.Equal(t, own+doneChunk, text)
		assert.Zero(t, second.count())
	})
}

// A 200 stream that ends cleanly but has no finish reason was cut by the engine.
func TestStreamWithoutFinish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		good := streams(0, roleChunk+chunk("x")+finishChunk+doneChunk)
		f := newFleet(t, []uint64{1, 2}, nil, streams(0, roleChunk), good)
		_, text, err := f.get(chatBody(true))
		require.NoError(t, err)
		assert.Equal(t, roleChunk+chunk("x")+finishChunk+doneChunk, text)
	})
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, []uint64{1, 2}, nil, streams(0, roleChunk+chunk("a")), answers(500, ""))
		_, text, err := f.get(chatBody(true))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.Equal(t, roleChunk+chunk("a")+string(errStreamBroken.Event()), text)
	})
}

// C09: neither the agent nor its HTTP library asks for compression by itself.
func TestC09EncodingIsTheClients(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(200, "\x1f\x8bnot really", "Content-Encoding", "gzip")
		f := newFleet(t, order, nil, pair(target, e)...)
		for _, enc := range []string{"", "identity", "gzip"} {
			var h []string
			if enc != "" {
				h = []string{"Accept-Encoding", enc}
			}
			resp, text, err := f.get(chatBody(false), h...)
			require.NoError(t, err)
			assert.Equal(t, enc, e.last().Get("Accept-Encoding"))
			assert.Equal(t, "\x1f\x8bnot really", text)
			assert.Equal(t, "gzip", resp.Header.Get("Content-Encoding"))
		}
	})
}

// C45, C46: no deadline on the whole; silence after content ends it, a long prefill does not.
func TestC45Limits(t *testing.T) {
	limits := func(_ int, c *Config) { c.FirstByteTimeout, c.IdleTimeout = 20*time.Second, 2*time.Second }
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := engine(func(n int, w http.ResponseWriter, r *http.Request) {
			eventHead(w)
			switch n {
			case 1: // slow but alive, behind a prefill of five times the idle limit
				time.Sleep(10 * time.Second)
				for range 30 {
					say(w, chunk("t"))
					time.Sleep(1900 * time.Millisecond)
				}
				say(w, finishChunk+doneChunk)
			case 2: // silent after content, but for comments
				say(w, chunk("t"))
				for r.Context().Err() == nil {
					time.Sleep(500 * time.Millisecond)
					say(w, ": ping\n\n")
				}
			}
		})
		f := newFleet(t, order, limits, pair(target, e)...)
		_, text, err := f.get(chatBody(true))
		require.NoError(t, err)
		assert.Equal(t, strings.Repeat(chunk("t"), 30)+finishChunk+doneChunk, text)

		start := time.Now()
		_, text, err = f.get(chatBody(true))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.True(t, strings.HasSuffix(text, string(errStreamBroken.Event())), "%q", text)
		assert.InDelta(t, 2, time.Since(start).Seconds(), 0.6)
		time.Sleep(time.Second) // the engine looks every 0.5 s
		assert.Len(t, e.hungUp(), 1, "the engine saw the end")
		f.idle()
	})
}

// A client that reads slowly is not a silent engine.
func TestSlowClientIsNotSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := streams(0, chunk("a"), chunk("b"), finishChunk+doneChunk)
		f := newFleet(t, []uint64{1}, func(_ int, c *Config) { c.IdleTimeout = time.Second }, e)
		resp, err := f.post(context.Background(), chatBody(true))
		require.NoError(t, err)
		time.Sleep(10 * time.Second)
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.Equal(t, chunk("a")+chunk("b")+finishChunk+doneChunk, string(b))
	})
}

// A client that takes nothing at all for two minutes is gone, and its engine is free again.
func TestStuckClientIsGone(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := engine(func(_ int, w http.ResponseWriter, r *http.Request) {
			eventHead(w)
			for r.Context().Err() == nil {
				say(w, chunk(strings.Repeat("x", 64<<10)))
				time.Sleep(time.Millisecond)
			}
		})
		f := newFleet(t, order, nil, pair(target, e)...)
		c, err := f.net.dial(context.Background(), "", f.clients[0])
		require.NoError(t, err)
		body := chatBody(true)
		_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
		require.NoError(t, err)
		buf := make([]byte, 1024)
		_, err = c.Read(buf)
		require.NoError(t, err)
		time.Sleep(3 * time.Minute)
		assert.Len(t, e.hungUp(), 1)
		assert.EqualValues(t, 1, f.metrics(0).EntryByOutcome[outcomeCancel])
		f.idle()
		_ = c.Close()
	})
}
