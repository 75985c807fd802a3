package gossip

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
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
			var ts []target
			for _, b := range boots {
				if b != self {
					ts = append(ts, target{boot: b})
				}
			}
			for _, x := range predecessors(self, ts, 64) {
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

	few := []target{{boot: 1}, {boot: 2}}
	assert.Equal(t, few, predecessors(3, few, 64))
}
