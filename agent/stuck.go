package agent

import (
	"fmt"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/proxy"
)

// An engine may hang with its health page at 200. What tells is that it has work and nothing moves: not its own counters,
// and not the streams that go through this agent.

// stuckAfter is how long that may last, beyond twice the time that the prompts under way should take.
const stuckAfter = 30 * time.Second

// MsgStuck is logged when an engine hangs.
const MsgStuck = "the engine has work and nothing moves"

// stuckAtMost bounds the allowance for prompts: a learned rate may be wrong.
const stuckAtMost = 5 * time.Minute

// standstillWatch tells for how long nothing has moved. The zero value is ready.
type standstillWatch struct {
	engine engine.Progress
	moves  uint64    // of our own streams
	moved  time.Time // last of these
}

// still takes a good reading and the own count at that time.
func (s *standstillWatch) still(rd *engine.Reading, load proxy.Load, now time.Time) time.Duration {
	still := s.engine.Observe(rd, now)
	if moves := load.Tokens + uint64(load.Prefills); moves != s.moves || s.moved.IsZero() {
		s.moves, s.moved = moves, now
	}
	return min(still, now.Sub(s.moved))
}

// allowance is how long the engine may stand still with these prompts to work off.
func allowance(load proxy.Load) time.Duration {
	if rate := load.PrefillRate.Or(0); rate > 0 {
		prompts := time.Duration(2 * float64(load.PendingTokens) / rate * float64(time.Second))
		return stuckAfter + min(prompts, stuckAtMost)
	}
	if load.PendingTokens > 0 {
		return 2 * stuckAfter
	}
	return stuckAfter
}

// setStuck marks the replica as suspect, or takes the mark away.
func (a *Agent) setStuck(still time.Duration, load proxy.Load, late bool) {
	stuck := !late && still > allowance(load)
	if stuck == a.own.is().stuck {
		return
	}
	a.stateChange(func(o *own) { o.facts.stuck = stuck })
	if !stuck {
		a.clear("stuck")
		return
	}
	text := fmt.Sprintf("the engine has work and nothing has moved for %s, although it says that it is healthy", still.Round(time.Second))
	a.warn("stuck", text)
	a.log.Warn(MsgStuck, KeyTook, still.Round(time.Second))
}
