package proxy

import "log/slog"

// logged says at which level the line of a request that ended is written, if at all. With an access log of share s, s of
// the requests and all that failed are lines of level info; without one, all are lines of level debug. It holds no prompt,
// no key, and no header but the request's id.
func (x *exchange) logged() (slog.Level, bool) {
	s := x.p.cfg.AccessLog
	if s > 0 && (s >= 1 || x.rnd.Float64() < s || x.outcome != outcomeOK && x.outcome != outcomeClientError && x.outcome != outcomeCancel) {
		return slog.LevelInfo, x.log.Enabled(x.ctx, slog.LevelInfo)
	}
	return slog.LevelDebug, x.log.Enabled(x.ctx, slog.LevelDebug)
}
