// Package blockcopy moves the bytes of one disk onto another.
//
// It knows nothing of HTTP, qcow2 or Kubernetes: a Source says which extents it
// has and reads them, a Target writes them, a Ledger is told what is written,
// and Copy is the loop between. Offsets, lengths and sizes are bytes.
package blockcopy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sync/errgroup"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// Source is the disk that is read; its methods are called from several
// goroutines at once.
type Source interface {
	Size() int64
	// Extents returns the parts of [off, off+n) in order and without gaps.
	Extents(ctx context.Context, off, n int64) ([]extent.Extent, error)
	// ReadAtContext fills p or returns an error; what is not data reads as zeros.
	ReadAtContext(ctx context.Context, p []byte, off int64) (int, error)
}

// Grained is a Source that is read best in pieces of a multiple of Grain bytes,
// aligned to it: a compressed cluster that is read in halves is decoded twice.
type Grained interface {
	Grain() int64
}

// Striped is a Source that is read best in strips, each from its beginning to its
// end by one reader: parts that are compressed each on its own.
type Striped interface {
	// Strip returns the end of the strip that off lies in.
	Strip(ctx context.Context, off int64) (int64, error)
	// Readers is how many strips may be read at once.
	Readers() int
}

// InOrder is a Source that is read while it passes: nothing is asked or read more
// than Ahead bytes behind the first byte that is still to be read.
type InOrder interface {
	Ahead() int64
}

// Target is the disk that is written; its methods are called from several
// goroutines at once, never for the same bytes.
type Target interface {
	// WriteAt and ReadAt get buffers, offsets and lengths that are multiples of
	// Align, save for a piece that ends at Size where Size is none.
	io.WriterAt
	io.ReaderAt
	// Zero makes [off, off+n) read as zeros; off and n are as for WriteAt.
	Zero(off, n int64) error
	Size() int64
	// Align is a power of two, at most 64 KiB; 1 where anything may be written.
	Align() int
}

// Allocating is a Target that is written faster where its blocks were allocated
// before, many at once. Ranges that turn out to be zeros are given back by Zero.
type Allocating interface {
	// Allocate makes blocks for [off, off+n) and says whether it could; no byte
	// changes.
	Allocate(off, n int64) bool
}

// Ledger keeps the progress.
type Ledger interface {
	// Done says that [off, off+n) of the source is written, or known to be
	// zero; it is not flushed. While it blocks, the worker that calls it reads
	// no more: that is the back-pressure that bounds what a crash can lose.
	//
	// off is a multiple of 64 KiB, and so is n save at the source's end. data are the
	// bytes, valid until it returns; nil where they are zeros. Of what is in
	// Options.Skip nothing is said, unless other bytes were written there.
	Done(ctx context.Context, off, n int64, data []byte) error
}

// Options are how to copy; the zero value is a plain whole copy.
type Options struct {
	// Skip is what an earlier run of the same copy has written and flushed.
	Skip extent.Set
	// KnownZero says that what is not in Skip reads as zeros in the target, or
	// holds what an earlier run wrote from a source with the same content. It
	// must be false where an earlier run may have read other content.
	KnownZero bool
	// Workers is how many chunks are moved at once (default 8), Chunk how long
	// they are (default 1 MiB, at most 4 MiB); together they use at most 16 MiB.
	Workers int
	Chunk   int64
	// Ledger is told of each finished range; nil is nobody.
	Ledger Ledger
	// Progress is told how many more of the source's bytes are done; calls
	// come one after the other. Bytes in Skip are not counted.
	Progress func(delta int64)
}

const (
	// block is the grain of zero detection; it is also what ranges are aligned to.
	block = 64 << 10
	// window is how far the plan looks at once, and the longest range that is
	// zeroed by one call.
	window = 64 << 20

	defaultChunk   = 1 << 20
	maxChunk       = 4 << 20
	defaultWorkers = 8
	maxBuffers     = 16 << 20
)

// Copy writes the whole of src to the start of dst and leaves zeros behind it.
// What dst does not do is a fault; errors of src and the Ledger keep their class.
//
// A target smaller than the source is a fault ImageTooLarge before anything is
// written. When Copy returns nil everything is written, but not flushed.
func Copy(ctx context.Context, dst Target, src Source, o Options) error {
	size := src.Size()
	if size < 0 {
		return fmt.Errorf("copy a source of unknown size: use CopyStream")
	}
	if size > dst.Size() {
		return tooLarge(fmt.Sprintf("the image's disk of %d bytes", size), size, dst.Size())
	}
	grain := int64(block)
	if g, ok := src.(Grained); ok {
		grain = max(grain, g.Grain())
	}
	c := newCopier(dst, o, grain)
	if st, ok := src.(Striped); ok {
		c.workers = max(1, min(c.workers, st.Readers()))
	}
	if in, ok := src.(InOrder); ok {
		c.order = &order{ahead: in.Ahead() - c.chunk, changed: make(chan struct{})}
	} else if a, ok := dst.(Allocating); ok { // an InOrder plan looks but a chunk ahead
		c.allocate = a.Allocate
	}
	plan := make(chan []task)
	g, run := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(plan)
		return c.plan(run, src, size, plan)
	})
	for range c.workers {
		g.Go(func() error {
			buf := aligned(c.chunk, dst.Align())
			for tasks := range plan {
				for _, t := range tasks {
					if err := run.Err(); err != nil {
						return err
					}
					if err := c.move(run, src, t, buf); err != nil {
						return err
					}
					c.order.leave(t.Start)
				}
			}
			return run.Err()
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return c.zeroRest(ctx, size)
}

// task is a range of the source; without data it is zeros.
type task struct {
	extent.Range
	data extent.Range // the part to read, Length 0 for none
}

// stripTasks of one strip at most are in one hand.
const stripTasks = 4096

// plan sends the tasks of src in order of offset, those of one strip together.
func (c *copier) plan(ctx context.Context, src Source, size int64, out chan<- []task) error {
	var strip []task
	stripEnd := int64(0)
	striped, _ := src.(Striped)
	hand := func() error {
		tasks := strip
		if strip = nil; len(tasks) == 0 {
			return nil
		}
		c.order.join(tasks[0].Start)
		select {
		case out <- tasks:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	send := func(t task) error {
		if striped == nil {
			strip = []task{t}
			return hand()
		}
		if t.Start >= stripEnd || len(strip) == stripTasks {
			if err := hand(); err != nil {
				return err
			}
			var err error
			if stripEnd, err = striped.Strip(ctx, t.Start); err != nil {
				return fmt.Errorf("ask the strip of byte %d: %w", t.Start, err)
			}
		}
		strip = append(strip, t)
		return nil
	}
	var zeros extent.Range // not sent yet, so that many small ones become one
	flush := func() error {
		t := task{Range: zeros}
		zeros = extent.Range{}
		if t.Length == 0 {
			return nil
		}
		return send(t)
	}
	step := int64(window)
	if c.order != nil {
		step = c.chunk
	}
	for at := int64(0); at < size; at += step {
		end := min(at+step, size)
		for _, r := range c.outer(c.skip.Missing(at, end-at), end) {
			if err := c.order.near(ctx, r.Start); err != nil {
				return err
			}
			list, err := src.Extents(ctx, r.Start, r.Length)
			if err != nil {
				return fmt.Errorf("ask the extents of %d bytes at %d: %w", r.Length, r.Start, err)
			}
			if err := covers(list, r); err != nil {
				return err
			}
			if c.allocate != nil {
				for _, e := range list {
					if e.Kind == extent.Data && c.allocate(e.Start, e.Length) {
						c.allocated.Store(true)
					}
				}
			}
			for off := r.Start; off < r.End(); {
				next := min(off-off%c.chunk+c.chunk, r.End())
				var data extent.Range
				data, list = dataIn(list, off, next)
				t := task{Range: extent.Range{Start: off, Length: next - off}, data: data}
				off = next
				if data.Length == 0 && zeros.End() == t.Start && zeros.Length+t.Length <= window {
					zeros.Length += t.Length
					continue
				}
				if err := flush(); err != nil {
					return err
				}
				if data.Length == 0 {
					zeros = t.Range
					continue
				}
				if err := send(t); err != nil {
					return err
				}
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	return hand()
}

// order keeps the tasks of an InOrder source together. A nil one does nothing.
type order struct {
	ahead int64

	mu      sync.Mutex
	starts  []int64 // of the tasks that are not done, in order
	changed chan struct{}
}

// near waits until start is not too far ahead of the first task: also what is only asked
// for has the file pass.
func (o *order) near(ctx context.Context, start int64) error {
	if o == nil {
		return nil
	}
	for {
		o.mu.Lock()
		near := len(o.starts) == 0 || start-o.starts[0] <= o.ahead
		changed := o.changed
		o.mu.Unlock()
		if near {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// join counts the task at start in, which lies behind all others.
func (o *order) join(start int64) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.starts = append(o.starts, start)
}

func (o *order) leave(start int64) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if i := slices.Index(o.starts, start); i >= 0 {
		o.starts = slices.Delete(o.starts, i, i+1)
	}
	close(o.changed)
	o.changed = make(chan struct{})
}

// outer widens ranges to whole blocks, up to end, so that every write is
// aligned: rewriting bytes that are done already does no harm.
func (c *copier) outer(ranges []extent.Range, end int64) []extent.Range {
	var set extent.Set
	for _, r := range ranges {
		from := r.Start - r.Start%block
		to := min(roundUp(r.End(), block), end)
		set.Add(from, to-from)
	}
	return set.Ranges()
}

// covers checks a source's answer: whoever leaves a gap would leave old bytes.
func covers(list []extent.Extent, r extent.Range) error {
	at := r.Start
	for _, e := range list {
		if e.Start != at || e.Length <= 0 {
			return fmt.Errorf("extents of %d bytes at %d have %d bytes at %d where %d follows", r.Length, r.Start, e.Length, e.Start, at)
		}
		at = e.End()
	}
	if at != r.End() {
		return fmt.Errorf("extents of %d bytes at %d end at %d", r.Length, r.Start, at)
	}
	return nil
}

// dataIn returns the span from the first to the last data in [off, end),
// widened to whole blocks, and the extents that reach behind end.
func dataIn(list []extent.Extent, off, end int64) (extent.Range, []extent.Extent) {
	first, last := int64(-1), int64(0)
	for len(list) > 0 && list[0].Start < end {
		e := list[0]
		if e.Kind == extent.Data && e.End() > off {
			if first < 0 {
				first = max(e.Start, off)
			}
			last = min(e.End(), end)
		}
		if e.End() > end {
			break
		}
		list = list[1:]
	}
	if first < 0 {
		return extent.Range{}, list
	}
	first = max(first-first%block, off)
	last = min(roundUp(last, block), end)
	return extent.Range{Start: first, Length: last - first}, list
}

// move reads and writes one task.
func (c *copier) move(ctx context.Context, src Source, t task, buf []byte) error {
	if t.data.Length == 0 {
		if err := c.zero(t.Start, t.Length); err != nil {
			return err
		}
		return c.done(ctx, t.Range, nil)
	}
	p := buf[:t.data.Length]
	n, err := src.ReadAtContext(ctx, p, t.data.Start)
	if err == nil && n < len(p) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("read %d bytes at %d, got %d: %w", len(p), t.data.Start, n, err)
	}
	if err := c.zero(t.Start, t.data.Start-t.Start); err != nil {
		return err
	}
	if _, err := c.write(buf, len(p), t.data.Start, nil); err != nil {
		return err
	}
	if err := c.zero(t.data.End(), t.End()-t.data.End()); err != nil {
		return err
	}
	for _, part := range []struct {
		extent.Range
		data []byte
	}{
		{extent.Range{Start: t.Start, Length: t.data.Start - t.Start}, nil},
		{t.data, p},
		{extent.Range{Start: t.data.End(), Length: t.End() - t.data.End()}, nil},
	} {
		if part.Length > 0 {
			if err := c.done(ctx, part.Range, part.data); err != nil {
				return err
			}
		}
	}
	return nil
}

// CopyStream writes what r has to the start of dst, leaves zeros behind it and
// returns how many bytes that was. Content that is longer than dst is a fault
// ImageTooLarge, found when its first byte behind dst's end comes.
//
// r is read from its beginning also when Skip is not empty: there the bytes are
// compared with dst, and only what differs is written. A Read of r must return
// soon after ctx is cancelled.
func CopyStream(ctx context.Context, dst Target, r io.Reader, o Options) (int64, error) {
	c := newCopier(dst, o, block)
	type piece struct {
		buf []byte
		off int64
		n   int
	}
	pieces := make(chan piece)
	free := make(chan []byte, c.workers)
	for range c.workers {
		free <- aligned(c.chunk, dst.Align())
	}
	var size int64
	g, run := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(pieces)
		for {
			var buf []byte
			select {
			case buf = <-free:
			case <-run.Done():
				return run.Err()
			}
			n, err := readFull(run, r, buf)
			if err != nil && !errors.Is(err, io.EOF) {
				return fmt.Errorf("read the stream at %d: %w", size+int64(n), err)
			}
			if size+int64(n) > dst.Size() {
				return tooLarge(fmt.Sprintf("the image's disk of more than %d bytes", dst.Size()), size+int64(n), dst.Size())
			}
			if n > 0 {
				select {
				case pieces <- piece{buf, size, n}:
				case <-run.Done():
					return run.Err()
				}
			}
			size += int64(n)
			if err != nil {
				return nil // io.EOF: the stream's end
			}
		}
	})
	for range c.workers {
		g.Go(func() error {
			var old []byte
			for p := range pieces {
				r := extent.Range{Start: p.off, Length: int64(p.n)}
				var present []byte
				if c.skip.Intersect(r.Start, r.Length).Len() > 0 {
					if old == nil {
						old = aligned(c.chunk, dst.Align())
					}
					present = old[:c.padded(p.n, p.off)]
					if n, err := dst.ReadAt(present, p.off); err != nil && (n < len(present) || !errors.Is(err, io.EOF)) {
						return targetError(fmt.Sprintf("read %d bytes at %d of the target, got %d", len(present), p.off, n), err)
					}
				}
				wrote, err := c.write(p.buf, p.n, p.off, present)
				if err != nil {
					return err
				}
				if wrote || !c.skip.Contains(r.Start, r.Length) {
					err = c.tell(run, r, p.buf[:p.n])
				}
				if err != nil {
					return err
				}
				c.progressed(r)
				free <- p.buf
			}
			return run.Err()
		})
	}
	if err := g.Wait(); err != nil {
		return size, err
	}
	return size, c.zeroRest(ctx, size)
}

// readFull fills p; io.EOF means that the stream ended after n bytes.
// io.ReadFull would hide whether the end was the stream's own word.
func readFull(ctx context.Context, r io.Reader, p []byte) (n int, err error) {
	for idle := 0; n < len(p); {
		m, err := r.Read(p[n:])
		n += m
		if err != nil {
			return n, err
		}
		if err := ctx.Err(); err != nil {
			return n, err
		}
		if idle++; m > 0 {
			idle = 0
		} else if idle > 100 {
			return n, io.ErrNoProgress
		}
	}
	return n, nil
}

// copier is what Copy and CopyStream share.
type copier struct {
	dst       Target
	skip      extent.Set
	knownZero bool
	workers   int
	chunk     int64
	ledger    Ledger
	order     *order // of an InOrder source, else nil
	// allocate is the target's, nil where nothing is allocated before it is written.
	allocate func(off, n int64) bool
	// allocated: zeros may have blocks for nothing.
	allocated atomic.Bool

	mu       sync.Mutex // holds calls of progress apart
	progress func(int64)
}

func newCopier(dst Target, o Options, grain int64) *copier {
	c := &copier{dst: dst, skip: o.Skip, knownZero: o.KnownZero, workers: o.Workers, chunk: o.Chunk, ledger: o.Ledger, progress: o.Progress}
	if c.chunk <= 0 {
		c.chunk = defaultChunk
	}
	c.chunk = min(roundUp(c.chunk, min(max(grain, block), maxChunk)), maxChunk)
	if c.workers <= 0 {
		c.workers = defaultWorkers
	}
	c.workers = max(1, min(c.workers, int(maxBuffers/c.chunk)))
	return c
}

// done tells the ledger and the progress of r.
func (c *copier) done(ctx context.Context, r extent.Range, data []byte) error {
	if !c.skip.Contains(r.Start, r.Length) {
		if err := c.tell(ctx, r, data); err != nil {
			return err
		}
	}
	c.progressed(r)
	return nil
}

func (c *copier) tell(ctx context.Context, r extent.Range, data []byte) error {
	if c.ledger == nil {
		return nil
	}
	if err := c.ledger.Done(ctx, r.Start, r.Length, data); err != nil {
		return fmt.Errorf("record %d bytes at %d as done: %w", r.Length, r.Start, err)
	}
	return nil
}

func (c *copier) progressed(r extent.Range) {
	if c.progress == nil {
		return
	}
	if n := r.Length - c.skip.Intersect(r.Start, r.Length).Bytes(); n > 0 {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.progress(n)
	}
}

// padded is how many bytes the target takes for n bytes at off: the disk's last
// bytes are filled up with zeros to the target's alignment where it has room.
func (c *copier) padded(n int, off int64) int {
	return int(min(roundUp(off+int64(n), int64(c.dst.Align())), c.dst.Size()) - off)
}

// write puts buf[:n] at off of the target, zeros as zeros. With old, what the
// target holds there, only blocks that differ are written; wrote says that some did.
func (c *copier) write(buf []byte, n int, off int64, old []byte) (wrote bool, err error) {
	full := c.padded(n, off)
	clear(buf[n:full])
	p := buf[:full]
	const (
		same = iota
		zero
		data
	)
	kind := func(from, to int) int {
		b := p[from:to]
		switch {
		case old != nil && bytes.Equal(b, old[from:to]):
			return same
		case isZero(b):
			return zero
		}
		return data
	}
	next := kind(0, min(block, len(p)))
	for from := 0; from < len(p); {
		k, to := next, min(from+block, len(p))
		for to < len(p) {
			end := min(to+block, len(p))
			if next = kind(to, end); next != k {
				break
			}
			to = end
		}
		at := off + int64(from)
		wrote = wrote || k != same
		switch {
		case k == data:
			if m, err := c.dst.WriteAt(p[from:to], at); err != nil {
				return wrote, targetError(fmt.Sprintf("write %d bytes at %d, wrote %d", to-from, at, m), err)
			} else if m < to-from {
				return wrote, targetError(fmt.Sprintf("write %d bytes at %d, wrote %d", to-from, at, m), io.ErrShortWrite)
			}
		case k == zero && (old != nil || c.allocated.Load()): // the target holds something else here, or a block for nothing
			if err := c.clear(at, int64(to-from)); err != nil {
				return wrote, err
			}
		case k == zero:
			if err := c.zero(at, int64(to-from)); err != nil {
				return wrote, err
			}
		}
		from = to
	}
	return wrote, nil
}

// zero makes [off, off+n) zeros unless it is known to be.
func (c *copier) zero(off, n int64) error {
	if n <= 0 || c.knownZero {
		return nil
	}
	return c.clear(off, n)
}

func (c *copier) clear(off, n int64) error {
	end := min(roundUp(off+n, int64(c.dst.Align())), c.dst.Size())
	if err := c.dst.Zero(off, end-off); err != nil {
		return targetError(fmt.Sprintf("zero %d bytes at %d", end-off, off), err)
	}
	return nil
}

// zeroRest makes zeros of what lies behind the source's end.
func (c *copier) zeroRest(ctx context.Context, size int64) error {
	if c.knownZero {
		return nil
	}
	for off := roundUp(size, int64(c.dst.Align())); off < c.dst.Size(); {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(window, c.dst.Size()-off)
		if err := c.clear(off, n); err != nil {
			return err
		}
		off += n
	}
	return nil
}

func tooLarge(what string, need, have int64) error {
	return fault.Terminal(fault.ImageTooLarge,
		fmt.Errorf("%s does not fit into a target of %d bytes: ask for at least %d bytes (spec.resources.requests.storage of the claim)", what, have, need))
}

// targetError words what the target does not do; a full disk may have room
// later, and a broken one may be replaced.
func targetError(deed string, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fault.Transient(fault.NoSpace, fmt.Errorf("%s: %w: free space where the target lies", deed, err))
	}
	return fault.Transient(fault.TargetError, fmt.Errorf("%s: %w: check the disk that the target lies on", deed, err))
}

var zeros [block]byte

// isZero tells whether p, at most a block long, is all zeros.
func isZero(p []byte) bool { return bytes.Equal(p, zeros[:len(p)]) }

// roundUp rounds n up to a multiple of to.
func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// aligned returns a buffer of n bytes whose address is a multiple of align, as
// direct I/O wants it.
func aligned(n int64, align int) []byte {
	buf := make([]byte, n+int64(align))
	shift := 0
	if rest := uintptr(unsafe.Pointer(unsafe.SliceData(buf))) % uintptr(align); rest != 0 {
		shift = align - int(rest)
	}
	return buf[shift : int64(shift)+n : int64(shift)+n]
}
