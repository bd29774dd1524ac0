package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Ranged is read anywhere; its ReadAtContext fills p or returns an error.
type Ranged interface {
	Size() int64
	ReadAtContext(ctx context.Context, p []byte, off int64) (int, error)
}

const (
	aheadLeast = 64 << 10 // are read at a place where nothing was read before
	aheadPiece = 1 << 20  // are read at once, at most
	aheadMost  = 8 << 20  // are under way or waiting, at most
)

// Ahead reads what is Ranged in order: the longer that goes on, the more of it is
// under way, in pieces of their own. A Seek goes forwards from here and costs nothing
// by itself.
type Ahead struct {
	ctx    context.Context //nolint:containedctx // lives as long as the reader
	cancel context.CancelFunc
	src    Ranged

	off    int64
	queue  []*piece // one behind the other, off is in the first
	window int64
	spare  [][]byte
	wait   sync.WaitGroup
}

type piece struct {
	at   int64
	b    []byte
	done chan error // is sent once, and closed
}

// NewAhead begins at byte 0. Reads end with ctx; the caller closes it.
func NewAhead(ctx context.Context, src Ranged) *Ahead {
	a := &Ahead{src: src, window: aheadLeast}
	a.ctx, a.cancel = context.WithCancel(ctx)
	return a
}

// Close ends what is under way and waits for it.
func (a *Ahead) Close() error {
	a.cancel()
	a.wait.Wait()
	return nil
}

// Seek is io.Seeker's, for io.SeekCurrent and what is not behind.
func (a *Ahead) Seek(n int64, whence int) (int64, error) {
	if whence != io.SeekCurrent || n < 0 {
		return 0, fmt.Errorf("seek %d bytes: %w", n, errors.ErrUnsupported)
	}
	a.off += n
	return a.off, nil
}

// Read is io.Reader's.
func (a *Ahead) Read(p []byte) (int, error) {
	if a.off >= a.src.Size() || len(p) == 0 {
		return 0, io.EOF
	}
	for len(a.queue) > 0 && a.queue[0].at+int64(len(a.queue[0].b)) <= a.off {
		a.drop()
	}
	if len(a.queue) == 0 {
		a.window = aheadLeast
	}
	a.fetch()
	first := a.queue[0]
	if err := <-first.done; err != nil {
		return 0, err
	}
	n := copy(p, first.b[a.off-first.at:])
	if a.off += int64(n); a.off == first.at+int64(len(first.b)) {
		a.window = min(2*a.window, aheadMost) // it was wanted to its end
	}
	return n, nil
}

// drop forgets the first piece, once nobody writes to it.
func (a *Ahead) drop() {
	_ = <-a.queue[0].done // nobody asks for these bytes any more
	if len(a.queue[0].b) == aheadPiece {
		a.spare = append(a.spare, a.queue[0].b)
	}
	a.queue = a.queue[1:]
}

// fetch begins to read what the window has room for.
func (a *Ahead) fetch() {
	next, under := a.off, int64(0)
	if n := len(a.queue); n > 0 {
		next = a.queue[n-1].at + int64(len(a.queue[n-1].b))
		under = next - a.queue[0].at
	}
	for left := a.src.Size() - next; left > 0 && (under < a.window || len(a.queue) == 0); left = a.src.Size() - next {
		n := min(left, aheadPiece, max(a.window/4, aheadLeast))
		f := &piece{at: next, b: a.buffer(n), done: make(chan error, 1)}
		a.queue = append(a.queue, f)
		a.wait.Go(func() {
			_, err := a.src.ReadAtContext(a.ctx, f.b, f.at)
			if errors.Is(err, io.EOF) {
				err = fmt.Errorf("read %d bytes at %d: %w", len(f.b), f.at, io.ErrUnexpectedEOF)
			}
			f.done <- err
			close(f.done)
		})
		next, under = next+n, under+n
	}
}

func (a *Ahead) buffer(n int64) []byte {
	if last := len(a.spare) - 1; n == aheadPiece && last >= 0 {
		b := a.spare[last]
		a.spare = a.spare[:last]
		return b
	}
	return make([]byte, n)
}
