package images

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"
)

// RandomVHDX makes a vhdx image with qemu-img: dynamic or fixed, with blocks of
// these sizes, what is zero as state zero or as not present.
func RandomVHDX(t testing.TB, seed uint64) Image {
	t.Helper()
	m := &maker{t: t, rnd: rand.New(rand.NewPCG(seed, 0x7d8)), dir: t.TempDir()}
	return m.byQemu("vhdx", "subformat="+m.pick("dynamic", "dynamic", "fixed")+",block_state_zero="+m.pick("on", "off")+
		",block_size="+m.pick("1M", "2M", "8M", "0")+",log_size="+m.pick("1M", "3M"))
}

// Where VHDX.Bytes puts things in the file.
const (
	VHDXHeader1  = 64 << 10
	VHDXHeader2  = 128 << 10
	VHDXRegions1 = 192 << 10
	VHDXRegions2 = 256 << 10
	VHDXLog      = 1 << 20 // 1 MiB
	VHDXMetadata = 2 << 20 // 1 MiB
	VHDXTable    = 3 << 20 // as much as it needs
)

// States of a payload block.
const (
	VHDXNotPresent   = 0
	VHDXUndefined    = 1
	VHDXZero         = 2
	VHDXUnmapped     = 3
	VHDXFullyPresent = 6
)

// VHDX is how a vhdx image is laid out that QEMU does not make, by [MS-VHDX].
type VHDX struct {
	Size   int64
	Block  int // bytes
	Sector int // bytes, logical
	// Blocks that are fully present.
	Blocks map[int][]byte
	// State of the others; nil: not present.
	State func(block int) int
	// LeaveAllocated is the flag of fixed disks.
	LeaveAllocated bool
}

// Of splits content into blocks, of which those that are zero are left out.
func (v VHDX) Of(content []byte) VHDX {
	v.Size, v.Blocks = int64(len(content)), map[int][]byte{}
	for i := 0; i*v.Block < len(content); i++ {
		part := content[i*v.Block : min((i+1)*v.Block, len(content))]
		if v.LeaveAllocated || len(bytes.Trim(part, "\x00")) > 0 {
			v.Blocks[i] = part
		}
	}
	return v
}

// Bytes is the image. Blocks lie in it from the last to the first.
func (v VHDX) Bytes() []byte {
	le := binary.LittleEndian
	ratio := 1 << 23 * v.Sector / v.Block
	blocks := int((v.Size + int64(v.Block) - 1) / int64(v.Block))
	index := func(block int) int { return VHDXTable + 8*(block+block/ratio) }
	const mib = 1 << 20
	table := (index(blocks) - VHDXTable + 8 + mib - 1) / mib * mib
	out := make([]byte, VHDXTable+table)

	copy(out, "vhdxfile")
	for i, at := range []int{VHDXHeader1, VHDXHeader2} {
		h := out[at:]
		copy(h, "head")
		le.PutUint64(h[8:], uint64(7+i))
		copy(h[16:], "file write guid.data write guid.")
		le.PutUint16(h[66:], 1)
		le.PutUint32(h[68:], mib)
		le.PutUint64(h[72:], VHDXLog)
	}
	for _, at := range []int{VHDXRegions1, VHDXRegions2} {
		r := out[at:]
		copy(r, "regi")
		le.PutUint32(r[8:], 2)
		copy(r[16:], GUID("2dc27766-f623-4200-9d64-115e9bfd4a08"))
		le.PutUint64(r[32:], VHDXTable)
		le.PutUint32(r[40:], uint32(table))
		le.PutUint32(r[44:], 1)
		copy(r[48:], GUID("8b7ca206-4790-4b9a-b8fe-575f050f886e"))
		le.PutUint64(r[64:], VHDXMetadata)
		le.PutUint32(r[72:], mib)
		le.PutUint32(r[76:], 1)
	}
	flags := uint32(0)
	if v.LeaveAllocated {
		flags = 1
	}
	m := out[VHDXMetadata:]
	copy(m, "metadata")
	le.PutUint16(m[10:], 5)
	at := 64 << 10
	for i, item := range []struct {
		name  string
		b     []byte
		flags uint32
	}{
		{"caa16737-fa36-4d43-b3b6-33f0aa44e76b", le.AppendUint32(le.AppendUint32(nil, uint32(v.Block)), flags), 4},
		{"2fa54224-cd1b-4876-b211-5dbed83bf4b8", le.AppendUint64(nil, uint64(v.Size)), 6},
		{"beca12ab-b2e6-4523-93ef-c309e000c746", []byte("sixteen bytes id"), 6},
		{"8141bf1d-a96f-4709-ba47-f233a8faab5f", le.AppendUint32(nil, uint32(v.Sector)), 6},
		{"cda348c7-445d-4471-9cc9-e9885251c556", le.AppendUint32(nil, 4096), 6},
	} {
		e := m[32+32*i:]
		copy(e, GUID(item.name))
		le.PutUint32(e[16:], uint32(at))
		le.PutUint32(e[20:], uint32(len(item.b)))
		le.PutUint32(e[24:], item.flags)
		at += copy(m[at:], item.b)
	}

	if v.State != nil {
		for block := range blocks {
			le.PutUint64(out[index(block):], uint64(v.State(block)))
		}
	}
	order := slices.Sorted(maps.Keys(v.Blocks))
	slices.Reverse(order)
	for _, block := range order {
		le.PutUint64(out[index(block):], uint64(len(out))|VHDXFullyPresent)
		out = append(append(out, v.Blocks[block]...), make([]byte, v.Block-len(v.Blocks[block]))...)
	}
	SumVHDX(out)
	return out
}

// GUID is the bytes of an identifier.
func GUID(s string) []byte {
	var a uint32
	var b, c uint16
	var rest []byte
	if _, err := fmt.Sscanf(strings.ReplaceAll(s, "-", ""), "%8x%4x%4x%16x", &a, &b, &c, &rest); err != nil {
		panic(err)
	}
	out := binary.LittleEndian.AppendUint32(nil, a)
	return append(binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(out, b), c), rest...)
}

// SumVHDX makes the checksums of both headers and region tables right.
func SumVHDX(img []byte) {
	for at, length := range map[int]int{VHDXHeader1: 4 << 10, VHDXHeader2: 4 << 10, VHDXRegions1: 64 << 10, VHDXRegions2: 64 << 10} {
		if at+length <= len(img) {
			crc32c(img[at : at+length])
		}
	}
}

// SumVHDXLog makes the checksum of an entry at the log's beginning right.
func SumVHDXLog(img []byte) {
	e := img[VHDXLog:][:1<<20]
	if length := int(binary.LittleEndian.Uint32(e[8:])); string(e[:4]) == "loge" && length >= 64 && length <= len(e) {
		crc32c(e[:length])
	}
}

// crc32c puts the CRC-32C of b in its second word.
func crc32c(b []byte) {
	clear(b[4:8])
	binary.LittleEndian.PutUint32(b[4:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// VHDXUpdate is what a log entry does to the file: 4 KiB of data at Offset, or
// so many bytes of zeros.
type VHDXUpdate struct {
	Offset int64
	Data   []byte
	Zeros  int64
}

// VHDXEntry is an entry of the log.
type VHDXEntry struct {
	Sequence uint64
	Updates  []VHDXUpdate
	// Tail is the sector of the log where the sequence begins.
	Tail int
	// Flushed and Last are the lengths of the file that it was written for.
	Flushed, Last int64
	// Torn: its last bytes were not written.
	Torn bool
}

// VHDXLogGUID names the log that LogVHDX writes.
const VHDXLogGUID = "longshore's log."

// LogVHDX puts entries into the log of an image, one behind the other from that
// sector on and around its end, and makes the log count. It returns the sector
// behind them.
func LogVHDX(img []byte, sector int, entries ...VHDXEntry) int {
	le := binary.LittleEndian
	current, other := img[VHDXHeader1:][:4<<10], img[VHDXHeader2:][:4<<10]
	if le.Uint64(current[8:]) < le.Uint64(other[8:]) {
		current, other = other, current
	}
	if string(current[48:64]) != VHDXLogGUID { // an update of the headers: the older one is written
		sequence := le.Uint64(current[8:])
		copy(other, current)
		le.PutUint64(other[8:], sequence+1)
		copy(other[48:], VHDXLogGUID)
		crc32c(other)
	}
	ring := img[le.Uint64(current[72:]):][:le.Uint32(current[68:])]
	for _, e := range entries {
		b := e.bytes()
		for ; len(b) > 0; b = b[4096:] {
			copy(ring[sector%(len(ring)/4096)*4096:], b[:4096])
			sector++
		}
	}
	return sector % (len(ring) / 4096)
}

func (e VHDXEntry) bytes() []byte {
	le := binary.LittleEndian
	head := make([]byte, (64+32*len(e.Updates)+4095)/4096*4096)
	copy(head, "loge")
	le.PutUint32(head[12:], uint32(e.Tail*4096))
	le.PutUint64(head[16:], e.Sequence)
	le.PutUint32(head[24:], uint32(len(e.Updates)))
	copy(head[32:], VHDXLogGUID)
	le.PutUint64(head[48:], uint64(e.Flushed))
	le.PutUint64(head[56:], uint64(e.Last))
	var data []byte
	for i, u := range e.Updates {
		d := head[64+32*i:]
		le.PutUint64(d[16:], uint64(u.Offset))
		le.PutUint64(d[24:], e.Sequence)
		if u.Data == nil {
			copy(d, "zero")
			le.PutUint64(d[8:], uint64(u.Zeros))
			continue
		}
		copy(d, "desc")
		copy(d[4:8], u.Data[4092:])
		copy(d[8:16], u.Data[:8])
		s := bytes.Clone(u.Data)
		copy(s, "data")
		le.PutUint32(s[4:], uint32(e.Sequence>>32))
		le.PutUint32(s[4092:], uint32(e.Sequence))
		data = append(data, s...)
	}
	out := append(head, data...)
	le.PutUint32(out[8:], uint32(len(out)))
	crc32c(out)
	if e.Torn {
		out[len(out)-100] ^= 0xff
	}
	return out
}

// HostileVHDXs are vhdx images that must be refused, by what is wrong with them;
// they are made when asked for. A name that begins with "table: " is wrong in
// what only the block allocation table tells.
func HostileVHDXs() map[string]func() []byte {
	le := binary.LittleEndian
	u16 := func(v uint16) []byte { return le.AppendUint16(nil, v) }
	u32 := func(v uint32) []byte { return le.AppendUint32(nil, v) }
	u64 := func(v uint64) []byte { return le.AppendUint64(nil, v) }
	whole := func() []byte {
		return VHDX{Block: 1 << 20, Sector: 512}.Of(bytes.Repeat([]byte("longshore "), 2<<20/10+1)[:2<<20]).Bytes()
	}
	out := map[string]func() []byte{}
	patch := func(name string, b []byte, at ...int) {
		out[name] = func() []byte {
			img := whole()
			for _, at := range at {
				copy(img[at:], b)
			}
			SumVHDX(img)
			return img
		}
	}
	spoil := func(name string, at ...int) {
		out[name] = func() []byte {
			img := whole()
			for _, at := range at {
				img[at] ^= 1
			}
			return img
		}
	}
	cut := func(name string, length int) { out[name] = func() []byte { return whole()[:length] } }
	header := func(name string, at int, b []byte) { patch(name, b, VHDXHeader1+at, VHDXHeader2+at) }
	region := func(name string, at int, b []byte) { patch(name, b, VHDXRegions1+at, VHDXRegions2+at) }
	metadata := func(name string, at int, b []byte) { patch(name, b, VHDXMetadata+at) }

	spoil("wrong checksums in both headers", VHDXHeader1+100, VHDXHeader2+100)
	patch("headers that differ", append(u64(8), "other guid"...), VHDXHeader1+8)
	header("version 2", 66, u16(2))
	header("a log behind the file", 72, u64(1<<40))
	header("a log at 2^64-1048576", 72, u64(1<<64-1<<20))
	header("a log of 2^32-1048576 bytes", 68, u32(1<<32-1<<20))
	header("a log over the headers", 72, u64(0))
	header("a log off the megabytes", 72, u64(1<<20+4096))
	header("a log over the metadata", 72, u64(2<<20))
	header("a log over the table", 72, u64(3<<20))
	cut("cut in the first header", 64<<10+50)
	cut("cut before the region tables", 192<<10)
	cut("cut behind the metadata", 3<<20)

	spoil("wrong checksums in both region tables", VHDXRegions1+100, VHDXRegions2+100)
	region("2048 regions", 8, u32(2048))
	region("2^32-1 regions", 8, u32(1<<32-1))
	region("no region", 8, u32(0))
	region("no metadata", 8, u32(1))
	region("a region that is needed and unknown", 16, []byte("unknown region.."))
	region("the same region twice", 48, GUID("2dc27766-f623-4200-9d64-115e9bfd4a08"))
	region("a table at 0", 32, u64(0))
	region("a table at 2^64-1048576", 32, u64(1<<64-1<<20))
	region("a table behind the file", 32, u64(1<<40))
	region("a table of 2^32-1048576 bytes", 40, u32(1<<32-1<<20))
	region("a table of no bytes", 40, u32(0))
	region("a table off the megabytes", 32, u64(3<<20+512))
	region("a table over the metadata", 32, u64(2<<20))
	region("metadata over the log", 64, u64(1<<20))
	region("metadata in the data", 64, u64(4<<20))

	metadata("2048 items", 10, u16(2048))
	metadata("no item", 10, u16(0))
	metadata("no sector size", 10, u16(3))
	metadata("an item that is needed and unknown", 32+2*32, []byte("unknown item...."))
	metadata("the same item twice", 32+2*32, GUID("2fa54224-cd1b-4876-b211-5dbed83bf4b8"))
	metadata("an item over the table", 32+16, u32(32))
	metadata("an item behind the region", 32+16, u32(1<<20-4))
	metadata("an item of 2^32-1 bytes", 32+20, u32(1<<32-1))
	metadata("an item at 2^32-1", 32+16, u32(1<<32-1))
	metadata("an item that is too short", 32+20, u32(7))
	const parameters, size, sector = 64 << 10, 64<<10 + 8, 64<<10 + 32
	metadata("a block of 0 bytes", parameters, u32(0))
	metadata("a block of 512 KiB", parameters, u32(512<<10))
	metadata("a block of 512 MiB", parameters, u32(512<<20))
	metadata("a block of 3 MiB", parameters, u32(3<<20))
	for _, n := range []uint64{0, 1, 511, 1<<63 - 1, 1<<64 - 512, 64<<40 + 512} {
		metadata(fmt.Sprintf("a disk of %d bytes", n), size, u64(n))
	}
	metadata("a disk too large for the table", size, u64(64<<40))
	metadata("a sector of 0 bytes", sector, u32(0))
	metadata("a sector of 1024 bytes", sector, u32(1024))
	metadata("has a parent", parameters+4, u32(2))
	out["has a parent locator"] = func() []byte {
		img := whole()
		m := img[VHDXMetadata:]
		e := m[32+5*32:]
		le.PutUint16(m[10:], 6)
		copy(e, GUID("a8d35f2d-b30b-454d-abf7-d3d84834ab0c"))
		le.PutUint32(e[16:], 128<<10)
		le.PutUint32(e[24:], 4)
		locator := make([]byte, 20+12)
		copy(locator, GUID("b04aefb7-d19e-4a81-b789-25b8e9445913"))
		le.PutUint16(locator[18:], 1)
		for i, s := range []string{"absolute_win32_path", `\\?\C:\disks\parent.vhdx`} {
			le.PutUint32(locator[20+4*i:], uint32(len(locator)))
			units := utf16.Encode([]rune(s))
			le.PutUint16(locator[28+2*i:], uint16(2*len(units)))
			for _, u := range units {
				locator = le.AppendUint16(locator, u)
			}
		}
		le.PutUint32(e[20:], uint32(len(locator)))
		copy(m[128<<10:], locator)
		return img
	}
	out["a parent locator that points out of itself"] = func() []byte {
		img := out["has a parent locator"]()
		copy(img[VHDXMetadata+128<<10+18:], bytes.Repeat([]byte{0xff}, 14))
		return img
	}

	logged := func(name string, spoil func(img []byte), entries ...VHDXEntry) {
		out[name] = func() []byte {
			img := whole()
			LogVHDX(img, 0, entries...)
			if spoil != nil {
				spoil(img)
				SumVHDX(img)
			}
			return img
		}
	}
	good := VHDXEntry{Sequence: 5, Updates: []VHDXUpdate{{Offset: VHDXTable, Zeros: 4096}}, Flushed: 4 << 20, Last: 6 << 20}
	with := func(change func(e *VHDXEntry)) VHDXEntry {
		e := good
		change(&e)
		return e
	}
	logged("a log without an entry", nil)
	logged("a log of another version", func(img []byte) { copy(img[VHDXHeader1+64:], u16(1)) }, good)
	out["a log of 9 MiB"] = func() []byte {
		img := append(whole(), make([]byte, 16<<20)...)
		LogVHDX(img, 0, good)
		copy(img[VHDXHeader1+68:], append(u32(9<<20), u64(6<<20)...))
		SumVHDX(img)
		return img
	}
	logged("a log that is torn", nil, with(func(e *VHDXEntry) { e.Torn = true }))
	logged("a log without its beginning", nil, with(func(e *VHDXEntry) { e.Tail = 9 }))
	logged("a log of a longer file", nil, with(func(e *VHDXEntry) { e.Flushed = 7 << 20 }))
	logged("a log that wants petabytes", nil, with(func(e *VHDXEntry) { e.Last = 1 << 60 }))
	logged("an update behind the file", nil, with(func(e *VHDXEntry) { e.Updates = []VHDXUpdate{{Offset: 1 << 40, Data: make([]byte, 4096)}} }))
	logged("zeros behind the file", nil, with(func(e *VHDXEntry) { e.Updates = []VHDXUpdate{{Offset: 1 << 20, Zeros: 1 << 62}} }))
	logged("zeros around the numbers", nil, with(func(e *VHDXEntry) { e.Updates = []VHDXUpdate{{Offset: 1 << 20, Zeros: -4096}} }))
	logged("a log that wipes the region tables", nil, with(func(e *VHDXEntry) { e.Updates = []VHDXUpdate{{Offset: VHDXRegions1, Zeros: 128 << 10}} }))
	logged("a log that wipes the metadata", nil, with(func(e *VHDXEntry) { e.Updates = []VHDXUpdate{{Offset: VHDXMetadata, Zeros: 4096}} }))
	out["a log of entries in each other"] = func() []byte { // each valid by itself, and summed again with all before it
		img := whole()
		LogVHDX(img, 0)
		ring := img[VHDXLog:][:1<<20]
		for at := len(ring) - 4096; at >= 0; at -= 4096 {
			// Only the last one has its beginning, and might do.
			tail := 300
			if at == len(ring)-4096 {
				tail = at / 4096
			}
			copy(ring[at:], with(func(e *VHDXEntry) { e.Updates, e.Tail = nil, tail }).bytes())
			le.PutUint32(ring[at+8:], uint32(len(ring)-at))
			crc32c(ring[at:])
		}
		return img
	}

	entry := func(name string, v uint64) { patch("table: "+name, u64(v), VHDXTable) }
	entry("a block behind the file", 1<<40|VHDXFullyPresent)
	entry("a block at the end of the numbers", 1<<64-1<<20|VHDXFullyPresent)
	entry("a block across the end", 6<<20|VHDXFullyPresent)
	entry("a block over the headers", 0|VHDXFullyPresent)
	entry("a block over the log", 1<<20|VHDXFullyPresent)
	entry("a block over the metadata", 2<<20|VHDXFullyPresent)
	entry("a block over the table", 3<<20|VHDXFullyPresent)
	entry("a block that is there in part", 4<<20|7)
	entry("a block of state 4", 4)
	entry("a block of state 5", 5)
	cut("table: cut in the last block", 6<<20-1)
	return out
}
