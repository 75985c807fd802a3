package proxy

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/link"
	"github.com/grapevine-lb/grapevine/routing"
)

// LinkPath is where the peer listener takes the upgrade to the link protocol.
const LinkPath = "/grapevine/v1/link"

// Kinds of questions between agents (package link has the frames). Numbers are a contract.
const (
	AskScore  byte = 8 // what would this request cost you? ask.go; 1 was the same with blocks of one size
	AskRecord byte = 2 // your load record, for those whom gossip does not reach
	AskModels byte = 3 // your model list
	AskDigest byte = 4 // your whole prefix digest
	AskSteal  byte = 5 // give me one of your held requests; steal.go
	AskOwner  byte = 6 // did your engine make this object? owners.go
	AskKeys   byte = 7 // show or change your gossip keys: verb, line feed, argument
)

// questions are the links to the other agents, one for each boot id, and those that they opened to us.
type questions struct {
	p *Proxy

	mu     sync.Mutex
	asked  map[uint64]*asked
	served map[net.Conn]struct{}
	closed bool
	wg     sync.WaitGroup
}

// asked is one agent that we ask.
type asked struct {
	addr   string
	client *link.Client

	mu     sync.Mutex
	missed int       // answers in a row that did not come in time
	until  time.Time // not asked for a score before
	rtt    time.Duration
}

// to returns the link to a member, made at the first use. Its address comes from the member list and nowhere else. nil:
// the proxy is closing.
func (q *questions) to(peer *routing.Peer) *asked {
	m := peer.Member()
	q.mu.Lock()
	a := q.asked[m.Boot]
	if a != nil && a.addr == m.Addr || q.closed {
		q.mu.Unlock()
		return a
	}
	old := a
	if q.asked == nil {
		q.asked = make(map[uint64]*asked)
	}
	a = &asked{addr: m.Addr, client: &link.Client{Dial: q.p.linkDial(m.Boot, m.Addr)}}
	q.asked[m.Boot] = a
	q.mu.Unlock()
	if old != nil {
		old.client.Close()
	}
	return a
}

// sweep closes the links to those who are no members any more.
func (q *questions) sweep(s *routing.Snapshot) {
	var gone []*asked
	alive := make(map[uint64]bool, len(s.Peers()))
	for _, p := range s.Peers() {
		alive[p.Boot()] = true
	}
	q.mu.Lock()
	for boot, a := range q.asked {
		if !alive[boot] {
			gone = append(gone, a)
			delete(q.asked, boot)
		}
	}
	q.mu.Unlock()
	for _, a := range gone {
		a.client.Close()
	}
}

// close ends all links and waits for their goroutines.
func (q *questions) close() {
	q.mu.Lock()
	q.closed = true
	all := q.asked
	q.asked = nil
	for nc := range q.served {
		_ = nc.Close()
	}
	q.mu.Unlock()
	for _, a := range all {
		a.client.Close()
	}
	q.wg.Wait()
}

// linkDial opens a connection to a member's peer listener and upgrades it.
func (p *Proxy) linkDial(boot uint64, addr string) func(context.Context) (net.Conn, error) {
	connect := newPeerConnector(&p.cfg, boot, addr)
	return func(ctx context.Context) (net.Conn, error) {
		nc, err := connect(ctx, "http/1.1")
		if err != nil {
			return nil, err
		}
		stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
		up, err := upgradeLink(nc, addr, p.hop)
		if !stop() && err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			_ = nc.Close()
			return nil, err
		}
		return up, nil
	}
}

// upgradeLink asks for the link protocol on a fresh connection.
func upgradeLink(nc net.Conn, host, hop string) (net.Conn, error) {
	_, err := fmt.Fprintf(nc, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: %s\r\n%s: %s\r\n\r\n", LinkPath, host, link.Protocol, headerHop, hop)
	if err != nil {
		return nil, err
	}
	r := bufio.NewReaderSize(nc, 1024)
	resp, err := http.ReadResponse(r, nil) //nolint:bodyclose // a 101 has no body
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols || !strings.EqualFold(resp.Header.Get("Upgrade"), link.Protocol) {
		return nil, fmt.Errorf("the peer does not speak %s: %s", link.Protocol, resp.Status)
	}
	if n := r.Buffered(); n > 0 {
		early, _ := r.Peek(n) // there are that many
		return &earlyConn{Conn: nc, early: early}, nil
	}
	return nc, nil
}

// ServeLink takes an upgrade to the link protocol, whose request came over the peer listener, and answers questions
// until either end closes it.
func (p *Proxy) ServeLink(w http.ResponseWriter, r *http.Request) {
	if !strings.EqualFold(r.Header.Get("Upgrade"), link.Protocol) || r.Method != http.MethodGet {
		w.Header().Set("Upgrade", link.Protocol)
		http.Error(w, "this path speaks "+link.Protocol, http.StatusUpgradeRequired)
		return
	}
	if peer := p.provenPeer(r); peer != 0 && r.Header.Get(headerHop) != formatBoot(peer) {
		p.metrics.refusals.add(errForgedHop.Reason)
		errForgedHop.write(w)
		return
	}
	nc, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, "HTTP/1.1 is needed", http.StatusUpgradeRequired)
		return
	}
	defer nc.Close()
	_ = nc.SetDeadline(time.Time{})
	if _, err := io.WriteString(nc, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+link.Protocol+"\r\n\r\n"); err != nil {
		return
	}
	q := &p.questions
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return
	}
	if q.served == nil {
		q.served = make(map[net.Conn]struct{})
	}
	q.served[nc] = struct{}{}
	q.wg.Add(1)
	q.mu.Unlock()
	err = link.Serve(nc, rw.Reader, p.answer)
	q.mu.Lock()
	delete(q.served, nc)
	q.mu.Unlock()
	q.wg.Done()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		p.log.Debug("link", "remote", nc.RemoteAddr(), "error", err)
	}
}

// answer answers one question, from memory.
func (p *Proxy) answer(kind byte, payload, reply []byte) ([]byte, bool) {
	switch kind {
	case AskScore:
		return p.answerScore(payload, reply)
	case AskOwner:
		return p.answerOwner(payload, reply)
	case AskSteal:
		return p.answerSteal(payload, reply)
	case AskRecord:
		if p.cfg.Record == nil {
			return reply, false
		}
		return append(reply, p.cfg.Record()...), true
	}
	if p.cfg.Answer != nil {
		return p.cfg.Answer(kind, payload, reply)
	}
	return reply, false
}

// Ask puts one question to a member and waits for the answer.
func (p *Proxy) Ask(ctx context.Context, boot uint64, timeout time.Duration, kind byte, payload []byte) ([]byte, error) {
	peer := p.cfg.Table.Peer(boot)
	if peer == nil {
		return nil, fmt.Errorf("no member has the boot id %016x", boot)
	}
	a := p.questions.to(peer)
	if a == nil {
		return nil, link.ErrClosed
	}
	return a.client.Call(ctx, time.Now().Add(timeout), kind, payload, nil)
}

// fields reads the fields of a question's payload; the first that is missing makes it bad.
type fields struct {
	b   []byte
	bad bool
}

func (f *fields) take(n int) []byte {
	if f.bad || n > len(f.b) {
		f.bad = true
		return make([]byte, min(n, 8))
	}
	b := f.b[:n]
	f.b = f.b[n:]
	return b
}

func (f *fields) u8() byte    { return f.take(1)[0] }
func (f *fields) u16() uint16 { return binary.LittleEndian.Uint16(f.take(2)) }
func (f *fields) u32() uint32 { return binary.LittleEndian.Uint32(f.take(4)) }
func (f *fields) u64() uint64 { return binary.LittleEndian.Uint64(f.take(8)) }
