package archive

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const (
	// inside is how every name is looked up: whatever lies there, the way does not lead out.
	inside = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

	// A cache of pages that was written longer ago than so much is given up; of what is
	// written, whoever keeps the ledger makes no more than that wait for the disk.
	cacheBytes = 32 << 20
)

// tree is the folder that is filled. Its paths are names in it; "." is itself.
type tree struct {
	root *os.File
	// name is the folder that was used last and fd its descriptor.
	name string
	fd   int
}

func newTree(root *os.File) *tree { return &tree{root: root, name: ".", fd: int(root.Fd())} }

func (t *tree) close() {
	if t.name != "." {
		unix.Close(t.fd)
	}
	t.name, t.fd = ".", int(t.root.Fd())
}

// folder makes a folder, and those that it is in, where they are missing. Its descriptor
// is valid until the next call.
func (t *tree) folder(name string) (int, error) {
	if name == t.name {
		return t.fd, nil
	}
	how := unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: inside}
	if name == "." {
		t.close()
		return t.fd, nil
	}
	fd, err := unix.Openat2(int(t.root.Fd()), name, &how)
	if errors.Is(err, unix.ENOENT) {
		parent, perr := t.folder(path.Dir(name))
		if perr != nil {
			return -1, perr
		}
		if err := unix.Mkdirat(parent, path.Base(name), 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, t.fault("make the folder", name, err)
		}
		fd, err = unix.Openat2(int(t.root.Fd()), name, &how)
	}
	if err != nil {
		return -1, t.fault("open the folder", name, err)
	}
	t.close()
	t.name, t.fd = name, fd
	return fd, nil
}

// handle is a file of the tree, opened when that is needed.
type handle struct {
	tree  *tree
	name  string
	fd    int
	flags uint64 // of fd: O_RDONLY or O_RDWR
}

func (f *handle) close() {
	if f.fd >= 0 {
		unix.Close(f.fd)
	}
}

// open opens the file for flags: one of which a part is there, or else a new one instead
// of what an earlier run left at its name.
func (f *handle) open(flags uint64, begun bool) error {
	if f.fd >= 0 && f.flags >= flags {
		return nil
	}
	f.close()
	f.flags = flags
	parent, err := f.tree.folder(path.Dir(f.name))
	if err != nil {
		return err
	}
	base := path.Base(f.name)
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK, Resolve: inside}
	if !begun {
		how.Flags |= unix.O_CREAT | unix.O_EXCL
		how.Mode = 0o600
	}
	f.fd, err = unix.Openat2(parent, base, &how)
	switch {
	case errors.Is(err, unix.EEXIST):
		if err = unix.Unlinkat(parent, base, 0); err == nil {
			f.fd, err = unix.Openat2(parent, base, &how)
		}
	case errors.Is(err, unix.EACCES) && flags == unix.O_RDWR: // killed between its mode and the word that it is done
		if err = unix.Fchmodat(parent, base, 0o600, 0); err == nil {
			f.fd, err = unix.Openat2(parent, base, &how)
		}
	case errors.Is(err, unix.ENOENT):
		return fault.Transient(fault.SourceChanged, fmt.Errorf("the archive's member %s was unpacked and is no longer there", quote(f.name)))
	}
	if err != nil {
		return f.tree.fault("open", f.name, err)
	}
	return nil
}

// write writes p without the blocks that are zeros, and tells where in p the last
// byte is that was written.
func (f *handle) write(p []byte, off int64, begun bool) (end int64, err error) {
	if err := f.open(unix.O_RDWR, begun); err != nil {
		return 0, err
	}
	var zeros [blockBytes]byte
	empty := func(at int) bool {
		b := p[at:min(at+blockBytes, len(p))]
		return bytes.Equal(b, zeros[:len(b)])
	}
	for at := 0; at < len(p); {
		from := at
		for at < len(p) && !empty(at) {
			at = min(at+blockBytes, len(p))
		}
		for from < at {
			n, err := unix.Pwrite(f.fd, p[from:at], off+int64(from))
			if err != nil {
				return 0, f.tree.fault("write", f.name, err)
			}
			from += n
			end = int64(from)
		}
		for at < len(p) && empty(at) {
			at = min(at+blockBytes, len(p))
		}
	}
	if long := off + int64(len(p)) - cacheBytes; long > 0 {
		// It only spares memory; whatever becomes of it, the bytes are where they are.
		_ = unix.Fadvise(f.fd, 0, long, unix.FADV_DONTNEED)
	}
	return end, nil
}

// holds tells whether the file has these bytes there, or can't be read; behind its end
// are zeros, for one that is in progress has not got its size.
func (f *handle) holds(p []byte, off int64) (bool, error) {
	err := f.open(unix.O_RDONLY, true)
	if errors.Is(err, unix.EACCES) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	got := make([]byte, len(p))
	for n := 0; n < len(got); {
		m, err := unix.Pread(f.fd, got[n:], off+int64(n))
		if err != nil {
			return false, f.tree.fault("read", f.name, err)
		}
		if n += m; m == 0 {
			break
		}
	}
	return bytes.Equal(p, got), nil
}

// finish gives the file, of which the last byte that was written is before end, its size,
// time and mode.
func (f *handle) finish(h *tar.Header, end int64, begun bool) error {
	if err := f.open(unix.O_RDWR, begun); err != nil {
		return err
	}
	if end < h.Size {
		if err := unix.Ftruncate(f.fd, h.Size); err != nil {
			return f.tree.fault(fmt.Sprintf("give its %d bytes to", h.Size), f.name, err)
		}
	}
	parent, err := f.tree.folder(path.Dir(f.name))
	if err == nil {
		err = f.tree.stamp(parent, path.Base(f.name), h.ModTime)
	}
	if err == nil {
		err = unix.Fchmod(f.fd, modeOf(h))
	}
	if err != nil {
		return f.tree.fault("set time and mode of", f.name, err)
	}
	return nil
}

// stamp sets the time of what is at base, also if that is a link.
func (t *tree) stamp(parent int, base string, mtime time.Time) error {
	ts := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: mtime.Unix(), Nsec: int64(mtime.Nanosecond())}}
	return unix.UtimesNanoAt(parent, base, ts, unix.AT_SYMLINK_NOFOLLOW)
}

// hardLink makes a link to a file, instead of what an earlier run left there.
func (t *tree) hardLink(to, name string) error {
	at, err := unix.Openat2(int(t.root.Fd()), path.Dir(to), &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: inside})
	if err != nil {
		return t.fault("open the folder of", to, err)
	}
	defer unix.Close(at)
	return t.anew("link", name, func(parent int, base string) error { return unix.Linkat(at, path.Base(to), parent, base, 0) })
}

// late makes a symbolic link, or a hard link to one.
func (t *tree) late(l member) error {
	if l.hard {
		return t.hardLink(l.to, l.name)
	}
	return t.anew("make the symbolic link", l.name, func(parent int, base string) error {
		if err := unix.Symlinkat(l.to, parent, base); err != nil {
			return err
		}
		return t.stamp(parent, base, l.time)
	})
}

// anew has something made at a name, where nothing else stays.
func (t *tree) anew(deed, name string, make func(parent int, base string) error) error {
	parent, err := t.folder(path.Dir(name))
	if err != nil {
		return err
	}
	base := path.Base(name)
	if err = make(parent, base); errors.Is(err, unix.EEXIST) {
		if err = unix.Unlinkat(parent, base, 0); err == nil {
			err = make(parent, base)
		}
	}
	if err != nil {
		return t.fault(deed, name, err)
	}
	return nil
}

// loosen undoes what an earlier run's settle did, so that links can be made.
func (t *tree) loosen(folders []member) error {
	for _, m := range folders {
		parent, err := t.folder(path.Dir(m.name))
		if err != nil {
			return err
		}
		if err := unix.Fchmodat(parent, path.Base(m.name), 0o755, 0); err != nil {
			return t.fault("set the mode of", m.name, err)
		}
	}
	return nil
}

// settle gives folders their times and modes, those that lie in others first.
func (t *tree) settle(folders []member) error {
	for i, m := range slices.Backward(folders) {
		if i+1 < len(folders) && folders[i+1].name == m.name {
			continue // told of again later
		}
		parent, err := t.folder(path.Dir(m.name))
		if err == nil {
			err = t.stamp(parent, path.Base(m.name), m.time)
		}
		if err == nil {
			err = unix.Fchmodat(parent, path.Base(m.name), m.mode, 0)
		}
		if err != nil {
			return t.fault("set time and mode of", m.name, err)
		}
	}
	return nil
}

// fault classes an error of the filesystem.
func (t *tree) fault(deed, name string, err error) error {
	if f := (*fault.Fault)(nil); errors.As(err, &f) {
		return err
	}
	if name != "" {
		deed += " " + quote(name)
	}
	err = fmt.Errorf("%s: %w", deed, err)
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return t.full(err)
	case errors.Is(err, unix.EFBIG), errors.Is(err, unix.EMLINK), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EILSEQ):
		return unsupported("the filesystem does not take it: %w: pack it without", err)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EISDIR), errors.Is(err, unix.EEXIST), errors.Is(err, unix.EROFS):
		return fault.Terminal(fault.TargetError, fmt.Errorf("%w: something else writes to the folder, or it is not to be written: give an empty one", err))
	}
	return fault.Transient(fault.TargetError, fmt.Errorf("%w: check the disk that the folder lies on", err))
}

// full tells a filesystem that is full from storage below it that is.
func (t *tree) full(err error) error {
	var st unix.Statfs_t
	if serr := unix.Fstatfs(int(t.root.Fd()), &st); serr != nil {
		return fault.Transient(fault.NoSpace, fmt.Errorf("%w: make room", err))
	}
	// A filesystem keeps a part back for itself.
	if st.Bavail > st.Blocks/20 && (st.Files == 0 || st.Ffree > 0) {
		return fault.Transient(fault.NoSpace, fmt.Errorf("%w: make room where the volume lies", err))
	}
	return fault.Terminal(fault.ImageTooLarge, fmt.Errorf("%w: the archive holds more than the filesystem has room for, %d bytes in %d files and folders: request more (spec.resources.requests.storage of the claim)",
		err, int64(st.Blocks)*st.Bsize, st.Files))
}
