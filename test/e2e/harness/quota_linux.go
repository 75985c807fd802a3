package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Quota holds a process to a share of one core by the CPU controller, at least 0.01; it returns the reason where that cannot
// be had. Again changes the share.
func Quota(p *Process, share float64) (reason string) {
	p.t.Helper()
	quota, value := "cpu.cfs_quota_us", fmt.Sprint(int(share*100_000))
	if !exists("/sys/fs/cgroup/cpu/cpu.cfs_period_us") {
		quota, value = "cpu.max", fmt.Sprintf("%d 100000", int(share*100_000))
	}
	return limit(p, group(p), quota, value)
}

// group is the control group of a process that Quota holds.
func group(p *Process) string {
	base := "/sys/fs/cgroup"
	if exists("/sys/fs/cgroup/cpu/cpu.cfs_period_us") {
		base = "/sys/fs/cgroup/cpu"
	}
	return fmt.Sprintf("%s/grapevine-e2e-%d", base, p.Pid())
}

// Spin starts n endless loops that share what Quota left to the process; it returns how to end them.
func (s *Stage) Spin(p *Process, n int) (end func()) {
	s.t.Helper()
	var list []*Process
	for i := range n {
		x := s.Start(fmt.Sprintf("spin%d", i), nil, "sh", "-c", "while :; do :; done")
		if err := os.WriteFile(filepath.Join(group(p), "cgroup.procs"), []byte(fmt.Sprint(x.Pid())), 0o644); err != nil {
			s.t.Fatal(err)
		}
		list = append(list, x)
	}
	return func() {
		for _, x := range list {
			x.Kill()
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// limit puts the process into a control group with one setting, which goes with the test; again changes the setting.
func limit(p *Process, dir, file, value string) (reason string) {
	if !exists(dir) {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Sprintf("no control group: %v", err)
		}
		p.t.Cleanup(func() {
			p.Kill()
			for range 50 { // the kernel lets go of the members a little later
				if os.Remove(dir) == nil {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
			p.t.Errorf("%s is left", dir)
		})
	}
	for _, w := range []struct{ file, value string }{{file, value}, {"cgroup.procs", fmt.Sprint(p.Pid())}} {
		if err := os.WriteFile(filepath.Join(dir, w.file), []byte(w.value), 0o644); err != nil {
			return fmt.Sprintf("control group: %v", err)
		}
	}
	return ""
}
