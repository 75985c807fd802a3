package faultsim

import (
	"context"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
)

// keepalive is after which time a connection over a cut network breaks at both ends: 5 s, and three probes 5 s apart.
const keepalive = 20 * time.Second

// backlog is how many connections wait for Accept.
const backlog = 128

// network connects hosts, which are known by their IP. All settings hold at once, also for bytes under way.
type network struct {
	mu        sync.Mutex
	listeners map[string]*listener
	conns     map[*conn]struct{} // one end of each connection, the dialler's
	dead      map[string]bool    // hosts that are down: refused
	stalled   map[string]int     // hosts that stand still
	cut       map[[2]string]int  // pairs that do not reach each other
	slow      map[[2]string]time.Duration
	port      int
	dials     int
}

func newNetwork() *network {
	return &network{listeners: map[string]*listener{}, conns: map[*conn]struct{}{}, dead: map[string]bool{}, stalled: map[string]int{},
		cut: map[[2]string]int{}, slow: map[[2]string]time.Duration{}, port: 30000}
}

// wakeAll makes everybody look again who waits at a connection; the network is locked.
func (n *network) wakeAll() {
	for c := range n.conns {
		c.wake()
	}
}

func pair(a, b string) [2]string {
	if a > b {
		a, b = b, a
	}
	return [2]string{a, b}
}

func hostOf(addr string) string {
	h, _, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	return h
}

func tcpAddr(s string) *net.TCPAddr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s)) }

func opError(op string, err error) error { return &net.OpError{Op: op, Net: "tcp", Err: err} }

// listen is an agent.Options.Listen.
func (n *network) listen(_ context.Context, _, addr string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners[addr] != nil || n.dead[hostOf(addr)] {
		return nil, opError("listen", os.NewSyscallError("bind", syscall.EADDRINUSE))
	}
	l := &listener{n: n, addr: addr, queue: make(chan *conn, backlog), done: make(chan struct{})}
	n.listeners[addr] = l
	return l, nil
}

// dialFrom is an agent.Options.Dial for a host.
func (n *network) dialFrom(from string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, addr string) (net.Conn, error) { return n.dial(ctx, from, addr) }
}

func (n *network) dial(ctx context.Context, from, addr string) (net.Conn, error) {
	to := hostOf(addr)
	n.mu.Lock()
	wait := 2 * n.slow[pair(from, to)]
	n.mu.Unlock()
	if wait > 0 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, opError("dial", ctx.Err())
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.cut[pair(from, to)] > 0 {
		n.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(keepalive):
		}
		n.mu.Lock()
		return nil, opError("dial", os.ErrDeadlineExceeded)
	}
	l := n.listeners[addr]
	if n.dead[from] || n.dead[to] || l == nil || len(l.queue) == backlog || ctx.Err() != nil {
		return nil, opError("dial", os.NewSyscallError("connect", syscall.ECONNREFUSED))
	}
	n.port++
	n.dials++
	own := netip.AddrPortFrom(netip.MustParseAddr(from), uint16(n.port)).String()
	a := &conn{n: n, local: own, remote: addr}
	b := &conn{n: n, local: addr, remote: own}
	a.peer, b.peer = b, a
	a.moved, b.moved = sync.NewCond(&n.mu), sync.NewCond(&n.mu)
	n.conns[a] = struct{}{}
	l.queue <- b
	return a, nil
}

// down takes a host off the network: what it had breaks at both ends, and nothing is to be had from it, or by it.
func (n *network) down(host string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dead[host] = true
	for addr, l := range n.listeners {
		if hostOf(addr) == host {
			l.close()
		}
	}
	for c := range n.conns {
		if c.touches(host) {
			c.breakOff(syscall.ECONNRESET)
		}
	}
}

// up puts it back.
func (n *network) up(host string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.dead, host)
}

// stall stops a host: what was sent to it waits, it sends nothing.
func (n *network) stall(host string, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stalled[host] += step(on)
	n.wakeAll()
}

func step(on bool) int {
	if on {
		return 1
	}
	return -1
}

// part cuts two hosts apart, or joins them again. What is on the way waits; connections end after keepalive.
func (n *network) part(a, b string, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[pair(a, b)] += step(on)
	if on {
		for c := range n.conns {
			if c.between(a, b) {
				c.doom()
			}
		}
	}
	n.wakeAll()
}

// delay makes the way between two hosts so much longer.
func (n *network) delay(a, b string, d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.slow[pair(a, b)] = d
}

// reset breaks all connections between two hosts, at both ends. It returns how many.
func (n *network) reset(a, b string) (hit int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.conns {
		if c.between(a, b) && c.err == nil {
			c.breakOff(syscall.ECONNRESET)
			hit++
		}
	}
	return hit
}

// lose makes all connections between two hosts half open, as when a firewall forgets them: nothing arrives any more.
func (n *network) lose(a, b string) (hit int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.conns {
		if c.between(a, b) && c.err == nil {
			c.lost, c.peer.lost = true, true
			c.doom()
			hit++
		}
	}
	return hit
}

// open lists the connections that are open at an end that is not given.
func (n *network) open() (list []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.conns {
		list = append(list, c.local+" to "+c.remote)
	}
	return list
}

// listener is a TCP listener in memory.
type listener struct {
	n     *network
	addr  string
	queue chan *conn
	done  chan struct{}
	ended bool
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.done:
		return nil, opError("accept", net.ErrClosed)
	}
}

func (l *listener) Close() error {
	l.n.mu.Lock()
	defer l.n.mu.Unlock()
	l.close()
	return nil
}

// close resets who waits for Accept; the network is locked.
func (l *listener) close() {
	if l.ended {
		return
	}
	l.ended = true
	close(l.done)
	delete(l.n.listeners, l.addr)
	for {
		select {
		case c := <-l.queue:
			c.breakOff(syscall.ECONNRESET)
			c.closed = true
			c.forget()
		default:
			return
		}
	}
}

func (l *listener) Addr() net.Addr { return tcpAddr(l.addr) }
