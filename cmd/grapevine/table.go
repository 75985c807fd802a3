package main

import (
	"io"
	"strings"
	"unicode/utf8"
)

// table lays out text in columns. tabwriter would count escape sequences as text.
type table struct {
	right []bool // by column
	rows  [][]string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// write prints all rows; style, if there is one, is applied to a cell after it has been padded.
func (t *table) write(w io.Writer, style func(col int, cell string) string) {
	width := make([]int, len(t.right))
	for _, r := range t.rows {
		for i, c := range r {
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	for _, r := range t.rows {
		var b strings.Builder
		for i, c := range r {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(c))
			if i > 0 {
				b.WriteString("  ")
			}
			if t.right[i] {
				c = pad + c
			} else {
				c += pad
			}
			if style != nil {
				c = style(i, c)
			}
			b.WriteString(c)
		}
		_, _ = io.WriteString(w, strings.TrimRight(b.String(), " ")+"\n")
	}
}
