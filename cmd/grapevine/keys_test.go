package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/gossip"
)

// Whoever did not follow is named, and makes an error; the table says how far the others are.
func TestPrintAllKeys(t *testing.T) {
	both := []gossip.KeyInfo{{ID: "bbbb", Sending: true}, {ID: "aaaa"}}
	var out strings.Builder
	err := printAllKeys(&out, []agent.AgentKeys{{Node: "x.1", Keys: both}, {Node: "y.2", Keys: both[1:], Error: "it does not have what it was told"}, {Node: "z.3", Error: "no answer: deadline exceeded"}})
	assert.EqualError(t, err, "2 of 3 agents:\n  y.2: it does not have what it was told\n  z.3: no answer: deadline exceeded")
	assert.Equal(t, "KEY   READ BY  SENT WITH BY\nbbbb  1 of 3   1 of 3\naaaa  2 of 3   0 of 3\n", out.String())
	assert.NoError(t, printAllKeys(&out, []agent.AgentKeys{{Node: "x.1", Keys: both}}))
}
