package gossip

import (
	"encoding/hex"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

func fullReport() routing.Report {
	return routing.Report{
		Boot: 0x1122334455667788, Seq: 0xA1B2C3D4,
		Flags: routing.FlagDraining | routing.FlagSuspect, State: routing.StateReady, LowestClass: 3,
		Heartbeat: 1200 * time.Millisecond,
		Running:   routing.Some(7), Waiting: routing.Some(0), Held: routing.Some(3), RunLimit: routing.Some(256),
		PendingTokens: routing.Some(123456), HeldTokens: routing.Some(0), Accepted: routing.Some[uint32](99),
		KVCapacity: routing.Some(1 << 20), KVUsed: routing.Some(0.5), GPUMemoryUsed: routing.Some(1.0),
		PrefillRate: routing.Some(8000.0), DecodeStep: routing.Some(25 * time.Millisecond), Weight: routing.Some(1.5),
		ModelsDigest: routing.Some[uint32](0xDEADBEEF), PrefixSeq: routing.Some[uint32](5),
		ReadyFor: routing.Some(90 * time.Second), Age: 140 * time.Millisecond,
	}
}

// The golden bytes are the contract between versions: they may never change.
func TestCodecGolden(t *testing.T) {
	for _, tc := range []struct {
		name string
		r    routing.Report
		want string
	}{
		{"full", fullReport(), "1041330c" + "8877665544332211" + "d4c3b2a1" + "0700" + "0000" + "0300" + "0001" + "40e20100" + "00000000" +
			"63000000" + "00001000" + "ff7f" + "feff" + "f401" + "fa00" + "8001" + "efbeadde" + "05000000" + "5a" + "07"},
		{"kept for classes 2 to 3", routing.Report{Boot: 1, Seq: 2, State: routing.StateReady, Kept: routing.Classes{High: 2, Low: 3}}, "100039ff" + "0100000000000000" + "02000000" + "ffff" + "ffff" + "ffff" + "ffff" +
			"ffffffff" + "ffffffff" + "ffffffff" + "ffffffff" + "ffff" + "ffff" + "ffff" + "ffff" + "ffff" + "ffffffff" + "ffffffff" + "ff" + "00"},
		{"unknown", routing.Report{Boot: 1, Seq: 2, Goodbye: true}, "1100ffff" + "0100000000000000" + "02000000" + "ffff" + "ffff" + "ffff" + "ffff" +
			"ffffffff" + "ffffffff" + "ffffffff" + "ffffffff" + "ffff" + "ffff" + "ffff" + "ffff" + "ffff" + "ffffffff" + "ffffffff" + "ff" + "00"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := EncodeReport(nil, &tc.r)
			require.Len(t, b, RecordSize)
			assert.Equal(t, tc.want, hex.EncodeToString(b))
			got, err := DecodeReport(append(b, 1, 2, 3)) // a newer agent's longer record
			require.NoError(t, err)
			if got.KVUsed.OK {
				assert.InDelta(t, tc.r.KVUsed.V, got.KVUsed.V, 1e-4)
				got.KVUsed = tc.r.KVUsed
			}
			assert.Equal(t, tc.r, got)
		})
	}
}

func TestCodecLimits(t *testing.T) {
	r := routing.Report{
		Boot: 1, Heartbeat: time.Hour, State: 200, LowestClass: 99,
		Running: routing.Some(1 << 30), Waiting: routing.Some(-1), PendingTokens: routing.Some(math.MaxInt),
		Accepted: routing.Some[uint32](math.MaxUint32), KVUsed: routing.Some(1.7), GPUMemoryUsed: routing.Some(math.NaN()),
		PrefillRate: routing.Some(math.Inf(1)), Weight: routing.Some(-1.0), ReadyFor: routing.Some(24 * time.Hour), Age: time.Hour,
	}
	got, err := DecodeReport(EncodeReport(nil, &r))
	require.NoError(t, err)
	assert.Equal(t, 25400*time.Millisecond, got.Heartbeat)
	assert.Equal(t, routing.StateUnknown, got.State)
	assert.Zero(t, got.LowestClass)
	assert.Equal(t, routing.Some(65534), got.Running)
	assert.False(t, got.Waiting.OK)
	assert.Equal(t, routing.Some(math.MaxUint32-1), got.PendingTokens)
	assert.Equal(t, routing.Some[uint32](math.MaxUint32-1), got.Accepted)
	assert.Equal(t, routing.Some(1.0), got.KVUsed)
	assert.False(t, got.GPUMemoryUsed.OK)
	assert.Equal(t, routing.Some(65534*16.0), got.PrefillRate)
	assert.False(t, got.Weight.OK)
	assert.Equal(t, routing.Some(254*time.Second), got.ReadyFor)
	assert.Equal(t, 5100*time.Millisecond, got.Age)

	r = routing.Report{Boot: 1, Heartbeat: 1001 * time.Millisecond, Age: -time.Second}
	got, err = DecodeReport(EncodeReport(nil, &r))
	require.NoError(t, err)
	assert.Equal(t, 1100*time.Millisecond, got.Heartbeat, "the promise is rounded up")
	assert.Zero(t, got.Age)
}

func TestCodecRefuses(t *testing.T) {
	good := EncodeReport(nil, new(fullReport()))
	change := func(i int, v byte) []byte {
		b := append([]byte(nil), good...)
		b[i] = v
		return b
	}
	_, err := DecodeReport(good[:59])
	require.ErrorIs(t, err, ErrShort)
	_, err = DecodeReport(nil)
	require.ErrorIs(t, err, ErrShort)
	_, err = DecodeReport(change(0, 0x20))
	require.ErrorIs(t, err, ErrVersion)
	_, err = DecodeReport(change(0, 0x12))
	require.ErrorIs(t, err, ErrKind)
	_, err = DecodeReport(EncodeReport(nil, &routing.Report{}))
	require.ErrorIs(t, err, ErrBoot)
}

func TestCodecAllocates(t *testing.T) {
	r := fullReport()
	buf := make([]byte, 0, RecordSize)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		b := EncodeReport(buf[:0], &r)
		_, _ = DecodeReport(b)
		_, _ = DecodeReport(b[:20])
	}))
}

// Whatever is decoded encodes to the same bytes again, but for the fields that cannot tell unknown from a last value.
func FuzzDecodeReport(f *testing.F) {
	f.Add(EncodeReport(nil, new(fullReport())))
	f.Add(EncodeReport(nil, &routing.Report{Boot: 1}))
	f.Add([]byte{0x10})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeReport(b)
		if err != nil {
			return
		}
		again := EncodeReport(nil, &r)
		r2, err := DecodeReport(again)
		require.NoError(t, err)
		require.Equal(t, r, r2)
		require.Equal(t, b[4:58], again[4:58])
	})
}

func BenchmarkEncodeReport(b *testing.B) {
	r := fullReport()
	buf := make([]byte, 0, RecordSize)
	b.ReportAllocs()
	for b.Loop() {
		buf = EncodeReport(buf[:0], &r)
	}
}

func BenchmarkDecodeReport(b *testing.B) {
	buf := EncodeReport(nil, new(fullReport()))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeReport(buf); err != nil {
			b.Fatal(err)
		}
	}
}
