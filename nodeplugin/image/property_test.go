package image_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

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
				readsHold(t, opened.Disk, img, seed)
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

func blobOf(t *testing.T, path string) source.Blob {
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
	return blob
}

func open(t *testing.T, path string) *image.Opened {
	t.Helper()
	opened, err := image.Open(t.Context(), blobOf(t, path), image.Options{})
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

// readsHold reads pieces of any offset and length.
func readsHold(t *testing.T, d image.Disk, img images.Image, seed uint64) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 5))
	for range 60 {
		off := rnd.IntN(len(img.Content))
		p := make([]byte, 1+rnd.IntN(min(len(img.Content)-off, 300_000)))
		if n, err := d.ReadAtContext(t.Context(), p, int64(off)); err != nil || n != len(p) {
			t.Fatalf("%s: read %d bytes at %d, got %d: %v", img.Variant, len(p), off, n, err)
		}
		same(t, fmt.Sprintf("%s: %d bytes at %d", img.Variant, len(p), off), p, img.Content[off:off+len(p)])
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

// counted counts the requests for an image.
type counted struct {
	image.Ranged
	mu       sync.Mutex
	requests int
	longest  int
	bytes    int64
}

func (c *counted) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	c.mu.Lock()
	c.requests++
	c.bytes += int64(len(p))
	c.longest = max(c.longest, len(p))
	c.mu.Unlock()
	return c.Ranged.ReadAtContext(ctx, p, off)
}

// A qcow2 image is read in few requests of up to 1 MiB, and hardly a byte twice.
func TestRequestsAreFewAndLong(t *testing.T) {
	raw := images.Raw(t, 5, 12<<20)
	rand.NewChaCha8([32]byte{5}).Read(raw.Content[1<<20 : 9<<20])
	for i := 2 << 20; i < 9<<20; i += 3 {
		raw.Content[i] = 'x' // compresses, but not to nothing
	}
	if err := os.WriteFile(raw.Path, raw.Content, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, options := range [][]string{
		{"-o", "cluster_size=64k"},
		{"-c", "-o", "cluster_size=64k"},
		{"-c", "-o", "cluster_size=64k,compression_type=zstd"},
		{"-c", "-o", "cluster_size=4k"},
		{"-c", "-o", "cluster_size=2M"},
		{"-o", "cluster_size=2M"},
	} {
		t.Run(strings.Join(options, " "), func(t *testing.T) {
			t.Parallel()
			img := images.Convert(t, raw, options...)
			info, err := os.Stat(img.Path)
			if err != nil {
				t.Fatal(err)
			}
			file := &counted{Ranged: blobOf(t, img.Path).(image.Ranged)}
			opened, err := image.Open(t.Context(), file, image.Options{})
			if err != nil {
				t.Fatal(err)
			}
			dst := newTarget(t, int64(len(img.Content)), true)
			if err := blockcopy.Copy(t.Context(), dst, opened.Disk, blockcopy.Options{KnownZero: true}); err != nil {
				t.Fatal(err)
			}
			t.Logf("file of %d bytes: %d requests, %d bytes, %d the longest", info.Size(), file.requests, file.bytes, file.longest)
			if most := 2*12 + 10; file.requests > most {
				t.Errorf("%d requests for a file of %d bytes, want at most %d", file.requests, info.Size(), most)
			}
			if most := info.Size() + info.Size()/20 + 300<<10; file.bytes > most {
				t.Errorf("%d bytes read of a file of %d, want at most %d", file.bytes, info.Size(), most)
			}
			if file.longest > 2<<20+512 {
				t.Errorf("a request of %d bytes", file.longest)
			}
		})
	}
}

// Whatever a file says, reading it holds no more memory than is promised: here
// clusters of 2 MiB that claim to be 4 MiB when compressed, by many readers.
// The file stands still whenever a cluster is read, so that what is counted is
// what all readers together hold, not what is left to collect.
func TestMemoryIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bomb.qcow2")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const cluster = 2 << 20
	head := make([]byte, 112)
	copy(head, "QFI\xfb")
	binary.BigEndian.PutUint32(head[4:], 3)
	binary.BigEndian.PutUint32(head[20:], 21)
	binary.BigEndian.PutUint64(head[24:], 256<<30) // a disk of 256 GiB
	binary.BigEndian.PutUint32(head[36:], 4<<20)   // the longest L1 table
	binary.BigEndian.PutUint64(head[40:], cluster)
	binary.BigEndian.PutUint32(head[96:], 4)
	binary.BigEndian.PutUint32(head[100:], 112)
	l1 := binary.BigEndian.AppendUint64(nil, 32*cluster)
	l2 := bytes.Repeat(binary.BigEndian.AppendUint64(nil, 1<<62|0x1fff<<49|40*cluster), cluster/8)
	for _, w := range []struct {
		off int64
		b   []byte
	}{{0, head}, {cluster, l1}, {32 * cluster, l2}, {50 * cluster, []byte{0}}} {
		if _, err := f.WriteAt(w.b, w.off); err != nil {
			t.Fatal(err)
		}
	}
	blob := blobOf(t, path).(image.Ranged)
	synctest.Test(t, func(t *testing.T) {
		file := &gated{Ranged: blob, gate: make(chan struct{})}
		opened, err := image.Open(t.Context(), file, image.Options{})
		if err != nil {
			t.Fatal(err)
		}
		before := live()
		var readers sync.WaitGroup
		for i := range int64(16) {
			readers.Go(func() {
				p := make([]byte, 4096)
				for k := range int64(4) {
					opened.Disk.Extents(t.Context(), (i*10+k)*512<<20/2, 1<<20)
					// Ends in an error, after it has got all 4 MiB.
					opened.Disk.ReadAtContext(t.Context(), p, (i*10+k)*cluster)
				}
			})
		}
		done := make(chan struct{})
		go func() { readers.Wait(); close(done) }()
		var most int64
		for reading := true; reading; {
			synctest.Wait() // until every reader waits: here, or for memory
			most = max(most, live()-before)
			select {
			case file.gate <- struct{}{}:
			case <-done:
				reading = false
			}
		}
		// 16 MiB of clusters, 4 MiB of pages, and the readers themselves.
		t.Logf("16 readers held %d KiB", most>>10)
		if most < 8<<20 || most > 22<<20 {
			t.Errorf("16 readers held %d KiB, want from 8 to 22 MiB", most>>10)
		}
	})
}

// gated lets no read of a cluster begin before someone asks at its gate.
type gated struct {
	image.Ranged
	gate chan struct{}
}

func (g *gated) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if len(p) > 1<<20 {
		<-g.gate
	}
	return g.Ranged.ReadAtContext(ctx, p, off)
}

// live counts the bytes of the heap that something still refers to.
func live() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // a sync.Pool keeps what it has for one more cycle
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
