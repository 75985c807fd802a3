package harness

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Lab is a bridge with hosts, each in a network namespace of its own with one veth interface, eth0. It is built inside the
// namespace that [Isolated] made, so nothing of the machine's own network is touched and all of it goes with the processes.
type Lab struct {
	t     testing.TB
	s     *Stage
	hosts []*Host
	v6    bool // addresses are IPv6 only
	mtu   int
}

// LabOption changes what the hosts of a lab are like.
type LabOption func(*Lab)

// OnlyIPv6 gives the hosts no IPv4 address.
func OnlyIPv6(l *Lab) { l.v6 = true }

// MTU sets that of all interfaces.
func MTU(n int) LabOption { return func(l *Lab) { l.mtu = n } }

// Host is one of them.
type Host struct {
	N       int
	IP, IP6 string // IP is IPv6 too in a lab of those
	Agent   *Agent
	Engine  *Engine

	lab *Lab
	ns  *Process // holds the namespace
}

// NewLab makes a lab of n hosts.
func (s *Stage) NewLab(n int, opts ...LabOption) *Lab {
	s.t.Helper()
	l := &Lab{t: s.t, s: s, mtu: 1500}
	for _, o := range opts {
		o(l)
	}
	l.run("ip", "link", "add", "br0", "type", "bridge")
	l.run("ip", "link", "set", "br0", "mtu", fmt.Sprint(l.mtu), "up")
	if !l.v6 {
		l.run("ip", "addr", "add", "10.77.0.254/24", "dev", "br0")
	}
	l.run("ip", "addr", "add", "fd77::fe/64", "dev", "br0", "nodad")
	for i := range n {
		h := l.namespace(i + 1)
		name := fmt.Sprintf("v%d", h.N)
		l.plug(h, name)
		l.run("ip", "link", "set", name, "mtu", fmt.Sprint(l.mtu), "master", "br0", "up")
		h.IP, h.IP6 = fmt.Sprintf("10.77.0.%d", h.N), fmt.Sprintf("fd77::%x", h.N)
		if l.v6 {
			h.IP = h.IP6
		} else {
			h.Run("ip", "addr", "add", h.IP+"/24", "dev", "eth0")
		}
		h.Run("ip", "addr", "add", h.IP6+"/64", "dev", "eth0", "nodad")
		l.hosts = append(l.hosts, h)
	}
	return l
}

// Hosts are those with the given numbers; all if none is given.
func (l *Lab) Hosts(numbers ...int) []*Host {
	if len(numbers) == 0 {
		return l.hosts
	}
	var list []*Host
	for _, n := range numbers {
		list = append(list, l.hosts[n-1])
	}
	return list
}

// namespace makes an empty network namespace with loopback, held by a process.
func (l *Lab) namespace(n int) *Host {
	l.t.Helper()
	h := &Host{N: n, lab: l}
	file := l.s.file(fmt.Sprintf("host%d.log", n))
	p := &Process{Name: fmt.Sprintf("host%d", n), t: l.t, out: &output{file: file}, done: make(chan struct{})}
	p.cmd = exec.Command("sleep", "1000000")
	p.cmd.SysProcAttr = ownGroup()
	p.cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	if err := p.cmd.Start(); err != nil {
		l.t.Fatalf("a network namespace: %v", err)
	}
	go func() {
		p.err = p.cmd.Wait()
		_ = file.Close()
		close(p.done)
	}()
	l.t.Cleanup(p.Kill)
	h.ns = p
	h.Run("ip", "link", "set", "lo", "up")
	return h
}

// plug makes a veth pair: NAME here, eth0 in the host.
func (l *Lab) plug(h *Host, name string) {
	l.t.Helper()
	l.run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(h.ns.Pid()))
	h.Run("ip", "link", "set", "eth0", "mtu", fmt.Sprint(l.mtu), "up")
}

func (l *Lab) run(argv ...string) { l.input("", argv...) }

func (l *Lab) input(stdin string, argv ...string) {
	l.t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		l.t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, out)
	}
}

// inside is the prefix that runs a command in the host's namespace; the process id stays that of the command.
func (h *Host) inside() []string {
	return []string{"nsenter", "-t", fmt.Sprint(h.ns.Pid()), "-n", "--"}
}

// Run runs a command in the host's namespace to its end.
func (h *Host) Run(argv ...string) {
	h.lab.t.Helper()
	h.lab.run(append(h.inside(), argv...)...)
}

// Filter replaces the host's rules: what arrives and matches one of in is dropped, and what leaves and matches one of out.
func (h *Host) Filter(in, out []string) {
	h.lab.t.Helper()
	h.Run("nft", "flush", "ruleset")
	rules := "table inet e2e {\n"
	for hook, list := range map[string][]string{"input": in, "output": out} {
		rules += fmt.Sprintf("chain %s {\ntype filter hook %s priority 0\n", hook, hook)
		for _, r := range list {
			rules += r + " drop\n"
		}
		rules += "}\n"
	}
	h.lab.input(rules+"}\n", append(h.inside(), "nft", "-f", "-")...)
}

// Rules loads an nft ruleset.
func (h *Host) Rules(rules string) {
	h.lab.t.Helper()
	h.lab.input(rules, append(h.inside(), "nft", "-f", "-")...)
}

// Clear takes all rules away.
func (h *Host) Clear() {
	h.lab.t.Helper()
	h.Run("nft", "flush", "ruleset")
}

// Lose makes every host lose a share of the packets that arrive and match.
func (l *Lab) Lose(percent int, match string) {
	l.t.Helper()
	for _, h := range l.hosts {
		h.Filter([]string{fmt.Sprintf("%s numgen random mod 100 < %d", match, percent)}, nil)
	}
}

// Cut lets nothing pass between the first half and the rest, without a word; Heal undoes it, and all else.
func (l *Lab) Cut(left, right []*Host) {
	l.t.Helper()
	side := func(hosts []*Host) string {
		var ips []string
		for _, h := range hosts {
			ips = append(ips, h.IP)
		}
		return "{ " + strings.Join(ips, ", ") + " }"
	}
	family := "ip"
	if l.v6 {
		family = "ip6"
	}
	for _, x := range []struct {
		hosts []*Host
		other string
	}{{left, side(right)}, {right, side(left)}} {
		for _, h := range x.hosts {
			h.Filter([]string{family + " saddr " + x.other}, []string{family + " daddr " + x.other})
		}
	}
}

// Heal takes the rules of all hosts away.
func (l *Lab) Heal() {
	l.t.Helper()
	for _, h := range l.hosts {
		h.Clear()
	}
}

// Start starts a simulated engine on the host's loopback and an agent beside it that joins the first hosts.
func (h *Host) Start(engine []string, env ...Env) {
	h.lab.t.Helper()
	s := h.lab.s
	addr := fmt.Sprintf("127.0.0.1:%d", EnginePort)
	journal := filepath.Join(s.dir, fmt.Sprintf("engine%d.journal", h.N))
	argv := append(h.inside(), Build(s.t, "./test/fakeengine"), "-listen", addr, "-model", FakeModel, "-journal", journal)
	h.Engine = &Engine{N: h.N, URL: "http://" + addr, Addr: addr, Model: FakeModel}
	h.Engine.Process = s.Start(fmt.Sprintf("engine%d", h.N), nil, argv[0], append(argv[1:], engine...)...)
	h.Engine.WaitLine("listening on", 10*time.Second)
	at := func(port int) string { return hostAddr(h.IP, port) }
	var join []string
	for _, x := range h.lab.hosts[:min(4, len(h.lab.hosts))] {
		if x != h && x.IP != "" {
			join = append(join, hostAddr(x.IP, GossipPort))
		}
	}
	base := Env{
		"GRAPEVINE_LISTEN": at(ClientPort), "GRAPEVINE_PEER_LISTEN": at(PeerPort), "GRAPEVINE_STATUS_LISTEN": at(StatusPort),
		"GRAPEVINE_GOSSIP_LISTEN": at(GossipPort), "GRAPEVINE_ADVERTISE": h.IP, "GRAPEVINE_JOIN": strings.Join(join, ","),
	}
	h.Agent = s.agent(h.N, h.Engine.URL, h.inside(), append([]Env{base}, env...)...)
	h.Agent.IP, h.Agent.URL, h.Agent.Status = h.IP, "http://"+at(ClientPort), "http://"+at(StatusPort)
	h.Agent.Start()
}

func hostAddr(ip string, port int) string {
	if strings.Contains(ip, ":") {
		return fmt.Sprintf("[%s]:%d", ip, port)
	}
	return fmt.Sprintf("%s:%d", ip, port)
}

// StartAll starts all hosts and waits until their agents are ready and see each other.
func (l *Lab) StartAll(engine []string, env ...Env) []*Agent {
	l.t.Helper()
	var agents []*Agent
	for _, h := range l.hosts {
		h.Start(engine, env...)
		agents = append(agents, h.Agent)
	}
	for _, a := range agents {
		a.WaitReady(30 * time.Second)
		a.WaitMembers(len(agents), 30*time.Second)
	}
	return agents
}

// Hide puts one more host behind address translation: it reaches the others, which see packets of the router.
func (l *Lab) Hide() *Host {
	l.t.Helper()
	router := l.namespace(100)
	l.plug(router, "v100")
	l.run("ip", "link", "set", "v100", "master", "br0", "up")
	router.Run("ip", "addr", "add", "10.77.0.100/24", "dev", "eth0")
	hidden := l.namespace(101)
	router.Run("ip", "link", "add", "inner", "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(hidden.ns.Pid()))
	router.Run("ip", "addr", "add", "192.168.77.1/24", "dev", "inner")
	router.Run("ip", "link", "set", "inner", "up")
	router.Run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
	router.Rules("table ip nat {\nchain post {\ntype nat hook postrouting priority 100\noifname \"eth0\" masquerade\n}\n}\n")
	hidden.IP = "192.168.77.2"
	hidden.Run("ip", "addr", "add", hidden.IP+"/24", "dev", "eth0")
	hidden.Run("ip", "link", "set", "eth0", "up")
	hidden.Run("ip", "route", "add", "default", "via", "192.168.77.1")
	return hidden
}
