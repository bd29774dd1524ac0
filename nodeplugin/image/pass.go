package image

import (
	"context"
	"errors"
	"io"
)

// passDepth requests run at once: with what a tape keeps, less than 32 MiB of the file are
// held between what has gone by and what is still to come (R13).
const passDepth = 8

// Pass has every byte of a blob go by, in the order of the file, so that somebody can
// sum them up.
type Pass struct {
	// Tap sees bytes that begin at off of the blob. The first call is at From, or at 0
	// where the image has to be read from its beginning; each begins where the one
	// before it ended, and no two are made at once.
	Tap func(off int64, p []byte)
	// From is where the pass may begin, in bytes: what lies before has gone by already.
	From int64
	// To is where it may end, 0 for the blob's end: little of what lies behind goes by.
	To int64
	// Pinned: the blob's bytes are the same however often they are read. Then what is
	// wanted out of order is read apart, and the pass may begin at From.
	Pinned bool
}

// stream is src with its bytes, which begin at off, going by.
func (p *Pass) stream(src io.ReadCloser, off int64) *passed {
	return &passed{src, p, off}
}

type passed struct {
	io.ReadCloser
	pass *Pass
	off  int64
}

func (s *passed) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p)
	if n > 0 {
		s.pass.Tap(s.off, p[:n])
		s.off += int64(n)
	}
	return n, err
}

// rest reads what nobody has asked for.
func (s *passed) rest(ctx context.Context) error {
	buf := make([]byte, readAheadPiece)
	for s.pass.To == 0 || s.off < s.pass.To {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := s.Read(buf); err != nil {
			if errors.Is(err, io.EOF) && !isFault(err) {
				return nil
			}
			return err
		}
	}
	return nil
}

// openPassing opens the image of format f in a pinned blob, whose bytes go by while
// the disk is read.
func openPassing(ctx context.Context, b Ranged, f format, o Options) (*Opened, error) {
	from := min(o.Pass.From, b.Size())
	src := o.Pass.stream(newReadAhead(ctx, b, from, passDepth), from)
	t := newTape(src, b.Size())
	t.pos, t.start, t.blob = from, from, b
	opened, err := openAs(ctx, t, f, o)
	if err != nil {
		src.Close()
		return nil, err
	}
	opened.Disk, opened.tape, opened.passed, opened.below = passing{opened.Disk}, t, src, src
	return opened, nil
}

// Resumable says that a pass may begin where this one was.
func (o *Opened) Resumable() bool { return o.tape != nil && o.tape.blob != nil }
