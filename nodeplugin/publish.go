package nodeplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// Publish shows the staged volume at target; see csi.Stager.
func (s *Stager) Publish(ctx context.Context, id, staging, target string, u csi.Use) error {
	release, err := s.hold(id, "publish")
	if err != nil {
		return err
	}
	defer release()
	_, v, err := s.find(id)
	if err != nil {
		return err
	}
	if err := checkUse(v, u); err != nil {
		return err
	}
	if err := s.publish(ctx, v, staging, target, u); err != nil {
		return fmt.Errorf("publish volume %s: %w", id, classed(err))
	}
	return nil
}

func (s *Stager) publish(ctx context.Context, v pool.Volume, staging, target string, u csi.Use) error {
	l, err := s.stagedAt(ctx, v, staging)
	if err != nil {
		return err
	}
	at, err := mountsOf(l)
	if err != nil {
		return err
	}
	for _, m := range at {
		switch {
		case m == target:
			return nil
		case u.SingleWriter && m != staging && m != filepath.Join(staging, deviceName):
			return fmt.Errorf("its access mode allows one pod and it is at %s: %w", m, csi.ErrPrecondition)
		}
	}
	// Whatever lies at the target now is not this volume: left by a crash, or by
	// another life of the loop device.
	if err := device.Unmount(target); err != nil {
		return err
	}
	if v.Mode == pool.Block {
		return showDevice(l, target)
	}
	if err := os.MkdirAll(target, 0o750); err != nil {
		return err
	}
	if err := device.Bind(staging, target, device.BindOptions{ReadOnly: u.ReadOnly, Symlinks: true}); err != nil {
		return errors.Join(err, os.Remove(target))
	}
	return nil
}

// stagedAt returns the loop device of a volume that is staged at path. The
// device of a Block volume is verified first, and replaced when a tenant who
// could write to it has detached or changed it.
func (s *Stager) stagedAt(ctx context.Context, v pool.Volume, path string) (*device.Loop, error) {
	s.mu.Lock()
	l := s.loops[v.ID]
	s.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("it is not staged: %w", csi.ErrPrecondition)
	}
	if v.Mode == pool.Filesystem {
		number, err := l.Device()
		if err != nil {
			return nil, err
		}
		if on, err := device.MountedDevice(path); err != nil || on != number {
			return nil, fmt.Errorf("it is not staged at %s: %w", path, csi.ErrPrecondition)
		}
		return l, nil
	}
	shown := filepath.Join(path, deviceName)
	if mounted, err := device.IsMounted(shown); err != nil || !mounted {
		return nil, fmt.Errorf("it is not staged at %s: %w", path, csi.ErrPrecondition)
	}
	readOnly, err := isReadOnly(l)
	if err != nil {
		return nil, err
	}
	file, err := open(v, readOnly)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	o := device.LoopOptions{ReadOnly: readOnly, DirectIO: true}
	err = l.Verify(file, o)
	if !errors.Is(err, device.ErrChanged) {
		return l, err
	}
	s.log.Warn("a staged volume's loop device was changed from outside; it is replaced", "volume", v.ID, "error", err)
	s.drop(v.ID) // we must not be the last user that keeps it
	fresh, made, err := loopFor(ctx, file, o)
	if err != nil {
		return nil, err
	}
	if err := showDevice(fresh, shown); err != nil {
		if made {
			return nil, errors.Join(err, detach(ctx, fresh))
		}
		fresh.Close()
		return nil, err
	}
	s.keep(v.ID, fresh)
	return fresh, nil
}

// Unpublish takes the volume away from target; see csi.Stager.
func (s *Stager) Unpublish(_ context.Context, id, target string) error {
	release, err := s.hold(id, "unpublish")
	if err != nil {
		return err
	}
	defer release()
	if err := device.Unmount(target); err != nil {
		return fmt.Errorf("unpublish volume %s: %w", id, classed(err))
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpublish volume %s: %w", id, err)
	}
	return nil
}
