package extent

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// bitmap is the model of a Set: one bool per byte.
type bitmap [256]bool

func (b *bitmap) put(start, length int64, v bool) {
	for i := start; i < start+length; i++ {
		b[i] = v
	}
}

func (b *bitmap) runs(start, length int64, v bool) []Range {
	var out []Range
	for i := start; i < start+length; i++ {
		if b[i] != v {
			continue
		}
		if n := len(out); n > 0 && out[n-1].End() == i {
			out[n-1].Length++
			continue
		}
		out = append(out, Range{i, 1})
	}
	return out
}

// A Set answers every question as a bitmap with the same history does.
func TestSetEqualsBitmap(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var model bitmap
		var set Set
		some := func() (int64, int64) {
			start := rnd.Int64N(int64(len(model)))
			return start, rnd.Int64N(min(40, int64(len(model))-start) + 1)
		}
		var added []Range
		for range 60 {
			before, was := set, set.Ranges()
			start, length := some()
			if rnd.IntN(3) > 0 {
				set.Add(start, length)
				model.put(start, length, true)
				added = append(added, Range{start, length})
			} else {
				set.Subtract(start, length)
				model.put(start, length, false)
				added = nil
				for _, r := range set.Ranges() {
					added = append(added, r)
				}
			}
			if !slices.Equal(before.Ranges(), was) {
				t.Fatalf("seed %d: a copy taken before the change reads %v, was %v", seed, before.Ranges(), was)
			}
			all := model.runs(0, int64(len(model)), true)
			if got := set.Ranges(); !slices.Equal(got, all) {
				t.Fatalf("seed %d: ranges %v, want %v", seed, got, all)
			}
			rnd.Shuffle(len(added), func(i, j int) { added[i], added[j] = added[j], added[i] })
			if got := NewSet(added...); !got.Equal(set) {
				t.Fatalf("seed %d: NewSet(%v) = %v, want %v", seed, added, got.Ranges(), all)
			}
			var bytes int64
			for _, r := range all {
				bytes += r.Length
			}
			if set.Bytes() != bytes || set.Len() != len(all) {
				t.Fatalf("seed %d: %d bytes in %d ranges, want %d in %d", seed, set.Bytes(), set.Len(), bytes, len(all))
			}
			start, length = some()
			in, out := model.runs(start, length, true), model.runs(start, length, false)
			if got := set.Missing(start, length); !slices.Equal(got, out) {
				t.Fatalf("seed %d: missing of %d+%d is %v, want %v", seed, start, length, got, out)
			}
			if got := set.Intersect(start, length).Ranges(); !slices.Equal(got, in) {
				t.Fatalf("seed %d: intersection with %d+%d is %v, want %v", seed, start, length, got, in)
			}
			if got, want := set.Contains(start, length), len(out) == 0; got != want {
				t.Fatalf("seed %d: contains %d+%d is %v, want %v", seed, start, length, got, want)
			}
		}
	}
}

func TestAppendJoins(t *testing.T) {
	var got []Extent
	for _, e := range []Extent{{0, 10, Data}, {10, 5, Data}, {15, 0, Zero}, {15, 5, Zero}, {20, 5, Hole}, {30, 5, Hole}} {
		got = Append(got, e)
	}
	want := []Extent{{0, 15, Data}, {15, 5, Zero}, {20, 5, Hole}, {30, 5, Hole}}
	if !slices.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}
