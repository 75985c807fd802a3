package proxy

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// sink is a Downstream that keeps or drops what it gets.
type sink struct {
	keep    bool
	head    ResponseHead
	out     strings.Builder
	writes  int
	done    bool
	aborted bool
}

func (s *sink) Head(h *ResponseHead, _ bool) error { s.head = *h; return nil }
func (s *sink) Write(p []byte) error {
	s.writes++
	if s.keep {
		s.out.Write(p)
	}
	return nil
}
func (s *sink) Finish(Header) error { s.done = true; return nil }
func (s *sink) Abort()              { s.aborted = true }
func (s *sink) Tunnel(*ResponseHead) (io.ReadWriteCloser, error) {
	return nil, io.ErrClosedPipe
}

// repeated is a body of n equal pieces, one a read, and an end.
type repeated struct {
	piece, end string
	n          int
}

func (r *repeated) Read(p []byte) (int, error) {
	if r.n == 0 {
		if r.end == "" {
			return 0, io.EOF
		}
		n := copy(p, r.end)
		r.end = ""
		return n, nil
	}
	r.n--
	return copy(p, r.piece), nil
}

func (*repeated) Close() error { return nil }

// relayed passes a canned answer through the core, without a network, and returns what the client got.
func relayed(t testing.TB, r role, piece string, n int) (*sink, uint64) {
	t.Helper()
	tab := routing.NewTable(routing.Member{Boot: 1, Node: "n1"})
	p, err := New(Config{Table: tab, Policy: inOrder{1}, EngineURL: &url.URL{Scheme: "http", Host: "x:1"}})
	require.NoError(t, err)
	x := &exchange{p: p, role: r, in: &RequestHead{Method: "POST"}, ctx: context.Background(), log: p.log, arrived: time.Now()}
	x.class = classify("POST", chatPath)
	x.body = newBody(nil, 1, 1, p.bodies)
	d := &sink{}
	x.down = d
	x.peek.Stream = true
	a := x.begin(&choice{Peer: tab.Self(), Tokens: 10})
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	w := newWatch(cancel, time.Minute, errCauseFirst)
	defer w.stop()
	ans := &Answer{
		Head:    ResponseHead{Status: 200, Length: -1, Header: Header{{"content-type", "text/event-stream"}}},
		Body:    &repeated{piece: piece, n: n, end: finishChunk + doneChunk},
		Trailer: func() Header { return nil },
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	v, o := x.relay(ctx, a, w, ans)
	runtime.ReadMemStats(&after)
	a.end(o, time.Now())
	require.Equal(t, verdictDone, v)
	require.True(t, d.done)
	return d, after.Mallocs - before.Mallocs
}

// A relayed piece costs no allocation, at the entry (which judges events) and at the target.
func TestRelayAllocatesNothing(t *testing.T) {
	if raceOn {
		t.Skip("the race detector empties pools")
	}
	for _, r := range []role{roleEntry, roleTarget} {
		relayed(t, r, chunk("x"), 10)
		const more = 20_000
		_, few := relayed(t, r, chunk("x"), 100)
		d, many := relayed(t, r, chunk("x"), 100+more)
		assert.Equal(t, more+101, d.writes, "one write for each piece")
		assert.Less(t, (float64(many)-float64(few))/more, 0.01, "%s: %d and %d allocations", r, few, many)
	}
}

func BenchmarkRelay(b *testing.B) {
	for _, r := range []role{roleEntry, roleTarget} {
		b.Run(r.String(), func(b *testing.B) {
			b.ReportAllocs()
			relayed(b, r, chunk("x"), b.N)
		})
	}
}

// Events that the client has had from an earlier attempt are taken out of the next, and only those.
func TestSiftTakesOutRepeatedEvents(t *testing.T) {
	first := roleChunk + "data: {\"id\":\"c1\",\"choices\":[]}\n\n"
	second := roleChunk + "data: {\"id\":\"c2\",\"choices\":[]}\n\n" + "data: {\"id\":\"c3\",\"choices\":[]}\n\n" + chunk("x") + roleChunk
	want := "data: {\"id\":\"c3\",\"choices\":[]}\n\n" + chunk("x") + roleChunk
	for _, step := range []int{1, 7, 64, len(second)} {
		var s sift
		s.start(formatEvents)
		pass, _, stop := s.push([]byte(first), false)
		require.False(t, stop)
		require.Equal(t, first, string(pass))
		s.start(formatEvents)
		var out []byte
		content := false
		for off := 0; off < len(second); off += step {
			pass, ev, stop := s.push([]byte(second[off:min(off+step, len(second))]), content)
			require.False(t, stop)
			out = append(out, pass...)
			content = content || ev&eventContent != 0
		}
		assert.Equal(t, want, string(append(out, s.tail()...)), "%d bytes at a time", step)
	}
}

// An event longer than is held goes out in pieces.
func TestSiftLongEvent(t *testing.T) {
	var s sift
	s.start(formatEvents)
	in := "data: {\"choices\":[{\"delta\":{\"content\":\"" + strings.Repeat("x", 3*maxHeldEvent) + "\"}}]}\n\n"
	var out []byte
	longest := 0
	for off := 0; off < len(in); off += 4096 {
		pass, _, stop := s.push([]byte(in[off:min(off+4096, len(in))]), true)
		require.False(t, stop)
		out = append(out, pass...)
		longest = max(longest, len(s.tail()))
	}
	assert.Equal(t, in, string(append(out, s.tail()...)))
	assert.LessOrEqual(t, longest, maxHeldEvent)
}

func FuzzSift(f *testing.F) {
	f.Add([]byte(roleChunk+chunk("a")+": c\n\n"+finishChunk+doneChunk), uint8(7))
	f.Add([]byte("data: x\r\n\r\nevent: y\rdata: {}\r\r"), uint8(1))
	f.Fuzz(func(t *testing.T, in []byte, step uint8) {
		var s sift
		s.start(formatEvents)
		var out []byte
		content := false
		n := int(step)%64 + 1
		for off := 0; off < len(in); off += n {
			pass, ev, stop := s.push(append([]byte{}, in[off:min(off+n, len(in))]...), content)
			out = append(out, pass...)
			if stop {
				if !strings.HasPrefix(string(in), string(out)+string(s.bad)) {
					t.Fatalf("%q and %q are no start of %q", out, s.bad, in)
				}
				return
			}
			content = content || ev&eventContent != 0
		}
		if got := string(append(out, s.tail()...)); got != string(in) {
			t.Fatalf("%q came out of %q", got, in)
		}
	})
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		wait := func(f func(w *watch)) (time.Duration, error) {
			start = time.Now()
			ctx, cancel := context.WithCancelCause(context.Background())
			defer cancel(nil)
			w := newWatch(cancel, 10*time.Second, errCauseFirst)
			defer w.stop()
			go f(w)
			select {
			case <-ctx.Done():
			case <-time.After(time.Hour):
			}
			return time.Since(start), context.Cause(ctx)
		}
		d, err := wait(func(*watch) {})
		assert.Equal(t, 10*time.Second, d)
		assert.Equal(t, errCauseFirst, err)
		d, err = wait(func(w *watch) {
			time.Sleep(9 * time.Second)
			w.set(2*time.Second, errCauseIdle, time.Now())
			for range 20 {
				time.Sleep(time.Second)
				w.progress()
			}
		})
		assert.Equal(t, 31*time.Second, d, "2 s after the last progress")
		assert.Equal(t, errCauseIdle, err)
		d, _ = wait(func(w *watch) {
			at := w.pause()
			time.Sleep(time.Minute)
			w.resume(at, false)
		})
		assert.InDelta(t, 70, d.Seconds(), 1, "the time of a write is not silence")
		_, err = wait(func(w *watch) { w.stop() })
		assert.NoError(t, err)
		_, err = wait(func(w *watch) { w.set(-1, errCauseIdle, time.Now()) })
		assert.NoError(t, err, "no limit")
	})
}

func TestPicksRing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, []uint64{2, 1}, nil, answers(200, okAnswer), engine(reply(503, "busy")))
		for i := range pickRing + 10 {
			_, _, err := f.get(chatBody(false), "X-Request-Id", fmt.Sprint("id-", i))
			require.NoError(t, err)
		}
		all := f.agents[0].Picks("")
		require.Len(t, all, pickRing)
		assert.Equal(t, fmt.Sprint("id-", pickRing+9), all[0].ID)
		one := f.agents[0].Picks(fmt.Sprint("id-", pickRing))
		require.Len(t, one, 1)
		assert.Equal(t, "entry", one[0].Role)
		assert.Equal(t, "n2", one[0].Attempts[0].Node)
		assert.Equal(t, "busy", one[0].Attempts[0].Result)
		assert.Len(t, f.agents[1].Picks(""), pickRing, "the target has its own record")
		assert.Equal(t, "target", f.agents[1].Picks("")[0].Role)
	})
}

// endFunc is a function that a watch ends.
type endFunc func(cause error)

func (f endFunc) end(cause error) { f(cause) }

func newWatch(cancel func(cause error), limit time.Duration, cause error) *watch {
	w := &watch{base: time.Now()}
	w.start(endFunc(cancel), limit, cause, time.Now())
	return w
}
