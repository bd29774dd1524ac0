package image_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/blockcopy"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// exported is a disk whose stream-optimized image is longer than what is read ahead:
// data, holes of many grain tables, and a last grain that is no whole one.
func exported() []byte {
	b := make([]byte, 100<<20+512*3)
	rnd := rand.NewChaCha8([32]byte{21})
	rnd.Read(b[:5<<20])
	copy(b[20<<20:], b[:1<<20])
	rnd.Read(b[72<<20 : 80<<20])
	rnd.Read(b[len(b)-700:])
	copy(b[510:], "\x55\xaa")
	return b
}

// A stream-optimized image is copied while it passes, whoever wrote it and whatever is
// around it; one with its grains in another order goes by the spool.
func TestVMDKForward(t *testing.T) {
	content := exported()
	for _, row := range []struct {
		vmdk    images.VMDK
		streams bool
	}{
		{images.VMDK{Compressed: true, Footer: true, Version: 3}, true},
		{images.VMDK{Compressed: true, Footer: true, Version: 3, Grain: 8}, true},
		{images.VMDK{Compressed: true, Footer: true, Version: 3, Grain: 4096}, true},
		{images.VMDK{Compressed: true, Footer: true, Version: 3, Zeroed: true}, true},
		{images.VMDK{Compressed: true}, true},
		{images.VMDK{Compressed: true, Redundant: true, Zeroed: true}, true},
		{images.VMDK{Compressed: true, Backwards: true}, false},
		{images.VMDK{Redundant: true}, false},
	} {
		t.Run(fmt.Sprintf("%+v", row.vmdk), func(t *testing.T) {
			b := row.vmdk.Bytes(content)
			s := newSpool(t, 1<<30)
			got, err := importOnce(t, b, len(content), s)
			if err != nil {
				t.Fatal(err)
			}
			same(t, "plain", got, content)
			if (s.written == 0) != row.streams {
				t.Errorf("%d bytes were written to the spool, want some: %v", s.written, !row.streams)
			}
		})
	}
	path := filepath.Join(t.TempDir(), "disk.vmdk")
	if err := os.WriteFile(path, images.VMDK{Compressed: true, Footer: true, Version: 3}.Bytes(content), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"gzip -1 -c", "xz -0 -c", "zstd -1 -c", "bzip2 -1 -c"} {
		s := newSpool(t, 1<<30)
		got, err := importOnce(t, packed(t, command, path), len(content), s)
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		same(t, command, got, content)
		if s.written > 0 {
			t.Errorf("%s: %d bytes were written to the spool", command, s.written)
		}
	}
}

// What an earlier run has written is neither read again nor written.
func TestVMDKForwardGoesOn(t *testing.T) {
	content := exported()
	b := images.VMDK{Compressed: true, Footer: true, Version: 3}.Bytes(content)
	for _, done := range []extent.Range{{Start: 0, Length: 78 << 20}, {Start: 1 << 20, Length: 76 << 20}, {Start: 0, Length: int64(len(content))}} {
		opened, err := image.Open(t.Context(), stream{b}, image.Options{})
		if err != nil {
			t.Fatal(err)
		}
		dst := newTarget(t, int64(len(content)), true)
		var skip extent.Set
		skip.Add(done.Start, done.Length)
		want := append([]byte(nil), content...)
		clear(want[done.Start:done.End()]) // what an earlier run wrote is not there: nobody may look
		if err := blockcopy.Copy(t.Context(), dst, opened.Disk, blockcopy.Options{Skip: skip, KnownZero: true}); err != nil {
			t.Fatal(err)
		}
		if err := opened.Verify(t.Context()); err != nil {
			t.Fatal(err)
		}
		opened.Close()
		got, err := os.ReadFile(dst.f.Name())
		if err != nil {
			t.Fatal(err)
		}
		same(t, fmt.Sprint(done), got, want)
	}
}

// What is wrong with a stream-optimized image is told, whether the spool is there or not,
// and no disk comes of it.
func TestVMDKForwardHostile(t *testing.T) {
	content := exported()
	le := binary.LittleEndian
	type made struct {
		b     []byte
		parts images.VMDKParts
	}
	built := map[images.VMDK]made{}
	for _, row := range []struct {
		name  string
		of    images.VMDK
		spoil func(b []byte, p images.VMDKParts) []byte
		says  string
	}{
		{"cut in a grain", stream3, func(b []byte, p images.VMDKParts) []byte { return b[:p.Grains[1232]+100] }, "cut short"},
		{"cut in a table", stream3, func(b []byte, p images.VMDKParts) []byte { return b[:p.Tables[2]+100] }, "cut short"},
		{"cut in a marker", stream3, func(b []byte, p images.VMDKParts) []byte { return b[:p.Tables[2]-500] }, "cut short"},
		{"cut before the directory", stream3, func(b []byte, p images.VMDKParts) []byte { return b[:p.Directory-512] }, "cut short"},
		{"cut before the footer", stream3, func(b []byte, p images.VMDKParts) []byte { return b[:p.Footer-512] }, "cut short"},
		{"cut in the end-of-stream marker", stream3, func(b []byte, p images.VMDKParts) []byte { return b[:len(b)-1] }, "cut short"},
		{"an end before the footer", stream3, func(b []byte, p images.VMDKParts) []byte { clear(b[p.Footer-512:]); return b }, "before a footer"},
		{"more behind the end", stream3, func(b []byte, p images.VMDKParts) []byte { return append(b, make([]byte, 512)...) }, "goes on"},
		{"a grain past the disk", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint64(b[p.Grains[1232]:], 1<<40); return b }, "of a disk of"},
		{"a grain at 2^64-128", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint64(b[p.Grains[1232]:], 1<<64-128); return b }, "of a disk of"},
		{"a grain between two", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint64(b[p.Grains[1232]:], 1232*128+1); return b }, "in grains of 128"},
		{"a grain of 2^32-1 bytes", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint32(b[p.Grains[1232]+8:], 1<<32-1); return b }, "are the most"},
		{"a grain of a byte more than fits", stream3, func(b []byte, p images.VMDKParts) []byte {
			le.PutUint32(b[p.Grains[1232]+8:], 512+2<<16-12+1)
			return b
		}, "are the most"},
		{"a grain out of order", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint64(b[p.Grains[1232]:], 0); return b }, "sector 0, not 157696"},
		{"a grain twice", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint64(b[p.Grains[1232]:], 1231*128); return b }, "sector 157568, not 157696"},
		{"a grain of another place", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint64(b[p.Grains[1152]:], 1000*128); return b }, "says otherwise"},
		{"no zlib", stream3, func(b []byte, p images.VMDKParts) []byte { b[p.Grains[1232]+12] = 0xff; return b }, "do not decompress"},
		{"a wrong checksum", stream3, func(b []byte, p images.VMDKParts) []byte {
			b[p.Grains[1232]+11+int(le.Uint32(b[p.Grains[1232]+8:]))] ^= 1
			return b
		}, "do not decompress"},
		{"a grain that inflates to a byte more", stream3, func(b []byte, p images.VMDKParts) []byte {
			copy(b[p.Grains[1232]+12:p.Grains[1233]], images.VMDKGrain(0, make([]byte, 65537))[12:])
			return b
		}, "more than the 65536 bytes"},
		{"a grain that inflates to 16 MiB", stream3, func(b []byte, p images.VMDKParts) []byte {
			copy(b[p.Grains[1232]+12:p.Grains[1233]], images.VMDKGrain(0, make([]byte, 16<<20))[12:])
			return b
		}, "more than the 65536 bytes"},
		{"a marker of the type 9", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint32(b[p.Tables[2]-500:], 9); return b }, "type 9"},
		{"a table of 2^64-1 sectors", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint64(b[p.Tables[2]-512:], 1<<64-1); return b }, "want 4"},
		{"a table that knows a grain more", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint32(b[p.Tables[2]:], 130); return b }, "says otherwise"},
		{"a table that knows a grain less", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint32(b[p.Tables[0]:], 0); return b }, "says otherwise"},
		{"a directory of 2^63 sectors", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint64(b[p.Directory-512:], 1<<63); return b }, "want 1"},
		{"a directory without a table", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint32(b[p.Directory:], 0); return b }, "says otherwise"},
		{"a directory with another's table", stream3, func(b []byte, p images.VMDKParts) []byte {
			copy(b[p.Directory:p.Directory+4], b[p.Directory+12:])
			return b
		}, "says otherwise"},
		{"a directory whose table is a grain", stream3, func(b []byte, p images.VMDKParts) []byte {
			le.PutUint32(b[p.Directory:], uint32(p.Grains[5]/512))
			return b
		}, "where none has come"},
		{"a directory whose table is at 2^32-1", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint32(b[p.Directory:], 1<<32-1); return b }, "where none has come"},
		{"a footer with another directory", stream3, func(b []byte, p images.VMDKParts) []byte {
			le.PutUint64(b[p.Footer+56:], uint64(p.Grains[5]/512))
			return b
		}, "where none has come"},
		{"a footer of another size", stream3, func(b []byte, p images.VMDKParts) []byte { le.PutUint64(b[p.Footer+12:], 1<<20); return b }, "disagree"},

		{"tables first: a table that knows a grain more", images.VMDK{Compressed: true}, func(b []byte, p images.VMDKParts) []byte {
			le.PutUint32(b[p.Tables[3]+4:], uint32(len(b)/512)-1)
			return b
		}, ""},
		{"tables first: cut in a grain", images.VMDK{Compressed: true}, func(b []byte, p images.VMDKParts) []byte { return b[:p.Grains[1232]+100] }, "cut short"},
		{"tables first: cut between two grains", images.VMDK{Compressed: true}, func(b []byte, p images.VMDKParts) []byte { return b[:p.Grains[1232]] }, "says otherwise"},
		{"tables first: a copy that says otherwise", images.VMDK{Compressed: true, Redundant: true}, func(b []byte, p images.VMDKParts) []byte {
			le.PutUint32(b[p.Redundant:], 0)
			return b
		}, "disagree"},
	} {
		t.Run(row.name, func(t *testing.T) {
			if _, ok := built[row.of]; !ok {
				b, p := row.of.Build(content)
				built[row.of] = made{b, p}
			}
			b := row.spoil(bytes.Clone(built[row.of].b), built[row.of].parts)
			got, err := importOnce(t, b, len(content), newSpool(t, 1<<30))
			f := fault.Of(err)
			if f == nil || !f.Terminal || f.Reason != fault.CorruptImage || !strings.Contains(err.Error(), row.says) {
				t.Errorf("got %d bytes, %v; want a corrupt image and %q", len(got), err, row.says)
			}
		})
	}
}

var stream3 = images.VMDK{Compressed: true, Footer: true, Version: 3}
