package routing

import (
	"bufio"
	"compress/gzip"
	"crypto/md5"
	"encoding/binary"
	"fmt"
	"math/big"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The classic experiments on load balancing, replayed with our policies: workloads from testdata/seeds, and every
// figure that the original programs print. Policies that draw nothing must give them to the digit, the others within
// the spread over seeds.

// workload reads arrivals (s) and sizes.
func workload(t *testing.T, name string) (arrivals, sizes []float64) {
	t.Helper()
	f, err := os.Open("testdata/seeds/" + name + ".txt.gz")
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	lines := bufio.NewScanner(z)
	for lines.Scan() {
		var a, s float64
		_, err := fmt.Sscan(lines.Text(), &a, &s)
		require.NoError(t, err)
		arrivals, sizes = append(arrivals, a), append(sizes, s)
	}
	require.NoError(t, lines.Err())
	return arrivals, sizes
}

// servers is a number of workers that each serve one request at a time, first come first served.
type servers struct {
	tbl  *Table
	free []float64 // when each is free
	ends [][]job   // of those under way
	at   func(float64) time.Time
}

type job struct {
	end    float64
	tokens int
}

func newServers(n int) *servers {
	s := &servers{tbl: NewTable(Member{Boot: 1}), free: make([]float64, n), ends: make([][]job, n)}
	s.at = func(x float64) time.Time { return t0.Add(time.Duration(x * 1e9)) }
	for i := range n {
		s.tbl.SetMember(Member{Boot: uint64(i + 1)}, t0)
		s.tbl.Update(Report{Boot: uint64(i + 1), Seq: 1, Heartbeat: 100 * time.Hour, Running: Some(0), PendingTokens: Some(0)}, t0)
	}
	s.tbl.Self().self = false // the balancer stands in front of all of them
	return s
}

// serve ends what is over, picks, and returns the wait and the time in all.
func (s *servers) serve(p Policy, rnd *rand.Rand, now, service float64, tokens int) (server int, wait, total float64) {
	for i, q := range s.ends {
		for len(q) > 0 && q[0].end <= now {
			s.tbl.Peer(uint64(i+1)).Done(OutcomeOK, q[0].tokens, s.at(now))
			q = q[1:]
		}
		s.ends[i] = q
	}
	d := p.Pick(s.tbl.Snapshot(), &Request{PromptTokens: tokens}, s.at(now), rnd)
	d.Peer.Sent(tokens, s.at(now))
	i := int(d.Peer.Boot() - 1)
	begin := max(now, s.free[i])
	s.free[i] = begin + service
	s.ends[i] = append(s.ends[i], job{s.free[i], tokens})
	return i, begin - now, s.free[i] - now
}

func mean(x []float64) float64 {
	sum := 0.0
	for _, v := range x {
		sum += v
	}
	return sum / float64(len(x))
}

func TestSeedThreeUnevenServers(t *testing.T) {
	arrivals, base := workload(t, "three-uneven")
	speed := []float64{1, 1, 1.6}
	run := func(p Policy) string {
		s := newServers(3)
		var waits []float64
		for k, now := range arrivals {
			for i := range speed { // the signal of the original: when each will be free
				s.tbl.Update(Report{Boot: uint64(i + 1), Seq: uint32(k + 2), Heartbeat: time.Hour, Running: Some(0),
					PendingTokens: Some(int(s.free[i] * 1e9))}, s.at(now))
			}
			// The server is known only after the pick: its speed is applied then.
			i, wait, _ := s.serve(p, nil, now, 0, 1)
			s.free[i] += base[k] * speed[i]
			q := s.ends[i]
			q[len(q)-1].end = s.free[i]
			waits = append(waits, wait)
		}
		slices.Sort(waits)
		return fmt.Sprintf("avg wait %6.1f ms   p95 wait %6.1f ms", mean(waits)*1000, waits[190]*1000)
	}
	assert.Equal(t, "avg wait    5.5 ms   p95 wait   49.9 ms", run(mustPolicy(t, "round_robin")))
	assert.Equal(t, "avg wait    1.3 ms   p95 wait    9.3 ms", run(mustPolicy(t, "least_tokens", WithOutputTokens(0))))
}

// figures formats mean, p50, p99 and maximum as the original prints them.
func figures(x []float64) [4]float64 {
	slices.Sort(x)
	at := func(p float64) float64 { return x[int(p*float64(len(x)-1))] }
	return [4]float64{mean(x), at(0.5), at(0.99), x[len(x)-1]}
}

func TestSeedParetoOnEightServers(t *testing.T) {
	arrivals, service := workload(t, "pareto")
	run := func(p Policy, rnd *rand.Rand) [4]float64 {
		s := newServers(8)
		var total []float64
		for k, now := range arrivals {
			_, _, x := s.serve(p, rnd, now, service[k], 1)
			total = append(total, x)
		}
		return figures(total)
	}
	text := func(f [4]float64) string { return fmt.Sprintf("%8.2f%8.2f%9.2f%9.2f", f[0], f[1], f[2], f[3]) }
	assert.Equal(t, "    2.49    0.66    19.15    22.25", text(run(mustPolicy(t, "round_robin"), nil)))
	assert.Equal(t, "    0.44    0.16     3.88    20.66", text(run(mustPolicy(t, "least_requests"), nil)))

	for policy, printed := range map[string][4]float64{"random": {3.22, 0.95, 24.73, 30.66}, "p2c": {0.62, 0.26, 5.15, 20.94}} {
		low, high := [4]float64{1e9, 1e9, 1e9, 1e9}, [4]float64{}
		for seed := range uint64(20) {
			f := run(mustPolicy(t, policy), newRand(seed))
			for i := range f {
				low[i], high[i] = min(low[i], f[i]), max(high[i], f[i])
			}
		}
		for i, name := range []string{"mean", "p50", "p99", "max"} {
			// The maximum is the longest request's own time but for what it waits: its lower end is 20 s.
			assert.GreaterOrEqual(t, printed[i], low[i]-0.005, "%s %s: spread %.2f to %.2f", policy, name, low[i], high[i])
			assert.LessOrEqual(t, printed[i], high[i]+0.005, "%s %s: spread %.2f to %.2f", policy, name, low[i], high[i])
		}
	}
}

func TestSeedTokensAgainstRequests(t *testing.T) {
	arrivals, tokens := workload(t, "tokens")
	run := func(p Policy) string {
		s := newServers(4)
		var total []float64
		for k, now := range arrivals {
			_, _, x := s.serve(p, nil, now, tokens[k]/50, int(tokens[k]))
			total = append(total, x)
		}
		f := figures(total)
		return fmt.Sprintf("mean=%6.2fs p50=%6.2fs p99=%7.2fs", f[0], f[1], f[2])
	}
	assert.Equal(t, "mean=  6.93s p50=  2.82s p99=  68.67s", run(mustPolicy(t, "least_requests")))
	assert.Equal(t, "mean=  5.99s p50=  2.98s p99=  41.41s", run(mustPolicy(t, "least_tokens", WithOutputTokens(0))))
}

func TestSeedHashRing(t *testing.T) {
	// The original places points by the whole MD5; its upper half has the same order.
	hash := func(s string) uint64 { h := md5.Sum([]byte(s)); return binary.BigEndian.Uint64(h[:8]) }
	ring := func(n, vnodes int) *Ring {
		return NewRing(n, vnodes, func(node, v int) uint64 { return hash(fmt.Sprintf("s%d#%d", node, v)) })
	}
	modulo := func(s string, n int64) int64 {
		h := md5.Sum([]byte(s))
		return new(big.Int).Mod(new(big.Int).SetBytes(h[:]), big.NewInt(n)).Int64()
	}
	const keys = 20000
	before, after := ring(8, 100), ring(9, 100)
	movedRing, movedModulo := 0, 0
	for i := range keys {
		k := fmt.Sprintf("user-%d", i)
		if before.Owner(hash(k)) != after.Owner(hash(k)) {
			movedRing++
		}
		if modulo(k, 8) != modulo(k, 9) {
			movedModulo++
		}
	}
	assert.Equal(t, "89.0%", fmt.Sprintf("%.1f%%", 100*float64(movedModulo)/keys))
	assert.Equal(t, "10.2%", fmt.Sprintf("%.1f%%", 100*float64(movedRing)/keys))
	for vnodes, want := range map[int]string{1: "16/5398", 100: "2344/2709"} {
		r, load := ring(8, vnodes), make([]int, 8)
		for i := range keys {
			load[r.Owner(hash(fmt.Sprintf("user-%d", i)))]++
		}
		assert.Equal(t, want, fmt.Sprintf("%d/%d", slices.Min(load), slices.Max(load)), "%d virtual nodes", vnodes)
	}
}
