package engine

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// readAdapters takes the adapters from the newest series of the family: its value is a Unix time, its labels are
// comma lists. Several processes sum the times, so the value is good for nothing but finding the newest. The labels
// are parsed only when they changed.
func (st *state) readAdapters(in *info, at time.Time) {
	st.adapterAt = at
	if !in.seen {
		st.adapters, st.adapter = Adapters{}, ""
		return
	}
	if st.adapters.Known && st.adapter == string(in.labels) {
		return
	}
	st.adapter = string(in.labels)
	a := Adapters{Known: true}
	for it := (labelIter{rest: in.labels}); it.next(); {
		switch string(it.name) {
		case "running_lora_adapters":
			a.Running = names(unescape(it.value))
		case "waiting_lora_adapters":
			a.Waiting = names(unescape(it.value))
		case "max_lora":
			if n, err := strconv.Atoi(string(it.value)); err == nil && n >= 0 {
				a.Max = routing.Some(n)
			}
		}
	}
	st.adapters = a
}

// names splits a comma list, sorted and without blanks.
func names(list string) []string {
	out := strings.FieldsFunc(list, func(c rune) bool { return c == ',' || c == ' ' })
	slices.Sort(out)
	return slices.Compact(out)
}
