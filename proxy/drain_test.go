package proxy

import (
	"context"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// A draining target refuses, and its entry moves the request without counting an attempt.
func TestDrainingTargetIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e1, e2 := answers(200, "1"), answers(200, "2")
		f := newFleet(t, []uint64{2, 1}, nil, e1, e2)
		f.agents[1].SetDraining(true)
		resp, text, err := f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, 200, resp.StatusCode)
		assert.Equal(t, "1", text)
		assert.Zero(t, e2.count())
		assert.EqualValues(t, 1, f.metrics(0).Retries[retryRefused])
		f.idle()
	})
}

// A draining entry goes on answering, closes its connections, and serves itself only when it is the last.
func TestDrainingEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e1, e2 := answers(200, "1"), answers(200, "2")
		f := newFleet(t, []uint64{2}, nil, e1, e2)
		f.hc = f.client(true)
		f.agents[0].SetDraining(true)
		resp, text, err := f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, "2", text)
		assert.Equal(t, 200, resp.StatusCode)
		f.hc = &http.Client{Transport: &http.Transport{DialContext: f.net.dial}}
		resp, _, err = f.get(chatBody(false))
		require.NoError(t, err)
		assert.True(t, resp.Close, "Connection: close")

		f.agents[0].cfg.Policy = nobodyBecause(routing.ReasonNoneUsable)
		_, text, err = f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, "1", text, "the last one serves while its engine lives (C84)")
		f.agents[0].SetDraining(false)
		resp, _, err = f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, 503, resp.StatusCode)
		f.idle()
	})
}

// Running streams finish while draining; at the deadline they are cut and say so.
func TestCut(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := engine(func(_ int, w http.ResponseWriter, r *http.Request) {
			eventHead(w)
			say(w, chunk("a"))
			<-r.Context().Done()
		})
		f := newFleet(t, order, nil, pair(target, e)...)
		resp, err := f.post(context.Background(), chatBody(true))
		require.NoError(t, err)
		f.agents[0].SetDraining(true)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		require.ErrorIs(t, f.agents[0].Wait(ctx), context.DeadlineExceeded)
		f.agents[0].Cut()
		text, err := io.ReadAll(resp.Body)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.Equal(t, chunk("a")+string(errDraining.Event()), string(text))
		require.NoError(t, f.agents[0].Wait(context.Background()))
		synctest.Wait()
		assert.Len(t, e.hungUp(), 1)
		f.idle()
	})
}

// A target that cuts its streams at its deadline leaves the decision to the entry.
func TestCutAtTheTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := engine(func(_ int, w http.ResponseWriter, r *http.Request) {
			eventHead(w)
			<-r.Context().Done()
		})
		good := streams(0, chunk("x")+finishChunk+doneChunk)
		f := newFleet(t, []uint64{2, 1}, nil, good, e)
		time.AfterFunc(time.Second, f.agents[1].Cut)
		_, text, err := f.get(chatBody(true))
		require.NoError(t, err)
		assert.Equal(t, chunk("x")+finishChunk+doneChunk, text)
		f.idle()
	})
}
