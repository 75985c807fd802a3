package engine

import (
	"fmt"
	"net/http"
	"net/url"
	"time"
)

// Config says where the engine is.
type Config struct {
	URL  *url.URL // http://host:port, https://..., or unix:///path/to/socket
	Kind Kind     // "" means Auto
	// MetricsURL replaces the table's metrics page: an absolute URL, a path on URL, or "off" for reading nothing.
	MetricsURL string
	Mapping    string // see ParseMapping; its entries go before the table's
	APIKey     string // sent as a bearer token
	// Client is used as it is when set; with a unix URL it must dial the socket itself. By default the Reader makes
	// one that never follows redirects and whose idle connections live shorter than any engine's.
	Client *http.Client
	// Timeout of one page, default 2 s: a busy llama.cpp was seen to take 1.1 s.
	Timeout time.Duration
	// MaxBytes of one page, default 4 MiB.
	MaxBytes int
}

// Validate returns an error of one line for what can never work.
func (c Config) Validate() error {
	_, err := c.resolve()
	return err
}

// resolve checks the configuration and parses what is text in it.
func (c Config) resolve() (resolved, error) {
	var r resolved
	if c.URL == nil {
		return r, fmt.Errorf("engine url: missing")
	}
	switch c.URL.Scheme {
	case "http", "https":
		if c.URL.Host == "" {
			return r, fmt.Errorf("engine url %q: no host", c.URL.Redacted())
		}
	case "unix":
		if c.URL.Path == "" {
			return r, fmt.Errorf("engine url %q: no path to a socket, as in unix:///run/engine.sock", c.URL.Redacted())
		}
	default:
		return r, fmt.Errorf("engine url %q: scheme must be http, https or unix", c.URL.Redacted())
	}
	if r.kind = c.Kind; r.kind == "" {
		r.kind = Auto
	}
	if !c.Kind.valid() {
		return r, fmt.Errorf("engine kind %q: want one of %s", string(c.Kind), kindList())
	}
	switch c.MetricsURL {
	case "":
	case "off":
		r.off = true
	default:
		u, err := url.Parse(c.MetricsURL)
		if err != nil {
			return r, fmt.Errorf("engine metrics url %q: %w", c.MetricsURL, err)
		}
		if u.IsAbs() && u.Scheme != "http" && u.Scheme != "https" || !u.IsAbs() && (u.Path == "" || u.Path[0] != '/') {
			return r, fmt.Errorf(`engine metrics url %q: want http(s)://..., a path such as /metrics, or "off"`, c.MetricsURL)
		}
		r.metrics = u
	}
	custom, err := ParseMapping(c.Mapping)
	if err != nil {
		return r, err
	}
	r.custom = custom
	return r, nil
}

// resolved is a Config with its text parsed.
type resolved struct {
	kind    Kind
	metrics *url.URL
	off     bool
	custom  Mapping
}

func (c *Config) timeout() time.Duration {
	if c.Timeout > 0 {
		return c.Timeout
	}
	return 2 * time.Second
}

func (c *Config) maxBytes() int {
	if c.MaxBytes > 0 {
		return c.MaxBytes
	}
	return 4 << 20
}
