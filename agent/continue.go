package agent

import (
	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/proxy"
)

// continuations says how each kind of engine goes on with a text that was begun elsewhere; nil if GRAPEVINE_CONTINUE is off.
func (a *Agent) continuations() func(kind string) proxy.Continuation {
	if a.cfg.Continue == "off" {
		return nil
	}
	return continuationOf
}

func continuationOf(kind string) proxy.Continuation {
	ab := engine.AbilitiesOf(engine.Kind(kind))
	c := proxy.Continuation{Chat: ab.ContinueChat, Fields: ab.ContinueFields, Opens: ab.OpensLastTurn, Completions: ab.ContinueCompletions}
	if t := ab.Tokenize; t.Path != "" {
		c.TokenizePath, c.TokenizeBody, c.TokenizeCount = t.Path, t.Body, t.Tokens
	}
	return c
}
