package image_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/longshore-io/longshore/test/images"
)

// What the engine reads of a vdi image that QEMU made is what QEMU reads.
func TestVDIEqualsQemu(t *testing.T) {
	for seed := range uint64(16) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			img := images.RandomVDI(t, seed)
			holds(t, img, seed)
			same(t, img.Variant+": QEMU", img.Oracle(t), img.Content)
		})
	}
}

// Blocks of other sizes and with other data before them are VirtualBox's to
// write; QEMU reads only those of 1 MiB.
func TestVDIOfOthers(t *testing.T) {
	const size = 3<<20 + 512*5
	content := make([]byte, size)
	rnd := rand.NewChaCha8([32]byte{7})
	for off := 0; off < size; off += 300 << 10 {
		rnd.Read(content[off:min(size, off+70<<10)])
	}
	for _, row := range []struct {
		vdi  images.VDI
		size int
		qemu bool
	}{
		{images.VDI{Block: 1 << 20}, size, true},
		{images.VDI{Block: 1 << 20, Zeros: true}, size, true},
		{images.VDI{Block: 1 << 20, Size: size - 3}, size, true},
		{images.VDI{Block: 1 << 20, Extra: 512}, size, false},
		{images.VDI{Block: 1 << 20, Extra: 100}, size, false},
		{images.VDI{Block: 64 << 10, Extra: 4096, Zeros: true}, size, false},
		{images.VDI{Block: 512}, size, false},
		{images.VDI{Block: 64 << 20}, size, false},
	} {
		t.Run(fmt.Sprintf("%+v", row.vdi), func(t *testing.T) {
			img := images.Made(t, "vdi", "made", row.vdi.Bytes(content), content[:row.size])
			holds(t, img, 1)
			if row.qemu {
				same(t, "QEMU", img.Oracle(t), img.Content)
			}
		})
	}
}
