package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const (
	// WindowBytes are the most that a compression may want to look back (R19),
	// decodersBytes what all decoders of an image may have together.
	WindowBytes   = 128 << 20
	decodersBytes = 160 << 20
	// recentBytes that a decoder has passed can be read again without another one:
	// several readers that follow each other closely come in any order.
	recentBytes = 4 << 20

	// An image whose parts are wanted in such disorder that decodedTimes its content
	// and decodedFree bytes are decompressed is unpacked as a whole instead.
	decodedTimes = 4
	decodedFree  = 64 << 20
)

// blocked is the decompressed content of a blob that consists of parts, of which
// each decompresses on its own. It is read anywhere, and best one part from its
// beginning to its end by one reader.
//
// The check of a part is compared when its last byte is read; verify reads
// those parts to the end of which nobody came.
type blocked struct {
	c compression
	// starts of the parts in the decompressed content, and its end.
	starts []int64
	// open returns the decompressed bytes of part i. Their end is io.EOF once their
	// check was right.
	open func(i int) (io.ReadCloser, error)
	// most is how many decoders there may be.
	most       int
	keepRecent bool

	mu       sync.Mutex
	decoders []*decoder
	uses     uint64
	changed  chan struct{} // closed when a decoder becomes free
	verified []uint64      // a bit for each part
	closed   bool

	decoded atomic.Int64 // bytes, those that nobody wanted too
}

// decoder is a place in a part. Whoever has it for himself (busy) uses it without
// the lock.
type decoder struct {
	part   int
	busy   bool
	used   uint64
	r      io.ReadCloser
	pos    int64  // of the next byte of r, in the part
	recent []byte // those before pos, at pos modulo its length
	kept   int64  // how many of them
}

// newBlocked has parts that decompress to the lengths between starts; one decoder
// needs window bytes. There is one more than can compute at once, for what is read
// beside the disk's data.
func newBlocked(c compression, starts []int64, window int64, open func(i int) (io.ReadCloser, error)) *blocked {
	most := decodersBytes / (window + recentBytes + readAheadDepth*readAheadPiece)
	return &blocked{
		c: c, starts: starts, open: open, changed: make(chan struct{}), verified: make([]uint64, len(starts)/64+1),
		most: int(max(1, min(most, int64(runtime.GOMAXPROCS(0))+1))),
	}
}

func (b *blocked) Size() int64 { return b.starts[len(b.starts)-1] }

func (b *blocked) count() int { return len(b.starts) - 1 }

// readable tells whether there are several parts to be read apart. Where one is said
// to be empty nobody would come to it, and learn whether it is.
func (b *blocked) readable() bool {
	for i := range b.count() {
		if b.starts[i] == b.starts[i+1] {
			return false
		}
	}
	return b.count() > 1
}

// part is the one that holds off, which is in the content.
func (b *blocked) part(off int64) int {
	return sort.Search(b.count(), func(i int) bool { return b.starts[i+1] > off })
}

// ReadAtContext ends with ctx while it waits for a decoder; what a decoder reads
// ends with the context of Open.
func (b *blocked) ReadAtContext(ctx context.Context, p []byte, off int64) (n int, err error) {
	if off < 0 || off > b.Size() {
		return 0, fmt.Errorf("read at %d of %d bytes", off, b.Size())
	}
	for n < len(p) {
		if b.keepRecent && b.decoded.Load() > decodedTimes*b.Size()+decodedFree {
			return n, fault.Terminal(fault.NeedsSpool,
				errors.New("the image is to be read in an order that needs its compressed parts again and again: serve it without compression, or convert it before it is compressed (qemu-img convert -O qcow2)"))
		}
		at := off + int64(n)
		if at == b.Size() {
			return n, io.EOF
		}
		i := b.part(at)
		m := min(int64(len(p)-n), b.starts[i+1]-at)
		if err := b.readPart(ctx, i, p[n:n+int(m)], at-b.starts[i]); err != nil {
			return n, err
		}
		n += int(m)
	}
	return n, nil
}

func (b *blocked) readPart(ctx context.Context, i int, p []byte, at int64) error {
	d, err := b.take(ctx, i, at)
	if err != nil {
		return err
	}
	err = b.decode(d, p, at)
	b.release(d, err)
	return err
}

// take returns a decoder for byte at of part i: the one that stands best, that of
// another reader once it is free, or a new one.
func (b *blocked) take(ctx context.Context, i int, at int64) (*decoder, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		if b.closed {
			return nil, errors.New("read a closed image")
		}
		if d, wait := b.standing(i, at); !wait {
			if d == nil {
				d = b.makeRoom()
			}
			if d != nil {
				b.uses++
				d.part, d.busy, d.used = i, true, b.uses
				return d, nil
			}
		}
		changed := b.changed
		b.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			b.mu.Lock()
			return nil, ctx.Err()
		}
		b.mu.Lock()
	}
}

// standing is the decoder that is nearest before byte at of part i, or still has
// that byte. wait: somebody has it, or it is on its way.
func (b *blocked) standing(i int, at int64) (best *decoder, wait bool) {
	for _, d := range b.decoders {
		switch {
		case d.part != i:
		case d.busy:
			wait = true
		case at >= d.pos-d.kept && (best == nil || d.pos > best.pos):
			best = d
		}
	}
	return best, wait && best == nil
}

// makeRoom returns an empty decoder, nil where none is free.
func (b *blocked) makeRoom() *decoder {
	if len(b.decoders) < b.most {
		d := &decoder{}
		b.decoders = append(b.decoders, d)
		return d
	}
	var oldest *decoder
	for _, d := range b.decoders {
		if !d.busy && (oldest == nil || d.used < oldest.used) {
			oldest = d
		}
	}
	if oldest != nil {
		oldest.close()
	}
	return oldest
}

// release lets go of d; one that has failed or is of no more use goes.
func (b *blocked) release(d *decoder, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ended := d.pos == b.starts[d.part+1]-b.starts[d.part] && !b.keepRecent
	if d.busy = false; err != nil || ended || b.closed {
		d.close()
		b.decoders = slices.DeleteFunc(b.decoders, func(other *decoder) bool { return other == d })
	}
	close(b.changed)
	b.changed = make(chan struct{})
}

func (d *decoder) close() {
	if d.r != nil {
		d.r.Close()
	}
	d.r, d.pos, d.kept = nil, 0, 0
}

// decode fills p with what is at byte at of d's part.
func (b *blocked) decode(d *decoder, p []byte, at int64) error {
	if d.r == nil {
		r, err := b.open(d.part)
		if err != nil {
			return err
		}
		d.r = r
		if b.keepRecent && d.recent == nil {
			d.recent = make([]byte, recentBytes)
		}
	}
	if at < d.pos { // take found it among the recent bytes
		n := min(int64(len(p)), d.pos-at)
		d.remembered(p[:n], at)
		p, at = p[n:], at+n
	}
	if len(p) == 0 {
		return nil
	}
	length := b.starts[d.part+1] - b.starts[d.part]
	scratch := scratch(256 << 10)
	defer free(scratch)
	b.decoded.Add(at - d.pos + int64(len(p)))
	for d.pos < at {
		if err := d.next(scratch[:min(int64(len(scratch)), at-d.pos)], length); err != nil {
			return err
		}
	}
	if err := d.next(p, length); err != nil {
		return err
	}
	if d.pos < length {
		return nil
	}
	if n, err := d.r.Read(scratch[:1]); n != 0 || !errors.Is(err, io.EOF) {
		if err == nil || errors.Is(err, io.EOF) {
			err = brokenStream(b.c, fmt.Errorf("part %d has more than the %d bytes that the list of parts says", d.part, length), length)
		}
		return err
	}
	b.mu.Lock()
	b.verified[d.part/64] |= 1 << (d.part % 64)
	b.mu.Unlock()
	return nil
}

// next fills p with the next bytes of d's part of length bytes.
func (d *decoder) next(p []byte, length int64) error {
	n, err := io.ReadFull(d.r, p)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		if f := (*fault.Fault)(nil); !errors.As(err, &f) {
			err = fault.Terminal(fault.CorruptImage, fmt.Errorf("part %d of the compressed image has %d bytes and the list of parts says %d: compress and upload the image again", d.part, d.pos+int64(n), length))
		}
	}
	if err != nil {
		return err
	}
	if d.recent != nil {
		d.remember(p)
	}
	d.pos += int64(n)
	return nil
}

func (d *decoder) remember(p []byte) {
	size := int64(len(d.recent))
	d.kept = min(d.kept+int64(len(p)), size)
	at := d.pos
	if over := int64(len(p)) - size; over > 0 {
		p, at = p[over:], at+over
	}
	n := copy(d.recent[at%size:], p)
	copy(d.recent, p[n:])
}

// remembered fills p with recent bytes, those at byte at of the part.
func (d *decoder) remembered(p []byte, at int64) {
	n := copy(p, d.recent[at%int64(len(d.recent)):])
	copy(p[n:], d.recent)
}

// verify reads the parts whose checks nobody has come to.
func (b *blocked) verify(ctx context.Context) error {
	for i := range b.count() {
		b.mu.Lock()
		done := b.verified[i/64]&(1<<(i%64)) != 0
		b.mu.Unlock()
		length := b.starts[i+1] - b.starts[i]
		if done {
			continue
		}
		var last [1]byte
		if err := b.readPart(ctx, i, last[:], length-1); err != nil {
			return fmt.Errorf("check part %d of the compressed image: %w", i, err)
		}
	}
	return nil
}

// Close ends the decoders that are free; those in use end with their use.
func (b *blocked) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.decoders = slices.DeleteFunc(b.decoders, func(d *decoder) bool {
		if !d.busy {
			d.close()
		}
		return !d.busy
	})
	return nil
}

// stripBytes is the least length of a strip: where two of them meet, a part may be
// decompressed twice. stripSearch is how far its end is looked for, where tables tell.
const (
	stripBytes  = 8 << 20
	stripSearch = 64 << 20
)

// strip returns the end of the part that is at least stripBytes behind off.
func (b *blocked) strip(off int64) int64 {
	return b.starts[min(b.part(off+stripBytes-1), b.count()-1)+1]
}

// inParts is a disk whose file lies at byte at of a content in parts, which are
// decompressed best each by one reader.
type inParts struct {
	Disk
	b  *blocked
	at int64
}

func newInParts(d Disk, b *blocked) Disk {
	var file Ranged
	switch d := d.(type) {
	case *mapped:
		file = d.file
	case raw:
		file = d.Ranged
	}
	s, _ := file.(section) // of a bundle
	return inParts{d, b, s.at.at}
}

// Strip returns where the disk goes on in another part of the file.
func (d inParts) Strip(ctx context.Context, off int64) (int64, error) {
	m, ok := d.Disk.(*mapped)
	if !ok {
		return d.b.strip(d.at+off) - d.at, nil
	}
	end, hostEnd := min(off+stripSearch, m.size), int64(-1)
	err := m.walk(ctx, off, end-off, func(s segment) {
		if s.kind != extent.Data {
			return
		}
		host := d.at + s.host
		if hostEnd < 0 {
			hostEnd = d.b.strip(host)
		}
		switch {
		case host >= hostEnd:
			end = min(end, s.start)
		case !s.compressed && host+s.hostLen > hostEnd:
			end = min(end, s.start+hostEnd-host)
		}
	})
	return end, err
}

// Readers leaves a decoder to tables, which lie elsewhere in the file.
func (d inParts) Readers() int {
	if d.b.keepRecent {
		return max(1, d.b.most-1)
	}
	return min(d.b.most, runtime.GOMAXPROCS(0))
}
