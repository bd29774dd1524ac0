package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/longshore-io/longshore/nodeplugin/device"
)

// mount has the pool file mounted, through the loop device that already shows
// it if there is one: the mount may be left from a process before, or the loop
// from a mount namespace that is gone.
func (p *Pool) mount(ctx context.Context, image string) error {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	mnt := filepath.Join(p.cfg.Dir, mountName)
	mounted, err := device.IsMounted(mnt)
	if err != nil {
		return err
	}
	loops, err := device.FindLoopsOf(f)
	if err != nil {
		return err
	}
	var good []*device.Loop
	defer func() {
		for _, l := range good {
			l.Close()
		}
	}()
	for _, l := range loops {
		if err := l.Verify(f, loopOptions); err != nil {
			p.repaired("left %s alone: %v", l.Path(), err)
			l.Close()
			continue
		}
		good = append(good, l)
	}
	if mounted {
		on, err := device.MountedDevice(mnt)
		if err != nil {
			return err
		}
		for _, l := range good {
			if dev, err := l.Device(); err == nil && dev == on {
				return nil
			}
		}
		return fmt.Errorf("%s is mounted, but not from %s: unmount it", mnt, image)
	}
	if len(good) == 0 {
		l, err := device.AttachLoop(f, loopOptions)
		if err != nil {
			return err
		}
		good = append(good, l)
	}
	var failed error
	for _, l := range good {
		err := device.Mount(l.Path(), mnt, device.XFS, mountOptions)
		if err == nil {
			if len(loops) > 0 {
				p.repaired("mounted %s again from %s", mnt, l.Path())
			}
			return nil
		}
		failed = errors.Join(failed, err)
	}
	if len(loops) == 0 {
		// Ours alone: nobody else is served by leaving it.
		dctx, cancel := context.WithTimeout(ctx, detachPatience)
		defer cancel()
		failed = errors.Join(failed, good[0].Detach(dctx))
	}
	return failed
}

// unmount takes away the mount and all loop devices of the pool file.
func (p *Pool) unmount(ctx context.Context, image string) error {
	f, err := os.Open(image)
	if err != nil {
		return err
	}
	defer f.Close()
	loops, err := device.FindLoopsOf(f)
	if err != nil {
		return err
	}
	mnt := filepath.Join(p.cfg.Dir, mountName)
	for _, l := range loops {
		// Only what is ours: something else may be mounted there.
		dev, err := l.Device()
		if err != nil {
			return err
		}
		if on, err := device.MountedDevice(mnt); err == nil && on == dev {
			if err := device.Unmount(mnt); err != nil {
				return err
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, detachPatience)
	defer cancel()
	for _, l := range loops {
		err = errors.Join(err, l.Detach(ctx))
	}
	return err
}
