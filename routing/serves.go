package routing

// Serves reports whether the peer lists the request's model and serves its path, and has room for its prompt.
func (s *Snapshot) Serves(p *Peer, r *Request) bool {
	g := s.groupFor(r)
	if g == nil {
		return false
	}
	i := g.indexOf(p)
	if i < 0 {
		return false
	}
	e := &g.entries[i]
	if v := p.view.Load(); v != nil && !v.report.Kept.Has(r.class()) {
		return false // whoever asks is usable itself
	}
	return e.fits(r) && (e.context == 0 || r.PromptTokens <= e.context)
}
