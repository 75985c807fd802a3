//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// scenario is one measured run of the load generator.
type scenario struct {
	name string
	args string
}

var scenarios = []scenario{
	{"c16", "-mode closed -conc 16 -dur 1s"},
	{"c64", "-mode closed -conc 64 -dur 1s"},
	{"b32k", "-mode closed -conc 16 -body 32768 -dur 700ms"},
	{"b1m", "-mode closed -conc 4 -body 1048576 -dur 800ms"},
	{"s200", "-mode stream -conc 200 -chunks 75 -interval 20ms -ramp 300ms -dur 10s"},
	{"s200b", "-mode stream -conc 200 -chunks 75 -interval 20ms -ramp 300ms -dur 10s -batch"},
	{"s1000", "-mode stream -conc 1000 -chunks 16 -interval 100ms -ramp 300ms -dur 12s"},
	{"s1000x", "-mode stream -conc 1000 -chunks 60 -interval 25ms -ramp 300ms -dur 12s"},
	{"idle", "-mode stream -conc 1000 -chunks 2 -interval 60s -ramp 500ms -dur 12s -hold 1200ms"},
}

// bench is one call of the command.
type bench struct {
	dir                 string
	agent, engine, load string
	reps                int
	peers               []peer
	scenarios           []scenario
	log                 *os.File
}

// sample is what one scenario of one candidate in one repetition showed.
type sample struct {
	CPU    float64    // seconds for each request or chunk
	Added  [2]float64 // p50 and p90 of a chunk's delay, µs
	RSS    float64    // bytes
	Start  float64    // RSS before any request, bytes
	Errors int
}

func proxyBench(args []string) error {
	fs := flag.NewFlagSet("proxy", flag.ContinueOnError)
	short := fs.Bool("short", false, "few peers and scenarios, 3 repetitions; fails if a ratio that is gated is above 1.5 of its target")
	names := fs.String("peers", "", "comma list; default all")
	which := fs.String("scenarios", "", "comma list; default all")
	reps := fs.Int("reps", 5, "repetitions")
	calls := fs.Bool("syscalls", false, "count system calls instead (strace)")
	cuts := fs.Bool("bursts", false, "instead: are streams cut when 400 begin at once, with GOMAXPROCS 1, 2 and unset, and with a starved CPU")
	fs.Func("build", "NAME=PATH of another build of the agent, run beside this one; repeatable", func(v string) error {
		name, path, ok := strings.Cut(v, "=")
		if !ok || name == "" {
			return errors.New("want NAME=PATH")
		}
		peers = append(peers, otherBuilds(name, path)...)
		return nil
	})
	if err := fs.Parse(args); err != nil {
		return err
	}
	b := &bench{reps: *reps}
	if *short {
		b.reps = min(*reps, 3)
		if *which == "" {
			*which = "c16,s200,s1000x,idle"
		}
		if *names == "" {
			*names = "nginx,haproxy,envoy,grapevine"
		}
	}
	for _, p := range peers {
		if *names != "" && !slices.Contains(strings.Split(*names, ","), p.name) {
			continue
		}
		if p.missing != nil {
			if why := p.missing(); why != "" {
				fmt.Printf("skipped %s: %s\n", p.name, why)
				continue
			}
		}
		b.peers = append(b.peers, p)
	}
	for _, s := range scenarios {
		if *which == "" || slices.Contains(strings.Split(*which, ","), s.name) {
			b.scenarios = append(b.scenarios, s)
		}
	}
	var err error
	if b.dir, err = os.MkdirTemp("", "grapevine-bench-"); err != nil {
		return err
	}
	defer os.RemoveAll(b.dir)
	if err := b.build(); err != nil {
		return err
	}
	if *calls {
		return b.countCalls()
	}
	if *cuts {
		return b.bursts()
	}
	all, err := b.measure()
	if err != nil {
		return err
	}
	report(b, all)
	if !*short {
		return nil
	}
	return b.gate(all)
}

// build makes the programs of ours.
func (b *bench) build() error {
	var err error
	if b.log, err = os.Create(filepath.Join(b.dir, "log")); err != nil {
		return err
	}
	for dst, pkg := range map[*string]string{&b.agent: "./cmd/grapevine", &b.engine: "./test/bench/engine", &b.load: "./test/bench/load"} {
		*dst = filepath.Join(b.dir, filepath.Base(pkg))
		if out, err := exec.Command("go", "build", "-o", *dst, pkg).CombinedOutput(); err != nil {
			return fmt.Errorf("build %s (run this from the repository's root): %w\n%s", pkg, err, out)
		}
	}
	return nil
}

// measure lets all candidates take turns.
func (b *bench) measure() (map[string]map[string][]sample, error) {
	all := make(map[string]map[string][]sample)
	for rep := range b.reps {
		order := slices.Clone(b.peers)
		if rep%2 == 1 {
			slices.Reverse(order)
		}
		for _, p := range order {
			got, err := b.turn(p)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			if all[p.name] == nil {
				all[p.name] = make(map[string][]sample)
			}
			for s, v := range got {
				all[p.name][s] = append(all[p.name][s], v)
			}
			fmt.Fprintf(os.Stderr, "repetition %d: %s\n", rep+1, p.name)
		}
	}
	return all, nil
}

// turn runs all scenarios against one candidate.
func (b *bench) turn(p peer) (map[string]sample, error) {
	under, at, stop, err := b.start(p)
	if err != nil {
		return nil, err
	}
	defer stop()
	out := make(map[string]sample)
	_, base := usage(under)
	for _, s := range b.scenarios {
		v, err := b.one(s, under, at.port)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		v.Start = base
		out[s.name] = v
	}
	return out, nil
}

// start brings up the engines and the candidate, and returns the process groups that count.
func (b *bench) start(p peer) (under []int, at *place, stop func(), err error) {
	ports, err := freePorts(13)
	if err != nil {
		return nil, nil, nil, err
	}
	at = &place{port: ports[0], spare: ports[3:]}
	if at.dir, err = os.MkdirTemp(b.dir, p.name); err != nil {
		return nil, nil, nil, err
	}
	if err = os.Chmod(at.dir, 0o777); err != nil { // nginx's worker is another user
		return nil, nil, nil, err
	}
	var running []*exec.Cmd
	end := func() {
		for _, c := range slices.Backward(running) {
			_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
			_ = c.Wait()
		}
	}
	defer func() {
		if err != nil {
			end()
		}
	}()
	var listen []string
	for i := range at.engine {
		at.engine[i] = fmt.Sprintf("127.0.0.1:%d", ports[1+i])
		at.unix[i] = filepath.Join(at.dir, fmt.Sprint("e", i))
		listen = append(listen, at.engine[i]+"+unix:"+at.unix[i])
	}
	run := func(cpu int, argv, env []string) error {
		c := pinned(cpu, argv...)
		c.Env = append(os.Environ(), env...)
		c.Stdout, c.Stderr = b.log, b.log
		if err := c.Start(); err != nil {
			return err
		}
		running = append(running, c)
		return nil
	}
	if err = run(0, []string{b.engine, "-listen", strings.Join(listen, ",")}, nil); err != nil {
		return nil, nil, nil, err
	}
	cmds, err := p.start(b, at)
	if err != nil {
		return nil, nil, nil, err
	}
	for _, c := range cmds {
		cpu := 1
		if c.aside {
			cpu = 0
		}
		if err = run(cpu, c.argv, c.env); err != nil {
			return nil, nil, nil, err
		}
		if !c.aside {
			under = append(under, running[len(running)-1].Process.Pid)
		}
	}
	for limit := time.Now().Add(30 * time.Second); !answers(at.port); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(limit) {
			err = errors.New("does not answer; log: " + b.tail())
			return nil, nil, nil, err
		}
	}
	time.Sleep(2 * time.Second) // agents find each other and read their engines
	for range 20 {
		answers(at.port)
	}
	return under, at, end, nil
}

func (b *bench) tail() string {
	t, _ := os.ReadFile(b.log.Name())
	return string(t[max(0, len(t)-2000):])
}

// pinned is a command on one CPU, ahead of other work where we may.
func pinned(cpu int, argv ...string) *exec.Cmd {
	c := exec.Command("/proc/self/exe", append([]string{"pin", strconv.Itoa(cpu)}, argv...)...)
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	return c
}

// one runs a scenario.
func (b *bench) one(s scenario, under []int, port int) (sample, error) {
	var v sample
	before, _ := usage(under)
	c := pinned(0, append([]string{b.load, "-url", fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)}, strings.Fields(s.args)...)...)
	out, err := c.StdoutPipe()
	if err != nil {
		return v, err
	}
	if err := c.Start(); err != nil {
		return v, err
	}
	defer func() { _ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL); _ = c.Wait() }()
	lines := bufio.NewScanner(out)
	for lines.Scan() && strings.HasPrefix(lines.Text(), "READY") {
		time.Sleep(500 * time.Millisecond)
		_, v.RSS = usage(under)
	}
	after, rss := usage(under)
	if v.RSS == 0 {
		v.RSS = rss
	}
	var r struct {
		Mode             string
		Requests, Chunks int
		Errors, Missing  int
		Seconds          float64
		DelayUs          struct{ P50, P90 float64 }
	}
	if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
		return v, fmt.Errorf("load generator said %q", lines.Text())
	}
	n := float64(r.Chunks)
	if r.Mode == "closed" {
		n = float64(r.Requests) * (r.Seconds + 0.2) / r.Seconds // 0.2 s of warm-up are not counted
	}
	v.CPU, v.Errors = (after-before)/max(n, 1), r.Errors+r.Missing
	v.Added = [2]float64{r.DelayUs.P50, r.DelayUs.P90}
	return v, nil
}

// usage is the CPU time in seconds and the memory in bytes of all processes in the groups.
func usage(groups []int) (cpu, rss float64) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		stat, err := os.ReadFile(d + "/stat")
		if err != nil {
			continue
		}
		f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+2:]))
		group, _ := strconv.Atoi(f[2])
		if !slices.Contains(groups, group) {
			continue
		}
		pages, _ := strconv.Atoi(f[21])
		rss += float64(pages * os.Getpagesize())
		tasks, _ := filepath.Glob(d + "/task/*/schedstat")
		for _, t := range tasks {
			s, _ := os.ReadFile(t)
			ns, _, _ := strings.Cut(string(s), " ")
			v, _ := strconv.ParseFloat(ns, 64)
			cpu += v / 1e9
		}
	}
	return cpu, rss
}

func freePorts(n int) ([]int, error) {
	var out []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		out = append(out, l.Addr().(*net.TCPAddr).Port)
	}
	return out, nil
}

// answers reports whether one request gets 200.
func answers(port int) bool {
	c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), time.Second)
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(2 * time.Second))
	const body = `{"model":"fake","stream":false,"messages":[{"role":"user","content":"hi"}]}`
	fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	line, _ := bufio.NewReader(c).ReadString('\n')
	return strings.HasPrefix(line, "HTTP/1.1 200")
}
