package agent

import (
	"crypto/tls"
	"log/slog"
	"os"
	"sync"
	"time"
)

// certEvery is the least time between two looks at the certificate's files.
const certEvery = 5 * time.Second

// certFiles is a certificate that is read again when its files change, as when it is renewed. A pair that does not fit, as
// between the writing of the one and the other, changes nothing.
type certFiles struct {
	cert, key string
	log       *slog.Logger

	mu     sync.Mutex
	now    *tls.Certificate
	looked time.Time
	stamp  [2]fileStamp
}

type fileStamp struct {
	at   time.Time
	size int64
}

func newCertFiles(cert, key string, log *slog.Logger) (*certFiles, error) {
	c := &certFiles{cert: cert, key: key, log: log, looked: time.Now()}
	c.stamp = c.stamps()
	pair, err := tls.LoadX509KeyPair(cert, key)
	c.now = &pair
	return c, err
}

func (c *certFiles) stamps() (s [2]fileStamp) {
	for i, name := range []string{c.cert, c.key} {
		if st, err := os.Stat(name); err == nil { // follows links, as Kubernetes renews secrets by changing one
			s[i] = fileStamp{st.ModTime(), st.Size()}
		}
	}
	return s
}

// get is the tls.Config's GetCertificate.
func (c *certFiles) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); now.Sub(c.looked) >= certEvery {
		c.looked = now
		if s := c.stamps(); s != c.stamp {
			pair, err := tls.LoadX509KeyPair(c.cert, c.key)
			if err != nil {
				c.log.Warn("the client listener's certificate cannot be read again", KeyErr, err, KeyHint, "the one that was read before stays in use")
			} else {
				c.log.Info("the client listener has another certificate")
				c.now = &pair
			}
			c.stamp = s
		}
	}
	return c.now, nil
}
