package conventions

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/agent/otlp"
)

// An alert, a dashboard or a scaler that asks for a metric that does not exist is silent for ever.
func TestMetricNames(t *testing.T) {
	name := regexp.MustCompile(`\bgrapevine_[a-z0-9_]+\b`)
	found := map[string]bool{}
	text(t, func(file, content string) {
		if !strings.HasPrefix(file, "deploy/") && !strings.HasSuffix(file, ".md") {
			return
		}
		for _, m := range name.FindAllString(content, -1) {
			found[m] = true
			known := slices.ContainsFunc(agent.Metrics, func(a agent.Metric) bool {
				return a.Name == m || a.Type.String() == "HISTOGRAM" && slices.Contains([]string{"_bucket", "_sum", "_count"}, strings.TrimPrefix(m, a.Name))
			})
			assert.True(t, known, "%s names %s, which is no metric", file, m)
		}
	})
	assert.Greater(t, len(found), 20)
}

// Every standard variable that is read stands in README.
func TestTraceVariablesAreDocumented(t *testing.T) {
	var readme string
	text(t, func(file, content string) {
		if file == "README.md" {
			readme = content
		}
	})
	for _, v := range otlp.Variables {
		short := strings.TrimPrefix(strings.TrimPrefix(v, "OTEL_EXPORTER_OTLP_"), "TRACES_")
		assert.True(t, strings.Contains(readme, v) || strings.Contains(readme, "`"+short+"`"), "README.md does not name %s", v)
	}
}
