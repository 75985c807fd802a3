package routing

import (
	"math/rand/v2"
	"testing"
	"time"
)

// bigTable returns a table of n ready members that all list one model, with busy records.
func bigTable(n int) *Table {
	now := time.Unix(1000, 0)
	t := NewTable(Member{Boot: 1, Version: AskVersion})
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range n {
		boot := uint64(i) + 1
		t.SetMember(Member{Boot: boot, Version: AskVersion}, now)
		t.SetModels(boot, []Model{{ID: "m", ContextLength: 1 << 20, Aliases: []string{"alias"}}}, ServeChat, now)
		t.Update(busy(boot, 1, rnd), now)
	}
	return t
}

func busy(boot uint64, seq uint32, rnd *rand.Rand) Report {
	return Report{Boot: boot, Seq: seq, State: StateReady, Heartbeat: time.Hour,
		Running: Some(rnd.IntN(40)), Waiting: Some(rnd.IntN(3)), Held: Some(0), RunLimit: Some(256),
		PendingTokens: Some(rnd.IntN(9000)), HeldTokens: Some(0), KVCapacity: Some(430_000), KVUsed: Some(rnd.Float64() * 0.9),
		PrefillRate: Some(28_000 + 2000*rnd.Float64())}
}

func benchPick(b *testing.B, policy string, n int, prefix int) {
	t := bigTable(n)
	p, err := NewPolicy(policy)
	if err != nil {
		b.Fatal(err)
	}
	now := time.Unix(1001, 0)
	rnd := rand.New(rand.NewPCG(3, 4))
	r := Request{Model: "m", Service: ServeChat, PromptTokens: 9000}
	for i := range prefix {
		r.Prefix = append(r.Prefix, mix(uint64(i))&^FineBlock)
	}
	for boot := uint64(2); boot < 200; boot++ {
		var blocks []uint32
		for i := range 800 {
			h := uint32(mix(boot<<20 + uint64(i)))
			if boot < 5 && i < prefix-int(boot) {
				h = uint32(r.Prefix[i])
			}
			blocks = append(blocks, h)
		}
		if prefix > 0 {
			t.SetDigest(boot, 1, blocks, now)
		}
	}
	s := t.Snapshot()
	p.Pick(s, &r, now, rnd)
	b.ReportAllocs()
	for b.Loop() {
		d := p.Pick(s, &r, now, rnd)
		if d.Peer == nil {
			b.Fatal(d.Reason)
		}
	}
}

func BenchmarkPickP2C1000(b *testing.B)        { benchPick(b, "p2c", 1000, 0) }
func BenchmarkPickAuto1000(b *testing.B)       { benchPick(b, "auto", 1000, 0) }
func BenchmarkPickAutoPrefix1000(b *testing.B) { benchPick(b, "auto", 1000, 17) }
func BenchmarkPickAuto16(b *testing.B)         { benchPick(b, "auto", 16, 0) }

func BenchmarkUpdate1000(b *testing.B) {
	t := bigTable(1000)
	now := time.Unix(1001, 0)
	r := busy(7, 2, rand.New(rand.NewPCG(1, 2)))
	b.ReportAllocs()
	for b.Loop() {
		r.Seq++
		if !t.Update(r, now) {
			b.Fatal("refused")
		}
	}
}

func BenchmarkSentDone(b *testing.B) {
	t := bigTable(8)
	p := t.Peer(3)
	now := time.Unix(1001, 0)
	b.ReportAllocs()
	for b.Loop() {
		p.Sent(900, now)
		p.FirstToken(900, now)
		p.Done(OutcomeOK, 0, now)
	}
}
