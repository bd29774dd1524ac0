package device

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// DiskImageName is where KubeVirt looks for the disk on a Filesystem volume.
const DiskImageName = "disk.img"

// qemu is the user and group as which KubeVirt's qemu runs.
const qemu = 107

// OpenDiskImage opens /disk.img of the volume mounted at mountpoint for reading
// and writing, makes it if create is set, grows it to size bytes (never shrinks
// it), and gives it to user and group 107 with mode 0660.
//
// The filesystem belongs to the tenant, who may have put anything at that place:
// no link is followed, no mount crossed, and what is opened must be a plain file
// with one link; else the error is ErrNotADiskFile.
func OpenDiskImage(mountpoint string, create bool, size int64) (*os.File, error) {
	path := filepath.Join(mountpoint, DiskImageName)
	dir, err := os.Open(mountpoint)
	if err != nil {
		return nil, fmt.Errorf("open volume: %w", err)
	}
	defer dir.Close()
	how := unix.OpenHow{
		// O_NONBLOCK: a fifo must not keep us waiting.
		Flags:   unix.O_RDWR | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOCTTY,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	if create {
		how.Flags |= unix.O_CREAT
		how.Mode = 0o600
	}
	fd, err := unix.Openat2(int(dir.Fd()), DiskImageName, &how)
	switch err {
	case nil:
	case unix.ELOOP, unix.EXDEV, unix.EISDIR, unix.ENXIO, unix.EACCES:
		return nil, fmt.Errorf("open %s: %w: %w", path, err, ErrNotADiskFile)
	default:
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	if err := adopt(f, size, create); err != nil {
		f.Close()
		return nil, err
	}
	if create {
		if err := dir.Sync(); err != nil {
			f.Close()
			return nil, fmt.Errorf("sync folder of %s: %w", path, err)
		}
	}
	return f, nil
}

func adopt(f *os.File, size int64, grow bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 {
		return fmt.Errorf("%s has mode %o and %d links: %w", f.Name(), st.Mode, st.Nlink, ErrNotADiskFile)
	}
	if grow && st.Size < size {
		if err := f.Truncate(size); err != nil {
			return fmt.Errorf("grow %s to %d bytes: %w", f.Name(), size, err)
		}
	}
	if err := f.Chown(qemu, qemu); err != nil {
		return fmt.Errorf("give %s to user %d: %w", f.Name(), qemu, err)
	}
	if err := f.Chmod(0o660); err != nil {
		return fmt.Errorf("set mode of %s: %w", f.Name(), err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", f.Name(), err)
	}
	return nil
}
