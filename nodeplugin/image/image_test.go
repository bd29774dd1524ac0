package image

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

// blob is an image in memory that counts what is read of it.
type blob struct {
	b     []byte
	bytes atomic.Int64
}

func (b *blob) Size() int64 { return int64(len(b.b)) }

func (b *blob) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	b.bytes.Add(int64(len(p)))
	return bytes.NewReader(b.b).ReadAt(p, off)
}

// oneWay is the same, read from beginning to end.
type oneWay struct {
	r    io.Reader
	size int64
}

func (o oneWay) Size() int64                                   { return o.size }
func (o oneWay) Stream(context.Context) (io.ReadCloser, error) { return io.NopCloser(o.r), nil }

// at returns n zero bytes with pieces of text at their offsets.
func at(n int, pieces ...any) []byte {
	b := make([]byte, n)
	for i := 0; i < len(pieces); i += 2 {
		copy(b[pieces[i].(int):], pieces[i+1].(string))
	}
	return b
}

func zipped(members ...[]byte) []byte {
	var out bytes.Buffer
	for _, m := range members {
		w := gzip.NewWriter(&out)
		w.Write(m)
		w.Close()
	}
	return out.Bytes()
}

func TestRecognise(t *testing.T) {
	noise := make([]byte, 2<<20)
	rand.NewChaCha8([32]byte{1}).Read(noise)
	noise[510], noise[0] = 0, 0x11
	boot := at(2<<20, 510, "\x55\xaa")
	html := []byte("\xef\xbb\xbf \n<!DOCTYPE html><html>Sign in</html>")
	for _, row := range []struct {
		name   string
		bytes  []byte
		format string // "" for a terminal fault
		reason string
		says   string
	}{
		{"boot sector", boot, "raw", "", ""},
		{"boot sector and nothing else", boot[:512], "raw", "", ""},
		{"GPT", at(2<<20, 512, "EFI PART"), "raw", "", ""},
		{"GPT of 4096-byte sectors", at(2<<20, 4096, "EFI PART"), "raw", "", ""},
		{"ext4", at(2<<20, 1080, "\x53\xef"), "raw", "", ""},
		{"XFS", at(2<<20, 0, "XFSB"), "raw", "", ""},
		{"btrfs", at(2<<20, 65600, "_BHRfS_M"), "raw", "", ""},
		{"LVM", at(2<<20, 512, "LABELONE"), "raw", "", ""},
		{"swap", at(2<<20, 4086, "SWAPSPACE2"), "raw", "", ""},
		{"ISO", at(2<<20, 32769, "CD001"), "iso", "", ""},
		{"hybrid ISO", at(2<<20, 510, "\x55\xaa", 32769, "CD001"), "iso", "", ""},
		{"raw in gzip", zipped(boot), "raw.gzip", "", ""},
		{"raw in gzip in pieces", zipped(boot[:700], boot[700:]), "raw.gzip", "", ""},
		{"ISO in gzip", zipped(at(100<<10, 32769, "CD001")), "iso.gzip", "", ""},

		{"nothing", nil, "", fault.NotADiskImage, "empty"},
		{"zeros", make([]byte, 4<<20), "", fault.NotADiskImage, "zeros"},
		{"noise", noise, "", fault.NotADiskImage, "no known format"},
		{"HTML", html, "", fault.NotADiskImage, "HTML"},
		{"XML", []byte("<?xml version=\"1.0\"?><Error/>"), "", fault.NotADiskImage, "XML"},
		{"JSON", []byte(`{"error": "no"}`), "", fault.NotADiskImage, `JSON: "{\"error\": \"no\"}"`},
		{"text", []byte("not here\n"), "", fault.NotADiskImage, `text: "not here\n"`},
		{"white space", []byte("\n\t \n"), "", fault.NotADiskImage, "4 bytes are white space"},
		{"text in gzip", zipped([]byte("not here\n")), "", fault.NotADiskImage, "inside gzip"},
		{"nothing in gzip", zipped(nil), "", fault.NotADiskImage, "empty"},
		{"PDF", []byte("%PDF-1.7\n"), "", fault.NotADiskImage, "PDF"},
		{"ELF", at(4096, 0, "\x7fELF\x02\x01"), "", fault.NotADiskImage, "ELF"},
		{"script", []byte("#!/bin/sh\nexit 0\n"), "", fault.NotADiskImage, "script"},

		{"qcow", at(4096, 0, "QFI\xfb\x00\x00\x00\x01"), "", fault.FormatNotSupported, "qcow is"},
		{"qed", at(4096, 0, "QED\x00"), "", fault.FormatNotSupported, "qed"},
		{"dmg", at(2<<20, 510, "\x55\xaa", 2<<20-512, "koly"), "", fault.FormatNotSupported, "dmg"},
		{"parallels", at(4096, 0, "WithouFreSpacExt"), "", fault.FormatNotSupported, "parallels"},
		{"bochs", at(4096, 0, "Bochs Virtual HD Image"), "", fault.FormatNotSupported, "bochs"},
		{"cloop", at(4096, 0, "#!/bin/sh\n#V2.0 Format\n"), "", fault.FormatNotSupported, "cloop"},
		{"luks", at(4096, 0, "LUKS\xba\xbe\x00\x02"), "", fault.FormatNotSupported, "luks"},
		{"lzma", at(4096, 0, "\x5d\x00\x00\x80\x00\xff\xff\xff\xff\xff\xff\xff\xff\x00\x3f"), "", fault.FormatNotSupported, "lzma"},
		{"what is not quite lzma", at(4096, 0, "\x5d\x00\x00\x80\x00\xff\xff\xff\xff\xff\xff\xff\xff\x01\x3f", 510, "\x55\xaa"), "raw", "", ""},
		{"zip", at(4096, 0, "PK\x03\x04"), "", fault.FormatNotSupported, "zip"},
		{"tar in gzip", zipped(at(4096, 257, "ustar")), "", fault.CorruptImage, "tar"},
		{"gzip in gzip", zipped(zipped(boot)), "", fault.FormatNotSupported, "inside gzip: it is compressed again"},
		{"gzip of another method", []byte("\x1f\x8b\x07\x00\x00\x00\x00\x00\x00\x03"), "", fault.CorruptImage, "a header that is not valid"},
		{"gzip without a header", []byte("\x1f\x8b\x08"), "", fault.CorruptImage, "cut short"},
	} {
		t.Run(row.name, func(t *testing.T) {
			for _, b := range []Blob{&blob{b: row.bytes}, oneWay{bytes.NewReader(row.bytes), int64(len(row.bytes))}} {
				opened, err := Open(t.Context(), b, Options{})
				_, ranged := b.(Ranged)
				if !ranged && row.name == "dmg" {
					continue // told by its last bytes
				}
				if row.format == "" {
					if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != row.reason || !strings.Contains(err.Error(), row.says) {
						t.Errorf("ranged %v: got %v, want a terminal %s that speaks of %q", ranged, err, row.reason, row.says)
					}
					continue
				}
				if err != nil {
					t.Errorf("ranged %v: %v", ranged, err)
					continue
				}
				got := opened.Info.Format
				if opened.Info.Compression != "" {
					got += "." + opened.Info.Compression
				}
				if got != row.format {
					t.Errorf("ranged %v: recognised as %s, want %s", ranged, got, row.format)
				}
				if err := opened.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestBrokenGzip(t *testing.T) {
	content := make([]byte, 5<<20)
	rand.NewChaCha8([32]byte{2}).Read(content)
	copy(content[510:], "\x55\xaa")
	whole := zipped(content)
	flipped := bytes.Clone(whole)
	flipped[len(flipped)/2] ^= 0x10
	boom := fault.Transient(fault.ConnectionFailed, errors.New("boom"))
	for _, row := range []struct {
		name     string
		stream   io.Reader
		reason   string
		terminal bool
		says     string
	}{
		{"cut short", bytes.NewReader(whole[:len(whole)-100_000]), fault.CorruptImage, true, "cut short"},
		{"cut in the trailer", bytes.NewReader(whole[:len(whole)-3]), fault.CorruptImage, true, "cut short"},
		{"garbage behind", bytes.NewReader(append(bytes.Clone(whole), "garbage garbage"...)), fault.CorruptImage, true, "behind its end"},
		{"a flipped bit", bytes.NewReader(flipped), fault.CorruptImage, true, "again"},
		{"a broken connection", io.MultiReader(bytes.NewReader(whole[:3<<20]), failing{boom}), fault.ConnectionFailed, false, "boom"},
	} {
		t.Run(row.name, func(t *testing.T) {
			opened, err := Open(t.Context(), oneWay{row.stream, -1}, Options{})
			if err != nil {
				t.Fatal(err)
			}
			n, err := io.Copy(io.Discard, opened.Stream)
			if f := fault.Of(err); f == nil || f.Terminal != row.terminal || f.Reason != row.reason || !strings.Contains(err.Error(), row.says) {
				t.Errorf("after %d bytes: got %v, want %s (terminal %v)", n, err, row.reason, row.terminal)
			}
		})
	}
	opened, err := Open(t.Context(), &blob{b: whole}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if opened.Info.AtLeast != 5<<20 || opened.Info.VirtualSize != -1 {
		t.Errorf("size %d, at least %d; want unknown and %d", opened.Info.VirtualSize, opened.Info.AtLeast, 5<<20)
	}
	if got, err := io.ReadAll(opened.Stream); err != nil || !bytes.Equal(got, content) {
		t.Errorf("read %d bytes ahead, right %v: %v", len(got), bytes.Equal(got, content), err)
	}
	// Closed in the middle, the requests under way end.
	opened, err = Open(t.Context(), &blob{b: whole}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := opened.Close(); err != nil {
		t.Error(err)
	}
}

// A stream that is told to stop has not come to its end: else a disk of which
// the rest is missing would be taken for whole, or for corrupt.
func TestStoppedGzipIsNotAtItsEnd(t *testing.T) {
	content := make([]byte, 8<<20)
	rand.NewChaCha8([32]byte{3}).Read(content)
	copy(content[510:], "\x55\xaa")
	whole := zipped(content)
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		opened, err := Open(ctx, &blob{b: whole}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if n, err := io.Copy(io.Discard, opened.Stream); !errors.Is(err, context.Canceled) {
			t.Errorf("after %d bytes: got %v, want %v", n, err, context.Canceled)
		}
		if err := opened.Close(); err != nil {
			t.Error(err)
		}
	}
}

type failing struct{ error }

func (f failing) Read([]byte) (int, error) { return 0, f.error }

// header is a valid image that a test then spoils.
func header() []byte { return images.Qcow2() }

func put32(b []byte, at int, v uint32) { binary.BigEndian.PutUint32(b[at:], v) }
func put64(b []byte, at int, v uint64) { binary.BigEndian.PutUint64(b[at:], v) }

// Whatever points out of an image, contradicts itself or is not understood is
// refused from the header, by its name, before anything else is read. Tables that
// point where they must not are corrupt, never a crash or old bytes.
func TestHostileQcow2(t *testing.T) {
	c := func(says string) refusal { return refusal{fault.CorruptImage, says} }
	refuses(t, images.HostileQcow2s(), map[string]refusal{
		"cut in the header":                                            c("71 bytes"),
		"cut in the header of version 3":                               c("103 bytes"),
		"version 4":                                                    {fault.FormatNotSupported, "version 4"},
		"clusters of 256 bytes":                                        c("cluster bits are 8"),
		"clusters of 4 MiB":                                            c("cluster bits are 22"),
		"cluster bits of 2^32-1":                                       c("cluster bits"),
		"backing file":                                                 {fault.BackingFile, `"/etc/shadow"`},
		"backing file, name outside":                                   {fault.BackingFile, "outside"},
		"backing file, long name":                                      {fault.BackingFile, "outside"},
		"external data file":                                           {fault.ExternalDataFile, `"/dev/sda1"`},
		"external data file without the bit":                           {fault.ExternalDataFile, `"/x/y"`},
		"external data file without a name":                            {fault.ExternalDataFile, "external file"},
		"AES":                                                          {fault.EncryptedImage, "AES"},
		"LUKS":                                                         {fault.EncryptedImage, "LUKS"},
		"encryption of another kind":                                   {fault.EncryptedImage, "method 77"},
		"unknown features, one with a name":                            {fault.FormatNotSupported, `bit 17 "teleport", bit 63`},
		"marked corrupt":                                               c("qemu-img check"),
		"header length 0":                                              c("length is 0"),
		"header length of 2^32-1":                                      c("length is"),
		"refcount order 7":                                             c("refcount order"),
		"compression type without the bit":                             c("compression type"),
		"compression bit without the type":                             c("compression type"),
		"compression type 9":                                           {fault.FormatNotSupported, "compression type 9"},
		"extended entries with small clusters":                         c("extended L2"),
		"a disk of 2^64-1 bytes":                                       c("disk's size"),
		"a disk of 2^62 bytes":                                         c("L1 table has 1 entries"),
		"an L1 table too small for the disk":                           c("needs 2"),
		"an L1 table of 2^32-1 entries":                                c("4194304 are the most"),
		"an L1 table behind the file":                                  c("L1 table"),
		"an L1 table at 2^64-65536":                                    c("L1 table"),
		"an L1 table across the end":                                   c("cut short, upload it again"),
		"an L1 table off the clusters":                                 c("L1 table"),
		"an L1 table at 0":                                             c("L1 table"),
		"a refcount table behind the file":                             c("refcount table"),
		"table: an L2 table behind the file":                           c("L2 table"),
		"table: an L2 table across the end":                            c("L2 table"),
		"table: an L2 table off the clusters":                          c("L2 table"),
		"table: a cluster behind the file":                             c("cut short"),
		"table: a cluster at the end":                                  c("cut short"),
		"table: a cluster off the clusters":                            c("no multiple"),
		"table: zeros in version 2":                                    c("version 2"),
		"table: a compressed cluster behind the file":                  c("lies at"),
		"table: a compressed cluster of noise":                         c("decompress"),
		"table: a compressed cluster of nothing":                       c("decompress"),
		"table: an L2 table that is its own cluster, compressed":       c("decompress"),
		"table: a subcluster that is data and zero":                    c("bitmap"),
		"table: a subcluster of data nowhere":                          c("bitmap"),
		"a disk of 2^63-1 bytes":                                       c("9223372036854775807 bytes"),
		"a disk of 2^50 bytes":                                         c("L1 table has 16777216 bytes"),
		"a refcount table in the header":                               c("refcount table"),
		"backing file nbd:127.0.0.1:10809":                             {fault.BackingFile, "nbd:"},
		"backing file ../../base.qcow2":                                {fault.BackingFile, "../../base.qcow2"},
		`backing file json:{"driver":"file","filename":"/etc/shadow"}`: {fault.BackingFile, "json:"},
	}, shortHead+qcow2HeaderBytes)
	opened, err := Open(t.Context(), &blob{b: header()}, Options{})
	if err != nil || opened.Disk.Size() != 1<<20 {
		t.Errorf("got %v, want a disk of 1 MiB", err)
	}
}

func TestWarnings(t *testing.T) {
	b := header()
	put64(b, 72, qcow2Dirty)
	put32(b, 60, 3)
	opened, err := Open(t.Context(), &blob{b: b}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if w := strings.Join(opened.Info.Warnings, "\n"); !strings.Contains(w, "dirty") || !strings.Contains(w, "3 internal snapshots") {
		t.Errorf("warnings are %q", w)
	}
}

// Few bytes can claim tables that take days to read: here 2^26 entries in
// 256 KiB, and 2^40 would need no more than 36 MiB.
func TestMeasureOfSharedTables(t *testing.T) {
	b := header()
	put64(b, 24, 4<<40)
	put32(b, 36, 8<<10)
	for i := range 8 << 10 {
		put64(b, 64<<10+8*i, 192<<10)
	}
	opened, err := Open(t.Context(), &blob{b: b}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = opened.Measure(t.Context())
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.CorruptImage || !strings.Contains(err.Error(), "196608") {
		t.Errorf("got %v, want a terminal %s that names the table at 196608", err, fault.CorruptImage)
	}
}

// word is a patch of a fuzzed image: eight bytes at a multiple of eight.
func word(at int, v uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint16(nil, uint16(at/8)), v)
}

func words(of ...[]byte) []byte { return bytes.Join(of, nil) }

// FuzzQcow2 opens a spoiled image as qcow2 and reads what can be read: no crash,
// no long run, no memory beyond the bounds, and extents without gaps. The image
// is the header above with words of it, and of its tables and data, replaced:
// the fuzzer gets further with those than with 256 KiB of zeros.
func FuzzQcow2(f *testing.F) {
	l2 := word(64<<10, 192<<10)
	f.Add(uint8(16), uint8(0), []byte{})
	f.Add(uint8(16), uint8(0), words(l2, word(192<<10, 128<<10), word(192<<10+8, qcow2Compressed|1<<54|70<<10), word(192<<10+16, 1)))
	f.Add(uint8(16), uint8(qcow2ExtendedL2), words(l2, word(192<<10, 128<<10), word(192<<10+8, 0x0000_ff00_0000_00ff)))
	f.Add(uint8(16), uint8(qcow2Compression), words(l2, word(104, 1<<56), word(192<<10, qcow2Compressed|128<<10), word(128<<10, 0x28b52ffd_00581100), word(128<<10+8, 0x00686900<<32)))
	f.Add(uint8(9), uint8(0), words(word(24, 32<<10), word(64<<10, 4096), word(4096, 4608), word(4104, qcow2Compressed|5000)))
	f.Add(uint8(21), uint8(qcow2Dirty), words(word(24, 1<<62), word(32, 4<<20), word(40, 0)))
	f.Fuzz(func(t *testing.T, bits, features uint8, patches []byte) {
		b := header()
		put32(b, 20, uint32(bits))
		put64(b, 72, uint64(features))
		for ; len(patches) >= 10; patches = patches[10:] {
			if at := int(binary.BigEndian.Uint16(patches)) * 8; at < len(b) {
				copy(b[at:], patches[2:10])
			}
		}
		opened, err := openQcow2(t.Context(), &blob{b: b})
		if err != nil {
			if f := fault.Of(err); !f.Terminal {
				t.Errorf("opening says %v, which is not terminal", err)
			}
			return
		}
		size := opened.Disk.Size()
		for _, off := range []int64{0, size / 2, max(0, size-256<<10)} {
			n := min(256<<10, size-off)
			if list, err := opened.Disk.Extents(t.Context(), off, n); err == nil {
				at := off
				for _, e := range list {
					if e.Start != at || e.Length <= 0 {
						t.Fatalf("extents of %d+%d: %v", off, n, list)
					}
					at = e.End()
				}
				if at != off+n {
					t.Fatalf("extents of %d+%d end at %d", off, n, at)
				}
			}
			p := make([]byte, n)
			if m, err := opened.Disk.ReadAtContext(t.Context(), p, off); err == nil && m != len(p) {
				t.Fatalf("read %d of %d bytes at %d without an error", m, n, off)
			} else if err != nil && !fault.Of(err).Terminal {
				t.Fatalf("reading says %v, which is not terminal", err)
			}
		}
	})
}

// FuzzOpen opens bytes as an image of any kind, and the same in gzip, and reads
// what that gives: no crash, and every error says that trying again is useless.
func FuzzOpen(f *testing.F) {
	boot := at(2048, 510, "\x55\xaa")
	for _, b := range [][]byte{
		nil, boot, at(4096, 1080, "\x53\xef"), header()[:4096], zipped(boot), zipped(boot, boot[:7], nil), zipped(boot)[:40],
		append(zipped(boot), 0, 0, 0), []byte("\x1f\x8b\x08\x1c\x00\x00\x00\x00\x00\x03\xff\xffextra"),
		[]byte("# Disk DescriptorFile\n"), []byte("<html>"), []byte("{\"a\": 1}"), []byte("\xef\xbb\xbf\xff"),
	} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		blobs := []Blob{oneWay{bytes.NewReader(b), -1}, oneWay{bytes.NewReader(zipped(b)), -1}}
		if !bytes.HasPrefix(b, []byte("\x1f\x8b")) { // reading ahead is of no matter here, and of another course each time
			blobs = append(blobs, &blob{b: b})
		}
		for _, b := range blobs {
			opened, err := Open(t.Context(), b, Options{})
			if err != nil {
				if !fault.Of(err).Terminal {
					t.Errorf("%T: opening says %v, which is not terminal", b, err)
				}
				continue
			}
			if opened.Stream != nil {
				if _, err := io.Copy(io.Discard, io.LimitReader(opened.Stream, 16<<20)); err != nil && !fault.Of(err).Terminal {
					t.Errorf("%T: reading says %v, which is not terminal", b, err)
				}
			} else if _, err := opened.Measure(t.Context()); err != nil && !fault.Of(err).Terminal {
				t.Errorf("%T: measuring says %v, which is not terminal", b, err)
			}
			if err := opened.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}
