package image

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// Zstandard is RFC 8878. Files that can be read anywhere end with a table of their
// frames, in a frame to be skipped: "Zstandard Seekable Format", version 0.1.0, of
// the zstd project (contrib/seekable_format).
const (
	zstdSkippable   = 0x184d2a5e
	zstdSeekable    = 0x8f92eab1
	zstdSeekFooter  = 9
	zstdSeekFrames  = 1 << 17 // so many are read anywhere
	zstdSeekSummed  = 1 << 7  // descriptor bit: each entry has a checksum
	zstdSeekUnknown = 0x7c    // descriptor bits that must be 0
	// zstdSeekWindow is what a frame may have for its window however short it is, so
	// much every decoder should grant (RFC 8878 section 3.1.1.1.2).
	zstdSeekWindow = 8 << 20
)

func openZstd(r *bufio.Reader) (io.ReadCloser, error) {
	d, err := zstd.NewReader(r, zstd.WithDecoderMaxWindow(WindowBytes), zstd.WithDecoderMaxMemory(math.MaxInt64), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, err
	}
	return zstdReader{d.IOReadCloser(), WindowBytes}, nil
}

// zstdReader words what people are to do. Windows have at most that many bytes.
type zstdReader struct {
	io.ReadCloser
	most int64
}

func (r zstdReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	switch {
	case errors.Is(err, zstd.ErrWindowSizeExceeded):
		err = fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the zstd stream needs a window of more than %d bytes: compress the image again with a smaller one (--long=27 has %d): %w", r.most, int64(WindowBytes), err))
	case errors.Is(err, zstd.ErrUnknownDictionary):
		err = fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the zstd stream needs a dictionary that is not in it: compress the image again without one: %w", err))
	}
	return n, err
}

func wordsOfZstd(err error, read int64) string {
	switch {
	case errors.Is(err, zstd.ErrMagicMismatch) && read > 0:
		return behindTheEnd
	case errors.Is(err, zstd.ErrCRCMismatch), errors.Is(err, errSeekSum):
		return "fails its checksum"
	}
	return ""
}

// zstdFrameBytes is the length of the frame that b begins with (RFC 8878 section 3.1.1), 0 where
// it has no end there.
func zstdFrameBytes(b []byte) int {
	var h zstd.Header
	if err := h.Decode(b); err != nil || h.Skippable {
		return 0
	}
	at := h.HeaderSize
	for last := false; !last; {
		if len(b)-at < 3 {
			return 0
		}
		block := int(b[at]) | int(b[at+1])<<8 | int(b[at+2])<<16
		last = block&1 != 0
		n := block >> 3
		if block>>1&3 == 1 { // one byte, repeated
			n = 1
		}
		if at += 3 + n; at > len(b) {
			return 0
		}
	}
	if h.HasCheckSum {
		at += 4
	}
	return min(at, len(b))
}

// atLeastOfZstd is what the first frame says of its content.
func atLeastOfZstd(first, _ []byte) int64 {
	var h zstd.Header
	if err := h.Decode(first); err != nil || !h.HasFCS || h.FrameContentSize > math.MaxInt64 {
		return 0
	}
	return int64(h.FrameContentSize)
}

// blocksOfZstd finds the frames by the table at the end, nil where there is none.
func blocksOfZstd(ctx context.Context, zs compression, b Ranged) (*blocked, error) {
	var foot [zstdSeekFooter]byte
	if b.Size() < zstdSeekFooter+8 {
		return nil, nil
	}
	if _, err := readExactly(ctx, b, foot[:], b.Size()-zstdSeekFooter); err != nil {
		return nil, err
	}
	frames, flags := int64(binary.LittleEndian.Uint32(foot[:])), foot[4]
	if binary.LittleEndian.Uint32(foot[5:]) != zstdSeekable || flags&zstdSeekUnknown != 0 || frames > zstdSeekFrames {
		return nil, nil
	}
	entry := int64(8)
	if flags&zstdSeekSummed != 0 {
		entry = 12
	}
	table := make([]byte, 8+frames*entry)
	tableAt := b.Size() - zstdSeekFooter - int64(len(table))
	if tableAt < 0 {
		return nil, nil
	}
	if _, err := readExactly(ctx, b, table, tableAt); err != nil {
		return nil, err
	}
	if binary.LittleEndian.Uint32(table) != zstdSkippable || int64(binary.LittleEndian.Uint32(table[4:])) != frames*entry+zstdSeekFooter {
		return nil, nil
	}
	ats, starts := make([]int64, 1, frames+1), make([]int64, 1, frames+1)
	longest := int64(0)
	for i := range frames {
		e := table[8+i*entry:]
		length := int64(binary.LittleEndian.Uint32(e[4:]))
		ats = append(ats, ats[i]+int64(binary.LittleEndian.Uint32(e)))
		starts = append(starts, starts[i]+length)
		longest = max(longest, length)
	}
	if ats[frames] != tableAt {
		return nil, brokenStream(zs, fmt.Errorf("the table of frames ends at %d and itself begins at %d", ats[frames], tableAt), 0)
	}
	// A decoder allocates the whole window, whatever the frame's length. Where that
	// is out of proportion, one is to serve all frames, one after the other.
	window := int64(zstdSeekWindow)
	for window < min(longest, WindowBytes) {
		window *= 2
	}
	first := make([]byte, zstd.HeaderMaxSize)
	n, err := readUpTo(ctx, b, first, 0)
	if err != nil {
		return nil, err
	}
	var h zstd.Header
	if err := h.Decode(first[:n]); err != nil || h.WindowSize > uint64(window) {
		return nil, nil
	}
	return newBlocked(zs, starts, window, func(i int) (io.ReadCloser, error) {
		one := zs
		one.open = func(r *bufio.Reader) (io.ReadCloser, error) {
			d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(uint64(window)), zstd.WithDecoderMaxMemory(math.MaxInt64), zstd.WithDecoderLowmem(true))
			if err != nil {
				return nil, err
			}
			f := &zstdFrame{ReadCloser: zstdReader{d.IOReadCloser(), window}}
			if flags&zstdSeekSummed != 0 {
				f.sum, f.want = xxhash.New(), binary.LittleEndian.Uint32(table[8+int64(i)*entry+8:])
			}
			return f, nil
		}
		return newUnpacked(newReadAhead(ctx, section{b, span{ats[i], ats[i+1] - ats[i]}}, 0, readAheadDepth), one)
	}), nil
}

var errSeekSum = errors.New("a frame fails the checksum in the table of frames")

// zstdFrame compares its content with the table's checksum: the low 32 bits of
// XXH64.
type zstdFrame struct {
	io.ReadCloser
	sum  *xxhash.Digest
	want uint32
}

func (f *zstdFrame) Read(p []byte) (int, error) {
	n, err := f.ReadCloser.Read(p)
	if f.sum == nil {
		return n, err
	}
	_, _ = f.sum.Write(p[:n])
	if errors.Is(err, io.EOF) && uint32(f.sum.Sum64()) != f.want {
		return n, errSeekSum
	}
	return n, err
}
