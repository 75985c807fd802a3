package gossip

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// RecordSize is the length of a load record in bytes, without the message type byte in front of it.
const RecordSize = 60

// messageType is the first byte of our private messages on Serf's memberlist. Serf itself uses 0 to 9; an agent
// without our delegate logs one warning for each such message and drops it.
const messageType = 0xC7

// The first byte of a record: version in the high nibble, kind in the low one.
const (
	recordVersion = 1

	kindLoad    = 0
	kindGoodbye = 1
	kindDigest  = 2
)

// Reasons to refuse a record. They are counted in Stats, never logged one by one.
var (
	ErrShort   = errors.New("record is shorter than 60 bytes")
	ErrVersion = errors.New("record has an unknown version")
	ErrKind    = errors.New("record has an unknown kind")
	ErrBoot    = errors.New("record has no boot id")
)

// Limits of the fields. All ones means unknown, so the largest value is one less.
const (
	unknown8, unknown16, unknown32 = math.MaxUint8, math.MaxUint16, math.MaxUint32

	max8, max16, max32 = unknown8 - 1, unknown16 - 1, unknown32 - 1

	unknownNibble = 0xF

	heartbeatUnit = 100 * time.Millisecond
	ageUnit       = 20 * time.Millisecond
	stepUnit      = 100 * time.Microsecond
	rateUnit      = 16.0        // tokens/s
	weightUnit    = 1.0 / 256   // of the normal weight 1
	shareUnit     = 1.0 / 65534 // of 1
)

// EncodeReport appends the 60-byte record of r to dst. Values beyond a field's range are cut to its largest value;
// unknown, negative and NaN become "unknown". The layout, little endian:
//
//	 0  1 version and kind     16 2 running          40 2 KV used, 1/65534
//	 1  1 flags                18 2 waiting          42 2 GPU memory used, 1/65534
//	 2  1 state, lowest class  20 2 held             44 2 prefill rate, 16 tokens/s
//	 3  1 heartbeat, 100 ms    22 2 run limit        46 2 decode step, 0.1 ms
//	 4  8 boot id              24 4 pending tokens   48 2 weight, 1/256
//	12  4 seq                  28 4 held tokens      50 4 model list digest
//	                           32 4 accepted         54 4 prefix digest seq
//	                           36 4 KV capacity      58 1 ready for, s
//	                                                 59 1 age, 20 ms
func EncodeReport(dst []byte, r *routing.Report) []byte {
	kind := byte(kindLoad)
	if r.Goodbye {
		kind = kindGoodbye
	}
	le := binary.LittleEndian
	dst = append(dst, recordVersion<<4|kind, byte(r.Flags), packState(r), packHeartbeat(r.Heartbeat))
	dst = le.AppendUint64(dst, r.Boot)
	dst = le.AppendUint32(dst, r.Seq)
	dst = le.AppendUint16(dst, count16(r.Running))
	dst = le.AppendUint16(dst, count16(r.Waiting))
	dst = le.AppendUint16(dst, count16(r.Held))
	dst = le.AppendUint16(dst, count16(r.RunLimit))
	dst = le.AppendUint32(dst, count32(r.PendingTokens))
	dst = le.AppendUint32(dst, count32(r.HeldTokens))
	dst = le.AppendUint32(dst, any32(r.Accepted))
	dst = le.AppendUint32(dst, count32(r.KVCapacity))
	dst = le.AppendUint16(dst, share(r.KVUsed))
	dst = le.AppendUint16(dst, share(r.GPUMemoryUsed))
	dst = le.AppendUint16(dst, scaled16(r.PrefillRate, rateUnit))
	step := routing.Opt[float64]{V: float64(r.DecodeStep.V), OK: r.DecodeStep.OK}
	dst = le.AppendUint16(dst, scaled16(step, float64(stepUnit)))
	dst = le.AppendUint16(dst, scaled16(r.Weight, weightUnit))
	dst = le.AppendUint32(dst, any32(r.ModelsDigest))
	dst = le.AppendUint32(dst, any32(r.PrefixSeq))
	ready := byte(unknown8)
	if r.ReadyFor.OK && r.ReadyFor.V >= 0 {
		ready = byte(min(r.ReadyFor.V/time.Second, max8))
	}
	return append(dst, ready, packAge(r.Age))
}

// DecodeReport reads a record. A longer one is a newer agent's: what follows the known fields is ignored.
// It allocates nothing. Errors are ErrShort, ErrVersion, ErrKind (a digest is not a report) and ErrBoot.
func DecodeReport(b []byte) (routing.Report, error) {
	if len(b) < RecordSize {
		return routing.Report{}, ErrShort
	}
	if b[0]>>4 != recordVersion {
		return routing.Report{}, ErrVersion
	}
	if k := b[0] & 0xF; k != kindLoad && k != kindGoodbye {
		return routing.Report{}, ErrKind
	}
	le := binary.LittleEndian
	r := routing.Report{
		Goodbye: b[0]&0xF == kindGoodbye,
		Flags:   routing.Flags(b[1]),
		Boot:    le.Uint64(b[4:]),
		Seq:     le.Uint32(b[12:]),

		Running:       int16of(le.Uint16(b[16:])),
		Waiting:       int16of(le.Uint16(b[18:])),
		Held:          int16of(le.Uint16(b[20:])),
		RunLimit:      int16of(le.Uint16(b[22:])),
		PendingTokens: int32of(le.Uint32(b[24:])),
		HeldTokens:    int32of(le.Uint32(b[28:])),
		Accepted:      uint32of(le.Uint32(b[32:])),
		KVCapacity:    int32of(le.Uint32(b[36:])),
		KVUsed:        float16of(le.Uint16(b[40:]), shareUnit),
		GPUMemoryUsed: float16of(le.Uint16(b[42:]), shareUnit),
		PrefillRate:   float16of(le.Uint16(b[44:]), rateUnit),
		Weight:        float16of(le.Uint16(b[48:]), weightUnit),
		ModelsDigest:  uint32of(le.Uint32(b[50:])),
		PrefixSeq:     uint32of(le.Uint32(b[54:])),

		Age: time.Duration(b[59]) * ageUnit,
	}
	if r.Boot == 0 || r.Boot == math.MaxUint64 {
		return routing.Report{}, ErrBoot
	}
	if s := b[2] >> 4; s != unknownNibble {
		r.State = routing.State(s)
	}
	switch c := b[2] & 0xF; {
	case c == unknownNibble:
	case c <= routing.ClassBatch:
		r.LowestClass = c
	case r.Flags&routing.FlagSaturated == 0: // as packState writes it
		r.Kept = routing.ClassesOf(c - routing.ClassBatch)
	}
	if b[3] != unknown8 {
		r.Heartbeat = time.Duration(b[3]) * heartbeatUnit
	}
	if v := le.Uint16(b[46:]); v != unknown16 {
		r.DecodeStep = routing.Some(time.Duration(v) * stepUnit)
	}
	if b[58] != unknown8 {
		r.ReadyFor = routing.Some(time.Duration(b[58]) * time.Second)
	}
	return r, nil
}

// packState holds the state in the high nibble. The low one has the lowest admitted class or, while all are admitted, what the
// replica is kept for, as a number above the classes': older agents take that for a class that nobody is below.
func packState(r *routing.Report) byte {
	s, c := byte(r.State), r.LowestClass
	if s == 0 || s >= unknownNibble {
		s = unknownNibble
	}
	if k := r.Kept.Code(); c == 0 && k > 0 && r.Flags&routing.FlagSaturated == 0 {
		c = routing.ClassBatch + k
	}
	if c == 0 || c >= unknownNibble {
		c = unknownNibble
	}
	return s<<4 | c
}

// packHeartbeat rounds up: the promise is an upper bound.
func packHeartbeat(d time.Duration) byte {
	if d <= 0 {
		return unknown8
	}
	return byte(min((d+heartbeatUnit-1)/heartbeatUnit, max8))
}

// packAge saturates at 5.1 s; by then nobody takes the record for fresh.
func packAge(d time.Duration) byte {
	return byte(min(max(d, 0)/ageUnit, unknown8))
}

func count16(o routing.Opt[int]) uint16 {
	if !o.OK || o.V < 0 {
		return unknown16
	}
	return uint16(min(o.V, max16))
}

func count32(o routing.Opt[int]) uint32 {
	if !o.OK || o.V < 0 {
		return unknown32
	}
	return uint32(min(uint64(o.V), max32))
}

// any32 carries counters and digests. The one value that means unknown is sent as its neighbour.
func any32(o routing.Opt[uint32]) uint32 {
	if !o.OK {
		return unknown32
	}
	return min(o.V, max32)
}

func share(o routing.Opt[float64]) uint16 {
	if o.OK && o.V > 1 {
		o.V = 1
	}
	return scaled16(o, shareUnit)
}

func scaled16(o routing.Opt[float64], unit float64) uint16 {
	if !o.OK || !(o.V >= 0) { // NaN is not >= 0
		return unknown16
	}
	return uint16(min(math.Round(o.V/unit), max16))
}

func int16of(v uint16) routing.Opt[int] {
	if v == unknown16 {
		return routing.Opt[int]{}
	}
	return routing.Some(int(v))
}

func int32of(v uint32) routing.Opt[int] {
	if v == unknown32 {
		return routing.Opt[int]{}
	}
	return routing.Some(int(v))
}

func uint32of(v uint32) routing.Opt[uint32] {
	if v == unknown32 {
		return routing.Opt[uint32]{}
	}
	return routing.Some(v)
}

func float16of(v uint16, unit float64) routing.Opt[float64] {
	if v == unknown16 {
		return routing.Opt[float64]{}
	}
	return routing.Some(float64(v) * unit)
}
