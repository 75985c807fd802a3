package sim

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Row is one request of a trace.
type Row struct {
	At     time.Duration // since the trace's start
	Prompt int           // tokens
	Output int           // tokens
	Blocks []uint64      // chained hashes of the prompt's 512-token blocks, the last one may be partial; nil = nothing shared
}

// Trace is what arrives, in order of arrival.
type Trace struct {
	Name     string
	Rows     []Row
	Prefixes bool // some row has blocks, so that the order of the rows means something
}

// ErrTrace is wrapped by all errors of reading traces.
var ErrTrace = errors.New("bad trace")

// ReadTraceFile reads a trace, gzip or not; its format is told from the content.
func ReadTraceFile(path string) (*Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	name, _, _ := strings.Cut(filepath.Base(path), ".")
	return ReadTrace(name, f)
}

// ReadTrace reads a trace in one of three formats, gzip or not, told by its first line:
//
//	{"t":0.349,"i":2007,"o":139,"h":[24,25,26,234]}                                       ours, t in s
//	{"timestamp":27482,"input_length":6955,"output_length":52,"hash_ids":[46,47]}         Mooncake, timestamp in ms
//	TIMESTAMP,ContextTokens,GeneratedTokens                                               Azure, one header line, then CSV
//
// Rows without a prompt or an answer count as one token. Arrivals are sorted by nobody: a row before its predecessor
// is an error.
func ReadTrace(name string, r io.Reader) (*Trace, error) {
	b := bufio.NewReaderSize(r, 1<<16)
	if magic, _ := b.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrTrace, err)
		}
		defer z.Close()
		b = bufio.NewReaderSize(z, 1<<16)
	}
	t := &Trace{Name: name}
	first, err := b.Peek(1)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %s is empty", ErrTrace, name)
	case first[0] == '{' || first[0] == '#':
		err = t.readLines(b)
	default:
		err = t.readAzure(b)
	}
	if err == nil && len(t.Rows) == 0 {
		err = errors.New("no requests")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrTrace, name, err)
	}
	return t, nil
}

// line is a row in either JSON format.
type line struct {
	T *float64 `json:"t"`
	I int      `json:"i"`
	O int      `json:"o"`
	H []uint64 `json:"h"`

	Timestamp *float64 `json:"timestamp"`
	Input     int      `json:"input_length"`
	Output    int      `json:"output_length"`
	Hashes    []uint64 `json:"hash_ids"`
}

func (t *Trace) readLines(r io.Reader) error {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 1<<16), 1<<24)
	for n := 1; s.Scan(); n++ {
		if b := bytes.TrimSpace(s.Bytes()); len(b) == 0 || b[0] == '#' {
			continue
		}
		var l line
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		var seconds float64
		switch {
		case l.T != nil:
			seconds = *l.T
		case l.Timestamp != nil:
			seconds, l.I, l.O, l.H = *l.Timestamp/1000, l.Input, l.Output, l.Hashes
		default:
			return fmt.Errorf("line %d: neither t nor timestamp", n)
		}
		if err := t.add(seconds, l.I, l.O, l.H); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
	return s.Err()
}

// azureTimes are the forms of the public traces' first column (2023 and 2024).
var azureTimes = []string{"2006-01-02 15:04:05.999999999", "2006-01-02 15:04:05.999999999-07:00"}

func (t *Trace) readAzure(r io.Reader) error {
	c := csv.NewReader(r)
	c.ReuseRecord = true
	head, err := c.Read()
	if err != nil {
		return err
	}
	if len(head) < 3 || !strings.EqualFold(strings.TrimPrefix(head[0], "\ufeff"), "TIMESTAMP") || !strings.EqualFold(head[1], "ContextTokens") {
		return fmt.Errorf("neither JSON lines nor a header TIMESTAMP,ContextTokens,GeneratedTokens: %q", strings.Join(head, ","))
	}
	var start time.Time
	for n := 2; ; n++ {
		f, err := c.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var at time.Time
		for _, form := range azureTimes {
			if at, err = time.Parse(form, f[0]); err == nil {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if start.IsZero() {
			start = at
		}
		in, err1 := strconv.Atoi(f[1])
		out, err2 := strconv.Atoi(f[2])
		if err := errors.Join(err1, err2); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if err := t.add(at.Sub(start).Seconds(), in, out, nil); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
}

// maxTokens bounds a row's lengths: beyond it is a slip of units.
const maxTokens = 100_000_000

func (t *Trace) add(seconds float64, prompt, output int, blocks []uint64) error {
	if !(seconds >= 0 && seconds < 1e9) || prompt < 0 || output < 0 || prompt > maxTokens || output > maxTokens {
		return fmt.Errorf("arrival %g s, %d and %d tokens: out of range", seconds, prompt, output)
	}
	r := Row{At: time.Duration(seconds * 1e9), Prompt: max(1, prompt), Output: max(1, output)}
	if n := len(t.Rows); n > 0 && r.At < t.Rows[n-1].At {
		return errors.New("arrives before the one before it")
	}
	if len(blocks) > 0 {
		blocks = blocks[:min(len(blocks), (r.Prompt+blockTokens-1)/blockTokens)]
		r.Blocks = make([]uint64, len(blocks))
		for i, h := range blocks {
			r.Blocks[i] = mix(h + 1)
		}
		t.Prefixes = true
	}
	t.Rows = append(t.Rows, r)
	return nil
}

// Cap leaves out the rows whose prompt is longer.
func (t *Trace) Cap(prompt int) *Trace {
	out := &Trace{Name: t.Name, Prefixes: t.Prefixes}
	for _, r := range t.Rows {
		if r.Prompt <= prompt {
			out.Rows = append(out.Rows, r)
		}
	}
	return out
}

// Means returns the mean lengths in tokens.
func (t *Trace) Means() (prompt, output float64) {
	for i := range t.Rows {
		prompt += float64(t.Rows[i].Prompt)
		output += float64(t.Rows[i].Output)
	}
	n := float64(max(1, len(t.Rows)))
	return prompt / n, output / n
}

// mix is the finalizer of splitmix64: every input bit moves every output bit.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
