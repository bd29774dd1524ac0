package images

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
)

// RandomVMDK makes a vmdk image in one file with qemu-img: sparse, with marked
// zeros or not, or stream-optimized.
func RandomVMDK(t testing.TB, seed uint64) Image {
	t.Helper()
	m := &maker{t: t, rnd: rand.New(rand.NewPCG(seed, 0x3d)), dir: t.TempDir()}
	if m.rnd.IntN(2) == 0 {
		return m.byQemu("vmdk", "subformat=monolithicSparse,zeroed_grain="+m.pick("on", "off")+",hwversion="+m.pick("4", "10"))
	}
	// QEMU writes a compressed grain only once.
	raw := m.raw()
	path := filepath.Join(m.dir, "disk.vmdk")
	run(t, "qemu-img", "convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized", raw.Path, path)
	content := append(m.content, make([]byte, VirtualSize(t, path, "vmdk")-int64(len(m.content)))...)
	return Image{Path: path, Format: "vmdk", Variant: "vmdk subformat=streamOptimized of " + raw.Variant, Content: content, plain: path}
}

// VMDK is how a sparse extent is laid out that QEMU does not make, by VMware's
// "Virtual Disk Format 5.0". Lengths are in sectors of 512 bytes.
type VMDK struct {
	Version    int // 0: 1
	Grain      int // 0: 128
	Compressed bool
	Footer     bool // the directory behind the data, told by a footer: as vSphere exports disks
	Redundant  bool // with a copy of all tables
	Zeroed     bool // what is zero is marked so, else as never written
	Backwards  bool // grains from the last to the first, with gaps
	Unclean    bool
	Descriptor string // "": of one extent; "-": none
	Size       uint64 // of the disk by the header; 0: the content's
}

// Descriptor is a descriptor with these lines of extents.
func Descriptor(createType string, extents ...string) string {
	return "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"" + createType + "\"\n\n# Extent description\n" +
		strings.Join(extents, "\n") + "\n\n# The Disk Data Base\n#DDB\n\nddb.adapterType = \"lsilogic\"\nddb.geometry.cylinders = \"20\"\n"
}

// VMDKParts are where the pieces of an image lie in it, in bytes.
type VMDKParts struct {
	Directory, Redundant, Footer int
	Tables                       []int // 0: none
	Grains                       []int // 0: none
}

const vmdkDescriptorSectors = 20

// Bytes is the image.
func (v VMDK) Bytes(content []byte) []byte {
	b, _ := v.Build(content)
	return b
}

// Build is the image, and where its pieces lie.
func (v VMDK) Build(content []byte) ([]byte, VMDKParts) {
	if v.Version == 0 {
		v.Version = 1
	}
	if v.Grain == 0 {
		v.Grain = 128
	}
	grain := v.Grain * 512
	grains := (len(content) + grain - 1) / grain
	tables := (grains + 511) / 512
	parts := VMDKParts{Tables: make([]int, tables), Grains: make([]int, grains)}
	le := binary.LittleEndian
	if v.Size == 0 {
		v.Size = uint64(len(content)+511) / 512
	}
	createType := "monolithicSparse"
	if v.Compressed {
		createType = "streamOptimized"
	}
	switch v.Descriptor {
	case "":
		v.Descriptor = Descriptor(createType, fmt.Sprintf("RW %d SPARSE \"disk.vmdk\"", (len(content)+511)/512))
	case "-":
		v.Descriptor = ""
	}
	out := make([]byte, (1+vmdkDescriptorSectors)*512)
	copy(out[512:], v.Descriptor)
	pad := func(to int) {
		if rest := len(out) % to; rest > 0 {
			out = append(out, make([]byte, to-rest)...)
		}
	}
	add := func(n int) int { // n zero bytes from a sector on
		pad(512)
		at := len(out)
		out = append(out, make([]byte, n)...)
		return at
	}
	marker := func(sectors uint64, kind uint32) {
		at := add(512)
		le.PutUint64(out[at:], sectors)
		le.PutUint32(out[at+12:], kind)
	}
	gte := make([]uint32, tables*512)
	empty := func(table int) bool {
		for _, e := range gte[table*512 : (table+1)*512] {
			if e != 0 {
				return false
			}
		}
		return true
	}
	table := func(at, n int) {
		for i, e := range gte[n*512 : (n+1)*512] {
			le.PutUint32(out[at+4*i:], e)
		}
	}
	// place puts the directory and room for its tables there.
	place := func() (directory int, at []int) {
		directory = add(4 * tables)
		for i := range tables {
			at = append(at, add(2048))
			le.PutUint32(out[directory+4*i:], uint32(at[i]/512))
		}
		return directory, at
	}
	var copies []int
	if !v.Footer {
		if v.Redundant {
			parts.Redundant, copies = place()
		}
		parts.Directory, parts.Tables = place()
	}
	pad(grain)
	overhead := len(out) / 512
	put := func(i int) {
		part := content[i*grain : min((i+1)*grain, len(content))]
		if len(bytes.Trim(part, "\x00")) == 0 {
			if v.Zeroed {
				gte[i] = 1
			}
			return
		}
		whole := append(append([]byte{}, part...), make([]byte, grain-len(part))...)
		if v.Compressed {
			whole = VMDKGrain(i*v.Grain, whole)
		}
		if v.Backwards {
			add(512 * (i % 3))
		}
		parts.Grains[i] = add(len(whole))
		copy(out[parts.Grains[i]:], whole)
		pad(512)
		gte[i] = uint32(parts.Grains[i] / 512)
	}
	if v.Footer {
		for i := range grains {
			put(i)
			if last := i == grains-1; (i%512 == 511 || last) && !empty(i/512) {
				marker(4, 1)
				parts.Tables[i/512] = add(2048)
				table(parts.Tables[i/512], i/512)
			}
		}
		marker(uint64(4*tables+511)/512, 2)
		parts.Directory = add(4 * tables)
		for i, at := range parts.Tables {
			le.PutUint32(out[parts.Directory+4*i:], uint32(at/512))
		}
	} else {
		for i := range grains {
			if v.Backwards {
				i = grains - 1 - i
			}
			put(i)
		}
		for i, at := range parts.Tables {
			table(at, i)
			if v.Redundant {
				table(copies[i], i)
			}
		}
	}
	header := make([]byte, 512)
	copy(header, "KDMV")
	flags := uint32(1)
	le.PutUint32(header[4:], uint32(v.Version))
	if v.Redundant {
		flags |= 2
		le.PutUint64(header[48:], uint64(parts.Redundant/512))
	}
	if v.Zeroed {
		flags |= 4
	}
	if v.Compressed {
		flags |= 3 << 16
		header[77] = 1
	}
	le.PutUint32(header[8:], flags)
	le.PutUint64(header[12:], v.Size)
	le.PutUint64(header[20:], uint64(v.Grain))
	if v.Descriptor != "" {
		le.PutUint64(header[28:], 1)
		le.PutUint64(header[36:], vmdkDescriptorSectors)
	}
	le.PutUint32(header[44:], 512)
	le.PutUint64(header[56:], uint64(parts.Directory/512))
	le.PutUint64(header[64:], uint64(overhead))
	copy(header[73:], "\n \r\n")
	if v.Unclean {
		header[72] = 1
	}
	copy(out, header)
	pad(512)
	if v.Footer {
		le.PutUint64(out[56:], 1<<64-1)
		marker(1, 3)
		parts.Footer = add(512)
		copy(out[parts.Footer:], header)
		marker(0, 0)
	}
	return out, parts
}

// VMDKGrain is a grain's marker and its compressed data.
func VMDKGrain(sector int, data []byte) []byte {
	var packed bytes.Buffer
	w := zlib.NewWriter(&packed)
	w.Write(data) // to memory
	w.Close()
	b := binary.LittleEndian.AppendUint64(nil, uint64(sector))
	return append(binary.LittleEndian.AppendUint32(b, uint32(packed.Len())), packed.Bytes()...)
}

// HostileVMDKs are vmdk images that must be refused, by what is wrong with them.
// A name that begins with "table: " is wrong in what only its tables tell.
func HostileVMDKs() map[string][]byte {
	content := make([]byte, 1<<20)
	for i := range content {
		content[i] = byte(i>>9) | 1
	}
	copy(content[510:], "\x55\xaa")
	le := binary.LittleEndian
	sparse, packed := VMDK{Redundant: true}, VMDK{Compressed: true, Version: 3}
	stream := VMDK{Compressed: true, Footer: true, Version: 3}
	out := map[string][]byte{}
	head := func(name string, of VMDK, at int, b ...byte) {
		img := of.Bytes(content)
		copy(img[at:], b)
		out[name] = img
	}
	text := func(name, descriptor string) { out[name] = VMDK{Descriptor: descriptor}.Bytes(content) }
	replace := func(name, old, by string) {
		text(name, strings.Replace(Descriptor("monolithicSparse", `RW 2048 SPARSE "disk.vmdk"`), old, by, 1))
	}
	u32 := func(v uint32) []byte { return le.AppendUint32(nil, v) }
	u64 := func(v uint64) []byte { return le.AppendUint64(nil, v) }

	out["COWD"] = append([]byte("COWD\x01\x00\x00\x00\x03\x00\x00\x00"), make([]byte, 4096)...)
	out["SESPARSE"] = append([]byte("\xbe\xba\xfe\xca\x00\x00\x00\x00"), make([]byte, 4096)...)
	out["cut in the header"] = sparse.Bytes(content)[:511]
	out["cut in the descriptor"] = sparse.Bytes(content)[:2000]
	head("version 0", sparse, 4, u32(0)...)
	head("version 4", sparse, 4, u32(4)...)
	head("unknown flags", sparse, 8, u32(1|1<<18)...)
	head("line ends of text", sparse, 73, []byte("\n \n\n")...)
	head("compression 2", packed, 77, 2, 0)
	head("compression without the flag", sparse, 77, 1, 0)
	head("the flag without compression", packed, 77, 0, 0)
	head("no markers", packed, 8, u32(1|1<<16)...)
	for _, size := range []uint64{0, 1<<63 - 1, 1<<64 - 1, 1 << 54} {
		head(fmt.Sprintf("a disk of %d sectors", size), sparse, 12, u64(size)...)
	}
	head("a disk of 2^53 sectors", sparse, 12, u64(1<<53)...)
	head("a disk larger than its directory's room", packed, 12, u64(1<<33)...)
	head("a disk smaller than its extent", sparse, 12, u64(1)...)
	for _, grain := range []uint64{0, 1, 4, 96, 8192, 1 << 63, 1<<64 - 1} {
		head(fmt.Sprintf("a grain of %d sectors", grain), sparse, 20, u64(grain)...)
	}
	for _, entries := range []uint32{0, 1, 511, 1024, 1<<32 - 1} {
		head(fmt.Sprintf("%d entries in a table", entries), sparse, 44, u32(entries)...)
	}
	head("no descriptor", sparse, 28, u64(0)...)
	head("a descriptor behind the file", sparse, 28, u64(1<<40)...)
	head("a descriptor at 2^64-1", sparse, 28, u64(1<<64-1)...)
	head("a descriptor of no sectors", sparse, 36, u64(0)...)
	head("a descriptor of 2^32 sectors", sparse, 36, u64(1<<32)...)
	head("a descriptor of 2^64-1 sectors", sparse, 36, u64(1<<64-1)...)
	head("a descriptor that is the data", sparse, 28, u64(256)...)
	head("a directory nowhere", sparse, 56, u64(0)...)
	head("a directory behind the file", sparse, 56, u64(1<<40)...)
	head("a directory at 2^64-2", sparse, 56, u64(1<<64-2)...)
	head("a directory at 2^55", sparse, 56, u64(1<<55)...)
	head("a directory over the descriptor", sparse, 56, u64(3)...)
	head("two directories in one place", sparse, 56, sparse.Bytes(content)[48:56]...)
	head("a copy of the directory behind the file", sparse, 48, u64(1<<40)...)
	head("a directory at the end without a footer", sparse, 56, u64(1<<64-1)...)

	foot := func(name string, at int, b ...byte) {
		img, parts := stream.Build(content)
		copy(img[parts.Footer+at:], b)
		out[name] = img
	}
	whole, parts := stream.Build(content)
	out["cut in the end-of-stream marker"] = whole[:len(whole)-1]
	out["cut before the footer"] = whole[:parts.Footer-512]
	out["cut in the middle"] = whole[:len(whole)/2]
	foot("a footer without its marker", -512, make([]byte, 512)...)
	foot("a footer without the magic number", 0, []byte("VMDK")...)
	foot("a footer that points to a footer", 56, u64(1<<64-1)...)
	foot("a footer of another size", 12, u64(4096)...)
	foot("a footer of another version", 4, u32(1)...)
	foot("a footer of other grains", 20, u64(64)...)
	foot("a footer whose directory is behind the file", 56, u64(1<<40)...)
	foot("a footer whose directory is the descriptor", 56, u64(2)...)

	replace("a parent", "parentCID=ffffffff", "parentCID=12345678\nparentFileNameHint=\"/vmfs/base.vmdk\"")
	replace("a parent without a name", "parentCID=ffffffff", "parentCID=12345678")
	replace("a parent's name only", "parentCID=ffffffff", "parentCID=ffffffff\nparentFileNameHint=\"../base.vmdk\"")
	replace("no parentCID", "parentCID=ffffffff\n", "")
	replace("two parentCIDs", "parentCID=ffffffff", "parentCID=ffffffff\nPARENTCID=12345678")
	replace("two types", "createType=", "createType=\"monolithicFlat\"\ncreateType=")
	replace("descriptor version 9", "version=1", "version=9")
	replace("no descriptor version", "version=1\n", "")
	replace("encrypted", "# Extent", "encryption.keySafe = \"vmware:key/list/()\"\n# Extent")
	replace("an absolute path", `"disk.vmdk"`, `"/etc/shadow"`)
	replace("a relative path", `"disk.vmdk"`, `"../../etc/shadow"`)
	replace("a Windows path", `"disk.vmdk"`, `"C:\secrets.vmdk"`)
	replace("a protocol", `"disk.vmdk"`, `"nbd:127.0.0.1"`)
	replace("no name", `"disk.vmdk"`, `""`)
	replace("a flat extent", `SPARSE "disk.vmdk"`, `FLAT "/dev/sda" 0`)
	replace("a second extent", `"disk.vmdk"`, "\"disk.vmdk\"\nRW 2048 SPARSE \"other.vmdk\"")
	replace("a type of several files", "monolithicSparse", "twoGbMaxExtentSparse")
	replace("a type of a device", "monolithicSparse", "fullDevice")
	replace("no type", "createType", "created")
	replace("no extent", "RW 2048", "# RW 2048")
	replace("no access", "RW 2048", "NOACCESS 2048")
	replace("an extent of no sectors", "RW 2048", "RW 0")
	replace("an extent of -1 sectors", "RW 2048", "RW -1")
	replace("an extent of 2^64 sectors", "RW 2048", "RW 18446744073709551616")
	replace("an extent without a kind", "SPARSE ", "")
	replace("an extent without an end", `"disk.vmdk"`, `"disk.vmdk`)
	replace("an extent larger than the header's disk", "RW 2048", "RW 4096")
	text("a descriptor of noise", strings.Repeat("\x01\xff", 2000))
	text("an empty descriptor", "# Disk DescriptorFile\n")

	table := func(name string, of VMDK, spoil func(b []byte, p VMDKParts)) {
		img, p := of.Build(content)
		spoil(img, p)
		out["table: "+name] = img
	}
	plain := VMDK{}
	gde := func(v uint32) func([]byte, VMDKParts) {
		return func(b []byte, p VMDKParts) { le.PutUint32(b[p.Directory:], v) }
	}
	gte := func(v uint32) func([]byte, VMDKParts) {
		return func(b []byte, p VMDKParts) { le.PutUint32(b[p.Tables[0]+8:], v) }
	}
	table("a table behind the file", plain, gde(1<<32-1))
	table("a table over the descriptor", plain, gde(2))
	table("a table that is its directory", plain, func(b []byte, p VMDKParts) { le.PutUint32(b[p.Directory:], uint32(p.Directory/512)) })
	table("a copy of a table behind the file", sparse, func(b []byte, p VMDKParts) { le.PutUint32(b[p.Redundant:], 1<<31) })
	table("a copy of a table that says otherwise", sparse, func(b []byte, p VMDKParts) { le.PutUint32(b[p.Tables[0]+8:], 0) })
	table("a table that its copy does not know", sparse, func(b []byte, p VMDKParts) { le.PutUint32(b[p.Redundant:], 0) })
	table("a grain behind the file", plain, gte(1<<32-1))
	table("a grain of the header", plain, gte(1))
	table("a grain of the directory", plain, func(b []byte, p VMDKParts) { le.PutUint32(b[p.Tables[0]+8:], uint32(p.Directory/512)) })
	table("a grain of its table", plain, func(b []byte, p VMDKParts) { le.PutUint32(b[p.Tables[0]+8:], uint32(p.Tables[0]/512+3)) })
	table("a compressed grain behind the file", packed, gte(1<<32-1))
	table("a compressed grain of the descriptor", packed, gte(2))
	table("a compressed grain that is another's", packed, func(b []byte, p VMDKParts) { le.PutUint32(b[p.Tables[0]+8:], uint32(p.Grains[5]/512)) })
	marker := func(at int, v ...byte) func([]byte, VMDKParts) {
		return func(b []byte, p VMDKParts) { copy(b[p.Grains[2]+at:], v) }
	}
	table("a marker of another sector", packed, marker(0, u64(255)...))
	table("a marker of 2^64-1", packed, marker(0, u64(1<<64-1)...))
	table("a marker of no bytes", packed, marker(8, u32(0)...))
	table("a marker of 2^32-1 bytes", packed, marker(8, u32(1<<32-1)...))
	table("a marker of few bytes", packed, marker(8, u32(20)...))
	table("no zlib", packed, marker(12, 0xff, 0xff))
	table("a wrong checksum", packed, func(b []byte, p VMDKParts) { b[p.Grains[2]+11+int(le.Uint32(b[p.Grains[2]+8:]))] ^= 1 })
	grain := func(data []byte) func([]byte, VMDKParts) {
		return func(b []byte, p VMDKParts) { copy(b[p.Grains[2]:p.Grains[3]], VMDKGrain(256, data)) }
	}
	bomb, p := packed.Build(content)
	bomb = append(append([]byte{}, bomb[:p.Grains[2]]...), VMDKGrain(256, make([]byte, 64<<20))...)
	for i := 3; i < len(p.Grains); i++ {
		le.PutUint32(bomb[p.Tables[0]+4*i:], 0)
	}
	out["table: a grain that inflates to 64 MiB"] = bomb
	table("a grain that inflates to a byte more", packed, grain(make([]byte, 65537)))
	table("a grain that inflates to a byte less", packed, grain(make([]byte, 65535)))
	cut := plain.Bytes(content)
	out["table: cut in the last grain"] = cut[:len(cut)-1]
	cut = packed.Bytes(content)
	out["table: cut in the last compressed grain"] = cut[:len(cut)-500]
	return out
}
