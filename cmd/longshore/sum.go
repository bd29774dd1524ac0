package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sync"

	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// sumUp reads the whole disk as an import does, writes it nowhere and returns the digest of
// its first bytes, and what the import found. -1 bytes are all of it; what is behind the
// first bytes, if there is something, must be zeros.
func (o origin) sumUp(ctx context.Context, spec source.Spec, first int64) (string, mover.Facts, error) {
	s := &summed{end: math.MaxInt64}
	if first >= 0 {
		s.end = (first + digest.Block - 1) / digest.Block * digest.Block
	}
	job := mover.Job{Source: spec, Format: o.format, Disk: o.disk, TargetBytes: nowhereBytes, KnownZero: true}
	deps := mover.Deps{Kinds: localSources, Dial: dial, Target: nowhere{}, Ledger: s}
	facts, err := mover.Run(ctx, deps, job)
	if f := (*fault.Fault)(nil); errors.As(err, &f) && f.Reason == fault.NeedsSpool {
		s.tree, s.more = digest.Tree{}, false
		facts, err = spooled(os.TempDir(), func(spool *mover.Spool) (mover.Facts, error) {
			deps.Spool = spool
			return mover.Run(ctx, deps, job)
		})
	}
	switch {
	case err != nil:
		return "", facts, err
	case first < 0:
		first = facts.VirtualBytes
	case first > facts.VirtualBytes:
		return "", facts, fault.Terminal(fault.ContentDiffers, fmt.Errorf("the disk has %d bytes, and the digest is of one with %d", facts.VirtualBytes, first))
	case s.more:
		return "", facts, fault.Terminal(fault.ContentDiffers, fmt.Errorf("the disk has %d bytes, and behind the %d that the digest is of there is something", facts.VirtualBytes, first))
	}
	sum, err := s.tree.Sum(first)
	return sum, facts, err
}

// verify returns the fault ContentDiffers if the disk is not the one whose digest want is.
func (o origin) verify(ctx context.Context, spec source.Spec, want string) error {
	first, err := digest.Bytes(want)
	if err != nil {
		return err
	}
	got, _, err := o.sumUp(ctx, spec, first)
	if err == nil && got != want {
		err = fault.Terminal(fault.ContentDiffers, fmt.Errorf("the disk has the digest %s, want %s", got, want))
	}
	return err
}

// summed is a ledger that sums up.
type summed struct {
	end  int64 // of what counts; behind it more says that there is something
	mu   sync.Mutex
	tree digest.Tree
	more bool
}

func (s *summed) Began(context.Context, mover.Facts) error { return nil }
func (s *summed) Flush(context.Context) error              { return nil }
func (s *summed) Hashed(mover.HashState)                   {}

func (s *summed) Done(_ context.Context, off, n int64, data []byte) error {
	more := false
	if kept := max(0, min(n, s.end-off)); kept < n {
		if data != nil {
			more = len(bytes.TrimLeft(data[kept:], "\x00")) > 0
			data = data[:kept]
		}
		n = kept
	}
	var sums []digest.Hash
	if data != nil && n > 0 {
		sums = digest.Sums(off, data)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.more = s.more || more
	if n == 0 {
		return nil
	}
	return s.tree.Add(off, n, sums)
}

// nowhereBytes are more than any disk has.
const nowhereBytes = 1 << 60

// nowhere is a target that keeps nothing.
type nowhere struct{}

func (nowhere) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (nowhere) ReadAt([]byte, int64) (int, error)      { return 0, io.ErrUnexpectedEOF }
func (nowhere) Zero(int64, int64) error                { return nil }
func (nowhere) Size() int64                            { return nowhereBytes }
func (nowhere) Align() int                             { return 1 }
