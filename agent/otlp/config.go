package otlp

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

// Config is what the standard variables say. The zero value is of no use: make one with FromEnv.
type Config struct {
	URL      string        // that spans are posted to
	Headers  http.Header   // on each post; they may hold keys and are never shown
	Timeout  time.Duration // for one post
	Gzip     bool
	TLS      *tls.Config // nil = the usual roots
	Service  string      // service.name, "" = nobody said
	Resource [][2]string // further attributes of the resource, in their order
	Sampler  Sampler

	Delay     time.Duration // between two posts while there is little to send
	QueueSize int           // most spans that wait; more are dropped and counted
	BatchSize int           // spans of one post, or those of one request where they are more
}

// Variables are the names that FromEnv reads.
var Variables = []string{
	"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
	"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
	"OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION",
	"OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
	"OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_KEY", "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY",
	"OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
	"OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
}

const protocol = "http/protobuf"

// FromEnv reads the variables. It returns nil if they ask for no traces: an endpoint, or OTEL_TRACES_EXPORTER=otlp, does. As
// OpenTelemetry demands, a value that cannot be used is a warning and counts as not set, since the variables of a pod are
// often meant for several programs; but what would send spans to the wrong place, or in a way that was not asked for, turns
// traces off.
func FromEnv(env map[string]string) (*Config, []string) {
	var warnings []string
	get := func(name string) string { return strings.TrimSpace(env["OTEL_"+name]) }
	// of an exporter: what is said for traces alone goes first
	exporter := func(name string) (string, string) {
		if v := get("EXPORTER_OTLP_TRACES_" + name); v != "" {
			return v, "OTEL_EXPORTER_OTLP_TRACES_" + name
		}
		return get("EXPORTER_OTLP_" + name), "OTEL_EXPORTER_OTLP_" + name
	}
	off := func(format string, a ...any) (*Config, []string) {
		return nil, append(warnings, fmt.Sprintf(format, a...)+": traces are off")
	}
	general, traces := get("EXPORTER_OTLP_ENDPOINT"), get("EXPORTER_OTLP_TRACES_ENDPOINT")
	kind := get("TRACES_EXPORTER")
	switch {
	case strings.EqualFold(get("SDK_DISABLED"), "true"), kind == "none", kind == "" && general == "" && traces == "":
		return nil, nil
	case kind != "" && kind != "otlp":
		return off("OTEL_TRACES_EXPORTER=%q is not known here (otlp, none)", kind)
	}
	if p, name := exporter("PROTOCOL"); p != "" && p != protocol {
		return off("%s=%q is not spoken here, %s is (a collector takes it at port 4318)", name, p, protocol)
	}
	c := &Config{URL: traces, Headers: http.Header{}, Timeout: 10 * time.Second, Service: get("SERVICE_NAME"),
		Delay: 5 * time.Second, QueueSize: 2048, BatchSize: 512}
	if c.URL == "" {
		if general == "" {
			general = "http://localhost:4318"
		}
		c.URL = strings.TrimSuffix(general, "/") + "/v1/traces"
	}
	if u, err := url.Parse(c.URL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return off("the endpoint of OTEL_EXPORTER_OTLP_ENDPOINT is no http:// or https:// URL")
	}
	warn := func(name, want string) { warnings = append(warnings, name+" "+want+"; it counts as not set") }
	if v, name := exporter("HEADERS"); v != "" { // its value may be a key, so it is in no message
		pairs, err := pairs(v)
		if err != nil {
			warn(name, "must be key=value pairs, separated by commas")
		}
		for _, p := range pairs {
			c.Headers.Set(p[0], p[1])
		}
	}
	if v, name := exporter("COMPRESSION"); v == "gzip" {
		c.Gzip = true
	} else if v != "" && v != "none" {
		warn(name, "must be gzip or none")
	}
	number := func(name, v string, least int, set func(int)) {
		if v == "" {
			return
		}
		n, err := strconv.Atoi(v)
		if err != nil || n < least || n > 1e9 {
			warn(name, "must be a whole number of at least "+strconv.Itoa(least))
			return
		}
		set(n)
	}
	v, name := exporter("TIMEOUT")
	number(name, v, 1, func(n int) { c.Timeout = time.Duration(n) * time.Millisecond })
	number("OTEL_BSP_SCHEDULE_DELAY", get("BSP_SCHEDULE_DELAY"), 1, func(n int) { c.Delay = time.Duration(n) * time.Millisecond })
	number("OTEL_BSP_MAX_QUEUE_SIZE", get("BSP_MAX_QUEUE_SIZE"), 1, func(n int) { c.QueueSize = n })
	number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", get("BSP_MAX_EXPORT_BATCH_SIZE"), 1, func(n int) { c.BatchSize = n })
	c.BatchSize = min(c.BatchSize, c.QueueSize)
	if v := get("RESOURCE_ATTRIBUTES"); v != "" {
		all, err := pairs(v)
		if err != nil {
			warn("OTEL_RESOURCE_ATTRIBUTES", "must be key=value pairs, separated by commas")
		}
		for _, p := range all {
			if p[0] != "service.name" {
				c.Resource = append(c.Resource, p)
			} else if c.Service == "" {
				c.Service = p[1]
			}
		}
	}
	var err error
	if c.Sampler, err = samplerNamed(get("TRACES_SAMPLER"), get("TRACES_SAMPLER_ARG")); err != nil {
		warnings = append(warnings, err.Error())
	}
	if c.TLS, err = tlsConfig(exporter); err != nil {
		return off("%s", err)
	}
	return c, warnings
}

// pairs reads key=value, separated by commas, values percent-encoded. An error says nothing of what is in it.
func pairs(s string) (out [][2]string, err error) {
	for p := range strings.SplitSeq(s, ",") {
		if p = strings.TrimSpace(p); p == "" {
			continue
		}
		k, v, ok := strings.Cut(p, "=")
		k = strings.TrimSpace(k)
		v, uerr := url.PathUnescape(strings.TrimSpace(v))
		if !ok || k == "" || uerr != nil || strings.ContainsAny(k+v, "\r\n") {
			return nil, errors.New("not a list of pairs")
		}
		out = append(out, [2]string{k, v})
	}
	return out, nil
}

// tlsConfig reads the files that the variables name; nil if there are none.
func tlsConfig(exporter func(string) (string, string)) (*tls.Config, error) {
	ca, caName := exporter("CERTIFICATE")
	cert, certName := exporter("CLIENT_CERTIFICATE")
	key, keyName := exporter("CLIENT_KEY")
	if ca == "" && cert == "" && key == "" {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		b, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", caName, err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(b) {
			return nil, fmt.Errorf("%s: no certificate in it", caName)
		}
	}
	if cert != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("%s, %s: %w", certName, keyName, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}
