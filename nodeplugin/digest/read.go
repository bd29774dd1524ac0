package digest

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	add := func(off, n int64, sums []Hash) error {
		mu.Lock()
		defer mu.Unlock()
		return t.Add(off, n, sums)
	}
	parts := make(chan extent.Range)
	g, ctx := errgroup.WithContext(ctx)
	missing := t.Missing(size)
	g.Go(func() error {
		defer close(parts)
		for _, gap := range missing {
			for at := gap.Start; at < gap.End(); at += window {
				if err := plan(ctx, d, extent.Range{Start: at, Length: min(window, gap.End()-at)}, parts, add); err != nil {
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
				if err := add(r.Start, r.Length, Sums(r.Start, p)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// plan enters what of r is zeros and sends the rest, in pieces of whole blocks.
func plan(ctx context.Context, d Disk, r extent.Range, parts chan<- extent.Range, add func(off, n int64, sums []Hash) error) error {
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
		if err := add(gap.Start, gap.Length, nil); err != nil {
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

// Of sums up a whole disk.
func Of(ctx context.Context, d Disk) (string, error) {
	t := &Tree{}
	if err := t.Complete(ctx, d, d.Size()); err != nil {
		return "", err
	}
	return t.Sum(d.Size())
}

// Difference says how a disk is not the one that a digest is of; the zero value: it is.
type Difference struct {
	// Bytes that the disk has, where these are fewer; else 0.
	Short int64
	// Got is the digest of as many bytes, where that is another.
	Got string
	// More: behind these bytes is something else than zeros.
	More bool
}

func (d Difference) String() string {
	switch {
	case d.Short > 0:
		return fmt.Sprintf("it has %d bytes only", d.Short)
	case d.Got != "":
		return "its digest is " + d.Got
	case d.More:
		return "behind its end is something else than zeros"
	}
	return "it is the same"
}

// Compare reads a disk and compares it with the digest text: behind the bytes that this is
// of there may be zeros, as on a larger device.
func Compare(ctx context.Context, d Disk, text string) (Difference, error) {
	size, err := Bytes(text)
	if err != nil {
		return Difference{}, err
	}
	if d.Size() < size {
		return Difference{Short: d.Size()}, nil
	}
	whole := &Tree{}
	if err := whole.Complete(ctx, d, size); err != nil {
		return Difference{}, err
	}
	got, err := whole.Sum(size)
	if err != nil || got != text {
		return Difference{Got: got}, err
	}
	_, end := blocks(0, size)
	rest := extent.Range{Start: end * Block, Length: max(0, d.Size()-end*Block)}
	if rest.Length == 0 {
		return Difference{}, nil
	}
	more, nothing := &Tree{}, &Tree{}
	if size > 0 {
		err = more.Add(0, rest.Start, nil)
	}
	if err == nil {
		err = more.Complete(ctx, d, d.Size())
	}
	if err == nil {
		err = nothing.Add(0, d.Size(), nil)
	}
	if err != nil {
		return Difference{}, err
	}
	a, aerr := more.Sum(d.Size())
	b, berr := nothing.Sum(d.Size())
	return Difference{More: a != b}, errors.Join(aerr, berr)
}
