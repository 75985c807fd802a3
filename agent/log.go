package agent

import (
	"io"
	"log/slog"
)

// Keys of log attributes; other packages use the same words.
const (
	KeyNode     = "node"
	KeyBoot     = "boot"
	KeyMember   = "member"
	KeyAddr     = "addr"
	KeyState    = "state"
	KeyFrom     = "from"
	KeyReason   = "reason"
	KeyEngine   = "engine"
	KeyModels   = "models"
	KeyErr      = "err"
	KeyHint     = "hint"
	KeyTook     = "took"
	KeyInflight = "inflight"
	KeyMembers  = "members"
	KeyVersion  = "version"
)

// The lines that say why something is not (yet) as it should be. They are a contract with those who alert on logs; the
// state table of startup_test.go shows each with its cause.
const (
	MsgNoGPU         = "GPU memory is unknown"
	MsgGPU           = "the engine's GPU needs attention"
	MsgEngineWaiting = "engine does not answer yet; not ready"
	MsgEngineDown    = "engine stopped answering; not ready"
	MsgEngineUp      = "engine answers"
	MsgEngineRestart = "engine was restarted; warming up again"
	MsgSuspect       = "the engine failed several requests in a row"
	MsgWarmUpFailed  = "warm-up request failed; not ready"
	MsgWarm          = "warm-up request answered"
	MsgModels        = "models of the engine"
	MsgAlone         = "no other member yet; serving the own engine"
	MsgJoinFailed    = "join address unreachable, keep trying" // by package gossip
	MsgUDPBlocked    = "member is reachable by TCP but its records do not arrive; is UDP blocked?"
	MsgNoCommonKey   = "member has no gossip key in common with this agent; serving the own engine"
	MsgKeys          = "gossip keys changed"
	MsgKeyFile       = "the gossip key file cannot be read again"
	MsgAPIKeys       = "API keys changed"
	MsgAPIKeyFile    = "the file of API keys cannot be read again"
	MsgBadAPIKey     = "a client has no valid API key"

	MsgPeerStranger   = "a connection between agents ended without proof of a common key"
	MsgStatusStranger = "somebody asked for a change that he may not make"

	MsgInsecure   = "running without a key: anybody who reaches the gossip and peer ports can join and read prompts"
	MsgState      = "state"
	MsgReady      = "ready"
	MsgListening  = "listening"
	MsgDraining   = "draining"
	MsgDrained    = "drained"
	MsgDrainCut   = "drain timeout is over; breaking off what is left"
	MsgStopped    = "stopped"
	MsgConfig     = "configuration"
	MsgMode       = "mode"
	MsgTraces     = "traces go to a collector"
	MsgTracesLost = "traces cannot be sent"
)

// NewLogger makes the logger that the configuration asks for.
func NewLogger(w io.Writer, cfg Config) *slog.Logger {
	var level slog.Level
	if level.UnmarshalText([]byte(cfg.LogLevel)) != nil {
		level = slog.LevelInfo
	}
	opts := &slog.HandlerOptions{Level: level}
	if cfg.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
