package harness

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
)

// Ports are the same for every process of a kind: what differs is the loopback address. They lie below the range from
// which Linux takes ports for outgoing connections.
const (
	ClientPort = 18080
	PeerPort   = 18081
	StatusPort = 18082
	GossipPort = 17946
	EnginePort = 18000
	TapPort    = 18001
)

// stages counts the stages of this process; with the process id it makes each stage's network unique.
var stages atomic.Uint32

// Stage is what one test starts. Its methods fail the test when something cannot be started, and must be called from the
// goroutine of the test.
type Stage struct {
	// Binary is what agents are started from, for fleets of two builds; empty = the package that Program says.
	Binary string

	t       testing.TB
	dir     string
	net     [2]byte // the middle bytes of 127.x.y.n
	key     string
	cluster string
	agents  int // highest agent number that join lists name
	program string
}

// New makes an empty stage. It skips the test on systems where only 127.0.0.1 answers.
func New(t testing.TB) *Stage {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skipf("needs the whole of 127.0.0.0/8 on loopback, which %s does not have", runtime.GOOS)
	}
	slot := uint32(os.Getpid())*32 + stages.Add(1)
	key := make([]byte, 32)
	rand.Read(key)
	return &Stage{
		t:       t,
		dir:     stageDir(t),
		net:     [2]byte{byte(1 + slot/254%253), byte(1 + slot%254)},
		key:     base64.StdEncoding.EncodeToString(key),
		cluster: fmt.Sprintf("e2e-%d", slot),
		agents:  3,
		program: "./cmd/grapevine",
	}
}

// stageDir is where a stage's files go: the test's directory, or one in it for each further stage of that test.
func stageDir(t testing.TB) string {
	dir := t.ArtifactDir()
	for n := 2; ; n++ {
		if list, err := os.ReadDir(dir); err != nil || len(list) == 0 {
			return dir
		}
		dir = filepath.Join(t.ArtifactDir(), fmt.Sprintf("stage%d", n))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// IP is the loopback address of participant n, 1 to 250.
func (s *Stage) IP(n int) string { return net.IPv4(127, s.net[0], s.net[1], byte(n)).String() }

// Addr is participant n's address with a port.
func (s *Stage) Addr(n, port int) string { return fmt.Sprintf("%s:%d", s.IP(n), port) }

// Dir is where logs and recordings of this stage go.
func (s *Stage) Dir() string { return s.dir }

// file opens a log of the stage to append to.
func (s *Stage) file(name string) *os.File {
	s.t.Helper()
	f, err := os.OpenFile(filepath.Join(s.dir, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		s.t.Fatal(err)
	}
	return f
}

// Program says of which main package of this module the agents are, instead of cmd/grapevine.
func (s *Stage) Program(pkg string) *Stage { s.program = pkg; return s }

// Size says how many agents the stage will have, so that each gets all the others as join addresses. Default 3.
func (s *Stage) Size(n int) *Stage { s.agents = n; return s }

// join is the list of gossip addresses of all agents but n.
func (s *Stage) join(n int) string {
	var list []string
	for i := 1; i <= s.agents; i++ {
		if i != n {
			list = append(list, s.Addr(i, GossipPort))
		}
	}
	return strings.Join(list, ",")
}
