package gossip

import (
	"cmp"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Limits for records whose sender is no member yet. A record may overtake the news that its sender joined.
const (
	maxParked    = 256
	parkedFor    = 5 * time.Second
	sweepEvery   = 50 * time.Millisecond
	silentAfter  = 3 // heartbeats
	silentMargin = 200 * time.Millisecond
)

// heard orders the records by boot id and sequence, parks those of boot ids that are no members yet, and knows who has
// been silent for too long. It holds one entry a member and at most 256 parked records.
type heard struct {
	mu        sync.Mutex
	heartbeat time.Duration // what a member is expected to keep before its first record says more
	goodbyeAt time.Time     // of the last goodbye of anybody
	voices    map[uint64]*voice
	parked    map[uint64]parkedRecord
	sweepAt   time.Time // before it no parked record is looked for that is too old
}

// voice is what we know of the records of one boot id.
type voice struct {
	member    bool // alive by the member list, and delivered
	any       bool // at least one record came
	goodbye   bool
	seq       uint32
	passed    uint32 // newest one that we relayed
	anyPassed bool
	at        time.Time     // last record, or the join
	heartbeat time.Duration // that the last record promises; 0: not known
}

type parkedRecord struct {
	r  routing.Report
	at time.Time
}

// verdict is what becomes of a record.
type verdict uint8

const (
	verdictNew verdict = iota
	verdictOld         // duplicate or older
	verdictParked
	verdictFull // no room to park it
)

func newHeard(heartbeat time.Duration) *heard {
	return &heard{heartbeat: heartbeat, voices: make(map[uint64]*voice), parked: make(map[uint64]parkedRecord)}
}

// take decides about a record that arrived at now.
func (h *heard) take(r *routing.Report, now time.Time) verdict {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.voices[r.Boot]
	if v == nil || !v.member {
		return h.park(v, r, now)
	}
	if v.any && int32(r.Seq-v.seq) <= 0 {
		return verdictOld
	}
	v.note(r, now)
	if r.Goodbye {
		h.goodbyeAt = now
	}
	return verdictNew
}

func (v *voice) note(r *routing.Report, now time.Time) {
	v.any, v.seq, v.at, v.goodbye = true, r.Seq, now, r.Goodbye
	if r.Heartbeat > 0 {
		v.heartbeat = r.Heartbeat
	}
}

func (h *heard) park(v *voice, r *routing.Report, now time.Time) verdict {
	if v != nil && v.any && int32(r.Seq-v.seq) <= 0 {
		return verdictOld // a failed member's old record revives nobody
	}
	old, ok := h.parked[r.Boot]
	if ok && int32(r.Seq-old.r.Seq) <= 0 {
		return verdictOld
	}
	if !ok && len(h.parked) >= maxParked {
		if now.Before(h.sweepAt) {
			return verdictFull // in a flood, not a search for each record
		}
		h.sweepAt = now.Add(sweepEvery)
		for boot, p := range h.parked {
			if now.Sub(p.at) >= parkedFor {
				delete(h.parked, boot)
			}
		}
		if len(h.parked) >= maxParked {
			return verdictFull
		}
	}
	h.parked[r.Boot] = parkedRecord{r: *r, at: now}
	return verdictParked
}

// expect sets the heartbeat of members that said nothing yet.
func (h *heard) expect(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.heartbeat = d
}

// pass reports whether a relayed record of a member is to be relayed again: if it is the newest of those that came this
// way. Those who hear the origin directly know newer ones and pass it on all the same.
func (h *heard) pass(r *routing.Report) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.voices[r.Boot]
	if v == nil || !v.member || (v.anyPassed && int32(r.Seq-v.passed) <= 0) {
		return false
	}
	v.passed, v.anyPassed = r.Seq, true
	return true
}

// join makes a boot id a member and returns its parked record, if one is fresh enough. Its age grows by the time it lay here.
func (h *heard) join(boot uint64, now time.Time) (routing.Report, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.voices[boot]
	if v == nil {
		v = &voice{}
		h.voices[boot] = v
	}
	if v.member {
		return routing.Report{}, false
	}
	v.member, v.at, v.goodbye = true, now, false
	p, ok := h.parked[boot]
	delete(h.parked, boot)
	if !ok || now.Sub(p.at) >= parkedFor || (v.any && int32(p.r.Seq-v.seq) <= 0) {
		return routing.Report{}, false
	}
	v.note(&p.r, now)
	p.r.Age += now.Sub(p.at)
	return p.r, true
}

// part keeps the sequence of a member that left or failed, so that its late records change nothing; forget drops it.
func (h *heard) part(boot uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.voices[boot]; v != nil {
		v.member = false
	}
}

// isMember reports whether a boot id is an alive member.
func (h *heard) isMember(boot uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.voices[boot]
	return v != nil && v.member
}

// saidGoodbye reports whether the last record of a boot id was its goodbye.
func (h *heard) saidGoodbye(boot uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.voices[boot]
	return v != nil && v.goodbye
}

func (h *heard) forget(boot uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.voices, boot)
	delete(h.parked, boot)
}

// silent returns the members that said nothing for more than 3 of their heartbeats.
func (h *heard) silent(now time.Time) []uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	var boots []uint64
	for boot, v := range h.voices {
		if v.member && !v.goodbye && now.Sub(v.at) > silentAfter*cmp.Or(v.heartbeat, h.heartbeat)+silentMargin {
			boots = append(boots, boot)
		}
	}
	return boots
}

// When a member that said goodbye should have left the member list.
const (
	ghostAfter = 3 * time.Second
	ghostFor   = 5 * time.Minute // how long after the last goodbye to look for such members
)

// doubts counts what speaks against our member list: records parked for at least d, whose senders are members that we
// lack, and members that said goodbye and are still on it.
func (h *heard) doubts(d time.Duration, now time.Time) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	if now.Sub(h.goodbyeAt) < ghostFor { // spares the search on all other days
		for _, v := range h.voices {
			if v.member && v.goodbye && now.Sub(v.at) >= ghostAfter {
				n++
			}
		}
	}
	for boot, p := range h.parked {
		switch age := now.Sub(p.at); {
		case age >= parkedFor:
			delete(h.parked, boot)
		case age >= d:
			n++
		}
	}
	return n
}

func (h *heard) numParked() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.parked)
}
