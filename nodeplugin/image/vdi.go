package image

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// The layout is that of VirtualBox's VDICore.h: VDIPREHEADER, then VDIHEADER1,
// whose lengths begin to count behind the former. Numbers are little-endian.

const (
	vdiPreHeaderBytes = 72
	vdiLeastHeader    = 384 // of a VDIHEADER1; newer ones have more behind it
	vdiHeaderBytes    = vdiPreHeaderBytes + vdiLeastHeader
	vdiVersion        = 1<<16 | 1
	vdiSector         = 512

	// Image types.
	vdiDynamic      = 1
	vdiStatic       = 2
	vdiUndo         = 3
	vdiDifferencing = 4

	// Entries of the block map that are no block's number.
	vdiFree = 0xffffffff // never written
	vdiZero = 0xfffffffe // discarded, reads as zeros
)

// vdiHeader is what the reader needs of a header, checked against the file's size.
type vdiHeader struct {
	size   int64 // of the disk
	blocks int64 // in the map
	table  int64 // where the map lies
	data   int64 // where the blocks lie
	block  int64 // bytes of a block
	extra  int64 // bytes before each block that are not the disk's
}

// parseVDI checks the header in b, the first bytes of a file of fileSize.
func parseVDI(b []byte, fileSize int64) (vdiHeader, error) {
	var h vdiHeader
	if len(b) < vdiHeaderBytes {
		return h, corruptVDI("the header has %d bytes, %d are the least", len(b), vdiHeaderBytes)
	}
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	if v := u32(0x44); v != vdiVersion {
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("vdi version %d.%d is not supported (1.1 is): convert the image with VBoxManage clonemedium", v>>16, v&0xffff))
	}
	if length := u32(0x48); length < vdiLeastHeader {
		return h, corruptVDI("the header's length is %d, %d is the least", length, vdiLeastHeader)
	}
	parent := [16]byte(b[0x1a8:]) // the linked image's UUID, then that of its last change
	switch kind := u32(0x4c); {
	case kind == vdiUndo || kind == vdiDifferencing || parent != [16]byte{} || [16]byte(b[0x1b8:]) != [16]byte{}:
		return h, fault.Terminal(fault.BackingFile,
			fmt.Errorf("the vdi image (of type %d) holds what differs from another one, UUID %s, without which it is not whole: merge them (VBoxManage clonemedium)", kind, guid(parent)))
	case kind != vdiDynamic && kind != vdiStatic:
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("a vdi image of type %d is not supported (1, dynamic, and 2, static, are): convert it with VBoxManage clonemedium", kind))
	}
	if sector := u32(0x168); sector != vdiSector {
		return h, corruptVDI("a sector has %d bytes, want %d", sector, vdiSector)
	}
	h.block, h.extra = int64(u32(0x178)), int64(u32(0x17c))
	if h.block < vdiSector || h.block&(h.block-1) != 0 {
		return h, corruptVDI("a block has %d bytes, want a power of two of at least %d", h.block, vdiSector)
	}
	h.blocks = int64(u32(0x180))
	size := binary.LittleEndian.Uint64(b[0x170:])
	if size < vdiSector || size > uint64(h.blocks*h.block) {
		return h, corruptVDI("the disk's size is %d bytes, want at least %d and at most those of %d blocks of %d bytes", size, vdiSector, h.blocks, h.block)
	}
	// What is no multiple of a sector is rounded up, as QEMU does.
	h.size = (int64(size) + vdiSector - 1) / vdiSector * vdiSector
	if allocated := int64(u32(0x184)); allocated > h.blocks {
		return h, corruptVDI("%d of %d blocks are allocated", allocated, h.blocks)
	}
	h.table, h.data = int64(u32(0x154)), int64(u32(0x158))
	if h.table%vdiSector != 0 || h.table < vdiPreHeaderBytes+int64(u32(0x48)) || h.blocks*4 > fileSize-h.table {
		return h, corruptVDI("the block map has %d bytes at %d of a file of %d bytes", h.blocks*4, h.table, fileSize)
	}
	if h.data%vdiSector != 0 || h.data < h.table+h.blocks*4 {
		return h, corruptVDI("the blocks begin at %d, the block map has %d bytes at %d", h.data, h.blocks*4, h.table)
	}
	return h, nil
}

// guid is an identifier as Microsoft and VirtualBox write it: the first three
// parts little-endian.
func guid(b [16]byte) string {
	return fmt.Sprintf("%08x-%04x-%04x-%x-%x", binary.LittleEndian.Uint32(b[:]), binary.LittleEndian.Uint16(b[4:]), binary.LittleEndian.Uint16(b[6:]), b[8:10], b[10:])
}

func corruptVDI(format string, args ...any) error { return corrupt("vdi", format, args...) }

func openVDI(ctx context.Context, file Ranged) (*Opened, error) {
	b := make([]byte, min(vdiHeaderBytes, file.Size()))
	if _, err := readUpTo(ctx, file, b, 0); err != nil {
		return nil, fmt.Errorf("read the vdi header: %w", err)
	}
	h, err := parseVDI(b, file.Size())
	if err != nil {
		return nil, err
	}
	v := &vdi{vdiHeader: h, fileSize: file.Size(), pages: newPageCache(file)}
	return openMapped(Info{Format: "vdi", VirtualSize: h.size}, v, file, min(h.block, mappedSpan)), nil
}

// vdi is the layout of an open image.
type vdi struct {
	vdiHeader
	fileSize int64
	pages    *pageCache
}

// walk is layout's. Segments are no longer than a block.
func (v *vdi) walk(ctx context.Context, off, n int64, each func(segment)) error {
	for end := off + n; off < end; {
		next := min(off-off%v.block+v.block, end)
		s := segment{start: off, length: next - off}
		entry, err := v.entry(ctx, off/v.block)
		switch {
		case err != nil:
			return err
		case entry == vdiFree:
			s.kind = extent.Hole
		case entry == vdiZero:
			s.kind = extent.Zero
		default:
			s.kind = extent.Data
			s.host, s.hostLen = v.data+int64(entry)*(v.extra+v.block)+v.extra+off%v.block, s.length
			// 2^32 blocks of 2^33 bytes overflow: the former must lie in the file.
			if int64(entry) > v.fileSize/(v.extra+v.block) || s.hostEnd() > v.fileSize {
				return corruptVDI("the data for byte %d lie in block %d, of %d bytes, of a file of %d bytes: the file is cut short, upload it again", off, entry, v.extra+v.block, v.fileSize)
			}
		}
		each(s)
		off = next
	}
	return nil
}

// entry reads the block map.
func (v *vdi) entry(ctx context.Context, block int64) (uint32, error) {
	b, err := v.pages.at(ctx, v.table+block*4)
	if err != nil {
		return 0, fmt.Errorf("read the block map: %w", err)
	}
	return binary.LittleEndian.Uint32(b), nil
}
