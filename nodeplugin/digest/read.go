package digest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/longshore-io/longshore/nodeplugin/extent"
)

// Disk is what is summed up; its methods are called from several goroutines at once.
type Disk interface {
	Size() int64
	// Extents returns the parts of [off, off+n) in order and without gaps.
	Extents(ctx context.Context, off, n int64) ([]extent.Extent, error)
	// ReadAtContext fills p or returns an error; what is not data reads as zeros.
	ReadAtContext(ctx context.Context, p []byte, off int64) (int, error)
}

const (
	readers   = 4
	readBytes = 1 << 20
	// window is how much of a disk is asked for extents at once.
	window = 1 << 30
)

// Complete reads what t does not know of the first size bytes of a disk.
func (t *Tree) Complete(ctx context.Context, d Disk, size int64) error {
	var mu sync.Mutex
	return read(ctx, d, t.Missing(size), func(off, n int64, data []byte) error {
		sums := Sums(off, data)
		mu.Lock()
		defer mu.Unlock()
		return t.Add(off, n, sums)
	})
}

// read calls visit with all that is in ranges of a disk, which begin with a block: in pieces
// of whole blocks, save at a range's end, several at once; data are nil where there are zeros.
func read(ctx context.Context, d Disk, ranges []extent.Range, visit func(off, n int64, data []byte) error) error {
	parts := make(chan extent.Range)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(parts)
		for _, r := range ranges {
			for at := r.Start; at < r.End(); at += window {
				if err := plan(ctx, d, extent.Range{Start: at, Length: min(window, r.End()-at)}, parts, visit); err != nil {
					return err
				}
			}
		}
		return nil
	})
	for range readers {
		g.Go(func() error {
			buf := make([]byte, readBytes)
			for r := range parts {
				p := buf[:r.Length]
				if n, err := d.ReadAtContext(ctx, p, r.Start); n < len(p) {
					if err == nil {
						err = io.ErrUnexpectedEOF
					}
					return fmt.Errorf("read %d bytes at %d to sum them up, got %d: %w", r.Length, r.Start, n, err)
				}
				if err := visit(r.Start, r.Length, p); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// plan visits what of r is zeros and sends the rest, in pieces of whole blocks.
func plan(ctx context.Context, d Disk, r extent.Range, parts chan<- extent.Range, visit func(off, n int64, data []byte) error) error {
	list, err := d.Extents(ctx, r.Start, r.Length)
	if err != nil {
		return fmt.Errorf("ask the extents of %d bytes at %d: %w", r.Length, r.Start, err)
	}
	var data extent.Set
	for _, e := range list {
		if e.Kind == extent.Data {
			from := e.Start / Block * Block
			data.Add(from, min((e.End()+Block-1)/Block*Block, r.End())-from)
		}
	}
	for _, gap := range data.Missing(r.Start, r.Length) {
		if err := visit(gap.Start, gap.Length, nil); err != nil {
			return err
		}
	}
	for _, full := range data.Ranges() {
		for at := full.Start; at < full.End(); {
			n := min(readBytes-at%readBytes, full.End()-at)
			select {
			case parts <- extent.Range{Start: at, Length: n}:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			at += n
		}
	}
	return nil
}

// Difference says how a disk is not the one that a digest is of; the zero value: it is.
type Difference struct {
	// Short: it has fewer bytes, so many.
	Short bool
	Bytes int64
	// Got is the digest of as many bytes, where that is another.
	Got string
	// More: behind these bytes is something else than zeros.
	More bool
}

func (d Difference) String() string {
	switch {
	case d.Short:
		return fmt.Sprintf("it has %d bytes only", d.Bytes)
	case d.Got != "":
		return "its digest is " + d.Got
	case d.More:
		return "behind its end is something else than zeros"
	}
	return "it is the same"
}

// Prefix sums up the first bytes of a disk, and minds whether there is something behind them.
type Prefix struct {
	end int64 // of their blocks

	mu   sync.Mutex // held for what follows
	tree Tree
	more bool
}

// NewPrefix is for the first size bytes; -1 is all of the disk.
func NewPrefix(size int64) *Prefix {
	if size < 0 {
		return &Prefix{end: math.MaxInt64}
	}
	_, end := blocks(0, size)
	return &Prefix{end: end * Block}
}

// Add tells what is in [off, off+n), which is whole blocks save at the disk's end; data nil
// are zeros. It may be called by many at once.
func (p *Prefix) Add(off, n int64, data []byte) error {
	kept := max(0, min(n, p.end-off))
	more := false
	if data != nil {
		more = len(bytes.TrimLeft(data[kept:], "\x00")) > 0
		data = data[:kept]
	}
	sums := Sums(off, data)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.more = p.more || more
	if kept == 0 {
		return nil
	}
	return p.tree.Add(off, kept, sums)
}

// Sum is Tree's.
func (p *Prefix) Sum(size int64) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tree.Sum(size)
}

// Difference compares a disk of so many bytes, of which all that matters was told, with the
// digest text.
func (p *Prefix) Difference(disk int64, text string) (Difference, error) {
	size, err := Bytes(text)
	if err != nil {
		return Difference{}, err
	}
	if disk < size {
		return Difference{Short: true, Bytes: disk}, nil
	}
	d := Difference{More: p.more}
	if d.Got, err = p.Sum(size); d.Got == text {
		d.Got = ""
	}
	return d, err
}

// Compare reads a disk and compares it with the digest text: behind the bytes that this is
// of there may be zeros, as on a larger device.
func Compare(ctx context.Context, d Disk, text string) (Difference, error) {
	size, err := Bytes(text)
	if err != nil {
		return Difference{}, err
	}
	p := NewPrefix(size)
	if d.Size() >= size {
		err = read(ctx, d, []extent.Range{{Length: min(p.end, d.Size())}}, p.Add)
	}
	if err != nil {
		return Difference{}, err
	}
	found, err := p.Difference(d.Size(), text)
	if err != nil || found != (Difference{}) || d.Size() <= p.end {
		return found, err
	}
	if err := read(ctx, d, []extent.Range{{Start: p.end, Length: d.Size() - p.end}}, p.Add); err != nil {
		return Difference{}, err
	}
	return p.Difference(d.Size(), text)
}
