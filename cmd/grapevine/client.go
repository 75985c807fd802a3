package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"
	"github.com/grapevine-lb/grapevine/agent"
)

// consoleClient talks to the status listener of an agent.
type consoleClient struct {
	base, token string
}

// newConsoleClient finds the agent: url, else the listener that the environment configures, on this host.
func newConsoleClient(url string, environ []string) (*consoleClient, error) {
	vars := env.ToMap(environ)
	c := &consoleClient{token: vars[agent.Prefix+"STATUS_TOKEN"]}
	if file := vars[agent.Prefix+"STATUS_TOKEN_FILE"]; file != "" && c.token == "" {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("%sSTATUS_TOKEN_FILE: %w", agent.Prefix, err)
		}
		c.token = strings.TrimSpace(string(b))
	}
	if url == "" {
		listen := vars[agent.Prefix+"STATUS_LISTEN"]
		if listen == "" {
			// PORT_BASE moves the default; whatever else is wrong in the environment does not matter here.
			d, err := agent.ConfigFromEnv([]string{agent.Prefix + "INSECURE=true", agent.Prefix + "PORT_BASE=" + vars[agent.Prefix+"PORT_BASE"]})
			if err != nil {
				return nil, fmt.Errorf("%w: %w", err, errUsage)
			}
			listen = d.StatusListen
		}
		host, port, err := net.SplitHostPort(listen)
		if err != nil {
			return nil, fmt.Errorf("%sSTATUS_LISTEN=%q: must be host:port or :port: %w", agent.Prefix, listen, errUsage)
		}
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			host = "127.0.0.1"
		}
		url = "http://" + net.JoinHostPort(host, port)
	}
	if !strings.Contains(url, "://") {
		url = "http://" + url
	}
	c.base = strings.TrimSuffix(url, "/")
	return c, nil
}

// do makes one request and returns the body. A status of 400 or more is an error. No timeout is none.
func (c *consoleClient) do(ctx context.Context, method, path string, timeout time.Duration) ([]byte, error) {
	return c.send(ctx, method, path, nil, timeout)
}

// send is do with a body.
func (c *consoleClient) send(ctx context.Context, method, path string, body io.Reader, timeout time.Duration) ([]byte, error) {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return nil, err
	}
	// On this host no token is needed, and one that the agent does not have would be refused. Reads need none, but for those
	// that make the agent ask all others.
	if host := req.URL.Hostname(); c.token != "" && (method != http.MethodGet || req.URL.RawQuery == "all=1") && !isLoopback(host) {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no agent answers at %s: %w", c.base, err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 16<<20))
	if err != nil {
		return nil, fmt.Errorf("%s%s: %w", c.base, path, err)
	}
	if res.StatusCode >= 400 {
		return nil, fmt.Errorf("%s%s: %s: %s", c.base, path, res.Status, strings.TrimSpace(string(b)))
	}
	return b, nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
