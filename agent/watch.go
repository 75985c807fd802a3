package agent

import (
	"context"
	"encoding/json"
	"errors"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

const (
	healthEvery   = time.Second
	healthStart   = 250 * time.Millisecond // while the engine is not up
	healthTimeout = time.Second
	modelsEvery   = 10 * time.Second
	modelsStart   = time.Second // while there is none
	warmUpRetry   = 2 * time.Second
	warmUpTimeout = 10 * time.Minute // a first request may compile kernels
	idleProbe     = 30 * time.Second // without traffic the engine is asked for one token

	readBusy = 200 * time.Millisecond
	readIdle = time.Second
	readSlow = 2 * time.Second // at the most, however long a page takes
)

// watchEngine checks the engine's health, keeps its model list, and warms it up: once when it comes up, again after each
// restart and when it wakes.
func (a *Agent) watchEngine(ctx context.Context) error {
	var (
		h        hysteresis
		listed   time.Time // last look at the model list
		warmed   = make(chan error, 1)
		cancel   context.CancelFunc // of the warm-up under way
		warming  string             // the model of the warm-up under way
		retry    time.Time
		progress uint64
		accepted uint32
		busyAt   = time.Now() // last time that the engine was seen at work
	)
	defer func() {
		if cancel != nil {
			cancel()
			<-warmed
		}
	}()
	warmUp := func(timeout time.Duration) {
		var c context.Context
		c, cancel = context.WithTimeout(ctx, timeout)
		model := a.own.firstModel()
		warming = model
		go func() { warmed <- a.engine.WarmUp(c, model) }() // owned: received below or by the deferred wait
	}
	for {
		pass, health := a.checkHealth(ctx, &progress)
		if ctx.Err() != nil {
			return nil
		}
		changed := h.check(pass)
		a.setHealth(health, h.up, changed)
		if h.known && !h.up {
			a.proxy.EngineLost()
		}
		now := time.Now()
		if !h.up && cancel != nil {
			cancel()
		}
		every := modelsEvery
		if f := a.own.is(); f.models == 0 || !f.warm {
			every = modelsStart
		}
		if h.up && pass && now.Sub(listed) >= every {
			listed = now
			a.listModels(ctx)
		}
		f := a.own.is()
		if l := a.proxy.Load(); l.Accepted != accepted || l.Running+l.Waiting > 0 {
			accepted, busyAt = l.Accepted, now
		}
		switch {
		case cancel != nil || !h.up || f.asleep || f.models == 0 || f.draining:
		case !f.warm && now.After(retry):
			warmUp(warmUpTimeout)
		case f.warm && !f.dozing && now.Sub(busyAt) >= idleProbe:
			busyAt = now
			warmUp(idleProbe)
		}
		wait := time.NewTimer(healthEvery)
		if !h.up || !f.warm {
			wait.Reset(healthStart)
		}
		select {
		case <-ctx.Done():
			wait.Stop()
			return nil
		case err := <-warmed:
			wait.Stop()
			cancel()
			cancel = nil
			if err != nil {
				retry = time.Now().Add(warmUpRetry)
			}
			a.setWarm(ctx, warming, err)
		case <-wait.C:
		}
	}
}

// checkHealth asks the engine once. A page that does not come in time is no sign of death while tokens flow: a loaded
// llama.cpp was seen to take more than a second.
func (a *Agent) checkHealth(ctx context.Context, progress *uint64) (pass bool, h engine.Health) {
	c, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	h = a.engine.Health(c)
	l := a.proxy.Load()
	moved := l.Tokens+uint64(l.Prefills) != *progress
	*progress = l.Tokens + uint64(l.Prefills)
	pass = h.State == engine.Healthy || h.State == engine.Asleep || h.State == engine.Unresponsive && moved
	return pass, h
}

// setHealth takes the verdict after a health check and says so once per change.
func (a *Agent) setHealth(h engine.Health, up, changed bool) {
	before := a.own.is()
	a.stateChange(func(o *own) {
		o.health = h
		if up && !o.facts.engineUp {
			o.upAt = time.Now()
		}
		o.facts.engineUp = up
		o.facts.everUp = o.facts.everUp || up
		o.facts.detail = ""
		if !up {
			o.facts.detail = a.engineDetail(h)
			o.facts.warm, o.facts.announced, o.facts.warmError = false, false, ""
		}
		if h.State == engine.Asleep {
			o.facts.asleep, o.facts.warm, o.facts.announced = true, false, false
		} else if h.State == engine.Healthy && !o.reading.Asleep.Or(false) {
			o.facts.asleep = false
		}
	})
	switch {
	case up && changed:
		if before.everUp {
			a.digests.engineBack()
		}
		a.clear("engine")
		a.log.Info(MsgEngineUp, KeyEngine, a.engine.Kind(), KeyAddr, redactURL(a.cfg.EngineURL))
	case !up && changed && before.everUp:
		a.warn("engine", "the engine stopped answering: "+a.engineDetail(h))
		a.log.Warn(MsgEngineDown, KeyAddr, redactURL(a.cfg.EngineURL), KeyReason, a.engineDetail(h))
	case !up && !before.everUp:
		if a.warn("engine", "the engine does not answer yet: "+a.engineDetail(h)) {
			a.log.Warn(MsgEngineWaiting, KeyAddr, redactURL(a.cfg.EngineURL), KeyReason, a.engineDetail(h))
		}
	}
}

// engineDetail says in a few words why the engine is not up.
func (a *Agent) engineDetail(h engine.Health) string {
	d := strings.TrimSpace(h.Detail)
	if d == "" {
		d = h.State.String()
	}
	return d
}

// listModels takes the engine's model list over. A list that cannot be had leaves the last one.
func (a *Agent) listModels(ctx context.Context) {
	c, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	models, err := a.engine.Models(c)
	if err != nil {
		a.log.Debug("model list", KeyErr, err)
		return
	}
	addAliases(models, a.cfg.ModelAliases)
	a.setModels(models)
}

// setModels takes a model list over, and with it the kinds of path that the engine answers. The model that was warmed up
// may be gone: then whatever took its place must answer first.
func (a *Agent) setModels(models []engine.Model) {
	serves := a.engine.Serves()
	digest := modelsDigest(models, serves)
	var news bool
	a.stateChange(func(o *own) {
		news = !o.digest.OK || o.digest.V != digest
		o.models, o.serves, o.digest = models, serves, routing.Some(digest)
		o.facts.models = len(models)
		if o.facts.warm && !slices.ContainsFunc(models, func(m engine.Model) bool { return m.ID == o.warmModel }) {
			o.facts.warm, o.facts.announced = false, false
		}
	})
	if news {
		a.table.SetModels(a.boot, routingModels(models), serves, time.Now())
		a.log.Info(MsgModels, KeyModels, strings.Join(modelIDs(models), ","))
		a.node.Describe(string(a.engine.Kind()), routing.Some(digest))
		a.own.wake()
	}
}

// setWarm takes the end of a warm-up or probe.
func (a *Agent) setWarm(ctx context.Context, model string, err error) {
	if ctx.Err() != nil {
		return
	}
	was := a.own.is()
	if errors.Is(err, engine.ErrNotLoaded) {
		err = nil // a request would load a model: there is nothing to warm up, and a probe must not do it
	}
	if err != nil {
		a.stateChange(func(o *own) { o.facts.warm, o.facts.announced, o.facts.warmError = false, false, err.Error() })
		if a.warn("warm-up", "the warm-up request failed: "+err.Error()) {
			a.log.Warn(MsgWarmUpFailed, KeyErr, err)
		}
		return
	}
	a.clear("warm-up")
	if was.warm {
		return // a probe
	}
	a.stateChange(func(o *own) {
		// The engine may have gone, or gone to sleep, while its last answer was on the way.
		o.facts.warm, o.facts.warmError = o.facts.engineUp && !o.facts.asleep, ""
		o.warmModel = model
	})
	a.own.mu.Lock()
	models := a.own.models
	a.own.mu.Unlock()
	a.setModels(models) // the warm-up has shown what the engine serves
	a.log.Info(MsgWarm)
	a.announce(ctx)
}

// readEngine reads the engine's metrics, often while it works and seldom while it rests.
func (a *Agent) readEngine(ctx context.Context) error {
	var hung standstillWatch
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		if f := a.own.is(); !f.engineUp {
			timer.Reset(healthStart)
			continue
		}
		before := a.proxy.Load()
		rd, err := a.engine.Read(ctx)
		if ctx.Err() != nil {
			return nil
		}
		// The page was made at some moment between the two: a request of ours that ended meanwhile is nobody else's.
		load := a.proxy.Load()
		if before.Running+before.Waiting > load.Running+load.Waiting {
			load = before
		}
		if a.own.setReading(rd, err, load, a.engine.Abilities().WakesByItself) {
			if !rd.ProcessStart.OK {
				a.digests.own.Clear() // its cache is empty
			}
			a.stateChange(func(o *own) { o.restarts++; o.facts.warm, o.facts.announced = false, false })
			a.log.Warn(MsgEngineRestart)
		}
		a.seeEngine(rd, err)
		if err == nil {
			a.setStuck(hung.still(&rd, load, time.Now()), load, a.engine.Abilities().CountsLate)
		}
		if err != nil {
			if a.warn("reading", "the engine's metrics cannot be read: "+err.Error()) {
				a.log.Warn("engine's metrics cannot be read", KeyErr, err)
			}
		} else {
			a.clear("reading")
		}
		timer.Reset(max(readAgain(&rd, load), a.engine.Pace()))
	}
}

// readAgain is when to read the engine next: soon while it works by either count, and never so often that reading takes
// more than a fiftieth of its time, as the page comes from the process that runs vLLM's token loop.
func readAgain(rd *engine.Reading, load proxy.Load) time.Duration {
	wait := readIdle
	if load.Running+load.Waiting > 0 || rd.Running.Or(0)+rd.Waiting.Or(0) > 0 {
		wait = readBusy
	}
	return min(max(wait, 50*rd.Took), readSlow)
}

// stateChange changes facts and logs a new state once.
func (a *Agent) stateChange(f func(*own)) {
	before, after := a.own.change(f)
	if before != after {
		_, why := a.own.ready()
		a.log.Info(MsgState, KeyFrom, before, KeyState, after, KeyReason, why)
	}
}

func (o *own) wake() {
	select {
	case o.changed <- struct{}{}:
	default:
	}
}

func (o *own) firstModel() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, m := range o.models {
		if m.Parent == "" { // an adapter would have to be loaded first
			return m.ID
		}
	}
	if len(o.models) > 0 {
		return o.models[0].ID
	}
	return ""
}

// modelsDigest is equal for equal lists, so that peers pull a list only when it changed. llama.cpp and vLLM write the
// time of the answer into each entry, vLLM also a random id of its permissions: these say nothing.
func modelsDigest(models []engine.Model, serves routing.Service) uint32 {
	list := modelList(models, serves)
	for i := range list.Models {
		var fields map[string]json.RawMessage
		if json.Unmarshal(list.Models[i].Raw, &fields) != nil {
			continue
		}
		delete(fields, "created")
		delete(fields, "permission")
		if b, err := json.Marshal(fields); err == nil { // keys sorted
			list.Models[i].Raw = b
		}
	}
	b, err := json.Marshal(list)
	if err != nil {
		return 0
	}
	return crc32.ChecksumIEEE(b)
}

func modelIDs(models []engine.Model) []string {
	out := make([]string, 0, len(models))
	for _, m := range models {
		out = append(out, m.ID)
	}
	return out
}

func routingModels(models []engine.Model) []routing.Model {
	out := make([]routing.Model, 0, len(models))
	for _, m := range models {
		out = append(out, routing.Model{ID: m.ID, ContextLength: m.ContextLength, Aliases: m.Aliases})
	}
	return out
}
