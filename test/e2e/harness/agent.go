package harness

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Env is what a test sets on an agent beside, or instead of, what the stage sets; an empty value takes a variable away.
type Env map[string]string

// Agent is a `grapevine agent` process.
type Agent struct {
	*Process
	N      int
	IP     string
	URL    string // of the client listener
	Status string // of the status listener

	s      *Stage
	env    []string
	inside []string // what is put before the command, such as nsenter; empty: nothing
}

// Agent starts agent n beside the engine at the URL. Its listeners are on the stage's address n, its join list names all
// other agents of the stage, and gossip is encrypted with the stage's key.
func (s *Stage) Agent(n int, engine string, env ...Env) *Agent {
	s.t.Helper()
	a := s.agent(n, engine, nil, env...)
	a.Start()
	return a
}

// agent is Agent without the start.
func (s *Stage) agent(n int, engine string, inside []string, env ...Env) *Agent {
	s.t.Helper()
	set := map[string]string{
		"GRAPEVINE_LISTEN":        s.Addr(n, ClientPort),
		"GRAPEVINE_PEER_LISTEN":   s.Addr(n, PeerPort),
		"GRAPEVINE_STATUS_LISTEN": s.Addr(n, StatusPort),
		"GRAPEVINE_GOSSIP_LISTEN": s.Addr(n, GossipPort),
		"GRAPEVINE_ADVERTISE":     s.IP(n),
		"GRAPEVINE_JOIN":          s.join(n),
		"GRAPEVINE_CLUSTER":       s.cluster,
		"GRAPEVINE_NODE_NAME":     fmt.Sprintf("agent%d", n),
		"GRAPEVINE_GOSSIP_KEY":    s.key,
		"GRAPEVINE_ENGINE_URL":    engine,
		"GRAPEVINE_DRAIN_TIMEOUT": "30s",
	}
	for _, e := range env {
		maps.Copy(set, e)
	}
	a := &Agent{N: n, IP: s.IP(n), s: s, inside: inside}
	a.URL, a.Status = "http://"+s.Addr(n, ClientPort), "http://"+s.Addr(n, StatusPort)
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if set[name] != "" {
			a.env = append(a.env, name+"="+set[name])
		}
	}
	return a
}

// Start starts the process, again after an exit.
func (a *Agent) Start() {
	a.s.t.Helper()
	path := a.s.Binary
	if path == "" {
		path = Build(a.s.t, a.s.program)
	}
	argv := append(slices.Clone(a.inside), path, "agent")
	a.Process = a.s.Start(fmt.Sprintf("agent%d", a.N), a.env, argv[0], argv[1:]...)
}

// Readyz is what the kubelet sees: status code and body, or 0 and the error.
func (a *Agent) Readyz() (int, string) { return Get(a.Status + "/readyz") }

// WaitReady waits until /readyz is 200.
func (a *Agent) WaitReady(limit time.Duration) {
	a.t.Helper()
	Eventually(a.t, limit, a.Name+" to be ready", func() bool {
		if !a.Alive() {
			a.t.Fatalf("%s ended (%s) before it was ready:\n%s", a.Name, a.State(), tail(a.Log(), 15))
		}
		code, _ := a.Readyz()
		return code == http.StatusOK
	})
}

// WaitEntry waits until the agent says that some replica can answer, be it another one: /readyz?entry=1.
func (a *Agent) WaitEntry(limit time.Duration) {
	a.t.Helper()
	Eventually(a.t, limit, a.Name+" to know a replica that answers", func() bool {
		code, _ := Get(a.Status + "/readyz?entry=1")
		return code == http.StatusOK
	})
}

// Report is the part of /status that the tests read.
type Report struct {
	Node, Boot, Version, State string
	Ready                      bool
	Engine                     struct {
		Kind, Version    string
		Models           []string
		Running, Waiting *int
	}
	GPU    json.RawMessage
	Peers  []Peer
	Gossip struct {
		Members int
	}
	Warnings []json.RawMessage
}

// Peer is one row of /status's peers.
type Peer struct {
	Node, Address, State string
	AgeMS                *float64 `json:"age_ms"`
}

// Report reads /status.
func (a *Agent) Report() (r Report, err error) {
	code, body := Get(a.Status + "/status")
	if code != http.StatusOK {
		return r, fmt.Errorf("%s: /status: %d %s", a.Name, code, body)
	}
	if err = json.Unmarshal([]byte(body), &r); err != nil {
		err = fmt.Errorf("%s: /status: %w in %s", a.Name, err, body)
	}
	return r, err
}

// Metric is the sum of a metric over its labels, 0 if the page lacks it.
func (a *Agent) Metric(name string) (sum float64) {
	a.t.Helper()
	code, page := Get(a.Status + "/metrics")
	for try := 1; code == 0 && try < 3 && a.Alive(); try++ { // a machine that does much else may cut one
		a.t.Logf("%s: /metrics: %s", a.Name, page)
		time.Sleep(200 * time.Millisecond)
		code, page = Get(a.Status + "/metrics")
	}
	if code != http.StatusOK {
		a.t.Errorf("%s: /metrics: %d %s", a.Name, code, page)
	}
	for line := range strings.Lines(page) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		fields := strings.Fields(rest)
		v, err := strconv.ParseFloat(fields[len(fields)-1], 64)
		if err != nil {
			a.t.Errorf("%s: /metrics: %q: %v", a.Name, line, err)
		}
		sum += v
	}
	return sum
}

// WaitMembers waits until the agent sees n members, itself included.
func (a *Agent) WaitMembers(n int, limit time.Duration) {
	a.t.Helper()
	Eventually(a.t, limit, fmt.Sprintf("%s to see %d members", a.Name, n), func() bool {
		r, err := a.Report()
		return err == nil && r.Gossip.Members == n
	})
}

// Mesh starts one agent per engine URL and waits until all are ready and see each other.
func (s *Stage) Mesh(engines []string, env ...Env) []*Agent {
	s.t.Helper()
	s.Size(len(engines))
	agents := make([]*Agent, len(engines))
	for i, url := range engines {
		agents[i] = s.Agent(i+1, url, env...)
	}
	for _, a := range agents {
		a.WaitReady(20 * time.Second)
		a.WaitMembers(len(engines), 20*time.Second)
	}
	return agents
}

// URLs are the client listeners of agents.
func URLs(agents []*Agent) (list []string) {
	for _, a := range agents {
		list = append(list, a.URL)
	}
	return list
}

// IPs are the addresses of agents.
func IPs(agents []*Agent) (list []string) {
	for _, a := range agents {
		list = append(list, a.IP)
	}
	return list
}

// plain is for pages: a new connection each time, so that no test depends on a pool's state.
var plain = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// Get reads a page: status code and body, or 0 and the error's text.
func Get(url string) (int, string) {
	resp, err := plain.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(body)
}
