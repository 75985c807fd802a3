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

// C10: hanging up reaches the engine at once, on every path, before the first token too.
func TestC10HangUpReachesEngine(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		for _, stream := range []bool{false, true} {
			for _, when := range []string{"silent", "head", "content"} {
				t.Run(fmt.Sprintf("h2=%v stream=%v %s", h2, stream, when), func(t *testing.T) {
					hops(t, func(t *testing.T, order []uint64, target int) {
						e := engine(func(_ int, w http.ResponseWriter, r *http.Request) {
							if when != "silent" {
								eventHead(w)
							}
							if when == "content" {
								say(w, chunk("a"))
							}
							<-r.Context().Done()
						})
						f := newFleet(t, order, nil, pair(target, e)...)
						f.hc = f.client(h2)
						ctx, cancel := context.WithCancel(context.Background())
						start := time.Now()
						time.AfterFunc(200*time.Millisecond, cancel)
						resp, err := f.post(ctx, chatBody(stream))
						if err == nil {
							_, err = io.ReadAll(resp.Body)
						}
						require.ErrorIs(t, err, context.Canceled)
						synctest.Wait()
						require.Len(t, e.hungUp(), 1)
						assert.Equal(t, 200*time.Millisecond, e.hungUp()[0].Sub(start), "no time passes in the agents")
						f.idle()
						m := f.metrics(0)
						assert.EqualValues(t, 1, m.EntryByOutcome[outcomeCancel])
						assert.Equal(t, 1, e.count(), "a hang-up is never replayed")
					})
				})
			}
		}
	}
}

// C12: clients that hang up are nobody's failure, and neither are those that stop in the middle of an upload.
func TestC12CancelsAreNobodysFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := engine(func(_ int, w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		f := newFleet(t, []uint64{1}, nil, e)
		for range 100 {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
			_, err := f.post(ctx, chatBody(false))
			require.Error(t, err)
			cancel()
		}
		synctest.Wait()
		for range 50 {
			c, err := f.net.dial(context.Background(), "", f.clients[0])
			require.NoError(t, err)
			_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"+
				`{"model":"m","messages":[{"content":"%s`, chatPath, 5<<20, strings.Repeat("x", 64<<10))
			require.NoError(t, err)
			_ = c.Close()
		}
		synctest.Wait()
		m := f.metrics(0)
		assert.EqualValues(t, 150, m.EntryByOutcome[outcomeCancel]+m.EntryByOutcome[outcomeClientError])
		assert.GreaterOrEqual(t, m.EntryByOutcome[outcomeCancel], uint64(100))
		assert.Equal(t, 100, e.count(), "a cut upload never reaches the engine")
		assert.False(t, f.agents[0].Suspect(time.Now()))
		f.idle()
	})
}
