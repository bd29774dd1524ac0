package image

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode/utf16"

	"golang.org/x/sync/errgroup"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// The layout is that of Microsoft's "Virtual Hard Disk Image Format
// Specification" of 2006; section names below are its. Numbers are big-endian.

const (
	vhdCookie       = "conectix"
	vhdHeaderCookie = "cxsparse"

	vhdFooterBytes = 512 // 511 where written by Virtual PC before 2004
	vhdHeaderBytes = 1024
	vhdSector      = 512

	// Disk types.
	vhdFixed        = 2
	vhdDynamic      = 3
	vhdDifferencing = 4

	// vhdMaxBytes is the largest dynamic disk, 2040 GiB.
	vhdMaxBytes = 2040 << 30
	// vhdMaxGeometry sectors, 65535 x 16 x 255, are what the geometry of every
	// larger disk says too.
	vhdMaxGeometry = 65535 * 16 * 255

	vhdUnused = 0xffffffff // an entry of the block allocation table

	// Pages of the sectors' bitmaps are small: one lies before each block.
	vhdBitmapPage  = 4 << 10
	vhdBitmapPages = 256
	// vhdAhead bitmaps at most are read ahead, vhdAtOnce at once.
	vhdAhead  = 64
	vhdAtOnce = 16
)

// vhdFooter is what the reader needs of a hard disk footer.
type vhdFooter struct {
	kind     uint32
	header   uint64 // where the dynamic disk header lies
	size     int64  // of the disk
	warnings []string
}

// isVHDFooter says whether b begins as a footer does.
func isVHDFooter(b []byte) bool {
	return len(b) >= vhdFooterBytes-1 && string(b[:len(vhdCookie)]) == vhdCookie
}

// parseVHDFooter checks the footer in b, whatever the file's size is, since a
// copy of the footer comes first in a dynamic disk.
func parseVHDFooter(b []byte) (vhdFooter, error) {
	var f vhdFooter
	if !isVHDFooter(b) {
		return f, corruptVHD("the hard disk footer does not begin with %q", vhdCookie)
	}
	if want, got := binary.BigEndian.Uint32(b[64:]), vhdChecksum(b, 64); want != got {
		return f, corruptVHD("the hard disk footer's checksum is %#x, its bytes have %#x", want, got)
	}
	if v := binary.BigEndian.Uint32(b[12:]); v>>16 != 1 {
		return f, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("vhd version %d.%d is not supported (1.0 is): convert the image with qemu-img convert -O qcow2", v>>16, v&0xffff))
	}
	f.kind, f.header = binary.BigEndian.Uint32(b[60:]), binary.BigEndian.Uint64(b[16:])
	if b[84] != 0 {
		f.warnings = append(f.warnings, "the vhd image belongs to a virtual machine in saved state: what its guest had not written to the disk is not there")
	}
	current := binary.BigEndian.Uint64(b[48:])
	if current == 0 || current%vhdSector != 0 || current > 1<<62 {
		return f, corruptVHD("the disk's size is %d bytes, want a multiple of %d", current, vhdSector)
	}
	f.size = int64(current)
	geometry := vhdSector * int64(binary.BigEndian.Uint16(b[56:])) * int64(b[58]) * int64(b[59])
	if geometry == f.size || geometry == 0 || geometry == vhdSector*vhdMaxGeometry {
		return f, nil
	}
	// The document gives a disk two sizes and does not tell which one counts. Of
	// these producers a guest sees what the geometry says ("Disk Geometry"; QEMU's
	// own field says "qem2" where it does not), of all others (Hyper-V "win ",
	// Azure "wa", Disk2vhd "d2v ", XenServer "tap", XenConverter "CTXS",
	// VirtualBox "vbox") the current size, which never leaves data out.
	switch creator := string(b[28:32]); creator {
	case "vpc ", "vs  ", "qemu":
		f.warnings = append(f.warnings, fmt.Sprintf("the vhd image of %q has a disk of %d bytes by its geometry, which is taken, and of %d by its size", strings.TrimSpace(creator), geometry, f.size))
		f.size = geometry
	}
	return f, nil
}

// vhdChecksum is the one's complement of the sum of b's bytes without the four
// of the checksum itself, which lie at skip.
func vhdChecksum(b []byte, skip int) uint32 {
	var sum uint32
	for i, c := range b {
		if i < skip || i >= skip+4 {
			sum += uint32(c)
		}
	}
	return ^sum
}

// vhdHeader is what the reader needs of a dynamic disk header, checked against
// the disk's and the file's size.
type vhdHeader struct {
	at      int64 // where it lies itself
	table   int64 // where the block allocation table lies
	entries int64 // in it
	block   int64 // bytes of a block
}

// parseVHDHeader checks the dynamic disk header in b, which lies at that offset
// in a file of fileSize bytes, of a disk of size bytes.
func parseVHDHeader(b []byte, at, size, fileSize int64) (vhdHeader, error) {
	var h vhdHeader
	if len(b) < vhdHeaderBytes || string(b[:len(vhdHeaderCookie)]) != vhdHeaderCookie {
		return h, corruptVHD("the dynamic disk header at %d does not begin with %q", at, vhdHeaderCookie)
	}
	if want, got := binary.BigEndian.Uint32(b[36:]), vhdChecksum(b[:vhdHeaderBytes], 36); want != got {
		return h, corruptVHD("the dynamic disk header's checksum is %#x, its bytes have %#x", want, got)
	}
	if v := binary.BigEndian.Uint32(b[24:]); v>>16 != 1 {
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("vhd dynamic disks of version %d.%d are not supported (1.0 is): convert the image with qemu-img convert -O qcow2", v>>16, v&0xffff))
	}
	for i := range 8 {
		if code := b[576+24*i : 576+24*i+4]; binary.BigEndian.Uint32(code) != 0 {
			return h, vhdHasParent(b)
		}
	}
	h.at = at
	h.block = int64(binary.BigEndian.Uint32(b[32:]))
	if h.block < vhdSector || h.block&(h.block-1) != 0 {
		return h, corruptVHD("a block has %d bytes, want a power of two of at least %d", h.block, vhdSector)
	}
	if size > vhdMaxBytes {
		return h, corruptVHD("the disk's size is %d bytes, a dynamic one has at most %d", size, int64(vhdMaxBytes))
	}
	h.entries = int64(binary.BigEndian.Uint32(b[28:]))
	if need := (size + h.block - 1) / h.block; h.entries < need {
		return h, corruptVHD("the block allocation table has %d entries, a disk of %d bytes in blocks of %d needs %d", h.entries, size, h.block, need)
	}
	table := binary.BigEndian.Uint64(b[16:])
	if table%vhdSector != 0 || table < vhdFooterBytes || table > uint64(fileSize) || h.entries*4 > fileSize-int64(table) {
		return h, corruptVHD("the block allocation table has %d bytes at %d of a file of %d bytes", h.entries*4, table, fileSize)
	}
	h.table = int64(table)
	if overlap(h.table, h.entries*4, at, vhdHeaderBytes) {
		return h, corruptVHD("the block allocation table at %d and the dynamic disk header at %d overlap", h.table, at)
	}
	return h, nil
}

// overlap says whether a bytes at at and b bytes at bt have a byte in common.
func overlap(at, a, bt, b int64) bool { return at < bt+b && bt < at+a }

// vhdHasParent names the parent from a dynamic disk header, if b is one.
func vhdHasParent(b []byte) error {
	name := "another file"
	if len(b) >= vhdHeaderBytes && string(b[:len(vhdHeaderCookie)]) == vhdHeaderCookie {
		var units []uint16
		for at := 64; at < 64+512; at += 2 {
			if u := binary.BigEndian.Uint16(b[at:]); u != 0 {
				units = append(units, u)
				continue
			}
			break
		}
		if len(units) > 0 {
			name = quote(string(utf16.Decode(units)))
		}
	}
	return fault.Terminal(fault.BackingFile,
		fmt.Errorf("the vhd image is a differencing disk on %s, without which it is not whole: merge it with its parent (Hyper-V's Merge-VHD or Convert-VHD)", name))
}

func corruptVHD(format string, args ...any) error { return corrupt("vhd", format, args...) }

// openVHD opens a fixed or dynamic disk.
func openVHD(ctx context.Context, file Ranged) (*Opened, error) {
	size := file.Size()
	first, last := make([]byte, min(size, vhdFooterBytes)), make([]byte, min(size, vhdFooterBytes))
	if _, err := readUpTo(ctx, file, first, 0); err != nil {
		return nil, fmt.Errorf("read the vhd footer's copy: %w", err)
	}
	if _, err := readUpTo(ctx, file, last, size-int64(len(last))); err != nil {
		return nil, fmt.Errorf("read the vhd footer: %w", err)
	}
	if !isVHDFooter(last) && len(last) == vhdFooterBytes {
		last = last[1:]
	}
	end, endErr := parseVHDFooter(last)
	// What a fixed disk begins with is its guest's, also where it looks like a footer.
	if endErr == nil && end.kind == vhdFixed {
		room := size - int64(len(last))
		if end.size > room {
			return nil, corruptVHD("a fixed disk of %d bytes lies in a file that has room for %d: the file is cut short, upload it again", end.size, room)
		}
		return openMapped(Info{Format: "vhd", VirtualSize: end.size, Warnings: end.warnings}, vhdFixedLayout{}, file, 1), nil
	}
	f, err := parseVHDFooter(first)
	switch {
	case err != nil && endErr == nil:
		f = end
		f.warnings = append(f.warnings, "the copy of the vhd image's footer at its beginning is damaged: the footer at its end is taken")
	case err != nil && isVHDFooter(last) && !isVHDFooter(first):
		return nil, endErr
	case err != nil:
		return nil, err
	case endErr == nil && (f.kind != end.kind || f.size != end.size || f.header != end.header):
		return nil, corruptVHD("its footer and the copy at its beginning disagree (type %d and %d, %d and %d bytes): convert it with the program that wrote it", end.kind, f.kind, end.size, f.size)
	case endErr != nil && f.kind == vhdDynamic:
		f.warnings = append(f.warnings, "the vhd image has no valid footer at its end: it may be cut short, what is missing is noticed when it is read")
	}
	switch f.kind {
	case vhdFixed:
		return nil, corruptVHD("a fixed disk has no footer at its end: the file is cut short, upload it again")
	case vhdDynamic, vhdDifferencing:
	default:
		return nil, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("a vhd image of type %d is not supported (2, fixed, and 3, dynamic, are): convert it with qemu-img convert -O qcow2", f.kind))
	}
	if f.header < vhdFooterBytes || f.header > uint64(size) || vhdHeaderBytes > size-int64(f.header) {
		if f.kind == vhdDifferencing {
			return nil, vhdHasParent(nil)
		}
		return nil, corruptVHD("the dynamic disk header has %d bytes at %d of a file of %d bytes", vhdHeaderBytes, f.header, size)
	}
	b := make([]byte, vhdHeaderBytes)
	if _, err := readExactly(ctx, file, b, int64(f.header)); err != nil {
		return nil, fmt.Errorf("read the vhd dynamic disk header: %w", err)
	}
	if f.kind == vhdDifferencing {
		return nil, vhdHasParent(b)
	}
	h, err := parseVHDHeader(b, int64(f.header), f.size, size)
	if err != nil {
		return nil, err
	}
	bits := h.block / vhdSector
	v := &vhd{
		vhdHeader: h, size: f.size, fileSize: size,
		bitmap: ((bits+7)/8 + vhdSector - 1) / vhdSector * vhdSector,
		pages:  newPageCache(file), bitmaps: newCacheOf(file, vhdBitmapPage, vhdBitmapPages),
	}
	return openMapped(Info{Format: "vhd", VirtualSize: f.size, Warnings: f.warnings}, v, file, min(h.block, mappedSpan)), nil
}

// vhdFixedLayout is the layout of a disk that comes first in its file.
type vhdFixedLayout struct{}

func (vhdFixedLayout) walk(_ context.Context, off, n int64, each func(segment)) error {
	each(segment{start: off, length: n, kind: extent.Data, host: off, hostLen: n})
	return nil
}

// vhd is the layout of a dynamic disk.
type vhd struct {
	vhdHeader
	size, fileSize int64
	bitmap         int64      // bytes of the bitmap before each block
	pages          *pageCache // of the block allocation table
	bitmaps        *pageCache
}

// walk is layout's. Segments are no longer than a block.
func (v *vhd) walk(ctx context.Context, off, n int64, each func(segment)) error {
	for end, ahead := off+n, off; off < end; {
		if off >= ahead {
			var err error
			if ahead, err = v.readAhead(ctx, off, end); err != nil {
				return err
			}
		}
		next := min(off-off%v.block+v.block, end)
		entry, err := v.entry(ctx, off/v.block)
		if err != nil {
			return err
		}
		if entry == vhdUnused {
			each(segment{start: off, length: next - off, kind: extent.Hole})
		} else if err := v.walkBlock(ctx, int64(entry)*vhdSector, off, next, each); err != nil {
			return err
		}
		off = next
	}
	return nil
}

// readAhead has the bitmaps of several blocks of [off, end) in the cache, which
// would cost a request's time each one after the other. It returns where the
// first block begins of which the bitmap is not.
func (v *vhd) readAhead(ctx context.Context, off, end int64) (int64, error) {
	first, last := off/v.block, (end-1)/v.block
	last = min(last, first+vhdAhead-1)
	if first == last {
		return end, nil
	}
	var g errgroup.Group
	g.SetLimit(vhdAtOnce)
	for block := first; block <= last; block++ {
		entry, err := v.entry(ctx, block)
		if err != nil {
			return 0, errors.Join(err, g.Wait())
		}
		if at := int64(entry) * vhdSector; entry != vhdUnused && at < v.fileSize {
			g.Go(func() error {
				_, err := v.bitmaps.at(ctx, at)
				return err
			})
		}
	}
	if err := g.Wait(); err != nil {
		return 0, fmt.Errorf("read the blocks' bitmaps: %w", err)
	}
	return (last + 1) * v.block, nil
}

// entry reads the block allocation table.
func (v *vhd) entry(ctx context.Context, block int64) (uint32, error) {
	b, err := v.pages.at(ctx, v.table+block*4)
	if err != nil {
		return 0, fmt.Errorf("read the block allocation table: %w", err)
	}
	return binary.BigEndian.Uint32(b), nil
}

// walkBlock is walk for [off, end), a part of the block at host. A bit of the
// bitmap before the block says of each sector whether it was ever written; what
// lies in the place of one that was not is anything ("Sector Bitmap").
func (v *vhd) walkBlock(ctx context.Context, host, off, end int64, each func(segment)) error {
	if host < vhdFooterBytes || host > v.fileSize-v.bitmap {
		return corruptVHD("the block for byte %d lies at %d of a file of %d bytes", off, host, v.fileSize)
	}
	if overlap(host, v.bitmap+v.block, v.at, vhdHeaderBytes) || overlap(host, v.bitmap+v.block, v.table, v.entries*4) {
		return corruptVHD("the block for byte %d at %d overlaps the header at %d or the block allocation table at %d", off, host, v.at, v.table)
	}
	start := off - off%v.block
	for off < end {
		sector := (off - start) / vhdSector
		bits, err := v.bitmaps.at(ctx, host+sector/8)
		if err != nil {
			return fmt.Errorf("read a block's bitmap: %w", err)
		}
		last := sector - sector%8 + int64(len(bits))*8
		written, count := bitRun(bits, sector%8, min(last, (end-start+vhdSector-1)/vhdSector)-sector+sector%8)
		s := segment{start: off, length: min(start+(sector+count)*vhdSector, end) - off, kind: extent.Hole}
		if written {
			s.kind, s.host, s.hostLen = extent.Data, host+v.bitmap+off-start, s.length
			if s.hostEnd() > v.fileSize {
				return corruptVHD("the data for byte %d lie at %d to %d of a file of %d bytes: the file is cut short, upload it again", off, s.host, s.hostEnd(), v.fileSize)
			}
		}
		each(s)
		off = s.end()
	}
	return nil
}

// bitRun tells the bit of b at from, the highest of a byte being the first, and
// how many bits of [from, to) from there are like it.
func bitRun(b []byte, from, to int64) (set bool, n int64) {
	bit := func(i int64) bool { return b[i/8]&(0x80>>(i%8)) != 0 }
	var all byte
	if set = bit(from); set {
		all = 0xff
	}
	i := from + 1
	for i < to {
		if i%8 == 0 && to-i >= 8 && b[i/8] == all {
			i += 8
			continue
		}
		if bit(i) != set {
			break
		}
		i++
	}
	return set, i - from
}

// honest is boastful's: the file has room for all blocks of the table.
func (v *vhd) honest(ctx context.Context) error {
	var blocks int64
	for block := range (v.size + v.block - 1) / v.block {
		entry, err := v.entry(ctx, block)
		if err != nil {
			return err
		}
		if entry == vhdUnused {
			continue
		}
		// The last one may be cut short.
		if blocks++; (blocks-1)*(v.bitmap+v.block) > v.fileSize {
			return corruptVHD("the block allocation table has more than %d blocks of %d bytes in a file of %d bytes", blocks-1, v.bitmap+v.block, v.fileSize)
		}
	}
	return nil
}
