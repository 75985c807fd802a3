package choosing

import (
	"math"
	"math/rand/v2"
	"sync"
)

// central is a dispatcher that sees every request from its sending to its end, and sends straight to the engines: what it
// knows is exact at every moment, requests under way included, and it pays for no agent and no hop.
type central struct {
	mu      sync.Mutex
	urls    []string
	pending []int // prompt tokens without a first token, by engine
	waiting []int // their requests
	running []int // requests with a first token
	choose  func(c *central, a arrival) int
	rnd     *rand.Rand
}

func newCentral(urls []string, choose func(*central, arrival) int) *central {
	n := len(urls)
	return &central{urls: urls, pending: make([]int, n), waiting: make([]int, n), running: make([]int, n), choose: choose,
		rnd: rand.New(rand.NewPCG(1, 2))}
}

func (c *central) pick(a arrival) (string, func(), func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.choose(c, a)
	c.pending[i] += a.Prompt
	c.waiting[i]++
	begun := false
	first := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		begun = true
		c.pending[i] -= a.Prompt
		c.waiting[i]--
		c.running[i]++
	}
	done := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if begun {
			c.running[i]--
			return
		}
		c.pending[i] -= a.Prompt
		c.waiting[i]--
	}
	return c.urls[i], first, done
}

// exact is the score of the product, written out once more, on the exact state of all engines.
func exact(c *central, a arrival) int {
	best, low := 0, math.Inf(1)
	for i, k := range c.rnd.Perm(len(c.urls)) {
		u, running, waiting := float64(a.Prompt), float64(c.running[k]), float64(c.waiting[k])
		score := (float64(c.pending[k])+u)/prefillRate + u/prefillRate*(0.05*min(running, 32)+0.1*waiting)
		score += 0.5 * max(0, (running+waiting+1-0.9*slots)/(0.1*slots))
		if i == 0 || score < low {
			best, low = k, score
		}
	}
	return best
}

// p2c takes the one of two random engines with fewer requests.
func p2c(c *central, _ arrival) int {
	i, j := c.rnd.IntN(len(c.urls)), c.rnd.IntN(len(c.urls)-1)
	if j >= i {
		j++
	}
	if c.running[j]+c.waiting[j] < c.running[i]+c.waiting[i] {
		return j
	}
	return i
}
