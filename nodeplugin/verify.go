package nodeplugin

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// errGivesWay ends a verification when somebody else wants the volume.
var errGivesWay = fmt.Errorf("somebody came to use the volume: %w", csi.ErrBusy)

// Verify reads a volume that nobody uses and says how it differs from the disk that it was
// filled with, whose digest it returns.
func (s *Stager) Verify(ctx context.Context, id string) (recorded string, d digest.Difference, err error) {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	release, err := s.holdAs(id, holder{deed: "verify", giveWay: func() { end(errGivesWay) }})
	if err != nil {
		return "", d, err
	}
	defer release()
	_, v, err := s.find(id)
	if err != nil {
		return "", d, err
	}
	recorded = factsOf(v).Digest
	switch {
	case v.State != pool.Populated:
		return "", d, fmt.Errorf("it is not populated yet: %w", csi.ErrPrecondition)
	case recorded == "":
		return "", d, fmt.Errorf("no image has filled it, so that there is nothing to compare with: %w", csi.ErrPrecondition)
	}
	err = s.unused(v)
	if err == nil {
		err = s.withDisk(ctx, v, func(disk *device.File) (err error) {
			d, err = digest.Compare(ctx, disk, recorded)
			return err
		})
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return "", d, classed(err)
	}
	return recorded, d, nil
}

// unused returns ErrBusy if the volume is seen somewhere.
func (s *Stager) unused(v pool.Volume) error {
	loops, err := device.FindLoops(identity(v))
	if err != nil {
		return err
	}
	used := false
	for _, l := range loops {
		at, merr := mountsOf(l)
		err = errors.Join(err, merr)
		used = used || len(at) > 0
		l.Close()
	}
	if err == nil && used {
		err = fmt.Errorf("a pod uses it, and may change it: %w", csi.ErrBusy)
	}
	return err
}

// withDisk opens the disk of a volume that nobody uses: its file, or disk.img in its filesystem.
func (s *Stager) withDisk(ctx context.Context, v pool.Volume, use func(*device.File) error) (err error) {
	file, err := open(v, v.Mode == pool.Block)
	if err != nil {
		return err
	}
	defer file.Close()
	disk := file
	if v.Mode == pool.Filesystem {
		l, err := soleLoop(ctx, file)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, detach(context.WithoutCancel(ctx), l)) }()
		mount, err := privateMount(l.Path(), v.FSType)
		if err != nil {
			return err
		}
		defer mount.Close()
		if disk, err = device.OpenDiskImage(within(mount), false, 0); errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("there is no %s in it any more: %w", device.DiskImageName, csi.ErrPrecondition)
		} else if err != nil {
			return err
		}
		defer disk.Close()
	}
	st, err := disk.Stat()
	if err != nil {
		return err
	}
	d, err := device.NewFile(disk, st.Size())
	if err != nil {
		return err
	}
	return use(d)
}
