package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// send plays a file of raw bytes to the first agent, placeholder replaced, and returns what the engine saw.
func send(t *testing.T, f *fleet, e *scripted, file, placeholder, name string) (*http.Response, http.Header, string) {
	t.Helper()
	c, err := f.net.dial(context.Background(), "", f.clients[0])
	require.NoError(t, err)
	defer c.Close()
	msg := readCase(t, "http/"+file)
	if placeholder != "" {
		msg = bytes.ReplaceAll(msg, []byte(placeholder), []byte(name))
	}
	resp, body := raw(t, c, msg)
	if e.count() == 0 {
		return resp, nil, body
	}
	return resp, e.last(), body
}

// C14: Connection cannot name what the agent adds.
func TestC14ConnectionCannotStripOurs(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(200, okAnswer)
		f := newFleet(t, order, nil, pair(target, e)...)
		resp, h, _ := send(t, f, e, "connection-strips-added-headers.txt", "GRAPEVINE-HOP-HEADER", headerHop)
		assert.Equal(t, 200, resp.StatusCode)
		assert.NotEmpty(t, h.Get("X-Request-Id"))
		assert.NotEmpty(t, h.Get("X-Forwarded-For"))
		assert.Empty(t, h.Get(headerHop), "the hop ends at the target's agent")
		assert.Equal(t, h.Get("X-Request-Id"), resp.Header.Get("X-Request-Id"))
	})
}

// C15: what concerns one connection stops there, in both directions.
func TestC15HopByHop(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(200, okAnswer, "Connection", "X-Engine-Private", "X-Engine-Private", "1", "X-Engine-Public", "2", "Keep-Alive", "timeout=9")
		f := newFleet(t, order, nil, pair(target, e)...)
		resp, h, _ := send(t, f, e, "connection-custom-hop.txt", "", "")
		assert.Equal(t, 200, resp.StatusCode)
		for _, name := range []string{"X-Drop-Me", "Keep-Alive", "Proxy-Authorization", "Trailer", "Connection"} {
			assert.Empty(t, h.Get(name), name)
		}
		assert.Equal(t, "trailers", h.Get("Te"))
		assert.Empty(t, resp.Header.Get("X-Engine-Private"))
		assert.Empty(t, resp.Header.Get("Keep-Alive"))
		assert.Equal(t, "2", resp.Header.Get("X-Engine-Public"))
	})
}

// C39: an upgrade to h2c is not passed on; the request is served as HTTP/1.1.
func TestC39NoSmuggledUpgrade(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(200, okAnswer)
		f := newFleet(t, order, nil, pair(target, e)...)
		c, err := f.net.dial(context.Background(), "", f.clients[0])
		require.NoError(t, err)
		defer c.Close()
		msg := bytes.Replace(readCase(t, "http/h2c-upgrade.txt"), []byte("Connection: Upgrade"), []byte("Connection: close, Upgrade"), 1)
		resp, _ := raw(t, c, msg)
		assert.Equal(t, 200, resp.StatusCode)
		assert.Empty(t, e.last().Get("Upgrade"))
		assert.Empty(t, e.last().Get("Http2-Settings"))
	})
}

// A body behind a head that asks for an upgrade is a body, framed as such: an engine that declines the upgrade would take it
// for the next request.
func TestUpgradeWithABody(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		const hidden = "GET /v1/hidden HTTP/1.1\r\nHost: x\r\n\r\n"
		for _, framed := range []string{
			fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(hidden), hidden),
			fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(hidden), hidden),
		} {
			e := answers(200, okAnswer)
			f := newFleet(t, order, nil, pair(target, e)...)
			c, err := f.net.dial(context.Background(), "", f.clients[0])
			require.NoError(t, err)
			resp, _ := raw(t, c, []byte("GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n"+framed))
			assert.Equal(t, 200, resp.StatusCode)
			assert.Equal(t, []string{hidden}, e.bodies)
			assert.Empty(t, e.last().Get("Upgrade"))
			_ = c.Close()
		}
	})
}

// C100: no header of a client chooses the upstream, and our own are stripped but for three.
func TestC100RoutingHeadersAreStripped(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(200, okAnswer)
		f := newFleet(t, order, nil, pair(target, e)...)
		for _, name := range []string{headerHop, headerLoad, headerReason, "x-grapevine-anything"} {
			c, err := f.net.dial(context.Background(), "", f.clients[0])
			require.NoError(t, err)
			msg := bytes.ReplaceAll(readCase(t, "http/routing-headers-from-client.txt"), []byte("GRAPEVINE-ROUTE-HEADER"), []byte(name))
			msg = bytes.Replace(msg, []byte("Host:"), []byte("Connection: close\r\nHost:"), 1)
			resp, _ := raw(t, c, msg)
			_ = c.Close()
			require.Equal(t, 200, resp.StatusCode)
			for k := range e.last() {
				assert.False(t, strings.HasPrefix(strings.ToLower(k), headerPrefix), k)
				assert.False(t, foreign(k), k)
			}
		}
	})
}

// What an engine says in our names does not reach the client, and the record between agents stays between them.
func TestAnswersCarryNothingOfOurs(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(503, "x", headerReason, "forged", headerLoad, "forged", "X-Grapevine-Else", "forged")
		var got []byte
		f := newFleet(t, order, func(i int, c *Config) {
			c.Record = func() []byte { return []byte{1, 2, byte(i)} }
			if i == 0 {
				c.OnRecord = func(_ uint64, b []byte) { got = b }
			}
		}, pair(target, e)...)
		resp, text, err := f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, 503, resp.StatusCode)
		assert.Equal(t, "x", text)
		for k := range resp.Header {
			assert.False(t, strings.HasPrefix(strings.ToLower(k), headerPrefix), k)
		}
		if target == 1 {
			assert.Equal(t, []byte{1, 2, 1}, got, "the peer's record came with the answer")
		} else {
			assert.Nil(t, got)
		}
	})
}

// C19: one rule for the forwarding headers, the same on both paths.
func TestC19Forwarded(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(200, okAnswer)
		f := newFleet(t, order, nil, pair(target, e)...)
		req, _ := http.NewRequest("POST", "http://"+f.clients[0]+chatPath, strings.NewReader(chatBody(false)))
		req.Host = "llm.example"
		req.Header.Set("X-Forwarded-For", "203.0.113.9")
		req.Header["User-Agent"] = nil
		resp, err := f.hc.Do(req)
		require.NoError(t, err)
		_ = resp.Body.Close()
		h := e.last()
		assert.Equal(t, []string{"203.0.113.9, pipe"}, h["X-Forwarded-For"], "appended once, by the entry")
		assert.Equal(t, "llm.example", h.Get("X-Forwarded-Host"))
		assert.Equal(t, "http", h.Get("X-Forwarded-Proto"))
		assert.Equal(t, "llm.example", h.Get("Host"))
		assert.Empty(t, h.Get("User-Agent")+h.Get("Via"), "nothing is invented")
	})
}

// C20, C21: the target goes on byte for byte.
func TestC20TargetIsUntouched(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(200, okAnswer)
		f := newFleet(t, order, nil, pair(target, e)...)
		for _, uri := range []string{"//v1//chat/completions", "/v1/chat/completions?a=%2F&b=+x", "/v1/x/a%2Fb%20c", "/v1/embeddings?"} {
			c, err := f.net.dial(context.Background(), "", f.clients[0])
			require.NoError(t, err)
			resp, _ := raw(t, c, []byte("POST "+uri+" HTTP/1.1\r\nHost: llm.example\r\nConnection: close\r\nContent-Length: 13\r\n\r\n{\"model\":\"m\"}"))
			_ = c.Close()
			require.Equal(t, 200, resp.StatusCode, uri)
			assert.Equal(t, uri, e.uris[len(e.uris)-1])
		}
	})
}

// The engine's key replaces the client's at the agent that talks to the engine, and nowhere else.
func TestEngineKey(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(200, okAnswer)
		f := newFleet(t, order, func(i int, c *Config) {
			if i == target {
				c.EngineAPIKey = "secret"
			}
		}, pair(target, e)...)
		_, _, err := f.get(chatBody(false), "Authorization", "Bearer client")
		require.NoError(t, err)
		assert.Equal(t, []string{"Bearer secret"}, e.last()["Authorization"])
		f.agents[target].cfg.EngineAPIKey = ""
		_, _, err = f.get(chatBody(false), "Authorization", "Bearer client")
		require.NoError(t, err)
		assert.Equal(t, []string{"Bearer client"}, e.last()["Authorization"])
	})
}

// C94: a request that came over a hop is served or refused, never sent on; a trail that is wrong gets 508.
func TestC94OneHop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e1, e2 := answers(200, "1"), answers(200, "2")
		f := newFleet(t, []uint64{2, 1}, nil, e1, e2)
		_, text, err := f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, "2", text, "each thinks that the other is idle, and still one hop is all")
		for _, hop := range [][]string{nil, {"2"}, {"x"}, {"1", "3"}, {"0"}} {
			req, _ := http.NewRequest("POST", "http://"+peerAddr(1)+chatPath, strings.NewReader(chatBody(false)))
			for _, h := range hop {
				req.Header.Add(headerHop, h)
			}
			resp, err := f.hc.Do(req)
			require.NoError(t, err)
			b, _ := io.ReadAll(resp.Body)
			assert.Equal(t, 508, resp.StatusCode, "%v", hop)
			assert.Equal(t, "loop", resp.Header.Get(headerReason))
			assert.Contains(t, string(b), `"error"`)
		}
		assert.Equal(t, 1, e2.count())
	})
}

// Administrative paths do not pass the client port, nor ever the peer port.
func TestAdminPathsStayInside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answers(200, "slept")
		f := newFleet(t, []uint64{2}, func(i int, c *Config) {
			if i == 1 {
				c.AllowPaths = "/sleep"
			}
		}, e, e)
		resp, err := f.hc.Post("http://"+f.clients[0]+"/sleep", "", nil)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, 404, resp.StatusCode)
		assert.Equal(t, "path_not_allowed", resp.Header.Get(headerReason))
		resp, err = f.hc.Post("http://"+f.clients[1]+"/sleep", "", nil)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, 200, resp.StatusCode, "allowed, and for the own engine alone")
		req, _ := http.NewRequest("POST", "http://"+peerAddr(1)+"/sleep", nil)
		req.Header.Set(headerHop, "1")
		resp, err = f.hc.Do(req)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, 404, resp.StatusCode)
		assert.Equal(t, 1, e.count())
	})
}
