package enginesim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// store keeps the newest responses, because clients may ask for them again.
type store struct {
	byID  map[string]response
	order []string
}

type response struct {
	body     []byte
	messages []message // the conversation up to and with the answer
}

const storeSize = 1000

// put keeps a response; the server's mutex guards the store.
func (st *store) put(id string, r response) {
	if st.byID == nil {
		st.byID = map[string]response{}
	}
	if len(st.order) == storeSize {
		delete(st.byID, st.order[0])
		st.order = st.order[1:]
	}
	st.byID[id] = r
	st.order = append(st.order, id)
}

// respond is POST /v1/responses, with text in and text out.
func (s *Server) respond(w http.ResponseWriter, r *http.Request) {
	var req request
	if !s.decode(w, r, &req) {
		return
	}
	if id := req.PreviousResponseID; id != "" {
		s.mu.Lock()
		before, ok := s.responses.byID[id]
		s.mu.Unlock()
		if !ok {
			s.reply(w, http.StatusNotFound, "application/json", openAIError("Response with id '"+id+"' not found.", "NotFoundError", "response_id", 404))
			return
		}
		req.Messages = append(req.Messages, before.messages...)
	}
	if err := responsesPrompt(&req); err != nil {
		s.refuse(w, problem{kind: missingField, param: "input"})
		return
	}
	c := s.newCall(w, r, &req, true, []prompt{chatPrompt(&req, false)}, 0)
	if c == nil {
		return
	}
	defer s.leave(c)
	id := "resp_" + strings.TrimPrefix(c.answer.id, "chatcmpl-")
	var said strings.Builder
	object := func(status, text string) []byte {
		b := appendField([]byte{'{'}, "id", id)
		b = appendInt(append(b, `,"object":"response",`...), "created_at", int(c.answer.created))
		b = appendField(append(b, ','), "status", status)
		b = appendField(append(b, ','), "model", c.answer.model)
		b = append(b, `,"output":[`...)
		if status != "in_progress" {
			b = appendField(append(b, `{"id":"msg_`+id[5:]+`","type":"message","role":"assistant","status":"completed","content":[{"type":"output_text","annotations":[],`...), "text", text)
			b = append(b, `}]}`...)
		}
		b = append(b, `],"parallel_tool_calls":true,"tool_choice":"auto","tools":[],"error":null,"incomplete_details":null,"instructions":null,"metadata":{},"previous_response_id":`...)
		if p := req.PreviousResponseID; p != "" {
			b = appendString(b, p)
		} else {
			b = append(b, "null"...)
		}
		if status == "in_progress" {
			return append(b, `,"usage":null}`...)
		}
		a := &c.answer
		return fmt.Appendf(b, `,"usage":{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d},"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":%d}}`, a.prompt, a.cached, a.output, a.prompt+a.output)
	}
	keep := func(body []byte, text string) {
		content, _ := json.Marshal(text)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.responses.put(id, response{body, append(req.Messages, message{"assistant", content})})
	}
	if !req.Stream {
		c.whole(w, r, func(cs []choice) []byte {
			b := object("completed", cs[0].text)
			keep(b, cs[0].text)
			return b
		})
		return
	}
	number := 0
	typed := func(b []byte, typ string, more []byte) []byte {
		b = append(b, "event: "+typ+"\n"...)
		b = event(b, func(b []byte) []byte {
			b = appendField(append(b, '{'), "type", typ)
			b = appendInt(append(b, ','), "sequence_number", number)
			return append(append(append(b, ','), more...), '}')
		})
		number++
		return b
	}
	wrapped := func(body []byte) []byte { return append([]byte(`"response":`), body...) }
	c.stream(w, r, sink{
		first: func(b []byte) []byte { return typed(b, "response.created", wrapped(object("in_progress", ""))) },
		delta: func(b []byte, text, _ string) []byte {
			said.WriteString(text)
			return typed(b, "response.output_text.delta", appendField([]byte(`"item_id":"msg_`+id[5:]+`","output_index":0,"content_index":0,"logprobs":[],`), "delta", text))
		},
		finish: func(b []byte, reason string) []byte {
			if reason == "abort" {
				return typed(b, "response.failed", wrapped(object("failed", said.String())))
			}
			return b
		},
		end: func(b []byte) []byte {
			body := object("completed", said.String())
			keep(body, said.String())
			return typed(b, "response.completed", wrapped(body))
		},
	})
}

// stored is GET /v1/responses/{id}.
func (s *Server) stored(w http.ResponseWriter, id string) {
	s.mu.Lock()
	r, ok := s.responses.byID[id]
	s.mu.Unlock()
	if !ok {
		s.reply(w, http.StatusNotFound, "application/json", openAIError("Response with id '"+id+"' not found.", "NotFoundError", "response_id", 404))
		return
	}
	s.reply(w, http.StatusOK, "application/json", r.body)
}
