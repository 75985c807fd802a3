//go:build linux

// engine is a fake OpenAI-style inference server: one epoll loop, prebuilt
// answers, exact pacing. A request's max_tokens sets the number of streamed
// chunks and its seed the gap between them in microseconds (both survive a
// router that rebuilds the JSON body); an odd seed puts them on a beat that all
// such streams share, as a batching engine does. Each chunk carries its send time.
package main

import (
	"bytes"
	"container/heap"
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/grapevine-lb/grapevine/test/bench/internal/ev"
)

type conn struct {
	fd         int
	in, out    []byte
	wantOut    bool
	streaming  bool
	left       int
	next, ival int64
	closeAfter bool
	http10     bool // no chunk framing; the end is the close
	eng        *engine
}

type engine struct{ running, total int64 }

type timers []*conn

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].next < t[j].next }
func (t timers) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *timers) Push(x any)        { *t = append(*t, x.(*conn)) }
func (t *timers) Pop() any          { o := *t; c := o[len(o)-1]; *t = o[:len(o)-1]; return c }

var (
	poll      = ev.NewPoller()
	conns     = make([]*conn, 1<<17)
	due       timers
	plain     []byte // the whole non-stream response
	chunk     []byte // one HTTP chunk holding one SSE event
	tsAt      int    // where the 19 digits go
	streamHd  = []byte("HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")
	streamHd0 = []byte("HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n")
	streamEnd = []byte("e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
	defChunks = flag.Int("chunks", 200, "chunks in a stream when the request has no max_tokens")
	defIval   = flag.Duration("interval", 20*time.Millisecond, "gap between chunks when the request has no seed")
	ttft      = flag.Duration("ttft", 0, "delay before the first chunk")
	respBytes = flag.Int("resp-bytes", 600, "size of a non-stream JSON answer")
	chunkLen  = flag.Int("chunk-bytes", 200, "size of one SSE event")
	waiting   = flag.Int("waiting", 0, "value of vllm:num_requests_waiting")
	kv        = flag.Float64("kv", 0.1, "value of vllm:kv_cache_usage_perc")
	model     = flag.String("model", "fake", "model name")
	logPaths  = flag.Bool("log-paths", false, "log requests to unknown paths")
)

func build() {
	pad := func(s string, n int) string {
		if d := n - len(s) + 1; d > 0 {
			return strings.Replace(s, "@", strings.Repeat("x", d), 1)
		}
		return strings.Replace(s, "@", "", 1)
	}
	body := pad(`{"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion","created":1764400000,"model":"`+*model+
		`","choices":[{"index":0,"message":{"role":"assistant","content":"@"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":512,"total_tokens":528,"completion_tokens":16}}`, *respBytes)
	plain = []byte(fmt.Sprintf("HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", len(body), body))
	evt := pad(`data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1764400000,"model":"`+*model+
		`","choices":[{"index":0,"delta":{"content":"@"}}],"ts":0000000000000000000}`, *chunkLen-2) + "\n\n"
	chunk = []byte(fmt.Sprintf("%x\r\n%s\r\n", len(evt), evt))
	tsAt = bytes.Index(chunk, []byte(`"ts":`)) + 5
}

func main() {
	listen := flag.String("listen", "127.0.0.1:9001", "addresses, comma-separated; each is an engine (a+b: one engine on two addresses; unix:PATH)")
	flag.Parse()
	ev.RaiseFiles()
	runtime.LockOSThread()
	debug.SetGCPercent(400)
	build()
	lst := map[int]*engine{}
	for _, as := range strings.Split(*listen, ",") {
		eng := &engine{}
		for _, a := range strings.Split(as, "+") {
			fd, err := ev.Listen(a)
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			lst[fd] = eng
			poll.Add(fd)
		}
	}
	scratch := make([]byte, 256<<10)
	for {
		wait := int64(-1)
		if len(due) > 0 {
			wait = max(0, due[0].next-ev.Now())
		}
		n := poll.Wait(wait)
		for i := 0; i < n; i++ {
			e := poll.Evs[i]
			fd := int(e.Fd)
			if eng := lst[fd]; eng != nil {
				for {
					nfd := ev.Accept(fd)
					if nfd < 0 {
						break
					}
					conns[nfd] = &conn{fd: nfd, eng: eng}
					poll.Add(nfd)
				}
				continue
			}
			c := conns[fd]
			if c == nil {
				continue
			}
			if e.Events&syscall.EPOLLOUT != 0 && !c.flush() {
				continue
			}
			if e.Events&(syscall.EPOLLIN|syscall.EPOLLHUP|syscall.EPOLLERR) != 0 {
				r := ev.Read(fd, scratch)
				if r == 0 || r == -2 {
					c.close()
				} else if r > 0 {
					c.data(scratch[:r])
				}
			}
		}
		for len(due) > 0 && due[0].next <= ev.Now() {
			c := due[0]
			if c.fd < 0 {
				heap.Pop(&due)
				continue
			}
			c.tick()
			if c.streaming && c.fd >= 0 {
				heap.Fix(&due, 0)
			} else {
				heap.Pop(&due)
			}
		}
	}
}

func (c *conn) close() {
	if c.fd < 0 {
		return
	}
	if c.streaming {
		c.eng.running--
	}
	conns[c.fd] = nil
	syscall.Close(c.fd)
	c.fd = -1
}

func (c *conn) send(b []byte) {
	if c.fd < 0 {
		return
	}
	if len(c.out) == 0 {
		n := ev.Write(c.fd, b)
		if n == -2 {
			c.close()
			return
		}
		if n == len(b) {
			return
		}
		b = b[max(n, 0):]
		c.wantOut = true
		poll.RW(c.fd)
	}
	c.out = append(c.out, b...)
}

func (c *conn) flush() bool {
	if len(c.out) > 0 {
		n := ev.Write(c.fd, c.out)
		if n == -2 {
			c.close()
			return false
		}
		c.out = c.out[max(n, 0):]
	}
	if len(c.out) == 0 && c.wantOut {
		c.wantOut = false
		c.out = nil
		poll.RO(c.fd)
	}
	return true
}

func (c *conn) tick() {
	if c.left == 0 {
		if c.http10 {
			c.send(streamEnd[3:17])
		} else {
			c.send(streamEnd)
		}
		c.streaming = false
		if c.fd >= 0 {
			c.eng.running--
			if c.closeAfter {
				c.close()
			} else if len(c.in) > 0 {
				c.data(nil)
			}
		}
		return
	}
	c.left--
	now := ev.Now()
	putTS(now)
	if c.http10 {
		c.send(chunk[bytes.IndexByte(chunk, '\n')+1 : len(chunk)-2])
	} else {
		c.send(chunk)
	}
	c.next += c.ival
	if c.left == 0 {
		c.next -= c.ival // the end follows the last chunk at once
	}
}

func putTS(v int64) {
	for i := tsAt + 18; i >= tsAt; i-- {
		chunk[i] = byte('0' + v%10)
		v /= 10
	}
}

var (
	crlf2  = []byte("\r\n\r\n")
	chatP  = []byte("POST /v1/chat/completions")
	compP  = []byte("POST /v1/completions")
	hdrCL  = []byte("content-length:")
	hdrTE  = []byte("transfer-encoding: chunked")
	hdrCC  = []byte("connection: close")
	endChk = []byte("0\r\n\r\n")
)

func lower(b []byte) {
	for i, x := range b {
		if x >= 'A' && x <= 'Z' {
			b[i] = x + 32
		}
	}
}

func num(body []byte, key string) (int64, bool) {
	i := bytes.Index(body, []byte(key))
	if i < 0 {
		return 0, false
	}
	i += len(key)
	for i < len(body) && (body[i] == ' ' || body[i] == ':') {
		i++
	}
	j := i
	for j < len(body) && body[j] >= '0' && body[j] <= '9' {
		j++
	}
	v, err := strconv.ParseInt(string(body[i:j]), 10, 64)
	return v, err == nil
}

func (c *conn) data(b []byte) {
	req := b
	if len(c.in) > 0 || c.streaming {
		c.in = append(c.in, b...)
		req = c.in
	}
	if c.streaming {
		return
	}
	used := c.serve(req)
	if used == 0 {
		if len(c.in) == 0 {
			if cap(c.in) == 0 && len(b) > 4096 {
				c.in = make([]byte, 0, 1200<<10)
			}
			c.in = append(c.in, b...)
		}
		return
	}
	c.in = append(c.in[:0], req[used:]...)
}

// serve answers the request at the start of req and returns its length, or 0
// when it is not whole yet.
func (c *conn) serve(req []byte) int {
	h := bytes.Index(req, crlf2)
	if h < 0 {
		return 0
	}
	eol := bytes.IndexByte(req, '\r')
	hd := make([]byte, h-eol)
	copy(hd, req[eol:h])
	lower(hd)
	end := h + 4
	if i := bytes.Index(hd, hdrCL); i >= 0 {
		n, _ := num(hd[i:], "content-length")
		end += int(n)
		if len(req) < end {
			if c.in == nil && bytes.Contains(hd, []byte("100-continue")) {
				c.send([]byte("HTTP/1.1 100 Continue\r\n\r\n"))
			}
			return 0
		}
	} else if bytes.Contains(hd, hdrTE) {
		if !bytes.HasSuffix(req, endChk) {
			return 0
		}
		end = len(req)
	}
	c.http10 = bytes.HasSuffix(req[:eol], []byte("HTTP/1.0"))
	c.closeAfter = c.http10 || bytes.Contains(hd, hdrCC)
	body := req[h+4 : end]
	c.eng.total++
	if bytes.HasPrefix(req, chatP) || bytes.HasPrefix(req, compP) {
		if !bytes.Contains(body, []byte(`"stream":true`)) && !bytes.Contains(body, []byte(`"stream": true`)) {
			c.send(plain)
		} else {
			c.left, c.ival = *defChunks, int64(*defIval)
			if v, ok := num(body, `"max_tokens"`); ok {
				c.left = int(v)
			} else if v, ok := num(body, `"max_completion_tokens"`); ok {
				c.left = int(v)
			}
			if v, ok := num(body, `"seed"`); ok {
				c.ival = v * 1000
			}
			c.streaming = true
			c.eng.running++
			if c.http10 {
				c.send(streamHd0)
			} else {
				c.send(streamHd)
			}
			c.next = ev.Now() + int64(*ttft)
			if c.ival/1000%2 == 1 {
				c.next += c.ival - c.next%c.ival
			}
			heap.Push(&due, c)
			return end
		}
	} else {
		c.other(string(req[:eol]))
	}
	if c.closeAfter {
		c.close()
	}
	return end
}

func (c *conn) other(line string) {
	f := strings.Fields(line + " x x")
	p, _, _ := strings.Cut(f[1], "?")
	status, ct := "200 OK", "application/json"
	var body string
	switch p {
	case "/health", "/health_generate", "/ping", "/liveness", "/readiness":
		ct, body = "text/plain", ""
	case "/v1/models":
		body = `{"object":"list","data":[{"id":"` + *model + `","object":"model","created":1764400000,"owned_by":"vllm","max_model_len":131072}]}`
	case "/metrics":
		ct = "text/plain; version=0.0.4"
		l := `{engine="0",model_name="` + *model + `"} `
		body = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running" + l + fmt.Sprint(c.eng.running) +
			"\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting" + l + fmt.Sprint(*waiting) +
			"\n# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc" + l + fmt.Sprint(*kv) + "\n"
	case "/get_server_info", "/server_info":
		body = `{"model_path":"` + *model + `","served_model_name":"` + *model + `","tokenizer_path":"` + *model + `","version":"0.5.0","dp_size":1,"tp_size":1,"internal_states":[{"load":0}]}`
	case "/get_model_info", "/model_info":
		body = `{"model_path":"` + *model + `","tokenizer_path":"` + *model + `","is_generation":true,"preferred_sampling_params":null}`
	case "/get_load", "/v1/loads":
		body = `[{"dp_rank":0,"num_reqs":0,"num_waiting_reqs":0,"num_tokens":0}]`
	case "/version":
		body = `{"version":"0.11.0"}`
	case "/bench/stat":
		body = fmt.Sprintf(`{"total":%d,"running":%d}`, c.eng.total, c.eng.running)
	default:
		status, body = "404 Not Found", `{"detail":"Not Found"}`
		if *logPaths {
			fmt.Fprintln(os.Stderr, line)
		}
	}
	c.send([]byte(fmt.Sprintf("HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s", status, ct, len(body), body)))
}
