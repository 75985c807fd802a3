package gossip

import (
	"bytes"
	"log/slog"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestLogBridge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := newLogBridge(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})), new(atomic.Uint64))
		line := func(format string, v ...any) string {
			out.Reset()
			l.Printf(format, v...)
			return out.String()
		}
		for in, want := range map[string]string{
			"[DEBUG] memberlist: Stream connection": `level=DEBUG msg="Stream connection" component=memberlist` + "\n",
			"[INFO] serf: attempting reconnect":     `level=INFO msg="attempting reconnect" component=serf` + "\n",
			"[INFO] serf: EventMemberJoin: a":       `level=DEBUG msg="EventMemberJoin: a" component=serf` + "\n",
			"[ERR] Failed to shutdown transport":    `level=ERROR msg="Failed to shutdown transport" component=serf` + "\n",
			"[ERROR] memberlist: x":                 `level=ERROR msg=x component=memberlist` + "\n",
			"no level":                              `level=INFO msg="no level" component=serf` + "\n",
		} {
			assert.Equal(t, want, line("%s", in))
		}

		// One warning, three times in 10 s with other numbers, then again.
		assert.Equal(t, "level=WARN msg=\"no ack from 10.0.0.1:1\" component=memberlist\n", line("[WARN] memberlist: no ack from %s", "10.0.0.1:1"))
		assert.Empty(t, line("[WARN] memberlist: no ack from %s", "10.0.0.1:22"))
		time.Sleep(9 * time.Second)
		assert.Empty(t, line("[WARN] memberlist: no ack from %s", "10.0.0.1:333"))
		time.Sleep(2 * time.Second)
		assert.Equal(t, "level=WARN msg=\"no ack from 10.0.0.1:4\" component=memberlist suppressed=2\n", line("[WARN] memberlist: no ack from %s", "10.0.0.1:4"))
	})
}

func TestLogBridgeMemory(t *testing.T) {
	b := &logBridge{to: slog.New(slog.DiscardHandler), seen: map[string]*logText{}}
	for i := range 10_000 {
		b.admit(string(rune('a'+i%26))+string(rune('a'+i/26%26))+string(rune('a'+i/676%26)), time.Unix(0, 0))
	}
	assert.LessOrEqual(t, len(b.seen), maxLogTexts)
	assert.Equal(t, "node-x", logKey("node-"+strconv.Itoa(99)+"x"))
}
