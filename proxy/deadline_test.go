package proxy

import (
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestGRPCTimeout(t *testing.T) {
	for in, want := range map[string]time.Duration{"10S": 10 * time.Second, "1H": time.Hour, "250m": 250 * time.Millisecond,
		"7u": 7 * time.Microsecond, "": 0, "S": 0, "-1S": 0, "1x": 0, "123456789S": 0, "1.5S": 0} {
		assert.Equal(t, want, grpcTimeout(in), in)
	}
	for in, want := range map[string]time.Duration{"2": 2 * time.Second, " 0.5 ": 500 * time.Millisecond, "": 0, "x": 0, "-1": 0,
		"0": 0, "NaN": 0, "Inf": 0, "1e30": 0} {
		assert.Equal(t, want, seconds(in), in)
	}
}

// A client's deadline bounds the whole; what SDKs send with each request bounds only the first byte and silence.
func TestClientDeadlines(t *testing.T) {
	for _, c := range []struct {
		header, value string
		ends          time.Duration // 0: the answer is whole
		status        int
	}{
		{headerTimeout, "30", 0, 200}, {headerTimeout, "3.5", 3500 * time.Millisecond, 200}, {headerTimeout, "0.5", 500 * time.Millisecond, 504},
		{headerSDKTimeout, "3", 0, 200}, {headerSDKRead, "1.5", 1500 * time.Millisecond, 200}, {headerSDKTimeout, "0.5", 500 * time.Millisecond, 504},
	} {
		t.Run(c.header+" "+c.value, func(t *testing.T) {
			hops(t, func(t *testing.T, order []uint64, target int) {
				e := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
					time.Sleep(time.Second)
					eventHead(w)
					for range 4 {
						say(w, chunk("a"))
						time.Sleep(2 * time.Second)
					}
					say(w, finishChunk+doneChunk)
				})
				f := newFleet(t, order, nil, pair(target, e)...)
				start := time.Now()
				resp, err := f.post(t.Context(), chatBody(true), c.header, c.value)
				require.NoError(t, err)
				assert.Equal(t, c.status, resp.StatusCode)
				_, err = io.ReadAll(resp.Body)
				took := time.Since(start)
				switch {
				case c.ends == 0:
					assert.NoError(t, err)
				case c.status == 504:
					assert.NoError(t, err)
					assert.Equal(t, c.ends, took)
					assert.NotEmpty(t, resp.Header.Get(headerReason))
				default:
					assert.ErrorIs(t, err, io.ErrUnexpectedEOF)
					if c.header == headerTimeout {
						assert.Equal(t, c.ends, took)
					}
				}
				if c.ends > 0 {
					assert.EqualValues(t, 1, f.metrics(0).EntryByOutcome[outcomeTimeout])
				}
				time.Sleep(10 * time.Second)
				f.idle()
				assert.Equal(t, 1, e.count())
			})
		})
	}
}
