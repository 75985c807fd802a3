package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// play feeds lines to a fresh adapter and returns its answers.
func play(t *testing.T, lines ...string) []string {
	t.Helper()
	p, err := routing.NewPolicy("auto")
	require.NoError(t, err)
	var out strings.Builder
	require.NoError(t, serve(strings.NewReader(strings.Join(lines, "\n")), &out, p))
	return strings.Fields(out.String())
}

const (
	hello = `{"op":"hello","n":3,"budget":8192,"kvcap":430000,"block":512,"hop_s":0.0005,"pub_s":0.2,"seed":1}`
	idle  = `{"t":1,"wait":0,"run":0,"pend":0,"kv":0,"kvcap":430000,"rate":30000,"alive":true}`
	busy  = `{"t":1,"wait":9,"run":9,"pend":60000,"kv":90000,"kvcap":430000,"rate":30000,"alive":true}`
	dead  = `{"t":1,"wait":0,"run":0,"pend":0,"kv":0,"kvcap":430000,"rate":30000,"alive":false}`
	req   = `"now":1,"req":{"id":9,"in":1200}`
)

func update(peer, s string) string {
	return `{"op":"update","agent":0,"peer":` + peer + `,"now":1,"s":` + s + `}`
}

func TestIdleAgentStays(t *testing.T) {
	got := play(t, hello, update("1", busy), update("2", idle), `{"op":"local","agent":0,"now":1,"s":`+idle+`}`,
		`{"op":"shortlist","agent":0,`+req+`}`, `{"op":"pick","agent":0,`+req+`}`)
	assert.Equal(t, []string{`{"ask":[]}`, `{"peer":0}`}, got)
}

func TestBusyAgentAsksAndTakesTheBest(t *testing.T) {
	got := play(t, hello, update("1", busy), update("2", idle), `{"op":"local","agent":0,"now":1,"s":`+busy+`}`,
		`{"op":"shortlist","agent":0,`+req+`}`,
		// By the answers it is the other way round.
		strings.ReplaceAll(update("1", idle), `"t":1`, `"t":1.001`), strings.ReplaceAll(update("2", busy), `"t":1`, `"t":1.001`),
		`{"op":"pick","agent":0,`+req+`}`)
	assert.Equal(t, []string{`{"ask":[2,1]}`, `{"peer":1}`}, strings.Fields(strings.Join(got, "\n")))
}

func TestDeadPeerIsNotAsked(t *testing.T) {
	got := play(t, hello, update("1", dead), update("2", idle), `{"op":"local","agent":0,"now":1,"s":`+busy+`}`,
		`{"op":"shortlist","agent":0,`+req+`}`)
	assert.Equal(t, []string{`{"ask":[2]}`}, got)
}

func TestHolderOfThePrefixWins(t *testing.T) {
	known := `"now":1,"req":{"id":9,"in":5000,"hashes":[11,12,13,14,15,16,17,18,19],"known":[0,8,0]}`
	got := play(t, hello, update("1", idle), update("2", idle), `{"op":"local","agent":0,"now":1,"s":`+idle+`}`,
		`{"op":"shortlist","agent":0,`+known+`}`, `{"op":"pick","agent":0,`+known+`}`)
	assert.Equal(t, `{"peer":1}`, got[1])
}

func TestLifeOfARequest(t *testing.T) {
	p, err := routing.NewPolicy("auto")
	require.NoError(t, err)
	f := newFleet(2, 1, p)
	m := message{Agent: 0, Now: 1, Req: request{ID: 9, In: 1200}}
	f.shortlist(m)
	peer := f.pick(m)
	m = message{Agent: 0, Peer: peer, Now: 1, ID: 9}
	f.sent(m)
	q := f.agents[0].table.Peer(boot(peer))
	assert.Equal(t, 1, q.Inflight())
	f.first(m)
	assert.Zero(t, q.InflightTokens())
	f.done(m)
	assert.Zero(t, q.Inflight())
	assert.Empty(t, f.agents[0].flights)
}

func TestBadInput(t *testing.T) {
	p, err := routing.NewPolicy("auto")
	require.NoError(t, err)
	for in, want := range map[string]string{
		`{"op":"pick"}`:             "no hello",
		hello + "\n" + `{"op":"x"}`: `unknown op "x"`,
		"not JSON":                  "not JSON",
	} {
		err := serve(strings.NewReader(in), &strings.Builder{}, p)
		assert.ErrorContains(t, err, want)
	}
}
