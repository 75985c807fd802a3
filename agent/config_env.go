package agent

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"

	"github.com/grapevine-lb/grapevine/agent/otlp"
)

// ConfigError is one wrong setting: the variable, its value (masked if it is a secret) and what would be right.
type ConfigError struct {
	Variable string // with prefix
	Value    string
	Want     string
}

// Error is one line.
func (e *ConfigError) Error() string {
	if e.Value == "" {
		return e.Variable + ": " + e.Want
	}
	return fmt.Sprintf("%s=%q: %s", e.Variable, e.Value, e.Want)
}

// DefaultConfig is what an empty environment gives; unlike ConfigFromEnv it does not demand a gossip key.
func DefaultConfig() Config {
	var c Config
	if err := env.ParseWithOptions(&c, options(map[string]string{})); err != nil {
		panic("agent: defaults of Config: " + err.Error()) // a wrong tag; TestDefaults reads them all
	}
	c.Set = map[string]bool{}
	return c
}

// ConfigFromEnv reads and checks the configuration in the environment (the form of os.Environ). It needs nothing else but
// the files that variables name. The error joins one ConfigError for each wrong variable, in the order of Config.
func ConfigFromEnv(environ []string) (Config, error) {
	all := env.ToMap(environ)
	vars := make(map[string]string, len(all))
	for k, v := range all {
		// An empty value means "not set": that is what a manifest with an optional value renders.
		if strings.HasPrefix(k, Prefix) && strings.TrimSpace(v) != "" {
			vars[k] = strings.TrimSpace(v)
		}
	}
	c := Config{Set: map[string]bool{}}
	errs := map[string]error{}
	if err := env.ParseWithOptions(&c, options(vars)); err != nil {
		agg, ok := errors.AsType[env.AggregateError](err)
		if !ok {
			return Config{}, fmt.Errorf("configuration: %w", err)
		}
		for _, e := range agg.Errors {
			pe, ok := errors.AsType[env.ParseError](e)
			if !ok {
				return Config{}, fmt.Errorf("configuration: %w", e)
			}
			f := fieldNamed(pe.Name)
			errs[f.Variable] = f.wrong(vars[f.Variable])
		}
	}
	v := reflect.ValueOf(&c).Elem()
	for _, f := range Fields() {
		raw, set := vars[f.Variable]
		if !set {
			continue
		}
		c.Set[f.Variable] = true
		if errs[f.Variable] == nil && !f.rule.ok(v.Field(f.index)) {
			errs[f.Variable] = f.wrong(raw)
		}
	}
	for _, n := range []string{"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"} {
		if val, ok := all[n]; ok {
			c.cudaEnv = append(c.cudaEnv, n+"="+val)
		}
	}
	c.pod.namespace, c.pod.name, c.pod.container = all["POD_NAMESPACE"], all["POD_NAME"], all["CONTAINER_NAME"]
	c.Warnings = append(c.Warnings, unknown(vars)...)
	var odd []string
	c.Traces, odd = otlp.FromEnv(all)
	c.Warnings = append(c.Warnings, odd...)
	if len(errs) == 0 {
		c.portBase()
		if err := c.readSecrets(); err != nil {
			return Config{}, err
		}
		return c, c.Validate()
	}
	var list []error
	for _, f := range Fields() {
		if e := errs[f.Variable]; e != nil {
			list = append(list, e)
		}
	}
	return Config{}, errors.Join(list...)
}

func options(vars map[string]string) env.Options {
	return env.Options{
		Environment: vars,
		Prefix:      Prefix,
		FuncMap: map[reflect.Type]env.ParserFunc{
			reflect.TypeFor[Bytes](): func(s string) (any, error) { return ParseBytes(s) },
			reflect.TypeFor[[]string](): func(s string) (any, error) {
				var out []string
				for e := range strings.SplitSeq(s, ",") {
					if e = strings.TrimSpace(e); e != "" {
						out = append(out, e)
					}
				}
				return out, nil
			},
			reflect.TypeFor[time.Duration](): func(s string) (any, error) { return time.ParseDuration(s) },
		},
	}
}

// Validate checks every field and what fields demand of each other. It opens files but no network. New calls it.
func (c *Config) Validate() error {
	v := reflect.ValueOf(c).Elem()
	var errs []error
	for _, f := range Fields() {
		if !f.rule.ok(v.Field(f.index)) {
			errs = append(errs, f.wrong(fmt.Sprint(v.Field(f.index).Interface())))
		}
	}
	wrong := func(name, value, want string) { errs = append(errs, &ConfigError{Prefix + name, value, want}) }
	for _, a := range []struct{ name, value string }{{"LISTEN", c.Listen}, {"PEER_LISTEN", c.PeerListen},
		{"STATUS_LISTEN", c.StatusListen}, {"GOSSIP_LISTEN", c.GossipListen}, {"ENGINE_URL", c.EngineURL}, {"CLUSTER", c.Cluster}} {
		if a.value == "" {
			wrong(a.name, "", "must be set")
		}
	}
	for _, p := range [][2]struct{ name, value string }{
		{{"TLS_CERT_FILE", c.TLSCertFile}, {"TLS_KEY_FILE", c.TLSKeyFile}},
		{{"PEER_TLS_CERT_FILE", c.PeerTLSCertFile}, {"PEER_TLS_KEY_FILE", c.PeerTLSKeyFile}},
		{{"PEER_TLS_CERT_FILE", c.PeerTLSCertFile}, {"PEER_TLS_CA_FILE", c.PeerTLSCAFile}},
	} {
		for i, f := range p {
			if other := p[1-i]; f.value != "" && other.value == "" {
				wrong(other.name, "", "must be set, as "+Prefix+f.name+" is")
			}
		}
	}
	listeners := []struct{ name, value string }{{"LISTEN", c.Listen}, {"PEER_LISTEN", c.PeerListen},
		{"STATUS_LISTEN", c.StatusListen}, {"GOSSIP_LISTEN", c.GossipListen}}
	for i, a := range listeners {
		for _, b := range listeners[:i] {
			if a.value == b.value && !strings.HasSuffix(a.value, ":0") && a.value != "" {
				wrong(a.name, a.value, "is the same as "+Prefix+b.name+"; each listener needs its own port")
			}
		}
	}
	if c.GossipKey == "" && c.GossipKeyRequired() {
		wrong("GOSSIP_KEY", "", fmt.Sprintf("must be set, as gossip listens beyond loopback (%sGOSSIP_LISTEN=%q); make a key with \"grapevine keygen\", "+
			"or set %sINSECURE=true to run without", Prefix, c.GossipListen, Prefix))
	}
	return errors.Join(errs...)
}

// portBase moves the listeners that the environment did not set.
func (c *Config) portBase() {
	if c.PortBase == 0 {
		return
	}
	for i, l := range []struct {
		name string
		addr *string
	}{{"LISTEN", &c.Listen}, {"PEER_LISTEN", &c.PeerListen}, {"STATUS_LISTEN", &c.StatusListen}, {"GOSSIP_LISTEN", &c.GossipListen}} {
		if !c.Set[Prefix+l.name] {
			*l.addr = net.JoinHostPort("", strconv.Itoa(c.PortBase+i))
		}
	}
}

// readSecrets fills each secret from its _FILE twin. Both at once is an error: nobody could tell which one counts.
func (c *Config) readSecrets() error {
	var errs []error
	for _, s := range []struct {
		name  string
		value *string
		file  string
	}{{"GOSSIP_KEY", &c.GossipKey, c.GossipKeyFile}, {"ENGINE_API_KEY", &c.EngineAPIKey, c.EngineAPIKeyFile}, {"STATUS_TOKEN", &c.StatusToken, c.StatusTokenFile}} {
		if s.file == "" {
			continue
		}
		name := Prefix + s.name + "_FILE"
		if *s.value != "" {
			errs = append(errs, &ConfigError{name, s.file, "must not be set together with " + Prefix + s.name})
			continue
		}
		b, err := os.ReadFile(s.file)
		if err != nil {
			errs = append(errs, &ConfigError{name, s.file, "must be a file that can be read"})
			continue
		}
		*s.value = strings.TrimSpace(string(b))
		switch f := variableNamed(Prefix + s.name); {
		case *s.value == "":
			errs = append(errs, &ConfigError{name, s.file, "is empty"})
		case !f.rule.ok(reflect.ValueOf(*s.value)):
			errs = append(errs, &ConfigError{name, s.file, "must hold " + f.Allowed})
		}
	}
	return errors.Join(errs...)
}

// Kubernetes sets variables for every Service of the namespace; one called grapevine gives GRAPEVINE_SERVICE_HOST,
// GRAPEVINE_PORT=tcp://… and GRAPEVINE_PORT_8080_TCP_ADDR. They are not misspelt settings.
var serviceLink = regexp.MustCompile(`_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?$`)

// unknown makes a warning for each variable with our prefix that nobody reads.
func unknown(vars map[string]string) []string {
	var out []string
	for name, value := range vars {
		known := slices.ContainsFunc(Fields(), func(f Field) bool { return f.Variable == name })
		link := serviceLink.MatchString(name) || strings.HasSuffix(name, "_PORT") && strings.Contains(value, "://")
		if known || link {
			continue
		}
		if name == Prefix+"OTLP_ENDPOINT" {
			out = append(out, name+" is not a variable of grapevine and has no effect; traces are configured by OTEL_EXPORTER_OTLP_ENDPOINT and its like")
			continue
		}
		near := slices.MinFunc(Fields(), func(a, b Field) int {
			return cmp.Compare(distance(a.Variable, name), distance(b.Variable, name))
		})
		out = append(out, fmt.Sprintf("%s is not a variable of grapevine and has no effect; the nearest is %s", name, near.Variable))
	}
	slices.Sort(out)
	return out
}

// distance is the Levenshtein distance of two names.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			up := row[j+1]
			cost := diag
			if a[i] != b[j] {
				cost++
			}
			row[j+1], diag = min(cost, up+1, row[j]+1), up
		}
	}
	return row[len(b)]
}

var userinfo = regexp.MustCompile(`//([^/@:]*):[^/@]*@`)

// redactURL hides the password of a URL, one that does not parse included.
func redactURL(s string) string { return userinfo.ReplaceAllString(s, "//$1:***@") }
