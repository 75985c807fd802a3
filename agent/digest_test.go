package agent

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/routing"
)

// knows returns how many of an agent's own blocks another agent believes to be cached there.
func knows(b *runner, boot uint64, blocks []uint32) int {
	p := b.table.Peer(boot)
	if p == nil {
		return 0
	}
	n := 0
	for _, x := range blocks {
		if b.table.Uncached(p, &routing.Request{PromptTokens: 1024, Prefix: []uint64{uint64(x)}}, time.Now()) < 1024 {
			n++
		}
	}
	return n
}

// What went through an engine is known to the others by deltas, to one who joins later by the whole digest, and to the
// engine's next agent by a peer that remembers.
func TestDigestTravelsAndComesBack(t *testing.T) {
	t.Parallel()
	eng := startSim(t, fast())
	cfg := loopbackConfig(eng.url())
	cfg.GossipKey, cfg.Policy = testKey, "local"
	a := start(t, cfg, Options{})
	other := loopbackConfig(startSim(t, fast()).url())
	other.GossipKey, other.Join = testKey, []string{a.Addresses().Gossip}
	b := start(t, other, Options{})
	a.untilReady()
	b.untilReady()
	for i := range 5 {
		text := strings.Repeat(fmt.Sprintf("session %d says ", i), 700) // some 10 KB: 4 blocks and a rest
		code, body := a.chat(fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":2}`, text))
		require.Equal(t, 200, code, body)
	}
	blocks, _ := a.digests.own.Blocks()
	require.GreaterOrEqual(t, len(blocks), 20)
	b.eventually(10*time.Second, "digest by deltas", func() bool { return knows(b, a.boot, blocks) == len(blocks) })

	other.Join = []string{a.Addresses().Gossip}
	other.EngineURL = startSim(t, fast()).url()
	c := start(t, other, Options{})
	c.eventually(10*time.Second, "whole digest", func() bool { return knows(c, a.boot, blocks) == len(blocks) })
	b.eventually(15*time.Second, "the engine's start", func() bool {
		b.digests.mu.Lock()
		defer b.digests.mu.Unlock()
		return b.digests.starts[a.member.Addr] != 0
	})

	// The agent starts anew at its address, the engine goes on.
	cfg.PeerListen, cfg.Join = a.Addresses().Peer, []string{b.Addresses().Gossip}
	require.NoError(t, a.stop())
	again := start(t, cfg, Options{})
	again.eventually(15*time.Second, "own digest taken back", func() bool { return again.digests.own.Len() >= len(blocks) })
	b.eventually(10*time.Second, "digest of the next life", func() bool { return knows(b, again.boot, blocks) == len(blocks) })

	// The engine starts anew: its cache is empty, and all learn that.
	eng.stop()
	again.eventually(10*time.Second, "the engine's end", func() bool { ok, _ := again.Ready(); return !ok })
	eng.start()
	again.untilReady()
	again.eventually(10*time.Second, "an empty digest", func() bool { return again.digests.own.Len() == 0 })
	b.eventually(15*time.Second, "news of it", func() bool { return knows(b, again.boot, blocks) == 0 })
}

// While a key is being replaced, agents that start with the old and the new one share prefixes with those that had the old one
// alone; and again when the old one is gone.
func TestPrefixesAreSharedWhileKeysRotate(t *testing.T) {
	t.Parallel()
	const newer = "b2JzY3VyZWx5LWRpZmZlcmVudC1rZXktMDEyMzQ1Njc="
	cfg := loopbackConfig(startSim(t, fast()).url())
	cfg.GossipKey, cfg.Policy = testKey, "local"
	a := start(t, cfg, Options{})
	require.NoError(t, a.changeKeys("install", newer))
	cfg.EngineURL, cfg.GossipKey, cfg.Join = startSim(t, fast()).url(), newer+","+testKey, []string{a.Addresses().Gossip}
	b := start(t, cfg, Options{})
	a.untilReady()
	b.untilReady()
	same := func(text string) bool {
		body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":2}`, strings.Repeat(text, 1000))
		for _, r := range []*runner{a, b} {
			code, answer := r.chat(body)
			require.Equal(t, 200, code, answer)
		}
		x, _ := a.digests.own.Blocks()
		y, _ := b.digests.own.Blocks()
		return len(x) > 0 && slices.Equal(x, y)
	}
	assert.True(t, same("both keys "))
	old := gossip.KeyID(a.keys[0])
	require.NoError(t, a.changeKeys("use", gossip.KeyID(b.keys[0])))
	require.NoError(t, b.changeKeys("remove", old))
	assert.False(t, same("one is ahead "))
	require.NoError(t, a.changeKeys("remove", old))
	assert.Zero(t, a.digests.own.Len(), "what it held says nothing any more")
	b.digests.own.Clear()
	assert.True(t, same("the new key "))
}

// A digest says nothing to who has another key.
func TestDigestIsSalted(t *testing.T) {
	t.Parallel()
	var all [][]uint32
	for _, key := range []string{testKey, "b2JzY3VyZWx5LWRpZmZlcmVudC1rZXktMDEyMzQ1Njc="} {
		cfg := loopbackConfig(startSim(t, fast()).url())
		cfg.GossipKey = key
		a := start(t, cfg, Options{})
		a.untilReady()
		code, body := a.chat(fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":2}`, strings.Repeat("secret ", 1000)))
		require.Equal(t, 200, code, body)
		blocks, _ := a.digests.own.Blocks()
		require.NotEmpty(t, blocks)
		all = append(all, blocks)
	}
	for _, x := range all[0] {
		assert.NotContains(t, all[1], x)
	}
}
