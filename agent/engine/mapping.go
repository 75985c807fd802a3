package engine

import "time"

// Fold says how several series of one name become one number for the replica.
type Fold uint8

const (
	Sum Fold = iota
	Max
	Mean
	Count // how many series there are, whatever their values
)

// Op joins a term to what stands before it. Evaluation is left to right, without precedence.
type Op uint8

const (
	Take  Op = iota // the first term
	Plus            // a term that the page does not have adds nothing
	Minus           // never below zero: two gauges are not read in one instant. A missing term takes nothing away
	Times           // a missing term makes the result unknown
	Over            // a missing term, or zero, makes the result unknown
)

// Match is a condition on one label of a series, or on one member of a JSON object.
type Match struct {
	Label, Value string
	Not          bool // the label differs; a series without the label differs too
}

// Term is a number found on a page, or a constant.
type Term struct {
	Op    Op
	Const float64  // used when Names is empty
	Names []string // metric names, or JSON pointers with * for every element; the first that yields a value is taken, never their sum
	Where []Match  // all must hold
	Label string   // read the number from this label's text instead of the sample value
	Fold  Fold     // across groups, or across all series if By is empty
	By    []string // labels that make up a group; series of one group are the same requests seen several times
	Inner Fold     // within a group
	Zero  bool     // no matching series on a page that was read means 0; only where the engine leaves out what is idle
}

// Entry says where one field comes from. Several entries of one field are alternatives, best first.
type Entry struct {
	Field Field
	Page  string // name of a [Page] of the table
	Terms []Term
}

// Page is something to fetch.
type Page struct {
	Name string
	// Paths are tried in turn; the first that the engine has is kept. Relative to the engine's URL; one that starts
	// with a port, :8002/metrics, is on that port of the same host.
	Paths []string
	// JSON pages are read by pointers, others as Prometheus text.
	JSON bool
	// Every limits how often the page is fetched while a cheaper page before it answers; 0: on every Read.
	Every time.Duration
	// Wakes: asking for it wakes an engine that sleeps, or keeps it awake. It is left alone while another page says that
	// the engine sleeps or rests; what it said when that began holds.
	Wakes bool
	// Hint tells the operator what to do when the engine answers 404 or 501.
	Hint string
}

// mainPage is the name of the Prometheus page in every table that has one; GRAPEVINE_ENGINE_METRICS_URL replaces it.
const mainPage = "metrics"

// Table is all that is known about one engine.
type Table struct {
	Kind     Kind
	Prefixes []string // of metric names, evidence for detection
	OwnedBy  string   // in /v1/models, evidence for detection
	Pages    []Page
	Entries  []Entry
	Adapters string // metric whose newest series lists LoRA adapters in labels, "" if none
	Health   []Probe
	Models   ModelList
	WarmUp   []Service
	// Pace is the least time between two readings that does the engine no harm; 0: any.
	Pace time.Duration
	// LoadsOnDemand: a request would load a model that is not in memory, so warm-up must look first.
	LoadsOnDemand bool
	Version       string // page that answers {"version": ...}, "" if none
	Abilities     Abilities
}

// The helpers below keep the tables readable.

func one(f Field, fold Fold, names ...string) Entry {
	return Entry{Field: f, Page: mainPage, Terms: []Term{{Names: names, Fold: fold}}}
}

func (e Entry) on(page string) Entry { e.Page = page; return e }

func (e Entry) by(inner Fold, labels ...string) Entry {
	for i := range e.Terms {
		e.Terms[i].By, e.Terms[i].Inner = labels, inner
	}
	return e
}

func (e Entry) where(m ...Match) Entry {
	for i := range e.Terms {
		e.Terms[i].Where = append(e.Terms[i].Where, m...)
	}
	return e
}

func (e Entry) then(op Op, t Term) Entry {
	t.Op = op
	e.Terms = append(e.Terms, t)
	return e
}

func (e Entry) label(name string) Entry { e.Terms[0].Label = name; return e }

func (e Entry) zero() Entry {
	for i := range e.Terms {
		e.Terms[i].Zero = true
	}
	return e
}
