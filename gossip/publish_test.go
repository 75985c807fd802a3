package gossip

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/routing"
)

func TestBudget(t *testing.T) {
	lan, large, wan := profiles["lan"], profiles["large"], profiles["wan"]
	const plain, keyed = recordBytes, recordBytes + cryptBytes
	for _, tc := range []struct {
		name       string
		p          *Profile
		peers, b   int
		rate       float64
		gap, heart time.Duration
	}{
		{"alone", &lan, 0, plain, 10, 100 * time.Millisecond, time.Second},
		{"10", &lan, 9, keyed, 10, 100 * time.Millisecond, time.Second},
		{"64 direct, plain", &lan, 64, plain, 5.69, 175800 * time.Microsecond, time.Second},
		{"64 direct, key", &lan, 64, keyed, 4.30, 232400 * time.Microsecond, time.Second},
		{"100, key", &lan, 99, keyed, 2.78, 359500 * time.Microsecond, 1438 * time.Millisecond},
		{"129, key", &lan, 128, keyed, 2.15, 464800 * time.Microsecond, 1859 * time.Millisecond},
		{"absurd", &lan, 100_000, keyed, 0.2, 5 * time.Second, 20 * time.Second},
		{"large", &large, 9, keyed, 10, 250 * time.Millisecond, time.Second},
		{"wan", &wan, 9, keyed, 10, time.Second, 5 * time.Second},
		{"wan, 100", &wan, 99, keyed, 1.39, time.Second, 5 * time.Second},
	} {
		b := budgetFor(tc.p, tc.peers, tc.b, packetBudget)
		assert.InDelta(t, tc.rate, b.Rate, 0.01, tc.name)
		assert.InDelta(t, tc.gap, b.Gap, float64(time.Millisecond), tc.name)
		assert.InDelta(t, tc.heart, b.Heartbeat, 2*float64(time.Millisecond), tc.name)
	}
	assert.InDelta(t, 1.0, budgetFor(&lan, 100, plain, minPacketBudget).Rate, 0.01, "shedding")
}

func TestBackgroundRate(t *testing.T) {
	lan, large, wan := profiles["lan"], profiles["large"], profiles["wan"]
	for _, tc := range []struct {
		p       *Profile
		members int
		rate    float64
		promise time.Duration
	}{
		{&lan, 130, 1, 3200 * time.Millisecond},
		{&lan, 300, 0.544, 4204 * time.Millisecond},
		{&large, 1000, 0.163, 9351 * time.Millisecond},
		{&wan, 10, 1, 7200 * time.Millisecond},
		{&lan, 10_000, 0.05, 26 * time.Second},
	} {
		assert.InDelta(t, tc.rate, backgroundRate(tc.p, tc.members), 0.001)
		assert.InDelta(t, tc.promise, backgroundPromise(tc.p, tc.members), float64(10*time.Millisecond), "%s %d", tc.p.Name, tc.members)
	}
}

// One operation in ten waits 10 ms for a core: the effort is that of the others.
func TestEffort(t *testing.T) {
	var e effort
	for i := range 10_000 {
		d := 10 * time.Microsecond
		if i%10 == 0 {
			d = 10 * time.Millisecond
		}
		e.sent(1, d)
		e.received(0)
	}
	assert.InDelta(t, 0.16, time.Duration(e.spent.Load()).Seconds(), 0.05)
	e.sent(0, time.Second)
}

func TestNextPackets(t *testing.T) {
	assert.Equal(t, 200, nextPackets(400, 0.03))
	assert.Equal(t, 100, nextPackets(100, 0.5))
	assert.Equal(t, 100, nextPackets(100, 0.01))
	assert.Equal(t, 200, nextPackets(100, 0.001))
	assert.Equal(t, 400, nextPackets(400, 0))
}

func TestCompare(t *testing.T) {
	base := func() routing.Report {
		return routing.Report{Boot: 1, State: routing.StateReady, Running: routing.Some(4), Waiting: routing.Some(4), Held: routing.Some(0),
			PendingTokens: routing.Some(8000), PrefillRate: routing.Some(8000.0), KVUsed: routing.Some(0.85)}
	}
	for _, tc := range []struct {
		name string
		f    func(*routing.Report)
		want change
	}{
		{"same", func(*routing.Report) {}, changeNone},
		{"other sequence, age, counter", func(r *routing.Report) { r.Seq, r.Age, r.Accepted = 9, time.Second, routing.Some[uint32](9) }, changeNone},
		{"flag", func(r *routing.Report) { r.Flags = routing.FlagSaturated }, changeUrgent},
		{"state", func(r *routing.Report) { r.State = routing.StateDraining }, changeUrgent},
		{"class", func(r *routing.Report) { r.LowestClass = 2 }, changeUrgent},
		{"waiting within an octave", func(r *routing.Report) { r.Waiting = routing.Some(5) }, changeNone},
		{"waiting over an octave", func(r *routing.Report) { r.Waiting = routing.Some(8) }, changeLoad},
		{"waiting unknown", func(r *routing.Report) { r.Waiting = routing.Opt[int]{} }, changeLoad},
		{"first held", func(r *routing.Report) { r.Held = routing.Some(1) }, changeLoad},
		{"wait +9 %", func(r *routing.Report) { r.PendingTokens = routing.Some(8900) }, changeNone},
		{"wait +20 %", func(r *routing.Report) { r.PendingTokens = routing.Some(10000) }, changeLoad},
		{"KV 0.91", func(r *routing.Report) { r.KVUsed = routing.Some(0.91) }, changeLoad},
		{"KV 0.79, hysteresis", func(r *routing.Report) { r.KVUsed = routing.Some(0.79) }, changeNone},
		{"KV 0.77", func(r *routing.Report) { r.KVUsed = routing.Some(0.77) }, changeLoad},
		{"KV unknown", func(r *routing.Report) { r.KVUsed = routing.Opt[float64]{} }, changeLoad},
		{"models", func(r *routing.Report) { r.ModelsDigest = routing.Some[uint32](1) }, changeLoad},
	} {
		a, b := base(), base()
		tc.f(&b)
		assert.Equal(t, tc.want, compare(&a, &b), tc.name)
	}
	held := base()
	held.Age = 2 * time.Second
	again := base()
	assert.Equal(t, changeLoad, compare(&held, &again), "what the peers know was old when it was sent")
	again.Age = 1900 * time.Millisecond
	assert.Equal(t, changeNone, compare(&held, &again), "nothing newer is known")
	idle, busy := routing.Report{PrefillRate: routing.Some(50_000.0)}, routing.Report{PrefillRate: routing.Some(50_000.0), PendingTokens: routing.Some(500)}
	assert.Equal(t, changeNone, compare(&idle, &busy), "10 ms is nothing, though it is 50 %")
}

// simulate plays offers against a pacer for d in steps of 1 ms and returns when records went out.
func simulate(p *pacer, d time.Duration, at func(time.Duration) routing.Report) (sent []time.Duration) {
	t0 := time.Unix(1000, 0)
	for el := time.Duration(0); el < d; el += time.Millisecond {
		r := at(el)
		if ok, _ := p.due(&r, t0.Add(el)); ok {
			p.wrote(&r, t0.Add(el))
			sent = append(sent, el)
		}
	}
	return sent
}

func TestPacer(t *testing.T) {
	lan := profiles["lan"]
	quiet := routing.Report{Boot: 1, PrefillRate: routing.Some(10_000.0)}
	moving := func(el time.Duration) routing.Report { // never the same wait
		r := quiet
		r.PendingTokens = routing.Some(int(el/time.Millisecond) % 2 * 1_000_000)
		return r
	}

	t.Run("idle: heartbeats with jitter", func(t *testing.T) {
		p := newPacer(budgetFor(&lan, 9, recordBytes, packetBudget))
		s := simulate(p, 30*time.Second, func(time.Duration) routing.Report { return quiet })
		assert.InDelta(t, 31, len(s), 6)
		for i := 1; i < len(s); i++ {
			assert.GreaterOrEqual(t, s[i]-s[i-1], 800*time.Millisecond)
			assert.LessOrEqual(t, s[i]-s[i-1], p.promise())
		}
	})
	t.Run("busy: never above 10 in a second", func(t *testing.T) {
		p := newPacer(budgetFor(&lan, 1, recordBytes, packetBudget))
		s := simulate(p, 10*time.Second, moving)
		assert.InDelta(t, 100, len(s), 5)
		for i := 10; i < len(s); i++ {
			assert.GreaterOrEqual(t, s[i]-s[i-10], time.Second-time.Millisecond)
		}
	})
	t.Run("busy, 100 peers: the rate of the budget", func(t *testing.T) {
		p := newPacer(budgetFor(&lan, 99, recordBytes+cryptBytes, packetBudget))
		s := simulate(p, 20*time.Second, moving)
		assert.InDelta(t, 20*2.78, len(s), 4)
	})
	t.Run("one jump is seen at once", func(t *testing.T) {
		p := newPacer(budgetFor(&lan, 1, recordBytes, packetBudget))
		s := simulate(p, 600*time.Millisecond, func(el time.Duration) routing.Report {
			r := quiet
			if el >= 400*time.Millisecond {
				r.PendingTokens = routing.Some(9000)
			}
			return r
		})
		assert.Equal(t, []time.Duration{0, 400 * time.Millisecond}, s)
	})
	t.Run("a flag goes three times", func(t *testing.T) {
		p := newPacer(budgetFor(&lan, 99, recordBytes, packetBudget))
		s := simulate(p, 700*time.Millisecond, func(el time.Duration) routing.Report {
			r := quiet
			if el >= 50*time.Millisecond {
				r.Flags = routing.FlagDraining
			}
			return r
		})
		assert.Equal(t, []time.Duration{0, 50 * time.Millisecond, 150 * time.Millisecond, 250 * time.Millisecond}, s)
	})
	t.Run("after a stop the old report is followed by the new one", func(t *testing.T) {
		p := newPacer(budgetFor(&lan, 9, recordBytes, packetBudget))
		const stop = 2500 * time.Millisecond // the report is made every 50 ms, but between 0.5 s and 3 s
		s := simulate(p, 3700*time.Millisecond, func(el time.Duration) routing.Report {
			r := quiet
			r.Age = el % (50 * time.Millisecond)
			if el >= 500*time.Millisecond && el < 500*time.Millisecond+stop {
				r.Age = el - 500*time.Millisecond
			}
			return r
		})
		var after []time.Duration
		for _, at := range s {
			if at >= 3*time.Second {
				after = append(after, at)
			}
		}
		assert.LessOrEqual(t, len(after), 2, "and then by heartbeats")
		assert.LessOrEqual(t, after[0], 3100*time.Millisecond)
	})
	t.Run("a flapping flag stays at 10 a second", func(t *testing.T) {
		p := newPacer(budgetFor(&lan, 9, recordBytes, packetBudget))
		s := simulate(p, 5*time.Second, func(el time.Duration) routing.Report {
			r := quiet
			r.Flags = routing.Flags(el / time.Millisecond % 2)
			return r
		})
		assert.LessOrEqual(t, len(s), 51)
	})
}
