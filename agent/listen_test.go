package agent

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// selfSigned writes a certificate for 127.0.0.1 and its key.
func selfSigned(t *testing.T) (certFile, keyFile string, pool *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"agent.test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	kb, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	certFile, keyFile = filepath.Join(t.TempDir(), "cert"), filepath.Join(t.TempDir(), "key")
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	require.NoError(t, os.WriteFile(certFile, certPEM, 0o600))
	require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kb}), 0o600))
	pool = x509.NewCertPool()
	pool.AppendCertsFromPEM(certPEM)
	return certFile, keyFile, pool
}

// The client listener speaks HTTP/1.1 and h2c, and with a certificate TLS with both.
func TestClientListener(t *testing.T) {
	t.Parallel()
	certFile, keyFile, pool := selfSigned(t)
	cfg := loopbackConfig(startSim(t, fast()).url())
	plain := start(t, cfg, Options{})
	cfg.TLSCertFile, cfg.TLSKeyFile = certFile, keyFile
	secure := start(t, cfg, Options{})
	for _, row := range []struct {
		r      *runner
		scheme string
		h2     bool
	}{{plain, "http", false}, {plain, "http", true}, {secure, "https", false}, {secure, "https", true}} {
		row.r.untilReady()
		var p http.Protocols
		switch {
		case !row.h2:
			p.SetHTTP1(true)
		case row.scheme == "http":
			p.SetUnencryptedHTTP2(true)
		default:
			p.SetHTTP2(true)
		}
		tr := &http.Transport{Protocols: &p, TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "agent.test"}}
		c := &http.Client{Transport: tr, Timeout: 10 * time.Second}
		res, err := c.Post(row.scheme+"://"+row.r.Addresses().Client+"/v1/chat/completions", "application/json", strings.NewReader(chatBody))
		require.NoError(t, err, "%s h2=%t", row.scheme, row.h2)
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		require.NoError(t, err)
		assert.Equal(t, 200, res.StatusCode, string(b))
		assert.Equal(t, map[bool]int{true: 2, false: 1}[row.h2], res.ProtoMajor)
		tr.CloseIdleConnections()
	}
}

// A wrong certificate names its variable and keeps nothing open.
func TestWrongCertificate(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	for _, row := range []struct {
		set  func(*Config)
		want string
	}{
		{func(c *Config) { c.TLSCertFile, c.TLSKeyFile = empty, empty }, `GRAPEVINE_TLS_CERT_FILE="` + empty + `": `},
		{func(c *Config) { c.PeerTLSCertFile, c.PeerTLSKeyFile, c.PeerTLSCAFile = empty, empty, empty }, `GRAPEVINE_PEER_TLS_CERT_FILE="` + empty + `": `},
	} {
		cfg := loopbackConfig("http://127.0.0.1:9")
		row.set(&cfg)
		a, err := New(cfg, Options{})
		if err == nil {
			err = a.Run(t.Context())
		}
		require.Error(t, err)
		assert.Contains(t, err.Error(), row.want)
	}
}

// The peer listener asks for proof of membership as soon as there is a key.
func TestPeerListenerNeedsProof(t *testing.T) {
	t.Parallel()
	cfg := loopbackConfig(startSim(t, fast()).url())
	cfg.GossipKey = testKey
	r := start(t, cfg, Options{})
	r.untilReady()
	peer := r.Addresses().Peer
	c := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	for _, url := range []string{"http://" + peer + "/v1/models", "https://" + peer + "/v1/models", "https://" + peer + proxy.LinkPath} {
		res, err := c.Get(url)
		if err == nil {
			b, _ := io.ReadAll(res.Body)
			res.Body.Close()
			assert.Equal(t, 400, res.StatusCode, "%s: %s", url, b) // plain HTTP to a TLS port
		}
	}
	assert.Zero(t, r.proxy.Metrics().TargetByOutcome["ok"])
}

// GET /v1/models is the union, and each replica's list is pulled by its digest.
func TestModelsOfAll(t *testing.T) {
	t.Parallel()
	one, two := fast(), fast()
	one.Model, two.Model = "one", "two"
	cfg := loopbackConfig(startSim(t, one).url())
	cfg.GossipKey = testKey
	a := start(t, cfg, Options{})
	cfg.EngineURL, cfg.Join = startSim(t, two).url(), []string{a.Addresses().Gossip}
	b := start(t, cfg, Options{})
	a.untilReady()
	b.untilReady()
	names := func() string {
		res, err := http.Get("http://" + a.Addresses().Client + "/v1/models")
		if err != nil {
			return err.Error()
		}
		defer res.Body.Close()
		var list struct{ Data []struct{ ID string } }
		_ = json.NewDecoder(res.Body).Decode(&list)
		var out []string
		for _, m := range list.Data {
			out = append(out, m.ID)
		}
		return strings.Join(out, " ")
	}
	a.eventually(10*time.Second, "both models", func() bool { n := names(); return n == "one two" || n == "two one" })
	code, body := a.chat(strings.Replace(chatBody, "sim", "two", 1))
	assert.Equal(t, 200, code, body)
	assert.Equal(t, uint32(1), b.proxy.Load().Accepted, "a model that only the other one has goes there")
	code, body = a.chat(strings.Replace(chatBody, "sim", "three", 1))
	assert.Equal(t, 404, code, body)
	assert.Contains(t, body, "model_not_found")
}
