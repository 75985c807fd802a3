package routing

import "time"

// Flags are the yes/no facts of a report. Several may be set.
type Flags uint8

// The bits are the wire form of the load record.
const (
	FlagDraining   Flags = 1 << iota // takes no new requests
	FlagSaturated                    // its agent refuses new requests of the classes below LowestClass, or, if that is 0, of all
	FlagEngineDown                   // its own agent says that the engine is dead
	FlagStale                        // the agent could not read its engine for three periods
	FlagGPUTrouble                   // XID or uncorrectable ECC event
	FlagWarming                      // the warm-up request has not been answered
	FlagSuspect                      // three hard failures in a row over all entries, by its own agent's count
	FlagShadow                       // shadow mode: its agent keeps its clients' requests and only says what would have moved
)

// Report is one replica's load as its own agent says it. The wire form is gossip's 60-byte record.
type Report struct {
	Boot        uint64 // random, new at every start of the agent; never 0
	Seq         uint32 // grows by one per record; ordered by int32 difference, so it may wrap
	Goodbye     bool   // the last record of this boot
	Flags       Flags
	State       State
	LowestClass uint8         // lowest class it admits now (1 highest … 4); 0 = all, or none if FlagSaturated is set
	Kept        Classes       // what it is kept for while another is usable; in a record only while LowestClass is 0
	Heartbeat   time.Duration // longest time between two records; 0 = unknown

	Running  Opt[int] // requests in the engine's batch
	Waiting  Opt[int] // requests in the engine's queue
	Held     Opt[int] // requests held at its agent, not yet given to the engine
	RunLimit Opt[int] // most requests it may run at once

	PendingTokens Opt[int] // uncached prompt tokens at the engine without a first token
	HeldTokens    Opt[int] // uncached prompt tokens held at its agent

	Accepted Opt[uint32] // counter of requests accepted by its agent, over all entries

	KVCapacity    Opt[int]           // tokens
	KVUsed        Opt[float64]       // 0..1
	GPUMemoryUsed Opt[float64]       // 0..1
	PrefillRate   Opt[float64]       // prompt tokens/s, measured
	DecodeStep    Opt[time.Duration] // time of one decode step, measured
	Weight        Opt[float64]       // operator's weight; 1 is normal

	ModelsDigest Opt[uint32] // digest of its model list; a change means: pull the list
	PrefixSeq    Opt[uint32] // sequence of its prefix digest; a gap means: pull the digest

	ReadyFor Opt[time.Duration] // time since it became ready, when the record was sent
	Age      time.Duration      // age of the sample when the record was sent
}

// newer reports whether sequence a comes after b. Sequences wrap, so the order is that of the signed difference.
func newer(a, b uint32) bool { return int32(a-b) > 0 }
