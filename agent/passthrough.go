package agent

import (
	"context"
	"io"
	"net/http"
)

// maxPage bounds a page of the engine that is passed on; the largest captured one has 54 KB.
const maxPage = 8 << 20

// verbatim passes one page of the engine on as it is: status, content type and bytes. A probe or a scrape that was made
// for the engine works through it while the engine itself listens on loopback only. 502 with one line if it cannot be had.
func verbatim(w http.ResponseWriter, r *http.Request, get func(context.Context) (*http.Response, error)) {
	res, err := get(r.Context())
	if err != nil {
		http.Error(w, "engine: "+err.Error(), http.StatusBadGateway)
		return
	}
	defer res.Body.Close()
	if t := res.Header.Get("Content-Type"); t != "" {
		w.Header().Set("Content-Type", t)
	}
	w.WriteHeader(res.StatusCode)
	_, _ = io.Copy(w, io.LimitReader(res.Body, maxPage)) // either side hung up
}
