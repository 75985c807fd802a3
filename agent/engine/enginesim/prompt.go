package enginesim

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
)

// imageTokens is what an image, audio or file part of a message counts.
const imageTokens = 576

// request is the body of a generating request, of all APIs in one.
type request struct {
	Model                string          `json:"model"`
	Messages             []message       `json:"messages"`
	Prompt               json.RawMessage `json:"prompt"`
	Input                json.RawMessage `json:"input"`
	Instructions         string          `json:"instructions"`
	PreviousResponseID   string          `json:"previous_response_id"`
	Tools                json.RawMessage `json:"tools"`
	Stream               bool            `json:"stream"`
	StreamOptions        *streamOptions  `json:"stream_options"`
	MaxTokens            *int            `json:"max_tokens"`
	MaxCompletionTokens  *int            `json:"max_completion_tokens"`
	MaxOutputTokens      *int            `json:"max_output_tokens"`
	N                    *int            `json:"n"`
	Stop                 json.RawMessage `json:"stop"`
	Echo                 bool            `json:"echo"`
	Temperature          *float64        `json:"temperature"`
	ContinueFinalMessage bool            `json:"continue_final_message"`
	AddGenerationPrompt  *bool           `json:"add_generation_prompt"`

	embed bool // nothing is generated
}

type streamOptions struct {
	IncludeUsage         bool `json:"include_usage"`
	ContinuousUsageStats bool `json:"continuous_usage_stats"`
}

type message struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// maxTokens is the client's limit, whatever the API calls it; 0 if there is none.
func (r *request) maxTokens() int {
	for _, p := range []*int{r.MaxCompletionTokens, r.MaxTokens, r.MaxOutputTokens} {
		if p != nil && *p > 0 {
			return *p
		}
	}
	return 0
}

// stops are the strings at which the answer ends.
func (r *request) stops() []string {
	var one string
	var many []string
	if json.Unmarshal(r.Stop, &one) == nil && one != "" {
		return []string{one}
	}
	_ = json.Unmarshal(r.Stop, &many)
	return many
}

// prompt is what the model sees.
type prompt struct {
	text   string
	extra  int    // tokens of parts that are no text
	prefix string // the part of the answer that the client gave, for dialects that repeat it
}

func (p prompt) tokens() int { return max(1, tokensOf(len(p.text))+p.extra) }

// chatPrompt renders messages as the template does. With open, a last message of the assistant is left open and goes on.
func chatPrompt(r *request, open bool) prompt {
	var p prompt
	var b strings.Builder
	if len(r.Tools) > 0 {
		b.WriteString("<|tools|>")
		b.Write(r.Tools)
		b.WriteByte('\n')
	}
	for i, m := range r.Messages {
		content, extra := contentOf(m.Content)
		p.extra += extra
		b.WriteString("<|im_start|>" + m.Role + "\n" + content)
		if open && i == len(r.Messages)-1 && m.Role == "assistant" {
			p.text, p.prefix = b.String(), content
			return p
		}
		b.WriteString("<|im_end|>\n")
	}
	b.WriteString("<|im_start|>assistant\n")
	p.text = b.String()
	return p
}

// contentOf is a message's text. Parts that are no text are named by their hash and count as imageTokens.
func contentOf(raw json.RawMessage) (content string, extra int) {
	if json.Unmarshal(raw, &content) == nil {
		return content, 0
	}
	var parts []map[string]json.RawMessage
	if json.Unmarshal(raw, &parts) != nil {
		return string(raw), 0
	}
	var b strings.Builder
	for _, part := range parts {
		var s string
		if json.Unmarshal(part["text"], &s) == nil && s != "" {
			b.WriteString(s)
			continue
		}
		t := newText(0, 512)
		for _, k := range []string{"image_url", "input_audio", "file", "input_image"} {
			t.add(string(part[k]))
		}
		b.WriteString("<|part " + strconv.FormatUint(t.hash, 16) + "|>")
		extra += imageTokens
	}
	return b.String(), extra
}

var errPrompt = errors.New("prompt is neither a string nor a list of strings nor a list of tokens")

// textPrompts reads a completion's prompt or an embedding's input: a string, strings, tokens, or lists of tokens.
func textPrompts(raw json.RawMessage) ([]prompt, error) {
	var one string
	var many []string
	var tokens []int
	var lists [][]int
	switch {
	case len(bytes.TrimSpace(raw)) == 0:
		return nil, errPrompt
	case json.Unmarshal(raw, &one) == nil:
		return []prompt{{text: one}}, nil
	case json.Unmarshal(raw, &many) == nil:
	case json.Unmarshal(raw, &tokens) == nil:
		lists = [][]int{tokens}
	case json.Unmarshal(raw, &lists) == nil:
	default:
		return nil, errPrompt
	}
	var ps []prompt
	for _, s := range many {
		ps = append(ps, prompt{text: s})
	}
	for _, l := range lists {
		var b strings.Builder
		for _, t := range l {
			b.Write([]byte{byte(t >> 24), byte(t >> 16), byte(t >> 8), byte(t)})
		}
		ps = append(ps, prompt{text: b.String()})
	}
	if len(ps) == 0 {
		return nil, errPrompt
	}
	return ps, nil
}

// responsesPrompt turns the input of /v1/responses into messages.
func responsesPrompt(r *request) error {
	if r.Instructions != "" {
		c, _ := json.Marshal(r.Instructions)
		r.Messages = append(r.Messages, message{"system", c})
	}
	var one string
	var items []message
	if json.Unmarshal(r.Input, &one) == nil {
		r.Messages = append(r.Messages, message{"user", r.Input})
		return nil
	}
	if err := json.Unmarshal(r.Input, &items); err != nil || len(items) == 0 {
		return errors.New("input is neither a string nor a list of items")
	}
	r.Messages = append(r.Messages, items...)
	return nil
}
