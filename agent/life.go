package agent

import (
	"fmt"

	"github.com/grapevine-lb/grapevine/routing"
)

// facts are what the life of a replica depends on. Everything else follows from them: state, flags, readiness and the
// reason that an operator reads.
type facts struct {
	shadow bool // shadow mode

	draining  bool
	engineUp  bool   // by its health page, after hysteresis
	everUp    bool   // it was up at least once
	detail    string // why the engine is not up
	models    int    // models that the engine lists; 0 = none yet
	asleep    bool
	dozing    bool   // it sleeps until the next request comes: nothing but a request may wake it
	warm      bool   // a real request was answered since the engine came up
	warmError string // why the last warm-up failed
	announced bool   // the record that says "ready" was sent three times, or waited long enough
	stale     bool   // three readings in a row failed
	gpuBad    bool
	suspect   bool
	stuck     bool // it has work, and nothing moves
}

// state is what the record says. It leads readiness by the announcement: others may send as soon as they know, the
// kubelet waits until they can.
func (f facts) state() routing.State {
	switch {
	case f.draining:
		return routing.StateDraining
	case !f.engineUp:
		return routing.StateStarting
	case f.asleep:
		return routing.StateAsleep
	case f.models == 0 || !f.warm:
		return routing.StateWarming
	}
	return routing.StateReady
}

// flags are the bits of the record.
func (f facts) flags() routing.Flags {
	var x routing.Flags
	if f.shadow {
		x |= routing.FlagShadow
	}
	for _, b := range []struct {
		on   bool
		flag routing.Flags
	}{
		{f.draining, routing.FlagDraining},
		{!f.engineUp, routing.FlagEngineDown},
		{f.engineUp && !f.asleep && !f.warm, routing.FlagWarming},
		{f.stale, routing.FlagStale},
		{f.gpuBad, routing.FlagGPUTrouble},
		{f.suspect || f.stuck, routing.FlagSuspect},
	} {
		if b.on {
			x |= b.flag
		}
	}
	return x
}

// ready reports whether the own replica takes requests, and why not.
func (f facts) ready() (ok bool, why string) {
	switch f.state() {
	case routing.StateDraining:
		return false, "draining"
	case routing.StateStarting:
		if f.detail != "" {
			return false, "engine is not up: " + f.detail
		}
		return false, "engine is not up"
	case routing.StateAsleep:
		return false, "engine is asleep"
	case routing.StateWarming:
		switch {
		case f.models == 0:
			return false, "engine lists no model yet"
		case f.warmError != "":
			return false, "warm-up request failed: " + f.warmError
		}
		return false, "warm-up request is under way"
	}
	if !f.announced {
		return false, "telling the other members"
	}
	return true, ""
}

// hysteresis turns single health checks into up and down: three failures in a row say down, two passes in a row up, and
// before the first verdict one pass says up, so that a start is not delayed.
type hysteresis struct {
	up            bool
	known         bool
	fails, passes int
}

const (
	failsToDown = 3
	passesToUp  = 2
)

// check counts one result and reports whether the verdict changed.
func (h *hysteresis) check(pass bool) (changed bool) {
	if pass {
		h.passes++
		h.fails = 0
	} else {
		h.fails++
		h.passes = 0
	}
	was, knew := h.up, h.known
	switch {
	case pass && (!h.known || h.passes >= passesToUp):
		h.up, h.known = true, true
	case !pass && h.fails >= failsToDown:
		h.up = false
	}
	return h.up != was || h.known != knew
}

func bootText(boot uint64) string { return fmt.Sprintf("%016x", boot) }
