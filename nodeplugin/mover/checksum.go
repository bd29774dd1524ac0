package mover

import (
	"crypto/md5"  //nolint:gosec // what the image's publisher has summed up with
	"crypto/sha1" //nolint:gosec // the same
	"crypto/sha256"
	"crypto/sha512"
	"encoding"
	"encoding/hex"
	"fmt"
	"hash"
	"math"
	"strings"
	"sync"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
)

// sums are the algorithms of checksums of sources, by their names.
var sums = map[string]func() hash.Hash{"md5": md5.New, "sha1": sha1.New, "sha256": sha256.New, "sha512": sha512.New}

// CheckChecksum returns what is wrong with a checksum, which is "algorithm:hex".
func CheckChecksum(s string) error {
	algorithm, digits, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(digits)
	if sum := sums[algorithm]; sum == nil || err != nil || len(b) != sum().Size() {
		return fmt.Errorf("checksum %q: give algorithm:hex with md5, sha1, sha256 or sha512", s)
	}
	return nil
}

// stateEvery is how many bytes are summed up before the state is told again.
const stateEvery = 16 << 20

// checksums sums up the bytes of a source, and those of files in it, in the order of the
// source (R13).
type checksums struct {
	parts []*part
	// told is given the state every now and then; nil: nobody wants it.
	mu    sync.Mutex
	told  func(HashState)
	at    int64 // bytes that have passed
	last  int64 // at when it was told
	wrong error // what a part that has passed is
}

// part of a source whose digest somebody has promised.
type part struct {
	off, end int64 // end: math.MaxInt64 where it is the source's
	hash     func() hash.Hash
	h        hash.Hash
	// compare returns a fault where the digest is another than the promised one.
	compare func(got []byte) error
}

// HashState is how far the checksums have come.
type HashState struct {
	// At bytes from the beginning of the source have passed. State has the states, in
	// the order of the parts, of the standard library's hashes of those parts that this
	// is within; those before were right.
	At    int64  `json:"at"`
	State []byte `json:"state"`
}

// newChecksums sums up for the checksum want of the whole source, "" for none, and for
// digests of parts of it. It goes on from a state, if that is one of the same.
func newChecksums(want string, digests []image.Digest, from HashState) (*checksums, error) {
	c := &checksums{}
	if want != "" {
		if err := CheckChecksum(want); err != nil {
			return nil, fault.Terminal(fault.InvalidSource, err)
		}
		algorithm, _, _ := strings.Cut(want, ":")
		c.parts = append(c.parts, &part{end: math.MaxInt64, hash: sums[algorithm], compare: func(sum []byte) error {
			got := algorithm + ":" + hex.EncodeToString(sum)
			if got == strings.ToLower(want) {
				return nil
			}
			return fault.Terminal(fault.ChecksumMismatch,
				fmt.Errorf("the source's %d bytes have the checksum %s, and %s is asked for: they were damaged or replaced, or the checksum is of another file; correct whichever is wrong", c.at, got, want))
		}})
	}
	for _, d := range digests {
		c.parts = append(c.parts, &part{off: d.Offset, end: d.Offset + d.Length, hash: d.Hash, compare: d.Compare})
	}
	c.reset(0)
	if from.At > 0 && !c.restore(from) {
		c.reset(0)
	}
	return c, nil
}

// from is where the bytes may begin.
func (c *checksums) from() int64 {
	if c.at > 0 {
		return c.at
	}
	first := int64(math.MaxInt64)
	for _, p := range c.parts {
		first = min(first, p.off)
	}
	return first
}

// to is where they may end, 0 for the source's end.
func (c *checksums) to() int64 {
	last := int64(0)
	for _, p := range c.parts {
		last = max(last, p.end)
	}
	if last == math.MaxInt64 {
		return 0
	}
	return last
}

func (c *checksums) reset(at int64) {
	c.at, c.last, c.wrong = at, at, nil
	for _, p := range c.parts {
		p.h = p.hash()
	}
}

// within says that byte at is in the part, and not its first.
func (p *part) within(at int64) bool { return p.off < at && at < p.end }

func (c *checksums) restore(from HashState) bool {
	c.at, c.last = from.At, from.At
	rest := from.State
	for _, p := range c.parts {
		if !p.within(from.At) {
			continue
		}
		empty, err := p.h.(encoding.BinaryMarshaler).MarshalBinary()
		if err != nil || len(rest) < len(empty) || p.h.(encoding.BinaryUnmarshaler).UnmarshalBinary(rest[:len(empty)]) != nil {
			return false
		}
		rest = rest[len(empty):]
	}
	return len(rest) == 0
}

// tap is image.Pass's.
func (c *checksums) tap(off int64, b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if off == 0 || c.at == 0 { // from the beginning after all, or of the first part
		c.reset(off)
	}
	if off != c.at {
		panic(fmt.Sprintf("byte %d passes where %d is next", off, c.at))
	}
	c.at += int64(len(b))
	for _, p := range c.parts {
		if from, to := max(p.off, off), min(p.end, c.at); from < to {
			p.h.Write(b[from-off : to-off])
		}
		if off < p.end && p.end <= c.at && c.wrong == nil {
			c.wrong = p.compare(p.h.Sum(nil))
		}
	}
	if c.told == nil || c.wrong != nil || c.at-c.last < stateEvery {
		return
	}
	var states []byte
	for _, p := range c.parts {
		if !p.within(c.at) {
			continue
		}
		state, err := p.h.(encoding.BinaryMarshaler).MarshalBinary()
		if err != nil {
			return // then the next run begins again
		}
		states = append(states, state...)
	}
	c.last = c.at
	c.told(HashState{At: c.at, State: states})
}

// tellTo has told called with the state from now on.
func (c *checksums) tellTo(told func(HashState)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told = told
}

// check compares all that has passed, which must be size bytes where that is known.
func (c *checksums) check(size int64) error {
	if to := c.to(); to == 0 && size >= 0 && c.at != size || c.at < to {
		return fault.Transient(fault.ConnectionFailed, fmt.Errorf("%d bytes of a source of %d were summed up", c.at, size))
	}
	if c.wrong != nil {
		return c.wrong
	}
	for _, p := range c.parts {
		if p.end == math.MaxInt64 {
			return p.compare(p.h.Sum(nil))
		}
	}
	return nil
}
