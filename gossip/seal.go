package gossip

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
)

// A record goes to many peers, and all have the same key. memberlist would encrypt it for each anew, which at 100 peers is
// most of what gossip costs. So the packet is made once, in memberlist's form:
//
//	label header   244, length, label             without a label nothing
//	under a key    1, nonce (12 bytes), AES-GCM   of what follows, with the label as additional data
//	message        8 (user message), our message
//
// Should memberlist change it, no record would arrive, which every test of this package sees.
const (
	labelHeader = 244
	userMessage = 8
	sealVersion = 1
)

// errNoCipher cannot happen with keys that the ring took.
var errNoCipher = errors.New("gossip: key without a cipher")

// packet makes the packet of a message of ours.
func (n *Node) packet(msg []byte) ([]byte, error) {
	label := n.cfg.Cluster
	out := make([]byte, 0, 2+len(label)+cryptBytes+1+len(msg))
	if label != "" {
		out = append(append(out, labelHeader, byte(len(label))), label...)
	}
	if n.ring == nil {
		return append(append(out, userMessage), msg...), nil
	}
	return n.ring.seal(out, append([]byte{userMessage}, msg...), []byte(label))
}

// seal appends the encrypted message to dst.
func (r *ring) seal(dst, plain, label []byte) ([]byte, error) {
	gcm, err := newGCM(r.ml.GetPrimaryKey())
	if err != nil {
		return nil, err
	}
	dst = append(dst, sealVersion)
	at := len(dst)
	dst = append(dst, make([]byte, gcm.NonceSize())...)
	if _, err := rand.Read(dst[at:]); err != nil {
		return nil, err
	}
	return gcm.Seal(dst, dst[at:], plain, label), nil
}

// open decrypts a packet with any key of the ring.
func (r *ring) open(b, label []byte) ([]byte, bool) {
	if len(b) < cryptBytes || b[0] != sealVersion {
		return nil, false
	}
	for _, k := range r.ml.GetKeys() {
		gcm, err := newGCM(k)
		if err != nil {
			return nil, false
		}
		if plain, err := gcm.Open(nil, b[1:1+gcm.NonceSize()], b[1+gcm.NonceSize():], label); err == nil {
			return plain, true
		}
	}
	return nil, false
}

func newGCM(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, errNoCipher
	}
	return cipher.NewGCM(block)
}
