package image

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// openGzip opens the disk inside a gzip stream, of one member or many. It
// closes src itself when it returns an error.
func openGzip(src io.ReadCloser) (_ *Opened, err error) {
	defer func() {
		if err != nil {
			src.Close()
		}
	}()
	g := &gunzip{src: &watched{Reader: src}}
	if g.gz, err = gzip.NewReader(bufio.NewReaderSize(g.src, 64<<10)); err != nil {
		return nil, g.explain(err)
	}
	r := &peeker{r: g}
	f, err := recognise(head{first: r.peek})
	if err != nil {
		return nil, fmt.Errorf("inside gzip: %w", err)
	}
	if f.opens != asRaw {
		return openForward(both{r, src}, f, "gzip")
	}
	return &Opened{
		Info:   Info{Format: f.name, Compression: "gzip", VirtualSize: -1, AllocatedBytes: -1},
		Stream: both{r, src},
	}, nil
}

// gunzip says of a broken stream whose fault it is: the image's, or that of
// whoever delivers it.
type gunzip struct {
	src  *watched
	gz   *gzip.Reader
	read int64
}

func (g *gunzip) Read(p []byte) (int, error) {
	n, err := g.gz.Read(p)
	g.read += int64(n)
	if err == nil || errors.Is(err, io.EOF) {
		return n, err
	}
	return n, g.explain(err)
}

func (g *gunzip) explain(err error) error {
	if g.src.err != nil {
		return g.src.err
	}
	what := "does not decompress"
	switch {
	case errors.Is(err, gzip.ErrHeader) && g.read == 0:
		what = "has a header that is not valid"
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		what = "is cut short"
	case errors.Is(err, gzip.ErrHeader):
		what = "has bytes behind its end that are not gzip"
	case errors.Is(err, gzip.ErrChecksum):
		what = "fails its checksum"
	}
	return fault.Terminal(fault.CorruptImage,
		fmt.Errorf("the gzip stream %s after %d decompressed bytes: compress and upload the image again: %w", what, g.read, err))
}

// watched keeps the error that is not the end.
type watched struct {
	io.Reader
	err error
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		w.err = err
	}
	return n, err
}

const (
	// readAheadPiece bytes are read by one request, readAheadDepth requests run at once.
	readAheadPiece = 1 << 20
	readAheadDepth = 4
)

// readAhead reads a ranged blob from beginning to end with several requests in
// flight, in memory of readAheadDepth pieces.
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

func newReadAhead(ctx context.Context, b Ranged) *readAhead {
	ctx, cancel := context.WithCancel(ctx)
	r := &readAhead{ctx: ctx, cancel: cancel, queue: make(chan chan piece, readAheadDepth-2)}
	go func() {
		defer close(r.queue)
		for off := int64(0); off < b.Size(); off += readAheadPiece {
			one := make(chan piece, 1)
			select {
			case r.queue <- one:
			case <-ctx.Done():
				return
			}
			go func() {
				p := make([]byte, min(readAheadPiece, b.Size()-off))
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
		<-one
	}
	if r.err == nil {
		r.err = context.Canceled
	}
	return nil
}
