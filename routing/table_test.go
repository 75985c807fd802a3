package routing

import (
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var t0 = time.Unix(1000, 0)

// newFleet returns a table of n ready members with boot ids 1..n that list model "m"; 1 is ourselves.
func newFleet(n int) *Table {
	t := NewTable(Member{Boot: 1, Version: AskVersion})
	for i := range n {
		boot := uint64(i + 1)
		t.SetMember(Member{Boot: boot, Version: AskVersion}, t0)
		t.SetModels(boot, []Model{{ID: "m"}}, 0, t0)
		t.Update(ready(boot, 1), t0)
	}
	return t
}

// ready is an idle replica's record.
func ready(boot uint64, seq uint32) Report {
	return Report{Boot: boot, Seq: seq, State: StateReady, Heartbeat: time.Second, PrefillRate: Some(10_000.0),
		Running: Some(0), Waiting: Some(0), Held: Some(0), PendingTokens: Some(0), HeldTokens: Some(0)}
}

func TestUpdateOrder(t *testing.T) {
	tests := []struct {
		name     string
		old, new uint32
		want     bool
	}{
		{"next", 5, 6, true},
		{"jump", 5, 500, true},
		{"duplicate", 5, 5, false},
		{"older", 5, 4, false},
		{"wraps", math.MaxUint32, 0, true},
		{"wraps back", 0, math.MaxUint32, false},
		{"half the circle is old", 0, 1 << 31, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tbl := NewTable(Member{Boot: 1})
			tbl.SetMember(Member{Boot: 2}, t0)
			require.True(t, tbl.Update(Report{Boot: 2, Seq: tt.old}, t0))
			assert.Equal(t, tt.want, tbl.Update(Report{Boot: 2, Seq: tt.new, Running: Some(7)}, t0.Add(time.Second)))
			r, at := tbl.Peer(2).Report()
			assert.Equal(t, tt.want, r.Running.OK)
			assert.Equal(t, tt.want, at.After(t0))
		})
	}
}

func TestRestartIsANewKey(t *testing.T) {
	tbl := NewTable(Member{Boot: 1})
	tbl.SetMember(Member{Boot: 2, Node: "pod"}, t0)
	tbl.Update(Report{Boot: 2, Seq: 9000}, t0)
	tbl.RemoveMember(2, t0)
	tbl.SetMember(Member{Boot: 3, Node: "pod"}, t0)
	assert.True(t, tbl.Update(Report{Boot: 3, Seq: 1}, t0))
	assert.Nil(t, tbl.Peer(2))
}

func TestParkedRecords(t *testing.T) {
	tbl := NewTable(Member{Boot: 1})
	assert.False(t, tbl.Update(Report{Boot: 2, Seq: 5, Running: Some(5)}, t0))
	assert.False(t, tbl.Update(Report{Boot: 2, Seq: 4, Running: Some(4)}, t0))
	tbl.SetMember(Member{Boot: 2}, t0.Add(4*time.Second))
	r, at := tbl.Peer(2).Report()
	assert.Equal(t, Some(5), r.Running, "the newest of the parked")
	assert.Equal(t, t0, at, "its age counts from its receipt")

	tbl.Update(Report{Boot: 3, Seq: 1}, t0)
	tbl.SetMember(Member{Boot: 3}, t0.Add(6*time.Second))
	_, at = tbl.Peer(3).Report()
	assert.True(t, at.IsZero(), "older than 5 s: forgotten")

	for i := range 300 {
		tbl.Update(Report{Boot: uint64(100 + i), Seq: 1}, t0.Add(10*time.Second))
	}
	assert.Len(t, tbl.parked, parkedMax)
	tbl.SetMember(Member{Boot: 100}, t0.Add(10*time.Second))
	tbl.SetMember(Member{Boot: 399}, t0.Add(10*time.Second))
	_, old := tbl.Peer(100).Report()
	_, young := tbl.Peer(399).Report()
	assert.True(t, old.IsZero(), "the oldest fell out")
	assert.False(t, young.IsZero())
}

func TestAges(t *testing.T) {
	tbl := NewTable(Member{Boot: 1})
	tbl.SetMember(Member{Boot: 2}, t0)
	p := tbl.Peer(2)
	assert.Equal(t, Opt[time.Duration]{}, p.Age(t0), "unknown before the first record")
	assert.True(t, p.Stale(t0))
	tbl.Update(Report{Boot: 2, Seq: 1, Heartbeat: time.Second, Age: 300 * time.Millisecond}, t0)
	tests := []struct {
		after        time.Duration
		fresh, stale bool
	}{
		{0, true, false},
		{700 * time.Millisecond, true, false},
		{701 * time.Millisecond, false, false},
		{2700 * time.Millisecond, false, false},
		{2701 * time.Millisecond, false, true},
	}
	for _, tt := range tests {
		now := t0.Add(tt.after)
		assert.Equal(t, Some(tt.after+300*time.Millisecond), p.Age(now), "%v", tt.after)
		assert.Equal(t, tt.fresh, p.Fresh(now), "fresh after %v", tt.after)
		assert.Equal(t, tt.stale, p.Stale(now), "stale after %v", tt.after)
	}
	assert.False(t, p.Gone())
	tbl.Update(Report{Boot: 2, Seq: 2, Goodbye: true}, t0)
	assert.True(t, p.Gone(), "said goodbye")
	assert.False(t, tbl.Self().Stale(t0.Add(time.Hour)), "ourselves never")
}

func TestUnknownModel(t *testing.T) {
	tbl := NewTable(Member{Boot: 1})
	unknown := func(model string, now time.Time) bool { return tbl.Snapshot().Unknown(model, now) }
	tbl.SetMember(Member{Boot: 2}, t0)
	tbl.SetModels(1, []Model{{ID: "a", Aliases: []string{"gpt"}}}, 0, t0)
	assert.False(t, unknown("x", t0), "2's list is not known")
	tbl.SetModels(2, []Model{{ID: "b"}}, 0, t0)
	assert.True(t, unknown("x", t0))
	assert.False(t, unknown("gpt", t0), "aliases count")
	assert.False(t, unknown("", t0))

	tbl.SetModels(2, []Model{{ID: "c"}}, 0, t0.Add(time.Minute))
	assert.False(t, unknown("b", t0.Add(11*time.Minute)), "listed until ten minutes ago")
	assert.True(t, unknown("b", t0.Add(11*time.Minute+time.Second)))
	tbl.RemoveMember(2, t0.Add(time.Hour))
	assert.False(t, unknown("c", t0.Add(time.Hour+10*time.Minute)), "its only member left")
	assert.True(t, unknown("c", t0.Add(time.Hour+11*time.Minute)))
	assert.Equal(t, []string{"a", "gpt"}, tbl.Snapshot().Models())
}

func TestSnapshotStaysAsItIs(t *testing.T) {
	tbl := newFleet(3)
	s := tbl.Snapshot()
	tbl.SetMember(Member{Boot: 4}, t0)
	tbl.RemoveMember(2, t0)
	assert.Len(t, s.Peers(), 3)
	assert.Len(t, tbl.Snapshot().Peers(), 3)
	assert.Equal(t, uint64(2), s.Peers()[1].Boot())
	assert.Equal(t, uint64(3), tbl.Snapshot().Peers()[1].Boot())
	assert.True(t, s.Peers()[1].Gone(), "but a peer that left says so")
	before := tbl.Snapshot()
	tbl.Update(ready(3, 2), t0)
	assert.Same(t, before, tbl.Snapshot(), "a record alone does not rebuild it")
	tbl.SetModels(3, []Model{{ID: "m"}}, 0, t0)
	assert.Same(t, before, tbl.Snapshot(), "nor does the same list again")
	tbl.SetModels(3, []Model{{ID: "m"}}, ServeChat, t0)
	assert.NotSame(t, before, tbl.Snapshot())
	tbl.RemoveMember(1, t0)
	assert.NotNil(t, tbl.Peer(1), "ourselves stay")
}

func TestOwnSendsSinceTheReport(t *testing.T) {
	tbl := newFleet(2)
	p := tbl.Peer(2)
	at := func(ms int) time.Time { return t0.Add(time.Duration(ms) * time.Millisecond) }
	extra := func() string { return fmt.Sprint(p.extraN.Load(), " ", p.extraTok.Load()) }
	report := func(seq uint32, ms int, age int, accepted uint32) {
		r := ready(2, seq)
		r.Age = time.Duration(age) * time.Millisecond
		r.Accepted = Some(accepted)
		require.True(t, tbl.Update(r, at(ms)))
	}
	report(2, 0, 0, 100)
	p.Sent(1000, at(10))
	p.Sent(200, at(20))
	p.Sent(30, at(30))
	assert.Equal(t, "3 1230", extra())
	report(3, 40, 15, 102) // the sample is of 25: two left before it, and it accepted two
	assert.Equal(t, "1 30", extra())
	p.Sent(4, at(50))
	report(4, 60, 0, 102) // by time all left before it, but it accepted none since: they are on the way
	assert.Equal(t, "2 34", extra())
	report(5, 700, 0, 102) // they left over half a second ago: refused or lost, no longer counted
	assert.Equal(t, "0 0", extra())

	s := tbl.Snapshot()
	p.Sent(500, at(800))
	l := p.load(p.view.Load(), s)
	assert.InDelta(t, 500, l.queue, 0)
	assert.InDelta(t, 1, l.waiting, 0)
	for range 5 {
		p.Done(OutcomeOK, 0, at(900))
	}
	l = p.load(p.view.Load(), s)
	assert.InDelta(t, 0, l.queue, 0, "what is done is not under way")
	assert.InDelta(t, 0, l.waiting, 0)
}

func TestManySendsBetweenReports(t *testing.T) {
	tbl := newFleet(2)
	p := tbl.Peer(2)
	for i := range 1000 {
		p.Sent(1, t0.Add(time.Duration(i)*time.Millisecond))
	}
	r := ready(2, 2)
	tbl.Update(r, t0.Add(989*time.Millisecond))
	assert.EqualValues(t, 10, p.extraN.Load())
	assert.EqualValues(t, 10, p.extraTok.Load())
	r.Seq, r.Age = 3, 900*time.Millisecond
	tbl.Update(r, t0.Add(time.Second))
	assert.LessOrEqual(t, p.extraN.Load(), int64(sendRing), "older sends than are remembered count as reported")
}

func TestCountsReturnToZero(t *testing.T) {
	tbl := newFleet(2)
	p := tbl.Peer(2)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for k := range 500 {
				now := t0.Add(time.Duration(k) * time.Millisecond)
				p.Sent(100+i, now)
				if k%2 == 0 {
					p.FirstToken(100+i, now)
					p.Done(OutcomeOK, 0, now)
				} else {
					p.Done(OutcomeCancelled, 100+i, now)
				}
				tbl.Update(ready(2, uint32(k+i)), now)
				_ = p.Health(now)
			}
		})
	}
	wg.Wait()
	assert.Zero(t, p.Inflight())
	assert.Zero(t, p.InflightTokens())
}

func TestLoneEntryKnowsItsShare(t *testing.T) {
	tbl := newFleet(3)
	p := tbl.Peer(2)
	accepted := uint32(0)
	step := func(n int, others uint32, now time.Time, seq uint32) {
		for range n {
			p.Sent(100, now)
		}
		accepted += uint32(n) + others
		r := ready(2, seq)
		r.Accepted = Some(accepted)
		r.PendingTokens = Some(5000)
		require.True(t, tbl.Update(r, now.Add(100*time.Millisecond)))
		for range n {
			p.Done(OutcomeOK, 100, now.Add(200*time.Millisecond))
		}
	}
	now := t0
	for i := range 10 {
		step(5, 0, now, uint32(i+2))
		now = now.Add(time.Second)
	}
	assert.Greater(t, tbl.Share(), 0.99)
	assert.True(t, tbl.Snapshot().lone())
	l := p.load(p.view.Load(), tbl.Snapshot())
	assert.InDelta(t, 0, l.queue, 0, "our own books say that nothing is there; the record is old")
	for i := range 60 {
		step(5, 45, now, uint32(i+20))
		now = now.Add(time.Second)
	}
	assert.InDelta(t, 0.1, tbl.Share(), 0.02)
	l = p.load(p.view.Load(), tbl.Snapshot())
	assert.InDelta(t, 5000, l.queue, 0, "one of many: the record counts")
}
