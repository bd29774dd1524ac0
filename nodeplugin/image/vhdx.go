package image

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"unicode/utf16"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// The layout is that of [MS-VHDX], "Virtual Hard Disk v2 (VHDX) File Format";
// sections in comments are its. Numbers are little-endian.

const (
	vhdxMiB = 1 << 20 // what regions and blocks are aligned to

	// Header Section (2.2): two headers and two region tables at fixed places.
	vhdxHeader1     = 64 << 10
	vhdxHeader2     = 128 << 10
	vhdxHeaderBytes = 4 << 10
	vhdxRegions1    = 192 << 10
	vhdxRegions2    = 256 << 10
	vhdxTableBytes  = 64 << 10 // of a region table, and of the metadata table
	vhdxEntryBytes  = 32       // of an entry in either
	vhdxMaxEntries  = 2047

	vhdxMaxBytes = 64 << 40 // of a disk (2.6.2.2)

	// Payload block states (2.5.1.1).
	vhdxNotPresent       = 0
	vhdxUndefined        = 1
	vhdxZero             = 2
	vhdxUnmapped         = 3
	vhdxFullyPresent     = 6
	vhdxPartiallyPresent = 7

	// What is known of regions and metadata items (2.2.3.2, 2.6.2).
	vhdxBAT            = "2dc27766-f623-4200-9d64-115e9bfd4a08"
	vhdxMetadata       = "8b7ca206-4790-4b9a-b8fe-575f050f886e"
	vhdxFileParameters = "caa16737-fa36-4d43-b3b6-33f0aa44e76b"
	vhdxDiskSize       = "2fa54224-cd1b-4876-b211-5dbed83bf4b8"
	vhdxDiskID         = "beca12ab-b2e6-4523-93ef-c309e000c746"
	vhdxLogicalSector  = "8141bf1d-a96f-4709-ba47-f233a8faab5f"
	vhdxPhysicalSector = "cda348c7-445d-4471-9cc9-e9885251c556"
	vhdxParentLocator  = "a8d35f2d-b30b-454d-abf7-d3d84834ab0c"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// vhdxSum is the CRC-32C of b with the checksum in it, its second word, as zeros.
func vhdxSum(b []byte) uint32 {
	sum := crc32.Update(0, castagnoli, b[:4])
	sum = crc32.Update(sum, castagnoli, make([]byte, 4))
	return crc32.Update(sum, castagnoli, b[8:])
}

// vhdxHeader is one of the two headers (2.2.2).
type vhdxHeader struct {
	sequence   uint64
	logGUID    [16]byte // zeros: the log is empty
	logVersion uint16
	version    uint16
	log        uint64
	logBytes   uint32
}

// parseVHDXHeader checks what makes a header valid; what it says is not looked
// at before it is known to be the current one.
func parseVHDXHeader(b []byte) (vhdxHeader, bool) {
	var h vhdxHeader
	if len(b) < vhdxHeaderBytes || string(b[:4]) != "head" || binary.LittleEndian.Uint32(b[4:]) != vhdxSum(b) {
		return h, false
	}
	h.sequence = binary.LittleEndian.Uint64(b[8:])
	h.logGUID = [16]byte(b[48:])
	h.logVersion, h.version = binary.LittleEndian.Uint16(b[64:]), binary.LittleEndian.Uint16(b[66:])
	h.logBytes, h.log = binary.LittleEndian.Uint32(b[68:]), binary.LittleEndian.Uint64(b[72:])
	return h, true
}

// currentVHDX returns the current one of the two headers, checked against the
// file's size.
func currentVHDX(one, two []byte, fileSize int64) (vhdxHeader, error) {
	h, ok := parseVHDXHeader(one)
	other, otherOK := parseVHDXHeader(two)
	switch {
	case !ok && !otherOK:
		return h, corruptVHDX("neither of its two headers is valid: the first bytes are damaged, or the file is cut short; upload it again")
	case !ok || otherOK && other.sequence > h.sequence:
		h = other
	case otherOK && other.sequence == h.sequence && !bytes.Equal(one, two):
		// Disk2vhd writes the same header twice.
		return h, corruptVHDX("its two headers differ and have the same sequence number %d", h.sequence)
	}
	if h.version != 1 {
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("vhdx version %d is not supported (1 is): convert the image with Hyper-V's Convert-VHD", h.version))
	}
	if h.log%vhdxMiB != 0 || h.logBytes%vhdxMiB != 0 || h.log < vhdxMiB && h.logBytes > 0 ||
		h.log > uint64(fileSize) || int64(h.logBytes) > fileSize-int64(h.log) {
		return h, corruptVHDX("the log has %d bytes at %d of a file of %d bytes", h.logBytes, h.log, fileSize)
	}
	if h.logBytes == 0 {
		h.log = 0
	}
	return h, nil
}

// vhdxRange is a region of the file, or an item of the metadata in it.
type vhdxRange struct{ at, length int64 }

// parseVHDXRegions checks a region table (2.2.3) and returns where the block
// allocation table and the metadata are. ok is false where the table is not
// valid, so that its copy is to be used.
func parseVHDXRegions(b []byte, fileSize int64) (bat, metadata vhdxRange, ok bool, err error) {
	if string(b[:4]) != "regi" || binary.LittleEndian.Uint32(b[4:]) != vhdxSum(b) {
		return bat, metadata, false, nil
	}
	count := binary.LittleEndian.Uint32(b[8:])
	if count > vhdxMaxEntries {
		return bat, metadata, true, corruptVHDX("the region table has %d entries, %d are the most", count, vhdxMaxEntries)
	}
	for i := range int(count) {
		e := b[16+i*vhdxEntryBytes:][:vhdxEntryBytes]
		name := guid([16]byte(e))
		at, length := binary.LittleEndian.Uint64(e[16:]), int64(binary.LittleEndian.Uint32(e[24:]))
		into := map[string]*vhdxRange{vhdxBAT: &bat, vhdxMetadata: &metadata}[name]
		if into == nil {
			if binary.LittleEndian.Uint32(e[28:])&1 != 0 {
				return bat, metadata, true, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the vhdx image needs the region %s, which is not supported: convert it with Hyper-V's Convert-VHD", name))
			}
			continue
		}
		if into.length != 0 {
			return bat, metadata, true, corruptVHDX("the region %s is there twice", name)
		}
		if length == 0 || at < vhdxMiB || at%vhdxMiB != 0 || length%vhdxMiB != 0 || at > uint64(fileSize) || length > fileSize-int64(at) {
			return bat, metadata, true, corruptVHDX("the region %s has %d bytes at %d of a file of %d bytes", name, length, at, fileSize)
		}
		*into = vhdxRange{int64(at), length}
	}
	for name, r := range map[string]vhdxRange{"block allocation table": bat, "metadata": metadata} {
		if r.length == 0 {
			return bat, metadata, true, corruptVHDX("the region table does not tell where the %s is", name)
		}
	}
	if overlap(bat.at, bat.length, metadata.at, metadata.length) {
		return bat, metadata, true, corruptVHDX("the block allocation table at %d and the metadata at %d overlap", bat.at, metadata.at)
	}
	return bat, metadata, true, nil
}

// parseVHDXMetadata checks the metadata table (2.6.1) in b, the first bytes of a
// region of so many, and returns where in the region its items are.
func parseVHDXMetadata(b []byte, region int64) (map[string]vhdxRange, error) {
	if string(b[:8]) != "metadata" {
		return nil, corruptVHDX("the metadata table does not begin with %q", "metadata")
	}
	count := int(binary.LittleEndian.Uint16(b[10:]))
	if count > vhdxMaxEntries {
		return nil, corruptVHDX("the metadata table has %d entries, %d are the most", count, vhdxMaxEntries)
	}
	least := map[string]int64{vhdxFileParameters: 8, vhdxDiskSize: 8, vhdxDiskID: 16, vhdxLogicalSector: 4, vhdxPhysicalSector: 4, vhdxParentLocator: 20}
	items := map[string]vhdxRange{}
	for i := range count {
		e := b[32+i*vhdxEntryBytes:][:vhdxEntryBytes]
		name := guid([16]byte(e))
		at, length := int64(binary.LittleEndian.Uint32(e[16:])), int64(binary.LittleEndian.Uint32(e[20:]))
		flags := binary.LittleEndian.Uint32(e[24:])
		need, known := least[name]
		if !known || flags&1 != 0 { // a user's own
			if flags&4 != 0 {
				return nil, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the vhdx image needs the metadata item %s, which is not supported: convert it with Hyper-V's Convert-VHD", name))
			}
			continue
		}
		if _, twice := items[name]; twice {
			return nil, corruptVHDX("the metadata item %s is there twice", name)
		}
		if length < need || at < vhdxTableBytes || length > region-at {
			return nil, corruptVHDX("the metadata item %s has %d bytes at %d of a region of %d bytes", name, length, at, region)
		}
		items[name] = vhdxRange{at, length}
	}
	for _, name := range []string{vhdxFileParameters, vhdxDiskSize, vhdxLogicalSector} {
		if _, ok := items[name]; !ok {
			return nil, corruptVHDX("the metadata item %s is missing", name)
		}
	}
	return items, nil
}

// vhdxParent names the parent that a parent locator (2.6.2.6) tells.
func vhdxParent(b []byte) error {
	name, text := "another file", func(at, length int) string {
		if at < 0 || length > len(b)-at {
			return ""
		}
		var units []uint16
		for ; length >= 2; at, length = at+2, length-2 {
			units = append(units, binary.LittleEndian.Uint16(b[at:]))
		}
		return string(utf16.Decode(units))
	}
	if len(b) >= 20 {
		for e := b[20:]; len(e) >= 12 && len(b)-len(e) < 20+12*int(binary.LittleEndian.Uint16(b[18:])); e = e[12:] {
			key := text(int(binary.LittleEndian.Uint32(e)), int(binary.LittleEndian.Uint16(e[8:])))
			if key == "relative_path" || key == "absolute_win32_path" {
				if value := text(int(binary.LittleEndian.Uint32(e[4:])), int(binary.LittleEndian.Uint16(e[10:]))); value != "" {
					name = quote(value)
				}
			}
		}
	}
	return fault.Terminal(fault.BackingFile,
		fmt.Errorf("the vhdx image is a differencing disk on %s, without which it is not whole: merge it with its parent (Hyper-V's Merge-VHD or Convert-VHD)", name))
}

func corruptVHDX(format string, args ...any) error { return corrupt("vhdx", format, args...) }

// openVHDX opens a fixed or dynamic disk, after the updates that its log holds.
func openVHDX(ctx context.Context, file Ranged) (*Opened, error) {
	read := func(what string, at, length int64) ([]byte, error) {
		b := make([]byte, length)
		if _, err := readUpTo(ctx, file, b, at); err != nil {
			return nil, fmt.Errorf("read the vhdx %s: %w", what, err)
		}
		return b, nil
	}
	one, err := read("header", vhdxHeader1, vhdxHeaderBytes)
	if err != nil {
		return nil, err
	}
	two, err := read("second header", vhdxHeader2, vhdxHeaderBytes)
	if err != nil {
		return nil, err
	}
	header, err := currentVHDX(one, two, file.Size())
	if err != nil {
		return nil, err
	}
	info := Info{Format: "vhdx"}
	if header.logGUID != [16]byte{} {
		replayed, err := replayVHDX(ctx, file, header)
		if err != nil {
			return nil, err
		}
		info.Warnings = append(info.Warnings, fmt.Sprintf("the vhdx image was not closed cleanly: %d updates in its log were applied while reading", len(replayed.patches)))
		file = replayed
	}

	v := &vhdx{fileSize: file.Size(), reserved: []vhdxRange{{0, vhdxMiB}, {int64(header.log), int64(header.logBytes)}}}
	var metadata vhdxRange
	valid := false
	for _, at := range []int64{vhdxRegions1, vhdxRegions2} {
		b, err := read("region table", at, vhdxTableBytes)
		if err != nil {
			return nil, err
		}
		if v.bat, metadata, valid, err = parseVHDXRegions(b, file.Size()); err != nil {
			return nil, err
		} else if valid {
			break
		}
	}
	if !valid {
		return nil, corruptVHDX("neither of its two region tables is valid")
	}
	for _, r := range []vhdxRange{v.bat, metadata} {
		if overlap(r.at, r.length, int64(header.log), int64(header.logBytes)) {
			return nil, corruptVHDX("the region at %d and the log at %d overlap", r.at, header.log)
		}
		v.reserved = append(v.reserved, r)
	}

	table, err := read("metadata table", metadata.at, vhdxTableBytes)
	if err != nil {
		return nil, err
	}
	items, err := parseVHDXMetadata(table, metadata.length)
	if err != nil {
		return nil, err
	}
	item := func(name string) ([]byte, error) {
		return read("metadata item "+name, metadata.at+items[name].at, min(items[name].length, vhdxTableBytes))
	}
	parameters, err := item(vhdxFileParameters)
	if err != nil {
		return nil, err
	}
	size, err := item(vhdxDiskSize)
	if err != nil {
		return nil, err
	}
	sector, err := item(vhdxLogicalSector)
	if err != nil {
		return nil, err
	}
	if _, located := items[vhdxParentLocator]; located || binary.LittleEndian.Uint32(parameters[4:])&2 != 0 {
		var locator []byte
		if located {
			if locator, err = item(vhdxParentLocator); err != nil {
				return nil, err
			}
		}
		return nil, vhdxParent(locator)
	}
	if err := v.measure(binary.LittleEndian.Uint32(parameters), binary.LittleEndian.Uint64(size), binary.LittleEndian.Uint32(sector)); err != nil {
		return nil, err
	}
	v.pages = newPageCache(file)
	info.VirtualSize = v.size
	return openMapped(info, v, file, mappedSpan), nil
}

// vhdx is the layout of an open image.
type vhdx struct {
	fileSize int64
	reserved []vhdxRange // where no block may lie
	bat      vhdxRange
	size     int64 // of the disk
	block    int64 // bytes of a block
	chunk    int64 // blocks between two entries of the table that are for a bitmap (2.5)
	pages    *pageCache
}

// measure checks what the metadata tell of the disk. That a fixed one leaves
// its blocks allocated (2.6.2.1) is for who writes to it.
func (v *vhdx) measure(block uint32, size uint64, sector uint32) error {
	if block < 1<<20 || block > 256<<20 || block&(block-1) != 0 {
		return corruptVHDX("a block has %d bytes, want a power of two from 1 MiB to 256 MiB", block)
	}
	if sector != 512 && sector != 4096 {
		return corruptVHDX("a logical sector has %d bytes, want 512 or 4096", sector)
	}
	if size == 0 || size > vhdxMaxBytes || size%uint64(sector) != 0 {
		return corruptVHDX("the disk's size is %d bytes, want a multiple of %d and at most %d", size, sector, int64(vhdxMaxBytes))
	}
	v.size, v.block = int64(size), int64(block)
	v.chunk = 1 << 23 * int64(sector) / v.block
	last := (v.size - 1) / v.block
	if need := (v.index(last) + 1) * 8; need > v.bat.length {
		return corruptVHDX("the block allocation table has %d bytes, a disk of %d bytes in blocks of %d needs %d", v.bat.length, size, block, need)
	}
	return nil
}

// index is where in the table the entry of a block is: behind those of every
// chunk of blocks is one for the bitmap of their sectors, which only a
// differencing disk has.
func (v *vhdx) index(block int64) int64 { return block + block/v.chunk }

// entry reads the block allocation table.
func (v *vhdx) entry(ctx context.Context, block int64) (state uint64, host int64, err error) {
	b, err := v.pages.at(ctx, v.bat.at+v.index(block)*8)
	if err != nil {
		return 0, 0, fmt.Errorf("read the block allocation table: %w", err)
	}
	e := binary.LittleEndian.Uint64(b)
	at := e &^ (vhdxMiB - 1)
	if e&7 == vhdxFullyPresent && at > 1<<62 {
		return 0, 0, corruptVHDX("block %d lies at %d of a file of %d bytes", block, at, v.fileSize)
	}
	return e & 7, int64(at), nil
}

// walk is layout's. Segments are no longer than a block.
func (v *vhdx) walk(ctx context.Context, off, n int64, each func(segment)) error {
	for end := off + n; off < end; {
		next := min(off-off%v.block+v.block, end)
		s := segment{start: off, length: next - off}
		state, host, err := v.entry(ctx, off/v.block)
		if err != nil {
			return err
		}
		switch state {
		case vhdxNotPresent, vhdxUndefined, vhdxUnmapped:
			s.kind = extent.Hole
		case vhdxZero:
			s.kind = extent.Zero
		case vhdxFullyPresent:
			s.kind = extent.Data
			s.host, s.hostLen = host+off%v.block, s.length
			if s.hostEnd() > v.fileSize {
				return corruptVHDX("the data for byte %d lie at %d to %d of a file of %d bytes: the file is cut short, upload it again", off, s.host, s.hostEnd(), v.fileSize)
			}
			for _, r := range v.reserved {
				if overlap(host, v.block, r.at, r.length) {
					return corruptVHDX("the block for byte %d at %d overlaps what the file has at %d", off, host, r.at)
				}
			}
		case vhdxPartiallyPresent:
			return corruptVHDX("the block for byte %d is there in part, as only in a differencing disk", off)
		default:
			return corruptVHDX("the block for byte %d has the state %d", off, state)
		}
		each(s)
		off = next
	}
	return nil
}
