package image

import (
	"bufio"
	"compress/bzip2"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/klauspost/compress/gzip"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/native"
)

// compression is a way to wrap the bytes of an image.
type compression struct {
	name string
	// open decompresses r to its end, however many parts that has.
	open func(r *bufio.Reader) (io.ReadCloser, error)
	// words say of an error of open's or its reader's, read bytes after the start,
	// what is wrong with the stream; "" where it is nothing special.
	words func(err error, read int64) string
	// atLeast is a lower bound of the decompressed bytes that the first and the last
	// of the compressed ones tell, these nil where they can't be read; nil: they tell
	// nothing.
	atLeast func(first, last []byte) int64
	// blocks finds the parts that decompress each on its own, nil where they cannot
	// be found or there is but one; nil: the format has none.
	blocks func(ctx context.Context, c compression, b Ranged) (*blocked, error)
}

var compressions = []compression{
	{name: "gzip", open: openGzip, words: wordsOfGzip, atLeast: atLeastOfGzip},
	{name: "xz", open: openXZ, words: wordsOfXZ, blocks: blocksOfXZ},
	{name: "zstd", open: openZstd, words: wordsOfZstd, atLeast: atLeastOfZstd, blocks: blocksOfZstd},
	{name: "bzip2", open: openBzip2, words: wordsOfBzip2},
}

func compressionOf(f format) compression {
	return compressions[slices.IndexFunc(compressions, func(c compression) bool { return c.name == f.name })]
}

// openCompressed opens the image in b, which c has compressed.
func openCompressed(ctx context.Context, b Ranged, c compression, h head, o Options) (*Opened, error) {
	var blocks *blocked
	var err error
	if c.blocks != nil {
		if blocks, err = c.blocks(ctx, c, b); err != nil {
			return nil, err
		}
	}
	if blocks != nil && blocks.readable() && o.Pass == nil {
		if opened, err := openBlocked(ctx, blocks, c, o); opened != nil || err != nil {
			return opened, err
		}
	}
	var src io.ReadCloser = newReadAhead(ctx, b, 0, readAheadDepth)
	var tapped *passed
	if o.Pass != nil {
		tapped = o.Pass.stream(src, 0)
		src = tapped
	}
	opened, err := openPacked(ctx, src, c, o)
	if err != nil {
		src.Close()
		return nil, err
	}
	opened.passed = tapped
	switch {
	case opened.Stream == nil: // the image told its size
	case blocks != nil:
		opened.bytes(blocks.Size())
		opened.Info.VirtualSize = opened.Info.AtLeast
	case c.atLeast != nil:
		first := make([]byte, shortHead)
		n, err := h.first(first)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("read the first bytes of the image: %w", err), opened.Close())
		}
		last, err := h.last()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("read the last bytes of the image: %w", err), opened.Close())
		}
		opened.bytes(c.atLeast(first[:n], last))
	}
	return opened, nil
}

// openBlocked opens the image in blocks, of which each decompresses on its own; nil,
// nil where it is to be spooled.
func openBlocked(ctx context.Context, blocks *blocked, c compression, o Options) (*Opened, error) {
	h := headOf(ctx, blocks)
	f, err := o.recognise(h)
	if err == nil && f.opens == asCompressed {
		err = nested(f)
	}
	var opened *Opened
	switch {
	case err != nil:
	case f.opens == asRaw:
		opened = openRaw(blocks, f.name)
	case o.Spool != nil:
		return nil, blocks.Close()
	default:
		blocks.keepRecent = true
		opened, err = openAs(ctx, blocks, f, o)
		if err == nil && len(opened.Digests) > 0 { // whose files are to be read whole
			return nil, blocks.Close()
		}
	}
	if err != nil {
		blocks.Close()
		return nil, fmt.Errorf("inside %s: %w", c.name, err)
	}
	opened.Disk = newInParts(opened.Disk, blocks)
	opened.Info.Compression, opened.blocks, opened.below = c.name, blocks, blocks
	return opened, nil
}

// openPacked opens the image in a stream that c has compressed. It takes src over
// when it returns no error.
func openPacked(ctx context.Context, src io.ReadCloser, c compression, o Options) (_ *Opened, err error) {
	u, err := newUnpacked(src, c)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			u.r.Close()
		}
	}()
	r := &peeker{r: u}
	f, err := o.recognise(head{first: r.peek})
	if err != nil {
		return nil, fmt.Errorf("inside %s: %w", c.name, err)
	}
	switch f.opens {
	case asCompressed:
		return nil, fmt.Errorf("inside %s: %w", c.name, nested(f))
	case asFooted:
		if o.Spool != nil {
			return openSpooled(ctx, both{r, u}, f, c.name, o)
		}
		fallthrough
	case asRaw:
		opened := openFooted(both{r, u}, -1, f, o)
		opened.Info.Compression = c.name
		return opened, nil
	}
	return openForward(ctx, both{r, u}, -1, f, c.name, o)
}

func nested(f format) error {
	return fault.Terminal(fault.FormatNotSupported, fmt.Errorf("it is compressed again, by %s: decompress it once, or give the disk inside", f.name))
}

// unpacked is the decompressed bytes of a stream. Of a broken one it says whose
// fault it is: the image's, or that of whoever delivers it.
type unpacked struct {
	c    compression
	src  *watched
	r    io.ReadCloser
	read int64
}

func newUnpacked(src io.ReadCloser, c compression) (*unpacked, error) {
	u := &unpacked{c: c, src: &watched{ReadCloser: src}}
	var err error
	if u.r, err = c.open(bufio.NewReaderSize(u.src, 64<<10)); err != nil {
		return nil, u.explain(err)
	}
	return u, nil
}

func (u *unpacked) Read(p []byte) (int, error) {
	n, err := u.r.Read(p)
	u.read += int64(n)
	if err == nil || errors.Is(err, io.EOF) {
		return n, err
	}
	return n, u.explain(err)
}

// Close has nothing to say of what was read.
func (u *unpacked) Close() error {
	u.r.Close()
	return u.src.Close()
}

func (u *unpacked) explain(err error) error {
	if u.src.err != nil {
		return u.src.err
	}
	return brokenStream(u.c, err, u.read)
}

// brokenStream is the fault of a stream that c cannot decompress after read bytes.
func brokenStream(c compression, err error, read int64) error {
	if f := (*fault.Fault)(nil); errors.As(err, &f) {
		return err
	}
	what := ""
	if c.words != nil {
		what = c.words(err, read)
	}
	switch {
	case what != "":
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		what = "is cut short"
	default:
		what = "does not decompress"
	}
	return fault.Terminal(fault.CorruptImage,
		fmt.Errorf("the %s stream %s after %d decompressed bytes: compress and upload the image again: %w", c.name, what, read, err))
}

const behindTheEnd = "has bytes behind its end that are of no such stream"

// watched keeps the error that is not the end.
type watched struct {
	io.ReadCloser
	err error
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		w.err = err
	}
	return n, err
}

func openGzip(r *bufio.Reader) (io.ReadCloser, error) {
	if z := native.Gzip(r); z != nil {
		return z, nil
	}
	return gzip.NewReader(r)
}

func wordsOfGzip(err error, read int64) string {
	switch {
	case errors.Is(err, gzip.ErrHeader) && read == 0:
		return "has a header that is not valid"
	case errors.Is(err, gzip.ErrHeader):
		return behindTheEnd
	case errors.Is(err, gzip.ErrChecksum):
		return "fails its checksum"
	}
	return ""
}

// atLeastOfGzip: the last four bytes are the length of the last member modulo
// 2^32 (RFC 1952 section 2.3.1), and the disk is no shorter than that.
func atLeastOfGzip(_, last []byte) int64 {
	if len(last) < 4 {
		return 0
	}
	return int64(binary.LittleEndian.Uint32(last[len(last)-4:]))
}

func openBzip2(r *bufio.Reader) (io.ReadCloser, error) {
	return io.NopCloser(bzip2.NewReader(r)), nil
}

func wordsOfBzip2(err error, _ int64) string {
	switch s := bzip2.StructuralError(""); {
	case !errors.As(err, &s):
		return ""
	case s == "bad magic value in continuation file":
		return behindTheEnd
	case s == "checksum mismatch", s == "file checksum mismatch":
		return "fails its checksum"
	}
	return ""
}
