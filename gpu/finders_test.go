package gpu

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fakeProc is a /proc with an engine at port 8000 (pid 10, its worker 11, the worker's child 12), an agent and
// somebody else's process, which holds a card too.
func fakeProc(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	write("net/tcp", "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"+
		"   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1 0\n"+
		"   1: 0100007F:1F40 0100007F:C000 01 00000000:00000000 00:00000000 00000000     0        0 888 1 0\n"+
		"   2: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 999 1 0\n")
	write("net/unix", "Num       RefCount Protocol Flags    Type St Inode Path\n0000: 00000002 00000000 00010000 0001 01 555 /run/engine.sock\n")
	for pid, p := range map[int]struct {
		comm   string
		parent int
		fds    []string
	}{
		1:  {"init", 0, nil},
		10: {"python3 (api) x", 1, []string{"/dev/null", "socket:[777]", "socket:[555]", "/dev/nvidiactl"}},
		11: {"EngineCore", 10, []string{"/dev/nvidia2", "/dev/nvidia-uvm"}},
		12: {"worker", 11, []string{"/dev/nvidia3", "/dev/nvidia2"}},
		20: {"grapevine", 1, []string{"socket:[999]", "socket:[888]"}},
		30: {"other", 1, []string{"/dev/nvidia0"}},
	} {
		write(fmt.Sprintf("%d/stat", pid), fmt.Sprintf("%d (%s) S %d 1 1", pid, p.comm, p.parent))
		fd := filepath.Join(dir, fmt.Sprint(pid), "fd")
		require.NoError(t, os.MkdirAll(fd, 0o755))
		for i, to := range p.fds {
			require.NoError(t, os.Symlink(to, filepath.Join(fd, fmt.Sprint(i))))
		}
	}
	return dir
}

func TestEngineFiles(t *testing.T) {
	proc := fakeProc(t)
	for _, f := range []Finder{engineFiles(proc, 8000, ""), engineFiles(proc, 0, "/run/engine.sock")} {
		got, err := f.Find()
		require.NoError(t, err)
		slices.Sort(got)
		assert.Equal(t, []string{"/dev/nvidia2", "/dev/nvidia3"}, got)
	}
	us, _, err := choose(cards(4).units, Config{Finders: []Finder{engineFiles(proc, 8000, "")}})
	require.NoError(t, err)
	assert.ElementsMatch(t, []int{2, 3}, handles(us))

	_, err = engineFiles(proc, 8001, "").Find()
	require.ErrorContains(t, err, "nobody listens")
	got, err := engineFiles(proc, 8080, "").Find()
	require.NoError(t, err)
	assert.Empty(t, got, "the process on this port holds no card")
	require.NoError(t, os.RemoveAll(filepath.Join(proc, "10")))
	_, err = engineFiles(proc, 8000, "").Find()
	require.ErrorContains(t, err, "not in our process name space")
}

func TestEngineProcesses(t *testing.T) {
	proc := fakeProc(t)
	now := time.Now()
	own := engineProcesses(proc, 8000, "", func() time.Time { return now })
	for pid, ours := range map[uint32]bool{1: false, 10: true, 11: true, 12: true, 20: false, 30: false, 99: false} {
		assert.Equal(t, ours, own(pid), pid)
	}
	require.NoError(t, os.RemoveAll(filepath.Join(proc, "12")))
	assert.True(t, own(12), "looked at a moment ago")
	now = now.Add(askAgain)
	assert.False(t, own(12))
	require.NoError(t, os.RemoveAll(proc))
	now = now.Add(askAgain)
	assert.False(t, own(10))
}

// The real /proc: we listen, and hold no card.
func TestEngineFilesOfThisProcess(t *testing.T) {
	if _, err := os.Stat("/proc/net/tcp"); err != nil {
		t.Skip("no /proc here")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = ln.Close() }()
	got, err := EngineFiles(ln.Addr().(*net.TCPAddr).Port, "").Find()
	require.NoError(t, err)
	assert.Empty(t, got)
}

// field encodes a length-delimited protobuf field.
func field(number uint64, parts ...string) string {
	value := strings.Join(parts, "")
	b := binary.AppendUvarint(nil, number<<3|2)
	b = binary.AppendUvarint(b, uint64(len(value)))
	return string(b) + value
}

// kubelet serves an answer on a Unix socket as the kubelet does.
func kubelet(t *testing.T, status string, message string) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "kubelet.sock")
	ln, err := net.Listen("unix", socket)
	require.NoError(t, err)
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{Protocols: protocols, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "/v1.PodResourcesLister/List", r.URL.Path)
		assert.Equal(t, "application/grpc", r.Header.Get("Content-Type"))
		assert.Equal(t, "trailers", r.Header.Get("Te"))
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Trailer", "Grpc-Status")
		frame := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
		_, _ = w.Write(append(frame, message...))
		w.Header().Set("Grpc-Status", status)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(ln)
	}()
	t.Cleanup(func() {
		_ = srv.Close()
		<-done
	})
	return socket
}

func TestPodDevices(t *testing.T) {
	devices := func(resource string, ids ...string) string {
		s := field(1, resource)
		for _, id := range ids {
			s += field(2, id)
		}
		return field(2, s)
	}
	message := field(1, field(1, "other"), field(2, "ns"), field(3, field(1, "vllm"), devices("nvidia.com/gpu", "GPU-a0000000"))) +
		field(1, field(1, "mine"), field(2, "elsewhere"), field(3, field(1, "vllm"), devices("nvidia.com/gpu", "GPU-b0000000"))) +
		field(1, field(1, "mine"), field(2, "ns"),
			field(3, field(1, "agent"), devices("example.com/nic", "nic0")),
			field(3, field(1, "vllm"), devices("nvidia.com/gpu", "GPU-c0000000", "GPU-d0000000::2"), devices("nvidia.com/mig-1g.10gb", "MIG-1")))
	f := PodDevices(kubelet(t, "0", message), "ns", "mine")
	got, err := f.Find()
	require.NoError(t, err)
	assert.Equal(t, []string{"GPU-c0000000", "GPU-d0000000::2", "MIG-1"}, got)
	us, method, err := choose(cards(4).units, Config{Finders: []Finder{f}})
	require.NoError(t, err)
	assert.Equal(t, []int{2, 3}, handles(us))
	assert.Equal(t, "the kubelet's pod resources", method)

	_, err = PodDevices(kubelet(t, "0", message), "ns", "gone").Find()
	require.ErrorContains(t, err, "knows no pod ns/gone")
	_, err = PodDevices(kubelet(t, "7", ""), "ns", "mine").Find()
	require.ErrorContains(t, err, `status "7"`)
	_, err = PodDevices(filepath.Join(t.TempDir(), "none"), "ns", "mine").Find()
	require.Error(t, err)
	_, err = PodDevices("", "", "").Find()
	require.ErrorContains(t, err, "not known")
}

func TestSharedClaim(t *testing.T) {
	claim := func(name string, devices ...string) string {
		s := field(2, name) + field(3, "ns")
		for _, driver := range devices {
			s += field(4, field(1, field(1, "cdi=x")), field(2, driver), field(3, "pool"), field(4, "gpu-0"))
		}
		return field(5, s)
	}
	const nv = "gpu.nvidia.com"
	pod := func(containers ...string) string {
		return field(1, field(1, "mine"), field(2, "ns"), strings.Join(containers, ""))
	}
	for _, c := range []struct {
		name    string
		message string
		visible int
		err     string
	}{
		{"shared", pod(field(3, field(1, "vllm"), claim("gpus", nv, nv)), field(3, field(1, "agent"), claim("gpus", nv, nv))), 2, ""},
		{"we see more than the claim", pod(field(3, field(1, "vllm"), claim("gpus", nv, nv)), field(3, field(1, "agent"), claim("gpus", nv, nv))), 4, "nothing found"},
		{"ours alone", pod(field(3, field(1, "vllm"), claim("a", nv)), field(3, field(1, "agent"), claim("b", nv, nv))), 2, "no other container of the pod has our claim b"},
		{"the engine's alone", pod(field(3, field(1, "vllm"), claim("a", nv, nv)), field(3, field(1, "agent"))), 2, "no claim on a card"},
		{"of something else", pod(field(3, field(1, "vllm"), claim("a", "nic")), field(3, field(1, "agent"), claim("a", "nic"))), 2, "no claim on a card"},
		{"another pod's", strings.Replace(pod(field(3, field(1, "vllm"), claim("g", nv, nv)), field(3, field(1, "agent"), claim("g", nv, nv))), "mine", "your", 1), 2, "no claim on a card"},
	} {
		f := SharedClaim(kubelet(t, "0", c.message), "ns", "mine", "agent")
		us, method, err := choose(cards(c.visible).units, Config{Finders: []Finder{f}})
		if c.err != "" {
			require.ErrorContains(t, err, c.err, c.name)
			continue
		}
		require.NoError(t, err, c.name)
		assert.Len(t, us, c.visible)
		assert.Equal(t, "a ResourceClaim shared with the engine's container", method)
	}
	_, err := SharedClaim("", "ns", "mine", "").Find()
	require.ErrorContains(t, err, "not known")
}

func FuzzPodDevices(f *testing.F) {
	f.Add([]byte(field(1, field(1, "mine"), field(2, "ns"), field(3, field(2, field(1, "nvidia.com/gpu"), field(2, "GPU-a"))))))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _ = podDevices(b, "ns", "mine") // must neither panic nor run on
		_, _ = sharedClaim(b, "ns", "mine", "agent")
	})
}
