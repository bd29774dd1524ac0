package image

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

// refusal is what must be said of a hostile image.
type refusal struct {
	reason string
	says   string
}

// refuses opens every image of a corpus, each of which has its row. What a
// header tells is refused at once, from no more than so many bytes; what only
// tables tell, when the disk is read.
func refuses(t *testing.T, corpus map[string][]byte, rows map[string]refusal, bytes int64) {
	t.Helper()
	for name := range rows {
		if _, ok := corpus[name]; !ok {
			t.Errorf("no image is %q", name)
		}
	}
	for name, b := range corpus {
		t.Run(name, func(t *testing.T) {
			row, ok := rows[name]
			if !ok {
				t.Fatal("nothing is told of this image")
			}
			file := &blob{b: b}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			began := time.Now()
			opened, err := Open(t.Context(), file, Options{})
			if strings.HasPrefix(name, "table: ") {
				if err != nil {
					t.Fatalf("opening says %v", err)
				}
				_, err = readAll(t, opened.Disk)
			} else if file.bytes.Load() > bytes {
				t.Errorf("read %d bytes of the image before deciding, want at most %d", file.bytes.Load(), bytes)
			}
			runtime.ReadMemStats(&after)
			if took := time.Since(began); took > time.Second {
				t.Errorf("took %s", took)
			}
			if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
				t.Errorf("took %d bytes of memory", took)
			}
			if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != row.reason || !strings.Contains(err.Error(), row.says) {
				t.Errorf("got %v, want a terminal %s that speaks of %q", err, row.reason, row.says)
			}
		})
	}
}

// readAll reads a disk and counts its bytes that are not zero.
func readAll(t *testing.T, d Disk) (n int64, err error) {
	t.Helper()
	p := make([]byte, 1<<20)
	for off := int64(0); off < d.Size(); off += int64(len(p)) {
		p = p[:min(int64(len(p)), d.Size()-off)]
		if _, err := d.ReadAtContext(t.Context(), p, off); err != nil {
			return n, err
		}
		for _, c := range p {
			if c != 0 {
				n++
			}
		}
	}
	return n, nil
}

func TestHostileVHD(t *testing.T) {
	c := func(says string) refusal { return refusal{fault.CorruptImage, says} }
	refuses(t, images.HostileVHDs(), map[string]refusal{
		"a disk of 0 bytes":                        c("size is 0"),
		"a disk of 1 bytes":                        c("size is 1 "),
		"a disk of 511 bytes":                      c("size is 511"),
		"a disk of 9223372036854775807 bytes":      c("size is 9223372036854775807"),
		"a disk of 18446744073709551104 bytes":     c("size is 18446744073709551104"),
		"a disk of 1125899906842624 bytes":         c("has at most"),
		"version 2":                                {fault.FormatNotSupported, "version 2.0"},
		"type 0":                                   {fault.FormatNotSupported, "type 0"},
		"type 7":                                   {fault.FormatNotSupported, "type 7"},
		"fixed at its beginning only":              c("no footer at its end"),
		"a header at 2^64-512":                     c("header has 1024 bytes at 18446744073709551104"),
		"a header behind the file":                 c("header has 1024 bytes at"),
		"a header across the end":                  c("header has 1024 bytes at"),
		"a header that is the footer":              c("header has 1024 bytes at 0"),
		"a header in the data":                     c("cxsparse"),
		"differencing":                             {fault.BackingFile, `"C:\\disks\\parent.vhd"`},
		"differencing without a header":            {fault.BackingFile, "another file"},
		"dynamic with a parent locator":            {fault.BackingFile, "differencing"},
		"a wrong checksum in both footers":         c("footer's checksum"),
		"a wrong checksum in the header":           c("header's checksum"),
		"footers that disagree":                    c("disagree"),
		"header version 2":                         {fault.FormatNotSupported, "version 2.0"},
		"a block of 0 bytes":                       c("block has 0"),
		"a block of 256 bytes":                     c("block has 256"),
		"a block of 3 MiB":                         c("block has 3145728"),
		"a table of no entries":                    c("0 entries"),
		"a table too small for the disk":           c("15 entries"),
		"a table of 2^32-1 entries":                c("table has 17179869180 bytes"),
		"a table behind the file":                  c("table has 64 bytes at 1099511627776"),
		"a table at 2^64-512":                      c("table has 64 bytes at 18446744073709551104"),
		"a table off the sectors":                  c("table has 64 bytes at 1537"),
		"a table over the footer":                  c("table has 64 bytes at 0"),
		"a table over the header":                  c("overlap"),
		"fixed, cut short before the footer":       c("cut short"),
		"fixed, larger than the file":              c("room for 1048576"),
		"fixed, a wrong checksum":                  c("footer's checksum"),
		"fixed, a geometry larger than the file":   c("room for 1048576"),
		"cut in the first footer":                  c("conectix"),
		"cut in the header":                        c("header has 1024 bytes"),
		"cut in the table":                         c("table has 64 bytes"),
		"table: a block behind the file":           c("lies at 1099511627776"),
		"table: a block at the end of the numbers": c("lies at 2199023254528"),
		"table: a block over the footer":           c("lies at 0"),
		"table: a block over the header":           c("overlaps"),
		"table: a block over the table":            c("overlaps"),
		"table: a bitmap across the end":           c("lies at"),
		"table: cut in the last block":             c("cut short"),
	}, shortHead+4*vhdFooterBytes+vhdHeaderBytes)
}

// A file has room for the blocks that its table claims, or nobody counts them.
func TestMeasureOfSharedVHDBlocks(t *testing.T) {
	content := make([]byte, 4<<20)
	content[0] = 1
	b := images.VHD{Creator: "win ", Block: 64 << 10}.Bytes(content)
	for i := 1; i < 64; i++ {
		copy(b[1536+4*i:][:4], b[1536:])
	}
	opened, err := Open(t.Context(), &blob{b: b}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = opened.Measure(t.Context())
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.CorruptImage {
		t.Errorf("got %v, want a terminal %s", err, fault.CorruptImage)
	}
}

func TestBitRun(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 3))
	for range 2000 {
		b := make([]byte, 1+rnd.IntN(20))
		for i := range b {
			b[i] = []byte{0, 0, 0xff, 0xff, byte(rnd.Uint32())}[rnd.IntN(5)]
		}
		from := rnd.Int64N(int64(len(b)) * 8)
		to := from + 1 + rnd.Int64N(int64(len(b))*8-from)
		bit := func(i int64) bool { return b[i/8]>>(7-i%8)&1 == 1 }
		want := int64(1)
		for from+want < to && bit(from+want) == bit(from) {
			want++
		}
		if set, n := bitRun(b, from, to); set != bit(from) || n != want {
			t.Fatalf("bits %x from %d to %d: %v %d, want %v %d", b, from, to, set, n, bit(from), want)
		}
	}
}

// probe reads here and there of a disk that anybody may have spoiled: no crash,
// no long run, extents without gaps, and only errors that no retry cures.
func probe(t *testing.T, opened *Opened, err error) {
	t.Helper()
	if err != nil {
		if f := fault.Of(err); !f.Terminal {
			t.Errorf("opening says %v, which is not terminal", err)
		}
		return
	}
	size := opened.Disk.Size()
	for _, off := range []int64{0, size / 3, size / 2, max(0, size-256<<10)} {
		n := min(256<<10, size-off)
		if list, err := opened.Disk.Extents(t.Context(), off, n); err == nil {
			at := off
			for _, e := range list {
				if e.Start != at || e.Length <= 0 || e.Kind > extent.Hole {
					t.Fatalf("extents of %d+%d: %v", off, n, list)
				}
				at = e.End()
			}
			if at != off+n {
				t.Fatalf("extents of %d+%d end at %d", off, n, at)
			}
		} else if !fault.Of(err).Terminal {
			t.Fatalf("extents say %v, which is not terminal", err)
		}
		p := make([]byte, n)
		if m, err := opened.Disk.ReadAtContext(t.Context(), p, off); err == nil && m != len(p) {
			t.Fatalf("read %d of %d bytes at %d without an error", m, n, off)
		} else if err != nil && !fault.Of(err).Terminal {
			t.Fatalf("reading says %v, which is not terminal", err)
		}
	}
}

// patched is b with eight bytes replaced wherever patches say: a number of 16
// bits, the place in units of eight bytes, then the bytes.
func patched(b, patches []byte) []byte {
	for ; len(patches) >= 10; patches = patches[10:] {
		if at := int(binary.BigEndian.Uint16(patches)) * 8; at < len(b) {
			copy(b[at:], patches[2:10])
		}
	}
	return b
}

// FuzzVHD opens a spoiled image as vhd; its checksums are made right again.
func FuzzVHD(f *testing.F) {
	content := make([]byte, 256<<10)
	rand.NewChaCha8([32]byte{4}).Read(content[:100<<10])
	whole := images.VHD{Creator: "win ", Block: 64 << 10}.Bytes(content)
	f.Add([]byte{}, true)
	f.Add([]byte{}, false)
	f.Add(word(48, 1<<40), true)
	f.Add(word(56, 0xffff10ff00000003), true)
	f.Add(words(word(512+16, 1536), word(512+24, 1<<48|1<<20), word(512+32, 512<<32)), true)
	f.Add(words(word(1536, 0xffffffff_00000004), word(1544, 0x00000004_fffffffe)), true)
	f.Add(word(2048, 0xff00aa55ff00aa55), true)
	for _, b := range images.HostileVHDs() {
		var seed []byte
		for at := 0; at < 2048 && at+8 <= len(b); at += 8 {
			if v := binary.BigEndian.Uint64(b[at:]); v != binary.BigEndian.Uint64(whole[at:]) {
				seed = append(seed, word(at, v)...)
			}
		}
		f.Add(seed, true)
	}
	f.Fuzz(func(t *testing.T, patches []byte, sums bool) {
		b := patched(append([]byte{}, whole...), patches)
		if sums {
			images.SumVHD(b[:512], 64)
			images.SumVHD(b[512:1536], 36)
			copy(b[len(b)-512:], b[:512])
		}
		opened, err := openVHD(t.Context(), &blob{b: b})
		probe(t, opened, err)
	})
}
