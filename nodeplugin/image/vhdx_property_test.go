package image_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/test/images"
)

// What the engine reads of a vhdx image that QEMU made is what QEMU reads.
func TestVHDXEqualsQemu(t *testing.T) {
	for seed := range uint64(24) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			img := images.RandomVHDX(t, seed)
			holds(t, img, seed)
			same(t, img.Variant+": QEMU", img.Oracle(t), img.Content)
		})
	}
}

// What QEMU does not write: sectors of 4096 bytes, blocks of all states, fixed
// disks as Hyper-V has them.
func TestVHDXOfOthers(t *testing.T) {
	const size = 7<<20 + 4096*3
	content := make([]byte, size)
	rnd := rand.NewChaCha8([32]byte{7})
	for _, off := range []int{0, 2<<20 + 100, 7 << 20} {
		rnd.Read(content[off:min(size, off+70<<10)])
	}
	states := func(block int) int {
		return []int{images.VHDXNotPresent, images.VHDXUndefined, images.VHDXZero, images.VHDXUnmapped}[block%4]
	}
	for name, v := range map[string]images.VHDX{
		"sectors of 512 bytes":     {Block: 1 << 20, Sector: 512},
		"sectors of 4096 bytes":    {Block: 1 << 20, Sector: 4096},
		"all states":               {Block: 1 << 20, Sector: 512, State: states},
		"fixed":                    {Block: 2 << 20, Sector: 512, LeaveAllocated: true},
		"blocks of 32 MiB":         {Block: 32 << 20, Sector: 4096},
		"fixed, of 4096 bytes too": {Block: 1 << 20, Sector: 4096, LeaveAllocated: true},
	} {
		t.Run(name, func(t *testing.T) {
			img := images.Made(t, "vhdx", name, v.Of(content).Bytes(), content)
			holds(t, img, 1)
			if v.Sector == 512 { // all that QEMU reads
				same(t, "QEMU", img.Oracle(t), img.Content)
			}
		})
	}
}

// Behind the entries of every chunk of blocks is one that is for no block: here
// blocks before and behind those, which QEMU finds there too (it reads only
// sectors of 512 bytes).
func TestVHDXChunks(t *testing.T) {
	for _, row := range []struct {
		sector, chunk int
	}{{512, 4096}, {4096, 32768}} {
		t.Run(fmt.Sprintf("sectors of %d bytes", row.sector), func(t *testing.T) {
			blocks := []int{0, 1, row.chunk - 1, row.chunk, row.chunk + 1, 2*row.chunk - 1, 2 * row.chunk, 2*row.chunk + 9}
			v := images.VHDX{Size: int64(2*row.chunk+10) << 20, Block: 1 << 20, Sector: row.sector, Blocks: map[int][]byte{}}
			for i, b := range blocks {
				v.Blocks[b] = bytes.Repeat([]byte{byte(i + 1)}, 1<<20)
			}
			img := images.Made(t, "vhdx", "made", v.Bytes(), nil)
			opened := open(t, img.Path)
			if info, err := opened.Measure(t.Context()); err != nil || info.VirtualSize != v.Size || info.AllocatedBytes != int64(len(blocks))<<20 {
				t.Errorf("measured %+v, %v; want %d bytes of %d", info, err, len(blocks)<<20, v.Size)
			}
			args := []string{"-r", "-f", "vhdx"}
			for i, b := range blocks {
				p := make([]byte, 1<<20)
				if _, err := opened.Disk.ReadAtContext(t.Context(), p, int64(b)<<20); err != nil {
					t.Fatal(err)
				}
				same(t, fmt.Sprintf("block %d", b), p, v.Blocks[b])
				args = append(args, "-c", fmt.Sprintf("read -q -P %d %dM 1M", i+1, b))
			}
			if row.sector != 512 {
				return
			}
			if out, err := exec.CommandContext(t.Context(), "qemu-io", append(args, img.Path)...).CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("QEMU finds something else: %v %s", err, out)
			}
		})
	}
}

// Updates that are only in the log are read as if they had reached their places;
// QEMU, which applies them to the file first, reads the same. It can't where an
// entry has more than one sector of descriptors: it reads all of those into the
// place of the first.
func TestVHDXLogIsReplayed(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(seed, 77))
			img := images.RandomVHDX(t, seed)
			b, err := os.ReadFile(img.Path)
			if err != nil {
				t.Fatal(err)
			}
			dirty(t, rnd, b, seed%2 == 0)
			img = images.Made(t, "vhdx", img.Variant+" with a log", b, img.Content)
			opened := holds(t, img, seed)
			if w := strings.Join(opened.Info.Warnings, "\n"); !strings.Contains(w, "log") {
				t.Errorf("warnings are %q", w)
			}
			if seed%2 == 0 {
				return
			}
			if out, err := exec.CommandContext(t.Context(), "qemu-img", "check", "-q", "-r", "all", "-f", "vhdx", img.Path).CombinedOutput(); err != nil {
				t.Fatalf("QEMU can't replay the log: %v %s", err, out)
			}
			same(t, img.Variant+": QEMU", img.Oracle(t), img.Content)
		})
	}
}

// dirty takes pages out of an image's tables, puts others in their places and
// what they were into its log: as several updates of which the last ones count,
// anywhere in the ring, between older sequences and with a torn entry behind. An
// entry of many has more than one sector of descriptors.
func dirty(t *testing.T, rnd *rand.Rand, b []byte, many bool) {
	t.Helper()
	regions := b[images.VHDXRegions1:]
	var pages []int64
	for _, e := range [][]byte{regions[16:48], regions[48:80]} {
		at := int64(binary.LittleEndian.Uint64(e[16:]))
		pages = append(pages, at, at+64<<10) // of the BAT the second is beyond what is used
	}
	noise := func() []byte {
		p := make([]byte, 4096)
		for i := range p {
			p[i] = byte(rnd.Uint32())
		}
		return p
	}
	size := int64(len(b))
	entry := func(sequence uint64, tail int, updates ...images.VHDXUpdate) images.VHDXEntry {
		return images.VHDXEntry{Sequence: sequence, Tail: tail, Updates: updates, Flushed: size, Last: size}
	}
	var first, last []images.VHDXUpdate
	for _, at := range pages {
		was := append([]byte{}, b[at:at+4096]...)
		first = append(first, images.VHDXUpdate{Offset: at, Data: noise()})
		if len(bytes.Trim(was, "\x00")) == 0 {
			last = append(last, images.VHDXUpdate{Offset: at, Zeros: 4096})
		} else {
			last = append(last, images.VHDXUpdate{Offset: at, Data: was})
		}
		copy(b[at:], noise())
	}
	// Updates of a page of the metadata region that nothing refers to.
	more := 20
	if many {
		more = 200
	}
	for range more {
		first = append(first, images.VHDXUpdate{Offset: pages[1] + 512<<10 - 4096*rnd.Int64N(2), Zeros: 4096})
	}
	header := b[images.VHDXHeader1:]
	ring := int(binary.LittleEndian.Uint32(header[68:])) / 4096
	start := ring - 1 - rnd.IntN(12) // around the end of the ring
	if rnd.IntN(2) == 0 {
		start = 40 + rnd.IntN(ring-80)
		// An older sequence, which says nonsense.
		images.LogVHDX(b, 0, entry(3, 0, first[:4]...), entry(4, 0, first[:2]...))
	}
	next := images.LogVHDX(b, start, entry(1<<33, start, first[:4]...), entry(1<<33+1, start, first...), entry(1<<33+2, start, last...))
	if rnd.IntN(2) == 0 {
		torn := entry(1<<33+3, start, first[:4]...)
		torn.Torn = true
		images.LogVHDX(b, next, torn)
	}
}
