package gpu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// choose tells which units are ours and how that was told, in this order:
//
//  1. GRAPEVINE_GPU_DEVICES;
//  2. CUDA_VISIBLE_DEVICES of our own environment, where it is set;
//  3. NVIDIA_VISIBLE_DEVICES, where it names devices;
//  4. exactly one visible card or slice;
//  5. the finders of the configuration.
//
// Otherwise it cannot be told: never the first, never all.
func choose(all []unit, cfg Config) ([]unit, string, error) {
	usable := leaves(all)
	if s := strings.TrimSpace(cfg.Devices); s != "" {
		return named(all, s, "GRAPEVINE_GPU_DEVICES")
	}
	if s, ok := lookup(cfg.Env, "CUDA_VISIBLE_DEVICES"); ok {
		return cuda(all, s, cfg.Env)
	}
	if s, ok := lookup(cfg.Env, "NVIDIA_VISIBLE_DEVICES"); ok {
		if us, method, err := injected(all, s); us != nil || err != nil {
			return us, method, err
		}
	}
	switch len(usable) {
	case 0:
		return nil, "", fmt.Errorf("%w: no card is visible", ErrUnavailable)
	case 1:
		return usable, "the only visible card", nil
	}
	why := []string{"set GRAPEVINE_GPU_DEVICES"}
	for _, f := range cfg.Finders {
		names, err := f.Find()
		if err != nil {
			why = append(why, f.Method+": "+err.Error())
			continue
		}
		if us := byNames(all, names); len(us) > 0 {
			return us, f.Method, nil
		}
		why = append(why, f.Method+": nothing found")
	}
	return nil, "", &Ambiguous{Cards: len(usable), Why: strings.Join(why, "; ")}
}

// CheckDevices tells what is wrong with the form of a Config.Devices; whether the cards exist shows later.
func CheckDevices(s string) error {
	s = strings.TrimSpace(s)
	if s == "" || s == "all" || s == "none" {
		return nil
	}
	for e := range strings.SplitSeq(s, ",") {
		e = strings.TrimSpace(e)
		card, slice, sliced := strings.Cut(e, ":")
		if _, err := strconv.ParseUint(card, 10, 16); err == nil {
			if _, err := strconv.ParseUint(slice, 10, 16); err == nil || !sliced {
				continue
			}
		}
		if !isUUID(e) || sliced {
			return fmt.Errorf("%q is no index, card:slice, or UUID (GPU-..., MIG-...)", e)
		}
	}
	return nil
}

func isUUID(s string) bool {
	return (strings.HasPrefix(s, "GPU-") || strings.HasPrefix(s, "MIG-")) && len(s) > 4
}

// named resolves a list in NVML's order. Every entry must be there.
func named(all []unit, list, source string) ([]unit, string, error) {
	switch list {
	case "all":
		if us := leaves(all); len(us) > 0 {
			return us, source, nil
		}
		return nil, "", fmt.Errorf("%w: no card is visible", ErrUnavailable)
	case "none", "void":
		return nil, "", fmt.Errorf("%w: %s=%s", ErrNone, source, list)
	}
	var out []unit
	for e := range strings.SplitSeq(list, ",") {
		us, err := entry(all, strings.TrimSpace(e))
		if err != nil {
			return nil, "", fmt.Errorf("%s: %w", source, err)
		}
		out = add(out, us)
	}
	return out, source, nil
}

// cuda resolves CUDA_VISIBLE_DEVICES as CUDA does: up to the first entry that is not valid.
func cuda(all []unit, list string, env []string) ([]unit, string, error) {
	const source = "CUDA_VISIBLE_DEVICES"
	var out []unit
	indices := false
	for e := range strings.SplitSeq(list, ",") {
		e = strings.TrimSpace(e)
		us, err := entry(all, e)
		if err != nil || strings.Contains(e, ":") || len(add(slices.Clone(out), us)) == len(out) {
			break
		}
		indices = indices || !isUUID(e)
		out = add(out, us)
	}
	if len(out) == 0 {
		return nil, "", fmt.Errorf("%w: %s=%s", ErrNone, source, list)
	}
	// Indices count the fastest card first unless told otherwise; between equal cards that is PCI order.
	if order, _ := lookup(env, "CUDA_DEVICE_ORDER"); indices && order != "PCI_BUS_ID" && len(out) < len(leaves(all)) && !alike(all) {
		return nil, "", &Ambiguous{Cards: len(leaves(all)), Why: "CUDA_VISIBLE_DEVICES counts in CUDA's order and the cards differ; " +
			"use UUIDs or CUDA_DEVICE_ORDER=PCI_BUS_ID"}
	}
	return out, source, nil
}

// injected resolves NVIDIA_VISIBLE_DEVICES. In a container the runtime has applied it already: we see exactly
// what it names, counted anew. nil without an error means that it does not tell.
func injected(all []unit, list string) ([]unit, string, error) {
	const source = "NVIDIA_VISIBLE_DEVICES"
	switch list = strings.TrimSpace(list); list {
	case "all", "", "void":
		return nil, "", nil // void is also what other ways to hand out cards leave behind
	case "none":
		return nil, "", fmt.Errorf("%w: %s=%s", ErrNone, source, list)
	}
	entries := strings.Split(list, ",")
	if us, _, err := named(all, list, source); err == nil && isUUID(strings.TrimSpace(entries[0])) {
		return us, source, nil
	}
	if len(entries) == len(leaves(all)) { // applied: these are the ones, whatever their numbers on the host
		return leaves(all), source, nil
	}
	return nil, "", nil
}

// byNames resolves what a finder found; what is not there is left out.
func byNames(all []unit, names []string) []unit {
	var out []unit
	for _, n := range names {
		if count, ok := strings.CutPrefix(n, allVisible); ok {
			if us := leaves(all); count == strconv.Itoa(len(us)) {
				out = add(out, us)
			}
			continue
		}
		if minor, ok := strings.CutPrefix(n, "/dev/nvidia"); ok {
			m, err := strconv.Atoi(minor)
			if err != nil {
				continue
			}
			for _, u := range all {
				if u.slice >= 0 || u.minor != m {
					continue
				}
				if u.slices > 1 {
					return nil // the card is known, which of its slices is not
				}
				out = add(out, expand(all, u))
			}
			continue
		}
		n, _, _ = strings.Cut(n, "::") // the device plugin's mark of shared cards
		if us, err := entry(all, n); err == nil && isUUID(n) {
			out = add(out, us)
		}
	}
	return out
}

// entry resolves an index, card:slice, or the unique beginning of a UUID.
func entry(all []unit, e string) ([]unit, error) {
	if isUUID(e) {
		var hit []unit
		for _, u := range all {
			if strings.HasPrefix(u.uuid, e) {
				hit = append(hit, u)
			}
		}
		switch len(hit) {
		case 0:
			return nil, fmt.Errorf("no card or slice %s is visible", e)
		case 1:
			return expand(all, hit[0]), nil
		}
		return nil, fmt.Errorf("%s is the beginning of %d UUIDs", e, len(hit))
	}
	card, slice, sliced := strings.Cut(e, ":")
	c, err := strconv.Atoi(card)
	s := -1
	if err == nil && sliced {
		s, err = strconv.Atoi(slice)
	}
	if err != nil || c < 0 || sliced && s < 0 {
		return nil, fmt.Errorf("%q is no index, card:slice, or UUID", e)
	}
	for _, u := range all {
		if u.card == c && u.slice == s {
			return expand(all, u), nil
		}
	}
	return nil, fmt.Errorf("no card %s is visible", e)
}

// expand is the unit itself, or the slices of a card that has some.
func expand(all []unit, u unit) []unit {
	if u.slices == 0 {
		return []unit{u}
	}
	var out []unit
	for _, s := range all {
		if s.card == u.card && s.slice >= 0 {
			out = append(out, s)
		}
	}
	return out
}

// leaves are the units that can compute: cards without slices, and slices.
func leaves(all []unit) []unit {
	return slices.DeleteFunc(slices.Clone(all), func(u unit) bool { return u.slices > 0 })
}

// add appends the units that are not there yet.
func add(to, us []unit) []unit {
	for _, u := range us {
		if !slices.ContainsFunc(to, func(o unit) bool { return o.handle == u.handle }) {
			to = append(to, u)
		}
	}
	return to
}

// alike reports whether all cards are of one kind.
func alike(all []unit) bool {
	name := ""
	for _, u := range all {
		if u.slice < 0 {
			if name != "" && u.name != name {
				return false
			}
			name = u.name
		}
	}
	return true
}

// lookup finds a variable in an environment of NAME=value; the last one counts.
func lookup(env []string, name string) (string, bool) {
	for _, e := range slices.Backward(env) {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v, true
		}
	}
	return "", false
}
