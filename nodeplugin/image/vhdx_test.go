package image

import (
	"bytes"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

func TestHostileVHDX(t *testing.T) {
	c := func(says string) refusal { return refusal{fault.CorruptImage, says} }
	rows := map[string]refusal{
		"wrong checksums in both headers":            c("neither of its two headers"),
		"headers that differ":                        c("sequence number 8"),
		"version 2":                                  {fault.FormatNotSupported, "version 2"},
		"a log behind the file":                      c("log has 1048576 bytes at 1099511627776"),
		"a log at 2^64-1048576":                      c("log has 1048576 bytes at 18446744073708503040"),
		"a log of 2^32-1048576 bytes":                c("log has 4293918720 bytes"),
		"a log over the headers":                     c("log has 1048576 bytes at 0"),
		"a log off the megabytes":                    c("log has 1048576 bytes at 1052672"),
		"a log over the metadata":                    c("overlap"),
		"a log over the table":                       c("overlap"),
		"cut in the first header":                    c("neither of its two headers"),
		"cut before the region tables":               c("log has 1048576 bytes"),
		"cut behind the metadata":                    c("has 1048576 bytes at 3145728 of a file of 3145728"),
		"wrong checksums in both region tables":      c("neither of its two region tables"),
		"2048 regions":                               c("2048 entries"),
		"2^32-1 regions":                             c("4294967295 entries"),
		"no region":                                  c("does not tell where"),
		"no metadata":                                c("where the metadata is"),
		"a region that is needed and unknown":        {fault.FormatNotSupported, "6e6b6e75-776f-206e-7265-67696f6e2e2e"},
		"the same region twice":                      c("twice"),
		"a table at 0":                               c("bytes at 0 of"),
		"a table at 2^64-1048576":                    c("bytes at 18446744073708503040"),
		"a table behind the file":                    c("bytes at 1099511627776"),
		"a table of 2^32-1048576 bytes":              c("has 4293918720 bytes"),
		"a table of no bytes":                        c("has 0 bytes"),
		"a table off the megabytes":                  c("at 3146240"),
		"a table over the metadata":                  c("overlap"),
		"metadata over the log":                      c("overlap"),
		"metadata in the data":                       c("metadata table does not begin"),
		"2048 items":                                 c("2048 entries"),
		"no item":                                    c("is missing"),
		"no sector size":                             c("8141bf1d-a96f-4709-ba47-f233a8faab5f is missing"),
		"an item that is needed and unknown":         {fault.FormatNotSupported, "needs the metadata item"},
		"the same item twice":                        c("twice"),
		"an item over the table":                     c("8 bytes at 32 of"),
		"an item behind the region":                  c("8 bytes at 1048572 of"),
		"an item of 2^32-1 bytes":                    c("4294967295 bytes at"),
		"an item at 2^32-1":                          c("8 bytes at 4294967295"),
		"an item that is too short":                  c("7 bytes at"),
		"a block of 0 bytes":                         c("block has 0 "),
		"a block of 512 KiB":                         c("block has 524288 "),
		"a block of 512 MiB":                         c("block has 536870912 "),
		"a block of 3 MiB":                           c("block has 3145728 "),
		"a disk of 0 bytes":                          c("size is 0 "),
		"a disk of 1 bytes":                          c("size is 1 "),
		"a disk of 511 bytes":                        c("size is 511 "),
		"a disk of 9223372036854775807 bytes":        c("size is 9223372036854775807 "),
		"a disk of 18446744073709551104 bytes":       c("size is 18446744073709551104 "),
		"a disk of 70368744178176 bytes":             c("size is 70368744178176 "),
		"a disk too large for the table":             c("table has 1048576 bytes"),
		"a sector of 0 bytes":                        c("sector has 0 "),
		"a sector of 1024 bytes":                     c("sector has 1024 "),
		"has a parent":                               {fault.BackingFile, "another file"},
		"has a parent locator":                       {fault.BackingFile, `"\\\\?\\C:\\disks\\parent.vhdx"`},
		"a parent locator that points out of itself": {fault.BackingFile, "another file"},
		"a log without an entry":                     c("no valid entries"),
		"a log of another version":                   {fault.FormatNotSupported, "log has version 1"},
		"a log of 9 MiB":                             {fault.FormatNotSupported, "log has 9437184 bytes"},
		"a log that is torn":                         c("no valid entries"),
		"a log without its beginning":                c("no valid entries"),
		"a log of a longer file":                     c("file had 7340032 bytes"),
		"a log that wants petabytes":                 c("wants a file of 1152921504606846976"),
		"an update behind the file":                  c("update of 4096 bytes at 1099511627776"),
		"zeros behind the file":                      c("update of 4611686018427387904 bytes"),
		"zeros around the numbers":                   c("update of 18446744073709547520 bytes"),
		"a log that wipes the region tables":         c("neither of its two region tables"),
		"a log that wipes the metadata":              c("metadata table does not begin"),
		"a log of entries in each other":             c("no valid entries"),
		"table: a block behind the file":             c("lie at 1099511627776"),
		"table: a block at the end of the numbers":   c("lies at 18446744073708503040"),
		"table: a block across the end":              c("cut short"),
		"table: a block over the headers":            c("overlaps"),
		"table: a block over the log":                c("overlaps"),
		"table: a block over the metadata":           c("overlaps"),
		"table: a block over the table":              c("overlaps"),
		"table: a block that is there in part":       c("in part"),
		"table: a block of state 4":                  c("state 4"),
		"table: a block of state 5":                  c("state 5"),
		"table: cut in the last block":               c("cut short"),
	}
	corpus := images.HostileVHDXs()
	for _, name := range slices.Sorted(maps.Keys(corpus)) {
		row, ok := rows[name]
		if !ok {
			t.Errorf("nothing is told of %q", name)
			continue
		}
		delete(rows, name)
		refuses(t, map[string][]byte{name: corpus[name]()}, map[string]refusal{name: row},
			shortHead+2*vhdxHeaderBytes+2*vhdxTableBytes+vhdxTableBytes+vhdxTableBytes+1<<20)
	}
	for name := range rows {
		t.Errorf("no image is %q", name)
	}
}

// What patches that are applied one after the other leave is what latest says.
func TestLatest(t *testing.T) {
	rnd := rand.New(rand.NewPCG(11, 11))
	for range 300 {
		want := make([]byte, 64<<10)
		rnd.Uint64()
		for i := range want {
			want[i] = 0xee
		}
		file := &blob{b: bytes.Clone(want)}
		var patches []patch
		for range rnd.IntN(30) {
			p := patch{start: rnd.Int64N(14) * 4096}
			if p.end = p.start + 4096; rnd.IntN(2) == 0 {
				p.end = min(p.start+4096*(1+rnd.Int64N(6)), int64(len(want)))
				clear(want[p.start:p.end])
			} else {
				p.data = bytes.Repeat([]byte{byte(1 + len(patches))}, 4096)
				copy(want[p.start:], p.data)
			}
			patches = append(patches, p)
		}
		r := &replayed{Ranged: file, size: int64(len(want)) + 5000, patches: latest(patches)}
		want = append(want, make([]byte, 5000)...)
		for range 20 {
			off := rnd.IntN(len(want))
			p := bytes.Repeat([]byte{0xdd}, 1+rnd.IntN(len(want)-off))
			if n, err := r.ReadAtContext(t.Context(), p, int64(off)); n != len(p) || err != nil || !bytes.Equal(p, want[off:off+n]) {
				t.Fatalf("%d bytes at %d: read %d, %v, right %v", len(p), off, n, err, bytes.Equal(p, want[off:off+len(p)]))
			}
		}
		if n, err := r.ReadAtContext(t.Context(), make([]byte, 100), r.size-30); n != 30 || err != io.EOF {
			t.Fatalf("across the end: read %d, %v", n, err)
		}
	}
}

// FuzzVHDX opens a spoiled image as vhdx. Patches go to those parts of it that
// the reader interprets.
func FuzzVHDX(f *testing.F) {
	content := make([]byte, 2<<20)
	rand.NewChaCha8([32]byte{4}).Read(content[:100<<10])
	clean := images.VHDX{Block: 1 << 20, Sector: 512}.Of(content).Bytes()
	dirty := bytes.Clone(clean)
	images.LogVHDX(dirty, 0, images.VHDXEntry{
		Sequence: 5, Flushed: 4 << 20, Last: int64(len(clean)),
		Updates: []images.VHDXUpdate{{Offset: images.VHDXTable, Data: clean[images.VHDXTable:][:4096]}, {Offset: images.VHDXTable + 4096, Zeros: 8192}},
	})
	parts := []int{images.VHDXHeader1, images.VHDXHeader2, images.VHDXRegions1, images.VHDXRegions2, images.VHDXMetadata, images.VHDXMetadata + 64<<10, images.VHDXTable, images.VHDXLog, images.VHDXLog + 4096}
	word := func(part, at int, b string) []byte { // eight bytes of b
		return append([]byte{byte(slices.Index(parts, part)), byte(at / 8)}, b[:8]...)
	}
	f.Add([]byte{}, false, true)
	f.Add([]byte{}, true, true)
	f.Add([]byte{}, true, false)
	f.Add(word(images.VHDXTable, 0, "\x06\x00\x50\x00\x00\x00\x00\x00"), false, true)
	f.Add(word(images.VHDXTable, 8, "\x02\x00\x00\x00\x00\x00\x00\x00"), false, true)
	f.Add(word(images.VHDXMetadata+64<<10, 8, "\x00\x00\x00\x00\x00\x40\x00\x00"), false, true)
	f.Add(word(images.VHDXMetadata+64<<10, 0, "\x00\x00\x10\x00\x02\x00\x00\x00"), false, true)
	f.Add(word(images.VHDXHeader1, 72, "\x00\x00\x20\x00\x00\x00\x00\x00"), true, true)
	f.Add(word(images.VHDXLog, 56, "\x00\x00\x00\x00\x00\x40\x00\x00"), true, true)
	f.Add(word(images.VHDXLog, 64, "zero\x00\x00\x00\x00"), true, true)
	for _, hostile := range images.HostileVHDXs() {
		b := hostile()
		var seed []byte
		for i, part := range parts {
			for at := 0; at < 2048 && part+at+8 <= len(b); at += 8 {
				if now := b[part+at:][:8]; !bytes.Equal(now, clean[part+at:][:8]) {
					seed = append(append(seed, byte(i), byte(at/8)), now...)
				}
			}
		}
		f.Add(seed, false, true)
	}
	pools := map[bool]*sync.Pool{
		false: {New: func() any { return new(bytes.Clone(clean)) }},
		true:  {New: func() any { return new(bytes.Clone(dirty)) }},
	}
	f.Fuzz(func(t *testing.T, patches []byte, log, sums bool) {
		spoiled := pools[log].Get().(*[]byte)
		b, base := *spoiled, clean
		if log {
			base = dirty
		}
		defer func() { // as it was, but for what is never touched
			for _, at := range parts {
				copy(b[at:at+64<<10], base[at:])
			}
			pools[log].Put(spoiled)
		}()
		for ; len(patches) >= 10; patches = patches[10:] {
			copy(b[parts[int(patches[0])%len(parts)]+int(patches[1])*8:], patches[2:10])
		}
		if sums {
			images.SumVHDX(b)
			images.SumVHDXLog(b)
		}
		opened, err := openVHDX(t.Context(), &blob{b: b})
		probe(t, opened, err)
	})
}
