package agent

import (
	"runtime/debug"
	"sync"
)

// Release is the version of this source tree.
const Release = "0.1.0"

// Version is the release with the commit it was built from, where the build recorded it: 0.1.0+1a2b3c4d5e6f.
var Version = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return Release
	}
	commit, dirty := "", ""
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			commit = s.Value[:min(12, len(s.Value))]
		case "vcs.modified":
			if s.Value == "true" {
				dirty = ".dirty"
			}
		}
	}
	if commit == "" {
		return Release
	}
	return Release + "+" + commit + dirty
})
