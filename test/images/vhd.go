package images

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unicode/utf16"
)

// qemuNames are QEMU's names of the formats that it calls otherwise than all others.
var qemuNames = map[string]string{"vhd": "vpc"}

// qemuName is QEMU's name of a format.
func qemuName(format string) string {
	if name, ok := qemuNames[format]; ok {
		return name
	}
	return format
}

// RandomVHD makes a vhd image with qemu-img: fixed or dynamic, its size rounded
// up to a geometry or not.
func RandomVHD(t testing.TB, seed uint64) Image {
	t.Helper()
	m := &maker{t: t, rnd: rand.New(rand.NewPCG(seed, 0x7d)), dir: t.TempDir()}
	return m.byQemu("vhd", "subformat="+m.pick("dynamic", "dynamic", "fixed")+",force_size="+m.pick("on", "off"))
}

// byQemu makes an image of another format with these options: converted from a
// raw one, or written to here and there.
func (m *maker) byQemu(format, options string) Image {
	path := filepath.Join(m.dir, "disk."+format)
	img := Image{Path: path, Format: format, plain: path, Variant: format + " " + options}
	name := qemuName(format)
	if m.rnd.IntN(2) == 0 {
		raw := m.raw()
		run(m.t, "qemu-img", "convert", "-f", "raw", "-O", name, "-o", options, raw.Path, path)
		img.Variant += " converted from " + raw.Variant
	} else {
		m.content = make([]byte, 512*(2048+m.rnd.Int64N(20<<10)))
		run(m.t, "qemu-img", "create", "-q", "-f", name, "-o", options, path, strconv.Itoa(len(m.content)))
		args := []string{"-f", name}
		for range 1 + m.rnd.IntN(12) {
			off, n := m.somewhere(512)
			m.fill(off, n)
			file := m.file(fmt.Sprintf("%d-%d", len(args), off), m.content[off:off+n])
			args = append(args, "-c", fmt.Sprintf("write -q -s %s %d %d", file, off, n))
		}
		run(m.t, "qemu-io", append(args, path)...)
	}
	img.Content = m.content
	if more := VirtualSize(m.t, path, name) - int64(len(m.content)); more > 0 {
		img.Content = append(img.Content, make([]byte, more)...)
	}
	return img
}

// VirtualSize is the disk's size in bytes as QEMU's driver of that name sees it.
func VirtualSize(t testing.TB, path, driver string) int64 {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "qemu-img", "info", "-f", driver, "--output=json", path).Output()
	if err != nil {
		t.Fatalf("qemu-img info %s: %v", path, err)
	}
	var info struct {
		Size int64 `json:"virtual-size"`
	}
	if err := json.Unmarshal(out, &info); err != nil {
		t.Fatal(err)
	}
	return info.Size
}

// Made writes an image that was not made by QEMU, and is content to a guest.
func Made(t testing.TB, format, variant string, b, content []byte) Image {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk."+format)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return Image{Path: path, Format: format, Variant: variant, Content: content, plain: path}
}

// VHD is how a vhd image is laid out that QEMU does not make, by Microsoft's
// "Virtual Hard Disk Image Format Specification".
type VHD struct {
	Creator  string         // "Creator Application", four bytes
	Geometry [3]int         // cylinders, heads, sectors per track; none: of the content's size
	Size     int64          // "Current Size" in bytes; 0: the content's
	Fixed    bool           // else dynamic
	Short    bool           // a last footer of 511 bytes, as before 2004
	Block    int            // bytes, of a dynamic disk
	Written  func(int) bool // which sectors the bitmaps call written; nil: all of a block that has any data
}

// Bytes is the image. Blocks lie in it from the last to the first, and in the
// place of sectors that were never written is something else than zeros.
func (v VHD) Bytes(content []byte) []byte {
	if v.Size == 0 {
		v.Size = int64(len(content))
	}
	kind := uint32(3)
	if v.Fixed {
		kind = 2
	}
	footer := v.footer(kind)
	end := footer
	if v.Short {
		end = footer[:511]
	}
	if v.Fixed {
		return append(append([]byte{}, content...), end...)
	}
	blocks := (len(content) + v.Block - 1) / v.Block
	bat := make([]byte, (blocks*4+511)/512*512)
	header := make([]byte, 1024)
	copy(header, "cxsparse")
	binary.BigEndian.PutUint64(header[8:], 1<<64-1)
	binary.BigEndian.PutUint64(header[16:], 1536) // the table
	binary.BigEndian.PutUint32(header[24:], 1<<16)
	binary.BigEndian.PutUint32(header[28:], uint32(blocks))
	binary.BigEndian.PutUint32(header[32:], uint32(v.Block))
	SumVHD(header, 36)
	out := append(append(append([]byte{}, footer...), header...), bat...)
	for i := range bat {
		out[1536+i] = 0xff
	}
	for block := blocks - 1; block >= 0; block-- {
		bitmap := make([]byte, ((v.Block/512+7)/8+511)/512*512)
		data := make([]byte, v.Block)
		used := false
		for sector := range v.Block / 512 {
			off := block*v.Block + sector*512
			if off >= len(content) {
				continue
			}
			part := content[off:min(off+512, len(content))]
			if v.Written != nil && !v.Written(off/512) {
				copy(data[sector*512:], strings.Repeat("not the disk's!!", 32))
				continue
			}
			if v.Written != nil || strings.Trim(string(part), "\x00") != "" {
				used = true
			}
			bitmap[sector/8] |= 0x80 >> (sector % 8)
			copy(data[sector*512:], part)
		}
		if used {
			binary.BigEndian.PutUint32(out[1536+4*block:], uint32(len(out)/512))
			out = append(append(out, bitmap...), data...)
		}
	}
	return append(out, end...)
}

func (v VHD) footer(kind uint32) []byte {
	b := make([]byte, 512)
	copy(b, "conectix")
	binary.BigEndian.PutUint32(b[8:], 2) // reserved, always set
	binary.BigEndian.PutUint32(b[12:], 1<<16)
	binary.BigEndian.PutUint64(b[16:], 512) // the dynamic disk header
	if kind == 2 {
		binary.BigEndian.PutUint64(b[16:], 1<<64-1)
	}
	copy(b[28:], v.Creator)
	binary.BigEndian.PutUint64(b[40:], uint64(v.Size))
	binary.BigEndian.PutUint64(b[48:], uint64(v.Size))
	binary.BigEndian.PutUint16(b[56:], uint16(v.Geometry[0]))
	b[58], b[59] = byte(v.Geometry[1]), byte(v.Geometry[2])
	binary.BigEndian.PutUint32(b[60:], kind)
	copy(b[68:], "sixteen bytes id")
	SumVHD(b, 64)
	return b
}

// SumVHD puts the checksum of a footer (at 64) or a dynamic disk header (at 36) in it.
func SumVHD(b []byte, at int) {
	var sum uint32
	clear(b[at : at+4])
	for _, c := range b {
		sum += uint32(c)
	}
	binary.BigEndian.PutUint32(b[at:], ^sum)
}

// HostileVHDs are vhd images that must be refused, by what is wrong with them. A
// name that begins with "table: " is wrong in what only its tables tell.
func HostileVHDs() map[string][]byte {
	content := make([]byte, 1<<20)
	for i := range content {
		content[i] = byte(i>>9) | 1
	}
	copy(content[510:], "\x55\xaa")
	dynamic := VHD{Creator: "win ", Block: 64 << 10}
	fixed := VHD{Creator: "win ", Fixed: true}
	out := map[string][]byte{}
	foot := func(name string, at int, b ...byte) { // both footers
		img := dynamic.Bytes(content)
		for _, f := range [][]byte{img[:512], img[len(img)-512:]} {
			copy(f[at:], b)
			SumVHD(f, 64)
		}
		out[name] = img
	}
	head := func(name string, at int, b ...byte) {
		img := dynamic.Bytes(content)
		copy(img[512+at:], b)
		SumVHD(img[512:1536], 36)
		out[name] = img
	}
	table := func(name string, entries ...uint32) {
		img := dynamic.Bytes(content)
		for i, e := range entries {
			binary.BigEndian.PutUint32(img[1536+4*i:], e)
		}
		out["table: "+name] = img
	}
	u32 := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	u64 := func(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }

	for _, size := range []uint64{0, 1, 511, 1<<63 - 1, 1<<64 - 512, 1 << 50} {
		foot(fmt.Sprintf("a disk of %d bytes", size), 48, u64(size)...)
	}
	foot("version 2", 12, u32(2<<16)...)
	foot("type 0", 60, u32(0)...)
	foot("type 7", 60, u32(7)...)
	foot("fixed at its beginning only", 60, u32(2)...)
	out["fixed at its beginning only"] = out["fixed at its beginning only"][:100<<10]
	foot("a header at 2^64-512", 16, u64(1<<64-512)...)
	foot("a header behind the file", 16, u64(1<<40)...)
	foot("a header across the end", 16, u64(uint64(len(dynamic.Bytes(content))-1000))...)
	foot("a header that is the footer", 16, u64(0)...)
	foot("a header in the data", 16, u64(64<<10)...)
	foot("differencing", 60, u32(4)...)
	foot("differencing without a header", 16, append(u64(1<<40), out["differencing"][24:64]...)...)
	parent := []byte{}
	for _, u := range utf16.Encode([]rune(`C:\disks\parent.vhd`)) {
		parent = binary.BigEndian.AppendUint16(parent, u)
	}
	named := out["differencing"]
	copy(named[512+64:], parent)
	SumVHD(named[512:1536], 36)
	head("dynamic with a parent locator", 576, []byte("W2ru\x00\x00\x02\x00\x00\x00\x00\x08")...)
	noSum := dynamic.Bytes(content)
	for _, f := range [][]byte{noSum[:512], noSum[len(noSum)-512:]} {
		f[64] ^= 1
	}
	out["a wrong checksum in both footers"] = noSum
	noSum = dynamic.Bytes(content)
	noSum[512+36] ^= 1
	out["a wrong checksum in the header"] = noSum
	two := dynamic.Bytes(content)
	binary.BigEndian.PutUint64(two[48:], 1<<19)
	SumVHD(two[:512], 64)
	out["footers that disagree"] = two
	head("header version 2", 24, u32(2<<16)...)
	head("a block of 0 bytes", 32, u32(0)...)
	head("a block of 256 bytes", 32, u32(256)...)
	head("a block of 3 MiB", 32, u32(3<<20)...)
	head("a table of no entries", 28, u32(0)...)
	head("a table too small for the disk", 28, u32(15)...)
	head("a table of 2^32-1 entries", 28, u32(1<<32-1)...)
	head("a table behind the file", 16, u64(1<<40)...)
	head("a table at 2^64-512", 16, u64(1<<64-512)...)
	head("a table off the sectors", 16, u64(1537)...)
	head("a table over the footer", 16, u64(0)...)
	head("a table over the header", 16, u64(1024)...)
	whole := fixed.Bytes(content)
	out["fixed, cut short before the footer"] = whole[512:]
	short := VHD{Creator: "win ", Fixed: true, Size: 2 << 20}
	out["fixed, larger than the file"] = short.Bytes(content)
	sum := fixed.Bytes(content)
	sum[len(sum)-1] ^= 1
	out["fixed, a wrong checksum"] = sum
	cut := dynamic.Bytes(content)
	out["cut in the first footer"] = cut[:300]
	out["cut in the header"] = cut[:1000]
	out["cut in the table"] = cut[:1536+7]
	chs := VHD{Creator: "vpc ", Fixed: true, Geometry: [3]int{1000, 16, 63}}
	out["fixed, a geometry larger than the file"] = chs.Bytes(content)

	table("a block behind the file", 1<<31)
	table("a block at the end of the numbers", 1<<32-2)
	table("a block over the footer", 0)
	table("a block over the header", 1)
	table("a block over the table", 3)
	table("a bitmap across the end", uint32(len(cut)/512))
	out["table: cut in the last block"] = dynamic.Bytes(content)[:len(cut)-512-1000]
	return out
}
