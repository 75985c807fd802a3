package enginesim

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestCapacity(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	var jobs []Job
	work := 0.0 // seconds at 10,000 prompt tokens/s and 8 slots of 20 ms a token
	for range 500 {
		j := Job{Prompt: 100 + r.IntN(400), Output: 20 + r.IntN(60)}
		jobs = append(jobs, j)
		work += 0.020 * float64(j.Output) / 8
	}
	p := Rates(1e6, 20*time.Millisecond, 8) // prefill costs next to nothing: slots are the limit
	got := Capacity(p, jobs)
	assert.InEpsilon(t, 500/work, got, 0.05)
	p.Speed = 0.5
	assert.InEpsilon(t, got/2, Capacity(p, jobs), 0.01, "half the speed, half the capacity")
	q := Rates(1000, time.Microsecond, 8) // now the prompts are
	assert.InEpsilon(t, 1000/(300.0+50), Capacity(q, jobs), 0.1)
	assert.Zero(t, Capacity(p, nil))
	assert.Greater(t, Capacity(p, jobs[:3]), 0.0)
}
