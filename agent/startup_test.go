package agent

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The table of what an operator meets at the start: state, log line, /readyz, and what a request gets.
func TestStartUp(t *testing.T) {
	key2 := strings.Replace(testKey, "AA", "AB", 1)
	for _, row := range []struct {
		name   string
		config func(t *testing.T, c *Config) Options
		state  string
		log    string // a part of one line
		code   int    // of /readyz
		body   string // of /readyz, its beginning
		chat   int
		reason string // part of the answer
		warn   string // part of a warning in /status; "" = none is demanded
	}{
		{name: "all well, no driver", state: "ready", log: `level=INFO msg="GPU memory is unknown"`, code: 200, body: "ready\n", chat: 200, reason: `"choices"`},
		{name: "no engine yet", config: func(t *testing.T, c *Config) Options { c.EngineURL = refusedURL(t); return Options{} },
			state: "starting", log: `level=WARN msg="engine does not answer yet; not ready"`, code: 503, body: "not ready: engine is not up: ",
			chat: 503, reason: `"error"`, warn: "the engine does not answer yet"},
		{name: "no peers yet", state: "ready", log: `level=INFO msg="no other member yet; serving the own engine"`, code: 200, body: "ready\n", chat: 200, reason: `"choices"`},
		{name: "unreachable join address", config: func(t *testing.T, c *Config) Options { c.Join = []string{"127.0.0.1:9"}; return Options{} },
			state: "ready", log: `level=WARN msg="join address unreachable, keep trying"`, code: 200, body: "ready\n", chat: 200, reason: `"choices"`, warn: "join address unreachable: 127.0.0.1:9"},
		{name: "join name that does not resolve", config: func(t *testing.T, c *Config) Options { c.Join = []string{"nowhere.invalid:7946"}; return Options{} },
			state: "ready", log: `level=WARN msg="join address unreachable, keep trying"`, code: 200, body: "ready\n", chat: 200, reason: `"choices"`, warn: "nowhere.invalid"},
		{name: "no common key", config: func(t *testing.T, c *Config) Options {
			other := loopbackConfig(startSim(t, fast()).url())
			other.GossipKey = testKey
			c.GossipKey, c.Join = key2, []string{start(t, other, Options{}).Addresses().Gossip}
			return Options{}
		}, state: "ready", log: `level=WARN msg="join address unreachable, keep trying"`, code: 200, body: "ready\n", chat: 200, reason: `"choices"`, warn: "join address unreachable"},
		{name: "insecure", config: func(t *testing.T, c *Config) Options {
			c.GossipListen, c.Advertise, c.Insecure = "0.0.0.0:0", "127.0.0.1", true
			return Options{}
		}, state: "ready", log: `level=WARN msg="running without a key: anybody who reaches the gossip and peer ports can join and read prompts"`, code: 200, body: "ready\n", chat: 200, reason: `"choices"`, warn: "running without a key"},
		{name: "cards that cannot be told", state: "ready", config: func(t *testing.T, c *Config) Options {
			c.Warnings = []string{"GRAPEVINE_X is not a variable"}
			return Options{}
		},
			log: `level=WARN msg=configuration`, code: 200, body: "ready\n", chat: 200, reason: `"choices"`, warn: "GRAPEVINE_X is not a variable"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			cfg := loopbackConfig(startSim(t, fast()).url())
			opts := Options{}
			if row.config != nil {
				opts = row.config(t, &cfg)
			}
			r := start(t, cfg, opts)
			if row.code == 200 {
				r.untilReady()
			}
			r.eventually(5*time.Second, "line "+row.log, func() bool { return strings.Contains(r.log.String(), row.log) })
			code, body := r.get("/readyz")
			assert.Equal(t, row.code, code)
			assert.True(t, strings.HasPrefix(body, row.body), body)
			code, body = r.chat(chatBody)
			assert.Equal(t, row.chat, code, body)
			assert.Contains(t, body, row.reason)
			s := r.Status()
			assert.Equal(t, row.state, s.State)
			if row.warn != "" {
				assert.Contains(t, strings.Join(s.Warnings, "\n"), row.warn)
			}
			code, body = r.get("/livez")
			assert.Equal(t, 200, code, body)
		})
	}
}

// mute is a network whose datagrams are lost on their way out, as behind a firewall that lets only TCP through.
type mute struct{ *memberlist.NetTransport }

func (m mute) WriteTo([]byte, string) (time.Time, error) { return time.Now(), nil }

func (m mute) WriteToAddress([]byte, memberlist.Address) (time.Time, error) { return time.Now(), nil }

func muteTransport(t *testing.T) mute {
	tr, err := memberlist.NewNetTransport(&memberlist.NetTransportConfig{BindAddrs: []string{"127.0.0.1"}, BindPort: 0})
	require.NoError(t, err)
	return mute{tr}
}

// With UDP blocked, members find each other by TCP; their records are asked for over the peer link, and a warning names
// the member and its port.
func TestUDPBlocked(t *testing.T) {
	t.Parallel()
	e := startSim(t, fast())
	a := start(t, loopbackConfig(e.url()), Options{Transport: muteTransport(t)})
	cfg := loopbackConfig(startSim(t, fast()).url())
	cfg.Join = []string{a.Addresses().Gossip}
	cfg.NodeName = "second"
	b := start(t, cfg, Options{Transport: muteTransport(t)})
	a.untilReady()
	b.untilReady()
	a.eventually(10*time.Second, "warning", func() bool {
		return strings.Contains(a.log.String(), `level=WARN msg="member is reachable by TCP but its records do not arrive; is UDP blocked?"`)
	})
	_, port, _ := net.SplitHostPort(b.Addresses().Gossip)
	assert.Contains(t, strings.Join(a.Status().Warnings, "\n"), b.Node()+" (UDP port "+port)
	a.eventually(5*time.Second, "record of the other", func() bool {
		p := a.table.Peer(b.boot)
		return p != nil && p.Fresh(time.Now())
	})
	code, body := a.get("/readyz")
	assert.Equal(t, 200, code, body)
	code, body = a.chat(chatBody)
	assert.Equal(t, 200, code, body)
}

// Ten agents that start at once are ready within three seconds after their warm-up, whatever gossip does.
func TestTenAtOnce(t *testing.T) {
	for _, blocked := range []bool{false, true} {
		t.Run(fmt.Sprintf("gossip blocked %t", blocked), func(t *testing.T) {
			t.Parallel()
			const n = 10
			first := "127.0.0.1:9" // nobody there
			runners := make([]*runner, n)
			var wg sync.WaitGroup
			for i := range n {
				cfg := loopbackConfig(startSim(t, fast()).url())
				cfg.NodeName = fmt.Sprintf("agent%d", i)
				cfg.Join = []string{first}
				if i == 0 && !blocked {
					cfg.Join = nil
				}
				runners[i] = start(t, cfg, Options{})
				if i == 0 && !blocked {
					first = runners[0].Addresses().Gossip
				}
			}
			for _, r := range runners {
				wg.Go(func() {
					r.eventually(10*time.Second, "warm-up", func() bool { return r.own.is().warm })
					at := time.Now()
					r.eventually(10*time.Second, "readiness", func() bool { ok, _ := r.Ready(); return ok })
					assert.LessOrEqual(t, time.Since(at), 3*time.Second, r.Node())
				})
			}
			wg.Wait()
			if !blocked {
				for _, r := range runners {
					r.eventually(10*time.Second, "ten members", func() bool { return r.Status().Gossip.Members == n })
				}
			}
			var all []func() error
			for _, r := range runners {
				all = append(all, r.stop)
			}
			var stopping sync.WaitGroup
			for _, stop := range all {
				stopping.Go(func() { assert.NoError(t, stop()) })
			}
			stopping.Wait()
		})
	}
}

func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	busy := l.Addr().String()
	for _, row := range []struct {
		set  func(*Config)
		want string
	}{
		{func(c *Config) { c.Listen = busy }, `GRAPEVINE_LISTEN="` + busy + `": cannot listen: `},
		{func(c *Config) { c.PeerListen = busy }, `GRAPEVINE_PEER_LISTEN="` + busy + `": cannot listen: `},
		{func(c *Config) { c.StatusListen = busy }, `GRAPEVINE_STATUS_LISTEN="` + busy + `": cannot listen: `},
		{func(c *Config) { c.GossipListen = busy }, `GRAPEVINE_GOSSIP_LISTEN="` + busy + `": `},
	} {
		cfg := loopbackConfig("http://127.0.0.1:9")
		row.set(&cfg)
		a, err := New(cfg, Options{})
		require.NoError(t, err)
		err = a.Run(t.Context())
		require.Error(t, err)
		assert.Contains(t, err.Error(), row.want)
		assert.NotContains(t, err.Error(), "\n")
	}
}

func TestRunTwice(t *testing.T) {
	r := start(t, loopbackConfig(refusedURL(t)), Options{})
	assert.ErrorContains(t, r.Run(t.Context()), "Run called twice")
}

func TestStatusOverHTTP(t *testing.T) {
	t.Parallel()
	r := start(t, loopbackConfig(startSim(t, fast()).url()), Options{})
	r.untilReady()
	code, _ := r.chat(chatBody)
	require.Equal(t, http.StatusOK, code)
	// The books are closed just after the client has its answer, and the engine's page is read four times a second.
	r.eventually(5*time.Second, "end of the request", func() bool { s := r.Status(); return s.Picks.Total == 1 && s.Engine.Running.OK })
	code, body := r.get("/status")
	require.Equal(t, 200, code)
	var s Status
	require.NoError(t, json.Unmarshal([]byte(body), &s))
	assert.True(t, s.Ready)
	assert.Equal(t, "vllm", s.Engine.Kind)
	assert.Equal(t, []string{"sim"}, s.Engine.Models)
	assert.Equal(t, uint64(1), s.Picks.Total)
	assert.Len(t, s.Peers, 1)
	assert.Equal(t, 1, s.Gossip.Members)
	assert.NotContains(t, body, "hello there")
	code, body = r.get("/metrics")
	require.Equal(t, 200, code)
	for _, want := range []string{"grapevine_ready 1\n", "grapevine_state{state=\"ready\"} 1\n", "grapevine_requests_total{role=\"entry\",outcome=\"ok\"} 1\n", "grapevine_gossip_members 1\n"} {
		assert.Contains(t, body, want)
	}
	code, body = r.get("/engine/metrics")
	assert.Equal(t, 200, code)
	assert.Contains(t, body, "vllm:num_requests_running")
	code, _ = r.get("/engine/health")
	assert.Equal(t, 200, code)
	code, body = r.get("/picks")
	assert.Equal(t, 200, code)
	assert.Contains(t, body, `"entry"`)
	assert.NotContains(t, body, "hello there")
	code, body = r.get("/")
	assert.Equal(t, 200, code)
	assert.Contains(t, body, r.Node())
}
