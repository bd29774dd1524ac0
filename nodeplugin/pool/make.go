package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/device"
)

// removeUnfinished removes a pool file whose making a crash cut short: it gets
// its final name last.
func (p *Pool) removeUnfinished(ctx context.Context, image string) error {
	if ok, err := exists(image); err != nil || !ok {
		return err
	}
	if err := p.unmount(ctx, image); err != nil {
		return fmt.Errorf("remove the unfinished %s: %w", image, err)
	}
	if err := os.Remove(image); err != nil {
		return fmt.Errorf("remove the unfinished %s: %w", image, err)
	}
	p.repaired("removed %s: the making of the pool was cut short", image)
	return nil
}

// Make makes the pool where there is none; once it is made, Make does nothing.
// A caller that has ever known a pool here must not call it: its disk may only
// be absent.
func (p *Pool) Make(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.problem != "":
		return fmt.Errorf("pool %s: %s: %w", p.cfg.Name, p.problem, ErrUnavailable)
	case p.uuid != "":
		return nil
	}
	if err := os.MkdirAll(p.cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("make pool %s: %w", p.cfg.Name, err)
	}
	// The disk may have been mounted since Open.
	if err := p.again(ctx); err != nil {
		return err
	}
	if p.uuid != "" {
		return nil
	}
	reflinks, err := hasReflinks(p.cfg.Dir)
	if err != nil {
		return fmt.Errorf("make pool %s: %w", p.cfg.Name, err)
	}
	root, image := p.cfg.Dir, ""
	if reflinks {
		err = p.makeRoot(root, 0)
	} else {
		root, image = filepath.Join(p.cfg.Dir, mountName), filepath.Join(p.cfg.Dir, imageName)
		err = p.makeEmbedded(ctx)
	}
	if err == nil {
		err = p.load(root, image)
	}
	if err != nil {
		return fmt.Errorf("make pool %s: %w", p.cfg.Name, err)
	}
	return nil
}

// makeEmbedded makes the pool file. It has its final name only when all in it is
// complete, and is removed when anything fails.
func (p *Pool) makeEmbedded(ctx context.Context) (err error) {
	image := filepath.Join(p.cfg.Dir, newImageName)
	if p.cfg.Bytes < MinBytes {
		return fmt.Errorf("%s has no reflinks and a pool file of %d bytes is too small: give it %d bytes at least", p.cfg.Dir, p.cfg.Bytes, MinBytes)
	}
	below, err := freeBytes(p.cfg.Dir)
	if err != nil {
		return err
	}
	if p.cfg.Bytes > below {
		return fmt.Errorf("a pool file of %d bytes does not fit in %s, which has %d bytes free: %w", p.cfg.Bytes, p.cfg.Dir, below,
			&FullError{Pool: p.cfg.Name, Need: p.cfg.Bytes, Free: below})
	}
	f, err := os.OpenFile(image, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	defer func() {
		if err != nil {
			undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), detachPatience)
			defer cancel()
			err = errors.Join(err, p.unmount(undo, image), os.Remove(image))
		}
	}()
	p.step("make: file")
	if err := fallocate(f, 0, p.cfg.Bytes/sizeUnit*sizeUnit); err != nil {
		return fmt.Errorf("reserve %d bytes for the pool file: %w", p.cfg.Bytes, err)
	}
	p.step("make: reserved")
	l, err := device.AttachLoop(f, loopOptions)
	if err != nil {
		return err
	}
	defer l.Close()
	p.step("make: attached")
	if err := device.Mkfs(ctx, l.Path(), device.XFS, device.MkfsOptions{Zeroed: true}); err != nil {
		return err
	}
	p.step("make: formatted")
	mnt := filepath.Join(p.cfg.Dir, mountName)
	if mounted, err := device.IsMounted(mnt); err != nil || mounted {
		return errors.Join(err, fmt.Errorf("%s is mounted already: unmount it", mnt))
	}
	if err := device.Mount(l.Path(), mnt, device.XFS, mountOptions); err != nil {
		return err
	}
	p.step("make: mounted")
	usable, err := freeBytes(mnt)
	if err != nil {
		return err
	}
	if err := p.makeRoot(mnt, usable); err != nil {
		return err
	}
	p.step("make: filled")
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(image, filepath.Join(p.cfg.Dir, imageName)); err != nil {
		return err
	}
	p.step("make: renamed")
	return syncDir(p.cfg.Dir)
}

// makeRoot makes the folders and, last, the record that says they are a pool.
func (p *Pool) makeRoot(root string, usable int64) error {
	if ok, err := hasReflinks(root); err != nil || !ok {
		return errors.Join(err, fmt.Errorf("%s has no reflinks", root))
	}
	for _, name := range []string{volumesName, snapshotsName, tmpName, trashName} {
		if err := os.Mkdir(filepath.Join(root, name), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	p.step("make: folders")
	return p.writeJSON(filepath.Join(root, recordName), record{Version: 1, UUID: uuid.NewString(), MadeAt: time.Now().UTC(), UsableBytes: usable})
}

// hasReflinks tries whether files in dir can share blocks. The files have no name,
// so that nothing is left of them.
func hasReflinks(dir string) (bool, error) {
	open := func() (*os.File, error) { return os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600) }
	a, err := open()
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("try reflinks: %w", err)
	}
	defer a.Close()
	b, err := open()
	if err != nil {
		return false, fmt.Errorf("try reflinks: %w", err)
	}
	defer b.Close()
	if _, err := a.WriteAt(make([]byte, sizeUnit), 0); err != nil {
		return false, fmt.Errorf("try reflinks: %w", err)
	}
	err = unix.IoctlFileClone(int(b.Fd()), int(a.Fd()))
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ENOSYS) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("try reflinks: %w", err)
	}
	return true, nil
}
