package agent

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/gpu"
	"github.com/grapevine-lb/grapevine/routing"
)

// Bytes is a size in bytes, written as a number with an optional B, KiB, MiB, GiB, KB, MB or GB.
type Bytes uint64

var units = []struct {
	name string
	size Bytes
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"B", 1}}

// ParseBytes reads a size such as 64MiB.
func ParseBytes(s string) (Bytes, error) {
	unit := Bytes(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(s, u.name); ok {
			s, unit = strings.TrimSpace(rest), u.size
			break
		}
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || Bytes(n) > math.MaxUint64/unit {
		return 0, errors.New("not a size")
	}
	return Bytes(n) * unit, nil
}

// String writes the size with the largest binary unit that divides it.
func (b Bytes) String() string {
	for _, i := range []int{2, 1, 0} {
		if u := units[i]; b > 0 && b%u.size == 0 {
			return strconv.FormatUint(uint64(b/u.size), 10) + u.name
		}
	}
	return strconv.FormatUint(uint64(b), 10)
}

// A rule is what the tag "is" says: its first word names the check, the rest are arguments.
type rule string

// allowed says in words what the rule accepts, for messages and for the table.
func (r rule) allowed() string {
	word, args, _ := strings.Cut(string(r), " ")
	lo, hi, _ := strings.Cut(args, "..")
	switch word {
	case "addr":
		return "host:port or :port"
	case "host":
		return "a host name or IP without port"
	case "seeds":
		return "comma list of host, host:port or srv+name"
	case "name":
		return "letters, digits, - and ., at most 100"
	case "classes":
		return "comma list of neighbours among priority, default, flex, batch"
	case "keys":
		return "base64 of 32 random bytes, comma list"
	case "engine":
		return "http://, https:// or unix:///path"
	case "url":
		return "http:// or https:// URL"
	case "page":
		return "http:// or https:// URL, a path such as /metrics, or off"
	case "gpus":
		return "all, none, or comma list of indexes such as 0, slices such as 0:1, and UUIDs"
	case "mapping":
		return "entries such as running = my_running, separated by semicolons"
	case "paths":
		return "comma list of paths that start with /, * only at the end"
	case "aliases":
		return "comma list of alias=model"
	case "file":
		return "a file that can be read"
	case "hosts":
		return "comma list of host names without port, .name for all below"
	case "nets":
		return "comma list of IP addresses and networks such as 10.0.0.0/8"
	case "bool":
		return "true or false"
	case "int":
		return "a whole number from " + lo + " to " + hi
	case "float":
		return "a number from " + lo + " to " + hi
	case "duration":
		return "a duration such as 1.5s or 2m, from " + lo + " to " + hi
	case "bytes":
		return "a size such as 64MiB, from " + lo + " to " + hi
	case "one":
		return "one of" + strings.TrimPrefix(args, "of")
	}
	return "any text"
}

var (
	nameRule = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,98}[A-Za-z0-9])?$`)
)

// ok reports whether v, of the field's type, keeps the rule. An empty text means "not set" and is always fine.
func (r rule) ok(v reflect.Value) bool {
	word, args, _ := strings.Cut(string(r), " ")
	lo, hi, _ := strings.Cut(args, "..")
	switch x := v.Interface().(type) {
	case time.Duration:
		return within(lo, hi, x, func(s string) (time.Duration, error) { return time.ParseDuration(s) })
	case Bytes:
		return within(lo, hi, x, ParseBytes)
	case int:
		return within(lo, hi, x, strconv.Atoi)
	case float64: // NaN is within nothing
		return within(lo, hi, x, func(s string) (float64, error) { return strconv.ParseFloat(s, 64) })
	case []string:
		if word == "classes" {
			_, err := routing.ParseClasses(x)
			return err == nil
		}
		return !slices.ContainsFunc(x, func(s string) bool { return !oneOK(word, args, s) })
	case string:
		return x == "" || oneOK(word, args, x)
	}
	return true
}

func within[T int | float64 | time.Duration | Bytes](lo, hi string, x T, parse func(string) (T, error)) bool {
	l, err1 := parse(lo)
	h, err2 := parse(hi)
	return err1 == nil && err2 == nil && x >= l && x <= h
}

func oneOK(word, args, s string) bool {
	switch word {
	case "addr":
		return validAddr(s)
	case "host":
		return validHost(s)
	case "seeds":
		return validSeed(s)
	case "hosts":
		return validHost(strings.TrimPrefix(s, "."))
	case "nets":
		_, err := parseNet(s)
		return err == nil
	case "name":
		return nameRule.MatchString(s)
	case "keys":
		_, err := splitKeys(s)
		return err == nil
	case "engine", "url", "page":
		if word == "page" && (s == "off" || strings.HasPrefix(s, "/")) {
			return true
		}
		u, err := url.Parse(s)
		if err != nil || u.Fragment != "" {
			return false
		}
		if u.Scheme == "unix" {
			return word == "engine" && u.Host == "" && u.Path != "" && u.Path != "/"
		}
		return (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && validPort(cmpOr(u.Port(), "1"))
	case "gpus":
		return gpu.CheckDevices(s) == nil
	case "mapping":
		_, err := engine.ParseMapping(s)
		return err == nil
	case "paths":
		return strings.HasPrefix(s, "/") && !strings.ContainsAny(s, "?# ") && !strings.Contains(strings.TrimSuffix(s, "*"), "*")
	case "aliases":
		a, m, found := strings.Cut(s, "=")
		return found && a != "" && m != ""
	case "file":
		f, err := os.Open(s)
		if err != nil {
			return false
		}
		defer f.Close()
		st, err := f.Stat()
		return err == nil && !st.IsDir()
	case "one":
		return slices.Contains(strings.Split(strings.TrimPrefix(args, "of "), ", "), s)
	}
	return true
}

// parseNet reads a network, or an address as the network of itself. Bits behind the prefix are a mistake.
func parseNet(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err == nil && p != p.Masked() {
		err = errors.New("not the start of a network")
	}
	return p, err
}

func cmpOr(a, b string) string {
	if a == "" {
		return b
	}
	return a
}

func validPort(p string) bool {
	n, err := strconv.ParseUint(p, 10, 16)
	return err == nil && strconv.FormatUint(n, 10) == p
}

func validHost(h string) bool {
	if _, err := netip.ParseAddr(h); err == nil {
		return true
	}
	return h != "" && len(h) < 254 && !strings.ContainsAny(h, " :/@[]?#,\t")
}

func validAddr(s string) bool {
	h, p, err := net.SplitHostPort(s)
	return err == nil && validPort(p) && (h == "" || validHost(h))
}

func validSeed(s string) bool {
	s = strings.TrimPrefix(s, "srv+")
	if validHost(s) {
		return true
	}
	h, p, err := net.SplitHostPort(s)
	return err == nil && h != "" && validHost(h) && validPort(p)
}

// splitKeys reads gossip keys in base64, separated by commas or white space. An error never holds the key.
func splitKeys(s string) ([][]byte, error) {
	var keys [][]byte
	for i, f := range strings.FieldsFunc(s, func(r rune) bool { return strings.ContainsRune(", \t\r\n", r) }) {
		k, err := base64.StdEncoding.DecodeString(f)
		if err != nil || len(k) != 32 {
			return nil, fmt.Errorf("key %d is not base64 of 32 bytes", i+1)
		}
		keys = append(keys, k)
	}
	return keys, nil
}

// isLoopback reports whether the listener address is reachable from this host only. A name counts as beyond, except
// localhost.
func isLoopback(addr string) bool {
	h, _, err := net.SplitHostPort(addr)
	if err != nil {
		h = addr
	}
	if h == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(h)
	return err == nil && ip.Unmap().IsLoopback()
}
