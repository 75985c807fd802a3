package agent

import (
	"math"
	"runtime"
	"runtime/debug"

	"github.com/grapevine-lb/grapevine/routing"
)

// Status is the answer of GET /status: times in ms with the unit in the name, shares 0..1, bytes as numbers, null for
// what is unknown. It holds no prompts and no keys. Fields may be added, never renamed.
type Status struct {
	Node     string       `json:"node"`
	Boot     string       `json:"boot"` // 16 hex digits
	Version  string       `json:"version"`
	Cluster  string       `json:"cluster"`
	Zone     string       `json:"zone"`
	Ready    bool         `json:"ready"`
	State    string       `json:"state"`
	SinceMS  int64        `json:"since_ms"` // how long it has been in this state
	Why      string       `json:"why"`      // what it waits for, or is suspected of; "" when ready
	Policy   string       `json:"policy"`
	UptimeMS int64        `json:"uptime_ms"`
	Listen   ListenStatus `json:"listen"`
	Engine   EngineStatus `json:"engine"`
	GPU      GPUStatus    `json:"gpu"`
	Load     LoadStatus   `json:"load"`
	Queue    QueueStatus  `json:"queue"`
	Peers    []PeerStatus `json:"peers"` // this replica first
	Picks    PicksStatus  `json:"picks"`
	Gossip   GossipStatus `json:"gossip"`
	Warnings []string     `json:"warnings"`

	Mode   string       `json:"mode"` // on or shadow
	Shadow ShadowStatus `json:"shadow"`

	Process ProcessStatus `json:"process"`
}

// ProcessStatus is what the process may use.
type ProcessStatus struct {
	CPUs        int                 `json:"cpus"`               // by the control group's limit, or GOMAXPROCS
	MemoryLimit routing.Opt[uint64] `json:"memory_limit_bytes"` // from which on Go collects harder; null = none
}

func (o *Options) processStatus() ProcessStatus {
	s := ProcessStatus{CPUs: runtime.GOMAXPROCS(0)}
	if o.StreamThread {
		s.CPUs-- // that of the thread
	}
	if n := debug.SetMemoryLimit(-1); n != math.MaxInt64 {
		s.MemoryLimit = routing.Some(uint64(n))
	}
	return s
}

// ListenStatus is where the agent really listens.
type ListenStatus struct {
	Client string `json:"client"`
	Peer   string `json:"peer"`
	Status string `json:"status"`
	Gossip string `json:"gossip"`
}

// EngineStatus is what the agent knows about its own engine.
type EngineStatus struct {
	Kind       string               `json:"kind"`
	Version    string               `json:"version"`
	URL        string               `json:"url"`
	Health     string               `json:"health"`
	Detail     string               `json:"detail"`
	Models     []string             `json:"models"`
	Running    routing.Opt[int]     `json:"running"`
	Waiting    routing.Opt[int]     `json:"waiting"`
	RunLimit   routing.Opt[int]     `json:"run_limit"`
	KVUsage    routing.Opt[float64] `json:"kv_usage"`
	KVCapacity routing.Opt[int]     `json:"kv_capacity_tokens"`
	AgeMS      routing.Opt[int64]   `json:"age_ms"` // of the last good reading
	Error      string               `json:"error"`  // of the last reading; "" when good

	Evidence string          `json:"evidence"` // how the kind was told
	Serves   []string        `json:"serves"`   // kinds of path; empty = not known, all are tried
	Asleep   bool            `json:"asleep"`
	Outside  int             `json:"outside"` // requests at the engine that did not come through this agent
	Restarts uint64          `json:"restarts"`
	Readings []ReadingStatus `json:"readings"` // everything that the engine tells, or why it does not
	Learned  []ModelLearned  `json:"learned"`  // from answers that went through this agent
}

// ModelLearned is what this agent has learned about a model from its answers.
type ModelLearned struct {
	Model         string               `json:"model"`
	Answers       uint64               `json:"answers"`
	BytesPerToken routing.Opt[float64] `json:"bytes_per_token"` // of prompts
	OutputP50     routing.Opt[int]     `json:"output_tokens_p50"`
	OutputP90     routing.Opt[int]     `json:"output_tokens_p90"`
}

// GPUStatus is what NVML says about the engine's cards.
type GPUStatus struct {
	MemoryUsed  routing.Opt[uint64] `json:"memory_used_bytes"`
	MemoryTotal routing.Opt[uint64] `json:"memory_total_bytes"`
	Devices     []string            `json:"devices"`
	Method      string              `json:"method"` // how "ours" was told
	Why         string              `json:"why"`    // why the memory is unknown; "" when known
	Trouble     []string            `json:"trouble"`
	Warnings    []string            `json:"warnings"`
	Unified     bool                `json:"unified"` // the memory is the host's
	Cards       []CardStatus        `json:"cards"`
}

// CardStatus is one of the engine's cards, or a slice of one.
type CardStatus struct {
	Index       int                  `json:"index"` // in NVML's order
	UUID        string               `json:"uuid"`
	Name        string               `json:"name"`
	MIG         bool                 `json:"mig"`
	MemoryUsed  routing.Opt[uint64]  `json:"memory_used_bytes"`
	MemoryTotal routing.Opt[uint64]  `json:"memory_total_bytes"`
	Utilization routing.Opt[float64] `json:"utilization"`     // share of the last second in which it worked
	Throttle    []string             `json:"throttle"`        // why it runs slower than it could
	ECCErrors   routing.Opt[uint64]  `json:"ecc_errors"`      // uncorrected, since the driver was loaded
	Processes   routing.Opt[int]     `json:"processes"`       // that compute on it
	Others      routing.Opt[int]     `json:"other_processes"` // of those, not the engine's; null = cannot be told
	Trouble     []string             `json:"trouble"`
}

// LoadStatus is the agent's exact count of what it passed to its own engine.
type LoadStatus struct {
	Running       int                  `json:"running"`
	PendingTokens int                  `json:"pending_tokens"`
	Accepted      uint32               `json:"accepted"`
	PrefillRate   routing.Opt[float64] `json:"prefill_tokens_per_s"`
	DecodeStepMS  routing.Opt[float64] `json:"decode_step_ms"`
}

// QueueStatus is what waits at the agent.
type QueueStatus struct {
	Held       int `json:"held"`
	HeldTokens int `json:"held_tokens"`
}

// PeerStatus is one replica as this agent sees it.
type PeerStatus struct {
	Node             string               `json:"node"`
	Boot             string               `json:"boot"`
	Address          string               `json:"address"`
	Zone             string               `json:"zone"`
	Engine           string               `json:"engine"`
	Self             bool                 `json:"self"`
	State            string               `json:"state"`
	SinceMS          int64                `json:"since_ms"` // how long it has been in this state
	Why              string               `json:"why"`
	Flags            []string             `json:"flags"`
	Models           []string             `json:"models"`
	AgeMS            routing.Opt[int64]   `json:"age_ms"`
	Running          routing.Opt[int]     `json:"running"`
	Waiting          routing.Opt[int]     `json:"waiting"`
	Held             routing.Opt[int]     `json:"held"`
	KVUsage          routing.Opt[float64] `json:"kv_usage"`
	GPUMemoryUsage   routing.Opt[float64] `json:"gpu_memory_usage"`
	PendingTokens    routing.Opt[int]     `json:"pending_tokens"`
	PrefillRate      routing.Opt[float64] `json:"prefill_tokens_per_s"`
	PredictedTTFTMS  routing.Opt[float64] `json:"predicted_ttft_ms"` // for a prompt of 1,000 tokens
	InflightFromHere int                  `json:"inflight_from_here"`
	EjectedUntilMS   routing.Opt[int64]   `json:"ejected_until_ms"` // from now; null = not ejected
}

// PicksStatus counts where requests that entered here went.
type PicksStatus struct {
	Total     uint64            `json:"total"`     // requests that ended
	Forwarded uint64            `json:"forwarded"` // attempts at other replicas
	Failed    uint64            `json:"failed"`    // refused by this agent itself
	Retries   uint64            `json:"retries"`
	ByReason  map[string]uint64 `json:"by_reason"` // of those refused
}

// GossipStatus is the state of membership and of the records.
type GossipStatus struct {
	Members        int                  `json:"members"` // alive, this one included
	HealthScore    int                  `json:"health_score"`
	ReportAgeP50MS routing.Opt[float64] `json:"report_age_p50_ms"` // over the other members now
	ReportAgeMaxMS routing.Opt[float64] `json:"report_age_max_ms"`
	Sent           uint64               `json:"sent"`
	Received       uint64               `json:"received"`
	Dropped        uint64               `json:"dropped"`
	Unreachable    []string             `json:"unreachable"` // join addresses that failed last time, each with why
	Encrypted      bool                 `json:"encrypted"`
	Strangers      uint64               `json:"strangers"` // packets and streams that no key opens, or of another cluster
}
