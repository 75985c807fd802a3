package engine

import (
	"encoding/json"
	"fmt"
)

// AbilitiesOf returns what is known of a kind of engine; the zero value for an unknown one.
func AbilitiesOf(k Kind) Abilities {
	if t := tableOf(k); t != nil {
		return t.Abilities
	}
	return Abilities{}
}

// Body is the request that has a text counted.
func (t Tokenize) Body(model, text string) ([]byte, error) {
	fields := map[string]any{}
	if t.Extra != "" {
		if err := json.Unmarshal([]byte("{"+t.Extra+"}"), &fields); err != nil {
			return nil, fmt.Errorf("count tokens: %w", err)
		}
	}
	fields["model"], fields[t.Field] = model, text
	body, err := json.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("count tokens: %w", err)
	}
	return body, nil
}

// Tokens reads the number from the answer.
func (t Tokenize) Tokens(answer []byte) (int, error) { return countTokens(t, answer) }
