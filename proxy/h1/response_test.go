package h1

import (
	"bytes"
	"testing"
)

// FuzzResponse: an answer's head is taken or refused by the grammar alone, whatever an engine sends; what is taken frames
// itself in one way only and holds no control bytes, and a head that is cut anywhere is never taken.
func FuzzResponse(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "HTTP/1.1 200\r\n\r\n", "HTTP/1.0 200 OK\r\n\r\nrest",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.1 99 x\r\n\r\n", "HTTP/1.1 200 OK\nA: b\n\n",
		"HTTP/1.1 204 No\r\nContent-Length: 9\r\n\r\n", "HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n",
	} {
		f.Add([]byte(s), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, head bool) {
		method := []byte("POST")
		if head {
			method = []byte("HEAD")
		}
		var r Response
		n, err := ParseResponse(b, &r, method)
		if err != nil || n == 0 {
			return
		}
		switch {
		case n > len(b) || !bytes.HasSuffix(b[:n], []byte("\r\n\r\n")):
			t.Fatalf("%d of %d bytes taken", n, len(b))
		case r.Status < 100 || r.Status > 999:
			t.Fatalf("status %d", r.Status)
		case r.Chunked && (r.Length >= 0 || r.ToEnd), r.ToEnd && r.Length >= 0:
			t.Fatalf("framed twice: %+v", r.Framing)
		case head && (r.Chunked || r.ToEnd || r.Length != 0):
			t.Fatalf("an answer to HEAD with a body: %+v", r.Framing)
		}
		lengths := 0
		for _, fd := range r.Fields {
			if bytes.ContainsAny(fd.Value, "\r\n\x00") || bytes.ContainsAny(fd.Name, " \t\r\n:") || len(fd.Name) == 0 {
				t.Fatalf("field %q: %q", fd.Name, fd.Value)
			}
			switch Lookup(fd.Name) {
			case ContentLength, TransferEncoding:
				lengths++
			}
		}
		if lengths > 1 {
			t.Fatal("two framing fields")
		}
		for cut := max(0, n-6); cut < n; cut++ {
			var again Response
			if m, _ := ParseResponse(b[:cut], &again, method); m != 0 {
				t.Fatalf("taken after %d of %d bytes", cut, n)
			}
		}
	})
}
