package image

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"slices"
	"sort"
	"sync"

	"github.com/longshore-io/longshore/nodeplugin/extent"
)

const (
	// vmdkForwardTables are the most grain tables of a disk that is read while it passes:
	// 8 TiB in grains of 64 KiB. Eight bytes of each are kept, or a little more.
	vmdkForwardTables = 1 << 18

	// Types of markers that come before what they mark.
	vmdkTableMarker     = 1
	vmdkDirectoryMarker = 2
)

// vmdkForward is the layout of a stream-optimized extent that is read while it passes
// ("Stream-Optimized Compressed Sparse Extents" in VMware's "Virtual Disk Format 5.0").
//
// Its grains come in the order of the disk, each behind a marker that tells its sector
// and length. What the tables say is compared with that: VMware writes each behind its
// grains, their directory behind all of them and a footer at the end; QEMU writes them
// all at the beginning, and the end is the file's.
type vmdkForward struct {
	vmdkHeader
	grains *vmdk // decodes them
	tape   *tape
	seed   maphash.Seed

	mu     sync.Mutex
	next   int64     // in the file: the next marker
	known  int64     // of the disk: grains up to here have come
	recent []segment // whole grains that can still be read, in order
	oldest int64     // of the disk: grains before are no longer in recent
	ended  bool      // the last of it has come, and all of it agrees
	table  [vmdkTableBytes]byte
	number int64 // of the table that table is to be
	// Sums of the grain tables by their numbers, 0 without grains: as the grains have it,
	// and as the tables at the beginning have it; nil: they come behind.
	seen, told []uint64
	came       []vmdkCame // tables behind their grains, in order
	// directories that came, by their places in the file.
	directories []int64
}

// vmdkCame is a grain table that came by.
type vmdkCame struct {
	at  int64 // in the file
	sum uint64
}

// openVMDKForward opens a disk of one sparse extent that comes once. What its layout
// does not permit to be read so is the fault NeedsSpool.
func openVMDKForward(ctx context.Context, t *tape) (*Opened, error) {
	b := make([]byte, vmdkHeaderBytes)
	if _, err := readExactly(ctx, t, b, 0); err != nil {
		return nil, fmt.Errorf("read the vmdk header: %w", err)
	}
	h, err := parseVMDKHeader(b, t.Size())
	if err != nil {
		return nil, err
	}
	warnings, err := describeVMDK(ctx, t, h)
	if err != nil {
		return nil, err
	}
	tables := h.tables()
	if !h.compressed() || tables > vmdkForwardTables {
		return nil, needsSpool(fmt.Errorf("a vmdk image that is not stream-optimized, or of more than %d grain tables, has tables far from the data that they describe", vmdkForwardTables))
	}
	v := &vmdkForward{
		vmdkHeader: h, grains: &vmdk{vmdkHeader: h, inflates: new(sync.Pool)}, tape: t, seed: maphash.MakeSeed(),
		next: h.overhead, seen: make([]uint64, tables),
	}
	switch {
	case !h.atEnd:
		if err := v.readTables(ctx); err != nil {
			return nil, err
		}
	case v.next < h.descriptor.at+h.descriptor.length || v.next > tapeLeap:
		return nil, needsSpool(fmt.Errorf("the header does not tell where its grains begin, but byte %d", v.next))
	}
	opened := openMapped(Info{Format: "vmdk", VirtualSize: h.size, Warnings: warnings}, v, t, h.grain)
	opened.end = v.end
	return opened, nil
}

func (v *vmdkForward) compression() string { return v.grains.compression() }

// decode is packed's.
func (v *vmdkForward) decode(s segment, out, in []byte) error { return v.grains.decode(s, out, in) }

// readTables sums up the tables before the grains, and finds the first grain. Grains that
// do not come in order are told here already.
func (v *vmdkForward) readTables(ctx context.Context) error {
	var sums [2][]uint64
	for i, d := range inFileOrder(v.directory, v.redundant) {
		directory := make([]byte, d.length)
		if err := v.read(ctx, directory, d.at); err != nil {
			return fmt.Errorf("read the grain directory: %w", err)
		}
		sums[i] = make([]uint64, len(v.seen))
		var table [vmdkTableBytes]byte
		var last uint32 // grain
		for n := range sums[i] {
			at := int64(binary.LittleEndian.Uint32(directory[4*n:])) * vmdkSector
			if at == 0 {
				continue
			}
			if err := v.read(ctx, table[:], at); err != nil {
				return fmt.Errorf("read a grain table: %w", err)
			}
			sums[i][n] = v.sum(&table)
			for j := 0; j < vmdkTableBytes; j += 4 {
				grain := binary.LittleEndian.Uint32(table[j:])
				switch {
				case grain == 0:
				case grain <= last:
					return needsSpool(fmt.Errorf("its grains are not in the order of the disk"))
				case last == 0:
					v.next = int64(grain) * vmdkSector
					fallthrough
				default:
					last = grain
				}
			}
		}
		v.ended = last == 0
		v.told = sums[0]
	}
	if v.redundant.length > 0 && !slices.Equal(sums[0], sums[1]) {
		return corruptVMDK("its grain tables and their copies disagree: repair it with vmware-vdiskmanager -R")
	}
	return nil
}

// inFileOrder are the spans that are not empty.
func inFileOrder(a, b span) []span {
	switch {
	case b.length == 0:
		return []span{a}
	case b.at < a.at:
		return []span{b, a}
	}
	return []span{a, b}
}

// sum is that of a grain table, 0 without grains. Grains that are marked as zeros, and
// that do not come, become as if they had never been written.
func (v *vmdkForward) sum(table *[vmdkTableBytes]byte) uint64 {
	empty := true
	for i := 0; i < vmdkTableBytes; i += 4 {
		switch e := binary.LittleEndian.Uint32(table[i:]); {
		case e == vmdkIsZeroed && v.flags&vmdkZeroed != 0:
			table[i] = 0
		case e != 0:
			empty = false
		}
	}
	if empty {
		return 0
	}
	return maphash.Bytes(v.seed, table[:]) | 1
}

// read fills p with the file's bytes at off, which must be there.
func (v *vmdkForward) read(ctx context.Context, p []byte, off int64) error {
	n, err := v.tape.ReadAtContext(ctx, p, off)
	if n < len(p) && v.tape.ends(off+int64(n)) {
		return corruptVMDK("it ends at byte %d, where more has to follow: the file is cut short, upload it again", off+int64(n))
	}
	return err
}

// walk is layout's.
func (v *vmdkForward) walk(ctx context.Context, off, n int64, each func(segment)) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	end := off + n
	const most = tapeBytes / 2
	for v.known < end && !v.ended && n <= most {
		if err := v.step(ctx); err != nil {
			return err
		}
	}
	if off < v.oldest || n > most {
		return needsSpool(fmt.Errorf("%d bytes of the disk at %d are wanted when it has come to %d", n, off, v.known))
	}
	i := sort.Search(len(v.recent), func(i int) bool { return v.recent[i].end() > off })
	for ; off < end; i++ {
		s := segment{start: end}
		if i < len(v.recent) && v.recent[i].start < end {
			s = v.recent[i]
		}
		if s.start > off {
			each(segment{start: off, length: s.start - off, kind: extent.Hole})
			off = s.start
		}
		if s.length > 0 {
			s.skip, s.start = off-s.start, off
			s.length = min(s.length-s.skip, end-off)
			each(s)
			off += s.length
		}
	}
	return nil
}

// step reads the next marker and, unless it is a grain's, what it marks.
func (v *vmdkForward) step(ctx context.Context) error {
	if v.told != nil {
		if ended, err := v.tape.endsBy(ctx, v.next); err != nil {
			return err
		} else if ended {
			return v.finish()
		}
	}
	var b [16]byte
	if err := v.read(ctx, b[:], v.next); err != nil {
		return err
	}
	value, length, kind := binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:])
	switch {
	case length > 0:
		return v.grainCame(ctx, value, int64(length))
	case v.told != nil && value == 0 && kind == vmdkEndOfStream:
		if err := v.finish(); err != nil {
			return needsSpool(fmt.Errorf("its grains have gaps: %w", err))
		}
		return nil
	case v.told != nil:
		return needsSpool(fmt.Errorf("it has tables at its beginning, and a marker of the type %d at %d", kind, v.next))
	case kind == vmdkTableMarker:
		return v.tableCame(ctx, value)
	case kind == vmdkDirectoryMarker:
		return v.directoryCame(ctx, value)
	case kind == vmdkFooterMarker:
		return v.footerCame(ctx)
	case kind == vmdkEndOfStream:
		return corruptVMDK("its end-of-stream marker comes at %d, before a footer: the file is cut short, upload it again", v.next)
	}
	return corruptVMDK("it has a marker of the type %d at %d", kind, v.next)
}

// grainCame takes down the grain at next, which has length compressed bytes.
func (v *vmdkForward) grainCame(ctx context.Context, sector uint64, length int64) error {
	perGrain, most := uint64(v.grain/vmdkSector), vmdkSector+2*v.grain-vmdkMarkerBytes
	switch {
	case sector >= uint64(v.size/vmdkSector) || sector%perGrain != 0:
		return corruptVMDK("the grain at %d is for sector %d of a disk of %d, in grains of %d", v.next, sector, v.size/vmdkSector, perGrain)
	case length > most:
		return corruptVMDK("the marker of the grain at %d says that it has %d bytes, %d are the most", v.next, length, most)
	case v.next/vmdkSector > 1<<32-1:
		return corruptVMDK("the grain at %d lies farther than a grain table can tell", v.next)
	case len(v.directories) > 0:
		return corruptVMDK("the grain at %d comes after the grain directory", v.next)
	}
	start := int64(sector) * vmdkSector
	if start < v.known {
		return needsSpool(fmt.Errorf("the grain for byte %d comes when the disk has come to byte %d", start, v.known))
	}
	end := v.next + vmdkMarkerBytes + length
	if err := v.read(ctx, make([]byte, 1), end-1); err != nil {
		return err
	}
	perTable := v.grain * vmdkEntries
	if number := start / perTable; number != v.number {
		v.tableIsWhole()
		v.number = number
	}
	binary.LittleEndian.PutUint32(v.table[start%perTable/v.grain*4:], uint32(v.next/vmdkSector))
	gone := v.tape.gone()
	for len(v.recent) > 0 && v.recent[0].host < gone {
		v.oldest = v.recent[0].end()
		v.recent = v.recent[1:]
	}
	v.recent = append(v.recent, segment{start: start, length: min(v.grain, v.size-start), compressed: true, host: v.next, hostLen: end - v.next})
	v.known = start + v.grain
	v.next = (end + vmdkSector - 1) / vmdkSector * vmdkSector
	return nil
}

// tableIsWhole keeps of the table at hand what it is compared by.
func (v *vmdkForward) tableIsWhole() {
	v.seen[v.number] = v.sum(&v.table)
	clear(v.table[:])
}

// marked is how many bytes a marker says that come behind it, of which there must be
// length.
func (v *vmdkForward) marked(what string, sectors uint64, length int64) (int64, error) {
	if need := uint64(length+vmdkSector-1) / vmdkSector; sectors != need {
		return 0, corruptVMDK("the marker of the %s at %d says that it has %d sectors, want %d", what, v.next, sectors, need)
	}
	return int64(sectors) * vmdkSector, nil
}

func (v *vmdkForward) tableCame(ctx context.Context, sectors uint64) error {
	n, err := v.marked("grain table", sectors, vmdkTableBytes)
	if err != nil {
		return err
	}
	if len(v.came) == 2*len(v.seen) { // twice: there may be a copy of each
		return corruptVMDK("it has more than %d grain tables", len(v.came))
	}
	var table [vmdkTableBytes]byte
	at := v.next + vmdkSector
	if err := v.read(ctx, table[:], at); err != nil {
		return fmt.Errorf("read a grain table: %w", err)
	}
	v.came = append(v.came, vmdkCame{at, v.sum(&table)})
	v.next = at + n
	return nil
}

// directoryCame compares the tables that a directory refers to with the grains.
func (v *vmdkForward) directoryCame(ctx context.Context, sectors uint64) error {
	length := int64(len(v.seen)) * 4
	n, err := v.marked("grain directory", sectors, length)
	if err != nil {
		return err
	}
	if len(v.directories) == 2 {
		return corruptVMDK("it has more than two grain directories")
	}
	directory := make([]byte, length)
	at := v.next + vmdkSector
	if err := v.read(ctx, directory, at); err != nil {
		return fmt.Errorf("read the grain directory: %w", err)
	}
	if len(v.directories) == 0 { // else no grain has come since
		v.tableIsWhole()
	}
	for number, want := range v.seen {
		got := uint64(0)
		if at := int64(binary.LittleEndian.Uint32(directory[4*number:])) * vmdkSector; at != 0 {
			i, ok := slices.BinarySearchFunc(v.came, at, func(c vmdkCame, at int64) int { return int(c.at - at) })
			if !ok {
				return corruptVMDK("the grain table for byte %d is said to lie at %d, where none has come", int64(number)*v.grain*vmdkEntries, at)
			}
			got = v.came[i].sum
		}
		if got != want {
			return v.otherwise(number)
		}
	}
	v.directories = append(v.directories, at)
	v.next = at + n
	return nil
}

func (v *vmdkForward) otherwise(number int) error {
	return corruptVMDK("the grain table for byte %d says otherwise than the grains that have come: export the disk again", int64(number)*v.grain*vmdkEntries)
}

// footerCame reads the end of the file.
func (v *vmdkForward) footerCame(ctx context.Context) error {
	var b [vmdkFooterBytes]byte
	if err := v.read(ctx, b[:], v.next); err != nil {
		return fmt.Errorf("read the vmdk footer: %w", err)
	}
	end := v.next + vmdkFooterBytes
	h, err := parseVMDKFooter(b[:], v.vmdkHeader, end)
	if err != nil {
		return err
	}
	for _, d := range inFileOrder(h.directory, h.redundant) {
		if !slices.Contains(v.directories, d.at) {
			return corruptVMDK("its footer says that a grain directory lies at %d, where none has come", d.at)
		}
	}
	if ended, err := v.tape.endsBy(ctx, end); err != nil {
		return err
	} else if !ended {
		return corruptVMDK("it goes on behind its end-of-stream marker at %d", end-vmdkSector)
	}
	v.ended = true
	return nil
}

// finish compares the tables at the beginning with the grains, of which the last has come.
func (v *vmdkForward) finish() error {
	v.tableIsWhole()
	for number, want := range v.seen {
		if v.told[number] != want {
			return v.otherwise(number)
		}
	}
	v.ended = true
	return nil
}

// end reads what is behind the last grain that somebody wanted.
func (v *vmdkForward) end(ctx context.Context) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for !v.ended {
		if err := v.step(ctx); err != nil {
			return err
		}
	}
	return nil
}
