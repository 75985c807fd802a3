package routing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// end sends one request to p and ends it.
func end(p *Peer, o Outcome, now time.Time) {
	p.Sent(10, now)
	p.Done(o, 10, now)
}

func stateOf(p *Peer, now time.Time) State { return p.Health(now).State }

func TestEjectionTime(t *testing.T) {
	for k, want := range []time.Duration{5, 10, 20, 40, 60, 60, 60} {
		low, high := time.Hour, time.Duration(0)
		for i := range uint64(2000) {
			d := ejectionTime(k+1, mix(i))
			low, high = min(low, d), max(high, d)
		}
		assert.InDelta(t, 0.8, low.Seconds()/want.Seconds()/1e9, 0.01, "k=%d", k+1)
		assert.InDelta(t, 1.2, high.Seconds()/want.Seconds()/1e9, 0.01, "k=%d", k+1)
	}
}

func TestHardFailuresInARow(t *testing.T) {
	hard := []Outcome{OutcomeRefused, OutcomeReset, OutcomeServerError, OutcomeTimeout, OutcomeMalformed}
	for _, o := range hard {
		tbl := newFleet(5)
		p := tbl.Peer(2)
		end(p, o, t0)
		end(p, o, t0)
		assert.NotEqual(t, StateEjected, stateOf(p, t0), "%v: two are not enough", o)
		end(p, o, t0)
		h := p.Health(t0)
		assert.Equal(t, StateEjected, h.State, "%v", o)
		assert.Equal(t, t0, h.Since)
		assert.InDelta(t, 5, h.EjectedUntil.Sub(t0).Seconds(), 1)
	}
	for _, o := range []Outcome{OutcomeBusy, OutcomeClientError, OutcomeCancelled} {
		tbl := newFleet(5)
		p := tbl.Peer(2)
		for range 50 {
			end(p, o, t0)
		}
		assert.Equal(t, StateReady, stateOf(p, t0), "%v is nobody's failure", o)
	}
	tbl := newFleet(5)
	p := tbl.Peer(2)
	for range 2 { // 4xx between neither counts nor clears
		end(p, OutcomeServerError, t0)
		end(p, OutcomeClientError, t0)
	}
	end(p, OutcomeServerError, t0)
	assert.Equal(t, StateEjected, stateOf(p, t0))
}

func TestFailureShare(t *testing.T) {
	pattern := func(p *Peer, s string, step time.Duration) time.Time {
		now := t0
		for _, c := range s {
			now = now.Add(step)
			end(p, map[rune]Outcome{'.': OutcomeOK, 'x': OutcomeServerError}[c], now)
		}
		return now
	}
	tests := []struct {
		name    string
		s       string
		step    time.Duration
		ejected bool
	}{
		{"half of five or more", ".x.x.x", time.Second, true},
		{"fewer than five say nothing", "x.x.", time.Second, false},
		{"less than half", "..x..x..x..x..x..x..x", time.Second, false},
		{"half, but spread over minutes", "x.x.x.x.x.x.x.x.", 8 * time.Second, false},
		{"the last twenty count", ".........................x.x.x.x.x.x.x.x.x.x", 100 * time.Millisecond, true},
	}
	for _, tt := range tests {
		p := newFleet(5).Peer(2)
		now := pattern(p, tt.s, tt.step)
		assert.Equal(t, tt.ejected, stateOf(p, now) == StateEjected, tt.name)
	}
}

func TestEjectionAndReturn(t *testing.T) {
	tbl := newFleet(5)
	p := tbl.Peer(2)
	now := t0
	fail := func() {
		for range 3 {
			end(p, OutcomeReset, now)
		}
	}
	level := func() level { return p.level(p.view.Load(), tbl.clock.tick(now), 2) }
	report := uint32(10)
	step := func(d time.Duration) {
		now = now.Add(d)
		report++
		tbl.Update(ready(2, report), now)
	}
	for k, want := range []float64{5, 10, 20} { // exactly three failures each time, each ejection twice as long
		fail()
		h := p.Health(now)
		require.Equal(t, StateEjected, h.State, "ejection %d", k+1)
		assert.InDelta(t, want, h.EjectedUntil.Sub(now).Seconds(), want*0.2+0.001)
		assert.Equal(t, levelSoft, level())
		step(h.EjectedUntil.Sub(now))
		assert.Equal(t, levelOK, level(), "over: one trial")
		assert.Equal(t, StateReady, stateOf(p, now))
		p.Sent(10, now)
		assert.Equal(t, levelSoft, level(), "while it runs nothing else is sent")
		p.FirstToken(10, now)
		assert.Equal(t, levelOK, level(), "a first token is proof enough")
		p.Done(OutcomeOK, 0, now)
		assert.InDelta(t, 0.1, p.ramp(p.view.Load(), tbl.Snapshot(), tbl.clock.tick(now)), 1e-9, "slow start")
		assert.Zero(t, p.penalty(tbl.clock.tick(now)))
	}
	step(65 * time.Second) // one doubling is forgiven, the next would have been 40 s
	fail()
	assert.InDelta(t, 20, p.Health(now).EjectedUntil.Sub(now).Seconds(), 4.001)
}

func TestFailedTrialEjectsAtOnce(t *testing.T) {
	tbl := newFleet(5)
	p := tbl.Peer(2)
	now := t0
	for range 3 {
		end(p, OutcomeReset, now)
	}
	now = p.Health(now).EjectedUntil
	tbl.Update(ready(2, 2), now)
	end(p, OutcomeCancelled, now)
	assert.Equal(t, levelOK, p.level(p.view.Load(), tbl.clock.tick(now), 2), "a cancelled trial says nothing: another")
	end(p, OutcomeReset, now)
	h := p.Health(now)
	assert.Equal(t, StateEjected, h.State)
	assert.InDelta(t, 10, h.EjectedUntil.Sub(now).Seconds(), 2.001)
}

func TestEjectionCap(t *testing.T) {
	for n, most := range map[int]int{1: 0, 2: 1, 3: 1, 5: 1, 7: 2, 10: 3, 20: 6} {
		tbl := newFleet(n)
		ejected := 0
		for b := range uint64(n) {
			p := tbl.Peer(b + 1)
			for range 20 {
				end(p, OutcomeServerError, t0)
			}
			if stateOf(p, t0) == StateEjected {
				ejected++
			}
		}
		assert.Equal(t, most, ejected, "of %d", n)
	}
	tbl := newFleet(3) // never the last usable one
	for _, b := range []uint64{1, 3} {
		r := ready(b, 2)
		r.Flags = FlagDraining
		tbl.Update(r, t0)
	}
	for range 20 {
		end(tbl.Peer(2), OutcomeServerError, t0)
	}
	assert.Equal(t, StateReady, stateOf(tbl.Peer(2), t0))
	tbl = newFleet(10) // … of any model
	tbl.SetModels(2, []Model{{ID: "m"}, {ID: "only-here"}}, 0, t0)
	for range 20 {
		end(tbl.Peer(2), OutcomeServerError, t0)
	}
	assert.Equal(t, StateReady, stateOf(tbl.Peer(2), t0))
}

func TestRefusedSuspendsUntilTheNextRecord(t *testing.T) {
	tbl := newFleet(3)
	p := tbl.Peer(2)
	level := func(now time.Time) level { return p.level(p.view.Load(), tbl.clock.tick(now), 2) }
	end(p, OutcomeRefused, t0)
	assert.Equal(t, levelDead, level(t0))
	assert.Equal(t, StateSuspect, stateOf(p, t0))
	assert.False(t, tbl.Update(ready(2, 1), t0), "an old record lifts nothing")
	assert.Equal(t, levelDead, level(t0))
	tbl.Update(ready(2, 2), t0.Add(time.Second))
	assert.Equal(t, levelOK, level(t0.Add(time.Second)))
	end(p, OutcomeOK, t0.Add(time.Second))
	end(p, OutcomeRefused, t0.Add(2*time.Second))
	assert.NotEqual(t, levelDead, level(t0.Add(7*time.Second)), "or by the clock")
}

// C48: busy is not broken. The hold-off ends by the clock alone, with no record and no request in between, and the only
// replica there is is asked all the same.
func TestC48BusyEndsByTheClock(t *testing.T) {
	tests := []struct{ asked, want time.Duration }{{0, time.Second}, {7 * time.Second, 7 * time.Second}, {time.Hour, time.Minute}}
	for _, tt := range tests {
		tbl := newFleet(3)
		p := tbl.Peer(2)
		end(p, OutcomeBusy, t0)
		if tt.asked > 0 {
			p.HoldOff(tt.asked, t0)
		}
		level := func(d time.Duration) level {
			v := *p.view.Load()
			v.stale = 1 << 62 // only the hold-off is looked at
			return p.level(&v, tbl.clock.tick(t0.Add(d)), 2)
		}
		assert.Equal(t, levelSoft, level(tt.want-time.Millisecond), "%v", tt)
		assert.Equal(t, levelOK, level(tt.want), "%v", tt)
		assert.Equal(t, StateReady, stateOf(p, t0), "busy is not broken")
	}
	tbl := newFleet(1)
	for range 128 {
		end(tbl.Self(), OutcomeBusy, t0)
	}
	for _, after := range []time.Duration{0, 1100 * time.Millisecond} {
		d := mustPolicy(t, "auto").Pick(tbl.Snapshot(), &Request{Model: "m"}, t0.Add(after), newRand(1))
		assert.NotNil(t, d.Peer, "%v", after)
	}
}

func TestFailureCountsAsWait(t *testing.T) {
	tbl := newFleet(3)
	p := tbl.Peer(2)
	at := func(d time.Duration) tick { return tbl.clock.tick(t0.Add(d)) }
	assert.Zero(t, p.penalty(at(0)))
	end(p, OutcomeServerError, t0)
	assert.InDelta(t, 5, p.penalty(at(0)), 0)
	assert.InDelta(t, 5, p.penalty(at(9999*time.Millisecond)), 0)
	assert.Zero(t, p.penalty(at(10*time.Second)), "ends by the clock")
	for i := range 32 {
		p.Observe(time.Second, time.Duration(i)*time.Second, t0)
	}
	end(p, OutcomeServerError, t0)
	assert.InDelta(t, 29, p.penalty(at(0)), 0, "the 95th percentile where that is more")
}

func TestPanic(t *testing.T) {
	set := func(tbl *Table, b uint64, f func(*Report)) {
		r := ready(b, 2)
		f(&r)
		tbl.Update(r, t0)
	}
	suspect := func(r *Report) { r.Flags = FlagSuspect }
	down := func(r *Report) { r.Flags = FlagEngineDown }
	drain := func(r *Report) { r.Flags = FlagDraining }
	tests := []struct {
		name string
		n    int
		f    map[uint64]func(*Report)
		want []uint64
	}{
		{"half usable: no panic", 4, map[uint64]func(*Report){3: suspect, 4: suspect}, []uint64{1, 2}},
		{"fewer: those put aside come back", 4, map[uint64]func(*Report){2: suspect, 3: suspect, 4: suspect}, []uint64{1, 2, 3, 4}},
		{"never the known dead while others live", 4, map[uint64]func(*Report){2: suspect, 3: down, 4: down}, []uint64{1, 2}},
		{"two members are too few for a panic", 2, map[uint64]func(*Report){2: suspect}, []uint64{1}},
		{"who drains is not counted", 5, map[uint64]func(*Report){3: suspect, 4: drain, 5: drain}, []uint64{1, 2}},
		{"the dead, if nothing else is left", 3, map[uint64]func(*Report){1: down, 2: down, 3: down}, []uint64{1, 2, 3}},
	}
	for _, tt := range tests {
		for _, policy := range []string{"random", "p2c", "round_robin"} {
			tbl := newFleet(tt.n)
			for b, f := range tt.f {
				set(tbl, b, f)
			}
			tbl.Peer(1).self = false // the way counts for all, so that p2c draws evenly
			got := pickable(t, policy, tbl, Request{Model: "m"}, t0, 300)
			for b := range uint64(tt.n) {
				want := false
				for _, w := range tt.want {
					want = want || w == b+1
				}
				assert.Equal(t, want, got[b+1] > 0, "%s, %s: %v", tt.name, policy, got)
			}
		}
	}
}

func TestPanicInALargeFleet(t *testing.T) {
	tbl := newFleet(50)
	for b := uint64(2); b <= 50; b++ {
		r := ready(b, 2)
		if b <= 40 {
			r.Flags = FlagSuspect
		}
		if b > 45 {
			r.Flags = FlagEngineDown
		}
		tbl.Update(r, t0)
	}
	for _, policy := range []string{"p2c", "auto"} {
		r := ready(1, 9)
		r.PendingTokens = Some(90_000)
		tbl.Update(r, t0)
		got := pickable(t, policy, tbl, Request{Model: "m", PromptTokens: 10}, t0, 3000)
		for b := uint64(2); b <= 45; b++ {
			assert.NotZero(t, got[b], "%s: %d is let in again", policy, b)
		}
		for b := uint64(46); b <= 50; b++ {
			assert.Zero(t, got[b], "%s: %d is dead", policy, b)
		}
	}
}

func TestSlowStart(t *testing.T) {
	tbl := newFleet(5)
	r := ready(2, 2)
	r.ReadyFor = Some(time.Second)
	now := t0.Add(10 * time.Second)
	tbl.Update(r, now)
	p := tbl.Peer(2)
	ramp := func(d time.Duration) float64 {
		return p.ramp(p.view.Load(), tbl.Snapshot(), tbl.clock.tick(now.Add(d)))
	}
	for at, want := range map[time.Duration]float64{0: 0.1, 5 * time.Second: 0.2, 14 * time.Second: 0.5, 29 * time.Second: 1, time.Hour: 1} {
		assert.InDelta(t, want, ramp(at), 1e-9, "%v", at)
	}
	for i := range 5 {
		assert.InDelta(t, 0.1, ramp(time.Second), 1e-9, "after %d first tokens in time", i)
		p.Observe(100*time.Millisecond, 150*time.Millisecond, now)
	}
	assert.InDelta(t, 1, ramp(time.Second), 1e-9, "five first tokens in time end it early")

	tbl = newFleet(5)
	for b := range uint64(5) {
		r := ready(b+1, 2)
		r.ReadyFor = Some(time.Second)
		now = now.Add(2 * time.Second)
		tbl.Update(r, now)
	}
	p = tbl.Peer(5)
	assert.InDelta(t, 1, ramp(0), 1e-9, "off while more than half of the fleet is in it")
}

// What speaks against a replica is no prediction of its first token: with it, those with a full cache would look fast, and the
// idle one beside them slow, for as long as that keeps it idle.
func TestPressureIsNoPrediction(t *testing.T) {
	tbl, now := newFleet(5), t0
	p := mustPolicy(t, "round_robin")
	for i := range 200 {
		now = now.Add(100 * time.Millisecond)
		for b := range uint64(5) {
			r := ready(b+1, uint32(i+2))
			if b < 4 {
				r.KVUsed = Some(0.8)
			}
			tbl.Update(r, now)
		}
		d := p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 1000}, now, nil)
		require.Greater(t, d.Score, d.First*0.9)
		d.Peer.Observe(time.Duration(d.First*1e9), 120*time.Millisecond, now)
	}
	for b := range uint64(5) {
		assert.InDelta(t, 1, tbl.Peer(b+1).slowFactor(), 0, b+1)
	}
}

// Who was slow and gets few requests since is believed its first ones.
func TestSlownessFadesWithoutRequests(t *testing.T) {
	tbl, now := newFleet(5), t0
	see := func(b uint64, ratio float64) {
		tbl.Peer(b).Observe(100*time.Millisecond, time.Duration(ratio*1e8), now)
	}
	tell := func() {
		now = now.Add(1100 * time.Millisecond)
		tbl.Update(ready(5, uint32(now.Unix())), now)
	}
	for range 20 {
		for b := range uint64(5) {
			see(b+1, map[uint64]float64{3: 4}[b+1]+1)
		}
		tell()
	}
	require.InDelta(t, 5, tbl.Peer(3).slowFactor(), 0.01)
	for range 12 {
		for range 5 {
			for _, b := range []uint64{1, 2, 4, 5} {
				see(b, 1)
			}
			tell()
		}
		see(3, 1)
	}
	tell()
	assert.InDelta(t, 1, tbl.Peer(3).slowFactor(), 0)
}

func TestSlownessAgainstTheMedian(t *testing.T) {
	tbl := newFleet(5)
	now := t0
	round := func(ratio map[uint64]float64) {
		for b := range uint64(5) {
			r := ratio[b+1]
			if r == 0 {
				r = 1
			}
			tbl.Peer(b+1).Observe(100*time.Millisecond, time.Duration(r*1e8), now)
		}
		now = now.Add(1100 * time.Millisecond)
		tbl.Update(ready(5, uint32(now.Unix())), now)
	}
	for range 20 {
		round(nil)
	}
	for b := range uint64(5) {
		assert.InDelta(t, 1, tbl.Peer(b+1).slowFactor(), 0)
	}
	for range 8 {
		round(map[uint64]float64{1: 4, 2: 4, 3: 4, 4: 4, 5: 4})
	}
	assert.InDelta(t, 1, tbl.Peer(3).slowFactor(), 0, "all slow together: nobody is slower than the median")
	for range 100 {
		round(map[uint64]float64{3: 3})
	}
	assert.InDelta(t, 3, tbl.Peer(3).slowFactor(), 0.3)
	assert.NotEqual(t, StateEjected, stateOf(tbl.Peer(3), now))
	for range 30 {
		round(map[uint64]float64{3: 20})
		if stateOf(tbl.Peer(3), now) == StateEjected {
			break
		}
	}
	h := tbl.Peer(3).Health(now)
	assert.Equal(t, StateEjected, h.State)
	assert.Equal(t, "much slower than its peers", h.Why)
	now = now.Add(time.Minute)
	round(nil)
	assert.InDelta(t, 1, tbl.Peer(3).slowFactor(), 0, "the mark ends without evidence")
}

// TestFastFailingReplica: a replica that answers 500 in no time looks idle. It must not attract the traffic.
func TestFastFailingReplica(t *testing.T) {
	for _, policy := range []string{"auto", "p2c"} {
		tbl := newFleet(8)
		p := mustPolicy(t, policy, WithAsk(0))
		rnd := newRand(1)
		got, before := 0, -1
		now := t0
		const n = 60 * 20
		for i := range n { // 20 requests/s over 60 s
			now = now.Add(50 * time.Millisecond)
			if i%10 == 0 {
				for b := range uint64(8) {
					r := ready(b+1, uint32(i+2))
					if b+1 != 3 {
						r.PendingTokens = Some(500)
					}
					tbl.Update(r, now)
				}
			}
			d := p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 100}, now, rnd)
			o := OutcomeOK
			if d.Peer.Boot() == 3 {
				o = OutcomeServerError
				got++
			}
			end(d.Peer, o, now)
			if before < 0 && stateOf(tbl.Peer(3), now) == StateEjected {
				before = got
			}
		}
		assert.Less(t, got, n*2/100, policy)
		assert.LessOrEqual(t, before, 5, policy)
	}
}

func TestStatesHaveRules(t *testing.T) {
	seen := map[State]bool{}
	for _, r := range rules {
		seen[r.state] = true
		assert.NotEmpty(t, r.why)
	}
	for s := StateUnknown; s <= StateGone; s++ {
		assert.True(t, seen[s], "%v", s)
	}
	assert.True(t, rules[len(rules)-1].fits(&facts{}), "the last rule fits all")
}

func TestHealthSinceAndWhy(t *testing.T) {
	tbl := NewTable(Member{Boot: 1})
	tbl.SetMember(Member{Boot: 2}, t0)
	p := tbl.Peer(2)
	at := func(s int) time.Time { return t0.Add(time.Duration(s) * time.Second) }
	seq := uint32(0)
	report := func(s int, f func(*Report)) {
		seq++
		r := ready(2, seq)
		f(&r)
		require.True(t, tbl.Update(r, at(s)))
	}
	none := func(*Report) {}
	check := func(s int, state State, since int, why string) {
		t.Helper()
		assert.Equal(t, Health{State: state, Since: at(since), Why: why}, p.Health(at(s)))
	}
	check(0, StateUnknown, 0, "no record yet")
	report(1, func(r *Report) { r.State = StateStarting })
	check(1, StateStarting, 1, "the engine does not answer yet")
	report(2, func(r *Report) { r.State = StateWarming })
	check(2, StateWarming, 2, "the warm-up request is under way")
	report(3, none)
	report(4, none)
	check(5, StateReady, 3, "its agent says so")
	report(6, func(r *Report) { r.State = StateAsleep })
	check(6, StateAsleep, 6, "the engine sleeps")
	report(7, none)
	report(8, func(r *Report) { r.Flags = FlagSuspect })
	check(8, StateSuspect, 8, "its agent saw hard failures in a row")
	report(9, none)
	check(13, StateSuspect, 13, "no record for three heartbeats")
	report(14, func(r *Report) { r.Flags = FlagEngineDown })
	check(14, StateSuspect, 14, "its agent says that the engine is down")
	report(15, func(r *Report) { r.Flags = FlagDraining })
	check(15, StateDraining, 15, "its agent is draining")
	report(16, func(r *Report) { r.Goodbye = true })
	check(16, StateGone, 16, "said goodbye")
	tbl.RemoveMember(2, at(17))
	check(17, StateGone, 17, "member left or failed")
}

func TestSuspicion(t *testing.T) {
	var s Suspicion
	assert.False(t, s.Note(OutcomeReset, t0))
	assert.False(t, s.Note(OutcomeReset, t0))
	assert.False(t, s.Note(OutcomeClientError, t0))
	assert.True(t, s.Note(OutcomeReset, t0))
	assert.True(t, s.Suspect(t0.Add(9*time.Second)))
	assert.False(t, s.Suspect(t0.Add(10*time.Second)), "ends by the clock")
	assert.True(t, s.Note(OutcomeReset, t0.Add(11*time.Second)), "but the row goes on")
	assert.False(t, s.Note(OutcomeOK, t0.Add(11*time.Second)))
}
