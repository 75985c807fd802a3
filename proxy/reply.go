package proxy

import (
	"strconv"

	"github.com/grapevine-lb/grapevine/routing"
)

// replyUsage is what an engine said about tokens; the last word counts.
type replyUsage struct {
	Prompt, Completion, Cached routing.Opt[int]
}

// replyError is an error object that an engine put into a reply.
type replyError struct {
	Code    string // a number or a name, as text
	Type    string
	Message string // at most 512 bytes
}

// replyDoc reads the documents of a reply, one after another: chat chunks, completions, Responses and
// Anthropic events, whole answers, and the engines' own (llama.cpp, TGI, SGLang, Ollama). Its fields hold the
// reply so far.
type replyDoc struct {
	keepText   int    // most bytes of text to keep; 0 = none
	plainWhole int    // of plain, in whole events
	plain      []byte // plain text of the answer
	textLost   bool   // text did not fit

	event replyEvent // of the present document
	runs  uint8      // pieces of plain text in it, 2 = more than one
	run   []byte     // the newest
	scan  jsonScan

	usage     replyUsage
	finishBuf [32]byte
	finishLen int
	wantID    bool
	hasID     bool
	id        string // the reply's, if wanted and not longer than 128 bytes
	err       *replyError

	name    [48]byte // type or object of the present document
	nameLen int
	rich    int // bytes of a container in a delta
	flat    replyError
}

// maxReplyID is the longest id of a reply, in bytes; a longer one is none of an engine.
const maxReplyID = 128

// finishReason is the last finish reason, "" if none came.
func (d *replyDoc) finishReason() string {
	switch s := d.finishBuf[:d.finishLen]; string(s) {
	case "stop":
		return "stop"
	case "length":
		return "length"
	case "tool_calls":
		return "tool_calls"
	case "abort":
		return "abort"
	default:
		return string(s)
	}
}

// said is the plain text of the whole events so far and whether it is all of it. keepText must have been set.
func (d *replyDoc) said() ([]byte, bool) { return d.plain[:d.plainWhole], !d.textLost }

func (d *replyDoc) startDoc() {
	d.scan.reset()
	d.event, d.nameLen = 0, 0
	if d.flat != (replyError{}) {
		d.flat = replyError{}
	}
}

// endDoc is behind the last byte of a document.
func (d *replyDoc) endDoc() {
	d.scan.finish()
	if !d.scan.complete() {
		d.event |= eventMalformed
	}
	switch string(d.name[:d.nameLen]) {
	case "error": // Responses and Anthropic events; vLLM's old flat errors
		d.event |= eventError
		if d.err == nil {
			d.err = new(replyError)
		}
		d.err.fill(d.flat)
	case "message_stop", "response.completed", "response.incomplete":
		d.event |= eventDone
	case "response.failed":
		d.event |= eventDone | eventError
	}
	d.plainWhole = len(d.plain)
}

// fill takes what e does not know yet.
func (e *replyError) fill(f replyError) {
	if e.Code == "" {
		e.Code = f.Code
	}
	if e.Type == "" {
		e.Type = f.Type
	}
	if e.Message == "" {
		e.Message = f.Message
	}
}

const (
	replyTop uint8 = 1 + iota
	replyChoices
	replyChoice
	replyDelta
	replyBlocks
	replyBlock
	replyUsageNode
	replyDetails
	replyErrorNode
	replyMessage
	replyResponse
	replyFinishNode
	replyToken

	textPlain
	textRich
	textRichTree

	keepName
	keepID
	keepFinish
	keepStop
	keepPrompt
	keepCompletion
	keepCached
	keepErrMessage
	keepErrType
	keepErrCode
	keepFlatMessage
	keepFlatCode
)

// begin implements jsonVisitor.
func (d *replyDoc) begin(node uint8, key []byte, kind byte) (jsonAct, uint8) {
	if kind == kindNull {
		return jsonSkip, 0
	}
	switch node {
	case 0:
		if kind == kindObject {
			return jsonEnter, replyTop
		}
	case replyTop:
		return d.beginTop(key, kind)
	case replyChoices:
		return jsonEnter, replyChoice
	case replyChoice:
		switch string(key) {
		case "delta", "message":
			return jsonEnter, replyDelta
		case "text":
			return jsonText, textPlain
		case "finish_reason":
			return d.finish(kind)
		case "logprobs":
			if kind == kindObject {
				d.event |= eventRich
			}
		}
	case replyDelta:
		return d.beginDelta(key, kind)
	case replyBlocks:
		return jsonEnter, replyBlock
	case replyBlock:
		switch string(key) {
		case "text":
			return jsonText, textPlain
		case "name", "thinking", "data":
			return jsonText, textRich
		}
	case replyUsageNode:
		switch string(key) {
		case "prompt_tokens", "input_tokens":
			return jsonKeep, keepPrompt
		case "completion_tokens", "output_tokens":
			return jsonKeep, keepCompletion
		case "cached_tokens", "cache_read_input_tokens":
			return jsonKeep, keepCached
		case "prompt_tokens_details", "input_tokens_details":
			return jsonEnter, replyDetails
		case "finish_reason":
			return d.finish(kind)
		}
	case replyDetails:
		if string(key) == "cached_tokens" {
			return jsonKeep, keepCached
		}
	case replyErrorNode:
		switch string(key) {
		case "message":
			return jsonKeep, keepErrMessage
		case "type":
			return jsonKeep, keepErrType
		case "code":
			return jsonKeep, keepErrCode
		}
	case replyMessage, replyResponse:
		switch string(key) {
		case "usage":
			return jsonEnter, replyUsageNode
		case "id":
			return jsonKeep, keepID
		case "error":
			return d.beginError(kind)
		}
	case replyFinishNode:
		if string(key) == "type" {
			return jsonKeep, keepFinish
		}
	case replyToken:
		if string(key) == "text" {
			return jsonText, textPlain
		}
	}
	return jsonSkip, 0
}

func (d *replyDoc) beginTop(key []byte, kind byte) (jsonAct, uint8) {
	switch string(key) {
	case "choices":
		return jsonEnter, replyChoices
	case "usage", "meta_info":
		return jsonEnter, replyUsageNode
	case "error":
		return d.beginError(kind)
	case "type", "object":
		return jsonKeep, keepName
	case "id":
		return jsonKeep, keepID
	case "delta":
		if kind == kindString { // Responses: text, reasoning, arguments; all but text are told by type
			return jsonText, textPlain
		}
		return jsonEnter, replyDelta
	case "message":
		if kind == kindString {
			return jsonKeep, keepFlatMessage
		}
		return jsonEnter, replyMessage
	case "code":
		return jsonKeep, keepFlatCode
	case "response":
		if kind == kindString {
			return jsonText, textPlain
		}
		return jsonEnter, replyResponse
	case "content_block":
		return jsonEnter, replyBlock
	case "content":
		if kind == kindArray {
			return jsonEnter, replyBlocks
		}
		return d.ifString(kind)
	case "text", "generated_text":
		return d.ifString(kind)
	case "token":
		return jsonEnter, replyToken
	case "finish_reason", "stop_reason", "done_reason":
		return d.finish(kind)
	case "stop", "done":
		return jsonKeep, keepStop
	case "tokens_evaluated", "prompt_eval_count":
		return jsonKeep, keepPrompt
	case "tokens_predicted", "eval_count":
		return jsonKeep, keepCompletion
	}
	return jsonSkip, 0
}

func (d *replyDoc) ifString(kind byte) (jsonAct, uint8) {
	if kind == kindString {
		return jsonText, textPlain
	}
	return jsonSkip, 0
}

func (d *replyDoc) beginError(kind byte) (jsonAct, uint8) {
	if kind == kindFalse {
		return jsonSkip, 0
	}
	d.event |= eventError
	if d.err == nil {
		d.err = new(replyError)
	}
	if kind == kindObject {
		return jsonEnter, replyErrorNode
	}
	return jsonKeep, keepErrMessage
}

func (d *replyDoc) finish(kind byte) (jsonAct, uint8) {
	if kind == kindObject {
		return jsonEnter, replyFinishNode
	}
	return jsonKeep, keepFinish
}

func (d *replyDoc) beginDelta(key []byte, kind byte) (jsonAct, uint8) {
	switch string(key) {
	case "content", "text":
		if kind == kindString {
			return jsonText, textPlain
		}
	case "role", "type", "token_ids", "prompt_token_ids", "stop_sequence":
		return jsonSkip, 0
	case "stop_reason":
		return d.finish(kind)
	}
	switch kind {
	case kindString:
		return jsonText, textRich
	case kindObject, kindArray:
		d.rich = 0
		return jsonText, textRichTree
	}
	return jsonSkip, 0
}

// text implements jsonVisitor.
func (d *replyDoc) text(id uint8, b []byte) {
	switch id {
	case textRichTree:
		d.rich += len(b)
	case textRich:
		d.event |= eventContent | eventRich
	case textPlain:
		d.event |= eventContent
		d.run, d.runs = b, min(d.runs+1, 2)
		d.keep(b)
	}
}

// keep keeps plain text.
func (d *replyDoc) keep(b []byte) {
	switch {
	case d.keepText == 0:
	case len(d.plain)+len(b) > d.keepText:
		d.textLost = true
	default:
		d.plain = append(d.plain, b...)
	}
}

// value implements jsonVisitor.
func (d *replyDoc) value(id uint8, v []byte, kind byte, cut bool) {
	switch id {
	case keepName:
		if kind == kindString && string(d.name[:d.nameLen]) != "error" {
			d.nameLen = copy(d.name[:], v)
		}
	case keepID:
		if !d.hasID && kind == kindString && len(v) > 0 && len(v) <= maxReplyID {
			if d.hasID = true; d.wantID {
				d.id = string(v)
			}
		}
	case keepFinish:
		if kind != kindString || len(v) == 0 {
			return
		}
		d.event |= eventFinish
		d.finishLen = copy(d.finishBuf[:], v)
		if string(v) == "abort" {
			d.event |= eventAbort
		}
	case keepStop:
		if kind == kindTrue {
			d.event |= eventFinish
			if d.finishLen == 0 {
				d.finishLen = copy(d.finishBuf[:], "stop")
			}
		}
	case keepPrompt, keepCompletion, keepCached:
		if kind != kindNumber {
			return
		}
		d.event |= eventUsage
		n := routing.Some(count(v))
		switch id {
		case keepPrompt:
			d.usage.Prompt = n
		case keepCompletion:
			d.usage.Completion = n
		default:
			d.usage.Cached = n
		}
	case keepErrMessage:
		d.err.Message = string(v)
	case keepErrType:
		d.err.Type = string(v)
	case keepErrCode:
		d.err.Code = string(v)
	case keepFlatMessage:
		d.flat.Message = string(v)
	case keepFlatCode:
		d.flat.Code = string(v)
	}
}

// end implements jsonVisitor.
func (d *replyDoc) end(id uint8) {
	if id == textRichTree && d.rich > len("[]") {
		d.event |= eventContent | eventRich
	}
}

// status is the code of an error as an HTTP status, 0 if it is none.
func (e *replyError) status() int {
	n, err := strconv.Atoi(e.Code)
	if err != nil || n < 400 || n > 599 {
		return 0
	}
	return n
}
