package peertls

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

// files are an operator's own certificates.
type files struct {
	cert, key, ca string

	mu     sync.Mutex
	looked time.Time
	sum    [sha256.Size]byte // of what was read last, good or bad
	err    error             // why the last reading was not taken
}

// lookAgain is how long a reading of the files is trusted.
const lookAgain = 5 * time.Second

// NewFromFiles makes an identity from PEM files: a certificate chain and its key, good for both directions, and
// the authorities whose certificates are accepted. Changed files are taken over within 5 s of use; a bad
// change is ignored and told by FilesError. Connections whose authority was removed are closed.
func NewFromFiles(boot uint64, cert, key, ca string) (*Identity, error) {
	id := &Identity{boot: boot, files: &files{cert: cert, key: key, ca: ca}}
	id.reload()
	if err := id.files.err; err != nil {
		return nil, err
	}
	return id, nil
}

// FilesError tells why changed files were not taken over; nil if they were, or if there are none.
func (id *Identity) FilesError() error {
	if id.files == nil {
		return nil
	}
	id.files.mu.Lock()
	defer id.files.mu.Unlock()
	return id.files.err
}

// reload takes the files over if they have changed.
func (id *Identity) reload() {
	f := id.files
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if !f.looked.IsZero() && now.Sub(f.looked) < lookAgain {
		return
	}
	f.looked = now
	var parts [3][]byte
	for i, path := range []string{f.cert, f.key, f.ca} {
		b, err := os.ReadFile(path)
		if err != nil {
			f.err = fmt.Errorf("peer certificates: %w", err)
			return
		}
		parts[i] = b
	}
	sum := sha256.Sum256(bytes.Join(parts[:], []byte{0}))
	if sum == f.sum {
		return
	}
	f.sum = sum
	next, err := readAuthorities(parts[0], parts[1], parts[2])
	if f.err = err; err == nil {
		id.setRing(next)
	}
}

// readAuthorities makes one authority of each accepted certificate, all with the one leaf.
func readAuthorities(cert, key, ca []byte) ([]*authority, error) {
	leaf, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("peer certificates: %w", err)
	}
	pool := x509.NewCertPool()
	var out []*authority
	for block, rest := pem.Decode(ca); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("peer certificates: authority: %w", err)
		}
		pool.AddCert(c)
		sum := sha256.Sum256(c.Raw)
		out = append(out, &authority{id: hex.EncodeToString(sum[:8]), cert: c, pool: pool, leaf: leaf})
	}
	if len(out) == 0 {
		return nil, errors.New("peer certificates: no authority in the CA file")
	}
	return out, nil
}

// verify checks a chain against the authorities and tells which one it ends at.
func (f *files) verify(r *ring, chain []*x509.Certificate, usage x509.ExtKeyUsage) (string, uint64, error) {
	inter := x509.NewCertPool()
	for _, c := range chain[1:] {
		inter.AddCert(c)
	}
	chains, err := chain[0].Verify(x509.VerifyOptions{Roots: r.authorities[0].pool, Intermediates: inter, CurrentTime: time.Now(),
		KeyUsages: []x509.ExtKeyUsage{usage}})
	if err != nil {
		return "", 0, err
	}
	root := chains[0][len(chains[0])-1]
	i := slices.IndexFunc(r.authorities, func(a *authority) bool { return a.cert.Equal(root) })
	return r.authorities[i].id, 0, nil
}
