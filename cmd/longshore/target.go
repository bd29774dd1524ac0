package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/mover"
)

// targetFault classes what the system says of the target.
func targetFault(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fault.Transient(fault.NoSpace, fmt.Errorf("%w: make room", err))
	case errors.Is(err, syscall.EBUSY):
		return fault.Terminal(fault.TargetError, fmt.Errorf("%w: it is mounted or otherwise used; unmount it first", err))
	case errors.Is(err, syscall.EFBIG):
		return fault.Terminal(fault.TargetError, fmt.Errorf("%w: the filesystem takes no file of that size", err))
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS), errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENOTDIR):
		return fault.Terminal(fault.TargetError, fmt.Errorf("%w: give a target that can be written", err))
	}
	return fault.Transient(fault.TargetError, err)
}

// sizeOf is the size of a file or device in bytes.
func sizeOf(f *os.File) (int64, error) {
	n, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, targetFault(err)
	}
	return n, nil
}

// identity names the file or device itself, not its path, so that a journal
// never speaks of another file that has taken the name.
func identity(f *os.File) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return "", targetFault(fmt.Errorf("stat %s: %w", f.Name(), err))
	}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return fmt.Sprintf("device %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)), nil
	}
	return fmt.Sprintf("file %d of device %d:%d", st.Ino, unix.Major(st.Dev), unix.Minor(st.Dev)), nil
}

// lock keeps other imports away from a file until it is closed; of a device
// O_EXCL does that.
func lock(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return fault.Terminal(fault.TargetError, fmt.Errorf("another import writes to %s: wait for its end, or give another target", f.Name()))
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOLCK): // a network filesystem without locks
		return nil
	case err != nil:
		return targetFault(fmt.Errorf("lock %s: %w", f.Name(), err))
	}
	return nil
}

// syncFolder makes the name of a file durable.
func syncFolder(path string) error {
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// holdsData tells whether somebody may miss what the target holds: a file with
// bytes in it, a device with more than zeros where partition tables, filesystems
// and volume managers put their marks.
func holdsData(f *os.File, isDevice bool, size int64) (bool, error) {
	if !isDevice {
		return size > 0, nil
	}
	const look = 1 << 20
	for _, at := range []int64{0, max(0, size-look)} {
		p := make([]byte, min(look, size-at))
		if _, err := f.ReadAt(p, at); err != nil {
			return false, targetFault(fmt.Errorf("read %d bytes at %d: %w", len(p), at, err))
		}
		for _, b := range p {
			if b != 0 {
				return true, nil
			}
		}
	}
	return false, nil
}

// enoughSpace refuses early what the filesystem has no room for.
func enoughSpace(f *os.File, info image.Info, done extent.Set, bytes int64, whole bool) error {
	need := info.AllocatedBytes
	switch {
	case whole:
		need = bytes
	case need < 0 || info.Format == "raw" || info.Format == "iso":
		return nil // only the copy will tell: zeros need no space
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return targetFault(fmt.Errorf("ask the filesystem of %s for its space: %w", f.Name(), err))
	}
	if free := int64(st.Bavail) * st.Bsize; need-done.Bytes() > free {
		return fault.Transient(fault.NoSpace, fmt.Errorf("the disk needs %d bytes and the filesystem of %s has %d free: make room or use another target", need, f.Name(), free))
	}
	return nil
}

// recordFacts and factsOf keep what the mover found in a journal.
func recordFacts(j *journal.Journal, f mover.Facts) error {
	content, err := json.Marshal(f)
	if err != nil {
		return err
	}
	j.Validator, j.Format, j.VirtualBytes = content, f.Format, f.VirtualBytes
	return nil
}

func factsOf(j *journal.Journal) (f mover.Facts, err error) {
	if err := json.Unmarshal(j.Validator, &f); err != nil {
		return f, fmt.Errorf("facts in the journal: %w", err)
	}
	return f, nil
}
