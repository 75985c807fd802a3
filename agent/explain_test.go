package agent

import (
	"net/http"
	"testing"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestExplainedHeader: what a choice does not depend on, credentials above all, does not come near it.
func TestExplainedHeader(t *testing.T) {
	got := explainedHeader(http.Header{"Authorization": {"Bearer x"}, "X-Grapevine-Session": {"s"}, "Content-Type": {"application/json"}, "Cookie": {"c"}})
	assert.Equal(t, http.Header{"X-Grapevine-Session": {"s"}, "Content-Type": {"application/json"}}, got)
}

// TestExplainRequests: a request of which only numbers are known gets the default class.
func TestExplainRequests(t *testing.T) {
	a := start(t, loopbackConfig("http://127.0.0.1:9"), Options{})
	e, ok := a.explain("/explain?model=m&tokens=70", nil, nil).(proxy.Explanation)
	require.True(t, ok)
	assert.Equal(t, 70, e.PromptTokens)
	assert.Equal(t, uint8(2), e.Class)
	require.Len(t, e.Candidates, 1)
	assert.True(t, e.Candidates[0].Self)
	e, ok = a.explain("/v1/chat/completions", http.Header{}, []byte(`{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"0123456789abcdef"}]}`)).(proxy.Explanation)
	require.True(t, ok)
	assert.Equal(t, "m", e.Model)
	assert.Equal(t, 9, e.MaxTokens)
	assert.Positive(t, e.PromptTokens)
	assert.Equal(t, "/v1/chat/completions", e.Route)
	e, ok = a.explain("/v1/load_lora_adapter", http.Header{}, []byte(`{}`)).(proxy.Explanation)
	require.True(t, ok)
	assert.Equal(t, "the path must stay here", e.Reason)
}
