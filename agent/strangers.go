package agent

import (
	"log/slog"
	"net"
	"sync/atomic"
)

// strangers counts who came and may not, by where, and logs it: for each place at most one line in a while. Clients without a
// valid API key are counted with the proxy's refusals.
type strangers struct {
	peer, status       atomic.Uint64
	peerLog, statusLog limitedLog
}

func (s *strangers) init(log *slog.Logger) {
	s.peerLog.write, s.statusLog.write = log.Warn, log.Warn
}

// atPeer is called for a connection to the peer listener that said something and never proved that it belongs here.
func (s *strangers) atPeer(remote net.Addr) {
	s.peer.Add(1)
	s.peerLog.warn(MsgPeerStranger, "remote", remote)
}

// atStatus is called for a request to the status listener that its sender may not make.
func (s *strangers) atStatus(remote, path string) {
	s.status.Add(1)
	s.statusLog.warn(MsgStatusStranger, "remote", remote, "path", path)
}
