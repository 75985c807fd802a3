package gossip

import (
	"bufio"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"time"
)

// ErrNoAnswer says that a probed address took our ping and said nothing: another key, another cluster name, or no agent.
var ErrNoAnswer = errors.New("no answer to a ping: another gossip key, another cluster name, or no agent")

// Probe is what one address said to a ping of membership, over each of the two protocols that it needs.
type Probe struct {
	TCP, UDP error // nil: it answered, with one of our keys
	RTT      time.Duration
}

// ProbePeer pings an agent's gossip address (host:port) over TCP and over UDP, without joining: the other side does not
// learn of us. Every try ends with ctx; UDP is tried three times within it, since a packet may get lost.
func ProbePeer(ctx context.Context, addr, cluster string, keys [][]byte) Probe {
	p := prober{cluster: cluster, keys: keys}
	start := time.Now()
	out := Probe{TCP: p.tcp(ctx, addr)}
	out.RTT = time.Since(start)
	out.UDP = p.udp(ctx, addr)
	return out
}

// Resolve returns the addresses behind a seed of Config.Join, as a node with that gossip port would try them.
func Resolve(ctx context.Context, seed string, port uint16, r Resolver) ([]string, error) {
	if r == nil {
		r = net.DefaultResolver
	}
	if port == 0 {
		port = DefaultPort
	}
	j := joiner{port: port, resolver: r}
	return j.lookup(ctx, seed)
}

// Wire constants of memberlist v0.7.0 (net.go, label.go, security.go).
const (
	wirePing      = 0
	wireEncrypted = 10
	wireError     = 13
	wireLabel     = 244
	wireGCM       = 1 // version of the encryption, without padding
	wireNonce     = 12
)

type prober struct {
	cluster string
	keys    [][]byte
}

// ping is a message that any agent answers: no name, so that it is for whoever gets it, and no address, so that the answer
// comes back the way that it came.
func (p *prober) ping() []byte {
	b := []byte{wirePing, 0x82, 0xa5, 'S', 'e', 'q', 'N', 'o', 0xce}
	b = binary.BigEndian.AppendUint32(b, uint32(time.Now().UnixNano()))
	return append(b, 0xa4, 'N', 'o', 'd', 'e', 0xa0)
}

func (p *prober) label(b []byte) []byte {
	if p.cluster == "" {
		return b
	}
	return append(append([]byte{wireLabel, byte(len(p.cluster))}, p.cluster...), b...)
}

func gcm(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// seal appends msg in memberlist's encryption, by the newest key.
func (p *prober) seal(dst, msg, more []byte) ([]byte, error) {
	g, err := gcm(p.keys[0])
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, wireNonce)
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	dst = append(append(dst, wireGCM), nonce...)
	return g.Seal(dst, nonce, msg, more), nil
}

// opens reports whether one of our keys fits.
func (p *prober) opens(b, more []byte) bool {
	if len(b) < 1+wireNonce || b[0] > wireGCM {
		return false
	}
	return slices.ContainsFunc(p.keys, func(key []byte) bool {
		g, err := gcm(key)
		if err != nil {
			return false
		}
		_, err = g.Open(nil, b[1:1+wireNonce], b[1+wireNonce:], more)
		return err == nil
	})
}

func (p *prober) udp(ctx context.Context, addr string) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, "udp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	msg := p.ping()
	if len(p.keys) > 0 {
		if msg, err = p.seal(nil, msg, []byte(p.cluster)); err != nil {
			return err
		}
	}
	msg = p.label(msg)
	wait := time.Second
	if end, ok := ctx.Deadline(); ok {
		wait = time.Until(end) / 3
	}
	buf := make([]byte, 64<<10)
	for range 3 {
		if _, err = c.Write(msg); err != nil {
			return err // the port is closed, as an earlier packet's reply told
		}
		_ = c.SetReadDeadline(time.Now().Add(wait))
		n, rerr := c.Read(buf)
		if err = rerr; err == nil {
			return p.answered(buf[:n])
		}
		if nerr, ok := errors.AsType[net.Error](err); !ok || !nerr.Timeout() {
			return err
		}
	}
	return ErrNoAnswer
}

// answered judges a packet: an answer that our key opens is an agent of our cluster.
func (p *prober) answered(b []byte) error {
	if len(b) >= 2 && b[0] == wireLabel && len(b) >= 2+int(b[1]) {
		b = b[2+int(b[1]):]
	}
	if len(p.keys) > 0 && !p.opens(b, []byte(p.cluster)) {
		return ErrNoAnswer
	}
	return nil
}

func (p *prober) tcp(ctx context.Context, addr string) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if end, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(time.Now().Add(time.Until(end) / 2)) // the other half is for UDP
	}
	msg := p.ping()
	if len(p.keys) > 0 {
		head := binary.BigEndian.AppendUint32([]byte{wireEncrypted}, uint32(1+wireNonce+len(msg)+16))
		if msg, err = p.seal(slices.Clone(head), msg, append(slices.Clone(head), p.cluster...)); err != nil {
			return err
		}
	}
	if _, err := c.Write(p.label(msg)); err != nil {
		return err
	}
	r := bufio.NewReader(c)
	first, err := r.ReadByte()
	if err != nil {
		return ErrNoAnswer // it hung up: what it could not read it does not answer
	}
	if len(p.keys) == 0 {
		if first == wireEncrypted || first == wireError {
			return ErrNoAnswer // it has a key
		}
		return nil
	}
	head := make([]byte, 5)
	head[0] = first
	if _, err := io.ReadFull(r, head[1:]); err != nil || first != wireEncrypted {
		return ErrNoAnswer
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > 64<<10 {
		return ErrNoAnswer
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil || !p.opens(body, slices.Concat(head, []byte(p.cluster))) {
		return ErrNoAnswer
	}
	return nil
}
