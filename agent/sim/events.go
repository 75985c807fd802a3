package sim

// kind says what happens at an event.
type kind uint8

const (
	evArrive    kind = iota // the next request of the source
	evQuestion              // a question reaches the peers at one distance; a = 0 own zone, 1 the others
	evSettle                // the answers are back, or the time for them is over
	evDeliver               // a request reaches its target
	evFirst                 // the first token reaches the entry
	evDone                  // the last token reaches the entry
	evBack                  // the entry learns that its target is gone; a = outcome
	evBusier                // the entry learns that its target costs more than it said
	evMoved                 // the entry learns that its target gave the request away; a = thief
	evPick                  // the entry picks (again)
	evReport                // agent a publishes its record
	evNotice                // a record that was sent at once reaches all; a = whose
	evDelta                 // agent a publishes its digest's changes
	evScrape                // agent a reads its engine's page
	evTurn                  // agent a looks at its gate by the clock
	evWake                  // agent a looks whether somebody holds requests
	evPull                  // a pull reaches victim a from thief b
	evPullReply             // its answer; a = thief, b = prompt tokens that come, 0 = none
	evKill                  // replica a dies
	evDetect                // membership learns of it
	evRevive                // replica a is back
	evSlow                  // replica a's speed changes to that of the config's; b = 1: back to normal
)

// event is a moment of the simulation. Events of the same time happen in the order in which they were made.
type event struct {
	at   int64 // ns since the start
	seq  uint64
	r    *request
	gen  uint32 // of the request, so that an event outlives what it was about
	kind kind
	a, b int32
}

// queue is a 4-ary heap of events.
type queue struct {
	heap []event
	seq  uint64
}

func before(x, y *event) bool { return x.at < y.at || x.at == y.at && x.seq < y.seq }

func (q *queue) push(e event) {
	q.seq++
	e.seq = q.seq
	q.heap = append(q.heap, e)
	h := q.heap
	i := len(h) - 1
	for i > 0 {
		p := (i - 1) / 4
		if !before(&e, &h[p]) {
			break
		}
		h[i] = h[p]
		i = p
	}
	h[i] = e
}

func (q *queue) pop() event {
	h := q.heap
	top := h[0]
	n := len(h) - 1
	e := h[n]
	h[n].r = nil
	h = h[:n]
	q.heap = h
	if n == 0 {
		return top
	}
	i := 0
	for {
		c := 4*i + 1
		if c >= n {
			break
		}
		m := c
		for k := c + 1; k < min(c+4, n); k++ {
			if before(&h[k], &h[m]) {
				m = k
			}
		}
		if !before(&h[m], &e) {
			break
		}
		h[i] = h[m]
		i = m
	}
	h[i] = e
	return top
}

// never is later than everything.
const never = int64(1) << 62

// alarms is a heap of the engines by their next event.
type alarms struct {
	at    []int64 // by replica
	heap  []int32 // replicas
	place []int32 // by replica
}

func newAlarms(n int) alarms {
	a := alarms{}
	for i := range int32(n) {
		a.at, a.heap, a.place = append(a.at, never), append(a.heap, i), append(a.place, i)
	}
	return a
}

// first returns the replica whose engine has the next event, and its time.
func (a *alarms) first() (replica int32, at int64) { return a.heap[0], a.at[a.heap[0]] }

func (a *alarms) less(i, j int32) bool {
	x, y := a.heap[i], a.heap[j]
	return a.at[x] < a.at[y] || a.at[x] == a.at[y] && x < y
}

func (a *alarms) swap(i, j int32) {
	a.heap[i], a.heap[j] = a.heap[j], a.heap[i]
	a.place[a.heap[i]], a.place[a.heap[j]] = i, j
}

func (a *alarms) set(replica int32, at int64) {
	if a.at[replica] == at {
		return
	}
	a.at[replica] = at
	i := a.place[replica]
	for i > 0 && a.less(i, (i-1)/2) {
		a.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for n := int32(len(a.heap)); ; {
		m := 2*i + 1
		if m >= n {
			return
		}
		if m+1 < n && a.less(m+1, m) {
			m++
		}
		if !a.less(m, i) {
			return
		}
		a.swap(i, m)
		i = m
	}
}
