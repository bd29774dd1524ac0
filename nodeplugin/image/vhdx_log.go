package image

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// The log of a vhdx image ([MS-VHDX] 2.3) is a ring of sectors with entries of
// updates that may not have reached their places in the file.

const (
	vhdxLogSector = 4 << 10
	// vhdxMaxLog bounds the memory of a replay. Hyper-V and QEMU make logs of 1 MiB.
	vhdxMaxLog = 8 << 20
	// vhdxLogTrials bounds the time that is spent on finding the active sequence,
	// as a multiple of the log's length: entries do not lie within each other.
	vhdxLogTrials = 16
)

// vhdxLog is the log's bytes and what is known of entries in it.
type vhdxLog struct {
	b       []byte
	guid    [16]byte
	sectors int
	known   map[int]*vhdxLogEntry // by sector; nil: none there
	summed  int                   // bytes of which the checksum was taken
}

// vhdxLogEntry is a valid entry (2.3.1).
type vhdxLogEntry struct {
	at, sectors int // in the ring
	sequence    uint64
	tail        int // the sector of the oldest entry that was not applied when this one was written
	count       int // descriptors
	flushed     uint64
	last        uint64
}

// sector is the one with that number, counted around the ring.
func (l *vhdxLog) sector(n int) []byte {
	return l.b[n%l.sectors*vhdxLogSector:][:vhdxLogSector]
}

// descriptor i of the entry at that sector; they follow the header's 64 bytes.
func (l *vhdxLog) descriptor(at, i int) []byte {
	const each = vhdxLogSector / 32
	return l.sector(at + (i+2)/each)[(i+2)%each*32:][:32]
}

// entry returns the valid entry at a sector, or nil.
func (l *vhdxLog) entry(at int) *vhdxLogEntry {
	if e, ok := l.known[at]; ok {
		return e
	}
	e := l.parse(at)
	l.known[at] = e
	return e
}

func (l *vhdxLog) parse(at int) *vhdxLogEntry {
	h := l.sector(at)
	if string(h[:4]) != "loge" || [16]byte(h[32:]) != l.guid {
		return nil
	}
	length, tail, count := binary.LittleEndian.Uint32(h[8:]), binary.LittleEndian.Uint32(h[12:]), binary.LittleEndian.Uint32(h[24:])
	if length == 0 || length%vhdxLogSector != 0 || int64(length) > int64(len(l.b)) || tail%vhdxLogSector != 0 || int64(count)*32+64 > int64(length) {
		return nil
	}
	e := &vhdxLogEntry{
		at: at, sectors: int(length / vhdxLogSector), tail: int(tail / vhdxLogSector), count: int(count),
		sequence: binary.LittleEndian.Uint64(h[16:]),
		flushed:  binary.LittleEndian.Uint64(h[48:]), last: binary.LittleEndian.Uint64(h[56:]),
	}
	if e.sequence == 0 {
		return nil
	}
	data := e.data()
	for i := range e.count {
		d := l.descriptor(at, i)
		if binary.LittleEndian.Uint64(d[24:]) != e.sequence || binary.LittleEndian.Uint64(d[16:])%vhdxLogSector != 0 {
			return nil
		}
		switch string(d[:4]) {
		case "zero":
			if binary.LittleEndian.Uint64(d[8:])%vhdxLogSector != 0 {
				return nil
			}
		case "desc":
			if data >= e.sectors {
				return nil
			}
			s := l.sector(at + data)
			high, low := binary.LittleEndian.Uint32(s[4:]), binary.LittleEndian.Uint32(s[vhdxLogSector-4:])
			if string(s[:4]) != "data" || uint64(high)<<32|uint64(low) != e.sequence {
				return nil
			}
			data++
		default:
			return nil
		}
	}
	l.summed += e.sectors * vhdxLogSector
	if l.summed > vhdxLogTrials*len(l.b) || l.sum(e) != binary.LittleEndian.Uint32(h[4:]) {
		return nil
	}
	return e
}

// data is the number of the entry's first data sector in it.
func (e *vhdxLogEntry) data() int { return ((e.count+2)*32 + vhdxLogSector - 1) / vhdxLogSector }

// sum is the entry's CRC-32C, which may lie around the ring's end.
func (l *vhdxLog) sum(e *vhdxLogEntry) uint32 {
	b := l.b[e.at*vhdxLogSector:]
	length := e.sectors * vhdxLogSector
	if length <= len(b) {
		return vhdxSum(b[:length])
	}
	return vhdxSum(slices.Concat(b, l.b[:length-len(b)]))
}

// active returns the active sequence (2.3.2): of all runs of entries with
// rising sequence numbers, the one with the highest, from its tail to its head.
func (l *vhdxLog) active() []*vhdxLogEntry {
	var active []*vhdxLogEntry
	for at := 0; at < l.sectors; {
		var run []*vhdxLogEntry
		total := 0
		for e := l.entry(at); e != nil && total+e.sectors <= l.sectors; e = l.entry((at + total) % l.sectors) {
			if len(run) > 0 && e.sequence != run[len(run)-1].sequence+1 {
				break
			}
			run, total = append(run, e), total+e.sectors
		}
		first := -1
		if len(run) > 0 {
			tail := run[len(run)-1].tail
			first = slices.IndexFunc(run, func(e *vhdxLogEntry) bool { return e.at == tail })
		}
		if first < 0 { // none here, or one without its beginning
			at++
			continue
		}
		if active == nil || run[len(run)-1].sequence > active[len(active)-1].sequence {
			active = run[first:]
		}
		at += total
	}
	return active
}

// replayVHDX returns the file as it is after the updates in its log (2.3.3).
func replayVHDX(ctx context.Context, file Ranged, h vhdxHeader) (*replayed, error) {
	const remedy = "attach it once to the host that wrote it, or run qemu-img check -r all on it"
	switch {
	case h.logVersion != 0:
		return nil, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the vhdx image was not closed cleanly and its log has version %d (0 is supported): %s", h.logVersion, remedy))
	case h.logBytes > vhdxMaxLog:
		return nil, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the vhdx image was not closed cleanly and its log has %d bytes, %d can be applied here: %s", h.logBytes, vhdxMaxLog, remedy))
	}
	l := &vhdxLog{b: make([]byte, h.logBytes), guid: h.logGUID, sectors: int(h.logBytes / vhdxLogSector), known: map[int]*vhdxLogEntry{}}
	if _, err := readExactly(ctx, file, l.b, int64(h.log)); err != nil {
		return nil, fmt.Errorf("read the vhdx log: %w", err)
	}
	entries := l.active()
	if len(entries) == 0 || l.summed > vhdxLogTrials*len(l.b) {
		return nil, corruptVHDX("it was not closed cleanly and its log of %d bytes has no valid entries: %s", len(l.b), remedy)
	}
	head := entries[len(entries)-1]
	if head.flushed > uint64(file.Size()) {
		return nil, corruptVHDX("its log was written when the file had %d bytes, it has %d: the file is cut short, upload it again", head.flushed, file.Size())
	}
	if head.last > 2*vhdxMaxBytes {
		return nil, corruptVHDX("its log wants a file of %d bytes", head.last)
	}
	r := &replayed{Ranged: file, size: max(file.Size(), int64(head.last))}
	var updates []patch
	for _, e := range entries {
		data := e.data()
		for i := range e.count {
			d := l.descriptor(e.at, i)
			at := binary.LittleEndian.Uint64(d[16:])
			length := uint64(vhdxLogSector)
			if string(d[:4]) == "zero" {
				length = binary.LittleEndian.Uint64(d[8:])
			}
			if at > uint64(r.size) || length > uint64(r.size)-at {
				return nil, corruptVHDX("its log has an update of %d bytes at %d of a file of %d bytes", length, at, r.size)
			}
			p := patch{start: int64(at), end: int64(at + length)}
			if string(d[:4]) == "desc" {
				// The descriptor has what the sector's own marks displaced.
				p.data = l.sector(e.at + data)
				copy(p.data, d[8:16])
				copy(p.data[vhdxLogSector-4:], d[4:8])
				data++
			}
			if length > 0 {
				updates = append(updates, p)
			}
		}
	}
	r.patches = latest(updates)
	return r, nil
}

// patch replaces bytes of a file; without data by zeros.
type patch struct {
	start, end int64
	data       []byte
}

// latest returns what is left of patches that are applied one after the other,
// in order of the file and without overlaps.
func latest(patches []patch) []patch {
	points := make([]int64, 0, 2*len(patches))
	for _, p := range patches {
		points = append(points, p.start, p.end)
	}
	slices.Sort(points)
	points = slices.Compact(points)
	// From the last patch to the first each takes the pieces between two points
	// that are not taken; next leads over those that are.
	owner, next := make([]int32, len(points)), make([]int32, len(points)+1)
	for i := range next {
		next[i] = int32(i)
	}
	free := func(i int32) int32 {
		for next[i] != i {
			next[i] = next[next[i]]
			i = next[i]
		}
		return i
	}
	for k, p := range slices.Backward(patches) {
		at, _ := slices.BinarySearch(points, p.start)
		for i := free(int32(at)); points[i] < p.end; i = free(i) {
			owner[i], next[i] = int32(k)+1, i+1
		}
	}
	var out []patch
	for i, k := range owner {
		if k == 0 {
			continue
		}
		p := patches[k-1]
		piece := patch{start: points[i], end: points[i+1]}
		if p.data != nil {
			piece.data = p.data[piece.start-p.start : piece.end-p.start]
		}
		out = append(out, piece)
	}
	return out
}

// replayed is a file with patches over it, and zeros behind its end up to size.
type replayed struct {
	Ranged
	size    int64
	patches []patch // in order, without overlaps
}

func (r *replayed) Size() int64 { return r.size }

func (r *replayed) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, errors.New("read at a negative offset")
	}
	short := int64(len(p)) > r.size-off
	p = p[:max(0, min(int64(len(p)), r.size-off))]
	there := max(0, min(int64(len(p)), r.Ranged.Size()-off))
	if there > 0 {
		if n, err := r.Ranged.ReadAtContext(ctx, p[:there], off); int64(n) < there {
			return n, err
		}
	}
	clear(p[there:])
	end := off + int64(len(p))
	for i := sort.Search(len(r.patches), func(i int) bool { return r.patches[i].end > off }); i < len(r.patches) && r.patches[i].start < end; i++ {
		u := r.patches[i]
		from, to := max(off, u.start), min(end, u.end)
		if u.data == nil {
			clear(p[from-off : to-off])
		} else {
			copy(p[from-off:to-off], u.data[from-u.start:])
		}
	}
	if short {
		return len(p), io.EOF
	}
	return len(p), nil
}
