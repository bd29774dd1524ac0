package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// sumUp reads the whole disk as an import does, writes it nowhere and sums up its first
// bytes (-1: all of them). It returns also what the import found.
func (o origin) sumUp(ctx context.Context, spec source.Spec, first int64) (*digest.Prefix, mover.Facts, error) {
	s := summed{digest.NewPrefix(first)}
	job := mover.Job{Source: spec, Format: o.format, Disk: o.disk, TargetBytes: nowhereBytes, KnownZero: true}
	deps := mover.Deps{Kinds: localSources, Dial: dial, Target: nowhere{}, Ledger: s}
	facts, err := mover.Run(ctx, deps, job)
	if f := (*fault.Fault)(nil); errors.As(err, &f) && f.Reason == fault.NeedsSpool {
		s.Prefix = digest.NewPrefix(first)
		facts, err = spooled(os.TempDir(), func(spool *mover.Spool) (mover.Facts, error) {
			deps.Spool, deps.Ledger = spool, s
			return mover.Run(ctx, deps, job)
		})
	}
	return s.Prefix, facts, err
}

// digest of the whole disk.
func (o origin) digest(ctx context.Context, spec source.Spec) (string, mover.Facts, error) {
	s, facts, err := o.sumUp(ctx, spec, -1)
	if err != nil {
		return "", facts, err
	}
	sum, err := s.Sum(facts.VirtualBytes)
	return sum, facts, err
}

// verify returns the fault ContentDiffers if the disk is not the one whose digest want is.
func (o origin) verify(ctx context.Context, spec source.Spec, want string) error {
	first, err := digest.Bytes(want)
	if err != nil {
		return err
	}
	s, facts, err := o.sumUp(ctx, spec, first)
	if err != nil {
		return err
	}
	d, err := s.Difference(facts.VirtualBytes, want)
	switch {
	case err != nil:
		return err
	case d.Short:
		err = fmt.Errorf("the disk has %d bytes, and the digest is of one with %d", d.Bytes, first)
	case d.More:
		err = fmt.Errorf("the disk has %d bytes, and behind the %d that the digest is of there is something", facts.VirtualBytes, first)
	case d.Got != "":
		err = fmt.Errorf("the disk has the digest %s, want %s", d.Got, want)
	default:
		return nil
	}
	return fault.Terminal(fault.ContentDiffers, err)
}

// summed is a ledger that sums up.
type summed struct{ *digest.Prefix }

func (summed) Began(context.Context, mover.Facts) error { return nil }
func (summed) Flush(context.Context) error              { return nil }
func (summed) Hashed(mover.HashState)                   {}

func (s summed) Done(_ context.Context, off, n int64, data []byte) error { return s.Add(off, n, data) }

// nowhereBytes are more than any disk has.
const nowhereBytes = 1 << 60

// nowhere is a target that keeps nothing.
type nowhere struct{}

func (nowhere) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (nowhere) ReadAt([]byte, int64) (int, error)      { return 0, io.ErrUnexpectedEOF }
func (nowhere) Zero(int64, int64) error                { return nil }
func (nowhere) Size() int64                            { return nowhereBytes }
func (nowhere) Align() int                             { return 1 }
