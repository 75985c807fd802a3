package enginesim

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
)

// dimensions of a vector.
const dimensions = 16

// embeddings is POST /v1/embeddings: vectors of unit length that depend on the text and the seed alone.
func (s *Server) embeddings(w http.ResponseWriter, r *http.Request) {
	var in struct {
		request
		EncodingFormat string `json:"encoding_format"`
	}
	if !s.decode(w, r, &in) {
		return
	}
	ps, err := textPrompts(in.Input)
	if err != nil {
		s.refuse(w, problem{kind: missingField, param: "input"})
		return
	}
	c := s.newCall(w, r, &request{Model: in.Model, embed: true}, false, ps, 1)
	if c == nil {
		return
	}
	defer s.leave(c)
	c.whole(w, r, func([]choice) []byte {
		b := []byte(`{"id":"` + c.answer.id + `","object":"list","created":` + fmt.Sprint(c.answer.created) + `,`)
		b = appendField(b, "model", c.answer.model)
		b = append(b, `,"data":[`...)
		for i, o := range c.outputs {
			if i > 0 {
				b = append(b, ',')
			}
			b = fmt.Appendf(b, `{"index":%d,"object":"embedding","embedding":`, i)
			v := vector(o.text.hash)
			if in.EncodingFormat == "base64" {
				var raw []byte
				for _, f := range v {
					raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(f))
				}
				b = append(appendString(b, base64.StdEncoding.EncodeToString(raw)), '}')
				continue
			}
			j, _ := json.Marshal(v) // numbers only
			b = append(append(b, j...), '}')
		}
		return fmt.Appendf(b, `],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0,"prompt_tokens_details":null}}`, c.answer.prompt, c.answer.prompt)
	})
}

func vector(hash uint64) []float32 {
	v := make([]float32, dimensions)
	sum := 0.0
	for i := range v {
		hash = mix(hash + uint64(i) + 1)
		x := float64(int64(hash)) / (1 << 63)
		v[i] = float32(x)
		sum += x * x
	}
	for i := range v {
		v[i] /= float32(math.Sqrt(sum))
	}
	return v
}
