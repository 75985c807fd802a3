package proxy

import (
	"net/http"
	"strconv"
	"sync/atomic"
	"time"
)

// statusLines are made once: a switch of strings on the hot path would be longer than what it saves.
var statusLines = func() (t [600]string) {
	for i := 100; i < len(t); i++ {
		t[i] = "HTTP/1.1 " + strconv.Itoa(i) + " " + http.StatusText(i) + "\r\n"
	}
	return t
}()

func statusLine(status int) string {
	if status < 100 || status >= len(statusLines) {
		return "HTTP/1.1 " + strconv.Itoa(status) + " \r\n"
	}
	return statusLines[status]
}

// dateLine is the Date field of the present second (RFC 9110, section 6.6.1).
type dateLine struct {
	second int64
	line   string
}

var dateNow atomic.Pointer[dateLine]

func appendDate(b []byte, now time.Time) []byte {
	d := dateNow.Load()
	if d == nil || d.second != now.Unix() {
		d = &dateLine{now.Unix(), "Date: " + now.UTC().Format(http.TimeFormat) + "\r\n"}
		dateNow.Store(d)
	}
	return append(b, d.line...)
}
