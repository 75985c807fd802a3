package agent

import (
	"fmt"
	"io"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// Names of the metrics. Metrics has help, type and labels of each.
const (
	MetricBuildInfo         = "grapevine_build_info"
	MetricStartTime         = "grapevine_start_time_seconds"
	MetricReady             = "grapevine_ready"
	MetricState             = "grapevine_state"
	MetricWarnings          = "grapevine_warnings"
	MetricEngineUp          = "grapevine_engine_up"
	MetricEngineRunning     = "grapevine_engine_running_requests"
	MetricEngineWaiting     = "grapevine_engine_waiting_requests"
	MetricEngineKVUsage     = "grapevine_engine_kv_usage_ratio"
	MetricEngineKVCapacity  = "grapevine_engine_kv_capacity_tokens"
	MetricEngineReadings    = "grapevine_engine_readings_total"
	MetricEngineRestarts    = "grapevine_engine_restarts_total"
	MetricGPUMemoryUsed     = "grapevine_gpu_memory_used_bytes"
	MetricGPUMemoryTotal    = "grapevine_gpu_memory_total_bytes"
	MetricEngineOutside     = "grapevine_engine_outside_requests"
	MetricEngineAsleep      = "grapevine_engine_asleep"
	MetricEngineReadingAge  = "grapevine_engine_reading_age_seconds"
	MetricGPUTrouble        = "grapevine_gpu_trouble"
	MetricGPUUtilization    = "grapevine_gpu_utilization_ratio"
	MetricGPUThrottled      = "grapevine_gpu_throttled"
	MetricGPUECC            = "grapevine_gpu_ecc_errors_total"
	MetricGPUProcesses      = "grapevine_gpu_processes"
	MetricGPUOthers         = "grapevine_gpu_other_processes"
	MetricInflight          = "grapevine_inflight_requests"
	MetricPendingTokens     = "grapevine_pending_prompt_tokens"
	MetricHeld              = "grapevine_held_requests"
	MetricAccepted          = "grapevine_accepted_requests_total"
	MetricRequests          = "grapevine_requests_total"
	MetricRetries           = "grapevine_retries_total"
	MetricContinues         = "grapevine_continues_total"
	MetricRefusals          = "grapevine_refusals_total"
	MetricAttempts          = "grapevine_attempts_total"
	MetricReplays           = "grapevine_connection_replays_total"
	MetricNoModel           = "grapevine_requests_without_model_total"
	MetricBytesOut          = "grapevine_answer_bytes_total"
	MetricTokens            = "grapevine_tokens_total"
	MetricRetryBudget       = "grapevine_retry_budget_tokens"
	MetricRetryExhausted    = "grapevine_retry_budget_exhausted_total"
	MetricBodyBytes         = "grapevine_kept_body_bytes"
	MetricAsks              = "grapevine_asks_total"
	MetricAskedRequests     = "grapevine_asked_requests_total"
	MetricAsking            = "grapevine_asking_seconds"
	MetricHeldTokens        = "grapevine_held_prompt_tokens"
	MetricGate              = "grapevine_gate_requests_total"
	MetricHeldFor           = "grapevine_held_seconds"
	MetricPulls             = "grapevine_pulls_total"
	MetricMoved             = "grapevine_moved_requests_total"
	MetricTTFT              = "grapevine_first_content_seconds"
	MetricDuration          = "grapevine_request_duration_seconds"
	MetricPeers             = "grapevine_peers"
	MetricPeerInflight      = "grapevine_peer_inflight_requests"
	MetricReportAge         = "grapevine_report_age_seconds"
	MetricGossipMembers     = "grapevine_gossip_members"
	MetricGossipHealth      = "grapevine_gossip_health_score"
	MetricGossipRecords     = "grapevine_gossip_records_total"
	MetricStrangers         = "grapevine_strangers_total"
	MetricTraceSpans        = "grapevine_trace_spans_total"
	MetricGoroutines        = "grapevine_goroutines"
	MetricStatusSubscribers = "grapevine_status_subscribers"
	MetricShadow            = "grapevine_shadow_mode"
	MetricShadowPicks       = "grapevine_shadow_picks_total"
	MetricShadowGain        = "grapevine_shadow_gain_seconds"
)

// Metric describes one metric of /metrics.
type Metric struct {
	Name   string
	Type   dto.MetricType
	Labels []string // names; every label has a bounded number of values
	Help   string
}

const (
	gauge     = dto.MetricType_GAUGE
	counter   = dto.MetricType_COUNTER
	histogram = dto.MetricType_HISTOGRAM
)

// Metrics lists all metrics in the order of /metrics. Unknown values are left out, never zero.
var Metrics = []Metric{
	{MetricBuildInfo, gauge, []string{"version", "goversion"}, "Always 1; the labels say what runs."},
	{MetricStartTime, gauge, nil, "Start of this agent, in seconds since 1970."},
	{MetricReady, gauge, nil, "1 if the own replica takes requests, else 0."},
	{MetricState, gauge, []string{"state"}, "1 for the state that the own replica is in, 0 for the others."},
	{MetricWarnings, gauge, nil, "Warnings on the status page now."},
	{MetricEngineUp, gauge, nil, "1 if the engine's health page says so, else 0."},
	{MetricEngineRunning, gauge, nil, "Requests in the engine's batch, by its own metrics."},
	{MetricEngineWaiting, gauge, nil, "Requests in the engine's queue, by its own metrics."},
	{MetricEngineKVUsage, gauge, nil, "Share of the engine's KV cache in use, 0 to 1."},
	{MetricEngineKVCapacity, gauge, nil, "Size of the engine's KV cache in tokens."},
	{MetricEngineReadings, counter, []string{"outcome"}, "Readings of the engine's metrics page, by outcome: ok, error."},
	{MetricEngineRestarts, counter, nil, "Restarts of the engine that this agent noticed."},
	{MetricGPUMemoryUsed, gauge, nil, "Memory in use on the engine's cards, in bytes."},
	{MetricGPUMemoryTotal, gauge, nil, "Memory of the engine's cards, in bytes."},
	{MetricEngineOutside, gauge, nil, "Requests at the engine that did not come through this agent, at the last reading."},
	{MetricEngineAsleep, gauge, nil, "1 if the engine says that it sleeps, else 0."},
	{MetricEngineReadingAge, gauge, nil, "Age of the newest numbers that the engine told, in seconds."},
	{MetricGPUTrouble, gauge, nil, "1 if a card of the engine is in trouble (lost, XID, uncorrected memory errors), so that others get its requests, else 0."},
	{MetricGPUUtilization, gauge, []string{"gpu"}, "Share of the last second in which the card worked, 0 to 1; gpu is NVML's index."},
	{MetricGPUThrottled, gauge, []string{"gpu", "reason"}, "1 for each reason why the card runs slower than it could."},
	{MetricGPUECC, counter, []string{"gpu"}, "Uncorrected memory errors of the card since its driver was loaded."},
	{MetricGPUProcesses, gauge, []string{"gpu"}, "Processes that compute on the card."},
	{MetricGPUOthers, gauge, []string{"gpu"}, "Processes on the card that are not the engine's, where that can be told."},
	{MetricInflight, gauge, nil, "Requests that this agent passed to its engine and that have not ended."},
	{MetricPendingTokens, gauge, nil, "Prompt tokens at the engine whose request has no first token yet, by this agent's count."},
	{MetricHeld, gauge, nil, "Requests that wait at this agent."},
	{MetricAccepted, counter, nil, "Requests that this agent accepted for its engine, whoever sent them."},
	{MetricRequests, counter, []string{"role", "outcome"}, "Requests that ended, by this agent's role (entry: a client sent it here; target: another agent did) and outcome."},
	{MetricRetries, counter, []string{"reason"}, "Attempts after the first, by what made them needed."},
	{MetricContinues, counter, []string{"reason", "outcome"}, "Text streams that broke and were to go on elsewhere, by what broke them (reset, hang, abort, error, drain) and how it ended (ok, failed, client_cancel)."},
	{MetricRefusals, counter, []string{"reason"}, "Errors that this agent answered by itself, by reason."},
	{MetricAttempts, counter, []string{"target"}, "Requests sent, by target: self (the own engine, for whoever asked) or peer (another replica, for clients of this agent)."},
	{MetricReplays, counter, nil, "Requests sent again because a reused connection was dead."},
	{MetricNoModel, counter, nil, "Requests in whose body no model was found."},
	{MetricBytesOut, counter, nil, "Bytes of answers, to clients and to other agents."},
	{MetricTokens, counter, []string{"kind"}, "Tokens of answered requests, by kind: prompt, cached (a part of prompt), output."},
	{MetricRetryBudget, gauge, nil, "Repeats after answers that the budget allows now."},
	{MetricRetryExhausted, counter, nil, "Repeats that the budget did not allow."},
	{MetricBodyBytes, gauge, nil, "Memory of request bodies kept for sending them again, in bytes."},
	{MetricAsks, counter, []string{"outcome"}, "Questions for an exact score to other replicas, by outcome (answered, refused, missed), and answered for others (given)."},
	{MetricAskedRequests, counter, []string{"outcome"}, "Requests for which replicas were asked, by what came of it: kept (gossip's choice stood) or changed; besides, turned: the target refused once, having become busier than it had said."},
	{MetricAsking, histogram, nil, "Time that asking held a request, in seconds."},
	{MetricHeldTokens, gauge, nil, "Prompt tokens of the requests that wait at this agent."},
	{MetricGate, counter, []string{"outcome"}, "Requests at the gate of the own engine: passed at once, held first; and refused since the queue was full or the wait would be too long (shed), timeout, drained (handed over) or stolen (given to an idle agent) while held."},
	{MetricHeldFor, histogram, nil, "Time that held requests waited until they went to the engine, in seconds."},
	{MetricPulls, counter, []string{"outcome"}, "Held requests that this agent asked others for while its engine was idle, by answer: given, none, failed; and came: requests that arrived with a valid ticket."},
	{MetricMoved, counter, nil, "Requests that entered here and were moved to an idle replica while another one held them."},
	{MetricTTFT, histogram, nil, "Time from the arrival of a request at its entry agent to the first content of its answer, in seconds."},
	{MetricDuration, histogram, nil, "Time from the arrival of a request at its entry agent to the end of its answer, in seconds."},
	{MetricPeers, gauge, []string{"state"}, "Replicas that this agent knows, itself included, by state."},
	{MetricPeerInflight, gauge, []string{"peer"}, "Requests sent from here to a replica that have not ended (at most 128 peers)."},
	{MetricReportAge, gauge, []string{"quantile"}, "Age of the other members' newest records, in seconds (quantiles 0.5 and 1)."},
	{MetricGossipMembers, gauge, nil, "Members alive, this agent included."},
	{MetricGossipHealth, gauge, nil, "Own health as membership sees it: 0 is well, above means that this agent answers late."},
	{MetricGossipRecords, counter, []string{"direction"}, "Load records: packets sent, records received, records dropped (bad or old)."},
	{MetricStrangers, counter, []string{"where"}, "What came from somebody who does not belong here and was refused: gossip (packets and streams that no key opens, or of another cluster), peer (connections between agents without a common key), status (changes by who may not make them). Clients without a valid API key are refusals."},
	{MetricShadow, gauge, nil, "1 in shadow mode, which keeps every request at the own engine, else 0."},
	{MetricShadowPicks, counter, []string{"outcome"}, "Requests that shadow mode looked at, by where they would have been answered: stayed (here) or moved (another replica)."},
	{MetricShadowGain, gauge, nil, "By how much the first token would have come earlier in the mean without shadow mode, in seconds, predicted since it began."},
	{MetricTraceSpans, counter, []string{"outcome"}, "Spans of traced requests, by what came of them: sent, dropped (too many waited), failed (the collector was not reached or refused) and rejected (by the collector, of a batch that it took). Only where traces are on."},
	{MetricGoroutines, gauge, nil, "Goroutines of this process."},
	{MetricStatusSubscribers, gauge, nil, "Open pages that follow live."},
}

// gathering collects samples under the descriptions of Metrics.
type gathering struct{ families map[string]*dto.MetricFamily }

func newGathering() *gathering { return &gathering{families: map[string]*dto.MetricFamily{}} }

// family returns the family of that name. A name that Metrics lacks is a mistake of ours: every metric has a help text.
func (g *gathering) family(name string, labels []string) (*dto.MetricFamily, *dto.Metric) {
	i := slices.IndexFunc(Metrics, func(m Metric) bool { return m.Name == name })
	if i < 0 || len(labels) != len(Metrics[i].Labels) {
		panic(fmt.Sprintf("agent: metric %s with labels %v is not in Metrics", name, labels))
	}
	f := g.families[name]
	if f == nil {
		f = &dto.MetricFamily{Name: new(name), Help: new(Metrics[i].Help), Type: Metrics[i].Type.Enum()}
		g.families[name] = f
	}
	m := &dto.Metric{}
	for j, l := range Metrics[i].Labels {
		m.Label = append(m.Label, &dto.LabelPair{Name: new(l), Value: new(labels[j])})
	}
	f.Metric = append(f.Metric, m)
	return f, m
}

// add adds the value of a gauge or counter.
func (g *gathering) add(name string, value float64, labels ...string) {
	f, m := g.family(name, labels)
	if f.GetType() == counter {
		m.Counter = &dto.Counter{Value: &value}
	} else {
		m.Gauge = &dto.Gauge{Value: &value}
	}
}

// write writes all families in Prometheus' text format, in the order of Metrics.
func (g *gathering) write(w io.Writer, format expfmt.Format) error {
	enc := expfmt.NewEncoder(w, format)
	for _, m := range Metrics {
		if f := g.families[m.Name]; f != nil {
			if err := enc.Encode(f); err != nil {
				return fmt.Errorf("metrics: %w", err)
			}
		}
	}
	if c, ok := enc.(expfmt.Closer); ok {
		return c.Close()
	}
	return nil
}

// MetricsDocs renders all metrics as a Markdown table.
func MetricsDocs() string {
	var b strings.Builder
	b.WriteString("| Metric | Type | Labels | Meaning |\n|---|---|---|---|\n")
	for _, m := range Metrics {
		labels := "–"
		if len(m.Labels) > 0 {
			labels = "`" + strings.Join(m.Labels, "`, `") + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.Name, strings.ToLower(m.Type.String()), labels, m.Help)
	}
	return b.String()
}

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
