package proxy

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// modelFleet is two replicas with a model each, chosen by the real policy.
func modelFleet(t *testing.T, models [2]string) (*fleet, [2]*scripted) {
	es := [2]*scripted{answers(200, "1"), answers(200, "2")}
	f := newFleet(t, nil, func(_ int, c *Config) {
		var err error
		c.Policy, err = routing.NewPolicy("auto")
		require.NoError(t, err)
		now := time.Now()
		for i, m := range models {
			boot := uint64(i + 1)
			c.Table.SetModels(boot, []routing.Model{{ID: m}}, 0, now)
			c.Table.Update(routing.Report{Boot: boot, Seq: 1, State: routing.StateReady, Heartbeat: time.Minute,
				Running: routing.Some(0), Waiting: routing.Some(0)}, now)
		}
	}, es[0], es[1])
	return f, es
}

// C11, C99: a client that drops out while its body is still coming, or that never sends one, leaves nothing behind.
func TestC11DropWhileUploading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answers(200, okAnswer)
		f := newFleet(t, []uint64{1}, nil, e)
		for _, head := range []string{"", "Expect: 100-continue\r\n"} {
			for range 50 {
				c, err := f.net.dial(context.Background(), "", f.clients[0])
				require.NoError(t, err)
				_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: 5000000\r\n\r\n", chatPath, head)
				require.NoError(t, err)
				if head != "" {
					b := make([]byte, 64)
					_, _ = c.Read(b)
				}
				synctest.Wait()
				assert.Equal(t, 1, f.agents[0].Inflight())
				_ = c.Close()
				synctest.Wait()
				require.Zero(t, f.agents[0].Inflight())
			}
		}
		assert.Zero(t, e.count())
		f.idle()
	})
}

// C13: a frozen replica holds only what is on it.
func TestC13FrozenReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		frozen := engine(func(_ int, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		good := answers(200, okAnswer)
		f := newFleet(t, []uint64{2}, nil, good, frozen)
		ctx, cancel := context.WithCancel(context.Background())
		for range 50 {
			go func() { _, _ = f.post(ctx, chatBody(false)) }()
		}
		synctest.Wait()
		f.agents[0].cfg.Policy = inOrder{1}
		for range 200 {
			resp, _, err := f.get(chatBody(false))
			require.NoError(t, err)
			require.Equal(t, 200, resp.StatusCode)
			require.Zero(t, f.lastPick().DurationMS, "nothing waits for the frozen one")
		}
		cancel()
		f.idle()
	})
}

// C22, C32: large bodies arrive as they are, in parallel, and the memory that keeps them is bounded and given back.
func TestC22LargeBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answers(200, okAnswer)
		f := newFleet(t, []uint64{2}, func(_ int, c *Config) { c.KeepBodies = 16 << 20 }, pair(1, e)...)
		body := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` +
			strings.Repeat("QUJD", 5<<18) + `"}}]}]}`
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				resp, _, err := f.get(body)
				assert.NoError(t, err)
				assert.Equal(t, 200, resp.StatusCode)
			})
		}
		wg.Wait()
		require.Equal(t, 8, len(e.bodies))
		for _, b := range e.bodies {
			assert.Equal(t, sha256.Sum256([]byte(body)), sha256.Sum256([]byte(b)))
		}
		f.idle()
	})
}

// C25, C26, C27, C111: the model is found wherever it stands and decides where the request goes; the bytes stay.
func TestC25ModelDecides(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, es := modelFleet(t, [2]string{"one", "Qwen/Qwen2.5-7B:β"})
		big := strings.Repeat("x", 1<<20)
		send := func(path, ctype, encoding string, body []byte) {
			req, _ := http.NewRequest("POST", "http://"+f.clients[0]+path, bytes.NewReader(body))
			req.Header.Set("Content-Type", ctype)
			if encoding != "" {
				req.Header.Set("Content-Encoding", encoding)
			}
			resp, err := f.hc.Do(req)
			require.NoError(t, err)
			b, _ := io.ReadAll(resp.Body)
			require.Equal(t, "2", string(b), "%s", body[:min(80, len(body))])
			assert.Equal(t, sha256.Sum256(body), sha256.Sum256([]byte(es[1].bodies[len(es[1].bodies)-1])))
		}
		name := `"model":"Qwen\/Qwen2.5-7B:\u03b2"`
		for _, body := range []string{
			`{` + name + `,"messages":[]}`, `{"messages":[],` + name + `}`,
			`{"messages":[{"content":"` + big + `"}],` + name + `}`, `{"model":"one",` + name + `}`,
			`{"Model":"one","metadata":{"model":"one"},` + name + `}`,
		} {
			send(chatPath, "application/json", "", []byte(body))
			var zipped bytes.Buffer
			z := gzip.NewWriter(&zipped)
			_, _ = io.WriteString(z, body)
			_ = z.Close()
			send(chatPath, "application/json", "gzip", zipped.Bytes())
		}
		form := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n" + big +
			"\r\n--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nQwen/Qwen2.5-7B:β\r\n--b--\r\n"
		send("/v1/audio/transcriptions", "multipart/form-data; boundary=b", "", []byte(form))
		assert.Zero(t, es[0].count())
		f.idle()
	})
}

// C28, C29, C30: the agent does not judge bodies; how the answer is relayed follows the answer.
func TestC29EngineJudgesFields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answers(400, `{"error":{"message":"no"}}`)
		f := newFleet(t, []uint64{1, 2}, nil, e, e)
		for _, body := range []string{string(readCase(t, "bodies/broken.json")), "", "[]", "plain text", string(readCase(t, "bodies/stream-string.json"))} {
			n := e.count()
			resp, text, err := f.get(body)
			require.NoError(t, err)
			assert.Equal(t, 400, resp.StatusCode)
			sameBytes(t, `{"error":{"message":"no"}}`, text)
			assert.Equal(t, n+1, e.count(), "once")
			assert.Equal(t, body, e.bodies[n])
		}
		assert.False(t, f.agents[0].Suspect(time.Now()))
		f.idle()
	})
}

// C43: an HTTP/2 client of a draining agent is told to connect elsewhere, and loses nothing.
func TestC43DrainEndsHTTP2Connections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, []uint64{2}, nil, pair(1, answers(200, okAnswer))...)
		f.hc = f.client(true)
		for i := range 30 {
			if i == 10 {
				f.agents[0].SetDraining(true)
			}
			resp, _, err := f.get(chatBody(false))
			require.NoError(t, err)
			require.Equal(t, 200, resp.StatusCode)
		}
		f.idle()
	})
}

// C97: our refusals tell clients how long to wait, spread at random.
func TestC97RetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, nil, func(_ int, c *Config) { c.Policy = nobodyBecause(routing.ReasonAllFull) }, answers(200, ""))
		seen := map[string]bool{}
		for range 50 {
			resp, _, err := f.get(chatBody(false))
			require.NoError(t, err)
			require.Equal(t, 429, resp.StatusCode)
			seen[resp.Header.Get("Retry-After-Ms")] = true
			require.Regexp(t, `^[1-9][0-9]?$`, resp.Header.Get("Retry-After"))
		}
		assert.Greater(t, len(seen), 10)
	})
}

// C103: no key, prompt or completion is in any log line or record.
func TestC103NothingSecretIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var out bytes.Buffer
		log := slog.New(slog.NewJSONHandler(lockedWriter{&mu, &out}, &slog.HandlerOptions{Level: slog.LevelDebug - 4}))
		e := engine(func(n int, w http.ResponseWriter, _ *http.Request) {
			eventHead(w)
			say(w, chunk("MARKER-completion"))
			if n%2 == 0 {
				die()
			}
			say(w, finishChunk+doneChunk)
		})
		f := newFleet(t, []uint64{2, 1}, func(_ int, c *Config) { c.Logger, c.EngineAPIKey = log, "MARKER-engine" }, e, e)
		for range 4 {
			_, _, _ = f.get(`{"model":"m","stream":true,"user":"MARKER-user","messages":[{"content":"MARKER-prompt"}]}`,
				"Authorization", "Bearer MARKER-key", "Api-Key", "MARKER-key", "Cookie", "MARKER-cookie", "X-Api-Key", "MARKER-key")
		}
		f.idle()
		mu.Lock()
		defer mu.Unlock()
		require.NotZero(t, out.Len())
		assert.NotContains(t, out.String(), "MARKER")
		assert.NotContains(t, fmt.Sprintf("%+v", f.agents[0].Picks("")), "MARKER")
		assert.NotContains(t, fmt.Sprintf("%+v", f.agents[0].Metrics()), "MARKER")
	})
}

type lockedWriter struct {
	mu *sync.Mutex
	w  io.Writer
}

func (l lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// C108: only replicas that list exactly that model are candidates, also when they fail.
func TestC108NeverAnotherModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, es := modelFleet(t, [2]string{"x", "y"})
		es[0].f = reply(503, "full")
		for range 20 {
			resp, _, err := f.get(`{"model":"x"}`)
			require.NoError(t, err)
			assert.Contains(t, []int{503, 429}, resp.StatusCode)
		}
		assert.Zero(t, es[1].count())
		f.idle()
	})
}
