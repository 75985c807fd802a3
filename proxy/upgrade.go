package proxy

import (
	"context"
	"io"
	"time"
)

// tunnel joins the client's connection and the replica's after a 101. Nothing is looked into, and nothing replayed.
func (x *exchange) tunnel(a *attempt, w *watch, ans *Answer) verdict {
	defer ans.Tunnel.Close()
	h := &ans.Head
	upgrade := h.Header.Get("upgrade")
	cleanResponse(&h.Header, !a.self)
	h.Header.Set("connection", "Upgrade")
	h.Header.Set("upgrade", upgrade)
	x.finishHead(h)
	client, err := x.down.Tunnel(h)
	if err != nil {
		x.gone()
		return verdictGone
	}
	defer client.Close()
	x.content = true
	a.predicted(time.Now())
	w.stop()
	stop := context.AfterFunc(x.ctx, func() {
		_ = client.Close()
		_ = ans.Tunnel.Close()
	})
	defer stop()
	up := make(chan struct{})
	go func() {
		defer close(up)
		_, _ = io.Copy(ans.Tunnel, client)
		_ = ans.Tunnel.Close()
	}()
	_, _ = io.Copy(client, ans.Tunnel)
	_ = client.Close()
	<-up
	return verdictDone
}
