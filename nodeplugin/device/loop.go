package device

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// LoopOptions says how a file becomes a block device.
type LoopOptions struct {
	ReadOnly bool
	// DirectIO asks that the loop bypass the page cache of the file. Where the
	// kernel can't do that the loop works without; see Loop.DirectIO.
	DirectIO bool
}

// Loop is a loop device bound to a file. Its own descriptor stays open until
// Close or Detach, which keeps the device's number from being reused meanwhile.
type Loop struct {
	path   string
	number int
	f      *os.File
	direct bool
}

// Path is the device's node, /dev/loopN.
func (l *Loop) Path() string { return l.path }

// DirectIO tells whether the loop was bypassing the page cache when it was
// attached, found or verified.
//
// A file that shares blocks with another (a clone, or the source of one) can be
// written directly in whole filesystem blocks only, and Linux 6.14 and later
// then refuse direct I/O on a loop of 512-byte sectors. The sector size of a
// volume must not change during its life, so it is direct I/O that gives way.
func (l *Loop) DirectIO() bool { return l.direct }

// Device is the device's number, as st_dev of a filesystem mounted from it.
func (l *Loop) Device() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(l.f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", l.path, err)
	}
	return st.Rdev, nil
}

// AttachLoop makes file a block device of 512-byte sectors (4096 on a disk that
// has no smaller ones) that is never scanned for partitions. The file may be
// closed afterwards.
//
// It takes the first loop node in /dev that is free, and asks the kernel for a
// further one only when there is none: a machine may run several nodes that
// share the kernel's loop devices and have only some of them in their /dev.
func AttachLoop(file *os.File, o LoopOptions) (*Loop, error) {
	sector := sectorBytes(file)
	nodes, err := loopNodes()
	if err != nil {
		return nil, err
	}
	var refused error
	for _, n := range nodes {
		if n.state() == bound {
			continue
		}
		l, err := configure(n, file, sector, o)
		switch {
		case err == nil:
			return l, nil
		case errors.Is(err, unix.EBUSY): // taken since we looked
		case unusable(err):
			refused = err
		default:
			return nil, err
		}
	}
	l, err := attachFurther(file, sector, o)
	if err != nil && errors.Is(err, ErrNoLoop) && refused != nil {
		return nil, fmt.Errorf("%w (%d nodes in /dev; one of them: %v)", err, len(nodes), refused)
	}
	return l, err
}

// attachFurther has the kernel name a free loop device, which another process
// may take before us: then it is asked again.
func attachFurther(file *os.File, sector int, o LoopOptions) (*Loop, error) {
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("attach %s: all loop nodes in /dev are in use and there is no /dev/loop-control to make more: add /dev/loopN nodes: %w", file.Name(), ErrNoLoop)
	}
	defer ctl.Close()
	var last error
	for range 64 {
		number, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("attach %s: ask for a free loop device: %w: %w", file.Name(), err, ErrNoLoop)
		}
		n := loopNode{path: "/dev/loop" + strconv.Itoa(number), number: number}
		if err := n.make(); err != nil {
			return nil, err
		}
		l, err := configure(n, file, sector, o)
		if err == nil {
			return l, nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return nil, err
		}
		last = err
	}
	return nil, fmt.Errorf("attach %s: lost 64 races for a free loop device: %w: %w", file.Name(), last, ErrNoLoop)
}

// unusable tells of a node that stands in /dev but can't be used by us.
func unusable(err error) bool {
	return errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) ||
		errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)
}

// configure binds the file to one node. The error is EBUSY when the node is taken.
func configure(n loopNode, file *os.File, sector int, o LoopOptions) (*Loop, error) {
	w, err := os.OpenFile(n.path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	cfg := unix.LoopConfig{Fd: uint32(file.Fd()), Size: uint32(sector)}
	if o.ReadOnly {
		cfg.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if o.DirectIO {
		cfg.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
	}
	// For people who read losetup; nothing is ever found by it.
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], file.Name())
	if err := unix.IoctlLoopConfigure(int(w.Fd()), &cfg); err != nil {
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTTY) {
			return nil, fmt.Errorf("attach %s to %s with sectors of %d bytes: %w (LOOP_CONFIGURE needs Linux 5.8)", file.Name(), n.path, sector, err)
		}
		return nil, fmt.Errorf("attach %s to %s: %w", file.Name(), n.path, err)
	}
	// The descriptor that is kept is read-only: kernels may refuse to mount a
	// device that somebody holds open for writing.
	r, err := os.OpenFile(n.path, os.O_RDONLY, 0)
	if err != nil {
		_ = unix.IoctlSetInt(int(w.Fd()), unix.LOOP_CLR_FD, 0)
		return nil, fmt.Errorf("open %s after attaching %s: %w", n.path, file.Name(), err)
	}
	l := &Loop{path: n.path, number: n.number, f: r}
	if err := l.Verify(file, o); err != nil {
		_ = unix.IoctlSetInt(int(w.Fd()), unix.LOOP_CLR_FD, 0)
		r.Close()
		return nil, err
	}
	return l, nil
}

// FindLoops returns the loop devices in /dev bound to the file with this device
// and inode number, in order of their number. The caller closes them.
//
// Never trust the file's name that a loop device shows: files are renamed, and
// anybody who attaches a loop chooses it.
func FindLoops(dev, ino uint64) ([]*Loop, error) {
	nodes, err := loopNodes()
	if err != nil {
		return nil, err
	}
	var found []*Loop
	for _, n := range nodes {
		if n.state() == unbound {
			continue
		}
		r, err := os.OpenFile(n.path, os.O_RDONLY, 0)
		if err != nil {
			if unusable(err) {
				continue
			}
			for _, l := range found {
				l.Close()
			}
			return nil, fmt.Errorf("look for loop devices: %w", err)
		}
		info, err := unix.IoctlLoopGetStatus64(int(r.Fd()))
		if err != nil || info.Device != dev || info.Inode != ino {
			r.Close()
			continue
		}
		found = append(found, &Loop{path: n.path, number: n.number, f: r, direct: info.Flags&unix.LO_FLAGS_DIRECT_IO != 0})
	}
	return found, nil
}

// FindLoopsOf is FindLoops for an open file.
func FindLoopsOf(file *os.File) ([]*Loop, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return nil, fmt.Errorf("stat %s: %w", file.Name(), err)
	}
	return FindLoops(st.Dev, st.Ino)
}

// Verify tells whether the loop still shows the whole of file as o says. Who can
// write to a loop device may detach it and change its flags without any
// privilege, so it is asked before each use; the error is ErrChanged. Direct I/O
// that was switched off is switched on again.
func (l *Loop) Verify(file *os.File, o LoopOptions) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return fmt.Errorf("stat %s: %w", file.Name(), err)
	}
	changed := func(format string, args ...any) error {
		return fmt.Errorf("%s of %s: %s: %w", l.path, file.Name(), fmt.Sprintf(format, args...), ErrChanged)
	}
	info, err := unix.IoctlLoopGetStatus64(int(l.f.Fd()))
	if errors.Is(err, unix.ENXIO) {
		return changed("it is detached")
	}
	if err != nil {
		return fmt.Errorf("status of %s: %w", l.path, err)
	}
	sector, err := unix.IoctlGetUint32(int(l.f.Fd()), unix.BLKSSZGET)
	if err != nil {
		return fmt.Errorf("sector size of %s: %w", l.path, err)
	}
	switch {
	case info.Device != st.Dev || info.Inode != st.Ino:
		return changed("it shows device %d inode %d instead of device %d inode %d", info.Device, info.Inode, st.Dev, st.Ino)
	case info.Offset != 0 || info.Sizelimit != 0:
		return changed("it shows a part from byte %d, limit %d", info.Offset, info.Sizelimit)
	case (info.Flags&unix.LO_FLAGS_READ_ONLY != 0) != o.ReadOnly:
		return changed("read-only is %t", !o.ReadOnly)
	case info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0:
		return changed("it is being detached")
	case info.Flags&unix.LO_FLAGS_PARTSCAN != 0:
		return changed("it is scanned for partitions")
	case int(sector) != sectorBytes(file):
		return changed("its sectors have %d bytes instead of %d", sector, sectorBytes(file))
	}
	l.direct = info.Flags&unix.LO_FLAGS_DIRECT_IO != 0
	if o.DirectIO && !l.direct {
		// Refused with EINVAL where the file can't have it; the flag tells.
		if err := unix.IoctlSetInt(int(l.f.Fd()), unix.LOOP_SET_DIRECT_IO, 1); err == nil {
			info, err := unix.IoctlLoopGetStatus64(int(l.f.Fd()))
			if err != nil {
				return fmt.Errorf("status of %s: %w", l.path, err)
			}
			l.direct = info.Flags&unix.LO_FLAGS_DIRECT_IO != 0
		}
	}
	return nil
}

// Size is what the block device shows now, in bytes.
func (l *Loop) Size() (int64, error) { return blockSize(l.f) }

// Grow makes the device as large as its file has become.
func (l *Loop) Grow() error {
	if err := unix.IoctlSetInt(int(l.f.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("grow %s: %w", l.path, err)
	}
	return nil
}

// Free tells whether nobody has the device mounted or claimed, in any mount namespace.
func (l *Loop) Free() bool {
	f, err := os.OpenFile(l.path, os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

// Detach unbinds the device and returns when it is gone. The kernel waits for
// its last user: while it is mounted or open elsewhere Detach waits too, and
// ends with ErrBusy when ctx does; the device then goes with its last user.
// A device that is gone already is success. The loop is closed in any case.
func (l *Loop) Detach(ctx context.Context) error {
	info, err := unix.IoctlLoopGetStatus64(int(l.f.Fd()))
	if err != nil {
		l.f.Close()
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		return fmt.Errorf("status of %s: %w", l.path, err)
	}
	err = unix.IoctlSetInt(int(l.f.Fd()), unix.LOOP_CLR_FD, 0)
	l.f.Close()
	if err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", l.path, err)
	}
	// There is no event to wait for, only the state to look at.
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		gone, err := l.goneAs(info)
		if err != nil || gone {
			return err
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("detach %s: it is still mounted or open somewhere: %w: %w", l.path, context.Cause(ctx), ErrBusy)
		case <-t.C:
		}
	}
}

// goneAs tells whether the node no longer shows the file of info.
func (l *Loop) goneAs(info *unix.LoopInfo64) (bool, error) {
	if n := (loopNode{path: l.path, number: l.number}); n.state() == unbound {
		return true, nil
	}
	r, err := os.OpenFile(l.path, os.O_RDONLY, 0)
	if err != nil {
		if unusable(err) {
			return true, nil
		}
		return false, fmt.Errorf("look whether %s is detached: %w", l.path, err)
	}
	defer r.Close()
	now, err := unix.IoctlLoopGetStatus64(int(r.Fd()))
	if errors.Is(err, unix.ENXIO) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("status of %s: %w", l.path, err)
	}
	return now.Device != info.Device || now.Inode != info.Inode, nil
}

// Close gives up the descriptor; the device stays attached.
func (l *Loop) Close() error { return l.f.Close() }

// loopNode is a node in /dev.
type loopNode struct {
	path   string
	number int
}

// loopNodes lists the loop nodes in /dev by number.
func loopNodes() ([]loopNode, error) {
	paths, err := filepath.Glob("/dev/loop[0-9]*")
	if err != nil {
		return nil, err
	}
	var nodes []loopNode
	for _, p := range paths {
		number, err := strconv.Atoi(strings.TrimPrefix(p, "/dev/loop"))
		if err != nil {
			continue // /dev/loop0p1
		}
		if st, err := os.Stat(p); err != nil || st.Mode()&(os.ModeDevice|os.ModeCharDevice) != os.ModeDevice {
			continue
		}
		nodes = append(nodes, loopNode{p, number})
	}
	slices.SortFunc(nodes, func(a, b loopNode) int { return a.number - b.number })
	return nodes, nil
}

func (n loopNode) sys() string { return "/sys/block/" + filepath.Base(n.path) }

type nodeState int

const (
	unknown nodeState = iota // there is no sysfs: the device itself must be asked
	unbound                  // free, or not known to the kernel before it is opened
	bound
)

// state tells by sysfs whether the node is bound to a file, and spares opening
// every device of the machine.
func (n loopNode) state() nodeState {
	if _, err := os.Stat(n.sys() + "/loop"); err == nil {
		return bound
	}
	if _, err := os.Stat("/sys/block"); err != nil {
		return unknown
	}
	return unbound
}

// make makes the node where /dev is a plain tmpfs, as in most containers, so
// that devices made later do not show up by themselves.
func (n loopNode) make() error {
	if _, err := os.Stat(n.path); err == nil {
		return nil
	}
	text, err := os.ReadFile(n.sys() + "/dev")
	if err != nil {
		return fmt.Errorf("device number of %s: %w", n.path, err)
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(string(text), "%d:%d", &major, &minor); err != nil {
		return fmt.Errorf("device number of %s, %q: %w", n.path, text, err)
	}
	err = unix.Mknod(n.path, unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor)))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make node %s: %w", n.path, err)
	}
	return nil
}

// sectorBytes is the smallest unit in which the disk below file can be read:
// the sector size that a loop on the file has for all of its life. The unit for
// writing is larger while the file shares blocks, and so must not decide.
func sectorBytes(file *os.File) int {
	var st unix.Statx_t
	err := unix.Statx(int(file.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN|unix.STATX_DIO_READ_ALIGN, &st)
	unit := uint32(0)
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		unit = st.Dio_offset_align
	}
	if err == nil && st.Mask&unix.STATX_DIO_READ_ALIGN != 0 && st.Dio_read_offset_align != 0 {
		unit = st.Dio_read_offset_align
	}
	if unit > 512 {
		return 4096
	}
	return 512
}

// blockSize is the size of a block device in bytes.
func blockSize(f *os.File) (int64, error) {
	size, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKGETSIZE64)
	if err != nil {
		return 0, fmt.Errorf("size of %s: %w", f.Name(), err)
	}
	return int64(size), nil
}
