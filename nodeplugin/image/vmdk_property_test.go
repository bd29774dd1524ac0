package image_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/blockcopy"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// What the engine reads of a vmdk image that QEMU made is what QEMU reads.
func TestVMDKEqualsQemu(t *testing.T) {
	for seed := range uint64(24) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			img := images.RandomVMDK(t, seed)
			holds(t, img, seed)
			same(t, img.Variant+": QEMU", img.Oracle(t), img.Content)
		})
	}
}

// patchwork is a disk of data, zeros and what hardly compresses.
func patchwork(size int) []byte {
	b := make([]byte, size)
	rnd := rand.NewChaCha8([32]byte{17})
	for off := 0; off < size; off += 5 * 64 << 10 {
		rnd.Read(b[off:min(size, off+70<<10)])
		for i := off + 100<<10; i < min(size, off+150<<10); i++ {
			b[i] = "longshore "[i%10]
		}
	}
	rnd.Read(b[size-512:])
	copy(b[510:], "\x55\xaa")
	return b
}

// What other producers write is read as they mean it, and by QEMU too.
func TestVMDKOfOthers(t *testing.T) {
	const size = 3<<20 + 512*7
	many := 512*4096 + 33*4096 // two tables of grains of 4 KiB
	for _, row := range []struct {
		vmdk  images.VMDK
		size  int
		qemu  bool // sees the same
		warns string
	}{
		{images.VMDK{}, size, true, ""},
		{images.VMDK{Redundant: true}, size, true, ""},
		{images.VMDK{Redundant: true, Backwards: true}, size, true, ""},
		{images.VMDK{Version: 2, Zeroed: true}, size, true, ""},
		{images.VMDK{Grain: 8}, many, true, ""},
		{images.VMDK{Grain: 8, Redundant: true, Zeroed: true, Version: 2, Backwards: true}, many, true, ""},
		{images.VMDK{Grain: 4096}, size, true, ""},
		{images.VMDK{Unclean: true}, size, true, "not closed cleanly"},
		{images.VMDK{Compressed: true}, size, true, ""},
		{images.VMDK{Compressed: true, Version: 3}, size, true, ""},
		{images.VMDK{Compressed: true, Version: 3, Backwards: true}, size, true, ""},
		{images.VMDK{Compressed: true, Grain: 8}, many, true, ""},
		{images.VMDK{Compressed: true, Grain: 4096}, size, true, ""},
		{images.VMDK{Compressed: true, Footer: true}, size, true, ""},
		{images.VMDK{Compressed: true, Footer: true, Version: 3}, size, true, ""},
		{images.VMDK{Compressed: true, Footer: true, Version: 3, Grain: 8}, many, true, ""},
		{images.VMDK{Compressed: true, Footer: true, Version: 3, Zeroed: true}, size, true, ""},
		{images.VMDK{Descriptor: images.Descriptor("monolithicSparse", fmt.Sprintf(`RDONLY %d SPARSE "call-me.vmdk"`, size/512))}, size, true, ""},
		{images.VMDK{Descriptor: strings.ReplaceAll(images.Descriptor("streamOptimized", fmt.Sprintf(`RW %d SPARSE "x.vmdk"`, size/512)), "\n", "\r\n"), Compressed: true}, size, true, ""},
		{images.VMDK{Descriptor: strings.ReplaceAll(images.Descriptor("monolithicSparse", `RW 4096 SPARSE "x.vmdk"`), "version=1", "version=3\nchangeTrackPath=\"x-ctk.vmdk\"")}, size, true, "4096"},
	} {
		if strings.Contains(row.vmdk.Descriptor, "RW 4096") {
			row.warns = "of 2097152 by its descriptor"
		}
		t.Run(fmt.Sprintf("%+v", row.vmdk), func(t *testing.T) {
			content := patchwork(row.size)
			img := images.Made(t, "vmdk", "made", row.vmdk.Bytes(content), content)
			opened := holds(t, img, 1)
			if row.qemu {
				same(t, "QEMU", img.Oracle(t), img.Content)
			}
			if got := strings.Join(opened.Info.Warnings, "\n"); (got != "") != (row.warns != "") || !strings.Contains(got, row.warns) {
				t.Errorf("warnings are %q, want %q", got, row.warns)
			}
			info, err := opened.Measure(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if want := map[bool]string{true: "zlib"}[row.vmdk.Compressed]; info.ClusterCompression != want {
				t.Errorf("grains compressed by %q, want %q", info.ClusterCompression, want)
			}
		})
	}
}

// A disk of which the most part has no table, and grains that are marked as
// zeros: both kinds are told apart, and nothing is read for them.
func TestVMDKHoles(t *testing.T) {
	content := make([]byte, 80<<20)
	rand.NewChaCha8([32]byte{18}).Read(content[70<<20 : 71<<20])
	for _, v := range []images.VMDK{{Compressed: true, Footer: true, Version: 3}, {Version: 2, Zeroed: true}} {
		path := images.Made(t, "vmdk", "holes", v.Bytes(content), content).Path
		opened := open(t, path)
		list, err := opened.Disk.Extents(t.Context(), 0, 80<<20)
		if err != nil {
			t.Fatal(err)
		}
		kind := extent.Hole
		if v.Zeroed {
			kind = extent.Zero
		}
		want := []extent.Extent{{Length: 70 << 20, Kind: kind}, {Start: 70 << 20, Length: 1 << 20}, {Start: 71 << 20, Length: 9 << 20, Kind: kind}}
		if fmt.Sprint(list) != fmt.Sprint(want) {
			t.Errorf("%+v: extents %v, want %v", v, list, want)
		}
	}
}

// A vmdk image is read in few requests, and hardly a byte twice or in vain.
func TestVMDKRequestsAreFewAndLong(t *testing.T) {
	content := make([]byte, 40<<20)
	rand.NewChaCha8([32]byte{19}).Read(content[1<<20 : 36<<20])
	for i := 1 << 20; i < 36<<20; i += 3 {
		content[i] = 'x' // compresses, but not to nothing
	}
	for _, v := range []images.VMDK{{Redundant: true}, {Compressed: true}, {Compressed: true, Footer: true, Version: 3}} {
		t.Run(fmt.Sprintf("%+v", v), func(t *testing.T) {
			img := images.Made(t, "vmdk", "long", v.Bytes(content), content)
			info, err := os.Stat(img.Path)
			if err != nil {
				t.Fatal(err)
			}
			file := &counted{Ranged: blobOf(t, img.Path).(image.Ranged)}
			opened, err := image.Open(t.Context(), file, image.Options{})
			if err != nil {
				t.Fatal(err)
			}
			dst := newTarget(t, int64(len(content)), true)
			if err := blockcopy.Copy(t.Context(), dst, opened.Disk, blockcopy.Options{KnownZero: true}); err != nil {
				t.Fatal(err)
			}
			t.Logf("file of %d bytes: %d requests, %d bytes, %d the longest", info.Size(), file.requests, file.bytes, file.longest)
			if most := 2*36 + 12; file.requests > most {
				t.Errorf("%d requests for a file of %d bytes, want at most %d", file.requests, info.Size(), most)
			}
			if most := info.Size() + info.Size()/50 + 300<<10; file.bytes > most {
				t.Errorf("%d bytes read of a file of %d, want at most %d", file.bytes, info.Size(), most)
			}
		})
	}
}
