package nodeplugin

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

func (s *Stager) stageFilesystem(ctx context.Context, p *pool.Pool, v pool.Volume, path string, u csi.Use) error {
	file, err := open(v, false)
	if err != nil {
		return err
	}
	defer file.Close()
	l, made, err := loopFor(ctx, file, device.LoopOptions{DirectIO: true})
	if err != nil {
		return err
	}
	s.tellCached(v, l)
	if !made {
		at, err := mountsOf(l)
		if err != nil {
			l.Close()
			return err
		}
		for _, m := range at {
			if m == path {
				s.keep(v.ID, l)
				return nil
			}
		}
		if len(at) > 0 {
			l.Close()
			return fmt.Errorf("it is staged at %s: %w", at[0], csi.ErrPrecondition)
		}
	}
	if err := s.mountFilesystem(ctx, p, v, l, path, u); err != nil {
		return errors.Join(err, detach(ctx, l))
	}
	s.keep(v.ID, l)
	return nil
}

// mountFilesystem makes the filesystem if there is none yet, mounts it and
// grows it to the device. After an error nothing is mounted.
func (s *Stager) mountFilesystem(ctx context.Context, p *pool.Pool, v pool.Volume, l *device.Loop, path string, u csi.Use) error {
	made, err := s.makeFilesystem(ctx, p, v, l)
	if err != nil {
		return err
	}
	if !made {
		// Its log must be replayed, and its errors found, before a pod is.
		repaired, err := device.Fsck(ctx, l.Path(), v.FSType)
		if err != nil {
			return err
		}
		if repaired {
			s.log.Warn("repaired the filesystem of a volume", "volume", v.ID)
		}
	}
	if mounted, err := device.IsMounted(path); err != nil || mounted {
		return errors.Join(err, fmt.Errorf("something else is mounted at %s: %w", path, csi.ErrPrecondition))
	}
	mount := func() error {
		return device.Mount(l.Path(), path, v.FSType, device.MountOptions{ReadOnly: u.ReadOnly, Options: u.MountOptions})
	}
	if err := mount(); err != nil || u.ReadOnly {
		return err
	}
	// A clone may be larger than its source, and an expansion may have come while
	// the volume was not mounted.
	err = device.GrowFS(ctx, l.Path(), path, v.FSType)
	if err == nil {
		return nil
	}
	if uerr := device.Unmount(path); uerr != nil || !errors.Is(err, device.ErrMounted) {
		return errors.Join(err, uerr)
	}
	if err := device.GrowFS(ctx, l.Path(), "", v.FSType); err != nil {
		return err
	}
	return mount()
}

// makeFilesystem runs mkfs on a volume that has none. It never does over
// content that is not its own unfinished work.
func (s *Stager) makeFilesystem(ctx context.Context, p *pool.Pool, v pool.Volume, l *device.Loop) (made bool, err error) {
	f := factsOf(v)
	if f.Filesystem == fsMade {
		return false, nil
	}
	file, err := open(v, true)
	if err != nil {
		return false, err
	}
	defer file.Close()
	empty, err := holdsNothing(file)
	if err != nil {
		return false, err
	}
	if !empty && f.Filesystem != fsMaking {
		content, err := device.ProbeFS(file)
		if err != nil {
			return false, err
		}
		if content != v.FSType {
			return false, fmt.Errorf("it should hold %s and holds something else (%q); it is not formatted over: %w", v.FSType, content, csi.ErrPrecondition)
		}
		return false, setFacts(p, v.ID, func(f *facts) { f.Filesystem = fsMade })
	}
	if err := setFacts(p, v.ID, func(f *facts) { f.Filesystem = fsMaking }); err != nil {
		return false, err
	}
	if err := device.Mkfs(ctx, l.Path(), v.FSType, device.MkfsOptions{Zeroed: empty}); err != nil {
		return false, err
	}
	return true, setFacts(p, v.ID, func(f *facts) { f.Filesystem = fsMade })
}

// holdsNothing tells whether nothing was ever written to a sparse or
// preallocated file.
func holdsNothing(f *os.File) (bool, error) {
	_, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("look for data in %s: %w", f.Name(), err)
	}
	return false, nil
}
