package harness

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
)

// Tap is a relay between an agent and its engine that records every byte of both directions and changes none. A reset on
// one side becomes a reset on the other, an end an end, so that it hides no hang-up.
type Tap struct {
	URL string // to give to an agent

	t      testing.TB
	ln     net.Listener
	target string
	wg     sync.WaitGroup

	mu    sync.Mutex
	conns []*tapped
	open  map[net.Conn]struct{}
}

// tapped is what passed on one connection.
type tapped struct {
	mu       sync.Mutex
	up, down bytes.Buffer // from the agent, from the engine
}

// Tap starts a relay at participant n's address to the engine at addr (host:port). It ends with the test.
func (s *Stage) Tap(n int, addr string) *Tap {
	s.t.Helper()
	ln, err := net.Listen("tcp", s.Addr(n, TapPort))
	if err != nil {
		s.t.Fatal(err)
	}
	tap := &Tap{URL: "http://" + s.Addr(n, TapPort), t: s.t, ln: ln, target: addr, open: map[net.Conn]struct{}{}}
	tap.wg.Go(tap.accept)
	s.t.Cleanup(func() {
		ln.Close()
		tap.mu.Lock()
		for c := range tap.open {
			c.Close()
		}
		tap.mu.Unlock()
		tap.wg.Wait()
	})
	return tap
}

func (tap *Tap) accept() {
	for {
		c, err := tap.ln.Accept()
		if err != nil {
			return
		}
		tap.wg.Go(func() { tap.relay(c.(*net.TCPConn)) })
	}
}

func (tap *Tap) relay(agent *net.TCPConn) {
	defer agent.Close()
	c, err := net.Dial("tcp", tap.target)
	if err != nil {
		agent.SetLinger(0) // the agent sees a reset: as near to a refused connection as a relay comes
		return
	}
	engine := c.(*net.TCPConn)
	defer engine.Close()
	rec := &tapped{}
	tap.mu.Lock()
	tap.conns = append(tap.conns, rec)
	tap.open[agent], tap.open[engine] = struct{}{}, struct{}{}
	tap.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { rec.copy(engine, agent, &rec.up) })
	both.Go(func() { rec.copy(agent, engine, &rec.down) })
	both.Wait()
	tap.mu.Lock()
	delete(tap.open, agent)
	delete(tap.open, engine)
	tap.mu.Unlock()
}

// copy passes on what comes, after it is recorded, so that the record never lacks what a client has.
func (rec *tapped) copy(dst, src *net.TCPConn, buf *bytes.Buffer) {
	b := make([]byte, 64<<10)
	for {
		n, err := src.Read(b)
		if n > 0 {
			rec.mu.Lock()
			buf.Write(b[:n])
			rec.mu.Unlock()
			if _, werr := dst.Write(b[:n]); werr != nil {
				err = werr
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			dst.CloseWrite()
			return
		default:
			src.SetLinger(0)
			dst.SetLinger(0)
			src.Close()
			dst.Close()
			return
		}
	}
}

// Exchange is one request and its answer as they were on the wire, without their framing.
type Exchange struct {
	Method, Path string
	Header       http.Header // of the request
	Sent         []byte      // its body
	Status       int
	Answer       http.Header
	Body         []byte // of the answer
	Trailer      http.Header
	Whole        bool // the answer ended as its framing says
}

// Exchanges parses what has passed so far, connection by connection.
func (tap *Tap) Exchanges() (list []Exchange) {
	tap.t.Helper()
	tap.mu.Lock()
	conns := tap.conns
	tap.mu.Unlock()
	for _, rec := range conns {
		rec.mu.Lock()
		up, down := bytes.Clone(rec.up.Bytes()), bytes.Clone(rec.down.Bytes())
		rec.mu.Unlock()
		got, err := parseExchanges(up, down)
		if err != nil {
			tap.t.Errorf("tap: %v", err)
		}
		list = append(list, got...)
	}
	return list
}

// parseExchanges reads pipelined requests and their answers. A request without any byte of an answer has status 0.
func parseExchanges(up, down []byte) (list []Exchange, err error) {
	reqs, answers := bufio.NewReader(bytes.NewReader(up)), bufio.NewReader(bytes.NewReader(down))
	for {
		req, err := http.ReadRequest(reqs)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		x := Exchange{Method: req.Method, Path: req.URL.RequestURI(), Header: req.Header}
		x.Header["Host"] = []string{req.Host} // ReadRequest takes it out
		if x.Sent, err = io.ReadAll(req.Body); err != nil {
			return append(list, x), nil // the agent hung up in the middle
		}
		var resp *http.Response
		for resp == nil || resp.StatusCode/100 == 1 && resp.StatusCode != http.StatusSwitchingProtocols {
			if resp, err = http.ReadResponse(answers, req); err != nil {
				return append(list, x), nil // the engine has not answered, or not yet
			}
		}
		x.Status, x.Answer = resp.StatusCode, resp.Header
		x.Body, err = io.ReadAll(resp.Body)
		x.Whole, x.Trailer = err == nil, resp.Trailer
		list = append(list, x)
		if err != nil || resp.Close {
			return list, nil
		}
	}
}
