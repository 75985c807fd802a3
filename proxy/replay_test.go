package proxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func newBody(src io.Reader, limit, keep int64, budget *replayBudget) *body {
	return new(body).begin(src, limit, keep, budget)
}

func never() bool { return false }

func TestBodyIsKeptAndReadAgain(t *testing.T) {
	for _, size := range []int{0, 1, 4095, 4096, 4097, 70_000, 1 << 20} {
		for _, known := range []bool{true, false} {
			in := make([]byte, size)
			for i := range in {
				in[i] = byte(rand.Uint32())
			}
			budget := &replayBudget{limit: 4 << 20}
			length := int64(-1)
			if known {
				length = int64(size)
			}
			b := newBody(iotest.HalfReader(bytes.NewReader(in)), 1<<30, 1<<30, budget)
			var seen bytes.Buffer
			require.NoError(t, b.fill(context.Background(), length, func(p []byte) { seen.Write(p) }, never))
			assert.Equal(t, in, append([]byte{}, seen.Bytes()...))
			require.True(t, b.complete())
			for range 2 {
				r := b.open()
				out, err := io.ReadAll(r)
				require.NoError(t, err)
				require.True(t, bytes.Equal(in, out), "%d", size)
				require.NoError(t, r.Close())
				require.NoError(t, r.Close(), "twice is once")
			}
			assert.True(t, b.again())
			assert.Positive(t, budget.used.Load())
			b.release()
			assert.Zero(t, budget.used.Load())
		}
	}
}

// The memory stays while a reader is open: the upstream may still send when the exchange is over.
func TestBodyOutlivesItsExchange(t *testing.T) {
	budget := &replayBudget{limit: 1 << 20}
	b := newBody(strings.NewReader(strings.Repeat("x", 10_000)), 1<<30, 1<<30, budget)
	require.NoError(t, b.fill(context.Background(), 10_000, func([]byte) {}, never))
	r := b.open()
	b.release()
	out, err := io.ReadAll(r)
	require.NoError(t, err)
	assert.Len(t, out, 10_000)
	assert.Positive(t, budget.used.Load())
	require.NoError(t, r.Close())
	assert.Zero(t, budget.used.Load())
	_, err = r.Read(make([]byte, 1))
	assert.ErrorIs(t, err, io.ErrClosedPipe)
}

// Past the budget, of one body or of all, the rest goes through once.
func TestBodyPastTheBudget(t *testing.T) {
	in := strings.Repeat("0123456789", 20_000)
	for name, c := range map[string]struct {
		keep, all int64
	}{"its own": {16 << 10, 1 << 30}, "that of all": {1 << 30, 1}} {
		t.Run(name, func(t *testing.T) {
			b := newBody(strings.NewReader(in), 1<<30, c.keep, &replayBudget{limit: c.all})
			defer b.release()
			require.NoError(t, b.fill(context.Background(), int64(len(in)), func([]byte) {}, never))
			require.False(t, b.complete())
			require.Positive(t, b.n)
			assert.True(t, b.again(), "nothing past it has gone out")
			r := b.open()
			out, err := io.ReadAll(r)
			require.NoError(t, err)
			assert.Equal(t, in, string(out))
			assert.False(t, b.again())
		})
	}
}

func TestBodyErrors(t *testing.T) {
	boom := errors.New("boom")
	b := newBody(io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(boom)), 1<<30, 1<<30, &replayBudget{limit: 1 << 20})
	require.ErrorIs(t, b.fill(context.Background(), 10, func([]byte) {}, never), boom)
	assert.ErrorIs(t, b.failure(), boom)
	assert.False(t, b.again())
	b.release()

	b = newBody(strings.NewReader("abcdef"), 5, 1<<30, &replayBudget{limit: 1 << 20})
	require.ErrorIs(t, b.fill(context.Background(), -1, func([]byte) {}, never), errBodyTooLarge)
	b.release()

	b = newBody(strings.NewReader(strings.Repeat("x", 100<<10)), 90<<10, 1, &replayBudget{limit: 1 << 20})
	require.NoError(t, b.fill(context.Background(), -1, func([]byte) {}, never))
	_, err := io.ReadAll(b.open())
	require.ErrorIs(t, err, errBodyTooLarge, "also in what goes through")
	assert.ErrorIs(t, b.failure(), errBodyTooLarge)
}
