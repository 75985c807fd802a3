package gossip_test

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/routing"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestProbePeer: real nodes on loopback answer a ping over both protocols exactly if key and cluster are theirs, and do
// not learn of whoever asks.
func TestProbePeer(t *testing.T) {
	key, other := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	start := func(keys [][]byte) *gossip.Node {
		n, err := gossip.New(gossip.Config{NodeName: "n", Member: routing.Member{Boot: 7, Addr: "127.0.0.1:1"}, Cluster: "c",
			Listen: "127.0.0.1:0", Keys: keys, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		t.Cleanup(n.Close)
		return n
	}
	keyed, plain := start([][]byte{key}), start(nil)
	for _, row := range []struct {
		name    string
		node    *gossip.Node
		cluster string
		keys    [][]byte
		ok      bool
	}{
		{"same key", keyed, "c", [][]byte{key}, true},
		{"second of our keys is newer", keyed, "c", [][]byte{key, other}, true},
		{"another key", keyed, "c", [][]byte{other}, false},
		{"no key against a key", keyed, "c", nil, false},
		{"another cluster", keyed, "d", [][]byte{key}, false},
		{"plain", plain, "c", nil, true},
		{"plain, another cluster", plain, "d", nil, false},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		p := gossip.ProbePeer(ctx, row.node.Addr(), row.cluster, row.keys)
		cancel()
		if row.ok {
			assert.NoError(t, p.TCP, row.name)
			assert.NoError(t, p.UDP, row.name)
		} else {
			assert.ErrorIs(t, p.TCP, gossip.ErrNoAnswer, row.name)
			assert.ErrorIs(t, p.UDP, gossip.ErrNoAnswer, row.name)
		}
		assert.Equal(t, 1, row.node.Alive(), row.name)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	free := ln.Addr().String()
	require.NoError(t, ln.Close())
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	p := gossip.ProbePeer(ctx, free, "c", nil)
	assert.ErrorContains(t, p.TCP, "refused")
	assert.Error(t, p.UDP)
}

func TestResolve(t *testing.T) {
	as, err := gossip.Resolve(t.Context(), "127.0.0.1", 9, nil)
	require.NoError(t, err)
	assert.Equal(t, []string{"127.0.0.1:9"}, as)
	_, err = gossip.Resolve(t.Context(), "a/b", 9, nil)
	assert.Error(t, err)
}
