package proxy

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// C07: nothing is put into a stream, however long it is silent, with ids or without.
func TestC07NothingIsInjected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pieces := []string{roleChunk, "id: 7\n" + chunk("a"), "id: 8\n" + chunk("b"), finishChunk, doneChunk}
		e := streams(time.Minute, pieces...)
		f := newFleet(t, []uint64{2, 1}, nil, e, e)
		begin := time.Now()
		_, got, err := f.get(chatBody(true))
		require.NoError(t, err)
		var want string
		for _, p := range pieces {
			want += p
		}
		assert.Equal(t, want, got)
		assert.Greater(t, time.Since(begin), 3*time.Minute, "it was silent for minutes")
	})
}
