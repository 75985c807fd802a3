package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/proxy"
)

// One keys command reaches all agents: the one that is told asks every other one over the link between agents, which only
// holders of a key of the ring can use, and says of each what it has now.

const (
	keysAsk  = 2 * time.Second        // for one answer
	keysWait = 6 * time.Second        // until an agent has what it was told
	keysGap  = 200 * time.Millisecond // between two looks whether it has
)

// AgentKeys is what one agent says of its ring; Error is why it does not have what it was told, or is not known to.
type AgentKeys struct {
	Node  string           `json:"node"`
	Keys  []gossip.KeyInfo `json:"keys"`
	Error string           `json:"error,omitempty"`
}

// keysAnswer is the form between agents.
type keysAnswer struct {
	Keys  []gossip.KeyInfo `json:"keys"`
	Error string           `json:"error,omitempty"`
}

// answerKeys answers another agent's question about keys.
func (a *Agent) answerKeys(payload, reply []byte) []byte {
	verb, arg, _ := strings.Cut(string(payload), "\n")
	var ans keysAnswer
	if verb != "list" {
		if err := a.changeKeys(verb, arg); err != nil {
			ans.Error = err.Error() // holds no key
		}
	}
	ans.Keys = a.node.Keys()
	b, err := json.Marshal(ans)
	if err != nil {
		return reply
	}
	return append(reply, b...)
}

// allKeys does at every alive agent, ourselves last, what changeKeys does here ("list" changes nothing), and returns what each
// has then. The error is for what would do harm or makes no sense; nothing has been changed then.
func (a *Agent) allKeys(ctx context.Context, verb, arg string) ([]AgentKeys, error) {
	if len(a.keys) == 0 {
		return nil, gossip.ErrNoKeys
	}
	var members []gossip.MemberInfo
	for _, m := range a.node.Members() {
		if m.Alive {
			members = append(members, m)
		}
	}
	wanted, err := a.wantedKeys(verb, arg, members)
	if err != nil {
		return nil, err
	}
	out := make([]AgentKeys, len(members), len(members)+1)
	var wg sync.WaitGroup
	slots := make(chan struct{}, maxAsks)
	for i, m := range members {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			out[i] = a.keysOf(ctx, m, verb, arg, wanted)
		})
	}
	wg.Wait()
	own := AgentKeys{Node: a.node.Name()}
	if verb != "list" {
		if err := a.changeKeys(verb, arg); err != nil {
			own.Error = err.Error()
		}
	}
	own.Keys = a.node.Keys()
	return append(out, own), nil
}

// wantedKeys returns what a ring must look like after the change, and refuses a removal that would cut somebody off.
func (a *Agent) wantedKeys(verb, arg string, members []gossip.MemberInfo) (func([]gossip.KeyInfo) bool, error) {
	has := func(id string) func([]gossip.KeyInfo) bool {
		return func(ks []gossip.KeyInfo) bool {
			return slices.ContainsFunc(ks, func(k gossip.KeyInfo) bool { return k.ID == id })
		}
	}
	switch verb {
	case "list":
		return func([]gossip.KeyInfo) bool { return true }, nil
	case "install":
		keys, err := splitKeys(arg)
		if err != nil || len(keys) != 1 {
			return nil, errors.New("install needs one key, base64 of 32 bytes")
		}
		return has(gossip.KeyID(keys[0])), nil
	case "use":
		if !slices.ContainsFunc(a.present(), func(k []byte) bool { return gossip.KeyID(k) == arg }) {
			return nil, fmt.Errorf("no key with id %s", arg)
		}
		return func(ks []gossip.KeyInfo) bool {
			return slices.ContainsFunc(ks, func(k gossip.KeyInfo) bool { return k.ID == arg && k.Sending })
		}, nil
	case "remove":
		var rest []string
		for _, k := range a.present() {
			if id := gossip.KeyID(k); id != arg {
				rest = append(rest, id)
			}
		}
		switch {
		case len(rest) == len(a.present()):
			return nil, fmt.Errorf("no key with id %s", arg)
		case len(rest) == 0:
			return nil, errors.New("the last key cannot be removed")
		}
		for _, m := range members {
			if !slices.ContainsFunc(strings.Split(m.Keys, ","), func(id string) bool { return slices.Contains(rest, id) }) {
				return nil, fmt.Errorf("%s reads none of the keys that would stay (it has %s): install one first", m.Node, m.Keys)
			}
		}
		gone := has(arg)
		return func(ks []gossip.KeyInfo) bool { return !gone(ks) }, nil
	}
	return nil, fmt.Errorf("no such change: %s", verb)
}

// keysOf tells one agent and looks until it has what is wanted. An answer may be lost: a removed key takes the link that
// was made under it along.
func (a *Agent) keysOf(ctx context.Context, m gossip.MemberInfo, verb, arg string, wanted func([]gossip.KeyInfo) bool) AgentKeys {
	out := AgentKeys{Node: m.Node}
	end := time.Now().Add(keysWait)
	ask := func(question string) (ans keysAnswer, err error) {
		b, err := a.proxy.Ask(ctx, m.Boot, keysAsk, proxy.AskKeys, []byte(question))
		if err == nil {
			err = json.Unmarshal(b, &ans)
		}
		return ans, err
	}
	ans, err := ask(verb + "\n" + arg)
	for {
		out.Error = ans.Error
		if err == nil {
			out.Keys = ans.Keys
			if out.Error == "" && wanted(ans.Keys) {
				return out
			}
		}
		if time.Now().After(end) || ctx.Err() != nil {
			break
		}
		time.Sleep(keysGap)
		refused := ans.Error
		if ans, err = ask("list\n"); err == nil && !wanted(ans.Keys) {
			ans.Error = refused
			if refused == "" { // what it was told got lost
				ans, err = ask(verb + "\n" + arg)
			}
		}
	}
	switch {
	case err != nil:
		out.Error = fmt.Sprintf("no answer: %v", err)
	case out.Error == "":
		out.Error = "it does not have what it was told"
	}
	return out
}
