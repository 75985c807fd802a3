package main

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
)

// C85: the memory limit is the control group's, of either version, by the host's path or as the container's root.
func TestC85GroupMemory(t *testing.T) {
	file := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
	for name, row := range map[string]struct {
		fs   fstest.MapFS
		want uint64
	}{
		"version 2, container": {fstest.MapFS{"proc/self/cgroup": file("0::/\n"), "sys/fs/cgroup/memory.max": file("134217728\n")}, 128 << 20},
		"version 2, host": {fstest.MapFS{"proc/self/cgroup": file("0::/a.slice/b.service\n"), "sys/fs/cgroup/a.slice/memory.max": file("1000\n"),
			"sys/fs/cgroup/a.slice/b.service/memory.max": file("max\n")}, 1000},
		"version 2, the least counts": {fstest.MapFS{"proc/self/cgroup": file("0::/a/b\n"), "sys/fs/cgroup/a/memory.max": file("1000\n"),
			"sys/fs/cgroup/a/b/memory.max": file("500\n")}, 500},
		"version 1": {fstest.MapFS{"proc/self/cgroup": file("12:cpu,cpuacct:/x\n7:memory:/kubepods/pod1\n"),
			"sys/fs/cgroup/memory/kubepods/pod1/memory.limit_in_bytes": file("2000\n"), "sys/fs/cgroup/memory/memory.limit_in_bytes": file("9223372036854771712\n")}, 2000},
		"version 1, container": {fstest.MapFS{"proc/self/cgroup": file("7:memory:/docker/abc\n"), "sys/fs/cgroup/memory/memory.limit_in_bytes": file("3000\n")}, 3000},
		"no limit":             {fstest.MapFS{"proc/self/cgroup": file("0::/\n"), "sys/fs/cgroup/memory.max": file("max\n")}, 0},
		"no control groups":    {fstest.MapFS{}, 0},
		"rubbish":              {fstest.MapFS{"proc/self/cgroup": file("x\n::\n0::\n"), "sys/fs/cgroup/memory.max": file("x")}, 0},
	} {
		got, ok := groupMemory(row.fs)
		assert.Equal(t, row.want != 0, ok, name)
		if ok {
			assert.Equal(t, row.want, got, name)
		}
	}
	assert.True(t, isSet([]string{"A=b", "GOMEMLIMIT=1GiB"}, "GOMEMLIMIT"))
	assert.False(t, isSet([]string{"GOMEMLIMIT="}, "GOMEMLIMIT"))
}
