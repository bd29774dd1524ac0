package mover

import (
	"context"
	"io"
	"math/rand/v2"
	"os"

	"github.com/longshore-io/longshore/nodeplugin/archive"
	"github.com/longshore-io/longshore/nodeplugin/image"
)

// inspect finds what is wrong with a tar whose headers can be read alone, before anything
// of it is written. What was found good before, and is the same, is not read again.
func inspect(ctx context.Context, root *os.File, j Job, f Facts, opened *image.Opened) error {
	if opened.Disk == nil || f.Compression != "" || j.Checksum != "" || j.Resume != nil && f.Validator.Strong() {
		return nil
	}
	src := archive.NewAhead(ctx, opened.Disk)
	defer src.Close()
	summary, err := archive.Check(ctx, src)
	if err != nil || j.Done.Bytes() > 0 { // then a part of it has its room already
		return err
	}
	return archive.Fit(root, summary)
}

// unpack fills the folder from the tar and returns how long that is.
func unpack(ctx context.Context, d Deps, j Job, f Facts, opened *image.Opened, a *account) (int64, error) {
	done := int64(0)
	if ranges := j.Done.Ranges(); len(ranges) > 0 && ranges[0].Start == 0 {
		done = ranges[0].Length
	}
	d.Moved.Done.Store(done)
	o := archive.Options{Done: done, Ledger: func(ctx context.Context, off, n int64) error {
		d.Moved.Done.Add(n)
		return a.Done(ctx, off, n, nil)
	}}
	var src io.Reader = opened.Stream
	if opened.Disk != nil {
		ahead := archive.NewAhead(ctx, opened.Disk)
		defer ahead.Close()
		src = ahead
	}
	switch {
	case f.Validator.Strong():
	case opened.Disk != nil:
		o.Compare = func(n int64) bool { return rand.Int64N(max(done, 1)) < samples*n }
	default: // it passes anyway
		o.Compare = func(int64) bool { return true }
	}
	summary, err := archive.Unpack(ctx, src, d.Root, o)
	return summary.Bytes, err
}
