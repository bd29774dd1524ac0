package image

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/zlib"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/native"
)

// The layout is that of VMware's technical notes "Virtual Disk Format 1.1" and
// "Virtual Disk Format 5.0"; section names below are theirs. Numbers are
// little-endian, and count sectors unless a name here says bytes.

const (
	vmdkMagic       = "KDMV"
	vmdkSector      = 512
	vmdkHeaderBytes = 512
	// vmdkFooterBytes are a marker, the footer and the end-of-stream marker, which
	// end a stream-optimized extent.
	vmdkFooterBytes = 3 * vmdkSector
	vmdkMarkerBytes = 12 // of a grain, before its data

	// Flags ("Hosted Sparse Extent Header"); the upper half are those that a reader
	// must know.
	vmdkNewlines   = 1 << 0
	vmdkRedundant  = 1 << 1
	vmdkZeroed     = 1 << 2
	vmdkCompressed = 1 << 16
	vmdkMarkers    = 1 << 17
	vmdkMustKnow   = 0xffff0000

	vmdkEntries    = 512 // of a grain table
	vmdkTableBytes = 4 * vmdkEntries
	vmdkMaxGrain   = 2 << 20 // bytes; everybody's have 64 KiB
	vmdkMinGrain   = 8 * vmdkSector

	vmdkDirectoryAtEnd = 1<<64 - 1 // the grain directory is told by the footer

	// Types of markers.
	vmdkEndOfStream  = 0
	vmdkFooterMarker = 3

	vmdkIsZeroed = 1 // an entry of a grain table

	// vmdkDescriptorBytes of a descriptor are read at most; one of a disk of
	// 62 TiB in files of 2 GiB has less.
	vmdkDescriptorBytes = 4 << 20
)

// vmdkHeader is what the reader needs of a sparse extent's header, in bytes,
// checked against the file's size.
type vmdkHeader struct {
	version    uint32
	flags      uint32
	size       int64 // of the part of the disk that the extent holds
	grain      int64
	descriptor span  // empty: none
	directory  span  // of grain tables; empty until the footer is read
	redundant  span  // its copy; empty: none
	overhead   int64 // what lies before the grains of a stream
	atEnd      bool  // the directory is told by the footer
	unclean    bool
}

// span is a part of a file.
type span struct{ at, length int64 }

func (s span) overlaps(o span) bool { return overlap(s.at, s.length, o.at, o.length) }

// parseVMDKHeader checks the header in b, the first bytes of an extent's file of
// fileSize bytes, or its footer.
func parseVMDKHeader(b []byte, fileSize int64) (vmdkHeader, error) {
	var h vmdkHeader
	if len(b) < vmdkHeaderBytes || string(b[:4]) != vmdkMagic {
		return h, corruptVMDK("the sparse extent header has %d bytes and begins with %q, want %d and %q", len(b), b[:min(4, len(b))], vmdkHeaderBytes, vmdkMagic)
	}
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	h.version, h.flags, h.unclean = u32(4), u32(8), b[72] != 0
	if h.version < 1 || h.version > 3 {
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("vmdk version %d is not supported (1 to 3 are): convert the image with qemu-img convert -O qcow2", h.version))
	}
	if unknown := h.flags & vmdkMustKnow &^ (vmdkCompressed | vmdkMarkers); unknown != 0 {
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the vmdk image needs features that are not supported (flags %#x): convert it with qemu-img convert -O qcow2", unknown))
	}
	if got := string(b[73:77]); h.flags&vmdkNewlines != 0 && got != "\n \r\n" {
		return h, corruptVMDK("the header's line ends are %q: something that took it for text has changed it, transfer it again as binary", got)
	}
	switch method := binary.LittleEndian.Uint16(b[77:]); {
	case method > 1:
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the vmdk image's compression method %d is not supported (1, deflate, is): convert it with qemu-img convert -O qcow2", method))
	case (method == 1) != h.compressed():
		return h, corruptVMDK("compression method %d contradicts the flags %#x", method, h.flags)
	case h.compressed() && h.flags&vmdkMarkers == 0:
		return h, fault.Terminal(fault.FormatNotSupported, errors.New("a vmdk image with compressed grains that have no markers is not supported: convert it with qemu-img convert -O qcow2"))
	}
	size := u64(12)
	if size == 0 || size > 1<<53 {
		return h, corruptVMDK("the disk's size is %d sectors of %d bytes", size, vmdkSector)
	}
	h.size = int64(size) * vmdkSector
	grain := u64(20)
	if grain < vmdkMinGrain/vmdkSector || grain > vmdkMaxGrain/vmdkSector || grain&(grain-1) != 0 {
		return h, corruptVMDK("a grain has %d sectors, want a power of two from %d to %d", grain, vmdkMinGrain/vmdkSector, vmdkMaxGrain/vmdkSector)
	}
	h.grain = int64(grain) * vmdkSector
	if n := u32(44); n != vmdkEntries {
		return h, corruptVMDK("a grain table has %d entries, want %d", n, vmdkEntries)
	}
	// place checks a part of the file that is told in sectors.
	place := func(what string, at uint64, length int64) (span, error) {
		if at == 0 || at > uint64(fileSize)/vmdkSector || length > fileSize-int64(at)*vmdkSector {
			return span{}, corruptVMDK("the %s has %d bytes at sector %d of a file of %d bytes: the file may be cut short, upload it again", what, length, at, fileSize)
		}
		return span{int64(at) * vmdkSector, length}, nil
	}
	h.overhead = int64(min(u64(64), 1<<53)) * vmdkSector
	var err error
	if at, n := u64(28), u64(36); at != 0 {
		if n == 0 || n > vmdkDescriptorBytes/vmdkSector {
			return h, corruptVMDK("the descriptor has %d sectors, want 1 to %d", n, vmdkDescriptorBytes/vmdkSector)
		}
		if h.descriptor, err = place("descriptor", at, int64(n)*vmdkSector); err != nil {
			return h, err
		}
	}
	if h.atEnd = u64(56) == vmdkDirectoryAtEnd; h.atEnd {
		return h, nil
	}
	length := h.tables() * 4
	if h.directory, err = place("grain directory", u64(56), length); err != nil {
		return h, err
	}
	if h.flags&vmdkRedundant != 0 {
		if h.redundant, err = place("redundant grain directory", u64(48), length); err != nil {
			return h, err
		}
	}
	if h.directory.overlaps(h.descriptor) || h.redundant.overlaps(h.descriptor) || h.directory.overlaps(h.redundant) {
		return h, corruptVMDK("the grain directory at %d, its copy at %d and the descriptor at %d overlap", h.directory.at, h.redundant.at, h.descriptor.at)
	}
	return h, nil
}

func (h vmdkHeader) compressed() bool { return h.flags&vmdkCompressed != 0 }

// tables is how many grain tables the disk has.
func (h vmdkHeader) tables() int64 {
	perTable := h.grain * vmdkEntries
	return (h.size + perTable - 1) / perTable
}

// parseVMDKFooter checks b, the last vmdkFooterBytes of a file of fileSize that
// begins with h, and returns h with what only the footer tells ("Stream-Optimized
// Compressed Sparse Extents").
func parseVMDKFooter(b []byte, h vmdkHeader, fileSize int64) (vmdkHeader, error) {
	if len(b) < vmdkFooterBytes || !isVMDKMarker(b, 1, vmdkFooterMarker) || !isVMDKMarker(b[2*vmdkSector:], 0, vmdkEndOfStream) {
		return h, corruptVMDK("it has no footer at its end, which tells where its grain directory lies: the file is cut short, upload it again")
	}
	f, err := parseVMDKHeader(b[vmdkSector:2*vmdkSector], fileSize)
	if err != nil {
		return h, fmt.Errorf("the footer: %w", err)
	}
	switch {
	case f.atEnd:
		return h, corruptVMDK("its footer does not tell where its grain directory lies")
	case f.version != h.version || f.flags != h.flags || f.size != h.size || f.grain != h.grain:
		return h, corruptVMDK("its header and its footer disagree (versions %d and %d, flags %#x and %#x, %d and %d bytes in grains of %d and %d)",
			h.version, f.version, h.flags, f.flags, h.size, f.size, h.grain, f.grain)
	case f.directory.overlaps(h.descriptor):
		return h, corruptVMDK("the grain directory at %d and the descriptor at %d overlap", f.directory.at, h.descriptor.at)
	}
	h.directory, h.redundant, h.unclean = f.directory, f.redundant, h.unclean || f.unclean
	return h, nil
}

// isVMDKMarker says whether b is a marker of that type before so many sectors.
func isVMDKMarker(b []byte, sectors uint64, kind uint32) bool {
	return binary.LittleEndian.Uint64(b) == sectors && binary.LittleEndian.Uint32(b[8:]) == 0 && binary.LittleEndian.Uint32(b[12:]) == kind
}

func corruptVMDK(format string, args ...any) error { return corrupt("vmdk", format, args...) }

// readVMDKHeader reads the header of the extent whose file is where in blob, and
// the footer if it has one.
func readVMDKHeader(ctx context.Context, blob Ranged, where span) (vmdkHeader, error) {
	b := make([]byte, min(vmdkHeaderBytes, where.length))
	if _, err := readExactly(ctx, blob, b, where.at); err != nil {
		return vmdkHeader{}, fmt.Errorf("read the vmdk header: %w", err)
	}
	h, err := parseVMDKHeader(b, where.length)
	if err != nil || !h.atEnd {
		return h, err
	}
	b = make([]byte, min(vmdkFooterBytes, where.length))
	if _, err := readExactly(ctx, blob, b, where.at+where.length-int64(len(b))); err != nil {
		return h, fmt.Errorf("read the vmdk footer: %w", err)
	}
	return parseVMDKFooter(b, h, where.length)
}

// openVMDK opens a disk that is one sparse extent with its descriptor inside.
func openVMDK(ctx context.Context, file Ranged) (*Opened, error) {
	where := span{0, file.Size()}
	h, err := readVMDKHeader(ctx, file, where)
	if err != nil {
		return nil, err
	}
	warnings, err := describeVMDK(ctx, file, h)
	if err != nil {
		return nil, err
	}
	v := &vmdk{vmdkHeader: h, file: where, pages: newPageCache(file), inflates: new(sync.Pool)}
	return openMapped(Info{Format: "vmdk", VirtualSize: h.size, Warnings: warnings}, v, file, h.grain), nil
}

// describeVMDK reads the descriptor of a disk that is one sparse extent, which begins
// with h, and checks that it is no more than that.
func describeVMDK(ctx context.Context, file Ranged, h vmdkHeader) (warnings []string, err error) {
	if h.descriptor.length == 0 {
		return nil, fault.Terminal(fault.ExternalDataFile,
			errors.New("the vmdk image has no descriptor: it is one part of a disk in several files, convert the disk to one file (qemu-img convert -O qcow2), or give all of its files in one tar"))
	}
	b := make([]byte, h.descriptor.length)
	if _, err := readExactly(ctx, file, b, h.descriptor.at); err != nil {
		return nil, fmt.Errorf("read the vmdk descriptor: %w", err)
	}
	d, err := parseVMDKDescriptor(b)
	if err != nil {
		return nil, err
	}
	return d.inside(h)
}

// vmdk is the layout of a sparse extent.
type vmdk struct {
	vmdkHeader
	file     span       // of the blob: the extent's file
	start    int64      // in the disk: the extent's first byte
	pages    *pageCache // of the blob
	inflates *sync.Pool // of io.ReadCloser that is a zlib.Resetter
}

func (v *vmdk) compression() string { return "zlib" }

// walk is layout's. Segments are no longer than a grain, save for what has no
// grain table.
func (v *vmdk) walk(ctx context.Context, off, n int64, each func(segment)) error {
	perTable := v.grain * vmdkEntries
	off -= v.start // from here on in the extent
	for end := off + n; off < end; {
		next := min(off-off%perTable+perTable, end)
		table, at, err := v.table(ctx, off/perTable)
		switch {
		case err != nil:
			return err
		case table == nil:
			each(segment{start: v.start + off, length: next - off, kind: extent.Hole})
		default:
			if err := v.walkTable(table, at, off, next, each); err != nil {
				return err
			}
		}
		off = next
	}
	return nil
}

// table reads a grain table, and tells where it lies; nil: there is none.
func (v *vmdk) table(ctx context.Context, number int64) (*[vmdkTableBytes]byte, int64, error) {
	at, err := v.tableAt(ctx, v.directory, number)
	if err != nil {
		return nil, 0, err
	}
	var table, again [vmdkTableBytes]byte
	if at != 0 {
		if err := v.read(ctx, table[:], at); err != nil {
			return nil, 0, fmt.Errorf("read a grain table: %w", err)
		}
	}
	// Whoever wrote the disk wrote its tables twice; where it was interrupted in
	// between nobody can tell which of them is right.
	if v.redundant.length > 0 {
		copyAt, err := v.tableAt(ctx, v.redundant, number)
		if err != nil {
			return nil, 0, err
		}
		if copyAt != 0 {
			if err := v.read(ctx, again[:], copyAt); err != nil {
				return nil, 0, fmt.Errorf("read the copy of a grain table: %w", err)
			}
		}
		if table != again {
			return nil, 0, corruptVMDK("the grain table for byte %d at %d and its copy at %d disagree: repair it with vmware-vdiskmanager -R", v.start+number*v.grain*vmdkEntries, at, copyAt)
		}
	}
	if at == 0 {
		return nil, 0, nil
	}
	return &table, at, nil
}

// tableAt reads a grain directory; 0: there is no such table.
func (v *vmdk) tableAt(ctx context.Context, directory span, number int64) (int64, error) {
	var b [4]byte
	if err := v.read(ctx, b[:], directory.at+number*4); err != nil {
		return 0, fmt.Errorf("read the grain directory: %w", err)
	}
	at := int64(binary.LittleEndian.Uint32(b[:])) * vmdkSector
	if at == 0 {
		return 0, nil
	}
	what := fmt.Sprintf("grain table for byte %d", v.start+number*v.grain*vmdkEntries)
	return at, v.inside(what, span{at, vmdkTableBytes})
}

// inside checks that a table or a grain lies in the file and on nothing that the
// header tells of.
func (v *vmdk) inside(what string, s span) error {
	switch {
	case s.at+s.length > v.file.length:
		return corruptVMDK("the %s has %d bytes at %d of a file of %d bytes: the file is cut short, upload it again", what, s.length, s.at, v.file.length)
	case s.at < vmdkHeaderBytes || s.overlaps(v.descriptor) || s.overlaps(v.directory) || s.overlaps(v.redundant):
		return corruptVMDK("the %s at %d overlaps the header, the descriptor at %d or the grain directories at %d and %d", what, s.at, v.descriptor.at, v.directory.at, v.redundant.at)
	}
	return nil
}

// read fills p from the extent's file at off, which the caller has checked.
func (v *vmdk) read(ctx context.Context, p []byte, off int64) error {
	for len(p) > 0 {
		page, err := v.pages.at(ctx, v.file.at+off)
		if err != nil {
			return err
		}
		n := copy(p, page)
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// walkTable is walk for [off, end) of the extent, which the table at at describes.
func (v *vmdk) walkTable(table *[vmdkTableBytes]byte, at, off, end int64, each func(segment)) error {
	entry := func(i int64) int64 { return int64(binary.LittleEndian.Uint32(table[4*i:])) }
	for i := off / v.grain % vmdkEntries; off < end; i++ {
		in := off % v.grain
		s := segment{start: v.start + off, length: min(v.grain-in, end-off)}
		host := entry(i) * vmdkSector
		switch {
		case host == 0:
			s.kind = extent.Hole
		case entry(i) == vmdkIsZeroed && v.flags&vmdkZeroed != 0:
			s.kind = extent.Zero
		case v.compressed():
			s.compressed, s.skip = true, in
			// Its length is told by its marker only. It ends before whatever comes
			// next in the file: the next grain's as a rule, or this table.
			most := min(vmdkSector+2*v.grain, v.file.length-host)
			if at > host {
				most = min(most, at-host)
			}
			for next := i + 1; next < vmdkEntries; next++ {
				if e := entry(next); e != 0 && (e != vmdkIsZeroed || v.flags&vmdkZeroed == 0) {
					if e *= vmdkSector; e > host {
						most = min(most, e-host)
					}
					break
				}
			}
			s.host, s.hostLen = host, most
			// The marker at least is in the file, and on nothing else.
			if err := v.grainInside(s.start, span{host, vmdkMarkerBytes}, at); err != nil {
				return err
			}
		default:
			s.host, s.hostLen = host+in, s.length
			// Of the last grain there may be no more than the disk has.
			if err := v.grainInside(s.start, span{host, min(v.grain, v.size-(off-in))}, at); err != nil {
				return err
			}
		}
		s.host += v.file.at
		each(s)
		off += s.length
	}
	return nil
}

// grainInside checks that a grain lies in the file, and not on its table at at.
func (v *vmdk) grainInside(start int64, s span, at int64) error {
	what := fmt.Sprintf("grain for byte %d", start)
	if s.overlaps(span{at, vmdkTableBytes}) {
		return corruptVMDK("the %s at %d overlaps its grain table at %d", what, s.at, at)
	}
	return v.inside(what, s)
}

// honest is boastful's: the file has room for all tables of the directory.
func (v *vmdk) honest(ctx context.Context) error {
	var tables int64
	for number := range v.directory.length / 4 {
		at, err := v.tableAt(ctx, v.directory, number)
		if err != nil {
			return err
		}
		if at == 0 {
			continue
		}
		if tables++; tables*vmdkTableBytes > v.file.length {
			return corruptVMDK("the grain directory has more than %d tables of %d bytes in a file of %d bytes", tables-1, vmdkTableBytes, v.file.length)
		}
	}
	return nil
}

// decode is packed's. Before the data of a grain lie the sector that it begins
// with and the data's length ("Grain Marker").
func (v *vmdk) decode(s segment, out, in []byte) error {
	if len(in) < vmdkMarkerBytes {
		return io.ErrUnexpectedEOF
	}
	sector, length := binary.LittleEndian.Uint64(in), int64(binary.LittleEndian.Uint32(in[8:]))
	if want := uint64(s.start-s.skip-v.start) / vmdkSector; sector != want {
		return fmt.Errorf("the grain's marker says that it is for sector %d, not %d", sector, want)
	}
	if in = in[vmdkMarkerBytes:]; length == 0 || length > int64(len(in)) {
		return fmt.Errorf("the grain's marker says that it has %d bytes, and there is room for %d", length, len(in))
	}
	in = in[:length]
	if whole := s.skip == 0 && int64(len(out)) == v.grain; whole && native.InflateZlib(out, in) {
		return nil
	}
	r, _ := v.inflates.Get().(io.Reader)
	if r == nil {
		var err error
		if r, err = zlib.NewReader(bytes.NewReader(in)); err != nil {
			return unexpected(err)
		}
	} else if err := r.(zlib.Resetter).Reset(bytes.NewReader(in), nil); err != nil {
		v.inflates.Put(r)
		return unexpected(err)
	}
	defer v.inflates.Put(r)
	if _, err := io.CopyN(io.Discard, r, s.skip); err != nil {
		return unexpected(err)
	}
	if _, err := io.ReadFull(r, out); err != nil {
		return unexpected(err)
	}
	// To the end, where the checksum is. The last grain may end with the disk.
	rest := v.grain - s.skip - int64(len(out))
	switch n, err := io.CopyN(io.Discard, r, rest+1); {
	case n > rest:
		return fmt.Errorf("it has more than the %d bytes of a grain", v.grain)
	case !errors.Is(err, io.EOF):
		return err
	}
	return nil
}
