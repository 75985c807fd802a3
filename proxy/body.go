package proxy

import (
	"errors"
	"mime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/grapevine-lb/grapevine/routing"
)

// mediaTokens is what an image, audio or file part counts as, whatever its bytes.
const mediaTokens = 1000

// Peek is what the agent learns from a request's body. Unknown strings are empty, unknown numbers 0.
type Peek struct {
	Model    string
	HasModel bool // a top-level "model" that is a string, in exactly this case; of several the last

	Stream       bool // the client asks for a stream; the reply's own headers have the last word
	IncludeUsage bool // stream_options.include_usage
	MaxTokens    int  // most tokens of output; 0 = not said
	N            int  // answers asked for, at least 1

	ServiceTier        string
	User               string // user, else metadata.user_id
	CacheKey           string // prompt_cache_key
	Session            string // prompt_cache_key, else session_id, else User
	PreviousResponseID string

	PromptBytes  int // bytes of prompt text after decoding, tools included, media not
	PromptTokens int // estimate: a quarter of PromptBytes + TokenIDs + mediaTokens for each of Media
	TokenIDs     int // prompt tokens given as numbers
	Media        int // image, audio and file parts

	// Prefix is routing.Request.Prefix: nil without a salt. Ends are where its blocks end in the Hashed bytes that stand for
	// the prompt (media count there by their tokens). Both are the caller's.
	Prefix []uint64
	Ends   []uint32
	Hashed int

	// Continuable tells that a broken stream of this request may be continued elsewhere (design 6.8), as far
	// as the request goes. Otherwise ContinueBar names the first field that forbids it.
	Continuable bool
	ContinueBar string
	// LastRole is the role of the last message: "assistant" is an open turn, to which a continuation appends.
	LastRole string
}

// Tokens is the prompt's length in tokens with a learned number of bytes per token (> 0), and tokens per
// media part (> 0).
func (p *Peek) Tokens(bytesPerToken, perMedia float64) int {
	return int(float64(p.PromptBytes)/bytesPerToken+float64(p.Media)*perMedia) + p.TokenIDs
}

// ends turns Ends into what routing.Request.Ends wants, in place, for a prompt of that many tokens.
func (p *Peek) ends(tokens int) []uint32 {
	for i, end := range p.Ends {
		p.Ends[i] = uint32(float64(tokens) * float64(end) / float64(p.Hashed))
	}
	p.Hashed = tokens
	return p.Ends
}

// Reasons why a body gave no full reading. They are for logs and counters and never a reason to refuse:
// the engine judges its fields.
var (
	errPeekJSON     = errors.New("body is not one JSON object")
	errPeekForm     = errors.New("body is not the multipart form that its content type says")
	errPeekEncoding = errors.New("body has a content encoding that is not read")
	errPeekBomb     = errors.New("compressed body grows beyond the limit of the peek")
	errPeekType     = errors.New("body has a content type that is not read")
)

// Peeker reads a request's body once, as it arrives, and leaves the bytes alone. It is fed by Write and
// asked by Done, then closed. Memory is constant but for what Peek holds. Not for concurrent use.
type Peeker struct {
	scan jsonScan
	salt *saltKeys
	peeking

	main   blockHash // messages, prompt, input
	system blockHash // system, instructions: rendered before main wherever they stand
	tools  blockHash // rendered before system
	extra  blockHash // one value of the salt at a time
	media  blockHash // media parts of one content part

	model  string // the newest one read, in any body
	barred string // the newest field that barred a continuation, likewise
	start  chainStart
}

// peeking is what a Peeker knows of the body that it reads.
type peeking struct {
	form *formScan
	gzip *gunzip
	err  error // decided by the headers
	chat bool  // a service whose streams can be continued
	svc  routing.Service
	peek Peek

	cur          *blockHash // the stream that prompt text of the present top-level field belongs to
	salts        [peekSalts]uint64
	salted       bool   // one of them is set
	bytes        [3]int // of main, system, tools
	seen         uint32 // prompt fields that came; one that comes again replaces
	field        uint8  // salt field being read
	maxTokens    [3]int // max_tokens, max_completion_tokens, max_output_tokens and the engines' own
	sessionID    string
	metaUser     string
	role         [16]byte
	roleLen      int
	parts        int  // text parts so far in this content
	partMedia    bool // the content part has media
	promptFields int  // prompts that are not null
	object       bool // a whole top-level object was read
}

var peekers = sync.Pool{New: func() any { return new(Peeker) }}

// NewPeeker starts a reading. contentType and contentEncoding are the request's headers; JSON (also where the
// type is missing or wrong, as engines are lenient) and multipart/form-data are read, plain or gzip. Without
// a salt no prefix hashes are taken. End it by Close.
func NewPeeker(svc routing.Service, contentType, contentEncoding string, salt *PrefixSalt) *Peeker {
	p := peekers.Get().(*Peeker)
	p.peeking = peeking{svc: svc, chat: svc&(routing.ServeChat|routing.ServeCompletions) != 0}
	p.salt = salt.keys()
	for _, h := range [...]*blockHash{&p.main, &p.system, &p.tools} { // the others begin where they are used
		h.salt = p.salt
		h.reset()
	}
	p.extra.salt, p.media.salt = p.salt, p.salt
	p.scan.reset()
	p.cur = &p.main
	p.scan.v = p
	p.peek.N = 1
	p.peek.Continuable = p.chat
	if !p.chat {
		p.peek.ContinueBar = "path"
	}
	if i := strings.IndexByte(contentType, ';'); i >= 0 || !strings.EqualFold(contentType, "application/json") {
		media, params, err := mime.ParseMediaType(contentType)
		switch {
		case err == nil && media == "multipart/form-data" && params["boundary"] != "":
			p.form = newFormScan(params["boundary"], p.formField)
			p.bar("content type")
		case err == nil && (strings.HasPrefix(media, "application/grpc") || media == "application/octet-stream" ||
			strings.HasPrefix(media, "audio/") || strings.HasPrefix(media, "image/")):
			p.err = errPeekType
		}
	}
	switch e := strings.ToLower(strings.TrimSpace(contentEncoding)); e {
	case "", "identity":
	case "gzip", "x-gzip":
		p.gzip = newGunzip(p.feed)
		p.bar("content encoding")
	default:
		p.err = errPeekEncoding
	}
	return p
}

// Write feeds the next piece of the body. It never fails and keeps nothing of b.
func (p *Peeker) Write(b []byte) (int, error) {
	switch {
	case p.err != nil:
	case p.gzip != nil:
		p.err = p.gzip.write(b)
	default:
		p.feed(b)
	}
	return len(b), nil //nolint:nilerr // Done tells what is wrong with a body; the bytes go on in any case
}

func (p *Peeker) feed(b []byte) {
	if p.form != nil {
		p.form.write(b)
		return
	}
	p.scan.feed(b)
}

// Close gives the Peeker back, once, whether or not Done was called. It must not be used afterwards.
func (p *Peeker) Close() {
	if p.gzip != nil {
		p.gzip.close()
	}
	p.scan.rest()
	p.peeking = peeking{}
	peekers.Put(p)
}

// Done ends the reading: the body is whole. The error tells why the reading is partial, and the Peek then
// holds what was found before.
func (p *Peeker) Done() (Peek, error) {
	if p.gzip != nil && p.err == nil {
		p.err = p.gzip.finish()
	}
	switch {
	case p.err != nil:
	case p.form != nil:
		if !p.form.complete() {
			p.err = errPeekForm
		}
	default:
		p.scan.finish()
		if !p.scan.complete() || !p.object {
			p.err = errPeekJSON
		}
	}
	k := &p.peek
	if p.err != nil {
		p.bar("body")
	}
	for _, n := range p.maxTokens {
		if n > 0 {
			k.MaxTokens = n
		}
	}
	if k.User == "" {
		k.User = p.metaUser
	}
	k.Session = k.CacheKey
	if k.Session == "" {
		k.Session = p.sessionID
	}
	if k.Session == "" {
		k.Session = k.User
	}
	k.PromptBytes = p.bytes[0] + p.bytes[1] + p.bytes[2]
	k.PromptTokens = k.PromptBytes/4 + k.TokenIDs + k.Media*mediaTokens
	p.prefix(k)
	if p.chat && p.svc&routing.ServeCompletions != 0 && p.promptFields != 1 {
		p.bar("prompt")
	}
	out := *k
	return out, p.err
}

// prefix closes the chain: what the salt covers, tools, system, then the messages.
func (p *Peeker) prefix(k *Peek) {
	n := min(len(p.tools.blocks)+len(p.system.blocks)+len(p.main.blocks), maxBlocks)
	if p.salt == nil || n == 0 {
		return
	}
	c := p.first()
	k.Prefix, k.Ends = slices.Grow(k.Prefix, n), slices.Grow(k.Ends, n)
	for i, h := range []*blockHash{&p.tools, &p.system, &p.main} {
		at := 0
		for _, b := range h.blocks[:min(len(h.blocks), n-len(k.Prefix))] {
			var block uint64
			if at += blockSize(at); carried(at) {
				c = p.salt.next(c, b)
				block = c &^ routing.FineBlock
			} else {
				c = p.salt.step(c, b)
				block = c | routing.FineBlock
			}
			k.Prefix, k.Ends = append(k.Prefix, block), append(k.Ends, uint32(k.Hashed+at))
		}
		k.Hashed += h.length()
		if i < 2 { // what follows the last block of tools and system belongs to every prefix behind it
			if tail := h.finish(); tail != p.salt.empty {
				c = p.salt.next(c, tail)
			}
		}
	}
}

// chainStart is the newest c(0) of a model without anything else that the salt covers: mostly the next one's too.
type chainStart struct {
	salt  *saltKeys
	model string
	hash  uint64
}

// first is c(0), the beginning of the chain.
func (p *Peeker) first() uint64 {
	p.extra.reset()
	if s := &p.start; !p.salted && s.salt == p.salt && s.model == p.peek.Model {
		return s.hash
	}
	p.extra.writeString(p.peek.Model)
	for i, s := range p.salts {
		if s != 0 {
			p.extra.writeUint(uint64(i))
			p.extra.writeUint(s)
		}
	}
	c := p.salt.next(modelDomain, p.extra.finish())
	if !p.salted {
		p.start = chainStart{p.salt, p.peek.Model, c}
	}
	return c
}

// bar notes the first reason against a continuation.
func (p *Peeker) bar(field string) {
	if p.peek.Continuable || p.peek.ContinueBar == "" {
		p.peek.Continuable, p.peek.ContinueBar = false, field
	}
}

// Nodes of the document that are entered, and ids of the values that are kept or streamed.
const (
	nodeTop      uint8 = 1 + iota
	nodeList           // messages, prompt, input: an array of messages, strings or token ids
	nodeMessage        // one message or input item
	nodeContent        // a message's array of parts
	nodePart           // one part
	nodeOptions        // stream_options
	nodeMetadata       // metadata
	nodeParams         // parameters (TGI), sampling_params (SGLang)

	textPrompt // goes into cur
	textTools
	textSalt
	textMedia

	keepModel
	keepStream
	keepUsage
	keepMaxTokens
	keepMaxCompletion
	keepMaxOutput
	keepN
	keepTier
	keepUser
	keepCacheKey
	keepSession
	keepMetaUser
	keepPrevious
	keepRole
	keepPartType
	keepToken
)

// Fields beside model that change what the engine computes for the same messages. reasoning and thinking
// change the rendered prompt in several templates.
func saltField(key string) uint8 {
	switch key {
	case "cache_salt":
		return 1
	case "chat_template":
		return 2
	case "chat_template_kwargs", "chat_template_args":
		return 3
	case "documents":
		return 4
	case "reasoning_effort", "reasoning":
		return 5
	case "thinking":
		return 6
	case "previous_response_id":
		return 7
	case "conversation":
		return 8
	case "mm_processor_kwargs":
		return 9
	case "add_special_tokens":
		return 10
	case "lora_path", "lora", "adapter_id":
		return 11
	case "functions":
		return 12
	}
	return 0
}

const peekSalts = 13

// begin implements jsonVisitor.
func (p *Peeker) begin(node uint8, key []byte, kind byte) (jsonAct, uint8) {
	switch node {
	case 0:
		if kind == kindObject {
			return jsonEnter, nodeTop
		}
	case nodeTop:
		return p.beginTop(key, kind)
	case nodeList:
		return p.beginItem(kind)
	case nodeMessage:
		return p.beginMessage(key, kind)
	case nodeContent:
		return p.beginPartOf(kind)
	case nodePart:
		return p.beginPart(key, kind)
	case nodeOptions:
		if string(key) == "include_usage" {
			return jsonKeep, keepUsage
		}
	case nodeMetadata:
		if string(key) == "user_id" && kind == kindString {
			return jsonKeep, keepMetaUser
		}
	case nodeParams:
		if s := string(key); s == "max_new_tokens" || s == "max_tokens" {
			return jsonKeep, keepMaxOutput
		}
	}
	return jsonSkip, 0
}

// beginTop is a field of the request itself.
func (p *Peeker) beginTop(key []byte, kind byte) (jsonAct, uint8) {
	null := kind == kindNull
	switch string(key) {
	case "model":
		p.peek.Model, p.peek.HasModel = "", false
		if kind == kindString {
			return jsonKeep, keepModel
		}
	case "stream":
		p.peek.Stream = false
		return jsonKeep, keepStream
	case "stream_options":
		p.peek.IncludeUsage = false
		return jsonEnter, nodeOptions
	case "max_tokens":
		return jsonKeep, keepMaxTokens
	case "max_completion_tokens":
		return jsonKeep, keepMaxCompletion
	case "max_output_tokens", "max_new_tokens", "n_predict":
		p.barUnless(null, key)
		return jsonKeep, keepMaxOutput
	case "parameters", "sampling_params":
		p.barUnless(null, key)
		return jsonEnter, nodeParams
	case "n":
		return jsonKeep, keepN
	case "service_tier":
		return jsonKeep, keepTier
	case "user":
		return jsonKeep, keepUser
	case "metadata":
		return jsonEnter, nodeMetadata
	case "temperature", "top_p", "top_k", "min_p", "stop":
	case "prompt_cache_key":
		p.barUnless(null, key)
		return jsonKeep, keepCacheKey
	case "session_id":
		p.barUnless(null, key)
		return jsonKeep, keepSession
	case "messages":
		p.startField(1, &p.main)
		if kind != kindArray || p.svc&routing.ServeChat == 0 {
			p.barUnless(null, key)
		}
		if kind == kindArray {
			return jsonEnter, nodeList
		}
	case "prompt":
		p.startField(2, &p.main)
		if !null {
			p.promptFields++
		}
		if kind != kindString || p.svc&routing.ServeCompletions == 0 {
			p.barUnless(null, key)
		}
		return p.promptValue(kind)
	case "input", "inputs", "query", "queries", "text", "text_1", "text_2", "input_ids", "content", "prompts":
		p.barUnless(null, key)
		p.startField(4, &p.main)
		return p.promptValue(kind)
	case "system", "instructions":
		p.barUnless(null, key)
		p.startField(8, &p.system)
		if kind == kindArray {
			return jsonEnter, nodeContent
		}
		return p.promptValue(kind)
	case "tools":
		p.barUnless(null, key)
		p.startField(16, &p.tools)
		if !null {
			return jsonText, textTools
		}
	default:
		p.barUnless(null, key)
		if string(key) == "documents" && p.svc&routing.ServeRerank != 0 {
			p.startField(4, &p.main)
			return p.promptValue(kind)
		}
		if f := saltField(string(key)); f != 0 {
			p.salts[f] = 0
			if string(key) == "previous_response_id" {
				p.peek.PreviousResponseID = ""
				if kind == kindString {
					return jsonKeep, keepPrevious
				}
				return jsonSkip, 0
			}
			if !null {
				p.field = f
				p.extra.reset()
				return jsonText, textSalt
			}
		}
	}
	return jsonSkip, 0
}

func (p *Peeker) barUnless(null bool, key []byte) {
	if null || !p.peek.Continuable {
		return
	}
	if p.barred != string(key) { // mostly the same one
		p.barred = string(key)
	}
	p.bar(p.barred)
}

// startField turns to the stream of a prompt field. The same field a second time replaces the first.
func (p *Peeker) startField(bit uint32, h *blockHash) {
	p.cur = h
	if p.seen&bit != 0 && bit != 4 {
		h.reset()
		switch h {
		case &p.main:
			p.bytes[0], p.peek.Media, p.peek.TokenIDs, p.peek.LastRole = 0, 0, 0, ""
		case &p.system:
			p.bytes[1] = 0
		case &p.tools:
			p.bytes[2] = 0
		}
	}
	p.seen |= bit
}

func (p *Peeker) promptValue(kind byte) (jsonAct, uint8) {
	switch kind {
	case kindString:
		return jsonText, textPrompt
	case kindArray:
		return jsonEnter, nodeList
	case kindObject:
		return jsonText, textPrompt
	}
	return jsonSkip, 0
}

// beginItem is a member of messages, prompt or input.
func (p *Peeker) beginItem(kind byte) (jsonAct, uint8) {
	switch kind {
	case kindObject:
		p.roleLen = 0
		return jsonEnter, nodeMessage
	case kindString:
		p.bar("prompt")
		return jsonText, textPrompt
	case kindArray:
		return jsonEnter, nodeList
	case kindNumber:
		p.bar("prompt")
		return jsonKeep, keepToken
	}
	return jsonSkip, 0
}

// beginMessage is a field of a message. The role is folded in at the message's end, so that the order of
// role and content does not matter.
func (p *Peeker) beginMessage(key []byte, kind byte) (jsonAct, uint8) {
	switch string(key) {
	case "role":
		if kind == kindString {
			return jsonKeep, keepRole
		}
		return jsonSkip, 0
	case "content":
		p.parts = 0
		switch kind {
		case kindString:
			return jsonText, textPrompt
		case kindArray:
			return jsonEnter, nodeContent
		}
		if kind != kindNull {
			p.bar("messages")
		}
		return p.promptValue(kind)
	case "type", "id", "status", "cache_control":
		if kind != kindNull {
			p.bar("messages")
		}
		return jsonSkip, 0
	}
	return p.other(key, kind)
}

// other is a field without a meaning of its own: its name and value are prompt text.
func (p *Peeker) other(key []byte, kind byte) (jsonAct, uint8) {
	if kind == kindNull {
		return jsonSkip, 0
	}
	p.bar("messages")
	p.cur.writeByte(0x1d)
	p.cur.write(key)
	p.cur.writeByte(0x1d)
	return jsonText, textPrompt
}

// beginPartOf is a member of a content array.
func (p *Peeker) beginPartOf(kind byte) (jsonAct, uint8) {
	switch kind {
	case kindObject:
		p.partMedia = false
		return jsonEnter, nodePart
	case kindString:
		p.bar("messages")
		p.nextPart()
		return jsonText, textPrompt
	}
	p.bar("messages")
	return jsonSkip, 0
}

// nextPart separates text parts, so that one text is hashed alike as a string and as a single part.
func (p *Peeker) nextPart() {
	if p.parts++; p.parts > 1 {
		p.cur.writeByte(0x1f)
	}
}

// beginPart is a field of a content part.
func (p *Peeker) beginPart(key []byte, kind byte) (jsonAct, uint8) {
	switch string(key) {
	case "type":
		if kind == kindString {
			return jsonKeep, keepPartType
		}
		return jsonSkip, 0
	case "text":
		if kind == kindString {
			p.nextPart()
			return jsonText, textPrompt
		}
	case "cache_control", "id", "annotations", "logprobs":
		// cache_control moves from turn to turn and changes nothing in the prompt.
		if kind != kindNull {
			p.bar("messages")
		}
		return jsonSkip, 0
	case "content":
		p.bar("messages")
		if kind == kindArray {
			return jsonEnter, nodeContent
		}
	case "image_url", "image", "image_embeds", "image_pil", "input_audio", "audio", "audio_url", "audio_embeds", "video",
		"video_url", "file", "file_data", "file_url", "file_id", "source", "input_image", "document":
		if kind == kindNull {
			return jsonSkip, 0
		}
		p.bar("messages")
		if !p.partMedia {
			p.partMedia = true
			p.media.reset()
		}
		p.media.write(key)
		return jsonText, textMedia
	}
	return p.other(key, kind)
}

// text implements jsonVisitor.
func (p *Peeker) text(id uint8, b []byte) {
	switch id {
	case textPrompt:
		p.count(len(b))
		p.cur.write(b)
	case textTools:
		p.bytes[2] += len(b)
		p.tools.write(b)
	case textSalt:
		p.extra.write(b)
	case textMedia:
		p.media.write(b)
	}
}

// count adds prompt bytes to the present stream.
func (p *Peeker) count(n int) {
	if p.cur == &p.main {
		p.bytes[0] += n
	} else {
		p.bytes[1] += n
	}
}

// end implements jsonVisitor.
func (p *Peeker) end(id uint8) {
	switch id {
	case nodeMessage:
		p.cur.writeByte(0x1e)
		p.cur.write(p.role[:p.roleLen])
		p.cur.writeByte(0x1e)
		p.peek.LastRole = roleName(p.role[:p.roleLen])
	case nodePart:
		if p.partMedia {
			p.partMedia = false
			p.peek.Media++
			p.mediaBlock()
		}
	case textSalt:
		p.salts[p.field], p.salted = p.extra.finish()|1, true
	case nodeTop:
		p.object = true
	}
}

// roleName is string without an allocation for each message.
func roleName(b []byte) string {
	switch string(b) {
	case "user":
		return "user"
	case "assistant":
		return "assistant"
	case "system":
		return "system"
	case "tool":
		return "tool"
	}
	return string(b)
}

// mediaBlock puts a media part into the stream by its content, as long as the tokens that it counts for.
func (p *Peeker) mediaBlock() {
	if p.salt == nil {
		return
	}
	h := p.media.finish()
	for i := range uint64(mediaTokens * 4 / 8) {
		p.cur.writeUint(h + i)
	}
}

// value implements jsonVisitor.
func (p *Peeker) value(id uint8, v []byte, kind byte, cut bool) {
	k := &p.peek
	str := ""
	if kind == kindString && !cut {
		switch id {
		case keepModel, keepTier, keepUser, keepCacheKey, keepSession, keepMetaUser, keepPrevious:
			if str = p.model; id != keepModel || string(v) != str { // mostly the same one
				str = string(v)
			}
		}
	}
	switch id {
	case keepModel:
		p.model = str
		k.Model, k.HasModel = str, !cut
	case keepStream:
		k.Stream = lenientBool(v)
	case keepUsage:
		k.IncludeUsage = lenientBool(v)
	case keepMaxTokens:
		p.maxTokens[0] = count(v)
	case keepMaxCompletion:
		p.maxTokens[1] = count(v)
	case keepMaxOutput:
		p.maxTokens[2] = count(v)
	case keepN:
		k.N = max(1, count(v))
		if k.N > 1 {
			p.bar("n")
		}
	case keepTier:
		k.ServiceTier = str
	case keepUser:
		k.User = str
	case keepCacheKey:
		k.CacheKey = str
	case keepSession:
		p.sessionID = str
	case keepMetaUser:
		p.metaUser = str
	case keepPrevious:
		k.PreviousResponseID = str
		p.extra.reset()
		p.extra.write(v)
		p.salts[saltField("previous_response_id")], p.salted = p.extra.finish()|1, true
	case keepRole:
		p.roleLen = copy(p.role[:], v)
	case keepPartType:
		if string(v) != "text" {
			p.bar("messages")
		}
	case keepToken:
		k.TokenIDs++
		if p.salt != nil {
			n := uint32(count(v))
			p.cur.writeByte(byte(n))
			p.cur.writeByte(byte(n >> 8))
			p.cur.writeByte(byte(n >> 16))
			p.cur.writeByte(byte(n >> 24))
		}
	}
}

// lenientBool is true for what engines take for true where a boolean is due.
func lenientBool(v []byte) bool {
	switch strings.ToLower(string(v)) {
	case "true", "1", "1.0", "on", "t", "y", "yes":
		return true
	}
	return false
}

// count reads a non-negative number as engines do, fractions cut off; 0 for anything else. Numbers beyond
// 2^31 count as 2^31−1.
func count(v []byte) int {
	const most = 1<<31 - 1
	n := 0
	for i, c := range v {
		if c < '0' || c > '9' {
			f, err := strconv.ParseFloat(string(v), 64)
			if err != nil || f < 0 {
				return 0
			}
			return int(min(f, most))
		}
		if i > 10 {
			return most
		}
		n = n*10 + int(c-'0')
	}
	return min(n, most)
}

// formField is a field of a multipart form, with a nil value for a file.
func (p *Peeker) formField(name string, value []byte, file bool) {
	k := &p.peek
	switch {
	case file:
		k.Media++
	case name == "model":
		k.Model, k.HasModel = string(value), true
	case name == "stream":
		k.Stream = lenientBool(value)
	case name == "n":
		k.N = max(1, count(value))
	case name == "user":
		k.User = string(value)
	case name == "prompt":
		p.bytes[0] += len(value)
	}
}
