//go:build linux

// load drives an OpenAI-style endpoint from one epoll loop and prints one JSON
// line. Modes: closed (closed loop, keep-alive or one connection a request)
// and stream (paced SSE streams, each chunk's delay read from its own stamp).
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/url"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/grapevine-lb/grapevine/test/bench/internal/ev"
)

type client struct {
	fd       int
	out      []byte // unsent rest of the request
	wantOut  bool
	t0       int64
	buf      []byte
	headDone bool
	chunked  bool
	need     int
	chunks   int
	done     bool
	startAt  int64
}

type dist struct {
	P50, P90, P99, P999, Max, Mean float64
}

type result struct {
	Mode     string
	Conc     int
	Body     int
	Seconds  float64
	Requests int
	RPS      float64
	Errors   int
	LatUs    *dist `json:",omitempty"`
	Chunks   int
	Missing  int
	Reads    int
	DelayUs  *dist  `json:",omitempty"`
	TTFTUs   *dist  `json:",omitempty"`
	Err      string `json:",omitempty"`
}

var (
	mode     = flag.String("mode", "closed", "closed or stream")
	target   = flag.String("url", "http://127.0.0.1:9001/v1/chat/completions", "one URL, or several comma-separated to spread over")
	conc     = flag.Int("conc", 16, "connections")
	dur      = flag.Duration("dur", 3*time.Second, "closed: length; stream: hard limit")
	bodyLen  = flag.Int("body", 2048, "request body bytes")
	churn    = flag.Bool("churn", false, "closed: a new connection for each request")
	nchunks  = flag.Int("chunks", 100, "stream: chunks")
	interval = flag.Duration("interval", 20*time.Millisecond, "stream: gap")
	ramp     = flag.Duration("ramp", 0, "stream: spread the starts over this long (default: the gap, at least 500ms)")
	hold     = flag.Duration("hold", 0, "stream: print READY after every first chunk, hold, then exit")
	warm     = flag.Duration("warm", 200*time.Millisecond, "closed: not counted")
	batch    = flag.Bool("batch", false, "stream: ask the engine for a beat that all streams share")
	key      = flag.String("auth", "", "value of Authorization")

	poll  = ev.NewPoller()
	conns = make([]*client, 1<<17)
	dials []*ev.Dialer
	res   result
	lat   = make([]int64, 0, 4<<20)
	ttfts []int64
	delay []int64
	ndial int
)

func fatal(err error) { fmt.Fprintln(os.Stderr, err); os.Exit(1) }

func mkReq(u *url.URL, stream bool) []byte {
	extra := `"stream":false,"max_tokens":16`
	if stream {
		gap := interval.Microseconds()
		if *batch {
			gap |= 1
		}
		extra = fmt.Sprintf(`"stream":true,"max_tokens":%d,"seed":%d`, *nchunks, gap)
	}
	pre := `{"model":"fake",` + extra + `,"temperature":0.7,"messages":[{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"`
	post := `"}]}`
	words := "the quick brown fox jumps over the lazy dog and then walks home "
	n := max(0, *bodyLen-len(pre)-len(post))
	txt := strings.Repeat(words, n/len(words)+1)[:n]
	auth := ""
	if *key != "" {
		auth = "Authorization: " + *key + "\r\n"
	}
	body := pre + txt + post
	return []byte(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: OpenAI/Python 1.109.1\r\nAccept: application/json\r\nAccept-Encoding: identity\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		u.Path, u.Host, auth, len(body), body))
}

func dial(c *client) bool {
	d := dials[ndial%len(dials)]
	ndial++
	fd, err := d.Dial()
	if err != nil {
		res.Errors++
		res.Err = err.Error()
		return false
	}
	c.fd = fd
	conns[fd] = c
	poll.Add(fd)
	return true
}

func drop(c *client) {
	if c.fd >= 0 {
		conns[c.fd] = nil
		syscall.Close(c.fd)
		c.fd = -1
	}
}

// push writes what is left of the request; false means the connection broke.
func (c *client) push() bool {
	for len(c.out) > 0 {
		n := ev.Write(c.fd, c.out)
		if n == -2 {
			return false
		}
		if n == -1 {
			if !c.wantOut {
				c.wantOut = true
				poll.RW(c.fd)
			}
			return true
		}
		c.out = c.out[n:]
	}
	if c.wantOut {
		c.wantOut = false
		poll.RO(c.fd)
	}
	return true
}

func (c *client) start(req []byte) bool {
	c.out, c.headDone, c.chunked, c.need, c.buf = req, false, false, 0, c.buf[:0]
	c.t0 = ev.Now()
	return c.push()
}

var endChunk = []byte("0\r\n\r\n")

// whole reports whether buf holds a whole response; bad if not a 200.
func (c *client) head() (ok, bad bool) {
	h := bytes.Index(c.buf, []byte("\r\n\r\n"))
	if h < 0 {
		return false, false
	}
	if !bytes.HasPrefix(c.buf, []byte("HTTP/1.1 200")) {
		res.Err = string(c.buf[:min(len(c.buf), 300)])
		return true, true
	}
	hd := bytes.ToLower(c.buf[:h])
	if i := bytes.Index(hd, []byte("content-length:")); i >= 0 {
		s := string(hd[i+15:])
		s, _, _ = strings.Cut(s, "\r")
		n, _ := strconv.Atoi(strings.TrimSpace(s))
		c.need = h + 4 + n
	} else {
		c.chunked = true
	}
	c.headDone = true
	return true, false
}

func main() {
	flag.Parse()
	ev.RaiseFiles()
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	var u *url.URL
	for _, s := range strings.Split(*target, ",") {
		v, err := url.Parse(s)
		if err != nil {
			fatal(err)
		}
		u = v
		d, err := ev.NewDialer(u.Host)
		if err != nil {
			fatal(err)
		}
		dials = append(dials, d)
	}
	res.Mode, res.Conc, res.Body = *mode, *conc, *bodyLen
	if *mode == "closed" {
		closed(mkReq(u, false))
	} else {
		stream(mkReq(u, true))
	}
	j, _ := json.Marshal(res)
	fmt.Println(string(j))
}

func closed(req []byte) {
	rbuf := make([]byte, 64<<10)
	var cs []*client
	if !*churn {
		for i := 0; i < *conc; i++ {
			c := &client{fd: -1, buf: make([]byte, 0, 4096)}
			if dial(c) {
				cs = append(cs, c)
			}
		}
	} else {
		for i := 0; i < *conc; i++ {
			c := &client{fd: -1, buf: make([]byte, 0, 4096)}
			if dial(c) {
				cs = append(cs, c)
			}
		}
	}
	begin := ev.Now()
	count := begin + int64(*warm)
	stop := count + int64(*dur)
	for _, c := range cs {
		c.start(req)
	}
	again := func(c *client) {
		for try := 0; try < 3; try++ {
			if c.fd < 0 && !dial(c) {
				continue
			}
			if c.start(req) {
				return
			}
			drop(c)
			res.Errors++
		}
	}
	for {
		n := poll.Wait(int64(100 * time.Millisecond))
		now := ev.Now()
		if now > stop {
			res.Seconds = float64(now-count) / 1e9
			break
		}
		for i := 0; i < n; i++ {
			e := poll.Evs[i]
			c := conns[e.Fd]
			if c == nil {
				continue
			}
			if e.Events&syscall.EPOLLOUT != 0 && !c.push() {
				res.Errors++
				drop(c)
				again(c)
				continue
			}
			if e.Events&^uint32(syscall.EPOLLOUT) == 0 {
				continue
			}
			r := ev.Read(c.fd, rbuf)
			if r == -1 {
				continue
			}
			if r <= 0 {
				res.Errors++
				if res.Err == "" {
					res.Err = "closed before the response"
				}
				drop(c)
				again(c)
				continue
			}
			c.buf = append(c.buf, rbuf[:r]...)
			if !c.headDone {
				ok, bad := c.head()
				if !ok {
					continue
				}
				if bad {
					res.Errors++
					if res.Errors > 1000 {
						return
					}
					drop(c)
					again(c)
					continue
				}
			}
			if c.chunked && !bytes.HasSuffix(c.buf, endChunk) || !c.chunked && len(c.buf) < c.need {
				continue
			}
			now := ev.Now()
			if !bytes.Contains(c.buf, []byte(`"chat.completion"`)) {
				res.Errors++
				res.Err = "wrong body"
			} else if c.t0 >= count {
				lat = append(lat, now-c.t0)
			}
			if *churn {
				drop(c)
			}
			again(c)
		}
	}
	res.Requests = len(lat)
	res.RPS = float64(len(lat)) / res.Seconds
	res.LatUs = summary(lat)
}

var tsKey = []byte(`"ts":`)

func stream(req []byte) {
	rbuf := make([]byte, 64<<10)
	delay = make([]int64, 0, *conc**nchunks)
	r := *ramp
	if r == 0 {
		r = max(*interval, 500*time.Millisecond)
	}
	begin := ev.Now()
	stop := begin + int64(*dur)
	cs := make([]*client, *conc)
	for i := range cs {
		cs[i] = &client{fd: -1, buf: make([]byte, 0, 2048), startAt: begin + int64(r)*int64(i)/int64(*conc)}
	}
	next, live, firsts := 0, 0, 0
	ready := false
	var holdEnd int64
	finish := func(c *client, err bool) {
		if err {
			res.Errors++
		}
		c.done = true
		live--
		drop(c)
	}
	for next < len(cs) || live > 0 {
		now := ev.Now()
		if now > stop || ready && now > holdEnd {
			break
		}
		wait := int64(50 * time.Millisecond)
		for next < len(cs) {
			if d := cs[next].startAt - now; d > 0 {
				wait = min(wait, d)
				break
			}
			c := cs[next]
			next++
			if dial(c) {
				live++
				if !c.start(req) {
					finish(c, true)
				}
			}
			wait = 0
			break
		}
		n := poll.Wait(wait)
		for i := 0; i < n; i++ {
			e := poll.Evs[i]
			c := conns[e.Fd]
			if c == nil {
				continue
			}
			if e.Events&syscall.EPOLLOUT != 0 && !c.push() {
				finish(c, true)
				continue
			}
			if e.Events&^uint32(syscall.EPOLLOUT) == 0 {
				continue
			}
			k := ev.Read(c.fd, rbuf)
			if k == -1 {
				continue
			}
			if k <= 0 {
				if c.chunks < *nchunks && res.Err == "" {
					res.Err = "stream cut"
				}
				finish(c, c.chunks < *nchunks)
				continue
			}
			now := ev.Now()
			res.Reads++
			c.buf = append(c.buf, rbuf[:k]...)
			if !c.headDone {
				ok, bad := c.head()
				if bad {
					finish(c, true)
					continue
				}
				if !ok {
					continue
				}
			}
			b, last := c.buf, 0
			for {
				j := bytes.Index(b[last:], tsKey)
				if j < 0 || last+j+24 > len(b) {
					break
				}
				at := last + j + 5
				var v int64
				for _, x := range b[at : at+19] {
					v = v*10 + int64(x-'0')
				}
				delay = append(delay, now-v)
				if c.chunks == 0 {
					ttfts = append(ttfts, now-c.t0)
					firsts++
				}
				c.chunks++
				last = at + 19
			}
			if bytes.HasSuffix(b, endChunk) {
				finish(c, c.chunks != *nchunks)
				continue
			}
			c.buf = append(c.buf[:0], b[max(last, len(b)-64):]...)
		}
		if *hold > 0 && !ready && firsts == *conc {
			ready = true
			fmt.Println("READY")
			holdEnd = ev.Now() + int64(*hold)
		}
	}
	res.Seconds = float64(ev.Now()-begin) / 1e9
	for _, c := range cs {
		res.Chunks += c.chunks
		if c.chunks > 0 {
			res.Requests++
		}
		if *hold == 0 {
			res.Missing += *nchunks - c.chunks
			if !c.done {
				res.Errors++
			}
		}
	}
	res.DelayUs, res.TTFTUs = summary(delay), summary(ttfts)
}

func summary(v []int64) *dist {
	if len(v) == 0 {
		return nil
	}
	slices.Sort(v)
	q := func(p float64) float64 { return float64(v[min(len(v)-1, int(p*float64(len(v))))]) / 1e3 }
	var s float64
	for _, x := range v {
		s += float64(x)
	}
	return &dist{q(.5), q(.9), q(.99), q(.999), float64(v[len(v)-1]) / 1e3, s / float64(len(v)) / 1e3}
}
