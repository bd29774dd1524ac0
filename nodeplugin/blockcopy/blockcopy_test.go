package blockcopy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// disk is a source in memory with extents as rand made them.
type disk struct {
	data    []byte
	extents []extent.Extent
	grain   int64

	reads    atomic.Int64 // bytes
	inFlight *gauge
	fail     func(off int64, n int) (int, error) // nil: reads work
}

func (d *disk) Size() int64  { return int64(len(d.data)) }
func (d *disk) Grain() int64 { return d.grain }

func (d *disk) Extents(_ context.Context, off, n int64) ([]extent.Extent, error) {
	var out []extent.Extent
	for _, e := range d.extents {
		a, b := max(e.Start, off), min(e.End(), off+n)
		out = extent.Append(out, extent.Extent{Start: a, Length: b - a, Kind: e.Kind})
	}
	return out, nil
}

func (d *disk) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if d.fail != nil {
		if n, err := d.fail(off, len(p)); n < len(p) || err != nil {
			return n, err
		}
	}
	if d.inFlight != nil {
		d.inFlight.add(int64(len(p)))
	}
	d.reads.Add(int64(len(p)))
	return copy(p, d.data[off:off+int64(len(p))]), nil
}

// randomDisk has data, zero and hole extents of random lengths; data extents
// hold runs of zeros too.
func randomDisk(rnd *rand.Rand, size int64) *disk {
	d := &disk{data: make([]byte, size, size+8), grain: 1}
	for at := int64(0); at < size; {
		n := min(1+rnd.Int64N(300<<10), size-at)
		if rnd.IntN(2) == 0 {
			n = min(roundUp(n, block), size-at)
		}
		e := extent.Extent{Start: at, Length: n, Kind: extent.Kind(rnd.IntN(3))}
		if e.Kind == extent.Data && rnd.IntN(4) > 0 {
			for i := at; i < at+n; i += 8 {
				binary.NativeEndian.PutUint64(d.data[i:i+8:cap(d.data)], rnd.Uint64())
			}
			clear(d.data[at+n : min(at+n+8, size)])
		}
		d.extents = append(d.extents, e)
		at += n
	}
	return d
}

// target is a disk in memory that insists on what Target promises to its author.
type target struct {
	t     testing.TB
	align int64
	data  []byte
	known bool  // the target was zero: no zero block may be written, nothing zeroed
	fails error // of every write

	mu     sync.Mutex
	wrote  int64
	zeroed int64
	read   int64
}

func newTarget(t testing.TB, size, align int64, known bool) *target {
	tg := &target{t: t, align: align, data: make([]byte, size), known: known}
	if !known {
		tg.data = bytes.Repeat([]byte{0xa5}, int(size))
	}
	return tg
}

func (g *target) Size() int64 { return int64(len(g.data)) }
func (g *target) Align() int  { return int(g.align) }

func (g *target) check(deed string, off, n int64) {
	if off%g.align != 0 || n%g.align != 0 && off+n != g.Size() || off < 0 || n <= 0 || off+n > g.Size() {
		g.t.Errorf("%s of %d bytes at %d of a target of %d bytes with alignment %d", deed, n, off, g.Size(), g.align)
	}
}

func (g *target) WriteAt(p []byte, off int64) (int, error) {
	g.check("write", off, int64(len(p)))
	if uintptr(unsafe.Pointer(unsafe.SliceData(p)))%uintptr(g.align) != 0 {
		g.t.Errorf("write from a buffer at %p, want a multiple of %d", p, g.align)
	}
	if g.fails != nil {
		return 0, &fsError{g.fails}
	}
	for at := 0; g.known && at+block <= len(p); at += block {
		if isZero(p[at : at+block]) {
			g.t.Errorf("zeros written at %d of a target known to be zero", off+int64(at))
		}
	}
	g.mu.Lock()
	g.wrote += int64(len(p))
	g.mu.Unlock()
	return copy(g.data[off:], p), nil
}

type fsError struct{ error }

func (e *fsError) Unwrap() error { return e.error }

func (g *target) ReadAt(p []byte, off int64) (int, error) {
	g.check("read", off, int64(len(p)))
	g.mu.Lock()
	g.read += int64(len(p))
	g.mu.Unlock()
	return copy(p, g.data[off:]), nil
}

func (g *target) Zero(off, n int64) error {
	g.check("zero", off, n)
	if g.known {
		g.t.Errorf("%d bytes zeroed at %d of a target known to be zero", n, off)
	}
	g.mu.Lock()
	g.zeroed += n
	g.mu.Unlock()
	clear(g.data[off : off+n])
	return nil
}

func (g *target) holds(t *testing.T, want []byte) {
	t.Helper()
	if rest := g.data[len(want):]; !bytes.Equal(g.data[:len(want)], want) || !bytes.Equal(rest, make([]byte, len(rest))) {
		for i := range g.data {
			if i < len(want) && g.data[i] != want[i] || i >= len(want) && g.data[i] != 0 {
				t.Fatalf("target differs at byte %d of %d (source of %d bytes)", i, len(g.data), len(want))
			}
		}
	}
}

// gauge keeps what was read and not yet acknowledged, and its highest value.
type gauge struct {
	mu        sync.Mutex
	now, peak int64
}

func (g *gauge) add(n int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.now += n
	g.peak = max(g.peak, g.now)
}

// ledger keeps what is done; the target must hold it at that moment.
type ledger struct {
	mu   sync.Mutex
	set  extent.Set
	stop int64 // cancel when so many bytes are done
	end  context.CancelFunc
	test func(off, n int64, data []byte)
}

func (l *ledger) Done(ctx context.Context, off, n int64, data []byte) error {
	if l.test != nil {
		l.test(off, n, data)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.set.Add(off, n)
	if l.end != nil && l.set.Bytes() >= l.stop {
		l.end()
	}
	return nil
}

// A copy of any disk onto any target, whole or gone on with after a stop, ends
// with the same bytes and zeros behind them.
func TestCopyIsExact(t *testing.T) {
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		src := randomDisk(rnd, 1+rnd.Int64N(3<<20))
		align := []int64{1, 512, 4096}[rnd.IntN(3)]
		size := src.Size() + []int64{0, 1, 700, roundUp(src.Size(), 4096) - src.Size(), 3 << 20}[rnd.IntN(5)]
		known := rnd.IntN(2) == 0
		o := Options{KnownZero: known, Workers: 1 + rnd.IntN(8), Chunk: []int64{0, 64 << 10, 256 << 10}[rnd.IntN(3)]}
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			dst := newTarget(t, size, align, known)
			l := &ledger{test: func(off, n int64, data []byte) {
				if want := src.data[off : off+n]; data != nil && !bytes.Equal(data, want) || data == nil && len(bytes.Trim(want, "\x00")) > 0 {
					t.Errorf("of %d bytes at %d others are told", n, off)
				}
				if off%block != 0 || n%block != 0 && off+n != src.Size() {
					t.Errorf("%d bytes at %d are told, which are no whole blocks", n, off)
				}
				if !bytes.Equal(dst.data[off:off+n], src.data[off:off+n]) {
					t.Errorf("%d bytes at %d are called done and are not written", n, off)
				}
			}}
			ctx, cancel := context.WithCancel(t.Context())
			l.stop, l.end = rnd.Int64N(src.Size()), cancel
			o.Ledger = l
			var told int64
			o.Progress = func(n int64) { told += n }
			if err := Copy(ctx, dst, src, o); err != nil && !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			if got := l.set.Bytes(); told != got {
				t.Errorf("progress told %d bytes, the ledger %d", told, got)
			}
			before := src.reads.Load()
			l.end = nil
			o.Skip = extent.NewSet(l.set.Ranges()...)
			if err := Copy(t.Context(), dst, src, o); err != nil {
				t.Fatal(err)
			}
			dst.holds(t, src.data)
			if !l.set.Contains(0, src.Size()) || told != src.Size() {
				t.Errorf("done: %v, progress %d, want all of %d bytes", l.set.Ranges(), told, src.Size())
			}
			if again, most := src.reads.Load()-before, src.Size()-o.Skip.Bytes()+2*block*int64(o.Skip.Len()+1); again > most {
				t.Errorf("the second run read %d bytes, want at most %d", again, most)
			}
		})
	}
}

// A stream onto any target ends the same, and rewrites of what was done only
// what differs.
func TestCopyStreamIsExact(t *testing.T) {
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		src := randomDisk(rnd, rnd.Int64N(3<<20))
		align := []int64{1, 512, 4096}[rnd.IntN(3)]
		size := src.Size() + []int64{1, 700, roundUp(src.Size(), 4096) - src.Size(), 3 << 20}[rnd.IntN(4)]
		known := rnd.IntN(2) == 0
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			dst := newTarget(t, size, align, known)
			l := &ledger{}
			var told int64
			o := Options{KnownZero: known, Ledger: l, Progress: func(n int64) { told += n }}
			n, err := CopyStream(t.Context(), dst, bytes.NewReader(src.data), o)
			if err != nil || n != src.Size() || told != n || l.set.Bytes() != n {
				t.Fatalf("copied %d bytes, told %d, done %d, want %d: %v", n, told, l.set.Bytes(), src.Size(), err)
			}
			dst.holds(t, src.data)

			// Again with everything done, but one block of the source changed: what
			// is done is no longer known to be zero.
			dst.known, dst.wrote, dst.zeroed = false, 0, 0
			o.Skip = l.set
			if src.Size() > 0 {
				at := rnd.Int64N(src.Size())
				if rnd.IntN(2) == 0 {
					src.data[at]++
				} else {
					at -= at % block
					clear(src.data[at:min(at+block, src.Size())])
				}
			}
			if _, err := CopyStream(t.Context(), dst, bytes.NewReader(src.data), o); err != nil {
				t.Fatal(err)
			}
			dst.holds(t, src.data)
			rest := size - roundUp(src.Size(), align)
			if dst.wrote+dst.zeroed > block+max(rest, 0) {
				t.Errorf("wrote %d and zeroed %d bytes for one byte that changed", dst.wrote, dst.zeroed)
			}
		})
	}
}

func TestCopyRefusesSmallTarget(t *testing.T) {
	src := randomDisk(rand.New(rand.NewPCG(1, 1)), 3<<20)
	dst := newTarget(t, 2<<20, 4096, true)
	err := Copy(t.Context(), dst, src, Options{KnownZero: true})
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != "ImageTooLarge" {
		t.Errorf("got %v, want a terminal ImageTooLarge", err)
	}
	if dst.wrote != 0 || src.reads.Load() != 0 {
		t.Errorf("wrote %d and read %d bytes before refusing", dst.wrote, src.reads.Load())
	}
	_, err = CopyStream(t.Context(), dst, bytes.NewReader(src.data), Options{KnownZero: true})
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != "ImageTooLarge" {
		t.Errorf("stream: got %v, want a terminal ImageTooLarge", err)
	}
}

func TestCopyEndsWithErrors(t *testing.T) {
	boom := errors.New("boom")
	whole := func() *disk {
		d := randomDisk(rand.New(rand.NewPCG(7, 7)), 8<<20)
		d.extents = []extent.Extent{{Start: 0, Length: 8 << 20, Kind: extent.Data}}
		d.data[5<<20] = 1
		return d
	}
	for _, row := range []struct {
		name string
		copy func(context.Context, *target) error
		want error
	}{
		{"a read that fails", func(ctx context.Context, dst *target) error {
			d := whole()
			d.fail = func(off int64, n int) (int, error) {
				if off >= 4<<20 {
					return 0, boom
				}
				return n, nil
			}
			return Copy(ctx, dst, d, Options{})
		}, boom},
		{"a short read", func(ctx context.Context, dst *target) error {
			d := whole()
			d.fail = func(off int64, n int) (int, error) {
				if off >= 4<<20 {
					return n - 1, nil
				}
				return n, nil
			}
			return Copy(ctx, dst, d, Options{})
		}, io.ErrUnexpectedEOF},
		{"extents with a gap", func(ctx context.Context, dst *target) error {
			d := whole()
			d.extents = []extent.Extent{{Start: 0, Length: 1 << 20}, {Start: 2 << 20, Length: 6 << 20}}
			if err := Copy(ctx, dst, d, Options{}); err != nil {
				return boom
			}
			return nil
		}, boom},
		{"a full target", func(ctx context.Context, dst *target) error {
			dst.fails = syscall.ENOSPC
			return Copy(ctx, dst, whole(), Options{})
		}, syscall.ENOSPC},
		{"a ledger that fails", func(ctx context.Context, dst *target) error {
			return Copy(ctx, dst, whole(), Options{Ledger: refusing{boom}})
		}, boom},
		{"a stream that breaks", func(ctx context.Context, dst *target) error {
			_, err := CopyStream(ctx, dst, io.MultiReader(bytes.NewReader(make([]byte, 3<<20)), broken{boom}), Options{})
			return err
		}, boom},
		{"a stream cut short", func(ctx context.Context, dst *target) error {
			_, err := CopyStream(ctx, dst, io.MultiReader(bytes.NewReader(make([]byte, 3<<20)), broken{io.ErrUnexpectedEOF}), Options{})
			return err
		}, io.ErrUnexpectedEOF},
		{"a context that is over", func(ctx context.Context, dst *target) error {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return Copy(ctx, dst, whole(), Options{})
		}, context.Canceled},
	} {
		t.Run(row.name, func(t *testing.T) {
			if err := row.copy(t.Context(), newTarget(t, 8<<20, 4096, false)); !errors.Is(err, row.want) {
				t.Errorf("got %v, want %v", err, row.want)
			}
		})
	}
	for err, reason := range map[error]string{syscall.ENOSPC: fault.NoSpace, syscall.EDQUOT: fault.NoSpace, syscall.EIO: fault.TargetError} {
		if f := fault.Of(Copy(t.Context(), &target{t: t, align: 1, data: make([]byte, 8<<20), fails: err}, whole(), Options{})); f.Reason != reason || f.Terminal {
			t.Errorf("a target with %v is %s (terminal %v), want a transient %s", err, f.Reason, f.Terminal, reason)
		}
	}
}

type refusing struct{ error }

func (r refusing) Done(context.Context, int64, int64, []byte) error { return r.error }

type broken struct{ error }

func (b broken) Read([]byte) (int, error) { return 0, b.error }

// While the ledger doesn't answer, no more than 16 MiB are read.
func TestLedgerHoldsReadsBack(t *testing.T) {
	src := randomDisk(rand.New(rand.NewPCG(9, 9)), 64<<20)
	src.extents = []extent.Extent{{Start: 0, Length: 64 << 20, Kind: extent.Data}}
	src.inFlight = &gauge{}
	dst := newTarget(t, 64<<20, 4096, false)
	ctx, cancel := context.WithCancel(t.Context())
	waiting := make(chan struct{}, 64)
	held := holding{waiting}
	end := make(chan error, 1)
	go func() { end <- Copy(ctx, dst, src, Options{Workers: 100, Ledger: held}) }()
	for range maxBuffers / defaultChunk { // every worker waits
		<-waiting
	}
	if src.inFlight.peak > maxBuffers {
		t.Errorf("%d bytes read and not acknowledged, want at most %d", src.inFlight.peak, maxBuffers)
	}
	cancel()
	if err := <-end; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}

type holding struct{ waiting chan struct{} }

func (h holding) Done(ctx context.Context, _, _ int64, _ []byte) error {
	h.waiting <- struct{}{}
	<-ctx.Done()
	return ctx.Err()
}

// A source's grain widens the chunk, so that no cluster is read in halves.
func TestGrainIsKept(t *testing.T) {
	src := randomDisk(rand.New(rand.NewPCG(4, 4)), 9<<20)
	src.extents = []extent.Extent{{Start: 0, Length: 9 << 20, Kind: extent.Data}}
	src.grain = 2 << 20
	src.fail = func(off int64, n int) (int, error) {
		if off%src.grain != 0 || int64(n)%src.grain != 0 && off+int64(n) != src.Size() {
			return 0, fmt.Errorf("read of %d bytes at %d cuts a cluster of %d", n, off, src.grain)
		}
		return n, nil
	}
	if err := Copy(t.Context(), newTarget(t, 9<<20, 4096, false), src, Options{}); err != nil {
		t.Fatal(err)
	}
}

// sparse is a target that counts which of its blocks have room.
type sparse struct {
	*target
	allocates bool
	blocks    extent.Set
}

func (s *sparse) Allocate(off, n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.allocates {
		s.blocks.Add(off, n)
	}
	return s.allocates
}

func (s *sparse) Zero(off, n int64) error {
	if err := s.target.Zero(off, n); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var left extent.Set
	for _, r := range s.blocks.Missing(0, s.Size()) {
		left.Add(r.Start, r.Length)
	}
	left.Add(off, n)
	s.blocks = extent.Set{}
	for _, r := range left.Missing(0, s.Size()) {
		s.blocks.Add(r.Start, r.Length)
	}
	return nil
}

// What was allocated for data that are zeros is given back, and a target that
// allocates nothing is not bothered.
func TestZerosKeepNoBlocks(t *testing.T) {
	src := randomDisk(rand.New(rand.NewPCG(8, 8)), 6<<20)
	src.extents = []extent.Extent{{Length: 6 << 20, Kind: extent.Data}}
	clear(src.data[1<<20 : 3<<20])
	for _, allocates := range []bool{true, false} {
		dst := &sparse{target: newTarget(t, 6<<20, 1, !allocates), allocates: allocates}
		clear(dst.data)
		if err := Copy(t.Context(), dst, src, Options{KnownZero: true}); err != nil {
			t.Fatal(err)
		}
		dst.holds(t, src.data)
		if n := dst.blocks.Intersect(1<<20, 2<<20).Bytes(); n > 0 {
			t.Errorf("%d bytes of zeros have blocks", n)
		}
		if allocates && dst.blocks.Bytes() == 0 {
			t.Error("nothing was allocated")
		}
	}
}
