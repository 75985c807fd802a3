package link

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// server answers on loopback until the test ends.
func server(t testing.TB, handle Handler) (dial func(context.Context) (net.Conn, error), accepted *atomic.Int32) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	accepted = new(atomic.Int32)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			wg.Go(func() { defer nc.Close(); Serve(nc, nil, handle) })
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", l.Addr().String())
	}, accepted
}

func echo(kind byte, payload, reply []byte) ([]byte, bool) {
	return append(append(reply, kind), payload...), kind != 99
}

func in(d time.Duration) time.Time { return time.Now().Add(d) }

func TestManyQuestionsOverOneConnection(t *testing.T) {
	dial, accepted := server(t, echo)
	c := &Client{Dial: dial}
	defer c.Close()
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			payload := bytes.Repeat([]byte{byte(i)}, i*7)
			got, err := c.Call(t.Context(), in(5*time.Second), 3, payload, nil)
			assert.NoError(t, err)
			assert.Equal(t, append([]byte{3}, payload...), got)
		})
	}
	wg.Wait()
	assert.EqualValues(t, 1, accepted.Load())
}

func TestLargeAnswer(t *testing.T) {
	big := bytes.Repeat([]byte("digest"), 100_000)
	dial, _ := server(t, func(kind byte, payload, reply []byte) ([]byte, bool) { return append(reply, big...), true })
	c := &Client{Dial: dial}
	defer c.Close()
	got, err := c.Call(t.Context(), in(5*time.Second), 1, nil, nil)
	require.NoError(t, err)
	assert.Equal(t, big, got)
}

func TestNoAnswerMeansTimeoutAndTheLinkLivesOn(t *testing.T) {
	dial, accepted := server(t, echo)
	c := &Client{Dial: dial}
	defer c.Close()
	_, err := c.Call(t.Context(), in(30*time.Millisecond), 99, nil, nil)
	assert.ErrorIs(t, err, ErrTimeout)
	_, err = c.Call(t.Context(), in(5*time.Second), 1, nil, nil)
	assert.NoError(t, err)
	assert.EqualValues(t, 1, accepted.Load())
}

func TestCancelledQuestion(t *testing.T) {
	dial, _ := server(t, echo)
	c := &Client{Dial: dial}
	defer c.Close()
	gone := errors.New("client hung up")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(20*time.Millisecond, func() { cancel(gone) })
	_, err := c.Call(ctx, in(5*time.Second), 99, nil, nil)
	assert.ErrorIs(t, err, gone)
}

func TestBrokenConnectionFailsQuestionsAndIsDialledAgain(t *testing.T) {
	var conns []net.Conn
	var mu sync.Mutex
	dial, accepted := server(t, echo)
	c := &Client{Dial: func(ctx context.Context) (net.Conn, error) {
		nc, err := dial(ctx)
		mu.Lock()
		conns = append(conns, nc)
		mu.Unlock()
		return nc, err
	}}
	defer c.Close()
	done := make(chan error, 1)
	go func() {
		_, err := c.Call(t.Context(), in(5*time.Second), 99, nil, nil)
		done <- err
	}()
	require.Eventually(t, func() bool { return accepted.Load() == 1 }, time.Second, time.Millisecond)
	time.Sleep(20 * time.Millisecond)
	mu.Lock()
	conns[0].Close()
	mu.Unlock()
	assert.ErrorIs(t, <-done, ErrClosed)
	_, err := c.Call(t.Context(), in(5*time.Second), 1, nil, nil)
	assert.NoError(t, err)
	assert.EqualValues(t, 2, accepted.Load())
}

// pipes dials in memory, so that time is the bubble's.
func pipes(handle Handler, wg *sync.WaitGroup) func(context.Context) (net.Conn, error) {
	return func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		wg.Go(func() { defer b.Close(); Serve(b, nil, handle) })
		return a, nil
	}
}

func TestRefusedDialIsNotRepeatedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := errors.New("refused")
		dials := 0
		c := &Client{Dial: func(context.Context) (net.Conn, error) { dials++; return nil, refused }}
		defer c.Close()
		for range 50 {
			_, err := c.Call(t.Context(), in(5*time.Millisecond), 1, nil, nil)
			assert.ErrorIs(t, err, refused)
		}
		assert.Equal(t, 1, dials)
		time.Sleep(redial)
		_, err := c.Call(t.Context(), in(5*time.Millisecond), 1, nil, nil)
		assert.ErrorIs(t, err, refused)
		assert.Equal(t, 2, dials)
	})
}

func TestIdleConnectionIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var wg sync.WaitGroup
		dials := 0
		dial := pipes(echo, &wg)
		c := &Client{Idle: 10 * time.Second, Dial: func(ctx context.Context) (net.Conn, error) { dials++; return dial(ctx) }}
		ask := func() {
			_, err := c.Call(t.Context(), in(time.Second), 1, []byte("x"), nil)
			require.NoError(t, err)
		}
		ask()
		time.Sleep(9 * time.Second)
		ask()
		time.Sleep(9 * time.Second)
		ask()
		assert.Equal(t, 1, dials)
		time.Sleep(11 * time.Second)
		wg.Wait() // the far end saw the close
		ask()
		assert.Equal(t, 2, dials)
		c.Close()
		wg.Wait()
	})
}

func TestCloseFailsWhatIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var wg sync.WaitGroup
		c := &Client{Dial: pipes(echo, &wg)}
		done := make(chan error, 1)
		go func() {
			_, err := c.Call(t.Context(), in(time.Hour), 99, nil, nil)
			done <- err
		}()
		synctest.Wait()
		c.Close()
		assert.ErrorIs(t, <-done, ErrClosed)
		_, err := c.Call(t.Context(), in(time.Hour), 1, nil, nil)
		assert.ErrorIs(t, err, ErrClosed)
		wg.Wait()
	})
}

func TestGoAsksManyPeersAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var wg sync.WaitGroup
		clients := make([]*Client, 4)
		for i := range clients {
			clients[i] = &Client{Dial: pipes(func(kind byte, payload, reply []byte) ([]byte, bool) {
				return append(reply, byte(i)), i != 2 // the third keeps silent
			}, &wg)}
		}
		for round := range 2 { // the first dials, the second finds the connections open
			out := make(chan Result, len(clients))
			var forget []func()
			for i, c := range clients {
				forget = append(forget, c.Go(in(5*time.Millisecond), 1, []byte("q"), i, out))
			}
			synctest.Wait()
			assert.Len(t, out, 3, "round %d", round)
			for range 3 {
				r := <-out
				assert.NoError(t, r.Err)
				assert.Equal(t, []byte{byte(r.Index)}, r.Reply)
			}
			for _, f := range forget {
				f()
			}
			synctest.Wait()
			if round == 1 {
				assert.Empty(t, clients[2].conn.waiting)
			}
		}
		for _, c := range clients {
			assert.True(t, c.Open())
			c.Close()
		}
		out := make(chan Result, 1)
		clients[0].Go(in(time.Second), 1, nil, 7, out)
		assert.ErrorIs(t, (<-out).Err, ErrClosed)
		wg.Wait()
	})
}

func TestServeRefusesBrokenFrames(t *testing.T) {
	for name, in := range map[string][]byte{
		"too long":  {0xff, 0xff, 0xff, 0x7f, 1, 0, 0, 0, 0, 0, 0, 0, 0},
		"too short": {1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0},
		"answer":    appendFrame(nil, 0x81, 1, nil),
		"cut":       appendFrame(nil, 1, 1, []byte("payload"))[:15],
	} {
		t.Run(name, func(t *testing.T) {
			a, b := net.Pipe()
			done := make(chan error, 1)
			go func() { done <- Serve(b, nil, echo); b.Close() }()
			a.Write(in)
			a.Close()
			assert.Error(t, <-done)
		})
	}
}

// FuzzServe: no bytes make it fail in any way but by an error.
func FuzzServe(f *testing.F) {
	f.Add(appendFrame(appendFrame(nil, 1, 1, []byte("a")), 2, 2, nil))
	f.Fuzz(func(t *testing.T, in []byte) {
		Serve(&memory{Reader: bytes.NewReader(in)}, nil, echo)
	})
}

type memory struct {
	*bytes.Reader
	out bytes.Buffer
}

func (m *memory) Write(p []byte) (int, error)        { return m.out.Write(p) }
func (m *memory) SetWriteDeadline(t time.Time) error { return nil }

func BenchmarkCall(b *testing.B) {
	dial, _ := server(b, echo)
	c := &Client{Dial: dial}
	defer c.Close()
	payload := make([]byte, 64)
	var reply []byte
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if reply, err = c.Call(b.Context(), in(time.Second), 1, payload, reply[:0]); err != nil {
			b.Fatal(err)
		}
	}
}
