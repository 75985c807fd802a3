package enginesim

import (
	"strings"
	"unicode/utf8"
)

// bytesPerToken is how text is counted: a token is four bytes, in prompts and in answers alike. Every word of the
// vocabulary has exactly four, so an answer of k tokens, sent back as part of a prompt, counts k tokens again.
const bytesPerToken = 4

// vocabulary holds what the model says: plain words, pieces of words, line breaks, characters that JSON must escape, and
// characters of two, three and four bytes.
var vocabulary = strings.Split(strings.TrimSuffix(strings.Join([]string{
	" the| and| for| are| but| not| you| all| any| can| had| her| was| one| our| out| day| get| has| him| his| how| man| new|",
	" now| old| see| two| way| who| boy| did| its| let| put| say| she| too| use| sea| sun| map| key| red| oak| ivy| vat| jam|",
	"tion|ment|able|ness|ther|ally|ight|ound|ence|ance|ical|ious|ward|ship|less|ical|ants|ings|ures|ists|ates|ives|ised|izes|",
	", an|. It|. We|; so|: th| - a|.\n\nA|\n- b| (x)| [y]| {z}| 10%| a=b|?\n\nC| \"q\"| 'r'| c\\d| e/f|\tgo\t| <i>| &am| #42| $9.|",
	" né| où| ça|éàüö| über|日a|中文x| 語|🙂|🍇| ±1| €|",
}, ""), "|"), "|")

func init() {
	kept := vocabulary[:0]
	for _, w := range vocabulary {
		if len(w) == bytesPerToken && utf8.ValidString(w) {
			kept = append(kept, w)
		}
	}
	vocabulary = kept
}

// tokensOf is the number of tokens of n bytes of text.
func tokensOf(n int) int { return (n + bytesPerToken - 1) / bytesPerToken }

// text is the model's whole state: a hash over everything that stands so far, prompt and answer alike. What comes next
// depends on nothing else.
type text struct {
	hash   uint64
	bytes  int
	block  int      // bytes in a block of the prefix cache
	blocks []uint64 // hash at the end of each full block
}

func newText(seed uint64, blockTokens int) text {
	return text{hash: 14695981039346656037 ^ mix(seed+1), block: blockTokens * bytesPerToken}
}

// add appends text.
func (t *text) add(s string) {
	h := t.hash
	for i := range len(s) { // FNV-1a
		h = (h ^ uint64(s[i])) * 1099511628211
		if t.bytes++; t.bytes%t.block == 0 {
			t.blocks = append(t.blocks, mix(h))
		}
	}
	t.hash = h
}

// next is the word that follows. end says that the model would rather stop here, as it does once in about mean words.
func (t *text) next(mean int) (word string, end bool) {
	x := mix(t.hash)
	return vocabulary[x%uint64(len(vocabulary))], mean > 0 && (x>>32)%uint64(mean) == 0
}

// mix spreads the bits of x (the finalizer of splitmix64).
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
