package proxy

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestOwnRecordIsMadeAtMostOnceAMillisecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			r    ownRecord
			made byte
		)
		text := func(fresh bool) string { return r.text(func() []byte { made++; return []byte{made} }, fresh) }
		first := text(false)
		assert.Equal(t, first, text(false))
		second := text(true) // a refusal's is of now
		assert.NotEqual(t, first, second)
		assert.Equal(t, second, text(false))
		time.Sleep(recordAge)
		assert.NotEqual(t, second, text(false))
		assert.EqualValues(t, 3, made)
	})
}
