package harness

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// Run is one run of a request at a simulated engine.
type Run struct {
	Engine string
	enginesim.Entry
}

// Runs reads the journals of all simulated engines of the stage, those of killed ones included. A run that its engine's death
// ended has no end.
func (s *Stage) Runs() (list []Run) {
	s.t.Helper()
	files, err := filepath.Glob(filepath.Join(s.dir, "*.journal"))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			s.t.Fatal(err)
		}
		// A run has a line at its start and one at its end; a restarted engine counts its runs from 1 again.
		at := map[uint64]int{}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			r := Run{Engine: filepath.Base(name)}
			if err := json.Unmarshal(lines.Bytes(), &r.Entry); err != nil {
				continue // the line at which the engine was killed
			}
			if i, ok := at[r.Run]; ok && list[i].Received == r.Received {
				list[i] = r
				continue
			}
			at[r.Run] = len(list)
			list = append(list, r)
		}
		f.Close()
	}
	return list
}

// Twice describes the requests that ran at two engines at the same time for longer than the limit. Prompts must be unique.
func Twice(runs []Run, limit time.Duration) (list []string) {
	of := map[string][]Run{}
	for _, r := range runs {
		if r.End != 0 {
			of[r.PromptHash] = append(of[r.PromptHash], r)
		}
	}
	for _, same := range of {
		slices.SortFunc(same, func(a, b Run) int { return int(a.Received - b.Received) })
		for i := 1; i < len(same); i++ {
			a, b := same[i-1], same[i]
			if both := time.Duration(min(a.End, b.End) - b.Received); both > limit {
				list = append(list, fmt.Sprintf("%v at %s (%s) and %s (%s)", both, a.Engine, a.Outcome, b.Engine, b.Outcome))
			}
		}
	}
	return list
}
