package agent

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/grapevine-lb/grapevine/agent/engine"
)

// An alias of GRAPEVINE_MODEL_ALIASES is another name for a model of the own engine. Others learn it with the model list;
// the proxy puts the model's own name into a request before the engine gets it.

// aliasOf returns the model that the name stands for, or "". Only what the engine lists now can be meant: a name that the
// engine has itself is no alias, whatever the setting says.
func (a *Agent) aliasOf(name string) string {
	for _, s := range a.cfg.ModelAliases {
		if alias, model, _ := strings.Cut(s, "="); alias == name && !a.own.lists(name) {
			return model
		}
	}
	return ""
}

// lists reports whether the engine lists a model of that name.
func (o *own) lists(name string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.ContainsFunc(o.models, func(m engine.Model) bool { return m.ID == name })
}

// addAliases adds the configured aliases to the models that they stand for.
func addAliases(models []engine.Model, aliases []string) {
	for _, s := range aliases {
		alias, model, _ := strings.Cut(s, "=")
		if slices.ContainsFunc(models, func(m engine.Model) bool { return m.ID == alias || slices.Contains(m.Aliases, alias) }) {
			continue
		}
		for i := range models {
			if models[i].ID == model {
				models[i].Aliases = append(models[i].Aliases, alias)
			}
		}
	}
}

// renamed is the engine's object for a model under another name, its other fields kept. One that is no object stays.
func renamed(raw json.RawMessage, id string) json.RawMessage {
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil || fields == nil {
		return raw
	}
	name, err := json.Marshal(id)
	if err != nil { // a string always marshals
		return raw
	}
	fields["id"] = name
	out, err := json.Marshal(fields)
	if err != nil {
		return raw
	}
	return out
}
