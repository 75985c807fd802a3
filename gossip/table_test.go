package gossip_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
)

// asked are the 25 tests that the design of gossip was accepted with: what is expected, and which tests hold it. Those of
// routing and proxy hold the part that choosing has in it. Tests in this folder run in memory and fake time unless they
// say otherwise and carry the strict bounds; those of test/gossip run real agents in network namespaces, with looser ones.
var asked = []struct {
	n        int
	what     string
	expected string
	tests    string // folder.Test, separated by spaces
	why      string // where a figure does not hold, or is measured in another way
}{
	{1, "3, 10, 30 agents, 4 records/s each", "p99 to the last peer ≤ 50 ms, 0 lost, age p50 ≤ 150 ms, p99 ≤ 350 ms", "gossip.TestSpread", ""},
	{2, "100 agents, key, rate by the rule", "age p50 ≤ 220 ms, p99 ≤ 550 ms; records ≤ 32 KiB/s, all ≤ 40 KiB/s and ≤ 410 packets/s; CPU ≤ 1 %", "gossip.TestC75BudgetAt100 test/bench.gossipBench", "CPU over real sockets by go run ./test/bench gossip: 0.45 % of a core an agent, with age p50 187 ms and p99 376 ms"},
	{3, "10 agents, idle engines", "1 ± 20 % records/s, ≤ 1.5 KB/s, CPU ≤ 0.3 %", "gossip.TestIdle gossip.TestCPU", ""},
	{4, "predicted wait jumps 20 times", "seen in ≤ 20 ms, ≤ 130 ms just after a record; ≤ 10 records in any second", "gossip.TestJump gossip.TestPacer", ""},
	{5, "30 agents, 5 % loss, 30 s at 4/s", "≥ 94 % arrive, no age > 3 heartbeats, no failed event", "gossip.TestLoss test/gossip.TestPackets", ""},
	{6, "order of records", "5, 6, wrap accepted; a new boot applied at once, the old one evicted", "gossip.TestHeardOrder gossip.TestC72RestartSameName", ""},
	{7, "any bytes", "no panic, no allocation, counters add up", "gossip.FuzzDecodeReport gossip.TestCodecAllocates gossip.TestCodecRefuses", ""},
	{8, "kill -9 of one of 10", "failed at all ≤ 6 s; no request to it after 3 heartbeats or the first refusal", "gossip.TestJoinAndKill gossip.TestSilentGetsNoRequest test/gossip.TestProcesses test/e2e.TestKillAgent", ""},
	{9, "SIGTERM of one of 10 under load", "goodbye ≤ 50 ms, leave ≤ 1.5 s, no failed event, exit ≤ drain + 4 s, 0 failed requests", "gossip.TestCluster64 test/gossip.TestProcesses", ""},
	{10, "SIGSTOP for 2 s, 5 times", "0 failed events; skipped after 3 heartbeats, back ≤ 200 ms after SIGCONT", "test/gossip.TestProcesses", "the bound of the test is 400 ms, since it looks at the page each 20 ms and shares two cores"},
	{11, "a starved agent among 10: half a core shared with busy loops, 25 s", "20 busy loops: 0 failed events; 100: at most the starved one, which comes back", "test/gossip.TestStarved", "a control group in place of GOMAXPROCS=1, so that the others are not starved too"},
	{12, "halves cut 15 s and 40 s", "known ≤ 8 s, halves without errors, all fresh ≤ 10 s after healing", "gossip.TestPartition test/gossip.TestHalves", "a request that was sent over the cut and never arrived is found lost after 20 s and goes elsewhere: late, no error"},
	{13, "kill -9 and restart under the same name", "new address everywhere ≤ 2 s, nobody shuts down, old entry gone ≤ 1 s later", "gossip.TestC72RestartSameName", ""},
	{14, "200 restarts of one of 10", "10 members again within the reconnect timeout, exchanges within 10 %, heap < 1 MiB", "gossip.TestRestarts", ""},
	{15, "100 agents start through 3 seeds", "all see all ≤ 15 s", "gossip.TestMassStart", ""},
	{16, "tags change each second while loads flow, race detector", "no race", "gossip.TestTagsWhileLoadsFlow", ""},
	{17, "blocked consumer of events", "loads go on, no probe failure, the last state is told", "gossip.TestBlockedConsumer", ""},
	{18, "wrong key, no key, capture", "refused, one line; nothing readable; CPU ≤ 1.5 ×", "gossip.TestWrongKeyAndCluster gossip.TestNoPlaintext gossip.TestCPU", ""},
	{19, "key rotation under load", "no failed event, no age > 3 heartbeats, joins at every step", "gossip.TestKeyRotation", ""},
	{20, "stock Serf node", "alive, others unaffected, never chosen", "gossip.TestStockSerf", ""},
	{21, "records of unknown boots, flood of 10,000", "≤ 256 parked, memory flat, applied once the join comes", "gossip.TestFlood gossip.TestHeardParks", ""},
	{22, "budget at 10, 100, 300", "10 → 2.8 → 4.3 records/s with a key, background above 129, ≤ 400 packets/s and the bytes", "gossip.TestBudget gossip.TestBackgroundRate", ""},
	{23, "300 agents, profile large, 60 s", "heard ones ≤ 600 ms p99, background ≤ 5 s p99, 0 failed events", "gossip.TestCrowd gossip.TestCrowdLong", ""},
	{24, "log adapter", "levels, component, one text in 10 s", "gossip.TestLogBridge", ""},
	{25, "packet sizes", "no UDP payload > 1245 B", "gossip.TestC75BudgetAt100 gossip.TestCluster64 gossip.TestCrowd", ""},
}

// The table: every test of it exists, and every line has a figure or needs none.
//
//	go test ./gossip -run Table -v            prints it
//	go test ./gossip -long -update            measures it anew (minutes); so does go test ./test/gossip -long -update, as root
func TestTable(t *testing.T) {
	measured, err := gossiptest.Figures()
	require.NoError(t, err)
	known := map[string]map[string]bool{}
	for i, a := range asked {
		require.Equal(t, i+1, a.n)
		t.Logf("%2d  %s\n    expected: %s", a.n, a.what, a.expected)
		some := 0
		for _, m := range measured {
			if m.N == a.n {
				t.Logf("    measured: %s (%s; %s)", m.Text, m.Test, m.Where)
				some++
			}
		}
		if a.why != "" {
			t.Logf("    note: %s", a.why)
		}
		t.Logf("    tests: %s", a.tests)
		switch {
		case a.n == 6 || a.n == 7 || a.n == 22 || a.n == 24: // they hold or they do not
		case strings.HasPrefix(a.tests, "gossip."): // the others are measured where there is root
			assert.NotZero(t, some, "%d has no figure", a.n)
		}
		for name := range strings.FieldsSeq(a.tests) {
			i := strings.LastIndexByte(name, '.')
			dir := name[:i]
			if known[dir] == nil {
				known[dir] = functions(t, filepath.Join("..", dir))
			}
			assert.True(t, known[dir][name[i+1:]], "%d: there is no %s", a.n, name)
		}
	}
	for _, m := range measured {
		require.Truef(t, m.N >= 1 && m.N <= len(asked), "a figure for number %d", m.N)
		test, _, _ := strings.Cut(m.Test, "/")
		assert.Contains(t, asked[m.N-1].tests, "."+test, "a figure of a test that is not in the table: %v", m)
	}
}

// functions are the names of a folder's top-level functions.
func functions(t *testing.T, dir string) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	for _, name := range files {
		src, err := os.ReadFile(name)
		require.NoError(t, err)
		f, err := parser.ParseFile(token.NewFileSet(), name, src, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				out[fn.Name.Name] = true
			}
		}
	}
	return out
}
