package routing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestClasses(t *testing.T) {
	for _, c := range []struct {
		names []string
		want  Classes
		ok    bool
	}{
		{nil, Classes{}, true},
		{[]string{"priority"}, Classes{1, 1}, true},
		{[]string{"default", "priority"}, Classes{1, 2}, true},
		{[]string{"flex", "batch"}, Classes{3, 4}, true},
		{[]string{"priority", "default", "flex", "batch"}, Classes{}, true},
		{[]string{"priority", "flex"}, Classes{}, false},
		{[]string{"gold"}, Classes{}, false},
	} {
		got, err := ParseClasses(c.names)
		assert.Equal(t, c.want, got, "%v", c.names)
		assert.Equal(t, c.ok, err == nil, "%v: %v", c.names, err)
	}
	seen := map[uint8]bool{}
	for high := ClassPriority; high <= ClassBatch; high++ {
		for low := high; low <= ClassBatch; low++ {
			c := Classes{high, low}
			if high == ClassPriority && low == ClassBatch {
				c = Classes{}
			}
			code := c.Code()
			assert.Equal(t, c, ClassesOf(code))
			assert.False(t, seen[code], "%v", c)
			seen[code] = true
			for class := ClassPriority; class <= ClassBatch; class++ {
				assert.Equal(t, class >= high && class <= low, c.Has(class), "%v, class %d", c, class)
			}
			again, err := ParseClasses(c.Names())
			assert.NoError(t, err)
			assert.Equal(t, c, again)
		}
	}
	assert.Equal(t, Classes{}, ClassesOf(99))
}

// A replica that is kept for a class helps out where the others are dead, and not where they have refused because they are full.
func TestKeptIsNotForWhatTheOthersRefuse(t *testing.T) {
	now := t0.Add(time.Second)
	tab := newFleet(2)
	one, two := ready(1, 2), ready(2, 2)
	two.Kept = Classes{ClassPriority, ClassPriority}
	require.True(t, tab.Update(one, now))
	require.True(t, tab.Update(two, now))
	for _, name := range PolicyNames {
		if name == "local" {
			continue
		}
		p, err := NewPolicy(name)
		require.NoError(t, err)
		pick := func(r Request) Decision { return p.Pick(tab.Snapshot(), &r, now, nil) }
		d := pick(Request{})
		require.NotNil(t, d.Peer, name)
		assert.EqualValues(t, 1, d.Peer.Boot(), name)
		d = pick(Request{Tried: []uint64{1}})
		require.NotNil(t, d.Peer, name)
		assert.EqualValues(t, 2, d.Peer.Boot(), name)
		d = pick(Request{Tried: []uint64{1}, Full: true})
		assert.Nil(t, d.Peer, name)
		assert.Equal(t, ReasonAllTried, d.Reason, name)
		d = pick(Request{Class: ClassPriority, Tried: []uint64{1}, Full: true})
		assert.NotNil(t, d.Peer, name)
	}
}
