package agent

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/routing"
)

// C92: only a replica itself says how loaded it is; a record of it that comes with another's answer changes nothing.
func TestC92OnlyTheOwnRecordCounts(t *testing.T) {
	a, err := New(loopbackConfig("http://127.0.0.1:1"), Options{})
	require.NoError(t, err)
	now := time.Now()
	a.table.SetMember(routing.Member{Boot: 7, Node: "seven", Addr: "127.0.0.1:7"}, now)
	a.table.SetMember(routing.Member{Boot: 8, Node: "eight", Addr: "127.0.0.1:8"}, now)
	running := func() routing.Opt[int] {
		r, _ := a.table.Peer(7).Report()
		return r.Running
	}
	record := func(seq uint32, n int) []byte {
		return gossip.EncodeReport(nil, &routing.Report{Boot: 7, Seq: seq, State: routing.StateReady, Running: routing.Some(n)})
	}
	a.onRecord(7, record(1, 30))
	require.Equal(t, routing.Some(30), running())
	a.onRecord(8, record(2, 0))
	assert.Equal(t, routing.Some(30), running(), "eight does not speak for seven")
	a.onRecord(7, record(1, 0))
	assert.Equal(t, routing.Some(30), running(), "nor does an old record that is sent again")
	a.onRecord(7, []byte("no record"))
	a.onRecord(7, record(3, 5))
	assert.Equal(t, routing.Some(5), running())
}
