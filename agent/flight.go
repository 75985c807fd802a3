package agent

import (
	"bytes"
	"fmt"
	"net/http"
	"runtime/trace"
	"sync"
	"time"
)

// The flight recorder keeps the last seconds of the Go runtime's own trace (goroutines, system calls, garbage collection),
// so that a stall can be looked at after it has happened. It costs memory and a few percent of CPU, so it is off until
// somebody on this host starts it. A process has one, whichever of its agents started it.

const (
	flightAge   = 10 * time.Second
	flightBytes = 8 << 20
)

// flight is an agent's hold of the recorder.
type flight struct {
	mu  sync.Mutex
	rec *trace.FlightRecorder // nil = not recording
}

// start begins to record; it is an error if this or another agent of the process records already.
func (f *flight) start() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rec != nil {
		return fmt.Errorf("recording already")
	}
	rec := trace.NewFlightRecorder(trace.FlightRecorderConfig{MinAge: flightAge, MaxBytes: flightBytes})
	if err := rec.Start(); err != nil {
		return err
	}
	f.rec = rec
	return nil
}

// stop ends recording and reports whether there was any.
func (f *flight) stop() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rec == nil {
		return false
	}
	f.rec.Stop()
	f.rec = nil
	return true
}

// serve answers with the last seconds, for `go tool trace`.
func (f *flight) serve(w http.ResponseWriter, _ *http.Request) {
	var b bytes.Buffer // written whole first: the recorder holds the runtime's trace while somebody reads it
	f.mu.Lock()
	on := f.rec != nil
	var err error
	if on {
		_, err = f.rec.WriteTo(&b)
	}
	f.mu.Unlock()
	switch {
	case !on:
		http.Error(w, "not recording; start it with POST /debug/flight/start", http.StatusConflict)
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	default:
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Disposition", `attachment; filename="grapevine.trace"`)
		_, _ = w.Write(b.Bytes()) // the client hung up
	}
}

func (f *flight) serveStart(w http.ResponseWriter, _ *http.Request) {
	if err := f.start(); err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	fmt.Fprintln(w, "recording")
}

func (f *flight) serveStop(w http.ResponseWriter, _ *http.Request) {
	if !f.stop() {
		http.Error(w, "not recording", http.StatusConflict)
		return
	}
	fmt.Fprintln(w, "stopped")
}
