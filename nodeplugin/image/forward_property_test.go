package image_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// spool is a file of at most so many bytes.
type spool struct {
	*os.File
	most    int64
	written int64
}

func newSpool(t testing.TB, most int64) *spool {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "spool")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return &spool{File: f, most: most}
}

func (s *spool) Bytes() int64 { return s.most }

func (s *spool) WriteAt(p []byte, off int64) (int, error) {
	s.written += int64(len(p))
	return s.File.WriteAt(p, off)
}

// reason is that of a fault.
func reason(err error) string {
	if err == nil {
		return ""
	}
	return fault.Of(err).Reason
}

// importOnce copies a disk from a stream, whose format may be named, with the spool if
// that is needed.
func importOnce(t *testing.T, b []byte, size int, s *spool, format ...string) ([]byte, error) {
	t.Helper()
	named := strings.Join(format, "")
	for _, o := range []image.Options{{Format: named}, {Format: named, Spool: s}} {
		opened, err := image.Open(t.Context(), stream{b}, o)
		var got []byte
		if err == nil {
			got, err = readAll(t, opened, size)
			opened.Close()
		}
		if reason(err) != fault.NeedsSpool || o.Spool != nil {
			return got, err
		}
		t.Log(err)
	}
	panic("not reached")
}

// bigRaw is a disk that is larger than what a stream's reader keeps, with holes.
func bigRaw(t *testing.T, size int64) images.Image {
	t.Helper()
	img := images.Image{Path: filepath.Join(t.TempDir(), "big.raw"), Format: "raw", Content: make([]byte, size)}
	rnd := rand.NewChaCha8([32]byte{8})
	for off := int64(0); off < size; off += 3 << 20 {
		part := img.Content[off:min(size, off+2<<20)]
		rnd.Read(part)
		copy(part[len(part)/2:], bytes.Repeat([]byte("longshore "), len(part)/20))
	}
	copy(img.Content[510:], "\x55\xaa")
	if err := os.WriteFile(img.Path, img.Content, 0o600); err != nil {
		t.Fatal(err)
	}
	return img
}

func converted(t *testing.T, args ...string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "out")
	if said, err := exec.Command("qemu-img", append(append([]string{"convert"}, args...), out)...).CombinedOutput(); err != nil {
		t.Fatalf("qemu-img convert %v: %v: %s", args, err, said)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What qemu-img writes as qcow2 is copied while it passes, and nothing is written
// beside the disk; what does not permit that goes by the spool.
func TestForward(t *testing.T) {
	raw := bigRaw(t, 64<<20)
	for _, row := range []struct {
		name    string
		args    []string
		streams bool
	}{
		{"qcow2", []string{"-O", "qcow2"}, true},
		{"qcow2, compressed", []string{"-c", "-O", "qcow2"}, true},
		{"qcow2, zstd", []string{"-c", "-O", "qcow2", "-o", "compression_type=zstd"}, true},
		{"qcow2, small clusters", []string{"-O", "qcow2", "-o", "cluster_size=4k"}, true},
		{"qcow2, small compressed clusters", []string{"-c", "-O", "qcow2", "-o", "cluster_size=4k"}, true},
		{"qcow2, large clusters", []string{"-O", "qcow2", "-o", "cluster_size=2M"}, true},
		{"qcow2, subclusters", []string{"-O", "qcow2", "-o", "extended_l2=on,cluster_size=128k"}, true},
		{"qcow2, metadata preallocated", []string{"-O", "qcow2", "-o", "preallocation=metadata"}, true},
		{"vdi", []string{"-O", "vdi"}, false},
		{"vhdx", []string{"-O", "vhdx"}, false},
		{"vhd", []string{"-O", "vpc", "-o", "force_size"}, false},
		{"vmdk", []string{"-O", "vmdk"}, false},
		{"vmdk, stream-optimized", []string{"-O", "vmdk", "-o", "subformat=streamOptimized"}, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			b := converted(t, append([]string{"-f", "raw", raw.Path}, row.args...)...)
			wrapped := map[string][]byte{"plain": b}
			if !strings.Contains(row.name, ",") { // one of each format
				wrapped["gzip"] = gzipped(t, b)
			}
			for name, packed := range wrapped {
				s := newSpool(t, 1<<30)
				got, err := importOnce(t, packed, len(raw.Content), s)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				same(t, name, got, raw.Content)
				want := int64(len(b))
				if row.streams {
					want = 0
				}
				if s.written != want {
					t.Errorf("%s: %d bytes were written to the spool, want %d", name, s.written, want)
				}
			}
		})
	}
}

func gzipped(t *testing.T, b []byte) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return packed(t, "gzip -1 -c", path)
}

// Clusters in any order, an L1 table at the end, and small images of every kind:
// what comes out is the same as in ranges.
func TestForwardOfAnyImage(t *testing.T) {
	for seed := range uint64(16) {
		for _, img := range []images.Image{images.Random(t, seed), images.RandomVHD(t, seed), images.RandomVHDX(t, seed), images.RandomVDI(t, seed), images.RandomVMDK(t, seed)} {
			b, err := os.ReadFile(img.Path)
			if err != nil {
				t.Fatal(err)
			}
			s := newSpool(t, 1<<30)
			got, err := importOnce(t, b, len(img.Content)+1<<20, s)
			if reason(err) == fault.NotADiskImage && img.Format == "vhd" { // told too late to be another disk
				got, err = importOnce(t, b, len(img.Content)+1<<20, s, "vhd")
			}
			if err != nil {
				t.Fatalf("%s %s: %v", img.Format, img.Variant, err)
			}
			same(t, img.Format+" "+img.Variant, got, img.Content)
		}
	}
	// Larger than what is kept, and rewritten in pieces at random.
	raw := bigRaw(t, 64<<20)
	path := filepath.Join(t.TempDir(), "rewritten.qcow2")
	script := []string{"create", "-f", "qcow2", path, "32M"}
	if said, err := exec.Command("qemu-img", script...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	if said, err := exec.Command("qemu-img", "resize", path, "64M").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	const piece = 1 << 20
	args := []string{"-f", "qcow2"}
	part := filepath.Join(t.TempDir(), "part")
	for _, i := range rand.New(rand.NewPCG(1, 9)).Perm(64) {
		name := fmt.Sprint(part, i)
		if err := os.WriteFile(name, raw.Content[i*piece:(i+1)*piece], 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "-c", fmt.Sprintf("write -s %s %d %d", name, i*piece, piece))
	}
	if said, err := exec.Command("qemu-io", append(args, path)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s := newSpool(t, 1<<30)
	got, err := importOnce(t, b, len(raw.Content), s)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "rewritten", got, raw.Content)
	if s.written != int64(len(b)) {
		t.Errorf("%d bytes were written to the spool, want %d", s.written, len(b))
	}
}

// Hostile images are refused one way as they are in ranges, and give no other
// bytes.
func TestForwardOfHostileImages(t *testing.T) {
	corpora := map[string]map[string][]byte{"vdi": images.HostileVDIs(), "vhd": images.HostileVHDs(), "vmdk": images.HostileVMDKs(), "tar": images.HostileTars()}
	corpora["vhdx"] = map[string][]byte{}
	for name, b := range images.HostileVHDXs() {
		corpora["vhdx"][name] = b()
	}
	for _, format := range slices.Sorted(maps.Keys(corpora)) {
		for name, b := range corpora[format] {
			ranged, err := image.Open(t.Context(), &memory{b: b}, image.Options{})
			var want []byte
			if err == nil && ranged.Disk.Size() <= 64<<20 {
				want, err = readAll(t, ranged, int(ranged.Disk.Size()))
				ranged.Close()
			}
			if err == nil && want == nil {
				continue // nobody can hold it
			}
			got, err2 := importOnce(t, b, 64<<20, newSpool(t, 64<<20))
			if err2 == nil && (err != nil || !bytes.Equal(got, want)) {
				t.Errorf("%s %s: in ranges %d bytes, %v; one way %d bytes", format, name, len(want), err, len(got))
			}
			if f := (*fault.Fault)(nil); err2 != nil && (!errors.As(err2, &f) || !f.Terminal) {
				t.Errorf("%s %s: %v is no terminal fault", format, name, err2)
			}
		}
	}
}

// A stream that ends too early is a fault, wherever that is.
func TestForwardCutShort(t *testing.T) {
	raw := bigRaw(t, 8<<20)
	b := converted(t, "-f", "raw", raw.Path, "-c", "-O", "qcow2")
	rnd := rand.New(rand.NewPCG(4, 4))
	for range 40 {
		at := 1 + rnd.IntN(len(b)-1024)
		got, err := importOnce(t, b[:at], len(raw.Content), newSpool(t, 1<<30))
		if err == nil && !bytes.Equal(got, raw.Content) {
			t.Errorf("cut at %d of %d: another disk", at, len(b))
		}
		if err != nil && !fault.Of(err).Terminal {
			t.Errorf("cut at %d of %d: %v", at, len(b), err)
		}
	}
	boom := fault.Transient(fault.ConnectionFailed, errors.New("boom"))
	for _, at := range []int{0, 100, 100_000, len(b) / 2} {
		opened, err := image.Open(t.Context(), broken{b[:at], boom}, image.Options{Spool: newSpool(t, 1<<30)})
		if err == nil {
			t.Errorf("broken at %d: %+v", at, opened)
		} else if f := fault.Of(err); f.Terminal || f.Reason != fault.ConnectionFailed {
			t.Errorf("broken at %d: %v", at, err)
		}
	}
}

// broken is a stream whose connection breaks.
type broken struct {
	b   []byte
	err error
}

func (b broken) Size() int64 { return -1 }
func (b broken) Stream(ctx context.Context) (io.ReadCloser, error) {
	return io.NopCloser(io.MultiReader(bytes.NewReader(b.b), failing{b.err})), nil
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }
