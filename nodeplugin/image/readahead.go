package image

import (
	"context"
	"io"
)

const (
	// readAheadPiece bytes are read by one request, and usually readAheadDepth requests
	// run at once.
	readAheadPiece = 1 << 20
	readAheadDepth = 4
)

// readAhead reads a ranged blob from some byte to its end with several requests in
// flight, in memory of so many pieces.
type readAhead struct {
	ctx    context.Context
	cancel context.CancelFunc
	queue  chan chan piece
	now    piece
	off    int
	err    error
}

type piece struct {
	p   []byte
	err error
}

func newReadAhead(ctx context.Context, b Ranged, from int64, depth int) *readAhead {
	ctx, cancel := context.WithCancel(ctx)
	r := &readAhead{ctx: ctx, cancel: cancel, queue: make(chan chan piece, depth-2)}
	go func() {
		defer close(r.queue)
		for off := from; off < b.Size(); off += readAheadPiece {
			one := make(chan piece, 1)
			select {
			case r.queue <- one:
			case <-ctx.Done():
				return
			}
			go func() {
				p := scratch(int(min(readAheadPiece, b.Size()-off)))
				_, err := readExactly(ctx, b, p, off)
				one <- piece{p, err}
			}()
		}
	}()
	return r
}

func (r *readAhead) Read(p []byte) (int, error) {
	for r.err == nil && r.off == len(r.now.p) {
		one, ok := <-r.queue
		if !ok {
			// What was told to stop has not come to its end.
			if r.err = context.Cause(r.ctx); r.err == nil {
				r.err = io.EOF
			}
			break
		}
		free(r.now.p)
		r.now, r.off = <-one, 0
		r.err = r.now.err
	}
	if r.err != nil {
		return 0, r.err
	}
	n := copy(p, r.now.p[r.off:])
	r.off += n
	return n, nil
}

// Close ends the requests and waits for them.
func (r *readAhead) Close() error {
	r.cancel()
	for one := range r.queue {
		free((<-one).p)
	}
	if r.err == nil {
		r.err = context.Canceled
	}
	return nil
}
