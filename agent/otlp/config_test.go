package otlp

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy/span"
)

// env makes the variables of name, value, name, value.
func env(pairs ...string) map[string]string {
	m := map[string]string{}
	for i := 0; i+1 < len(pairs); i += 2 {
		m["OTEL_"+pairs[i]] = pairs[i+1]
	}
	return m
}

func TestFromEnvEndpoint(t *testing.T) {
	for name, row := range map[string]struct {
		env  map[string]string
		url  string // "" = off
		warn string
	}{
		"nothing set":              {env(), "", ""},
		"only a service name":      {env("SERVICE_NAME", "x"), "", ""},
		"a base":                   {env("EXPORTER_OTLP_ENDPOINT", "http://c:4318"), "http://c:4318/v1/traces", ""},
		"a base with path":         {env("EXPORTER_OTLP_ENDPOINT", "https://c/otlp/"), "https://c/otlp/v1/traces", ""},
		"one for traces, as it is": {env("EXPORTER_OTLP_ENDPOINT", "http://a:4318", "EXPORTER_OTLP_TRACES_ENDPOINT", "http://b:1/x"), "http://b:1/x", ""},
		"the default":              {env("TRACES_EXPORTER", "otlp"), "http://localhost:4318/v1/traces", ""},
		"switched off":             {env("EXPORTER_OTLP_ENDPOINT", "http://c:4318", "SDK_DISABLED", "TRUE"), "", ""},
		"no exporter":              {env("EXPORTER_OTLP_ENDPOINT", "http://c:4318", "TRACES_EXPORTER", "none"), "", ""},
		"another exporter":         {env("TRACES_EXPORTER", "zipkin"), "", "traces are off"},
		"gRPC":                     {env("EXPORTER_OTLP_ENDPOINT", "http://c:4317", "EXPORTER_OTLP_PROTOCOL", "grpc"), "", "port 4318): traces are off"},
		"gRPC for metrics only":    {env("EXPORTER_OTLP_ENDPOINT", "http://c:4318", "EXPORTER_OTLP_PROTOCOL", "grpc", "EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"), "http://c:4318/v1/traces", ""},
		"no URL":                   {env("EXPORTER_OTLP_ENDPOINT", "collector:4318"), "", "traces are off"},
		"a file that is not there": {env("EXPORTER_OTLP_ENDPOINT", "https://c", "EXPORTER_OTLP_CERTIFICATE", "/nonexistent"), "", "OTEL_EXPORTER_OTLP_CERTIFICATE: open /nonexistent"},
	} {
		c, warnings := FromEnv(row.env)
		if row.url == "" {
			assert.Nil(t, c, name)
		} else if assert.NotNil(t, c, name) {
			assert.Equal(t, row.url, c.URL, name)
		}
		if row.warn == "" {
			assert.Empty(t, warnings, name)
		} else if assert.Len(t, warnings, 1, name) {
			assert.Contains(t, warnings[0], row.warn, name)
		}
	}
}

func TestFromEnvSettings(t *testing.T) {
	c, warnings := FromEnv(env("EXPORTER_OTLP_ENDPOINT", "http://c:4318", "EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20s3cret, x-a=1",
		"EXPORTER_OTLP_COMPRESSION", "gzip", "EXPORTER_OTLP_TIMEOUT", "1500", "SERVICE_NAME", "llm", "RESOURCE_ATTRIBUTES", "service.name=other,k8s.pod.name=p%2C1",
		"BSP_SCHEDULE_DELAY", "100", "BSP_MAX_QUEUE_SIZE", "100"))
	require.Empty(t, warnings)
	assert.Equal(t, "Bearer s3cret", c.Headers.Get("authorization"))
	assert.Equal(t, "1", c.Headers.Get("x-a"))
	assert.True(t, c.Gzip)
	assert.Equal(t, 1500*time.Millisecond, c.Timeout)
	assert.Equal(t, 100*time.Millisecond, c.Delay)
	assert.Equal(t, 100, c.QueueSize)
	assert.Equal(t, 100, c.BatchSize, "a batch fits into the queue")
	assert.Equal(t, "llm", c.Service)
	assert.Equal(t, [][2]string{{"k8s.pod.name", "p,1"}}, c.Resource)

	// What cannot be used is said, without its value where that may be a key, and the default holds.
	c, warnings = FromEnv(env("EXPORTER_OTLP_ENDPOINT", "http://c:4318", "EXPORTER_OTLP_HEADERS", "s3cret", "EXPORTER_OTLP_COMPRESSION", "zip",
		"EXPORTER_OTLP_TRACES_TIMEOUT", "soon", "BSP_MAX_QUEUE_SIZE", "0", "RESOURCE_ATTRIBUTES", "s3cret", "TRACES_SAMPLER", "jaeger_remote"))
	require.NotNil(t, c)
	assert.Len(t, warnings, 6)
	for _, w := range warnings {
		assert.NotContains(t, w, "s3cret")
	}
	assert.Equal(t, 10*time.Second, c.Timeout)
	assert.Equal(t, 2048, c.QueueSize)
	assert.Equal(t, "parentbased_always_on", c.Sampler.String())

	bad := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(bad, []byte("nothing"), 0o600))
	c, warnings = FromEnv(env("EXPORTER_OTLP_ENDPOINT", "https://c", "EXPORTER_OTLP_CERTIFICATE", bad))
	assert.Nil(t, c)
	assert.Contains(t, warnings[0], "no certificate in it")
}

func TestSampler(t *testing.T) {
	sampled := span.Context{Trace: span.TraceID{1}, Span: span.ID{1}, Sampled: true}
	not := span.Context{Trace: span.TraceID{1}, Span: span.ID{1}}
	low, high := span.TraceID{8: 0x01}, span.TraceID{8: 0xfe}
	for _, row := range []struct {
		name, arg                     string
		rootLow, rootHigh, yes, never bool // roots with such ids; a sampled parent; one that is not
	}{
		{"", "", true, true, true, false},
		{"parentbased_always_on", "", true, true, true, false},
		{"parentbased_always_off", "", false, false, true, false},
		{"always_on", "", true, true, true, true},
		{"always_off", "", false, false, false, false},
		{"traceidratio", "0.5", true, false, false, false},
		{"parentbased_traceidratio", "0.5", true, false, true, false},
		{"parentbased_traceidratio", "0", false, false, true, false},
		{"parentbased_traceidratio", "1", true, true, true, false},
		{"parentbased_traceidratio", "", true, true, true, false},
	} {
		s, err := samplerNamed(row.name, row.arg)
		require.NoError(t, err)
		assert.Equal(t, row.rootLow, s.Sample(low, span.Context{}), "%+v", row)
		assert.Equal(t, row.rootHigh, s.Sample(high, span.Context{}), "%+v", row)
		assert.Equal(t, row.yes, s.Sample(high, sampled), "%+v", row)
		assert.Equal(t, row.never, s.Sample(high, not), "%+v", row)
	}
	for _, arg := range []string{"2", "-1", "half", "NaN"} {
		s, err := samplerNamed("traceidratio", arg)
		assert.Error(t, err, arg)
		assert.True(t, s.Sample(high, span.Context{}), arg)
	}
	// A ratio is a ratio.
	s, _ := samplerNamed("traceidratio", "0.25")
	n := 0
	for i := range 256 {
		if s.Sample(span.TraceID{8: byte(i)}, span.Context{}) {
			n++
		}
	}
	assert.Equal(t, 64, n)
}
