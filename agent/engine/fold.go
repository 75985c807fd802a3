package engine

import "math"

// evaluate folds the series of one name into one number; false if there are none.
func (t *Term) evaluate(s []series) (float64, bool) {
	if len(s) == 0 {
		return 0, false
	}
	if len(t.By) == 0 {
		acc := folder{fold: t.Fold}
		for i := range s {
			acc.add(s[i].value)
		}
		return acc.result(), true
	}
	outer := folder{fold: t.Fold}
	for i := range s {
		if seenGroup(s[:i], s[i].group) {
			continue
		}
		inner := folder{fold: t.Inner}
		for j := i; j < len(s); j++ {
			if s[j].group == s[i].group {
				inner.add(s[j].value)
			}
		}
		outer.add(inner.result())
	}
	return outer.result(), true
}

func seenGroup(s []series, group uint64) bool {
	for i := range s {
		if s[i].group == group {
			return true
		}
	}
	return false
}

// folder is one running fold.
type folder struct {
	fold Fold
	sum  float64
	max  float64
	n    int
}

func (f *folder) add(v float64) {
	if f.n == 0 || v > f.max {
		f.max = v
	}
	f.sum += v
	f.n++
}

func (f *folder) result() float64 {
	switch f.fold {
	case Max:
		return f.max
	case Mean:
		return f.sum / float64(f.n)
	case Count:
		return float64(f.n)
	default:
		return f.sum
	}
}

// result is the outcome of one entry for one page.
type result struct {
	value  float64
	ok     bool
	why    reason
	metric string // the name that gave the value, or the first one missed
}

// compiled is an entry together with the places where the scanner keeps its names.
type compiled struct {
	entry *Entry
	page  *pageState
	wants [][]int // for each term, the index of each name in the scanner's wants
}

// evaluate computes the entry from what the scanner holds.
func (c *compiled) evaluate(wants []want) result {
	var acc float64
	metric := ""
	for i := range c.entry.Terms {
		t := &c.entry.Terms[i]
		v, why, name := c.term(i, wants)
		if metric == "" {
			metric = name
		}
		if why != whyKnown {
			if why == whyAbsent && (t.Op == Plus || t.Op == Minus) {
				continue
			}
			return result{why: why, metric: name}
		}
		switch t.Op {
		case Take:
			acc = v
		case Plus:
			acc += v
		case Minus:
			acc = math.Max(acc-v, 0)
		case Times:
			acc *= v
		case Over:
			if v == 0 {
				return result{why: whyZeroDivisor, metric: name}
			}
			acc /= v
		}
	}
	if math.IsNaN(acc) || math.IsInf(acc, 0) {
		return result{why: whyNotFinite, metric: metric}
	}
	v, ok := c.entry.Field.accept(acc)
	if !ok {
		return result{why: whyRange, metric: metric}
	}
	return result{value: v, ok: true, metric: metric}
}

// term computes one term: the first of its names that has a value.
func (c *compiled) term(i int, wants []want) (float64, reason, string) {
	t := &c.entry.Terms[i]
	if len(t.Names) == 0 {
		return t.Const, whyKnown, ""
	}
	why := whyAbsent
	for j, w := range c.wants[i] {
		if v, ok := t.evaluate(wants[w].series); ok {
			return v, whyKnown, t.Names[j]
		}
		if wants[w].notFinite {
			why = whyNotFinite
		}
	}
	if t.Zero && why == whyAbsent {
		return 0, whyKnown, t.Names[0]
	}
	return 0, why, t.Names[0]
}
