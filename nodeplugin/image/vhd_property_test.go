package image_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/blockcopy"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// holds checks that an image is read as what was put into it: whole, in parts,
// and in its extents.
func holds(t *testing.T, img images.Image, seed uint64) *image.Opened {
	t.Helper()
	opened := open(t, img.Path)
	if opened.Disk == nil || opened.Info.Format != img.Format || opened.Info.VirtualSize != int64(len(img.Content)) {
		t.Fatalf("%s: opened as %+v, want a disk of %d bytes", img.Variant, opened.Info, len(img.Content))
	}
	dst := newTarget(t, int64(len(img.Content)), seed%2 == 0)
	if err := blockcopy.Copy(t.Context(), dst, opened.Disk, blockcopy.Options{KnownZero: dst.zero}); err != nil {
		t.Fatalf("%s: %v", img.Variant, err)
	}
	got, err := os.ReadFile(dst.f.Name())
	if err != nil {
		t.Fatal(err)
	}
	same(t, img.Variant+": the engine", got, img.Content)
	extentsHold(t, opened.Disk, img.Content)
	readsHold(t, opened.Disk, img, seed)
	if info, err := opened.Measure(t.Context()); err != nil || info.AllocatedBytes < 0 || info.AllocatedBytes > info.VirtualSize {
		t.Errorf("%s: measured %+v, %v", img.Variant, info, err)
	}
	return opened
}

// What the engine reads of a vhd image that QEMU made is what QEMU reads.
func TestVHDEqualsQemu(t *testing.T) {
	for seed := range uint64(24) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			img := images.RandomVHD(t, seed)
			holds(t, img, seed)
			same(t, img.Variant+": QEMU", img.Oracle(t), img.Content)
		})
	}
}

// What other producers write is read as they mean it.
func TestVHDOfOthers(t *testing.T) {
	disk := func(size int) []byte {
		b := make([]byte, size)
		rnd := rand.NewChaCha8([32]byte{7})
		for off := 0; off < size; off += 3 * 64 << 10 {
			rnd.Read(b[off:min(size, off+70<<10)])
		}
		rnd.Read(b[size-1024:])
		copy(b[510:], "\x55\xaa")
		return b
	}
	const size = 3<<20 + 512
	const cylinders, heads, sectors = 90, 4, 17 // 6120 of 6145 sectors
	geometry := [3]int{cylinders, heads, sectors}
	most := [3]int{65535, 16, 255}
	for _, row := range []struct {
		vhd   images.VHD
		size  int  // of the disk
		qemu  bool // sees the same
		warns bool
	}{
		{images.VHD{Creator: "vpc ", Geometry: geometry, Block: 2 << 20}, 512 * cylinders * heads * sectors, true, true},
		{images.VHD{Creator: "vs  ", Geometry: geometry, Block: 2 << 20}, 512 * cylinders * heads * sectors, true, true},
		{images.VHD{Creator: "qemu", Geometry: geometry, Fixed: true}, 512 * cylinders * heads * sectors, true, true},
		{images.VHD{Creator: "vpc ", Geometry: most, Block: 2 << 20}, size, true, false},
		{images.VHD{Creator: "vpc ", Block: 2 << 20}, size, false, false},
		{images.VHD{Creator: "qem2", Geometry: geometry, Block: 2 << 20}, size, true, false},
		{images.VHD{Creator: "win ", Geometry: geometry, Block: 2 << 20}, size, true, false},
		{images.VHD{Creator: "win ", Geometry: geometry, Fixed: true}, size, true, false},
		{images.VHD{Creator: "d2v ", Geometry: geometry, Block: 2 << 20}, size, true, false},
		{images.VHD{Creator: "tap\x00", Geometry: geometry, Block: 2 << 20}, size, true, false},
		{images.VHD{Creator: "CTXS", Geometry: geometry, Block: 2 << 20}, size, true, false},
		// QEMU 7.2 knows neither of these, and takes their geometry.
		{images.VHD{Creator: "wa\x00\x00", Geometry: geometry, Fixed: true}, size, false, false},
		{images.VHD{Creator: "vbox", Geometry: geometry, Block: 2 << 20}, size, false, false},
		{images.VHD{Creator: "win ", Geometry: geometry, Fixed: true, Short: true}, size, false, false},
		{images.VHD{Creator: "win ", Geometry: geometry, Block: 2 << 20, Short: true}, size, true, false},
		// Of blocks this small QEMU thinks that they have no bitmap.
		{images.VHD{Creator: "win ", Geometry: geometry, Block: 512}, size, false, false},
		{images.VHD{Creator: "win ", Geometry: geometry, Block: 4096}, size, true, false},
		{images.VHD{Creator: "win ", Geometry: geometry, Block: 512 << 10}, size, true, false},
		{images.VHD{Creator: "win ", Geometry: geometry, Block: 32 << 20}, size, true, false},
	} {
		t.Run(fmt.Sprintf("%+v", row.vhd), func(t *testing.T) {
			content := disk(size)
			img := images.Made(t, "vhd", "made", row.vhd.Bytes(content), content[:row.size])
			opened := holds(t, img, 1)
			if row.qemu {
				same(t, "QEMU", img.Oracle(t), img.Content)
			}
			if got := len(opened.Info.Warnings) > 0; got != row.warns {
				t.Errorf("warnings are %q", opened.Info.Warnings)
			}
		})
	}
}

// A sector that the bitmap of its block does not call written is zeros, whatever
// lies in its place: a host writes blocks over what was there before.
func TestVHDBitmaps(t *testing.T) {
	for name, written := range map[string]func(int) bool{
		"every other sector": func(s int) bool { return s%2 == 0 },
		"every ninth":        func(s int) bool { return s%9 == 0 },
		"long runs":          func(s int) bool { return s/700%2 == 0 },
		"none":               func(s int) bool { return s == 0 },
		"by chance":          func(s int) bool { return s == 0 || rand.New(rand.NewPCG(uint64(s/5), 1)).IntN(3) == 0 },
	} {
		t.Run(name, func(t *testing.T) {
			content := make([]byte, 5<<20+512*3)
			rand.NewChaCha8([32]byte{8}).Read(content)
			copy(content[510:], "\x55\xaa")
			v := images.VHD{Creator: "win ", Block: 2 << 20, Written: written}
			b := v.Bytes(content)
			for s := range len(content) / 512 {
				if !written(s) {
					clear(content[512*s:][:512])
				}
			}
			holds(t, images.Made(t, "vhd", name, b, content), 3)
		})
	}
}

// What a fixed disk begins with is its guest's, which may be anything.
func TestFixedVHDThatLooksDynamic(t *testing.T) {
	inner := images.VHD{Creator: "win ", Block: 64 << 10}.Bytes(make([]byte, 1<<20))
	content := append(inner, make([]byte, 2<<20-len(inner)%512)...)
	img := images.Made(t, "vhd", "a fixed disk that begins with a footer", images.VHD{Creator: "win ", Fixed: true}.Bytes(content), content)
	holds(t, img, 2)
}

// One of its two footers suffices for a dynamic disk, and somebody is told.
func TestVHDWithOneFooter(t *testing.T) {
	content := make([]byte, 1<<20)
	rand.NewChaCha8([32]byte{9}).Read(content)
	whole := images.VHD{Creator: "win ", Block: 64 << 10}.Bytes(content)
	first := append([]byte{}, whole...)
	first[100] ^= 1
	for name, b := range map[string][]byte{"at its beginning": first, "at its end": whole[:len(whole)-512]} {
		opened := holds(t, images.Made(t, "vhd", name, b, content), 4)
		if w := strings.Join(opened.Info.Warnings, "\n"); !strings.Contains(w, name) {
			t.Errorf("%s: warnings are %q", name, w)
		}
	}
}

// slow answers no request for a bitmap before so many of them have come; those
// in the file's first page come with its header.
type slow struct {
	counted
	want, waiting int
	enough        chan struct{}
}

func (s *slow) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if len(p) == 4096 && off > 0 {
		s.mu.Lock()
		if s.waiting++; s.waiting == s.want {
			close(s.enough)
		}
		s.mu.Unlock()
		select {
		case <-s.enough:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return s.counted.ReadAtContext(ctx, p, off)
}

// The bitmaps of blocks are asked for at once, and cost few bytes.
func TestVHDRequests(t *testing.T) {
	content := make([]byte, 24<<20)
	rand.NewChaCha8([32]byte{6}).Read(content)
	img := images.Made(t, "vhd", "made", images.VHD{Creator: "win ", Block: 2 << 20}.Bytes(content), content)
	file := &slow{counted: counted{Ranged: blobOf(t, img.Path).(image.Ranged)}, want: 11, enough: make(chan struct{})}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // if the requests never come
	defer cancel()
	opened, err := image.Open(ctx, file, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	dst := newTarget(t, int64(len(content)), true)
	if err := blockcopy.Copy(ctx, dst, opened.Disk, blockcopy.Options{KnownZero: true}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d requests, %d bytes", file.requests, file.bytes)
	if most := int64(len(content))*102/100 + 200<<10; file.bytes > most || file.requests > 3*24 {
		t.Errorf("%d requests for %d bytes of a disk of %d, want at most %d for %d", file.requests, file.bytes, len(content), 3*24, most)
	}
}
