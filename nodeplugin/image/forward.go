package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// Spool keeps what has to be read again of a stream that comes once. It is used by
// one image and holds nothing before.
type Spool interface {
	io.WriterAt
	io.ReaderAt
	// Bytes are the most that it holds.
	Bytes() int64
}

const (
	// tapeBytes that have passed can still be read, so that what is read by several
	// readers at once, and tables a little before their data, may come in any order.
	tapeBytes = 16 << 20
	// tapeAhead bytes are known beyond what was asked for: nothing that is read at
	// once is longer, so that the end is known before it is read over.
	tapeAhead = 4 << 20
	// tapePages that were read last for compressed clusters are kept longer. qemu fills
	// up a cluster with small ones while it writes others, that it can't compress, far
	// behind.
	tapePages = 64
	tapePage  = 64 << 10
	// tapeLeap is the farthest that a header may point ahead.
	tapeLeap = 16 << 20
)

// openForward opens an image of format f that comes once, from its first byte to
// its last, which is at size (-1 unknown). It takes stream over when it returns no
// error.
//
// Without a spool the disk is read while the file passes, which goes where its
// tables come before the data that they describe, as in what qemu-img convert
// writes. Where it does not, Open or a read returns the fault NeedsSpool. What the
// headers alone tell is refused either way.
func openForward(ctx context.Context, stream io.ReadCloser, size int64, f format, compression string, o Options) (opened *Opened, err error) {
	if o.Spool != nil {
		return openSpooled(ctx, stream, f, compression, o)
	}
	t := newTape(stream, size)
	if err := t.pass(tapeAhead); err != nil {
		return nil, err
	}
	whole := t.size == t.pos // all of it can be read at any time
	t.leap = tapeLeap
	switch {
	case whole, f.opens == asQcow2:
		opened, err = openAs(ctx, t, f, o)
	case f.opens == asVMDK:
		opened, err = openVMDKForward(ctx, t)
	case f.opens == asTar:
		came := bytes.NewReader(bytes.Clone(t.ring[:t.pos]))
		return openOVAForward(ctx, both{io.MultiReader(came, stream), stream}, size, compression, o)
	default:
		err = needsSpool(fmt.Errorf("a %s image has tables far from the data that they describe", f.name))
	}
	if err == nil {
		err = opened.compare(ctx, t)
	}
	if err != nil {
		return nil, err
	}
	opened.Info.Compression, opened.tape, opened.below = compression, t, stream
	if !whole {
		opened.Disk = passing{opened.Disk}
	}
	t.leap = math.MaxInt64
	return opened, nil
}

// needsSpool is the fault of an image that cannot be read while it passes.
func needsSpool(err error) error {
	return fault.Terminal(fault.NeedsSpool,
		fmt.Errorf("the image comes only from its beginning to its end, and has to be read in another order: %w: serve it from a server that answers Range requests, or without compression, or convert it (qemu-img convert -O qcow2)", err))
}

// tape is a stream that is read as if it were a file, as long as nobody goes back
// farther than tapeBytes.
type tape struct {
	src io.ReadCloser

	mu   sync.Mutex
	ring []byte
	pos  int64 // bytes that have passed, the last of them in ring
	size int64 // -1 while the end is not known
	leap int64
	err  error
	kept []tapeKept // the one that was used last at the end

	// blob, where there is one, has what has passed too long ago, what is far ahead, and
	// what lies before start, where the stream begins.
	blob  Ranged
	start int64
}

type tapeKept struct {
	at int64
	b  []byte
}

func newTape(src io.ReadCloser, size int64) *tape {
	return &tape{src: src, ring: make([]byte, tapeBytes), size: size, leap: math.MaxInt64}
}

// Size is more than any file has while the end is not known.
func (t *tape) Size() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.size < 0 {
		return math.MaxInt64 >> 1
	}
	return t.size
}

// ReadAtContext returns the fault NeedsSpool for what has passed too long ago. It
// ends with the context of the stream.
func (t *tape) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if t.blob != nil && t.apart(off) {
		return t.blob.ReadAtContext(ctx, p, off)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	end := off + int64(len(p))
	if end-t.pos > t.leap {
		return 0, needsSpool(fmt.Errorf("it begins with a reference to byte %d", off))
	}
	if err := t.pass(end + tapeAhead); err != nil {
		return 0, err
	}
	n := max(0, min(int64(len(p)), t.pos-off))
	for done := int64(0); done < n; {
		at := off + done
		page := at - at%tapePage
		if i := slices.IndexFunc(t.kept, func(k tapeKept) bool { return k.at == page }); i >= 0 {
			done += int64(copy(p[done:n], t.kept[i].b[at-page:]))
			continue
		}
		if at < t.pos-tapeBytes {
			if t.blob != nil { // it has just passed
				return t.blob.ReadAtContext(ctx, p, off)
			}
			return 0, needsSpool(fmt.Errorf("byte %d is wanted after byte %d", at, t.pos))
		}
		done += int64(copy(p[done:min(n, page+tapePage-off)], t.ring[at%tapeBytes:]))
	}
	if n < int64(len(p)) {
		// A table may claim a little too much; with the file at hand that is told.
		return int(n), needsSpool(fmt.Errorf("byte %d is wanted of a file of %d", end, t.size))
	}
	return int(n), nil
}

// apart says that byte off is better read apart.
func (t *tape) apart(off int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return off < max(t.start, t.pos-tapeBytes) || off > t.pos+tapeLeap
}

// gone is before what can still be read.
func (t *tape) gone() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pos - tapeBytes
}

// ends says that the file's end is known, and not behind off.
func (t *tape) ends(off int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.size >= 0 && t.size == t.pos && t.size <= off
}

// endsBy says that the file ends at off, or before; all but that byte has been read.
func (t *tape) endsBy(ctx context.Context, off int64) (bool, error) {
	_, err := t.ReadAtContext(ctx, make([]byte, 1), off)
	if t.ends(off) {
		return true, nil
	}
	return false, err
}

// keep holds on to the pages of n bytes at off, which have just been read.
func (t *tape) keep(off, n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for page := off - off%tapePage; page < off+n; page += tapePage {
		k := tapeKept{at: page}
		i := slices.IndexFunc(t.kept, func(k tapeKept) bool { return k.at == page })
		switch {
		case i >= 0:
			k = t.kept[i]
			t.kept = slices.Delete(t.kept, i, i+1)
		case page < max(t.start, t.pos-tapeBytes), page+tapePage > t.pos && t.pos != t.size:
			continue // it was read apart
		default:
			if len(t.kept) == tapePages {
				k.b = t.kept[0].b
				t.kept = slices.Delete(t.kept, 0, 1)
			}
			at := page % tapeBytes // a multiple of a page's length, as tapeBytes is
			k.b = append(k.b[:0], t.ring[at:at+min(tapePage, t.pos-page)]...)
		}
		t.kept = append(t.kept, k)
	}
}

// pass reads the stream up to byte end, or to its own.
func (t *tape) pass(end int64) error {
	for t.pos < end && t.err == nil {
		at := t.pos % tapeBytes
		var n int
		n, t.err = t.src.Read(t.ring[at:min(tapeBytes, at+end-t.pos)])
		t.pos += int64(n)
	}
	if !errors.Is(t.err, io.EOF) || isFault(t.err) {
		return t.err
	}
	if t.size >= 0 && t.size != t.pos {
		return fault.Transient(fault.ConnectionFailed, fmt.Errorf("the stream of %d bytes ended after %d", t.size, t.pos))
	}
	t.size = t.pos
	return nil
}

func isFault(err error) bool {
	f := (*fault.Fault)(nil)
	return errors.As(err, &f)
}

// rest reads to byte to, or to the stream's end, where the checks of a compression are.
func (t *tape) rest(ctx context.Context, to int64) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		t.mu.Lock()
		err := t.pass(t.pos + tapeAhead)
		ended := t.size == t.pos || t.pos >= to
		t.mu.Unlock()
		if err != nil || ended {
			return err
		}
	}
}

// passing is a disk that is read while its file passes: in order, and not asked for
// what lies far ahead.
type passing struct{ Disk }

// Ahead is how far it may be read before what is in front of that; the rest of what
// is kept is for what lies between in the file.
func (passing) Ahead() int64 { return tapeBytes / 2 }

// openSpooled writes the whole image to the spool and opens it there.
func openSpooled(ctx context.Context, stream io.ReadCloser, f format, compression string, o Options) (*Opened, error) {
	buf := make([]byte, mappedSpan)
	n := int64(0)
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		m, err := io.ReadFull(stream, buf)
		ended := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && (!ended || isFault(err)) {
			return nil, fmt.Errorf("read the image at %d: %w", n, err)
		}
		if int64(m) > o.Spool.Bytes()-n {
			return nil, fault.Transient(fault.NoSpace,
				fmt.Errorf("the %s image has more than the %d bytes that there is room for while it is unpacked: free space where the target lies, or serve the image in a way that needs no unpacking (in ranges and without compression)", f.name, o.Spool.Bytes()))
		}
		if _, err := o.Spool.WriteAt(buf[:m], n); err != nil {
			return nil, fault.Transient(fault.NoSpace, fmt.Errorf("unpack the image: write %d bytes at %d: %w: free space where the target lies", m, n, err))
		}
		if n += int64(m); ended {
			break
		}
	}
	opened, err := openAs(ctx, spooled{o.Spool, n}, f, o)
	if err == nil {
		err = opened.compare(ctx, spooled{o.Spool, n})
	}
	if err != nil {
		return nil, err
	}
	opened.Info.Compression, opened.below = compression, stream
	return opened, nil
}

// spooled is the image in a spool.
type spooled struct {
	Spool
	bytes int64
}

func (s spooled) Size() int64 { return s.bytes }

func (s spooled) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	want := max(0, min(int64(len(p)), s.bytes-off))
	n, err := s.Spool.ReadAt(p[:want], off)
	if int64(n) < want {
		return n, fault.Transient(fault.TargetError, fmt.Errorf("read %d bytes at %d of the unpacked image, got %d: %w", want, off, n, err))
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}
