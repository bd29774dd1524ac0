package image

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/native"
)

// The layout is that of QEMU's docs/interop/qcow2.rst; section names below are its.

const (
	qcow2Version2Length = 72
	qcow2Version3Length = 104

	// qcow2HeaderBytes of the file are searched for the header and its extensions.
	qcow2HeaderBytes = 64 << 10
	// qcow2MaxL1Bytes is also QEMU's limit for the first level table.
	qcow2MaxL1Bytes = 32 << 20

	// Incompatible feature bits.
	qcow2Dirty        = 1 << 0
	qcow2Corrupt      = 1 << 1
	qcow2DataFile     = 1 << 2
	qcow2Compression  = 1 << 3
	qcow2ExtendedL2   = 1 << 4
	qcow2KnownFeature = qcow2Dirty | qcow2Corrupt | qcow2DataFile | qcow2Compression | qcow2ExtendedL2

	// Header extensions.
	qcow2ExtFeatureNames = 0x6803f857
	qcow2ExtDataFile     = 0x44415441

	// Table entries.
	qcow2OffsetMask = 0x00fffffffffffe00
	qcow2Compressed = 1 << 62
	qcow2ReadsZero  = 1 << 0
	qcow2Subs       = 32 // subclusters of a cluster with an extended L2 entry

	// qcow2Window is the largest zstd window: more than that no cluster can use.
	qcow2Window = 2 << 20
)

// qcow2Header is what the reader needs of a header, checked against the file's size.
type qcow2Header struct {
	version     uint32
	clusterBits uint
	size        int64 // of the disk
	l1Offset    int64
	l1Entries   int64
	zstd        bool
	extended    bool
	warnings    []string
}

// parseQcow2 checks the header in b, the first bytes of a file of fileSize.
// What can't be read is refused by its name.
func parseQcow2(b []byte, fileSize int64) (qcow2Header, error) {
	var h qcow2Header
	corrupt := func(format string, args ...any) (qcow2Header, error) {
		return qcow2Header{}, corruptQcow2(format, args...)
	}
	if len(b) < qcow2Version2Length || string(b[:4]) != "QFI\xfb" {
		return corrupt("the header has %d bytes, %d are the least", len(b), qcow2Version2Length)
	}
	u32 := func(at int) uint32 { return binary.BigEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.BigEndian.Uint64(b[at:]) }

	h.version = u32(4)
	if h.version != 2 && h.version != 3 {
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("qcow2 version %d is not supported (2 and 3 are): convert the image with qemu-img convert -O qcow2", h.version))
	}
	if bits := u32(20); bits < 9 || bits > 21 {
		return corrupt("cluster bits are %d, 9 to 21 are possible", bits)
	}
	h.clusterBits = uint(u32(20))
	cluster := int64(1) << h.clusterBits

	length := int64(qcow2Version2Length)
	var incompatible uint64
	if h.version == 3 {
		if len(b) < qcow2Version3Length {
			return corrupt("the header has %d bytes, %d are the least in version 3", len(b), qcow2Version3Length)
		}
		incompatible = u64(72)
		length = int64(u32(100))
		if length < qcow2Version3Length || length > cluster {
			return corrupt("the header's length is %d, %d to %d are possible", length, qcow2Version3Length, cluster)
		}
		if order := u32(96); order > 6 {
			return corrupt("the refcount order is %d, 6 is the most", order)
		}
	}
	nameOffset, nameLength := u64(8), u32(16)
	ext := qcow2Extensions(b, length, min(cluster, int64(len(b))))

	// What points out of the image comes first: nothing may read on.
	if nameOffset != 0 {
		name := "a name outside of the header"
		if nameLength <= 1023 && nameOffset <= uint64(len(b)) && uint64(nameLength) <= uint64(len(b))-nameOffset {
			name = quote(string(b[nameOffset : nameOffset+uint64(nameLength)]))
		}
		return h, fault.Terminal(fault.BackingFile,
			fmt.Errorf("the qcow2 image has the backing file %s, without which it is not whole: flatten it (qemu-img convert -O qcow2, or qemu-img rebase -b \"\")", name))
	}
	if incompatible&qcow2DataFile != 0 || ext.dataFile != nil {
		return h, fault.Terminal(fault.ExternalDataFile,
			fmt.Errorf("the qcow2 image keeps its data in the external file %s: convert it to one file (qemu-img convert -O qcow2)", quote(string(ext.dataFile))))
	}
	if method := u32(32); method != 0 {
		kind := map[uint32]string{1: "AES", 2: "LUKS"}[method]
		if kind == "" {
			kind = fmt.Sprintf("method %d", method)
		}
		return h, fault.Terminal(fault.EncryptedImage, fmt.Errorf("the qcow2 image is encrypted (%s): decrypt it with qemu-img convert before the import", kind))
	}
	if unknown := incompatible &^ qcow2KnownFeature; unknown != 0 {
		var names []string
		for bit := range 64 {
			if unknown&(1<<bit) == 0 {
				continue
			}
			name := fmt.Sprintf("bit %d", bit)
			if known := ext.features[uint8(bit)]; known != "" {
				name += " " + quote(known)
			}
			names = append(names, name)
		}
		return h, fault.Terminal(fault.FormatNotSupported,
			fmt.Errorf("the qcow2 image needs features that are not supported (%s): convert it with qemu-img convert -O qcow2", strings.Join(names, ", ")))
	}
	if incompatible&qcow2Corrupt != 0 {
		return corrupt("it is marked as corrupt: repair it with qemu-img check -r all")
	}
	if incompatible&qcow2Dirty != 0 {
		h.warnings = append(h.warnings, "the qcow2 image was not closed cleanly (dirty bit): its reference counts may be wrong, its data are read as they are")
	}
	if n := u32(60); n > 0 {
		h.warnings = append(h.warnings, fmt.Sprintf("the qcow2 image has %d internal snapshots: only its current state is imported", n))
	}

	var method byte
	if length > qcow2Version3Length && len(b) > qcow2Version3Length {
		method = b[qcow2Version3Length]
	}
	if (method != 0) != (incompatible&qcow2Compression != 0) {
		return corrupt("compression type %d contradicts the incompatible features %#x", method, incompatible)
	}
	if method > 1 {
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the qcow2 image's compression type %d is not supported (zlib and zstd are): convert it with qemu-img convert -O qcow2", method))
	}
	h.zstd = method == 1
	if h.extended = incompatible&qcow2ExtendedL2 != 0; h.extended && h.clusterBits < 14 {
		return corrupt("extended L2 entries need clusters of at least 16384 bytes, it has %d", cluster)
	}

	size := u64(24)
	if size > 1<<62 {
		return corrupt("the disk's size is %d bytes", size)
	}
	h.size = int64(size)
	perL1 := cluster * h.l2Entries()
	need := (h.size + perL1 - 1) / perL1
	h.l1Entries = int64(u32(36))
	if h.l1Entries < need || h.l1Entries*8 > qcow2MaxL1Bytes {
		return corrupt("the L1 table has %d entries: a disk of %d bytes needs %d, %d are the most", h.l1Entries, size, need, qcow2MaxL1Bytes/8)
	}
	for _, table := range []struct {
		name   string
		at     int
		length int64
	}{{"L1 table", 40, h.l1Entries * 8}, {"refcount table", 48, int64(u32(56)) * cluster}} {
		off := u64(table.at)
		if table.length == 0 {
			continue
		}
		if off == 0 || off%uint64(cluster) != 0 || off > uint64(fileSize) || table.length > fileSize-int64(off) {
			return corrupt("the %s has %d bytes at %d of a file of %d bytes with clusters of %d: the file may be cut short, upload it again", table.name, table.length, off, fileSize, cluster)
		}
	}
	h.l1Offset = int64(u64(40))
	return h, nil
}

// l2Entries is the number of clusters that one L2 table describes.
func (h qcow2Header) l2Entries() int64 { return int64(1) << h.clusterBits / h.entryBytes() }

// entryBytes is the length of an L2 entry.
func (h qcow2Header) entryBytes() int64 {
	if h.extended {
		return 16
	}
	return 8
}

type qcow2Ext struct {
	dataFile []byte           // nil: none
	features map[uint8]string // names of incompatible feature bits
}

// qcow2Extensions reads the header extensions in b[from:to]; it stops at what
// makes no sense, since none of them is needed.
func qcow2Extensions(b []byte, from, to int64) qcow2Ext {
	ext := qcow2Ext{features: map[uint8]string{}}
	for at := from; to-at >= 8; {
		kind, length := binary.BigEndian.Uint32(b[at:]), int64(binary.BigEndian.Uint32(b[at+4:]))
		if at += 8; kind == 0 || length > to-at {
			return ext
		}
		data := b[at : at+length]
		switch kind {
		case qcow2ExtDataFile:
			ext.dataFile = append([]byte{}, data...)
		case qcow2ExtFeatureNames:
			for ; len(data) >= 48; data = data[48:] {
				if data[0] == 0 { // incompatible
					ext.features[data[1]] = strings.TrimRight(string(data[2:48]), "\x00")
				}
			}
		}
		at += (length + 7) &^ 7
	}
	return ext
}

func corruptQcow2(format string, args ...any) error {
	return corrupt("qcow2", format, args...)
}

// qcow2 is the layout of an open image.
type qcow2 struct {
	qcow2Header
	file  Ranged
	pages *pageCache

	inflates sync.Pool // of io.ReadCloser that is a flate.Resetter
	zstds    sync.Pool // of *zstd.Decoder
	// odd has room for each reader of a zstd cluster that needs a window of its own.
	odd chan struct{}
}

// qcow2Odd of them read at once.
const qcow2Odd = 2

func openQcow2(ctx context.Context, file Ranged) (*Opened, error) {
	b := make([]byte, min(qcow2HeaderBytes, file.Size()))
	if _, err := readUpTo(ctx, file, b, 0); err != nil {
		return nil, fmt.Errorf("read the qcow2 header: %w", err)
	}
	h, err := parseQcow2(b, file.Size())
	if err != nil {
		return nil, err
	}
	q := &qcow2{qcow2Header: h, file: file, pages: newPageCache(file), odd: make(chan struct{}, qcow2Odd)}
	return openMapped(Info{Format: "qcow2", VirtualSize: h.size, Warnings: h.warnings}, q, file, 1<<h.clusterBits), nil
}

func (q *qcow2) compression() string {
	if q.zstd {
		return "zstd"
	}
	return "zlib"
}

// walk is layout's. Segments are no longer than a cluster, save for what has no
// L2 table.
func (q *qcow2) walk(ctx context.Context, off, n int64, each func(segment)) error {
	span := q.l2Entries() << q.clusterBits
	for end := off + n; off < end; {
		next := end
		if left := span - off%span; left < end-off {
			next = off + left
		}
		l1, err := q.pages.uint64(ctx, q.l1Offset+off/span*8)
		if err != nil {
			return fmt.Errorf("read the L1 table: %w", err)
		}
		table := int64(l1 & qcow2OffsetMask)
		if table == 0 {
			each(segment{start: off, length: next - off, kind: extent.Hole})
			off = next
			continue
		}
		if cluster := int64(1) << q.clusterBits; table%cluster != 0 || table > q.file.Size()-cluster {
			return corruptQcow2("the L2 table for byte %d lies at %d of a file of %d bytes with clusters of %d", off, table, q.file.Size(), cluster)
		}
		if err := q.walkTable(ctx, table, off, next, each); err != nil {
			return err
		}
		off = next
	}
	return nil
}

// walkTable is walk for [off, end), which one L2 table describes.
func (q *qcow2) walkTable(ctx context.Context, table, off, end int64, each func(segment)) error {
	size := q.entryBytes()
	mask := int64(1)<<q.clusterBits - 1
	for off < end {
		at := table + off>>q.clusterBits%q.l2Entries()*size
		page, err := q.pages.at(ctx, at)
		if err != nil {
			return fmt.Errorf("read an L2 table: %w", err)
		}
		for ; off < end && int64(len(page)) >= size; page = page[size:] {
			next := min(off&^mask+mask+1, end)
			entry, bitmap := binary.BigEndian.Uint64(page), uint64(0)
			if q.extended {
				bitmap = binary.BigEndian.Uint64(page[8:])
			}
			if err := q.cluster(entry, bitmap, off, next, each); err != nil {
				return err
			}
			off = next
			if (off>>q.clusterBits)%q.l2Entries() == 0 {
				break
			}
		}
	}
	return nil
}

// cluster calls each for [off, end), a part of one cluster, as its entry says.
func (q *qcow2) cluster(entry, bitmap uint64, off, end int64, each func(segment)) error {
	size := int64(1) << q.clusterBits
	in := off & (size - 1)
	s := segment{start: off, length: end - off}
	if entry&qcow2Compressed != 0 {
		// Compressed Clusters Descriptor: the offset in the low bits, then the
		// number of further 512-byte sectors that the data touch.
		bits := 62 - (q.clusterBits - 8)
		s.host = int64(entry & (1<<bits - 1))
		sectors := int64(entry >> bits & (1<<(q.clusterBits-8) - 1))
		if s.host >= q.file.Size() {
			return corruptQcow2("the compressed cluster for byte %d lies at %d of a file of %d bytes", off, s.host, q.file.Size())
		}
		s.hostLen = min((sectors+1)*512-s.host&511, q.file.Size()-s.host)
		s.kind, s.compressed, s.skip = extent.Data, true, in
		each(s)
		return nil
	}
	host := int64(entry & qcow2OffsetMask)
	if host&(size-1) != 0 {
		return corruptQcow2("the cluster for byte %d lies at %d, no multiple of %d", off, host, size)
	}
	if q.extended {
		return q.subclusters(host, bitmap, off, end, each)
	}
	switch {
	case entry&qcow2ReadsZero != 0 && q.version < 3:
		return corruptQcow2("the cluster for byte %d is marked as zeros, which version 2 does not know", off)
	case entry&qcow2ReadsZero != 0:
		s.kind = extent.Zero
	case host == 0:
		s.kind = extent.Hole
	default:
		s.kind = extent.Data
		s.host, s.hostLen = host+in, s.length
		if s.hostEnd() > q.file.Size() {
			return q.cutShort(s)
		}
	}
	each(s)
	return nil
}

// subclusters is cluster with an extended L2 entry: a bit of its own says of
// each subcluster whether it is allocated, and another whether it reads as zeros.
func (q *qcow2) subclusters(host int64, bitmap uint64, off, end int64, each func(segment)) error {
	allocated, reads := uint32(bitmap), uint32(bitmap>>32)
	if allocated&reads != 0 || host == 0 && allocated != 0 {
		return corruptQcow2("the cluster for byte %d at %d has the subcluster bitmap %#x", off, host, bitmap)
	}
	size := int64(1) << q.clusterBits
	sub := size / qcow2Subs
	for off < end {
		in := off & (size - 1)
		bit := uint32(1) << (in / sub)
		s := segment{start: off, length: min(sub-in%sub, end-off), kind: extent.Hole}
		switch {
		case allocated&bit != 0:
			s.kind = extent.Data
			s.host, s.hostLen = host+in, s.length
			if s.hostEnd() > q.file.Size() {
				return q.cutShort(s)
			}
		case reads&bit != 0:
			s.kind = extent.Zero
		}
		each(s)
		off = s.end()
	}
	return nil
}

func (q *qcow2) cutShort(s segment) error {
	return corruptQcow2("the data for byte %d lie at %d to %d of a file of %d bytes: the file is cut short, upload it again", s.start, s.host, s.hostEnd(), q.file.Size())
}

// honest is boastful's: no two parts of the disk share an L2 table, as no writer
// has them do. It takes up to qcow2MaxL1Bytes of memory.
func (q *qcow2) honest(ctx context.Context) error {
	span := q.l2Entries() << q.clusterBits
	var tables []uint64
	for off := int64(0); off < q.size; off += span {
		l1, err := q.pages.uint64(ctx, q.l1Offset+off/span*8)
		if err != nil {
			return fmt.Errorf("read the L1 table: %w", err)
		}
		if table := l1 & qcow2OffsetMask; table != 0 {
			tables = append(tables, table)
		}
	}
	slices.Sort(tables)
	for i := 1; i < len(tables); i++ {
		if tables[i] == tables[i-1] {
			return corruptQcow2("two parts of the disk have their L2 table at %d", tables[i])
		}
	}
	return nil
}

// decode is packed's. What lies behind the compressed data in in, up to the end
// of a sector, is another cluster's.
func (q *qcow2) decode(s segment, out, in []byte) error {
	whole := s.skip == 0 && int64(len(out)) == 1<<q.clusterBits
	if whole && !q.zstd && native.Inflate(out, in) {
		return nil
	}
	var r io.Reader
	if q.zstd {
		d, _ := q.zstds.Get().(*zstd.Decoder)
		if d == nil {
			var err error
			if d, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(qcow2Window), zstd.WithDecoderMaxMemory(qcow2Window)); err != nil {
				return err
			}
		}
		defer q.zstds.Put(d)
		if whole {
			// At once, without a window of its own, and no byte behind out, where another cluster
			// is. What is odd about the frame the reader below says.
			if got, err := d.DecodeAll(in[:zstdFrameBytes(in)], out[:0:len(out)]); err == nil && len(got) == len(out) && &got[0] == &out[0] {
				return nil
			}
		}
		q.odd <- struct{}{}
		defer func() { <-q.odd }()
		// Reset decodes a bytes.Buffer whole, up to any size; this is none.
		if err := d.Reset(bytes.NewReader(in)); err != nil {
			return err
		}
		defer func() { _ = d.Reset(nil) }() // else a stream that is not read to its end keeps what DecodeAll waits for
		r = d
	} else {
		d, _ := q.inflates.Get().(io.Reader)
		if d == nil {
			d = flate.NewReader(nil)
		}
		defer q.inflates.Put(d)
		if err := d.(flate.Resetter).Reset(bytes.NewReader(in), nil); err != nil {
			return err
		}
		r = d
	}
	if s.skip > 0 {
		if _, err := io.CopyN(io.Discard, r, s.skip); err != nil {
			return unexpected(err)
		}
	}
	_, err := io.ReadFull(r, out)
	return unexpected(err)
}

// unexpected makes an error of an end that came too early.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
