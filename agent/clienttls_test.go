package agent

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// writePair writes a self-signed certificate and its key.
func writePair(t *testing.T, dir, name string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	require.NoError(t, err)
	kb, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kb}), 0o600))
}

// A renewed certificate is served without a restart; half of a renewal is not.
func TestClientCertificateIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	writePair(t, dir, "first")
	c, err := newCertFiles(filepath.Join(dir, "crt"), filepath.Join(dir, "key"), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	name := func() string {
		c.looked = time.Time{} // time to look again
		got, err := c.get(nil)
		require.NoError(t, err)
		leaf, err := x509.ParseCertificate(got.Certificate[0])
		require.NoError(t, err)
		return leaf.Subject.CommonName
	}
	assert.Equal(t, "first", name())
	old, err := os.ReadFile(filepath.Join(dir, "key"))
	require.NoError(t, err)
	writePair(t, dir, "second")
	good, err := os.ReadFile(filepath.Join(dir, "key"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "key"), append([]byte("\n"), old...), 0o600))
	assert.Equal(t, "first", name(), "the pair does not fit")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "key"), good, 0o600))
	assert.Equal(t, "second", name())
	_, err = newCertFiles(filepath.Join(dir, "none"), filepath.Join(dir, "key"), slog.New(slog.DiscardHandler))
	require.Error(t, err)
}
