package peertls

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"strconv"
	"time"
)

// authority is one key of the ring as a certificate authority, with our own leaf under it.
type authority struct {
	id   string // 16 hexadecimal digits, derived from the key and telling nothing of it
	cert *x509.Certificate
	pool *x509.CertPool
	leaf tls.Certificate
}

// The span of every certificate of ours, and a moment in it at which all are judged.
var (
	notBefore = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	judgedAt  = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	notAfter  = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC) // RFC 5280: no well-defined end
)

const minKey = 16 // bytes, as for gossip

// newAuthority derives the authority of key and issues a leaf for boot with the key pair leafKey.
func newAuthority(key []byte, boot uint64, leafKey ed25519.PrivateKey) (*authority, error) {
	if len(key) < minKey {
		return nil, fmt.Errorf("key of %d bytes, at least %d are needed", len(key), minKey)
	}
	id, err := KeyID(key)
	if err != nil {
		return nil, err
	}
	seed, err := hkdf.Key(sha256.New, key, nil, "grapevine peer authority v1", ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	caKey := ed25519.NewKeyFromSeed(seed)
	// Nothing here is random: every agent derives the same bytes.
	ca := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{Organization: []string{"grapevine"}, CommonName: "key " + id},
		NotBefore:             notBefore,
		NotAfter:              notAfter,
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, caKey.Public(), caKey)
	if err != nil {
		return nil, err
	}
	a := &authority{id: id, pool: x509.NewCertPool()}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	a.pool.AddCert(a.cert)

	var serial [16]byte
	_, _ = rand.Read(serial[:]) // never fails
	serial[0] &= 0x7f
	leaf := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial[:]),
		Subject:      pkix.Name{Organization: []string{"grapevine"}, CommonName: "boot " + bootName(boot)},
		URIs:         []*url.URL{bootURI(boot)},
		NotBefore:    notBefore,
		NotAfter:     notAfter,
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err = x509.CreateCertificate(rand.Reader, leaf, a.cert, leafKey.Public(), caKey)
	if err != nil {
		return nil, err
	}
	a.leaf = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: leafKey}
	a.leaf.Leaf, err = x509.ParseCertificate(der)
	return a, err
}

// KeyID is the public name of a gossip key: 16 hexadecimal digits from which the key can not be found.
func KeyID(key []byte) (string, error) {
	b, err := hkdf.Key(sha256.New, key, nil, "grapevine key id v1", 8)
	return hex.EncodeToString(b), err
}

func bootName(boot uint64) string { return fmt.Sprintf("%016x", boot) }

func bootURI(boot uint64) *url.URL {
	return &url.URL{Scheme: "grapevine", Host: "boot", Path: "/" + bootName(boot)}
}

// bootOf reads the boot id that a leaf was issued for.
func bootOf(leaf *x509.Certificate) (uint64, error) {
	for _, u := range leaf.URIs {
		if u.Scheme == "grapevine" && u.Host == "boot" && len(u.Path) == 17 {
			return strconv.ParseUint(u.Path[1:], 16, 64)
		}
	}
	return 0, errors.New("certificate names no boot id")
}
