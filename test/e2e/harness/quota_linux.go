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
	dir := fmt.Sprintf("/sys/fs/cgroup/cpu/grapevine-e2e-%d", p.Pid())
	quota, period := "cpu.cfs_quota_us", fmt.Sprint(int(share*100_000))
	if !exists("/sys/fs/cgroup/cpu/cpu.cfs_period_us") {
		dir = fmt.Sprintf("/sys/fs/cgroup/grapevine-e2e-%d", p.Pid())
		quota, period = "cpu.max", fmt.Sprintf("%d 100000", int(share*100_000))
	}
	return limit(p, dir, quota, period)
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
