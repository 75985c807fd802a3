package agent

import (
	"testing"

	"github.com/grapevine-lb/grapevine/routing"
	"github.com/stretchr/testify/assert"
)

func TestStateOfFacts(t *testing.T) {
	up := facts{engineUp: true, everUp: true, models: 1, warm: true, announced: true}
	with := func(change func(*facts)) facts { f := up; change(&f); return f }
	for _, row := range []struct {
		name  string
		facts facts
		state routing.State
		flags routing.Flags
		ready bool
		why   string
	}{
		{"just started", facts{}, routing.StateStarting, routing.FlagEngineDown, false, "engine is not up"},
		{"refused", facts{detail: "connection refused"}, routing.StateStarting, routing.FlagEngineDown, false, "engine is not up: connection refused"},
		{"up, no model", facts{engineUp: true}, routing.StateWarming, routing.FlagWarming, false, "engine lists no model yet"},
		{"up, cold", facts{engineUp: true, models: 1}, routing.StateWarming, routing.FlagWarming, false, "warm-up request is under way"},
		{"warm-up failed", facts{engineUp: true, models: 1, warmError: "500"}, routing.StateWarming, routing.FlagWarming, false, "warm-up request failed: 500"},
		{"warm, not told", with(func(f *facts) { f.announced = false }), routing.StateReady, 0, false, "telling the other members"},
		{"ready", up, routing.StateReady, 0, true, ""},
		{"asleep", with(func(f *facts) { f.asleep = true; f.warm = false }), routing.StateAsleep, 0, false, "engine is asleep"},
		{"down again", with(func(f *facts) { f.engineUp = false }), routing.StateStarting, routing.FlagEngineDown, false, "engine is not up"},
		{"draining", with(func(f *facts) { f.draining = true }), routing.StateDraining, routing.FlagDraining, false, "draining"},
		{"draining, engine gone", facts{draining: true}, routing.StateDraining, routing.FlagDraining | routing.FlagEngineDown, false, "draining"},
		{"metrics unreadable", with(func(f *facts) { f.stale = true }), routing.StateReady, routing.FlagStale, true, ""},
		{"GPU trouble", with(func(f *facts) { f.gpuBad = true }), routing.StateReady, routing.FlagGPUTrouble, true, ""},
		{"suspect", with(func(f *facts) { f.suspect = true }), routing.StateReady, routing.FlagSuspect, true, ""},
	} {
		ready, why := row.facts.ready()
		assert.Equal(t, row.state, row.facts.state(), row.name)
		assert.Equal(t, row.flags, row.facts.flags(), row.name)
		assert.Equal(t, row.ready, ready, row.name)
		assert.Equal(t, row.why, why, row.name)
	}
}

func TestHysteresis(t *testing.T) {
	for _, row := range []struct {
		checks string // p pass, f fail
		up     string // u or d after each
	}{
		{"p", "u"},
		{"fffp", "dddu"},           // the first pass ever counts at once
		{"pffp", "uuuu"},           // two failures are not enough
		{"pfffpp", "uuuddu"},       // three are, and then two passes bring it back
		{"pffpffpff", "uuuuuuuuu"}, // not in a row
		{"pfffpfpp", "uuuddddu"},
	} {
		var h hysteresis
		got := ""
		for _, c := range row.checks {
			was := h.up
			changed := h.check(c == 'p')
			assert.True(t, h.up == was || changed, row.checks)
			if h.up {
				got += "u"
			} else {
				got += "d"
			}
		}
		assert.Equal(t, row.up, got, row.checks)
	}
}
