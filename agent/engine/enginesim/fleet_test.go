package enginesim

import (
	"container/heap"
	"math/rand/v2"
	"testing"
	"time"
)

// fleet is the least that a simulation needs: engines in a heap by their next event.
type fleet struct {
	engines []*Engine
	at      []time.Duration // next event; far away if none
	byTime  []int
	place   []int
}

const never = time.Duration(1<<62 - 1)

func newFleet(n int, p Params) *fleet {
	f := &fleet{}
	for i := range n {
		f.engines = append(f.engines, New(p))
		f.at, f.byTime, f.place = append(f.at, never), append(f.byTime, i), append(f.place, i)
	}
	return f
}

func (f *fleet) Len() int           { return len(f.byTime) }
func (f *fleet) Less(i, j int) bool { return f.at[f.byTime[i]] < f.at[f.byTime[j]] }
func (f *fleet) Push(any)           {}
func (f *fleet) Pop() any           { return nil }
func (f *fleet) Swap(i, j int) {
	f.byTime[i], f.byTime[j] = f.byTime[j], f.byTime[i]
	f.place[f.byTime[i]], f.place[f.byTime[j]] = i, j
}

func (f *fleet) update(i int) {
	at, ok := f.engines[i].NextEvent()
	if !ok {
		at = never
	}
	f.at[i] = at
	heap.Fix(f, f.place[i])
}

// BenchmarkFleet is one request through 64 replicas at 12 requests/s each (about 50 running), prompts of 1,155 and
// answers of 211 tokens on average, a third of the prompts with a shared prefix, each sent to the less loaded of two: times a million, the whole
// cost of the engines in a simulation of a million requests.
func BenchmarkFleet(b *testing.B) {
	p, err := Profile("h100-8b")
	if err != nil {
		b.Fatal(err)
	}
	f := newFleet(64, p)
	r := rand.New(rand.NewPCG(1, 2))
	now, id := time.Duration(0), uint64(0)
	hashes := make([]uint64, 0, 1<<20)
	var done, first uint64
	b.ReportAllocs()
	for b.Loop() {
		id++
		now += time.Duration(r.ExpFloat64() / (64 * 12) * 1e9)
		for f.at[f.byTime[0]] <= now {
			i := f.byTime[0]
			for _, ev := range f.engines[i].Advance(f.at[i]) {
				switch ev.Kind {
				case Done:
					done++
				case First:
					first++
				}
			}
			f.update(i)
		}
		prompt := 1 + int(r.ExpFloat64()*1155)
		if len(hashes)+prompt/512+1 > cap(hashes) {
			hashes = make([]uint64, 0, 1<<20) // the old ones belong to jobs
		}
		from := len(hashes)
		family := uint64(r.IntN(300))
		for k := range (prompt + 511) / 512 {
			h := id<<16 | uint64(k)
			if family < 100 && k < 2 && (k+1)*512 <= prompt {
				h = 1<<60 | family<<8 | uint64(k)
			}
			hashes = append(hashes, h)
		}
		i, j := r.IntN(64), r.IntN(64)
		if a, b := f.engines[i].Load(), f.engines[j].Load(); b.Pending < a.Pending {
			i = j
		}
		if _, err := f.engines[i].Submit(now, Job{ID: id, Prompt: prompt, Output: 1 + int(r.ExpFloat64()*211), Blocks: hashes[from:]}); err != nil {
			b.Fatal(err)
		}
		f.update(i)
	}
	var steps uint64
	waiting, running := 0, 0
	for _, e := range f.engines {
		steps += e.Counters().Steps
		waiting += e.Load().Waiting
		running += e.Load().Running
	}
	b.ReportMetric(float64(steps)/float64(id), "steps/op")
	b.ReportMetric(float64(running)/64, "running")
	b.ReportMetric(float64(waiting)/64, "waiting")
}
