package gossiptest

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		n.SetDelay(5*time.Millisecond, 10*time.Millisecond)
		a, b := n.Listen(), n.Listen()
		got := func() bool {
			_, err := a.WriteTo([]byte("hello"), b.Addr())
			require.NoError(t, err)
			select {
			case p := <-b.PacketCh():
				assert.Equal(t, "hello", string(p.Buf))
				assert.Equal(t, a.Addr(), p.From.String())
				return true
			case <-time.After(time.Second):
				return false
			}
		}
		began := time.Now()
		assert.True(t, got())
		assert.GreaterOrEqual(t, time.Since(began), 5*time.Millisecond)
		n.SetLoss(1)
		assert.False(t, got())
		n.SetLoss(0)
		n.BlockUDP(b.Addr(), true)
		assert.False(t, got())
		n.BlockUDP(b.Addr(), false)

		n.Partition([]string{a.Addr()})
		assert.False(t, got())
		began = time.Now()
		_, err := a.DialTimeout(b.Addr(), 2*time.Second)
		require.ErrorContains(t, err, "i/o timeout")
		assert.Equal(t, 2*time.Second, time.Since(began))
		n.Heal()
		assert.True(t, got())

		go func() {
			c := <-b.StreamCh()
			_, _ = c.Write([]byte("hi"))
		}()
		c, err := a.DialTimeout(b.Addr(), time.Second)
		require.NoError(t, err)
		buf := make([]byte, 2)
		_, err = c.Read(buf)
		require.NoError(t, err)
		assert.Equal(t, "hi", string(buf))
		n.Partition([]string{a.Addr()})
		_, err = c.Write([]byte("x"))
		require.Error(t, err)
		n.Heal()

		require.NoError(t, b.Shutdown())
		_, err = a.DialTimeout(b.Addr(), time.Second)
		require.ErrorContains(t, err, "connection refused")
		_, err = b.WriteTo([]byte("x"), a.Addr())
		require.Error(t, err)
		assert.EqualValues(t, 3, n.Traffic().Lost)
	})
}
