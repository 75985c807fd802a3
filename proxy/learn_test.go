package proxy

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/routing"
)

func used(prompt, completion int) *replyUsage {
	return &replyUsage{Prompt: routing.Some(prompt), Completion: routing.Some(completion)}
}

func TestLessonsLearnTheTokenizer(t *testing.T) {
	var l lessons
	k := Peek{PromptBytes: 1700, PromptTokens: 425, N: 1}
	assert.Equal(t, 425, l.tokens("m", &k), "a quarter of the bytes, before anything is known")
	l.note("m", &Peek{PromptBytes: 40, N: 1}, used(30, 5)) // mostly template
	assert.Equal(t, 425, l.tokens("m", &k))
	l.note("m", &Peek{PromptBytes: 3400, N: 1}, used(2000, 5))
	assert.Equal(t, 1000, l.tokens("m", &k))
	assert.Equal(t, 425, l.tokens("another", &k))
	for range 1000 { // another release of the model, another tokenizer
		l.note("m", &Peek{PromptBytes: 4000, N: 1}, used(800, 5))
	}
	assert.InDelta(t, 340, l.tokens("m", &k), 2)
	l.note("m", &Peek{PromptBytes: 4000, N: 1}, used(1, 5)) // a broken usage
	assert.InDelta(t, 340, l.tokens("m", &k), 2)
}

func TestLessonsLearnImages(t *testing.T) {
	var l lessons
	l.note("m", &Peek{PromptBytes: 4000, N: 1}, used(1000, 5))
	l.note("m", &Peek{PromptBytes: 400, Media: 2, N: 1}, used(100+2*600, 5))
	assert.Equal(t, 25+3*600, l.tokens("m", &Peek{PromptBytes: 100, Media: 3}))
	assert.Equal(t, 7+25, l.tokens("m", &Peek{PromptBytes: 100, TokenIDs: 7}))
}

// The quantiles against those of all lengths, sorted: they lie within the half doubling of a slot.
func TestLessonsLearnOutputLengths(t *testing.T) {
	p := &Proxy{}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 4000 {
		p.lessons.note("m", &Peek{N: 1}, used(10, 100+rnd.IntN(900)))
		p.lessons.note("m", &Peek{N: 4}, used(10, 100_000)) // four answers in one say nothing about one
	}
	got := p.Learned()
	assert.Len(t, got, 1)
	assert.InDelta(t, 550, got[0].OutputP50.V, 250)
	assert.InDelta(t, 910, got[0].OutputP90.V, 250)
	assert.EqualValues(t, 8000, got[0].Answers)
	assert.False(t, got[0].BytesPerToken.OK, "unknown, not zero")
	for n, slot := range map[int]int{1: 0, 2: 2, 3: 4, 4: 4, 1 << 20: 40, 1 << 30: 41} {
		assert.Equal(t, slot, outputSlot(n), n)
	}
}

func TestLessonsAreBounded(t *testing.T) {
	var l lessons
	for i := range 10 * lessonModels {
		l.note(fmt.Sprint(i), &Peek{N: 1}, used(10, 1))
	}
	assert.Len(t, l.models, lessonModels)
}
