package proxy

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// BenchmarkAsking asks 3, 7 and 15 agents over loopback sockets, all in this process, and reports the median and the 99th
// percentile of what that holds a request, the answering agents' work included.
func BenchmarkAsking(b *testing.B) {
	for _, others := range []int{3, 7, 15} {
		b.Run(fmt.Sprint(others), func(b *testing.B) { benchmarkAsking(b, others) })
	}
}

func benchmarkAsking(b *testing.B, others int) {
	policy, err := routing.NewPolicy("auto")
	require.NoError(b, err)
	var wg sync.WaitGroup
	defer wg.Wait()
	members := []routing.Member{{Boot: 1, Addr: "127.0.0.1:1", Version: routing.AskVersion}}
	record := func() []byte { return make([]byte, 60) }
	for i := range others {
		m := routing.Member{Boot: uint64(i + 2), Version: routing.AskVersion}
		tab := routing.NewTable(m)
		p, err := New(Config{Table: tab, Policy: policy, EngineURL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, Record: record, Seed: 1})
		require.NoError(b, err)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(b, err)
		s := &http.Server{Handler: http.HandlerFunc(p.ServeLink)}
		wg.Go(func() { _ = s.Serve(l) })
		defer s.Close()
		defer p.questions.close()
		m.Addr = l.Addr().String()
		members = append(members, m)
	}
	tab := routing.NewTable(members[0])
	p, err := New(Config{Table: tab, Policy: policy, EngineURL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, Seed: 1, OnRecord: func(uint64, []byte) {}})
	require.NoError(b, err)
	defer p.questions.close()
	now := time.Now()
	for _, m := range members {
		tab.SetMember(m, now)
		tab.SetModels(m.Boot, []routing.Model{{ID: "m"}}, 0, now)
		tab.Update(routing.Report{Boot: m.Boot, Seq: 1, State: routing.StateReady, Heartbeat: time.Hour, PendingTokens: routing.Some(100)}, now)
	}
	tab.SetLive(func() routing.Live { return routing.Live{PendingTokens: 100_000} })
	x := &exchange{p: p, ctx: b.Context(), req: routing.Request{Model: "m", PromptTokens: 4000, Prefix: make([]uint64, 8)}}
	d := policy.Pick(tab.Snapshot(), &x.req, time.Now(), nil)
	require.Equal(b, others+1, d.Asks)
	first := d
	x.ask(&first) // dials
	time.Sleep(50 * time.Millisecond)
	var took []time.Duration
	b.ReportAllocs()
	for b.Loop() {
		at := time.Now()
		again := d
		x.ask(&again)
		took = append(took, time.Since(at))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-p50")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "µs-p99")
	b.ReportMetric(float64(took[len(took)-1].Microseconds()), "µs-max")
	b.ReportMetric(float64(p.metrics.ask.missed.Load())/float64(len(took)), "missed/op")
}
