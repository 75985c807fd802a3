package gossip

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// Everybody is heard by exactly 64, and one member more or less changes few places.
func TestPredecessors(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	boots := make([]uint64, 300)
	for i := range boots {
		boots[i] = rnd.Uint64()
	}
	watch := func(boots []uint64) (to map[[2]uint64]bool, heard map[uint64]int) {
		to, heard = map[[2]uint64]bool{}, map[uint64]int{}
		for _, self := range boots {
			b := newBook("self", self, "", &Profile{DirectMax: 128, WatchSet: 64})
			for _, boot := range boots {
				if boot != self {
					b.put("", &entry{alive: true, id: identity{Member: routing.Member{Boot: boot}}})
				}
			}
			b.publish()
			for _, x := range *b.direct.Load() {
				to[[2]uint64{self, x.boot}] = true
				heard[x.boot]++
			}
		}
		return to, heard
	}
	before, heard := watch(boots)
	assert.Len(t, before, 300*64)
	for _, b := range boots {
		assert.Equal(t, 64, heard[b])
	}
	after, _ := watch(boots[:299])
	moved := 0
	for k := range after {
		if !before[k] {
			moved++
		}
	}
	assert.LessOrEqual(t, moved, 64)
}

// The lists of the book are what its entries say, after any number of joins, leaves, changes and refusals.
func TestBookLists(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	b := newBook("self", 7, "", &Profile{DirectMax: 8, WatchSet: 4})
	for range 5000 {
		n := rnd.IntN(20)
		name := fmt.Sprintf("n%d", n)
		e := b.entries[name]
		if e == nil {
			e = &entry{}
			b.entries[name] = e
		}
		e.alive, e.stock = rnd.IntN(3) > 0, rnd.IntN(5) == 0
		e.id.Boot, e.id.pod = uint64(n*10+rnd.IntN(2)+1), []string{"", "a", "b"}[rnd.IntN(3)]
		e.addr, e.ip = fmt.Sprint(rnd.IntN(3)), netip.AddrFrom4([4]byte{10, 0, 0, byte(rnd.IntN(3))})
		b.put(name, e)
		b.publish()

		var want []target
		foreign, ips, pods := 0, map[netip.Addr]int{}, map[string]int{}
		for name, e := range b.entries {
			switch {
			case !e.alive:
				continue
			case e.stock:
				foreign++
			default:
				want = append(want, target{boot: e.id.Boot, addr: memberlist.Address{Addr: e.addr, Name: name}})
				if e.id.pod != "" {
					pods[e.id.pod]++
				}
			}
			ips[e.ip]++
		}
		slices.SortFunc(want, func(x, y target) int { return before(7, x, y) })
		require.Equal(t, append([]target{}, want...), append([]target{}, *b.targets.Load()...))
		if len(want) > 8 {
			want = want[:4]
		}
		require.Equal(t, append([]target{}, want...), append([]target{}, *b.direct.Load()...))
		require.EqualValues(t, foreign, b.foreign.Load())
		require.EqualValues(t, len(*b.targets.Load())+1, b.alive.Load())
		require.Equal(t, ips, b.ips)
		require.Equal(t, pods, b.pods)
	}
}
