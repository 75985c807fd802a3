package proxy

import (
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/grapevine-lb/grapevine/routing"
)

// What answers teach about a model. Tokenizers differ: a byte of a prompt is a quarter of a token for one and a third for
// the next, and an image is 85 tokens or 2,000. The engine's usage says how many there were.
const (
	lessonMemory = 128 // answers after which an old one weighs 37 %
	lessonModels = 256 // names kept; more are not learned
	// lessonBytes is the least prompt that teaches: the template around a shorter one would count as its text.
	lessonBytes = 256
	// A ratio beyond these is a broken usage and no tokenizer.
	leastPerToken, mostPerToken = 0.1, 16.0
	// Below fewPerToken only a prompt of fewBytes teaches: a short one behind a long template of the engine's own looks the same.
	fewPerToken, fewBytes = 0.5, 1024
	// otherUnit: where a model's first ratio is so many times what was assumed, a rate that was learned so far was none.
	otherUnit                   = 1.5
	leastPerMedia, mostPerMedia = 1.0, 100_000.0
	lessonSlots                 = 42 // of output lengths, two for each doubling: up to 2^20 tokens
)

// Learned is what is known about a model from its answers.
type Learned struct {
	Model         string
	Answers       uint64               // that told their usage
	BytesPerToken routing.Opt[float64] // of prompts
	TokensPerPart routing.Opt[float64] // of an image, audio or file
	OutputP50     routing.Opt[int]     // tokens of an answer
	OutputP90     routing.Opt[int]
}

// lessons are those of all models. They are safe for concurrent use; the zero value is ready.
type lessons struct {
	mu     sync.Mutex
	models map[string]*lesson
}

// lesson is one model's. All sums fade alike, so that their ratios are means over the last answers.
type lesson struct {
	answers       uint64
	bytes, tokens float64
	parts, inside float64              // media parts, and the tokens that were inside of them
	outputs       [lessonSlots]float64 // in units of unit
	count         float64
	unit          float64 // what an answer counts, so that the old ones fade without being touched
}

// note takes the usage of an answer that came whole, and returns what is known about the model's prompts now;
// first means that nothing was before.
func (l *lessons) note(model string, k *Peek, u *replyUsage) (bytesPerToken routing.Opt[float64], first bool) {
	if !u.Prompt.OK && !u.Completion.OK {
		return bytesPerToken, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.models[model]
	if m == nil {
		if len(l.models) >= lessonModels {
			return bytesPerToken, false
		}
		if l.models == nil {
			l.models = map[string]*lesson{}
		}
		m = &lesson{}
		l.models[model] = m
	}
	knew := m.perToken().OK
	m.answers++
	const fade = 1 - 1.0/lessonMemory
	if prompt := float64(u.Prompt.V - k.TokenIDs); u.Prompt.OK && prompt > 0 {
		switch {
		case k.Media == 0 && k.PromptBytes >= lessonBytes:
			if r := float64(k.PromptBytes) / prompt; r >= leastPerToken && r <= mostPerToken && (r >= fewPerToken || k.PromptBytes >= fewBytes) {
				m.bytes, m.tokens = m.bytes*fade+float64(k.PromptBytes), m.tokens*fade+prompt
			}
		case k.Media > 0:
			inside := prompt - float64(k.PromptBytes)/m.perToken().Or(defaultPerToken)
			if r := inside / float64(k.Media); r >= leastPerMedia && r <= mostPerMedia {
				m.parts, m.inside = m.parts*fade+float64(k.Media), m.inside*fade+inside
			}
		}
	}
	if n := u.Completion; n.OK && n.V > 0 && k.N <= 1 {
		if m.unit > 1e9 || m.unit == 0 {
			for i := range m.outputs {
				m.outputs[i] /= max(m.unit, 1)
			}
			m.count, m.unit = m.count/max(m.unit, 1), 1
		}
		m.unit /= fade
		m.count += m.unit
		m.outputs[outputSlot(n.V)] += m.unit
	}
	bytesPerToken = m.perToken()
	return bytesPerToken, bytesPerToken.OK && !knew
}

// defaultPerToken is the number of bytes that a token is believed to have before anything is learned.
const defaultPerToken = 4.0

func (m *lesson) perToken() routing.Opt[float64] {
	if m.tokens == 0 {
		return routing.Opt[float64]{}
	}
	return routing.Some(m.bytes / m.tokens)
}

func (m *lesson) perPart() routing.Opt[float64] {
	if m.parts == 0 {
		return routing.Opt[float64]{}
	}
	return routing.Some(m.inside / m.parts)
}

// outputSlot is where n tokens are counted: slot i holds up to 2^(i/2).
func outputSlot(n int) int {
	return min(lessonSlots-1, max(0, int(math.Ceil(2*math.Log2(float64(n))-1e-9))))
}

// quantile is the upper bound of the slot below which the share q of the answers lies.
func (m *lesson) quantile(q float64) routing.Opt[int] {
	if m.count == 0 {
		return routing.Opt[int]{}
	}
	sum := 0.0
	for i, n := range m.outputs {
		if sum += n; sum >= (q-1e-11)*m.count {
			return routing.Some(int(math.Round(math.Exp2(float64(i) / 2))))
		}
	}
	return routing.Some(1 << (lessonSlots / 2))
}

// tokens estimates a prompt's length with what was learned about its model.
func (l *lessons) tokens(model string, k *Peek) int {
	l.mu.Lock()
	m := l.models[model]
	if m == nil {
		l.mu.Unlock()
		return k.PromptTokens
	}
	perToken, perPart := m.perToken().Or(defaultPerToken), m.perPart().Or(mediaTokens)
	l.mu.Unlock()
	return k.Tokens(perToken, perPart)
}

// Learned tells what is known about each model, by name.
func (p *Proxy) Learned() []Learned {
	l := &p.lessons
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Learned
	for name, m := range l.models {
		out = append(out, Learned{Model: name, Answers: m.answers, BytesPerToken: m.perToken(), TokensPerPart: m.perPart(),
			OutputP50: m.quantile(0.5), OutputP90: m.quantile(0.9)})
	}
	slices.SortFunc(out, func(a, b Learned) int { return strings.Compare(a.Model, b.Model) })
	return out
}
