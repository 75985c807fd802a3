package routing

import (
	"errors"
	"slices"
	"strings"
)

// The classes of requests, the highest first. What a client asks for by service_tier is one of the first three.
const (
	ClassPriority uint8 = 1 + iota
	ClassDefault
	ClassFlex
	ClassBatch
)

// ClassNames are the names of the classes, that of class 1 first.
var ClassNames = [...]string{"priority", "default", "flex", "batch"}

// Classes is a range of classes. The zero value is all of them.
type Classes struct {
	High, Low uint8 // 1 ≤ High ≤ Low ≤ 4
}

var errClasses = errors.New("classes must be " + strings.Join(ClassNames[:], ", ") + ", without a gap between them")

// ParseClasses reads a list of names; none are all. They must lie side by side: a load record has room for a range.
func ParseClasses(names []string) (Classes, error) {
	var c Classes
	var seen [len(ClassNames) + 1]bool
	for _, n := range names {
		i := slices.Index(ClassNames[:], n) + 1
		if i == 0 {
			return Classes{}, errClasses
		}
		seen[i] = true
		if c.High == 0 || uint8(i) < c.High {
			c.High = uint8(i)
		}
		c.Low = max(c.Low, uint8(i))
	}
	for i := c.High; i < c.Low; i++ {
		if !seen[i] {
			return Classes{}, errClasses
		}
	}
	if c == (Classes{ClassPriority, ClassBatch}) {
		return Classes{}, nil
	}
	return c, nil
}

// Has reports whether the class is in the range.
func (c Classes) Has(class uint8) bool { return c.High == 0 || class >= c.High && class <= c.Low }

// Names lists the range's classes; nil = all.
func (c Classes) Names() []string {
	if c.High == 0 {
		return nil
	}
	return slices.Clone(ClassNames[c.High-1 : c.Low])
}

// classRanges numbers the ranges that are not all classes, for the load record.
var classRanges = [...]Classes{{1, 1}, {1, 2}, {1, 3}, {2, 2}, {2, 3}, {2, 4}, {3, 3}, {3, 4}, {4, 4}}

// Code is the range's number, from 1; 0 = all.
func (c Classes) Code() uint8 { return uint8(slices.Index(classRanges[:], c) + 1) }

// ClassesOf is the range with that number; one that is not known is all.
func ClassesOf(code uint8) Classes {
	if code == 0 || int(code) > len(classRanges) {
		return Classes{}
	}
	return classRanges[code-1]
}
