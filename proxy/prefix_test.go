package proxy

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// words is text of n bytes that differs by seed.
func words(seed uint64, n int) string {
	rnd := rand.New(rand.NewPCG(seed, 1))
	var b strings.Builder
	for b.Len() < n {
		fmt.Fprintf(&b, "word%d ", rnd.IntN(1e6))
	}
	return b.String()[:n]
}

func prefixOf(t *testing.T, svc routing.Service, salt *PrefixSalt, body string) []uint64 {
	t.Helper()
	k, err := peek(svc, "application/json", "", salt, []byte(body))
	require.NoError(t, err)
	return k.Prefix
}

// blocksOf is how many blocks a text of that many bytes has.
func blocksOf(bytes int) (n int) {
	for at := 0; at+blockSize(at) <= bytes; n++ {
		at += blockSize(at)
	}
	return n
}

// common is the number of leading hashes that are equal.
func common(a, b []uint64) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

func TestPrefixGrowsWithTheConversation(t *testing.T) {
	salt := NewPrefixSalt([]byte("key"))
	system, first, answer := words(1, 5000), words(2, 3000), words(3, 4000)
	one := prefixOf(t, routing.ServeChat, salt, fmt.Sprintf(`{"model":"m","messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`, system, first))
	two := prefixOf(t, routing.ServeChat, salt, fmt.Sprintf(`{"model":"m","messages":[{"role":"system","content":%q},{"role":"user","content":%q},{"role":"assistant","content":%q},{"role":"user","content":"more"}]}`, system, first, answer))
	require.Len(t, one, blocksOf(8000))
	require.Len(t, two, blocksOf(12000))
	assert.Equal(t, blocksOf(8000), common(one, two))

	other := prefixOf(t, routing.ServeChat, salt, fmt.Sprintf(`{"model":"m","messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`, system, words(9, 3000)))
	assert.Equal(t, blocksOf(5000), common(one, other), "only the system prompt is shared")

	seen := map[uint64]bool{}
	for _, h := range append(two, other[blocksOf(5000):]...) {
		assert.False(t, seen[h], "hashes of different prefixes differ")
		seen[h] = true
	}
}

func TestPrefixIsCanonical(t *testing.T) {
	salt := NewPrefixSalt([]byte("key"))
	text := words(4, 6000) + " 模型 🙂 \"quoted\"\n"
	esc := fmt.Sprintf("%q", text)
	escaped := strings.NewReplacer("模", `\u6a21`, "🙂", `\ud83d\ude42`, "/", `\/`).Replace(esc)
	want := prefixOf(t, routing.ServeChat, salt, `{"model":"m","messages":[{"role":"user","content":`+esc+`},{"role":"user","content":`+esc+`}]}`)
	require.Len(t, want, blocksOf(2*len(text)))
	for name, body := range map[string]string{
		"order of fields":     `{"messages":[{"content":` + esc + `,"role":"user"},{"content":` + esc + `,"role":"user"}],"stream":true,"model":"m"}`,
		"white space":         "\n{ \"model\" : \"m\",\r\n\"messages\" : [ {\t\"role\":\"user\", \"content\" : " + esc + "}, {\"role\":\"user\",\"content\":" + esc + "} ] }",
		"escapes":             `{"model":"\u006d","messages":[{"role":"user","content":` + escaped + `},{"role":"user","content":` + escaped + `}]}`,
		"one text part":       `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":` + esc + `}]},{"role":"user","content":[{"text":` + esc + `,"type":"text"}]}]}`,
		"cache control moves": `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":` + esc + `,"cache_control":{"type":"ephemeral"}}]},{"role":"user","content":` + esc + `}]}`,
		"sampling":            `{"model":"m","temperature":1,"max_tokens":3,"seed":7,"tool_choice":"auto","messages":[{"role":"user","content":` + esc + `},{"role":"user","content":` + esc + `}],"user":"u"}`,
		"nulls":               `{"model":"m","tools":null,"cache_salt":null,"messages":[{"role":"user","content":` + esc + `,"tool_calls":null},{"role":"user","content":` + esc + `}]}`,
		"duplicates":          `{"model":"x","model":"m","messages":[{"role":"user","content":"old"}],"messages":[{"role":"user","content":` + esc + `},{"role":"user","content":` + esc + `}]}`,
	} {
		assert.Equal(t, want, prefixOf(t, routing.ServeChat, salt, body), name)
	}
}

// Whatever changes what the engine computes changes every hash, wherever it stands.
func TestPrefixCoversWhatChangesThePrompt(t *testing.T) {
	salt := NewPrefixSalt([]byte("key"))
	messages := fmt.Sprintf(`"messages":[{"role":"user","content":%q}]`, words(5, 9000))
	seen := map[uint64]string{}
	for _, extra := range []string{
		`"model":"m"`, `"model":"m2"`, `"model":"m","cache_salt":"a"`, `"model":"m","cache_salt":"b"`, `"model":"m","reasoning_effort":"a"`,
		`"model":"m","chat_template":"x"`, `"model":"m","chat_template_kwargs":{"enable_thinking":false}`, `"model":"m","chat_template_kwargs":{"enable_thinking":true}`,
		`"model":"m","tools":[{"function":{"name":"f"}}]`, `"model":"m","tools":[{"function":{"name":"g"}}]`, `"model":"m","system":"s"`, `"model":"m","documents":[{"text":"d"}]`,
		`"model":"m","previous_response_id":"r1"`, `"model":"m","previous_response_id":"r2"`,
	} {
		front := prefixOf(t, routing.ServeChat, salt, "{"+extra+","+messages+"}")
		back := prefixOf(t, routing.ServeChat, salt, "{"+messages+","+extra+"}")
		require.Len(t, front, blocksOf(9000))
		assert.Equal(t, front, back, "%s in front of and behind the messages", extra)
		for _, h := range front {
			assert.Empty(t, seen[h], "%s hashes like %s", extra, seen[h])
			seen[h] = extra
		}
	}
	roles := prefixOf(t, routing.ServeChat, salt, strings.Replace("{\"model\":\"m\","+messages+"}", `"user"`, `"system"`, 1))
	assert.Equal(t, blocksOf(9000), common(roles, prefixOf(t, routing.ServeChat, salt, "{\"model\":\"m\","+messages+"}")), "the role stands behind its content, in the unfinished block")

	a := prefixOf(t, routing.ServeChat, NewPrefixSalt([]byte("a")), `{"model":"m",`+messages+"}")
	b := prefixOf(t, routing.ServeChat, NewPrefixSalt([]byte("b")), `{"model":"m",`+messages+"}")
	assert.Zero(t, common(a, b), "clusters with different keys share no hash")
	assert.Nil(t, prefixOf(t, routing.ServeChat, nil, `{"model":"m",`+messages+"}"))
}

// Long tools are blocks of their own in front of the messages: agents share them before any text.
func TestPrefixLongToolsAreBlocks(t *testing.T) {
	salt := NewPrefixSalt(nil)
	tools := fmt.Sprintf(`"tools":[{"function":{"name":"f","description":%q}}]`, words(6, 7000))
	a := prefixOf(t, routing.ServeChat, salt, `{"model":"m",`+tools+`,"messages":[{"role":"user","content":"hello"}]}`)
	b := prefixOf(t, routing.ServeChat, salt, `{"model":"m","messages":[{"role":"user","content":"goodbye"}],`+tools+`}`)
	require.Len(t, a, blocksOf(7000))
	assert.Equal(t, a, b)
}

func TestPrefixMediaCountByTokensAndContent(t *testing.T) {
	salt := NewPrefixSalt(nil)
	image := func(data, text string) []uint64 {
		return prefixOf(t, routing.ServeChat, salt, fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}},{"type":"text","text":%q}]}]}`, data, text))
	}
	text := words(7, 8000)
	a, b, c := image("AAAA", text), image(strings.Repeat("AAAA", 100000), text), image("AAAB", text)
	assert.Len(t, a, blocksOf(4000+8000), "a thousand tokens and the text")
	assert.Len(t, b, len(a), "not by its bytes")
	assert.Zero(t, common(a, b))
	assert.Zero(t, common(a, c))
	assert.Equal(t, blocksOf(4000), common(a, image("AAAA", words(8, 8000))), "the same picture in front of other text")
}

func TestPrefixOfTokenIDs(t *testing.T) {
	ids := make([]string, 1500)
	for i := range ids {
		ids[i] = fmt.Sprint(i * 7 % 128000)
	}
	body := func(n int) string { return `{"prompt":[` + strings.Join(ids[:n], ",") + `]}` }
	salt := NewPrefixSalt(nil)
	a, b := prefixOf(t, routing.ServeCompletions, salt, body(1024)), prefixOf(t, routing.ServeCompletions, salt, body(1500))
	require.Len(t, a, blocksOf(4*1024), "an id is four bytes")
	assert.Equal(t, a, b[:len(a)])
}

func TestPrefixOfOtherServices(t *testing.T) {
	salt := NewPrefixSalt(nil)
	x, y := words(10, 3000), words(11, 3000)
	p := prefixOf(t, routing.ServeResponses, salt, fmt.Sprintf(`{"model":"m","input":%q,"instructions":%q}`, y, x))
	q := prefixOf(t, routing.ServeResponses, salt, fmt.Sprintf(`{"model":"m","instructions":%q,"input":[{"role":"user","content":[{"type":"input_text","text":%q}]}]}`, x, y))
	assert.Len(t, p, 2*blocksOf(3000))
	assert.Equal(t, p, q, "instructions come first wherever they stand")
	m := prefixOf(t, routing.ServeMessages, salt, fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"system":[{"type":"text","text":%q,"cache_control":{"type":"ephemeral"}}],"model":"m"}`, y, x))
	n := prefixOf(t, routing.ServeMessages, salt, fmt.Sprintf(`{"model":"m","system":%q,"messages":[{"role":"user","content":%q}]}`, x, y))
	assert.Len(t, m, 2*blocksOf(3000))
	assert.Equal(t, m, n)
}

// The stream hash does not depend on how its bytes come.
func TestBlockHashPieces(t *testing.T) {
	salt := NewPrefixSalt([]byte("x"))
	rnd := rand.New(rand.NewPCG(1, 1))
	data := []byte(words(12, 20000))
	whole := blockHash{salt: salt.keys()}
	whole.reset()
	whole.write(data)
	blocks := append([]uint64(nil), whole.blocks...)
	tail := whole.finish()
	require.Len(t, blocks, blocksOf(len(data)))
	for range 200 {
		h := blockHash{salt: salt.keys()}
		h.reset()
		for p := data; len(p) > 0; {
			n := min(len(p), rnd.IntN([]int{3, 70, 3000}[rnd.IntN(3)])+1)
			switch {
			case n == 1:
				h.writeByte(p[0])
			case rnd.IntN(2) == 0:
				h.writeString(string(p[:n]))
			default:
				h.write(p[:n])
			}
			p = p[n:]
		}
		require.Equal(t, blocks, h.blocks)
		require.Equal(t, tail, h.finish())
	}
	// Every bit of a block counts, and so does the length of the rest.
	for _, i := range []int{0, 17, 127} {
		other := bytes.Clone(data)
		other[i] ^= 1
		h := blockHash{salt: salt.keys()}
		h.reset()
		h.write(other)
		assert.NotEqual(t, blocks[0], h.blocks[0], i)
		assert.Equal(t, blocks[1:], h.blocks[1:])
	}
	sums := map[uint64]int{}
	for n := range 200 {
		h := blockHash{salt: salt.keys()}
		h.reset()
		h.write(make([]byte, n))
		s := h.finish()
		_, dup := sums[s]
		require.False(t, dup, "%d zero bytes hash like %d", n, sums[s])
		sums[s] = n
	}
}

func TestSessionHash(t *testing.T) {
	a, b := NewPrefixSalt([]byte("a")), NewPrefixSalt([]byte("b"))
	assert.Zero(t, a.Session(""))
	assert.NotZero(t, a.Session("s"))
	assert.Equal(t, a.Session("s"), NewPrefixSalt([]byte("a")).Session("s"))
	assert.NotEqual(t, a.Session("s"), a.Session("t"))
	assert.NotEqual(t, a.Session("s"), b.Session("s"))
}

func BenchmarkPeek(b *testing.B) {
	salt := NewPrefixSalt([]byte("bench"))
	prose := strings.Repeat(`The quick brown fox jumps over the lazy dog while counting tokens.\n`, 1<<20/67)
	code := strings.Repeat(`\tif err := f(\"x\"); err != nil {\n\t\treturn err\n\t}\n`, 1<<20/56)
	for name, body := range map[string]string{
		"small":    `{"model":"m","messages":[{"role":"system","content":"You are helpful."},{"role":"user","content":"Say hello to the world."}],"max_tokens":64,"stream":true}`,
		"prose1MB": `{"model":"m","messages":[{"role":"user","content":"` + prose + `"}]}`,
		"plain1MB": `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 1<<20/5) + `"}]}`,
		"code1MB":  `{"model":"m","messages":[{"role":"user","content":"` + code + `"}]}`,
		"image1MB": `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:` + strings.Repeat("ABCD", 1<<18) + `"}}]}]}`,
	} {
		for _, s := range []struct {
			name string
			salt *PrefixSalt
		}{{"", nil}, {"+prefix", salt}} {
			b.Run(name+s.name, func(b *testing.B) {
				buf := []byte(body)
				b.SetBytes(int64(len(buf)))
				b.ReportAllocs()
				for b.Loop() {
					p := NewPeeker(routing.ServeChat, "application/json", "", s.salt)
					for rest := buf; len(rest) > 0; {
						n := min(len(rest), 32<<10)
						_, _ = p.Write(rest[:n])
						rest = rest[n:]
					}
					if _, err := p.Done(); err != nil {
						b.Fatal(err)
					}
					p.Close()
				}
			})
		}
	}
}

// Where blocks end hangs on nothing but the position: agents that know different things of a model's tokens agree.
func TestBlocksAreALadder(t *testing.T) {
	var ends, in []int
	for at := 0; at < 24<<10; {
		at += blockSize(at)
		ends = append(ends, at)
		if carried(at) {
			in = append(in, at)
		}
	}
	assert.Equal(t, []int{128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048, 2304}, ends[:17])
	assert.Equal(t, []int{16 << 10, 18 << 10, 20 << 10, 22 << 10, 24 << 10}, ends[len(ends)-5:])
	assert.Equal(t, []int{256, 512, 1024, 2048, 4096, 6144, 8192, 10240, 12288, 14336, 16384, 18432, 20480, 22528, 24576}, in)
	for i, end := range ends[1:] {
		assert.LessOrEqual(t, end-ends[i], max(leastBlock, end/8), "a prefix is known to an eighth")
	}

	k, err := peek(routing.ServeChat, "application/json", "", NewPrefixSalt(nil), fmt.Appendf(nil, `{"messages":[{"role":"user","content":%q}]}`, words(1, 3000)))
	require.NoError(t, err)
	for i, h := range k.Prefix {
		assert.Equal(t, !carried(ends[i]), h&routing.FineBlock != 0, ends[i])
		assert.Equal(t, ends[i], int(k.Ends[i]))
	}
	require.Len(t, k.Ends, blocksOf(3000))
	tokens := k.ends(12_000) // four tokens a byte, as with simulated engines
	assert.InDelta(t, 512, int(tokens[0]), 2)
	assert.InDelta(t, 12_000, int(tokens[len(tokens)-1]), 4*256*2)
	assert.Equal(t, tokens, k.ends(12_000), "twice the same")
}

func TestSaltFollowsTheKey(t *testing.T) {
	s := NewPrefixSalt([]byte("a"))
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}]}`, words(1, 3000))
	before, session := prefixOf(t, routing.ServeChat, s, body), s.Session("x")
	assert.False(t, s.Set([]byte("a")))
	assert.Equal(t, before, prefixOf(t, routing.ServeChat, s, body))
	assert.True(t, s.Set([]byte("b")))
	assert.Zero(t, common(before, prefixOf(t, routing.ServeChat, s, body)))
	assert.NotEqual(t, session, s.Session("x"))
	assert.Equal(t, prefixOf(t, routing.ServeChat, NewPrefixSalt([]byte("b")), body), prefixOf(t, routing.ServeChat, s, body))
}

func TestSipHash(t *testing.T) {
	// The vector of the reference implementation for 16 bytes: key and message count up from 0.
	key := [2]uint64{0x0706050403020100, 0x0f0e0d0c0b0a0908}
	assert.Equal(t, uint64(0x3f2acc7f57c29bdb), sipHash(key, key[0], key[1]))
}
