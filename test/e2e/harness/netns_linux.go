package harness

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// inside marks a test binary that Isolated has started.
const inside = "E2E_INSIDE_NETNS"

// Drop is the nft ruleset that silently drops what arrives and matches one of the expressions.
func Drop(matches ...string) string {
	return "table inet e2e {\nchain in {\ntype filter hook input priority 0;\n" + strings.Join(matches, " drop\n") + " drop\n}\n}\n"
}

// Isolated runs the calling test a second time in a network namespace of its own, in which only loopback exists and the nft
// ruleset is loaded. It returns true there; outside it returns false after that run, with its result, and the test is to
// return at once. Where the kernel gives no namespace, or ip or nft are missing, the test is skipped with the reason.
func Isolated(t *testing.T, ruleset string) bool {
	t.Helper()
	if os.Getenv(inside) == "1" {
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			t.Fatalf("ip link set lo up: %v: %s", err, out)
		}
		nft := exec.Command("nft", "-f", "-")
		nft.Stdin = strings.NewReader(ruleset)
		if out, err := nft.CombinedOutput(); err != nil {
			t.Fatalf("nft: %v: %s", err, out)
		}
		return true
	}
	for _, tool := range []string{"ip", "nft"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("blocking traffic needs %s: %v", tool, err)
		}
	}
	cmd := exec.Command(os.Args[0], append([]string{"-test.run=^" + t.Name() + "$", "-test.v", "-test.timeout=5m"}, passed()...)...)
	cmd.Env = append(os.Environ(), inside+"=1")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = ownGroup()
	cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENOSPC):
		t.Skipf("no network namespace for this user: %v", err)
	case errors.As(err, &exit):
		t.Fatalf("in the namespace: %v\n%s", err, &out)
	case err != nil:
		t.Fatal(err)
	}
	t.Logf("in the namespace:\n%s", &out)
	if strings.Contains(out.String(), "--- SKIP: "+t.Name()+" ") {
		t.Skip("skipped in the namespace")
	}
	return false
}

// passed are the flags of the outer test binary that the inner one needs too.
func passed() (list []string) {
	for _, a := range os.Args[1:] {
		if !strings.HasPrefix(a, "-test.") {
			list = append(list, a)
		}
	}
	return list
}
