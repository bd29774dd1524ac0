package images

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
)

// RandomVDI makes a vdi image with qemu-img, dynamic or static.
func RandomVDI(t testing.TB, seed uint64) Image {
	t.Helper()
	m := &maker{t: t, rnd: rand.New(rand.NewPCG(seed, 0xd1)), dir: t.TempDir()}
	return m.byQemu("vdi", "static="+m.pick("off", "off", "on"))
}

// VDI is how a vdi image is laid out that QEMU does not make, by VirtualBox's
// VDICore.h.
type VDI struct {
	Block int   // bytes
	Extra int   // bytes before each block
	Size  int64 // of the disk in bytes; 0: the content's
	Zeros bool  // what is zero is marked so, else as never written
}

// Bytes is the image. Blocks lie in it from the last to the first.
func (v VDI) Bytes(content []byte) []byte {
	if v.Size == 0 {
		v.Size = int64(len(content))
	}
	const table = 512
	blocks := (len(content) + v.Block - 1) / v.Block
	out := make([]byte, table+(blocks*4+511)/512*512)
	put := func(at int, n int) { binary.LittleEndian.PutUint32(out[at:], uint32(n)) }
	copy(out, "<<< Oracle VM VirtualBox Disk Image >>>\n")
	put(0x40, 0xbeda107f)
	put(0x44, 1<<16|1)
	put(0x48, 400)
	put(0x4c, 1) // dynamic
	put(0x154, table)
	put(0x158, len(out))
	put(0x168, 512)
	binary.LittleEndian.PutUint64(out[0x170:], uint64(v.Size))
	put(0x178, v.Block)
	put(0x17c, v.Extra)
	put(0x180, blocks)
	copy(out[0x188:], "sixteen bytes id")
	allocated := 0
	for block := blocks - 1; block >= 0; block-- {
		part := content[block*v.Block : min((block+1)*v.Block, len(content))]
		if len(bytes.Trim(part, "\x00")) == 0 {
			entry := 1<<32 - 1
			if v.Zeros {
				entry--
			}
			put(table+4*block, entry)
			continue
		}
		put(table+4*block, allocated)
		allocated++
		out = append(append(out, bytes.Repeat([]byte("x"), v.Extra)...), part...)
		out = append(out, make([]byte, v.Block-len(part))...)
	}
	put(0x184, allocated)
	return out
}

// HostileVDIs are vdi images that must be refused, by what is wrong with them. A
// name that begins with "table: " is wrong in what only its map tells.
func HostileVDIs() map[string][]byte {
	content := bytes.Repeat([]byte("longshore "), 1<<20/10+1)[:1<<20]
	out := map[string][]byte{}
	whole := VDI{Block: 64 << 10}.Bytes(content)
	patch := func(name string, at int, b ...byte) {
		img := bytes.Clone(whole)
		copy(img[at:], b)
		out[name] = img
	}
	u32 := func(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }
	u64 := func(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }
	for _, size := range []uint64{0, 1, 511, 1<<20 + 1, 1<<63 - 1, 1<<64 - 1, 1 << 50} {
		patch(fmt.Sprintf("a disk of %d bytes", size), 0x170, u64(size)...)
	}
	patch("version 0.1", 0x44, u32(1)...)
	patch("version 2.0", 0x44, u32(2<<16)...)
	patch("a header of 383 bytes", 0x48, u32(383)...)
	patch("a header of 2^32-1 bytes", 0x48, u32(1<<32-1)...)
	patch("type 0", 0x4c, u32(0)...)
	patch("undo", 0x4c, u32(3)...)
	patch("differencing", 0x4c, append(u32(4), whole[0x50:0x1a8]...)...)
	copy(out["differencing"][0x1a8:], "\x78\x56\x34\x12\x02\x01\x04\x03\x05\x06\x07\x08\x09\x0a\x0b\x0c")
	patch("dynamic with a parent", 0x1a8, 1)
	patch("dynamic with a parent's change", 0x1b8, 1)
	patch("type 5", 0x4c, u32(5)...)
	patch("sectors of 4096 bytes", 0x168, u32(4096)...)
	patch("blocks of 0 bytes", 0x178, u32(0)...)
	patch("blocks of 256 bytes", 0x178, u32(256)...)
	patch("blocks of 3 MiB", 0x178, u32(3<<20)...)
	patch("no blocks", 0x180, u32(0)...)
	patch("2^32-1 blocks", 0x180, u32(1<<32-1)...)
	patch("petabytes in blocks of 1 GiB", 0x170, append(u64(1<<61), append(u32(1<<30), append(u32(0), u32(1<<31)...)...)...)...)
	patch("more allocated than there are", 0x184, u32(17)...)
	patch("a map behind the file", 0x154, u32(1<<30)...)
	patch("a map over the header", 0x154, u32(0)...)
	patch("a map off the sectors", 0x154, u32(513)...)
	patch("blocks over the map", 0x158, u32(512)...)
	patch("blocks off the sectors", 0x158, u32(1025)...)
	out["cut in the header"] = whole[:0x1c7]
	out["cut in the map"] = whole[:512+7]
	patch("table: a block behind the file", 512, u32(16)...)
	patch("table: a block far behind", 512, u32(1<<32-3)...)
	patch("table: blocks behind the file", 0x158, u32(1<<32-512)...)
	patch("table: an extra of 2^32-1 bytes", 0x17c, u32(1<<32-1)...)
	out["table: cut in the last block"] = whole[:len(whole)-1]
	return out
}
