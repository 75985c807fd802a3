package engine

import "strings"

// Kind names an engine, as in GRAPEVINE_ENGINE_KIND.
type Kind string

const (
	Auto     Kind = "auto" // found out from what the engine answers
	VLLM     Kind = "vllm" // and the llm-d inference simulator, which speaks vLLM
	SGLang   Kind = "sglang"
	LlamaCpp Kind = "llamacpp"
	TGI      Kind = "tgi"
	TRTLLM   Kind = "trtllm" // trtllm-serve
	Triton   Kind = "triton" // Triton with the TensorRT-LLM backend
	LMDeploy Kind = "lmdeploy"
	NIM      Kind = "nim"
	Dynamo   Kind = "dynamo"
	Infinity Kind = "infinity"
	TEI      Kind = "tei"
	Ollama   Kind = "ollama"
	OpenAI   Kind = "openai" // any other engine with the OpenAI API: no load page is known
)

// tables in the order in which detection looks at their evidence: prefixes that others extend come later.
var tables = []*Table{
	&vllmTable, &sglangTable, &llamacppTable, &lmdeployTable, &tgiTable, &teiTable, &trtllmTable, &tritonTable,
	&dynamoTable, &nimTable, &infinityTable, &ollamaTable, &openaiTable,
}

// Kinds lists the values of GRAPEVINE_ENGINE_KIND.
func Kinds() []string {
	out := []string{string(Auto)}
	for _, t := range tables {
		out = append(out, string(t.Kind))
	}
	return out
}

// tableOf returns a kind's table, or nil.
func tableOf(k Kind) *Table {
	for _, t := range tables {
		if t.Kind == k {
			return t
		}
	}
	return nil
}

// valid tells whether k may be configured.
func (k Kind) valid() bool { return k == "" || k == Auto || tableOf(k) != nil }

func kindList() string { return strings.Join(Kinds(), ", ") }
