package routing

// confirm takes a record whose digest sequence is the one we have as news that the digest still holds: a replica whose
// cache does not change sends no deltas, and is known all the same.
func (t *Table) confirm(p *Peer, r *Report, at tick) {
	if !r.PrefixSeq.OK || p.self {
		return
	}
	t.index.mu.RLock()
	same := p.digestSeq == r.PrefixSeq.V
	t.index.mu.RUnlock()
	if same && (r.PrefixSeq.V == 0 || tick(p.digestAt.Load()) != never) {
		p.digestAt.Store(int64(at))
	}
}
