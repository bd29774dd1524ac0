package image

import (
	"encoding/binary"
	"errors"
	"io"
)

// LZMA is read as the "LZMA specification" of the LZMA SDK has it
// (lzma-specification.txt), of which the names are. LZMA2 cuts it into chunks that
// begin with a control byte: 0 is the end, 1 and 2 are plain bytes, and from 0x80 on
// it is LZMA.
const (
	lzmaHalf = 1 << 10 // a probability of one half
	lzmaTop  = 1 << 24 // no range is less after a bit

	// lzma2Dictionary bytes are there to begin with.
	lzma2Dictionary = 64 << 10
	// lzma2Chunk is the most that a chunk has of compressed bytes, lzma2Slack more than
	// one literal or match has of them.
	lzma2Chunk = 64 << 10
	lzma2Slack = 32
)

// Where in the model the probabilities of the specification are.
const (
	lzmaIsMatch    = 0
	lzmaIsRep0Long = lzmaIsMatch + 12*16
	lzmaIsRep      = lzmaIsRep0Long + 12*16
	lzmaIsRepG0    = lzmaIsRep + 12
	lzmaIsRepG1    = lzmaIsRepG0 + 12
	lzmaIsRepG2    = lzmaIsRepG1 + 12
	lzmaPosSlot    = lzmaIsRepG2 + 12
	lzmaPosSpecial = lzmaPosSlot + 4*64
	lzmaAlign      = lzmaPosSpecial + 128
	lzmaLen        = lzmaAlign + 16 // choice, choice2, low, mid, high
	lzmaRepLen     = lzmaLen + 2 + 16*8 + 16*8 + 256
	lzmaLiteral    = lzmaRepLen + 2 + 16*8 + 16*8 + 256
	lzmaModelBits  = lzmaLiteral + 16*0x300
)

var errLZMA = errors.New("the compressed data contradict themselves")

// lzma2 decompresses chunks.
type lzma2 struct {
	r   io.Reader
	err error

	// dict is what has been decompressed, at most most bytes of it. It grows as there
	// is need; then it is a ring. What lies from read to pos nobody has got yet.
	dict      []byte
	most      int
	read, pos int
	full      int    // bytes in dict since the last reset
	count     uint32 // bytes since the last reset
	fresh     bool   // a reset of dict is due
	bare      bool   // properties are due before LZMA

	// left bytes of the chunk are to come, plain from r, else from in.
	left   int
	plain  bool
	in     [lzma2Chunk + lzma2Slack]byte
	inEnd  int
	coder  rangeCoder
	copies int // bytes of a match that are still to be copied

	lc                     uint
	lpMask, pbMask         uint32
	state                  uint32
	rep0, rep1, rep2, rep3 uint32
	model                  [lzmaModelBits]uint16
}

type rangeCoder struct {
	extent, code uint32
	pos          int
}

// newLZMA2 decompresses the LZMA2 chunks of r up to their end marker, and reads
// nothing behind that. It looks back dictionary bytes at most, and allocates little
// more than it has decompressed of them.
func newLZMA2(r io.Reader, dictionary int) io.Reader {
	return &lzma2{r: r, most: dictionary, dict: make([]byte, min(dictionary, lzma2Dictionary)), fresh: true, bare: true}
}

func (z *lzma2) Read(p []byte) (int, error) {
	for z.read == z.pos && z.err == nil && len(p) > 0 {
		z.err = z.fill()
	}
	if z.read == z.pos {
		return 0, z.err
	}
	n := copy(p, z.dict[z.read:z.pos])
	z.read += n
	return n, nil
}

// fill decompresses more when all that there was has been read; io.EOF is the end.
func (z *lzma2) fill() error {
	if z.left == 0 {
		if err := z.chunk(); err != nil {
			return err
		}
	}
	if z.pos == len(z.dict) {
		z.room()
	}
	from, end := z.pos, min(z.pos+z.left, len(z.dict))
	var err error
	if z.plain {
		var n int
		n, err = io.ReadFull(z.r, z.dict[from:end])
		z.pos, err = from+n, unexpected(err)
	} else {
		err = z.lzma(end)
	}
	n := z.pos - from
	z.left -= n
	z.count += uint32(n)
	z.full = min(z.full+n, len(z.dict))
	if err == nil && z.left == 0 && !z.plain && (z.copies > 0 || z.coder.pos != z.inEnd || z.coder.code != 0) {
		return errLZMA
	}
	return err
}

// room makes some behind pos, which is the end of dict.
func (z *lzma2) room() {
	if z.read = 0; z.pos == z.most {
		z.pos = 0
		return
	}
	size := 4 * z.pos
	if size >= z.most/2 {
		size = z.most // what it has grown out of is garbage: not half of it
	}
	grown := make([]byte, size)
	z.read = copy(grown, z.dict)
	z.dict = grown
}

// chunk reads the header of the next chunk, and its compressed bytes.
func (z *lzma2) chunk() error {
	var b [6]byte
	if _, err := io.ReadFull(z.r, b[:1]); err != nil {
		return unexpected(err)
	}
	control := b[0]
	if control == 0 {
		return io.EOF
	}
	if control == 1 || control >= 0xe0 {
		z.fresh, z.bare = false, true
		z.read, z.pos, z.full, z.count = 0, 0, 0, 0
	}
	z.plain = control < 0x80
	header := 3
	switch {
	case control >= 0xc0:
		header = 6
	case !z.plain:
		header = 5
	}
	if z.fresh || z.plain && control > 2 || header == 5 && z.bare {
		return errLZMA
	}
	if _, err := io.ReadFull(z.r, b[1:header]); err != nil {
		return unexpected(err)
	}
	z.left = int(binary.BigEndian.Uint16(b[1:])) + 1
	if z.plain {
		return nil
	}
	z.left += int(control&0x1f) << 16
	if header == 6 {
		props := uint(b[5])
		lc, lp, pb := props%9, props/9%5, props/45
		if pb > 4 || lc+lp > 4 {
			return errLZMA
		}
		z.bare, z.lc, z.lpMask, z.pbMask = false, lc, 1<<lp-1, 1<<pb-1
	}
	if control >= 0xa0 {
		z.state, z.rep0, z.rep1, z.rep2, z.rep3 = 0, 0, 0, 0, 0
		for i := range z.model {
			z.model[i] = lzmaHalf
		}
	}
	z.inEnd = int(binary.BigEndian.Uint16(b[3:])) + 1
	if _, err := io.ReadFull(z.r, z.in[:z.inEnd]); err != nil {
		return unexpected(err)
	}
	clear(z.in[z.inEnd : z.inEnd+lzma2Slack])
	if z.in[0] != 0 {
		return errLZMA
	}
	z.coder = rangeCoder{extent: 1<<32 - 1, code: binary.BigEndian.Uint32(z.in[1:]), pos: 5}
	return nil
}

// lzma decompresses up to pos end. Its last literal or match reads some of the slack
// where the compressed bytes are too few.
//
// The bits of literals are as good as random: where they are added up without a
// branch it takes half as long as it does in github.com/ulikunitz/xz. zero is all
// ones where a bit is 0. Its probability p becomes p + (2048-p)/32 then, or p - p/32;
// both are rounded down in the same way by (2048-p)>>5 and (31-p)>>5.
func (z *lzma2) lzma(end int) error {
	start := z.pos
	z.copy(end)
	c := z.coder
	for z.pos < end {
		if c.pos > z.inEnd {
			return errLZMA
		}
		count := z.count + uint32(z.pos-start)
		match := &z.model[lzmaIsMatch+z.state<<4+count&z.pbMask]
		p := uint32(*match)
		if bound := c.extent >> 11 * p; c.code >= bound {
			c.extent -= bound
			c.code -= bound
			*match = uint16(p - p>>5)
			if c.extent < lzmaTop {
				c.extent <<= 8
				c.code = c.code<<8 | uint32(z.in[c.pos])
				c.pos++
			}
			z.coder = c
			if !z.matched(count&z.pbMask, min(z.full+z.pos-start, len(z.dict))) {
				return errLZMA
			}
			c = z.coder
			z.copy(end)
			continue
		} else {
			c.extent = bound
			*match = uint16(p + (2048-p)>>5)
			if c.extent < lzmaTop {
				c.extent <<= 8
				c.code = c.code<<8 | uint32(z.in[c.pos])
				c.pos++
			}
		}
		var before uint32
		switch {
		case z.pos > 0:
			before = uint32(z.dict[z.pos-1])
		case z.full > 0:
			before = uint32(z.dict[len(z.dict)-1])
		}
		literal := (*[0x300]uint16)(z.model[lzmaLiteral+0x300*((count&z.lpMask)<<z.lc+before>>(8-z.lc)):])
		symbol := uint32(1)
		if z.state >= 7 {
			at := z.pos - int(z.rep0) - 1
			if at < 0 {
				at += len(z.dict)
			}
			// Each bit is expected to be that of the byte which a match would have.
			expected, offset := uint32(z.dict[at]), uint32(0x100)
			for symbol < 0x100 {
				expected <<= 1
				bit := expected & offset
				at := &literal[offset+bit+symbol]
				p := uint32(*at)
				bound := c.extent >> 11 * p
				zero := uint32((int64(c.code) - int64(bound)) >> 63)
				c.extent = c.extent - bound + zero&(2*bound-c.extent)
				c.code -= bound &^ zero
				*at = uint16(p + uint32(int32(zero&2017+31-p)>>5))
				symbol = symbol<<1 + 1 + zero
				offset &= bit ^ zero
				if c.extent < lzmaTop {
					c.extent <<= 8
					c.code = c.code<<8 | uint32(z.in[c.pos])
					c.pos++
				}
			}
		} else {
			for symbol < 0x100 {
				at := &literal[symbol&0xff]
				p := uint32(*at)
				bound := c.extent >> 11 * p
				zero := uint32((int64(c.code) - int64(bound)) >> 63) // all ones where the bit is 0
				c.extent = c.extent - bound + zero&(2*bound-c.extent)
				c.code -= bound &^ zero
				*at = uint16(p + uint32(int32(zero&2017+31-p)>>5))
				symbol = symbol<<1 + 1 + zero
				if c.extent < lzmaTop {
					c.extent <<= 8
					c.code = c.code<<8 | uint32(z.in[c.pos])
					c.pos++
				}
			}
		}
		z.dict[z.pos] = byte(symbol)
		z.pos++
		switch {
		case z.state < 4:
			z.state = 0
		case z.state < 10:
			z.state -= 3
		default:
			z.state -= 6
		}
	}
	z.coder = c
	return nil
}

// copy copies what it can of a match.
func (z *lzma2) copy(end int) {
	n := min(z.copies, end-z.pos)
	z.copies -= n
	back := int(z.rep0) + 1
	for n > 0 {
		from := z.pos - back
		if from < 0 {
			from += len(z.dict)
		}
		// What lies between the two places is all that there is to copy at once; it
		// repeats itself behind that.
		m := copy(z.dict[z.pos:z.pos+n], z.dict[from:min(from+back, len(z.dict))])
		z.pos += m
		n -= m
		if m == back {
			back *= 2
		}
	}
}

// bit decodes one with the probability at i.
func (z *lzma2) bit(i uint32) uint32 {
	c, at := &z.coder, &z.model[i]
	p := uint32(*at)
	bound := c.extent >> 11 * p
	zero := uint32((int64(c.code) - int64(bound)) >> 63)
	c.extent = c.extent - bound + zero&(2*bound-c.extent)
	c.code -= bound &^ zero
	*at = uint16(p + uint32(int32(zero&2017+31-p)>>5))
	if c.extent < lzmaTop {
		c.extent <<= 8
		c.code = c.code<<8 | uint32(z.in[c.pos])
		c.pos++
	}
	return 1 + zero
}

// tree decodes a number of so many bits, the highest first, reverse the lowest first.
func (z *lzma2) tree(base uint32, bits uint) uint32 {
	m := uint32(1)
	for range bits {
		m = m<<1 | z.bit(base+m)
	}
	return m - 1<<bits
}

func (z *lzma2) reverse(base uint32, bits uint) uint32 {
	m, v := uint32(1), uint32(0)
	for i := range bits {
		bit := z.bit(base + m)
		m = m<<1 | bit
		v |= bit << i
	}
	return v
}

// matched decodes a match behind its first bit; it must not reach back farther than
// full bytes.
func (z *lzma2) matched(posState uint32, full int) bool {
	state, lengths := z.state, uint32(lzmaRepLen)
	switch {
	case z.bit(lzmaIsRep+state) == 0:
		lengths = lzmaLen
		z.rep1, z.rep2, z.rep3 = z.rep0, z.rep1, z.rep2
	case z.bit(lzmaIsRepG0+state) == 0:
		if z.bit(lzmaIsRep0Long+state<<4+posState) == 0 {
			if z.state = 11; state < 7 {
				z.state = 9
			}
			z.copies = 1
			return uint64(z.rep0) < uint64(full)
		}
	case z.bit(lzmaIsRepG1+state) == 0:
		z.rep0, z.rep1 = z.rep1, z.rep0
	case z.bit(lzmaIsRepG2+state) == 0:
		z.rep0, z.rep1, z.rep2 = z.rep2, z.rep0, z.rep1
	default:
		z.rep0, z.rep1, z.rep2, z.rep3 = z.rep3, z.rep0, z.rep1, z.rep2
	}
	n := z.length(lengths, posState)
	if z.copies = int(n) + 2; lengths == lzmaRepLen {
		if z.state = 11; state < 7 {
			z.state = 8
		}
		return uint64(z.rep0) < uint64(full)
	}
	if z.state = 10; state < 7 {
		z.state = 7
	}
	slot := z.tree(lzmaPosSlot+min(n, 3)<<6, 6)
	z.rep0 = slot
	if slot >= 4 {
		bits := uint(slot>>1 - 1)
		z.rep0 = (2 | slot&1) << bits
		if slot < 14 {
			z.rep0 += z.reverse(lzmaPosSpecial+z.rep0-slot, bits)
		} else {
			z.rep0 += z.direct(bits-4)<<4 + z.reverse(lzmaAlign, 4)
		}
	}
	return uint64(z.rep0) < uint64(full)
}

func (z *lzma2) length(base, posState uint32) uint32 {
	switch {
	case z.bit(base) == 0:
		return z.tree(base+2+posState<<3, 3)
	case z.bit(base+1) == 0:
		return 8 + z.tree(base+2+16*8+posState<<3, 3)
	}
	return 16 + z.tree(base+2+2*16*8, 8)
}

// direct decodes bits that have no probability.
func (z *lzma2) direct(bits uint) (v uint32) {
	c := z.coder
	for range bits {
		c.extent >>= 1
		c.code -= c.extent
		under := -(c.code >> 31) // all ones where the bit is 0
		c.code += c.extent & under
		v = v<<1 + 1 + under
		if c.extent < lzmaTop {
			c.extent <<= 8
			c.code = c.code<<8 | uint32(z.in[c.pos])
			c.pos++
		}
	}
	z.coder = c
	return v
}
