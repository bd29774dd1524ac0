package device

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Filesystems that volumes can have.
const (
	Ext4 = "ext4"
	XFS  = "xfs"
)

// MkfsOptions says how a filesystem is made.
type MkfsOptions struct {
	// Zeroed promises that the whole device reads as zeros, as that of a new file does.
	// Then nothing is discarded (which would give up preallocated blocks) and no
	// zeros are written; without the promise the device is discarded first and all
	// tables are written at once.
	Zeroed bool
}

// Mkfs makes an ext4 or XFS filesystem on dev and destroys what was there.
//
// No work is left to the kernel for later (ext4's lazy initialisation would
// write to the volume for minutes after its first mount), and no blocks are
// kept back for root. XFS gets 4096-byte sectors and so can be mounted whatever
// the sector size of the device below; it needs 300 MiB.
func Mkfs(ctx context.Context, dev, fstype string, o MkfsOptions) error {
	var args []string
	switch fstype {
	case Ext4:
		args = []string{"-q", "-F", "-m", "0"}
		if o.Zeroed {
			args = append(args, "-E", "nodiscard,assume_storage_prezeroed=1")
		} else {
			args = append(args, "-E", "discard,lazy_itable_init=0,lazy_journal_init=0")
		}
	case XFS:
		args = []string{"-q", "-f", "-s", "size=4096", "-m", "crc=1,reflink=1"}
		if o.Zeroed {
			args = append(args, "-K")
		}
	default:
		return fmt.Errorf("make a filesystem %q on %s: only %s and %s can be made", fstype, dev, Ext4, XFS)
	}
	if err := run(ctx, "mkfs."+fstype, append(args, dev)...); err != nil {
		return fmt.Errorf("make %s on %s: %w", fstype, dev, err)
	}
	return nil
}

// Fsck repairs what can be repaired without loss on an unmounted filesystem and
// tells whether it changed anything. XFS is left alone: it repairs itself from
// its log when it is mounted.
func Fsck(ctx context.Context, dev, fstype string) (repaired bool, err error) {
	if fstype != Ext4 {
		return false, nil
	}
	return fsck(ctx, dev, "-p")
}

func fsck(ctx context.Context, dev string, options ...string) (repaired bool, err error) {
	err = run(ctx, "e2fsck", append(options, dev)...)
	var tool *ToolError
	if errors.As(err, &tool) && (tool.ExitCode == 1 || tool.ExitCode == 2) {
		return true, nil // e2fsck(8): 1 corrected, 2 corrected and must not be mounted meanwhile
	}
	if err != nil {
		return false, fmt.Errorf("check ext4 on %s: %w: its errors need a person: run e2fsck on a copy of the volume", dev, err)
	}
	return false, nil
}

// ProbeFS tells which filesystem r begins with: Ext4, XFS, "" when the first
// 128 KiB are all zero, or "unknown". It reads magic numbers only.
func ProbeFS(r io.ReaderAt) (string, error) {
	head := make([]byte, 128<<10)
	n, err := r.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return "", fmt.Errorf("read the first %d bytes: %w", len(head), err)
	}
	head = head[:n]
	switch {
	case len(head) >= 4 && string(head[:4]) == "XFSB":
		return XFS, nil
	case len(head) >= 1082 && binary.LittleEndian.Uint16(head[1080:]) == 0xEF53:
		return Ext4, nil
	case len(bytes.Trim(head, "\x00")) == 0:
		return "", nil
	}
	return "unknown", nil
}

// GrowFS grows a filesystem to the size of its device: mounted at mountpoint,
// or, for ext4 only, not mounted (mountpoint ""), which takes a check first.
// The kernel grows a mounted ext4 only for who has CAP_SYS_RESOURCE; for others
// the error is ErrMounted.
func GrowFS(ctx context.Context, dev, mountpoint, fstype string) error {
	var err error
	switch {
	case fstype == XFS && mountpoint != "":
		err = run(ctx, "xfs_growfs", mountpoint)
	case fstype == Ext4 && mountpoint != "":
		err = run(ctx, "resize2fs", dev)
		var tool *ToolError
		if errors.As(err, &tool) && strings.Contains(tool.Line, "Permission denied") {
			err = fmt.Errorf("%w: this process lacks CAP_SYS_RESOURCE: %w", err, ErrMounted)
		}
	case fstype == Ext4:
		// resize2fs wants a check that is newer than the last mount.
		if _, err = fsck(ctx, dev, "-f", "-p"); err == nil {
			err = run(ctx, "resize2fs", dev)
		}
	default:
		err = fmt.Errorf("%s can't be grown unmounted: %s can when mounted, %s always", fstype, XFS, Ext4)
	}
	if err != nil {
		return fmt.Errorf("grow %s on %s: %w", fstype, dev, err)
	}
	return nil
}

// Usage is what a filesystem, or a block device, holds. Inodes are 0 for a block device.
type Usage struct {
	TotalBytes, UsedBytes, AvailableBytes    int64
	TotalInodes, UsedInodes, AvailableInodes int64
}

// Stats tells the usage of the filesystem or of the block device at path.
func Stats(path string) (Usage, error) {
	st, err := os.Stat(path)
	if err != nil {
		return Usage{}, err
	}
	if st.Mode()&os.ModeDevice != 0 {
		f, err := os.Open(path)
		if err != nil {
			return Usage{}, err
		}
		defer f.Close()
		size, err := blockSize(f)
		return Usage{TotalBytes: size}, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return Usage{}, fmt.Errorf("usage of %s: %w", path, err)
	}
	bytes := func(blocks uint64) int64 { return int64(blocks) * fs.Bsize }
	return Usage{
		TotalBytes:      bytes(fs.Blocks),
		UsedBytes:       bytes(fs.Blocks - fs.Bfree),
		AvailableBytes:  bytes(fs.Bavail),
		TotalInodes:     int64(fs.Files),
		UsedInodes:      int64(fs.Files - fs.Ffree),
		AvailableInodes: int64(fs.Ffree),
	}, nil
}

// From linux/fs.h; the same on every architecture with the common ioctl layout.
const (
	fiFreeze = 0xC0045877
	fiThaw   = 0xC0045878
)

// Freeze makes the filesystem at mountpoint complete on its device and stops
// writes to it until Thaw. A filesystem that is frozen already is ErrBusy.
func Freeze(mountpoint string) error { return freezer(mountpoint, fiFreeze, "freeze") }

// Thaw lets writes go on. A filesystem that is not frozen is success.
func Thaw(mountpoint string) error { return freezer(mountpoint, fiThaw, "thaw") }

func freezer(mountpoint string, request uint, deed string) error {
	fd, err := unix.Open(mountpoint, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s %s: %w", deed, mountpoint, err)
	}
	defer unix.Close(fd)
	err = unix.IoctlSetInt(fd, request, 0)
	switch {
	case err == nil, request == fiThaw && errors.Is(err, unix.EINVAL):
		return nil
	case request == fiFreeze && errors.Is(err, unix.EBUSY):
		return fmt.Errorf("freeze %s: it is frozen: %w", mountpoint, ErrBusy)
	}
	return fmt.Errorf("%s %s: %w", deed, mountpoint, err)
}

// mountFlags are the options that are flags of the kernel: set, and cleared.
var mountFlags = map[string]struct{ set, clear uintptr }{
	"defaults": {}, "rw": {0, unix.MS_RDONLY}, "ro": {unix.MS_RDONLY, 0},
	"nosuid": {}, "nodev": {}, "nosymfollow": {}, // always set
	"exec": {0, unix.MS_NOEXEC}, "noexec": {unix.MS_NOEXEC, 0},
	"async": {0, unix.MS_SYNCHRONOUS}, "sync": {unix.MS_SYNCHRONOUS, 0}, "dirsync": {unix.MS_DIRSYNC, 0},
	"atime": {0, unix.MS_NOATIME}, "noatime": {unix.MS_NOATIME, 0},
	"diratime": {0, unix.MS_NODIRATIME}, "nodiratime": {unix.MS_NODIRATIME, 0},
	"relatime": {unix.MS_RELATIME, 0}, "strictatime": {unix.MS_STRICTATIME, 0},
	"lazytime": {unix.MS_LAZYTIME, 0}, "nolazytime": {0, unix.MS_LAZYTIME},
}

// denied are options that undo what protects the host, change what is mounted
// instead of how, or name further devices of the host.
var denied = map[string]bool{
	"suid": true, "dev": true, "symfollow": true,
	"remount": true, "bind": true, "rbind": true, "move": true, "loop": true,
	"shared": true, "rshared": true, "slave": true, "rslave": true, "private": true, "rprivate": true,
	"logdev": true, "rtdev": true, "journal_dev": true, "journal_path": true,
}

// CheckMountOptions says whether Mount would take these options; the error is
// ErrOption and names the option.
func CheckMountOptions(options []string) error {
	_, _, err := parseOptions(options)
	return err
}

func parseOptions(options []string) (flags uintptr, data []string, err error) {
	for _, list := range options {
		for o := range strings.SplitSeq(list, ",") {
			name, _, _ := strings.Cut(o, "=")
			if denied[name] {
				return 0, nil, fmt.Errorf("mount option %q: remove it from the StorageClass: %w", o, ErrOption)
			}
			if f, ok := mountFlags[o]; ok {
				flags = flags&^f.clear | f.set
			} else if o != "" {
				data = append(data, o)
			}
		}
	}
	return flags, data, nil
}

// MountOptions says how a filesystem is mounted.
type MountOptions struct {
	ReadOnly bool
	// Options as in a StorageClass: flags of mount(8) and the filesystem's own.
	Options []string
	// Only refuses an XFS whose twin (a clone has the same UUID) is mounted.
	Only bool
}

// Mount mounts the filesystem of dev at target, which it makes if need be.
// What a tenant may have written there is never trusted: the mount is always
// nosuid, nodev and nosymfollow.
func Mount(dev, target, fstype string, o MountOptions) error {
	flags, data, err := parseOptions(o.Options)
	if err != nil {
		return err
	}
	if o.ReadOnly {
		flags |= unix.MS_RDONLY
	}
	if fstype == XFS && !o.Only {
		data = append(data, "nouuid")
	}
	if err := os.MkdirAll(target, 0o750); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	flags |= unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOSYMFOLLOW
	if err := unix.Mount(dev, target, fstype, flags, strings.Join(data, ",")); err != nil {
		err = fmt.Errorf("mount %s at %s as %s with options %q: %w", dev, target, fstype, strings.Join(data, ","), err)
		if errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("%w: %w", err, ErrBusy)
		}
		return err
	}
	return nil
}

// BindOptions says how Bind shows something at a second place.
type BindOptions struct {
	ReadOnly bool
	// Device: the source is a block device's node and must stay usable as one.
	Device bool
	// Symlinks lets symbolic links be followed below target: for the mount that
	// a pod sees, whose own processes alone walk it.
	Symlinks bool
}

// Bind shows source at target, a folder or file that exists. The new mount is
// nosuid, and nodev and nosymfollow unless o says otherwise.
func Bind(source, target string, o BindOptions) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("bind %s: %w", source, err)
	}
	defer unix.Close(fd)
	// The flags are in place before anybody can see the mount.
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID, Propagation: unix.MS_PRIVATE}
	if o.ReadOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if o.Device {
		attr.Attr_clr |= unix.MOUNT_ATTR_NODEV
	} else {
		attr.Attr_set |= unix.MOUNT_ATTR_NODEV
	}
	if o.Symlinks {
		attr.Attr_clr |= unix.MOUNT_ATTR_NOSYMFOLLOW
	} else {
		attr.Attr_set |= unix.MOUNT_ATTR_NOSYMFOLLOW
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("set flags of the bind of %s: %w", source, err)
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("bind %s to %s: %w", source, target, err)
	}
	return nil
}

// IsMounted tells whether a mount lies at path. A path that does not exist has none.
func IsMounted(path string) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		m, merr := mountOver(path)
		if merr != nil {
			return false, fmt.Errorf("look whether %s is mounted: %w: %w", path, err, merr)
		}
		return m != nil, nil
	}
	if st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return false, fmt.Errorf("look whether %s is mounted: the kernel does not tell (Linux 5.8 does)", path)
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// MountedDevice is the number of the device whose filesystem path lies on.
func MountedDevice(path string) (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	if err == nil {
		return st.Dev, nil
	}
	if m, merr := mountOver(path); merr == nil && m != nil {
		return unix.Mkdev(uint32(m.Major), uint32(m.Minor)), nil
	}
	return 0, fmt.Errorf("stat %s: %w", path, err)
}

// mountOver is the mount that covers path, nil for none. It does not ask the
// filesystem there: one that has shut itself down answers nothing any more.
func mountOver(path string) (*mountinfo.Info, error) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	point := filepath.Join(dir, filepath.Base(path))
	list, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != point, false })
	if err != nil || len(list) == 0 {
		return nil, err
	}
	return list[len(list)-1], nil
}

// Unmount takes away every mount at target; none is success. While something
// there is open or is somebody's current folder the error is ErrBusy.
func Unmount(target string) error {
	for {
		mounted, err := IsMounted(target)
		if err != nil || !mounted {
			return err
		}
		err = unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("unmount %s: %w: %w", target, err, ErrBusy)
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", target, err)
		}
	}
}
