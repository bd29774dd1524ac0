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
	"strings"
	"sync"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// sums are the algorithms of checksums, by their names.
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

// checksum sums up the bytes of a source in the order of the file (R13).
type checksum struct {
	want string
	// told is given the state every now and then; nil: nobody wants it.
	mu   sync.Mutex
	told func(HashState)
	h    hash.Hash
	at   int64 // bytes that are in h
	last int64 // at when it was told
}

// HashState is how far a checksum has come.
type HashState struct {
	// At bytes from the beginning of the source are in State, which is that of the
	// standard library's hash of the job's algorithm.
	At    int64  `json:"at"`
	State []byte `json:"state"`
}

// newChecksum goes on from a state, if it is one of this algorithm.
func newChecksum(want string, from HashState) (*checksum, error) {
	if err := CheckChecksum(want); err != nil {
		return nil, fault.Terminal(fault.InvalidSource, err)
	}
	algorithm, _, _ := strings.Cut(want, ":")
	c := &checksum{want: strings.ToLower(want), h: sums[algorithm]()}
	if from.At > 0 && c.h.(encoding.BinaryUnmarshaler).UnmarshalBinary(from.State) == nil {
		c.at, c.last = from.At, from.At
	} else {
		c.h.Reset()
	}
	return c, nil
}

// tap is image.Pass's.
func (c *checksum) tap(off int64, p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if off == 0 { // from the beginning after all
		c.h.Reset()
		c.at, c.last = 0, 0
	}
	if off != c.at {
		panic(fmt.Sprintf("byte %d passes where %d is next", off, c.at))
	}
	c.h.Write(p)
	if c.at += int64(len(p)); c.told == nil || c.at-c.last < stateEvery {
		return
	}
	state, err := c.h.(encoding.BinaryMarshaler).MarshalBinary()
	if err != nil {
		return // then the next run begins again
	}
	c.last = c.at
	c.told(HashState{At: c.at, State: state})
}

// tellTo has told called with the state from now on.
func (c *checksum) tellTo(told func(HashState)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told = told
}

// check compares all that has passed, which must be size bytes where that is known.
func (c *checksum) check(size int64) error {
	algorithm, _, _ := strings.Cut(c.want, ":")
	if size >= 0 && c.at != size {
		return fault.Transient(fault.ConnectionFailed, fmt.Errorf("%d bytes of a source of %d were summed up", c.at, size))
	}
	if got := algorithm + ":" + hex.EncodeToString(c.h.Sum(nil)); got != c.want {
		return fault.Terminal(fault.ChecksumMismatch,
			fmt.Errorf("the source's %d bytes have the checksum %s, and %s is asked for: they were damaged or replaced, or the checksum is of another file; correct whichever is wrong", c.at, got, c.want))
	}
	return nil
}
