package enginesim

import (
	"errors"
	"time"
)

// Job is one sequence to be generated.
type Job struct {
	ID     uint64   // the caller's name for it, returned in events
	Prompt int      // prompt tokens, at least 1
	Output int      // tokens to generate; 0 ends with the prompt computed, as embeddings do
	Blocks []uint64 // chained hashes of the prompt's blocks, the last one may be partial; kept until the job has ended
	Stream bool     // report every token, not only the first and the last
}

// Handle names a submitted job at its engine. The zero Handle names none.
type Handle struct {
	seq *sequence
	gen uint32
}

// EventKind says what happened to a job.
type EventKind uint8

const (
	Started   EventKind = iota + 1 // left the queue, for the first time or again after a preemption; Cached prompt tokens need no work
	First                          // the prompt is computed and the first token is there
	Token                          // Tokens have been generated so far (Stream only)
	Preempted                      // back to the head of the queue: its KV blocks were needed
	Done                           // all Tokens are there
	Lost                           // the engine died
)

func (k EventKind) String() string {
	return [...]string{"unknown", "started", "first", "token", "preempted", "done", "lost"}[min(k, Lost)]
}

// Event is something that happened to a job. A job's last event is Done or Lost, unless it was aborted.
type Event struct {
	Kind   EventKind
	Job    uint64
	At     time.Duration // virtual time, rounded up to the nanosecond
	Tokens int           // generated so far
	Cached int           // Started: prompt tokens taken from the prefix cache
}

// Errors of Submit.
var (
	ErrBusy     = errors.New("enginesim: the queue is full")
	ErrTooLong  = errors.New("enginesim: prompt and output exceed the context length")
	ErrNoPrompt = errors.New("enginesim: a job needs at least one prompt token")
	ErrDead     = errors.New("enginesim: the engine is dead")
)

type seqState uint8

const (
	seqFree seqState = iota
	seqWaiting
	seqPrefill
	seqDecode
)

// sequence is a job at the engine. Sequences are pooled; gen tells a stale Handle.
type sequence struct {
	job       Job
	gen       uint32
	state     seqState
	preempted bool // waits for its second admission
	hasFirst  bool
	prompt    int     // tokens to have in the KV cache before decoding: the prompt and what was generated before a preemption
	todo      int     // of these, not computed yet
	pending   int     // its share of Load.PendingTokens
	got       int     // tokens generated when decoding (last) began
	nodes     []int32 // prefix blocks referenced
	private   int     // KV tokens held besides the blocks, decoded ones not counted
	since     int64   // step at which decoding began
	until     int64   // step at which the last token is there
	pos       int     // index in the heap of decoding sequences
}

// queue is a first-come queue that preempted sequences enter at the head.
type queue struct {
	items []*sequence
	head  int
}

func (q *queue) len() int         { return len(q.items) - q.head }
func (q *queue) front() *sequence { return q.items[q.head] }
func (q *queue) push(s *sequence) { q.items = append(q.items, s) }

func (q *queue) pop() {
	q.items[q.head] = nil
	q.head++
	switch {
	case q.head == len(q.items):
		q.items, q.head = q.items[:0], 0
	case q.head > 64 && q.head > len(q.items)/2:
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
}

func (q *queue) pushFront(s *sequence) {
	if q.head > 0 {
		q.head--
		q.items[q.head] = s
		return
	}
	q.items = append(q.items, nil)
	copy(q.items[1:], q.items)
	q.items[0] = s
}

func (q *queue) remove(s *sequence) {
	live := q.items[q.head:]
	for i, x := range live {
		if x == s {
			copy(live[i:], live[i+1:])
			q.items[len(q.items)-1] = nil
			q.items = q.items[:len(q.items)-1]
			return
		}
	}
}

// byEnd is a binary heap of decoding sequences, the one that ends first at the root.
type byEnd []*sequence

func (h *byEnd) push(s *sequence) {
	*h = append(*h, s)
	s.pos = len(*h) - 1
	h.up(s.pos)
}

func (h *byEnd) remove(s *sequence) {
	old, i, last := *h, s.pos, len(*h)-1
	if i != last {
		old[i] = old[last]
		old[i].pos = i
	}
	old[last] = nil
	*h = old[:last]
	if i < last {
		h.down(i)
		h.up(i)
	}
}

func (h byEnd) up(i int) {
	for i > 0 {
		p := (i - 1) / 2
		if h[p].until <= h[i].until {
			return
		}
		h.swap(i, p)
		i = p
	}
}

func (h byEnd) down(i int) {
	for {
		m := 2*i + 1
		if m >= len(h) {
			return
		}
		if r := m + 1; r < len(h) && h[r].until < h[m].until {
			m = r
		}
		if h[i].until <= h[m].until {
			return
		}
		h.swap(i, m)
		i = m
	}
}

func (h byEnd) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i, j
}

func without(list []*sequence, s *sequence) []*sequence {
	for i := len(list) - 1; i >= 0; i-- { // what is removed is mostly near the end
		if list[i] == s {
			copy(list[i:], list[i+1:])
			list[len(list)-1] = nil
			return list[:len(list)-1]
		}
	}
	return list
}
