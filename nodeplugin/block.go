package nodeplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// open opens the volume's file.
func open(v pool.Volume, readOnly bool) (*os.File, error) {
	if readOnly {
		return os.Open(v.Path)
	}
	return os.OpenFile(v.Path, os.O_RDWR, 0)
}

// loopFor returns a loop device on the volume's file that shows it as it is: one
// that is there, or a new one. Of those that are there and do not (a tenant may
// have changed them) the idle are taken away. made tells of a new one.
func loopFor(ctx context.Context, file *os.File, o device.LoopOptions) (l *device.Loop, made bool, err error) {
	loops, err := device.FindLoopsOf(file)
	if err != nil {
		return nil, false, err
	}
	for _, found := range loops {
		switch err := found.Verify(file, o); {
		case err == nil && l == nil:
			l = found
		case found.Free():
			// Told to go, it goes with its last user, who may be a tenant.
			dctx, cancel := context.WithTimeout(ctx, changedWait)
			err := found.Detach(dctx)
			cancel()
			if err != nil && !errors.Is(err, device.ErrBusy) {
				return nil, false, err
			}
		default:
			found.Close()
		}
	}
	if l != nil {
		return l, false, nil
	}
	l, err = device.AttachLoop(file, o)
	return l, true, err
}

// detach detaches even when the call that wants it has ended: a device that
// stays behind is worse than an answer that comes late.
func detach(ctx context.Context, l *device.Loop) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), detachWait)
	defer cancel()
	return l.Detach(ctx)
}

// keep keeps the descriptor of a staged volume's loop device, so that the device
// can't go away under a tenant's ioctl while the volume is staged.
func (s *Stager) keep(id string, l *device.Loop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.loops[id]; old != nil && old != l {
		old.Close()
	}
	s.loops[id] = l
}

// drop forgets the kept descriptor.
func (s *Stager) drop(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.loops[id]; l != nil {
		l.Close()
		delete(s.loops, id)
	}
}

// tellCached leaves a trace of a volume whose data go through the host's page
// cache, which takes memory of the node and makes writes slower.
func (s *Stager) tellCached(v pool.Volume, l *device.Loop) {
	if !l.DirectIO() {
		s.log.Info("the kernel refuses direct I/O: the volume goes through the page cache", "volume", v.ID, "device", l.Path(), "copyOf", v.From)
	}
}

func (s *Stager) stageBlock(ctx context.Context, v pool.Volume, path string, u csi.Use) error {
	file, err := open(v, u.ReadOnly)
	if err != nil {
		return err
	}
	defer file.Close()
	l, made, err := loopFor(ctx, file, device.LoopOptions{ReadOnly: u.ReadOnly, DirectIO: true})
	if err != nil {
		return err
	}
	s.tellCached(v, l)
	err = os.MkdirAll(path, 0o750)
	if err == nil {
		err = showDevice(l, filepath.Join(path, deviceName))
	}
	if err != nil {
		if made {
			return errors.Join(err, detach(ctx, l))
		}
		l.Close()
		return err
	}
	s.keep(v.ID, l)
	return nil
}

// showDevice binds the loop's node to target, a file that it makes. What it
// shows already stays; what it shows wrongly is replaced.
func showDevice(l *device.Loop, target string) error {
	number, err := l.Device()
	if err != nil {
		return err
	}
	mounted, err := device.IsMounted(target)
	if err != nil {
		return err
	}
	if mounted {
		if shown, err := deviceAt(target); err == nil && shown == number {
			return nil
		}
		if err := device.Unmount(target); err != nil {
			return err
		}
	}
	f, err := os.OpenFile(target, os.O_RDONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o640)
	if err != nil {
		return err
	}
	f.Close()
	if err := device.Bind(l.Path(), target, device.BindOptions{Device: true}); err != nil {
		return errors.Join(err, os.Remove(target))
	}
	return nil
}

// deviceAt is the number of the block device whose node lies at path.
func deviceAt(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, fmt.Errorf("%s is no block device", path)
	}
	return st.Rdev, nil
}
