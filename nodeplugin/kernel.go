package nodeplugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// identity is by what the kernel knows a volume's file: device and inode number,
// both 0 when there is no file.
func identity(v pool.Volume) (dev, ino uint64) {
	var st unix.Stat_t
	if err := unix.Stat(v.Path, &st); err != nil {
		return 0, 0
	}
	return st.Dev, st.Ino
}

// mountsOf lists the places where a loop device is seen: mounts of the
// filesystem on it, and binds of its node.
func mountsOf(l *device.Loop) ([]string, error) {
	number, err := l.Device()
	if err != nil {
		return nil, err
	}
	node := "/" + filepath.Base(l.Path())
	infos, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		onIt := unix.Mkdev(uint32(m.Major), uint32(m.Minor)) == number
		return !onIt && !strings.HasSuffix(m.Root, node), false
	})
	if err != nil {
		return nil, fmt.Errorf("list mounts of %s: %w", l.Path(), err)
	}
	var at []string
	for _, m := range infos {
		if unix.Mkdev(uint32(m.Major), uint32(m.Minor)) != number {
			// A file of that name: the device itself only if its number says so.
			if shown, err := deviceAt(m.Mountpoint); err != nil || shown != number {
				continue
			}
		}
		at = append(at, m.Mountpoint)
	}
	return at, nil
}

// isReadOnly tells whether a loop device refuses writes.
func isReadOnly(l *device.Loop) (bool, error) {
	f, err := os.Open(l.Path())
	if err != nil {
		return false, err
	}
	defer f.Close()
	ro, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKROGET)
	if err != nil {
		return false, fmt.Errorf("ask whether %s is read-only: %w", l.Path(), err)
	}
	return ro != 0, nil
}

// privateMount mounts the filesystem of a device where no path leads to it: it
// is reached through the returned descriptor only, and is gone with the last
// file that is open on it, however the process ends.
func privateMount(dev, fstype string) (*os.File, error) {
	fail := func(deed string, err error) (*os.File, error) {
		return nil, fmt.Errorf("mount %s privately: %s: %w", dev, deed, err)
	}
	fd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fail("open filesystem "+fstype, err)
	}
	defer unix.Close(fd)
	if err := unix.FsconfigSetString(fd, "source", dev); err != nil {
		return fail("set source", err)
	}
	if fstype == device.XFS {
		// A clone of the volume, with the same UUID, may be mounted.
		if err := unix.FsconfigSetFlag(fd, "nouuid"); err != nil {
			return fail("set nouuid", err)
		}
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		why := make([]byte, 1024)
		if n, rerr := unix.Read(fd, why); rerr == nil && n > 0 {
			err = fmt.Errorf("%w (%s)", err, strings.TrimSpace(string(why[:n])))
		}
		return fail("read superblock", err)
	}
	m, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_NOATIME|unix.MOUNT_ATTR_NOSYMFOLLOW)
	if err != nil {
		return fail("mount", err)
	}
	return os.NewFile(uintptr(m), dev), nil
}

// within is a path by which this process reaches the root of a private mount.
func within(mount *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", mount.Fd()) }
