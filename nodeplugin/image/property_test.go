package image_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/blockcopy"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/file"
	"github.com/longshore-io/longshore/test/images"
)

// What the engine writes of any image equals what "qemu-img convert -O raw"
// writes, byte for byte, and both equal what was put into the image.
func TestImportEqualsQemu(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			img := images.Random(t, seed)
			opened := open(t, img.Path)
			dst := newTarget(t, int64(len(img.Content)), seed%2 == 0)
			o := blockcopy.Options{KnownZero: dst.zero}
			if opened.Disk != nil {
				if err := blockcopy.Copy(t.Context(), dst, opened.Disk, o); err != nil {
					t.Fatalf("%s: %v", img.Variant, err)
				}
				if got := opened.Disk.Size(); got != int64(len(img.Content)) {
					t.Errorf("%s: disk of %d bytes, want %d", img.Variant, got, len(img.Content))
				}
				extentsHold(t, opened.Disk, img.Content)
			} else if _, err := blockcopy.CopyStream(t.Context(), dst, opened.Stream, o); err != nil {
				t.Fatalf("%s: %v", img.Variant, err)
			}
			got, err := os.ReadFile(dst.f.Name())
			if err != nil {
				t.Fatal(err)
			}
			same(t, img.Variant+": the engine", got, img.Content)
			want := img.Oracle(t)
			if rest := len(want) - len(got); rest > 0 && rest < 512 {
				got = append(got, make([]byte, rest)...)
			}
			same(t, img.Variant+": the engine beside qemu-img", got, want)
			if opened.Info.Format != img.Format || opened.Info.Compression != img.Compression {
				t.Errorf("%s: recognised as %q in %q", img.Variant, opened.Info.Format, opened.Info.Compression)
			}
			if _, err := opened.Measure(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func open(t *testing.T, path string) *image.Opened {
	t.Helper()
	params, err := json.Marshal(file.Params{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	blob, err := source.Kinds{file.Kind}.Open(t.Context(), nil, source.Spec{Kind: "file", Params: params})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { blob.Close() })
	opened, err := image.Open(t.Context(), blob, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { opened.Close() })
	return opened
}

// extentsHold checks that what the extents call zero or hole is zero, whatever
// part of the disk is asked.
func extentsHold(t *testing.T, d image.Disk, content []byte) {
	t.Helper()
	for _, step := range []int64{int64(len(content)), 77_777, 1 << 20} {
		for off := int64(0); off < d.Size(); off += step {
			n := min(step, d.Size()-off)
			list, err := d.Extents(t.Context(), off, n)
			if err != nil {
				t.Fatal(err)
			}
			at := off
			for _, e := range list {
				if e.Start != at {
					t.Fatalf("extents of %d+%d leave a gap at %d: %v", off, n, at, list)
				}
				at = e.End()
				if e.Kind != extent.Data && len(bytes.Trim(content[e.Start:e.End()], "\x00")) > 0 {
					t.Errorf("%s extent %d+%d has data", e.Kind, e.Start, e.Length)
				}
			}
			if at != off+n {
				t.Fatalf("extents of %d+%d end at %d", off, n, at)
			}
		}
	}
}

func same(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	if len(got) != len(want) {
		t.Fatalf("%s: %d bytes, want %d", what, len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("%s: byte %d of %d is %#x, want %#x", what, i, len(got), got[i], want[i])
		}
	}
}

// target is a file; where it is not zero it is full of old bytes.
type target struct {
	f    *os.File
	size int64
	zero bool
}

func newTarget(t *testing.T, size int64, zero bool) *target {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "target"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if !zero {
		if _, err := io.Copy(io.NewOffsetWriter(f, 0), bytes.NewReader(bytes.Repeat([]byte{0xa5}, int(size)))); err != nil {
			t.Fatal(err)
		}
	}
	return &target{f: f, size: size, zero: zero}
}

func (d *target) Size() int64                              { return d.size }
func (d *target) Align() int                               { return 4096 }
func (d *target) WriteAt(p []byte, off int64) (int, error) { return d.f.WriteAt(p, off) }
func (d *target) ReadAt(p []byte, off int64) (int, error)  { return d.f.ReadAt(p, off) }
func (d *target) Zero(off, n int64) error {
	_, err := d.f.WriteAt(make([]byte, n), off)
	return err
}
