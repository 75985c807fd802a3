package gossip

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Times of joining.
const (
	joinFanout   = 3 // seeds asked at a time
	joinFirstGap = 250 * time.Millisecond
	joinMaxGap   = 5 * time.Second // while alone
	rejoinEvery  = 60 * time.Second
	resolveLimit = 3 * time.Second
	exchangeGap  = time.Second // between two exchanges that still brought news
	maxExchanges = 10
	doubtAge     = 400 * time.Millisecond // a record of a member that we lack, this old, is worth an exchange
	doubtEvery   = 200 * time.Millisecond // look for such
	doubtGap     = 500 * time.Millisecond // between two such exchanges, doubled each time
	maxDoubtGap  = 30 * time.Second
	joinWarnGap  = 10 * time.Minute // between two warnings about one seed
)

// settleAt are the times after the first join at which the member list is compared with another member's. An alive
// message is sent few times while the joiner's idea of the cluster is small, so some members may have missed it.
var settleAt = [...]time.Duration{2 * time.Second, 5 * time.Second}

// joiner finds the cluster and stays in touch with the seeds. It never blocks anything: all it can do is warn.
type joiner struct {
	n        *Node
	seeds    []string
	port     uint16 // where a seed names none
	resolver Resolver

	mu   sync.Mutex
	bad  map[string]string // seed → why nothing behind it answered last time
	warn map[string]time.Time
}

// ParseJoin checks a list of seeds: host[:port] or srv+name. The error names the entry.
func ParseJoin(list []string) error {
	for _, s := range list {
		if _, _, _, err := parseSeed(s, DefaultPort); err != nil {
			return err
		}
	}
	return nil
}

// parseSeed splits a seed into host and port, or the name of an SRV record.
func parseSeed(s string, port uint16) (host string, p uint16, srv bool, err error) {
	if name, ok := strings.CutPrefix(s, "srv+"); ok {
		if name == "" || strings.ContainsAny(name, ":/ ") {
			return "", 0, false, fmt.Errorf("join address %q: want srv+name", s)
		}
		return name, 0, true, nil
	}
	bare := s
	if in, ok := strings.CutPrefix(s, "["); ok && strings.HasSuffix(in, "]") {
		bare = in[:len(in)-1]
	}
	if a, err := netip.ParseAddr(bare); err == nil {
		return a.String(), port, false, nil // an IPv6 address in brackets or without
	}
	if strings.ContainsAny(s, "/ ") {
		return "", 0, false, fmt.Errorf("join address %q: want host, host:port or srv+name", s)
	}
	host = s
	if h, ps, err := net.SplitHostPort(s); err == nil {
		n, err := strconv.ParseUint(ps, 10, 16)
		if err != nil || n == 0 {
			return "", 0, false, fmt.Errorf("join address %q: port %q is not 1 to 65535", s, ps)
		}
		host, port = h, uint16(n)
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return host, port, false, nil
	}
	if host == "" || strings.Contains(host, ":") {
		return "", 0, false, fmt.Errorf("join address %q: want host, host:port or srv+name", s)
	}
	return host, port, false, nil
}

// lookup resolves a seed to all its addresses.
func (j *joiner) lookup(ctx context.Context, seed string) ([]string, error) {
	host, port, srv, err := parseSeed(seed, j.port)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, resolveLimit)
	defer cancel()
	if !srv {
		return j.lookupHost(ctx, host, port)
	}
	_, recs, err := j.resolver.LookupSRV(ctx, "", "", host)
	if err != nil {
		return nil, fmt.Errorf("does not resolve: %w", err)
	}
	var out []string
	for _, r := range recs[:min(len(recs), maxTargets)] {
		as, lerr := j.lookupHost(ctx, strings.TrimSuffix(r.Target, "."), r.Port)
		if lerr != nil {
			err = lerr
			continue
		}
		out = append(out, as...)
	}
	if len(out) > 0 {
		err = nil
	}
	return out, err
}

func (j *joiner) lookupHost(ctx context.Context, host string, port uint16) ([]string, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []string{netip.AddrPortFrom(a.Unmap(), port).String()}, nil
	}
	as, err := j.resolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("does not resolve: %w", err)
	}
	out := make([]string, 0, len(as))
	for _, a := range as[:min(len(as), maxAddrs)] {
		if a = a.Unmap(); a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() { // who answers DNS may not make us dial at random
			out = append(out, netip.AddrPortFrom(a, port).String())
		}
	}
	return out, nil
}

// What is taken of one DNS answer, so that a wrong or hostile one costs a bounded number of connections.
const (
	maxAddrs   = 2048
	maxTargets = 64
)

// run joins until ctx ends.
func (j *joiner) run(ctx context.Context) {
	gap := joinFirstGap
	var settle []time.Time
	exchanges := 0
	pause, doubtNext := doubtGap, time.Now()
	next := time.Now() // of a look at the seeds
	for {
		now := time.Now()
		if !now.Before(next) && len(j.seeds) > 0 {
			alone := j.alone()
			joined := j.visit(ctx)
			now = time.Now()
			switch {
			case joined && alone:
				for _, d := range settleAt {
					settle = append(settle, now.Add(d))
				}
				exchanges = 0
				fallthrough
			case !j.alone():
				gap, next = joinFirstGap, now.Add(jitter(rejoinEvery))
			default:
				next = now.Add(jitter(gap))
				gap = min(2*gap, joinMaxGap)
			}
		}
		if len(settle) > 0 && !now.Before(settle[0]) {
			settle = settle[1:]
			if exchanges < maxExchanges && j.exchange() {
				exchanges++
				settle = slices.Insert(settle, 0, time.Now().Add(exchangeGap))
			}
		}
		if now = time.Now(); !now.Before(doubtNext) {
			doubtNext = now.Add(doubtEvery)
			if j.n.heard.doubts(doubtAge, now) == 0 {
				pause = doubtGap
			} else if !j.alone() {
				// Somebody sends us records whom we do not know, or said goodbye and is still a member for us.
				j.exchange()
				doubtNext = time.Now().Add(jitter(pause))
				pause = min(2*pause, maxDoubtGap)
			}
		}
		wait := doubtNext.Sub(now)
		if len(j.seeds) > 0 {
			wait = min(wait, next.Sub(now))
		}
		if len(settle) > 0 {
			wait = min(wait, settle[0].Sub(now))
		}
		if !sleep(ctx, max(wait, time.Millisecond)) {
			return
		}
	}
}

func (j *joiner) alone() bool { return len(*j.n.book.targets.Load()) == 0 }

// visit resolves the seeds and joins through up to three of those addresses that are no alive members. It reports
// whether one answered. If all of a seed's addresses are members, there is nothing to do and nothing wrong.
func (j *joiner) visit(ctx context.Context) bool {
	from := make(map[string][]string) // address → seeds
	fine := make(map[string]bool)     // seeds that lead to a member; a dead pod still in DNS is nobody's fault
	for _, s := range j.seeds {
		as, err := j.lookup(ctx, s)
		if ctx.Err() != nil {
			return false
		}
		if err != nil {
			j.failed(s, err.Error())
			continue
		}
		known := false
		for _, a := range as {
			if a == j.n.addr || j.n.book.isAlive(a) {
				known = true
				continue
			}
			from[a] = append(from[a], s)
		}
		if fine[s] = known; known {
			j.reached(s)
		} else if len(as) == 0 {
			j.failed(s, "resolves to no address yet")
		}
	}
	addrs := slices.Collect(maps.Keys(from))
	rand.Shuffle(len(addrs), func(a, b int) { addrs[a], addrs[b] = addrs[b], addrs[a] })
	addrs = addrs[:min(joinFanout, len(addrs))]

	var wg sync.WaitGroup
	errs := make([]error, len(addrs))
	for i, a := range addrs {
		wg.Go(func() { _, errs[i] = j.n.serf.Memberlist().Join([]string{a}) })
	}
	wg.Wait()
	var good []string
	for i, a := range addrs {
		if errs[i] == nil {
			good = append(good, a)
			for _, s := range from[a] {
				fine[s] = true
				j.reached(s)
			}
		}
	}
	if ctx.Err() != nil {
		return false
	}
	for i, a := range addrs {
		for _, s := range from[a] {
			if errs[i] != nil && !fine[s] {
				j.failed(s, explain(errs[i]))
			}
		}
	}
	if len(good) == 0 {
		if len(addrs) > 0 {
			j.n.stats.joinErrors.Add(1)
			if j.alone() {
				j.n.ring.tryNext()
			}
		}
		return false
	}
	// Serf's own join adds the broadcast of our intent; the exchange it makes again is small.
	_, _ = j.n.serf.Join(good[:1], true)
	j.n.stats.joins.Add(1)
	return true
}

// exchange compares member lists with a random member, which completes both. It reports whether ours changed.
func (j *joiner) exchange() bool {
	ts := *j.n.book.targets.Load()
	if len(ts) == 0 {
		return false
	}
	ml := j.n.serf.Memberlist()
	before := ml.NumMembers()
	if _, err := ml.Join([]string{ts[rand.IntN(len(ts))].addr.Addr}); err != nil {
		return true // another one may answer
	}
	return ml.NumMembers() != before
}

// failed notes that nothing behind a seed answers, and warns, at most every 10 minutes a seed.
func (j *joiner) failed(seed, why string) {
	j.mu.Lock()
	j.bad[seed] = why
	now := time.Now()
	last, ok := j.warn[seed]
	tell := !ok || now.Sub(last) >= joinWarnGap
	if tell {
		j.warn[seed] = now
	}
	j.mu.Unlock()
	if tell {
		j.n.log.Warn("join address unreachable, keep trying", slog.String(keyAddress, seed), slog.String(keyError, why))
	}
}

func (j *joiner) reached(seed string) {
	j.mu.Lock()
	_, was := j.bad[seed]
	delete(j.bad, seed)
	delete(j.warn, seed)
	j.mu.Unlock()
	if was {
		j.n.log.Info("join address reached", slog.String(keyAddress, seed))
	}
}

// unreachable lists "seed: why", sorted.
func (j *joiner) unreachable() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []string
	for s, why := range j.bad {
		out = append(out, s+": "+why)
	}
	slices.Sort(out)
	return out
}

// explain adds what the operator can do about the errors that the library leaves bare.
func explain(err error) string {
	s := oneLine(err)
	switch {
	case strings.Contains(s, "no installed keys could decrypt"):
		return s + " (another GRAPEVINE_GOSSIP_KEY there)"
	case strings.Contains(s, "encryption is not configured"), strings.Contains(s, "is not encrypted"):
		return s + " (GRAPEVINE_GOSSIP_KEY is set on one side only)"
	case strings.HasSuffix(s, "EOF"), strings.Contains(s, "closed pipe"), strings.Contains(s, "reset by peer"), strings.Contains(s, "broken pipe"):
		return s + " (it hung up: another GRAPEVINE_CLUSTER or GRAPEVINE_GOSSIP_KEY, or no gossip port)"
	}
	return s
}

// oneLine turns the library's list of errors into one line.
func oneLine(err error) string {
	var parts []string
	for l := range strings.Lines(err.Error()) {
		l = strings.Trim(l, "\n\t* ")
		if l != "" && !strings.HasSuffix(l, "occurred:") {
			parts = append(parts, l)
		}
	}
	return strings.Join(parts, "; ")
}

// jitter spreads d by 20 % both ways, so that agents started together do not stay together.
func jitter(d time.Duration) time.Duration {
	return time.Duration((0.8 + 0.4*rand.Float64()) * float64(d))
}

// sleep waits for d and reports whether ctx still runs.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
