package peertls

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// operator is somebody's own certificate authority.
type operator struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newOperator(t *testing.T, name string) *operator {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return &operator{cert, key}
}

// write puts a leaf of o and the accepted authorities into dir.
func (o *operator) write(t *testing.T, dir string, until time.Time, accepted ...*operator) (cert, key, ca string) {
	t.Helper()
	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "agent"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: until, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, o.cert, leafKey.Public(), o.key)
	require.NoError(t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(leafKey)
	require.NoError(t, err)
	put := func(name, typ string, ders ...[]byte) string {
		var out []byte
		for _, d := range ders {
			out = append(out, pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: d})...)
		}
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, out, 0o600))
		return path
	}
	var cas [][]byte
	for _, a := range accepted {
		cas = append(cas, a.cert.Raw)
	}
	return put("cert.pem", "CERTIFICATE", der), put("key.pem", "PRIVATE KEY", raw), put("ca.pem", "CERTIFICATE", cas...)
}

func TestOwnFiles(t *testing.T) {
	one, two := newOperator(t, "one"), newOperator(t, "two")
	later := time.Now().Add(time.Hour)
	load := func(boot uint64, o *operator, until time.Time, accepted ...*operator) (*Identity, string, error) {
		dir := t.TempDir()
		id, err := NewFromFiles(boot, filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), filepath.Join(dir, "ca.pem"))
		require.Error(t, err, "no files yet")
		require.Nil(t, id)
		id, err = NewFromFiles(3, mustFiles(o.write(t, dir, until, accepted...)), filepath.Join(dir, "key.pem"), filepath.Join(dir, "ca.pem"))
		return id, dir, err
	}
	sid, dir, err := load(bootServer, one, later, one)
	require.NoError(t, err)
	s := serve(t, sid)
	member, _, err := load(bootClient, one, later, one)
	require.NoError(t, err)
	c, err := s.dial(t, member, bootServer)
	require.NoError(t, err)
	for range 2 {
		_, err = s.dial(t, member, bootServer)
		require.NoError(t, err)
	}
	stranger, _, err := load(9, two, later, one, two)
	require.NoError(t, err)
	_, err = s.dial(t, stranger, bootServer)
	require.Error(t, err)
	late, _, err := load(9, one, time.Now().Add(-time.Minute), one)
	require.NoError(t, err)
	_, err = s.dial(t, late, bootServer)
	require.Error(t, err, "validity counts for own files")

	// A half-written change is ignored, a whole one taken over, and what the old authority let in is closed.
	again := func() {
		sid.files.mu.Lock()
		sid.files.looked = time.Now().Add(-lookAgain)
		sid.files.mu.Unlock()
		sid.current()
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cert.pem"), []byte("half"), 0o600))
	again()
	require.Error(t, sid.FilesError())
	require.NoError(t, roundTrip(c))
	two.write(t, dir, later, two)
	again()
	require.NoError(t, sid.FilesError())
	require.Error(t, roundTrip(c))
	_, err = s.dial(t, member, bootServer)
	require.Error(t, err)
	_, err = s.dial(t, stranger, bootServer)
	require.NoError(t, err)
	assert.NoError(t, sid.SetKeys(nil), "keys mean nothing to it")
}

func mustFiles(cert, _, _ string) string { return cert }
