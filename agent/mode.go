package agent

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Modes of GRAPEVINE_MODE.
const (
	ModeOn     = "on"
	ModeShadow = "shadow"
)

const (
	// AskMode is the question by which agents tell each other a change of mode: 8 bytes change number, 1 byte mode (1 shadow).
	askMode      byte = 32
	spreadEvery       = 250 * time.Millisecond
	spreadWithin      = time.Second
)

// modeState is the mode and the newest change of it that this agent knows. A change made at one agent has a number above
// all that it knew; every agent takes the highest number that it hears, and tells those whose record shows the other mode.
// So a change reaches the whole fleet, agents that start later with another GRAPEVINE_MODE included, whoever made it and
// whether or not that agent still lives.
type modeState struct {
	mu     sync.Mutex
	shadow bool
	change uint64            // 0: GRAPEVINE_MODE, which tells nobody anything
	told   map[uint64]uint64 // by boot id, the change that it confirmed
}

func modeName(shadow bool) string {
	if shadow {
		return ModeShadow
	}
	return ModeOn
}

// Mode returns on or shadow.
func (a *Agent) Mode() string {
	a.mode.mu.Lock()
	defer a.mode.mu.Unlock()
	return modeName(a.mode.shadow)
}

// SetMode switches the whole fleet to on or shadow. It returns as soon as this agent has switched; the others follow
// within a second of hearing this agent. Requests under way end as they began.
func (a *Agent) SetMode(mode string) error {
	if mode != ModeOn && mode != ModeShadow {
		return fmt.Errorf("mode %q: want %s or %s", mode, ModeOn, ModeShadow)
	}
	a.mode.mu.Lock()
	change := max(uint64(time.Now().UnixNano()), a.mode.change+1)
	a.mode.mu.Unlock()
	a.takeMode(mode == ModeShadow, change)
	return nil
}

// takeMode applies a change unless a newer one is known.
func (a *Agent) takeMode(shadow bool, change uint64) {
	a.mode.mu.Lock()
	if change <= a.mode.change && change != 0 {
		a.mode.mu.Unlock()
		return
	}
	was := a.mode.shadow
	a.mode.shadow, a.mode.change, a.mode.told = shadow, change, map[uint64]uint64{}
	a.proxy.SetShadow(shadow, time.Now())
	a.mode.mu.Unlock()
	if was != shadow {
		a.log.Info(MsgMode, "mode", modeName(shadow))
	}
	a.own.change(func(o *own) { o.facts.shadow = shadow })
}

// spreadMode tells the members whose records show another mode than ours of the change that we know.
func (a *Agent) spreadMode(ctx context.Context) error {
	tick := time.NewTicker(spreadEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			a.tellMode(ctx)
		}
	}
}

func (a *Agent) tellMode(ctx context.Context) {
	a.mode.mu.Lock()
	shadow, change := a.mode.shadow, a.mode.change
	a.mode.mu.Unlock()
	if change == 0 {
		return
	}
	payload := binary.BigEndian.AppendUint64(nil, change)
	payload = append(payload, byte(modeBit(shadow)))
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxAsks)
	for _, p := range a.table.Snapshot().Peers() {
		r, at := p.Report()
		if p.Self() || at.IsZero() || (r.Flags&routing.FlagShadow != 0) == shadow {
			continue
		}
		a.mode.mu.Lock()
		told := a.mode.told[p.Boot()] == change
		a.mode.mu.Unlock()
		if told {
			continue
		}
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if _, err := a.proxy.Ask(ctx, p.Boot(), spreadWithin, askMode, payload); err != nil {
				return // asked again at the next turn
			}
			a.mode.mu.Lock()
			defer a.mode.mu.Unlock()
			if a.mode.change == change {
				a.mode.told[p.Boot()] = change
			}
		})
	}
}

func modeBit(shadow bool) int {
	if shadow {
		return 1
	}
	return 0
}

// answerAll answers the questions of other agents that the proxy cannot.
func (a *Agent) answerAll(kind byte, payload, reply []byte) ([]byte, bool) {
	if kind != askMode {
		return a.answer(kind, payload, reply)
	}
	if len(payload) < 9 {
		return reply, false
	}
	a.takeMode(payload[8] == 1, binary.BigEndian.Uint64(payload))
	return append(reply, byte(modeBit(a.Mode() == ModeShadow))), true
}

// ShadowStatus is what shadow mode has found. The times are predictions, scaled by first tokens that were measured.
type ShadowStatus struct {
	Picks  uint64               `json:"picks"`   // requests that shadow mode looked at since the start
	Moved  uint64               `json:"moved"`   // of those, the ones that would have gone to another replica
	ForMS  routing.Opt[int64]   `json:"for_ms"`  // since shadow mode began; null if it never did
	TTFTMS routing.Opt[float64] `json:"ttft_ms"` // mean time to first token as it was
	GainMS routing.Opt[float64] `json:"gain_ms"` // by how much it would have been shorter in the mean
}

func (a *Agent) shadowStatus() (string, ShadowStatus) {
	c := a.proxy.Shadow()
	s := ShadowStatus{Picks: c.Picks, Moved: c.Moved}
	if !c.Since.IsZero() {
		s.ForMS = routing.Some(time.Since(c.Since).Milliseconds())
	}
	if c.TTFT.OK {
		s.TTFTMS, s.GainMS = routing.Some(c.TTFT.V*1000), routing.Some(c.Gain.V*1000)
	}
	return modeName(c.On), s
}

func (a *Agent) collectShadow(g *gathering) {
	c := a.proxy.Shadow()
	g.add(MetricShadow, bit(c.On))
	g.add(MetricShadowPicks, float64(c.Picks-c.Moved), "stayed")
	g.add(MetricShadowPicks, float64(c.Moved), "moved")
	if c.Gain.OK {
		g.add(MetricShadowGain, c.Gain.V)
	}
}

// setMode answers POST /mode?to=on or shadow.
func (c *console) setMode(w http.ResponseWriter, r *http.Request) {
	if err := c.mode(r.FormValue("to")); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.WriteHeader(http.StatusAccepted)
	fmt.Fprintln(w, r.FormValue("to"))
}
