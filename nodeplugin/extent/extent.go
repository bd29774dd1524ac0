// Package extent says which parts of a disk hold data, and does arithmetic on
// sets of byte ranges.
//
// It knows nothing of files, images or devices: offsets and lengths are bytes.
package extent

import (
	"fmt"
	"slices"
	"sort"
)

// Kind is what a part of a disk holds.
type Kind uint8

const (
	Data Kind = iota // bytes that must be read
	Zero             // reads as zeros; the image says so
	Hole             // never written; reads as zeros where there is no backing disk
)

func (k Kind) String() string {
	switch k {
	case Data:
		return "data"
	case Zero:
		return "zero"
	case Hole:
		return "hole"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Extent is a part of a disk of one kind; Start and Length are bytes.
type Extent struct {
	Start  int64
	Length int64
	Kind   Kind
}

// End is the first byte behind e.
func (e Extent) End() int64 { return e.Start + e.Length }

// Append adds e to list and joins it with the last element where that touches
// e and is of the same kind. Empty extents are left out.
func Append(list []Extent, e Extent) []Extent {
	if e.Length <= 0 {
		return list
	}
	if n := len(list); n > 0 && list[n-1].Kind == e.Kind && list[n-1].End() == e.Start {
		list[n-1].Length += e.Length
		return list
	}
	return append(list, e)
}

// Range is a run of bytes.
type Range struct {
	Start  int64 `json:"start"`
	Length int64 `json:"length"`
}

// End is the first byte behind r.
func (r Range) End() int64 { return r.Start + r.Length }

// Set is a set of bytes, held as sorted ranges that neither touch nor overlap.
// The zero Set is empty. A Set that is only read may be shared; Add and
// Subtract never write to ranges that an earlier copy of the Set sees.
type Set struct {
	ranges []Range
}

// NewSet returns the union of ranges, in any order.
func NewSet(ranges ...Range) Set {
	sorted := slices.Clone(ranges)
	slices.SortFunc(sorted, func(a, b Range) int {
		switch {
		case a.Start < b.Start:
			return -1
		case a.Start > b.Start:
			return 1
		}
		return 0
	})
	var out []Range
	for _, r := range sorted {
		if r.Length <= 0 {
			continue
		}
		if n := len(out); n > 0 && r.Start <= out[n-1].End() {
			if r.End() > out[n-1].End() {
				out[n-1].Length = r.End() - out[n-1].Start
			}
			continue
		}
		out = append(out, r)
	}
	return Set{ranges: out}
}

// Ranges returns the ranges of s in order; the caller may keep and change them.
func (s Set) Ranges() []Range { return slices.Clone(s.ranges) }

// Len is the number of ranges.
func (s Set) Len() int { return len(s.ranges) }

// Bytes is the number of bytes in s.
func (s Set) Bytes() int64 {
	var n int64
	for _, r := range s.ranges {
		n += r.Length
	}
	return n
}

// Equal tells whether s and t hold the same bytes.
func (s Set) Equal(t Set) bool { return slices.Equal(s.ranges, t.ranges) }

// first is the index of the first range that ends behind off.
func (s Set) first(off int64) int {
	return sort.Search(len(s.ranges), func(i int) bool { return s.ranges[i].End() > off })
}

// Add puts [start, start+length) into s.
func (s *Set) Add(start, length int64) {
	if length <= 0 {
		return
	}
	end := start + length
	// The ranges i to j-1 overlap or touch the new one.
	i := sort.Search(len(s.ranges), func(i int) bool { return s.ranges[i].End() >= start })
	j := i
	for j < len(s.ranges) && s.ranges[j].Start <= end {
		start, end = min(start, s.ranges[j].Start), max(end, s.ranges[j].End())
		j++
	}
	out := make([]Range, 0, len(s.ranges)-(j-i)+1)
	out = append(out, s.ranges[:i]...)
	out = append(out, Range{start, end - start})
	s.ranges = append(out, s.ranges[j:]...)
}

// Subtract takes [start, start+length) out of s.
func (s *Set) Subtract(start, length int64) {
	if length <= 0 {
		return
	}
	end := start + length
	out := make([]Range, 0, len(s.ranges)+1)
	for _, r := range s.ranges {
		if r.End() <= start || r.Start >= end {
			out = append(out, r)
			continue
		}
		if r.Start < start {
			out = append(out, Range{r.Start, start - r.Start})
		}
		if r.End() > end {
			out = append(out, Range{end, r.End() - end})
		}
	}
	s.ranges = out
}

// Contains tells whether every byte of [start, start+length) is in s; an empty
// range is.
func (s Set) Contains(start, length int64) bool {
	if length <= 0 {
		return true
	}
	i := s.first(start)
	return i < len(s.ranges) && s.ranges[i].Start <= start && s.ranges[i].End() >= start+length
}

// Missing returns what of [start, start+length) is not in s, in order.
func (s Set) Missing(start, length int64) []Range {
	var out []Range
	end := start + length
	for i := s.first(start); start < end && i < len(s.ranges); i++ {
		r := s.ranges[i]
		if r.Start >= end {
			break
		}
		if r.Start > start {
			out = append(out, Range{start, r.Start - start})
		}
		start = r.End()
	}
	if start < end {
		out = append(out, Range{start, end - start})
	}
	return out
}

// Intersect returns what of [start, start+length) is in s.
func (s Set) Intersect(start, length int64) Set {
	var out []Range
	end := start + length
	for i := s.first(start); i < len(s.ranges) && s.ranges[i].Start < end; i++ {
		a, b := max(start, s.ranges[i].Start), min(end, s.ranges[i].End())
		if a < b {
			out = append(out, Range{a, b - a})
		}
	}
	return Set{ranges: out}
}
