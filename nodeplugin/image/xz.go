package image

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"hash/crc64"
	"io"
	"math"
	"slices"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/native"
)

// The xz container is read as "The .xz File Format", version 1.2.1, has it
// (https://tukaani.org/xz/xz-file-format.txt). The numbers of sections below are
// those of that document.
const (
	xzMagic       = "\xfd7zXZ\x00"
	xzFooterMagic = "YZ"
	xzHeaderBytes = 12 // of stream headers and footers
	xzLZMA2       = 0x21
	xzSHA256      = 10
	// xzBlockHeaderBytes are the most that a block's header has.
	xzBlockHeaderBytes = 1024

	// xzIndexBytes are the most that the indexes of a file may have for it to be read
	// anywhere, xzBlocks the most blocks that they tell of, xzPaddingBytes so many
	// zeros may be behind a stream for that. Files with more of one of them are read
	// from beginning to end.
	xzIndexBytes   = 2 << 20
	xzBlocks       = 1 << 17
	xzPaddingBytes = 64 << 10
)

var crc64ECMA = crc64.MakeTable(crc64.ECMA)

// xzCheck is the check of a stream's blocks (section 3.4): nil, nil for none.
func xzCheck(id byte) (hash.Hash, error) {
	switch id {
	case 0:
		return nil, nil
	case 1:
		return crc32.NewIEEE(), nil
	case 4:
		return crc64.New(crc64ECMA), nil
	case xzSHA256:
		return sha256.New(), nil
	}
	return nil, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("xz with the check number %d is not supported: compress the image again with --check=crc64", id))
}

// openXZ reads one stream after the other.
func openXZ(r *bufio.Reader) (io.ReadCloser, error) {
	x := &xzStreams{r: &xzSource{r: r}}
	if err := x.header(); err != nil {
		return nil, err
	}
	return x, nil
}

// xzSource counts what is read, and sums it up while it is told to.
type xzSource struct {
	r   *bufio.Reader
	n   int64
	sum hash.Hash32
}

func (s *xzSource) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.n += int64(n)
	if s.sum != nil {
		s.sum.Write(p[:n])
	}
	return n, err
}

func (s *xzSource) ReadByte() (byte, error) {
	c, err := s.r.ReadByte()
	if err != nil {
		return 0, unexpected(err)
	}
	s.n++
	if s.sum != nil {
		s.sum.Write([]byte{c})
	}
	return c, nil
}

// Peek, Discard and Buffered make a native.Source of it; the chunks of a block
// are not summed up.
func (s *xzSource) Peek(n int) ([]byte, error) { return s.r.Peek(n) }

func (s *xzSource) Buffered() int { return s.r.Buffered() }

func (s *xzSource) Discard(n int) (int, error) {
	n, err := s.r.Discard(n)
	s.n += int64(n)
	return n, err
}

// full fills p.
func (s *xzSource) full(p []byte) error {
	_, err := io.ReadFull(s, p)
	return unexpected(err)
}

// zeros reads what is left of n bytes to a multiple of four (sections 3.3 and 4.4).
func (s *xzSource) zeros(n int64, what string) error {
	var pad [3]byte
	p := pad[:(4-n%4)%4]
	if err := s.full(p); err != nil {
		return err
	}
	if pad != [3]byte{} {
		return fmt.Errorf("%s is not padded with zeros", what)
	}
	return nil
}

// xzStreams is the content of concatenated streams (section 2).
type xzStreams struct {
	r     *xzSource
	err   error
	flags [2]byte
	block *xzBlock
	// What the blocks were, to compare with the index: their number, and a digest of
	// their lengths, so that the memory does not grow with them.
	blocks  int64
	lengths hash.Hash
}

func (x *xzStreams) Read(p []byte) (n int, err error) {
	for n == 0 && x.err == nil && len(p) > 0 {
		if x.block == nil {
			x.err = x.next()
			continue
		}
		if n, err = x.block.Read(p); errors.Is(err, io.EOF) {
			x.blocks++
			putLengths(x.lengths, x.block.unpadded, x.block.length)
			x.block.Close()
			x.block = nil
		} else {
			x.err = err
		}
	}
	if n > 0 {
		return n, nil
	}
	return 0, x.err
}

func (x *xzStreams) Close() error {
	if x.block != nil {
		return x.block.Close()
	}
	return nil
}

// header reads a stream's header (section 2.1.1).
func (x *xzStreams) header() error {
	var b [xzHeaderBytes]byte
	if err := x.r.full(b[:]); err != nil {
		return err
	}
	x.blocks, x.lengths = 0, sha256.New()
	x.flags = [2]byte(b[6:8])
	_, err := parseXZHeader(b[:])
	return err
}

// parseXZHeader returns the number of the check.
func parseXZHeader(b []byte) (check byte, err error) {
	switch {
	case string(b[:6]) != xzMagic:
		return 0, errors.New("no stream header where one begins")
	case binary.LittleEndian.Uint32(b[8:]) != crc32.ChecksumIEEE(b[6:8]):
		return 0, errors.New("the stream header fails its checksum")
	}
	return xzFlags([2]byte(b[6:8]))
}

func xzFlags(flags [2]byte) (check byte, err error) {
	if flags[0] != 0 || flags[1] > 15 {
		return 0, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("xz with the stream flags %x is not supported: compress the image again with xz 5", flags))
	}
	_, err = xzCheck(flags[1])
	return flags[1], err
}

// next opens the next block, or comes to the stream's end and to the next stream.
// io.EOF: there is no other.
func (x *xzStreams) next() (err error) {
	first, err := x.r.ReadByte()
	if err != nil {
		return err
	}
	if first != 0 {
		h, err := readXZBlockHeader(x.r, first)
		if err == nil {
			x.block, err = newXZBlock(x.r, h, x.flags[1])
		}
		return err
	}
	if err := x.index(); err != nil {
		return err
	}
	// Stream padding: zeros, four at a time (section 2.2).
	for {
		word, err := x.r.r.Peek(4)
		switch {
		case len(word) == 0:
			return err // io.EOF: the end
		case err != nil:
			return unexpected(err)
		case string(word) == xzMagic[:4]:
			return x.header()
		case !bytes.Equal(word, make([]byte, 4)):
			return errXZBehind
		}
		if _, err := x.r.r.Discard(4); err != nil {
			return err
		}
		x.r.n += 4
	}
}

// index compares the index and the footer with the blocks that were read
// (sections 4 and 2.1.2). Its first byte is read.
func (x *xzStreams) index() error {
	start := x.r.n - 1
	x.r.sum = crc32.NewIEEE()
	x.r.sum.Write([]byte{0})
	count, err := readVLI(x.r)
	if err != nil {
		return err
	}
	if count != x.blocks {
		return fmt.Errorf("the index has %d blocks and the stream %d", count, x.blocks)
	}
	lengths := sha256.New()
	for range count {
		unpadded, err := readVLI(x.r)
		if err != nil {
			return err
		}
		length, err := readVLI(x.r)
		if err != nil {
			return err
		}
		putLengths(lengths, unpadded, length)
	}
	if !bytes.Equal(lengths.Sum(nil), x.lengths.Sum(nil)) {
		return errors.New("the index contradicts the blocks")
	}
	if err := x.r.zeros(x.r.n-start, "the index"); err != nil {
		return err
	}
	sum := x.r.sum.Sum32()
	x.r.sum = nil
	var b [xzHeaderBytes]byte
	if err := x.r.full(b[:4]); err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(b[:]) != sum {
		return errors.New("the index fails its checksum")
	}
	indexBytes := x.r.n - start
	if err := x.r.full(b[:]); err != nil {
		return err
	}
	backward, err := parseXZFooter(b[:], x.flags)
	if err != nil {
		return err
	}
	if backward != indexBytes {
		return fmt.Errorf("the footer says that the index has %d bytes, and it has %d", backward, indexBytes)
	}
	return nil
}

// parseXZFooter returns the length of the index before the footer, in bytes.
func parseXZFooter(b []byte, flags [2]byte) (int64, error) {
	switch {
	case string(b[10:]) != xzFooterMagic:
		return 0, errors.New("no stream footer where one is due")
	case binary.LittleEndian.Uint32(b) != crc32.ChecksumIEEE(b[4:10]):
		return 0, errors.New("the stream footer fails its checksum")
	case [2]byte(b[8:10]) != flags:
		return 0, errXZFlags
	}
	return (int64(binary.LittleEndian.Uint32(b[4:])) + 1) * 4, nil
}

func putLengths(h hash.Hash, unpadded, length int64) {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], uint64(unpadded))
	binary.LittleEndian.PutUint64(b[8:], uint64(length))
	h.Write(b[:])
}

// readVLI reads an integer of variable length (section 1.2): at most 63 bits,
// and no byte more than it takes.
func readVLI(r io.ByteReader) (int64, error) {
	var v uint64
	for i := range 9 {
		c, err := r.ReadByte()
		if err != nil {
			return 0, unexpected(err)
		}
		v |= uint64(c&0x7f) << (7 * i)
		if c&0x80 == 0 {
			if c == 0 && i > 0 {
				return 0, errors.New("a number has more bytes than it takes")
			}
			return int64(v), nil
		}
	}
	return 0, errors.New("a number has more than 63 bits")
}

// xzBlockHeader is what a block says of itself (section 3.1).
type xzBlockHeader struct {
	bytes            int64 // of the header
	compressed, size int64 // of the block, -1 unknown
	claims           int64 // to look back, though it may be shorter
	dictionary       int64 // what it can look back
}

// readXZBlockHeader reads a block's header, of which first is the first byte.
func readXZBlockHeader(src *xzSource, first byte) (h xzBlockHeader, err error) {
	if first == 0 {
		return h, errors.New("an index where a block should be")
	}
	b := make([]byte, (int(first)+1)*4)
	b[0] = first
	if err := src.full(b[1:]); err != nil {
		return h, err
	}
	body := len(b) - 4
	if binary.LittleEndian.Uint32(b[body:]) != crc32.ChecksumIEEE(b[:body]) {
		return h, errors.New("a block header fails its checksum")
	}
	h = xzBlockHeader{bytes: int64(len(b)), compressed: -1, size: -1}
	flags := b[1]
	if flags&0x3c != 0 {
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("xz with the block flags %#x is not supported: compress the image again with xz 5", flags))
	}
	r := bytes.NewReader(b[2:body])
	if flags&0x40 != 0 {
		if h.compressed, err = readVLI(r); err != nil {
			return h, err
		}
	}
	if flags&0x80 != 0 {
		if h.size, err = readVLI(r); err != nil {
			return h, err
		}
	}
	filter, err := readVLI(r)
	if err != nil {
		return h, err
	}
	if filter != xzLZMA2 || flags&3 != 0 {
		return h, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("xz with other filters than LZMA2 (first number %#x, %d in all) is not supported: compress the image again without them", filter, flags&3+1))
	}
	n, err := readVLI(r)
	if err != nil {
		return h, err
	}
	bits, err := r.ReadByte()
	if err != nil || n != 1 || bits > 40 {
		return h, errors.New("the properties of LZMA2 are not valid")
	}
	if h.claims = 1<<32 - 1; bits < 40 {
		h.claims = int64(2|bits&1) << (bits/2 + 11)
	}
	h.dictionary = h.claims
	for r.Len() > 0 {
		if c, _ := r.ReadByte(); c != 0 {
			return h, errors.New("a block header is not padded with zeros")
		}
	}
	if h.size >= 0 {
		h.dictionary = min(h.dictionary, max(h.size, 4<<10)) // no more is ever looked back at
	}
	if h.dictionary > WindowBytes {
		return h, fault.Terminal(fault.FormatNotSupported,
			fmt.Errorf("the xz stream needs a dictionary of %d bytes, and %d are the most: compress the image again with a smaller one (xz -9 has 64 MiB)", h.dictionary, int64(WindowBytes)))
	}
	return h, nil
}

// xzBlock is the content of one block (section 3). Its end is io.EOF once its
// check and its lengths were right.
type xzBlock struct {
	xzBlockHeader
	src              *xzSource
	checkID          byte
	check            hash.Hash
	content          io.ReadCloser
	start            int64 // of the compressed data, in src
	unpadded, length int64 // as they are
	listed           int64 // unpadded as the index says, 0 unknown
	err              error
}

// newXZBlock reads the block behind its header.
func newXZBlock(src *xzSource, h xzBlockHeader, checkID byte) (b *xzBlock, err error) {
	b = &xzBlock{xzBlockHeader: h, src: src, checkID: checkID, start: src.n}
	if b.check, err = xzCheck(checkID); err != nil {
		return nil, err
	}
	if b.content = native.LZMA2(src, int(h.dictionary)); b.content == nil {
		b.content = io.NopCloser(newLZMA2(src, int(h.dictionary)))
	}
	return b, nil
}

func (b *xzBlock) Read(p []byte) (n int, err error) {
	if b.err != nil {
		return 0, b.err
	}
	n, err = b.content.Read(p)
	b.length += int64(n)
	if b.check != nil {
		b.check.Write(p[:n])
	}
	switch {
	case errors.Is(err, io.EOF):
		if b.err = b.finish(); b.err == nil {
			b.err = io.EOF
		}
	case b.size >= 0 && b.length > b.size:
		b.err = fmt.Errorf("a block has more than the %d bytes that its header says", b.size)
	default:
		b.err = err
	}
	if n > 0 {
		return n, nil
	}
	return 0, b.err
}

func (b *xzBlock) Close() error { return b.content.Close() }

// finish checks what follows the compressed data: padding and check (sections 3.3
// and 3.4).
func (b *xzBlock) finish() error {
	compressed := b.src.n - b.start
	switch {
	case b.size >= 0 && b.length != b.size:
		return fmt.Errorf("a block has %d bytes and its header says %d", b.length, b.size)
	case b.compressed >= 0 && compressed != b.compressed:
		return fmt.Errorf("a block has %d compressed bytes and its header says %d", compressed, b.compressed)
	}
	if err := b.src.zeros(compressed, "a block"); err != nil {
		return err
	}
	b.unpadded = b.bytes + compressed
	if b.check != nil {
		b.unpadded += int64(b.check.Size())
	}
	if b.listed > 0 && b.unpadded != b.listed {
		return fmt.Errorf("a block has %d bytes and the index says %d", b.unpadded, b.listed)
	}
	if b.check == nil {
		return nil
	}
	want := make([]byte, b.check.Size())
	if err := b.src.full(want); err != nil {
		return err
	}
	got := b.check.Sum(nil)
	if b.checkID != xzSHA256 {
		slices.Reverse(got) // the CRCs are little-endian, Go's sums are not
	}
	if !bytes.Equal(got, want) {
		return errXZCheck
	}
	return nil
}

var (
	errXZFlags  = errors.New("the stream's header and footer contradict each other")
	errXZCheck  = errors.New("a block fails its checksum")
	errXZBehind = errors.New("neither another stream nor zeros follow")
)

// blocksOfXZ finds the blocks by the indexes at the ends of the streams, nil
// where these are longer than is good, or where the last bytes are no footer:
// reading from the beginning tells what is wrong there.
func blocksOfXZ(ctx context.Context, xz compression, b Ranged) (*blocked, error) {
	type placed struct {
		at, unpadded, length int64
		check                byte
	}
	var backwards []placed
	window, budget := int64(4<<10), int64(xzIndexBytes)
	broken := func(err error) error { return brokenStream(xz, err, 0) }
	for end := b.Size(); end > 0; {
		var err error
		if end, err = skipXZPadding(ctx, b, end); err != nil || end < 2*xzHeaderBytes {
			return nil, err
		}
		var foot, head [xzHeaderBytes]byte
		if _, err := readExactly(ctx, b, foot[:], end-xzHeaderBytes); err != nil {
			return nil, err
		}
		indexBytes, err := parseXZFooter(foot[:], [2]byte(foot[8:10]))
		indexAt := end - xzHeaderBytes - indexBytes
		if budget -= indexBytes; err != nil || indexAt < xzHeaderBytes || budget < 0 {
			return nil, nil
		}
		index := make([]byte, indexBytes)
		if _, err := readExactly(ctx, b, index, indexAt); err != nil {
			return nil, err
		}
		records, err := parseXZIndex(index, xzBlocks-len(backwards))
		if err != nil {
			return nil, broken(err)
		}
		if records == nil {
			return nil, nil
		}
		at := indexAt
		for i := len(records) - 1; i >= 0; i-- {
			r := records[i]
			padded := (r.unpadded + 3) &^ 3
			if r.unpadded < 5 || padded > at-xzHeaderBytes {
				return nil, broken(fmt.Errorf("the index has a block of %d bytes where there is room for %d", r.unpadded, at-xzHeaderBytes))
			}
			at -= padded
			backwards = append(backwards, placed{at, r.unpadded, r.length, foot[9]})
		}
		if at -= xzHeaderBytes; len(records) > 0 {
			p := make([]byte, min(records[0].unpadded, xzBlockHeaderBytes))
			if _, err := readExactly(ctx, b, p, at+xzHeaderBytes); err != nil {
				return nil, err
			}
			h, err := readXZBlockHeader(&xzSource{r: bufio.NewReader(bytes.NewReader(p[1:]))}, p[0])
			if err != nil {
				return nil, broken(err)
			}
			longest := int64(0)
			for _, r := range records {
				longest = max(longest, r.length)
			}
			window = max(window, min(h.claims, longest, WindowBytes))
		}
		if _, err := readExactly(ctx, b, head[:], at); err != nil {
			return nil, err
		}
		if _, err := parseXZHeader(head[:]); err != nil {
			return nil, broken(err)
		}
		if [2]byte(head[6:8]) != [2]byte(foot[8:10]) {
			return nil, broken(errXZFlags)
		}
		end = at
	}
	slices.Reverse(backwards)
	starts := make([]int64, 1, len(backwards)+1)
	for _, p := range backwards {
		end := starts[len(starts)-1]
		if p.length > math.MaxInt64-end {
			return nil, broken(errors.New("the blocks of the index have more than 2^63 bytes"))
		}
		starts = append(starts, end+p.length)
	}
	return newBlocked(xz, starts, window, func(i int) (io.ReadCloser, error) {
		p := backwards[i]
		one := xz
		one.open = func(r *bufio.Reader) (io.ReadCloser, error) {
			src := &xzSource{r: r}
			first, err := src.ReadByte()
			if err != nil {
				return nil, err
			}
			h, err := readXZBlockHeader(src, first)
			if err != nil {
				return nil, err
			}
			h.dictionary = min(h.dictionary, max(p.length, 4<<10))
			if h.dictionary > max(window, 4<<10) {
				return nil, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("block %d of the xz stream needs a dictionary of %d bytes and the first one of %d: compress the image again with the same for all", i, h.dictionary, window))
			}
			b, err := newXZBlock(src, h, p.check)
			if err != nil {
				return nil, err
			}
			b.listed = p.unpadded
			return b, nil
		}
		return newUnpacked(newReadAhead(ctx, section{b, span{p.at, (p.unpadded + 3) &^ 3}}, 0, readAheadDepth), one)
	}), nil
}

// skipXZPadding returns the end of the stream before the padding that ends at
// end, -1 where there is too much of it.
func skipXZPadding(ctx context.Context, b Ranged, end int64) (int64, error) {
	for skipped := int64(0); end >= 4 && skipped <= xzPaddingBytes; {
		p := make([]byte, min(4<<10, end)&^3)
		if _, err := readExactly(ctx, b, p, end-int64(len(p))); err != nil {
			return 0, err
		}
		words := len(p)
		for words > 0 && [4]byte(p[words-4:words]) == [4]byte{} {
			words -= 4
		}
		end -= int64(len(p) - words)
		skipped += int64(len(p) - words)
		if words > 0 {
			return end, nil
		}
	}
	return -1, nil
}

type xzRecord struct{ unpadded, length int64 }

// parseXZIndex reads an index as a whole (section 4); nil, nil where it has more
// than most blocks.
func parseXZIndex(b []byte, most int) ([]xzRecord, error) {
	src := &xzSource{r: bufio.NewReader(bytes.NewReader(b[:len(b)-4]))}
	if binary.LittleEndian.Uint32(b[len(b)-4:]) != crc32.ChecksumIEEE(b[:len(b)-4]) {
		return nil, errors.New("the index fails its checksum")
	}
	if first, err := src.ReadByte(); err != nil || first != 0 {
		return nil, errors.New("no index where the footer says")
	}
	count, err := readVLI(src)
	if err != nil {
		return nil, err
	}
	if count > int64(len(b))/2 {
		return nil, fmt.Errorf("an index of %d bytes says that it has %d blocks", len(b), count)
	}
	if count > int64(most) {
		return nil, nil
	}
	records := make([]xzRecord, count)
	for i := range records {
		if records[i].unpadded, err = readVLI(src); err != nil {
			return nil, err
		}
		if records[i].length, err = readVLI(src); err != nil {
			return nil, err
		}
	}
	if err := src.zeros(src.n, "the index"); err != nil {
		return nil, err
	}
	if src.n != int64(len(b)-4) {
		return nil, errors.New("the index is shorter than the footer says")
	}
	return records, nil
}

func wordsOfXZ(err error, _ int64) string {
	switch {
	case errors.Is(err, errXZCheck):
		return "fails its checksum"
	case errors.Is(err, errXZBehind):
		return behindTheEnd
	}
	return ""
}
