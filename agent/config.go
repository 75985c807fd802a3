package agent

import (
	"net/url"
	"time"

	"github.com/grapevine-lb/grapevine/agent/otlp"
)

// Prefix stands in front of the name of every variable.
const Prefix = "GRAPEVINE_"

// Config is everything an operator can set, one field for each variable. Tags carry the contract: env is the name without
// prefix, envDefault the default, is the allowed values (see rules in config_rules.go), doc the sentence of the README
// table, secret marks what no output may show.
//
// A Config made by hand starts from DefaultConfig.
type Config struct {
	Listen       string `env:"LISTEN" envDefault:":8080" is:"addr" doc:"Where clients send their requests (HTTP/1.1 and h2c, TLS with a certificate)."`
	PeerListen   string `env:"PEER_LISTEN" envDefault:":8081" is:"addr" doc:"Where other agents forward requests to."`
	StatusListen string `env:"STATUS_LISTEN" envDefault:":8082" is:"addr" doc:"Where status, page, metrics, probes and drain are."`
	GossipListen string `env:"GOSSIP_LISTEN" envDefault:":7946" is:"addr" doc:"Where gossip listens, TCP and UDP on the same port."`
	PortBase     int    `env:"PORT_BASE" envDefault:"0" is:"int 0..65532" doc:"For several agents on a host: client, peer, status and gossip listeners that are not set use this port and the next three; 0 means off."`
	Advertise    string `env:"ADVERTISE" is:"host" doc:"Host or IP at which other agents reach this one; empty means the listener's own IP, else the address of the default route."`

	Join          []string `env:"JOIN" is:"seeds" doc:"Agents to join, as a comma list of host[:port] or srv+name; DNS names are resolved to all their addresses, again and again. The port defaults to that of GRAPEVINE_GOSSIP_LISTEN."`
	Cluster       string   `env:"CLUSTER" envDefault:"grapevine" is:"name" doc:"Agents join only agents of the same cluster."`
	NodeName      string   `env:"NODE_NAME" is:"name" doc:"Name of this agent in logs and status; a part that is unique for each start is added. Empty means the host name."`
	Zone          string   `env:"ZONE" is:"name" doc:"Zone of this replica; replicas of the same zone are preferred while they are as fast."`
	GossipKey     string   `env:"GOSSIP_KEY" is:"keys" secret:"true" doc:"Keys of the cluster in base64 (32 bytes each), comma list, newest first. Needed as soon as gossip listens beyond loopback; make one with grapevine keygen."`
	GossipKeyFile string   `env:"GOSSIP_KEY_FILE" is:"file" doc:"File that holds the value of GRAPEVINE_GOSSIP_KEY, keys separated by commas or lines."`
	GossipProfile string   `env:"GOSSIP_PROFILE" envDefault:"lan" is:"one of lan, large, wan" doc:"Timing of membership and load records: lan to about 128 agents, large to about 1000, wan between regions."`
	Insecure      bool     `env:"INSECURE" envDefault:"false" is:"bool" doc:"Permits gossip and peer traffic beyond loopback without a key."`

	EngineURL        string `env:"ENGINE_URL" envDefault:"http://127.0.0.1:8000" is:"engine url" doc:"The inference engine beside this agent."`
	EngineKind       string `env:"ENGINE_KIND" envDefault:"auto" is:"one of auto, vllm, sglang, llamacpp, lmdeploy, tgi, tei, trtllm, triton, dynamo, nim, infinity, ollama, openai" doc:"Kind of the engine; auto finds it out, openai is any other one with the OpenAI API."`
	EngineMetricsURL string `env:"ENGINE_METRICS_URL" is:"page" doc:"The engine's metrics page where it is not the usual one of its kind, as a URL or a path; off reads none."`
	EngineMetrics    string `env:"ENGINE_METRICS" is:"mapping" doc:"Where the numbers of an engine without a table, or with renamed metrics, come from: entries such as running = my_running, separated by semicolons; package agent/engine has the grammar (ParseMapping)."`
	EngineAPIKey     string `env:"ENGINE_API_KEY" is:"text" secret:"true" doc:"Bearer token towards the engine, for the agent's own requests and in place of what clients bring: without GRAPEVINE_API_KEYS_FILE it lets every client in."`
	EngineAPIKeyFile string `env:"ENGINE_API_KEY_FILE" is:"file" doc:"File that holds the value of GRAPEVINE_ENGINE_API_KEY."`
	GPUDevices       string `env:"GPU_DEVICES" is:"gpus" doc:"The engine's cards: all, none, or a comma list of indexes, MIG slices and UUIDs; needed where several cards are visible and nothing else tells which are the engine's."`

	Policy           string        `env:"POLICY" envDefault:"auto" is:"one of auto, p2c, round_robin, weighted_round_robin, random, least_requests, least_tokens, ewma, consistent_hash, local" doc:"How a replica is chosen. auto asks the best candidates for a fresh answer; local never forwards."`
	Affinity         string        `env:"AFFINITY" envDefault:"auto" is:"one of auto, off, session, prefix" doc:"What keeps requests with a common prompt prefix or session together: both, nothing, or one of them."`
	Weight           float64       `env:"WEIGHT" envDefault:"1" is:"float 0.004..255" doc:"Relative capacity of this replica for the weighted policies."`
	MaxInflight      int           `env:"MAX_INFLIGHT" envDefault:"4096" is:"int 1..1000000" doc:"Most requests under way through this agent at once; more are refused with 503."`
	QueueLimit       int           `env:"QUEUE_LIMIT" envDefault:"1024" is:"int 0..1000000" doc:"Most requests that wait at this agent for its engine; more are refused with 429."`
	QueueTimeout     time.Duration `env:"QUEUE_TIMEOUT" envDefault:"30s" is:"duration 100ms..1h" doc:"Longest wait of a request of the default class for its engine, counted from its arrival; a third of it for the class priority, ten times it for flex and batch. Who would wait longer, or has, gets 429."`
	FirstByteTimeout time.Duration `env:"FIRST_BYTE_TIMEOUT" envDefault:"600s" is:"duration 100ms..24h" doc:"Longest wait for the first content of an answer, counted from when the engine got the request."`
	IdleTimeout      time.Duration `env:"IDLE_TIMEOUT" envDefault:"120s" is:"duration 100ms..24h" doc:"Longest silence between two pieces of a streamed answer."`
	RetryBudget      float64       `env:"RETRY_BUDGET" envDefault:"0.1" is:"float 0..1" doc:"Retries after answers, as a share of first attempts."`
	Gate             string        `env:"GATE" envDefault:"auto" is:"one of auto, off" doc:"Whether requests that the engine could not start now wait at the agent, where they can still be moved."`
	Continue         string        `env:"CONTINUE" envDefault:"auto" is:"one of auto, off" doc:"Whether text streams that break are continued on another replica."`
	Classes          []string      `env:"CLASSES" is:"classes" doc:"Keeps this replica for requests of these classes while another one is usable: a comma list of neighbours among priority, default, flex, batch; empty means all."`
	TrustPriority    bool          `env:"TRUST_PRIORITY" envDefault:"false" is:"bool" doc:"Lets every client ask for the class priority, by service_tier or x-grapevine-priority; otherwise only keys that allow it do."`
	TrustGateway     []string      `env:"TRUST_GATEWAY" is:"nets" doc:"Addresses and networks of gateways of the Gateway API Inference Extension, comma list such as 10.0.0.0/8; a replica that one names in x-gateway-destination-endpoint is the request's first choice. From all others the header is stripped."`
	Mode             string        `env:"MODE" envDefault:"on" is:"one of on, shadow" doc:"shadow serves everything by the own engine and only records what would have moved and what would be gained; grapevine mode switches the whole fleet while it runs."`
	AllowPaths       []string      `env:"ALLOW_PATHS" is:"paths" doc:"Paths of the engine that clients may use besides the inference paths, comma list; a trailing * allows all below."`
	MaxBody          Bytes         `env:"MAX_BODY" envDefault:"64MiB" is:"bytes 1KiB..16GiB" doc:"Largest request body; more is refused with 413."`
	ModelAliases     []string      `env:"MODEL_ALIASES" is:"aliases" doc:"Other names for models of the own engine, comma list of alias=model; all agents route them, and the engine gets its own name."`
	APIKeysFile      string        `env:"API_KEYS_FILE" is:"file" doc:"File with the API keys that clients must show, one a line as sha256:HEX [class=N] [name=WORD] with the key's SHA-256; read again when it changes. Without it everybody who reaches the client listener is served."`
	Hosts            []string      `env:"HOSTS" is:"hosts" doc:"Names that clients may use for this agent in Host, comma list; .example.org allows all below. Empty allows every name. Set it where browsers can reach the agent."`
	MaxConnections   int           `env:"MAX_CONNECTIONS" envDefault:"16384" is:"int 1..1000000" doc:"Most connections of clients; at the limit those without a request under way make room."`
	DrainTimeout     time.Duration `env:"DRAIN_TIMEOUT" envDefault:"300s" is:"duration 0s..24h" doc:"How long a drain waits for the requests under way."`

	TLSCertFile     string `env:"TLS_CERT_FILE" is:"file" doc:"Certificate chain (PEM) of the client listener; with it, clients must use TLS."`
	TLSKeyFile      string `env:"TLS_KEY_FILE" is:"file" doc:"Key (PEM) of the client listener's certificate."`
	PeerTLSCertFile string `env:"PEER_TLS_CERT_FILE" is:"file" doc:"Own certificate (PEM) between agents, instead of the one derived from the gossip key."`
	PeerTLSKeyFile  string `env:"PEER_TLS_KEY_FILE" is:"file" doc:"Key (PEM) of the certificate between agents."`
	PeerTLSCAFile   string `env:"PEER_TLS_CA_FILE" is:"file" doc:"Authorities (PEM) of the certificates between agents."`

	StatusToken     string  `env:"STATUS_TOKEN" is:"text" secret:"true" doc:"Bearer token that permits changes (drain) from beyond loopback."`
	StatusTokenFile string  `env:"STATUS_TOKEN_FILE" is:"file" doc:"File that holds the value of GRAPEVINE_STATUS_TOKEN."`
	LogLevel        string  `env:"LOG_LEVEL" envDefault:"info" is:"one of debug, info, warn, error" doc:"Least level that is logged."`
	AccessLog       float64 `env:"ACCESS_LOG" envDefault:"0" is:"float 0..1" doc:"Share of the requests that are logged, one line each, when they end; above 0 those that failed always are. Never with prompts or keys."`
	LogFormat       string  `env:"LOG_FORMAT" envDefault:"text" is:"one of text, json" doc:"Format of the log on standard error."`

	// Traces is what the standard OTEL_* variables say; nil = no traces.
	Traces *otlp.Config `env:"-"`

	// Warnings are what ConfigFromEnv noticed and went on with: unknown variables.
	Warnings []string `env:"-"`
	// Set names the variables that the environment set, for the config command.
	Set map[string]bool `env:"-"`
	// cudaEnv is CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and NVIDIA_VISIBLE_DEVICES as NAME=value.
	cudaEnv []string
	// pod is POD_NAMESPACE, POD_NAME and CONTAINER_NAME, which a manifest sets so that the kubelet can be asked for the
	// devices of this pod.
	pod struct{ namespace, name, container string }
}

// GossipKeyRequired reports whether a key is needed: gossip listens beyond loopback and nobody waived it.
func (c *Config) GossipKeyRequired() bool { return !isLoopback(c.GossipListen) && !c.Insecure }

// engineURL is EngineURL parsed; Validate has checked it.
func (c *Config) engineURL() *url.URL {
	u, err := url.Parse(c.EngineURL)
	if err != nil {
		return &url.URL{Scheme: "http", Host: "127.0.0.1:8000"}
	}
	return u
}
