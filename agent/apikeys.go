package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
)

// apiKeys are the keys that clients must show, by their SHA-256: the file can be read by many without giving a key away, and
// looking a hash up tells nobody how near a guess was. The file has one key a line,
//
//	sha256:HEX [class=N] [name=WORD]
//
// where class is the highest class that requests with this key may ask for (1 to 4, 2 if not given) and name stands for the
// key where tenants are told apart (else the hash's beginning does). Empty lines and what follows # do not count. It is read
// again when it changes; a file that cannot be read, or has a wrong line or no key, changes nothing.
type apiKeys struct {
	path string
	log  *limitedLog
	keys atomic.Pointer[map[[sha256.Size]byte]proxy.Access]
	seen [sha256.Size]byte
}

// apiKeysEvery is the time between two looks at the file.
const apiKeysEvery = 2 * time.Second

// newAPIKeys reads the file for the first time.
func newAPIKeys(path string, log *limitedLog) (*apiKeys, error) {
	k := &apiKeys{path: path, log: log}
	_, err := k.reread()
	return k, err
}

// reread takes the file's keys if its content changed. On an error the keys stay.
func (k *apiKeys) reread() (changed bool, err error) {
	b, err := os.ReadFile(k.path)
	if err != nil {
		return false, err
	}
	sum := sha256.Sum256(b)
	if k.keys.Load() != nil && sum == k.seen {
		return false, nil
	}
	keys, err := parseAPIKeys(string(b))
	if err != nil {
		return false, err
	}
	k.seen = sum
	k.keys.Store(&keys)
	return true, nil
}

// parseAPIKeys reads the file's text. Errors name the line and never what stands in it.
func parseAPIKeys(text string) (map[[sha256.Size]byte]proxy.Access, error) {
	out := map[[sha256.Size]byte]proxy.Access{}
	n := 0
	for line := range strings.SplitSeq(text, "\n") {
		n++
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		sum, ok := strings.CutPrefix(words[0], "sha256:")
		b, err := hex.DecodeString(sum)
		if !ok || err != nil || len(b) != sha256.Size {
			return nil, fmt.Errorf("line %d does not begin with sha256: and 64 hexadecimal digits", n)
		}
		a := proxy.Access{Tenant: "key-" + hex.EncodeToString(b[:6])}
		for _, w := range words[1:] {
			name, value, _ := strings.Cut(w, "=")
			c, err := strconv.Atoi(value)
			switch {
			case name == "class" && err == nil && c >= 1 && c <= 4:
				a.Class = uint8(c)
			case name == "name" && nameRule.MatchString(value):
				a.Tenant = value
			default:
				return nil, fmt.Errorf("line %d: word %q is neither class=1..4 nor name=WORD", n, name)
			}
		}
		out[[sha256.Size]byte(b)] = a
	}
	if len(out) == 0 {
		return nil, errors.New("it holds no key")
	}
	return out, nil
}

// authorize is the proxy's Authorize.
func (k *apiKeys) authorize(key, remote string) (proxy.Access, bool) {
	if key != "" {
		if a, ok := (*k.keys.Load())[sha256.Sum256([]byte(key))]; ok {
			return a, true
		}
	}
	k.log.warn(MsgBadAPIKey, "remote", remote) // never the key: a mistyped one is nearly a good one
	return proxy.Access{}, false
}

// watchAPIKeys reads the file again when it changes, until ctx ends.
func (a *Agent) watchAPIKeys(ctx context.Context) error {
	if a.apiKeys == nil {
		return nil
	}
	tick := time.NewTicker(apiKeysEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		changed, err := a.apiKeys.reread()
		switch {
		case err != nil:
			if a.warn("api keys", MsgAPIKeyFile) {
				a.log.Warn(MsgAPIKeyFile, "file", a.apiKeys.path, KeyErr, err, KeyHint, "the keys that were read before stay in use")
			}
		case changed:
			a.clear("api keys")
			a.log.Info(MsgAPIKeys, "keys", len(*a.apiKeys.keys.Load()))
		}
	}
}

// limitedLog writes a line at most every logEvery and says how many it left out: what strangers can cause must not fill a
// disk.
type limitedLog struct {
	write func(msg string, args ...any)
	mu    sync.Mutex
	last  time.Time
	quiet int
}

const logEvery = 10 * time.Second

func (l *limitedLog) warn(msg string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if !l.last.IsZero() && now.Sub(l.last) < logEvery {
		l.quiet++
		return
	}
	l.write(msg, append(args, "suppressed", l.quiet)...)
	l.last, l.quiet = now, 0
}
