package proxy

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"
)

// errCauseDeadline ends an exchange whose client has set it a deadline.
var errCauseDeadline = errors.New("the client's deadline has passed")

var errDeadline = &apiError{Status: 504, Code: "deadline_exceeded", Reason: "deadline",
	Message: "The deadline that the request set itself has passed."}

// Fields in which clients say how long they wait. The first is a deadline of the whole request; SDKs send the others
// with every request, and they bound only the wait for the first byte and silence.
const (
	headerTimeout     = "x-request-timeout"
	headerGRPCTimeout = "grpc-timeout"
	headerSDKTimeout  = "x-stainless-timeout"
	headerSDKRead     = "x-stainless-read-timeout"
)

// seconds reads a number of seconds, with a fraction perhaps; 0 = none that makes sense.
func seconds(s string) time.Duration {
	if s == "" {
		return 0
	}
	f, err := strconv.ParseFloat(strings.TrimSpace(s), 64)
	if err != nil || !(f > 0) || f > 1e6 {
		return 0
	}
	return time.Duration(f * float64(time.Second))
}

// grpcTimeout reads gRPC's form: at most eight digits and a unit.
func grpcTimeout(s string) time.Duration {
	if len(s) < 2 || len(s) > 9 {
		return 0
	}
	unit := map[byte]time.Duration{'H': time.Hour, 'M': time.Minute, 'S': time.Second, 'm': time.Millisecond,
		'u': time.Microsecond, 'n': time.Nanosecond}[s[len(s)-1]]
	n, err := strconv.ParseUint(s[:len(s)-1], 10, 31)
	if err != nil || unit == 0 {
		return 0
	}
	return time.Duration(n) * unit
}

// setLimits takes the configured limits and what the client says about its patience.
func (x *exchange) setLimits() {
	x.first, x.idle = x.p.cfg.FirstByteTimeout, x.p.cfg.IdleTimeout
	for _, name := range [...]string{headerSDKTimeout, headerSDKRead} {
		if d := seconds(x.header.Get(name)); d > 0 {
			x.first, x.idle = tighter(x.first, d), tighter(x.idle, d)
		}
	}
	d := seconds(x.header.Get(headerTimeout))
	if g := grpcTimeout(x.header.Get(headerGRPCTimeout)); g > 0 {
		d = tighter(d, g)
	}
	if d > 0 {
		x.req.Deadline = x.arrived.Add(d)
		x.ctx, x.unlimit = context.WithDeadlineCause(x.ctx, x.req.Deadline, errCauseDeadline)
	}
}

// tighter is the smaller of two limits, of which the first may be none (0 or less).
func tighter(limit, d time.Duration) time.Duration {
	if limit <= 0 {
		return d
	}
	return min(limit, d)
}
