package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// pack does in its folder what filling it takes, and what nobody may.
func pack() seen {
	const folder = 4
	var s seen
	step := func(deed string, err error) {
		if err != nil {
			s.Unexpected = append(s.Unexpected, fmt.Sprintf("%s: %v", deed, err))
		}
	}
	fd, err := unix.Openat2(folder, "file", &unix.OpenHow{Flags: unix.O_RDWR | unix.O_CREAT | unix.O_EXCL, Mode: 0o600, Resolve: unix.RESOLVE_BENEATH})
	step("make a file", err)
	step("give it a size", unix.Ftruncate(fd, 4096))
	step("give it a mode", unix.Fchmod(fd, 0o640))
	step("make a folder", unix.Mkdirat(folder, "dir", 0o755))
	step("give it a mode", unix.Fchmodat(folder, "dir", 0o700, 0))
	step("make a symbolic link", unix.Symlinkat("file", folder, "symlink"))
	step("give it a time", unix.UtimesNanoAt(folder, "symlink", make([]unix.Timespec, 2), unix.AT_SYMLINK_NOFOLLOW))
	step("make a hard link", unix.Linkat(folder, "file", folder, "link", 0))
	step("remove it", unix.Unlinkat(folder, "link", 0))
	step("ask for room", unix.Fstatfs(folder, &unix.Statfs_t{}))

	refuse := func(deed string, err error) {
		if err == nil {
			s.Allowed = append(s.Allowed, deed)
		}
	}
	for _, way := range []string{"..", "../..", "../canary", "../../canary", "dir/../../canary", "/canary"} {
		fd, err := unix.Openat(folder, way+"/.", unix.O_RDONLY, 0)
		var here, there unix.Stat_t
		if err == nil && unix.Fstat(folder, &here) == nil && unix.Fstat(fd, &there) == nil && here.Ino != there.Ino {
			s.Opened = append(s.Opened, way)
		}
		if fd, err := unix.Openat(folder, way, unix.O_WRONLY, 0); err == nil {
			s.Opened = append(s.Opened, way)
			unix.Close(fd)
		}
	}
	refuse("make a device", unix.Mknodat(folder, "null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	refuse("make a fifo", unix.Mknodat(folder, "fifo", unix.S_IFIFO|0o666, 0))
	refuse("give a file away", unix.Fchownat(folder, "file", 0, 0, 0))
	refuse("give a file an attribute", unix.Fsetxattr(fd, "user.a", []byte("b"), 0))
	refuse("rename", unix.Renameat(folder, "file", folder, "other"))
	refuse("name the program", unix.Linkat(unix.AT_FDCWD, "/program", folder, "program", 0))
	refuse("name its socket", unix.Linkat(3, "", folder, "socket", unix.AT_EMPTY_PATH))
	return s
}

// Who fills a folder can do what that takes, and does not leave it.
func TestFolder(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "a")
	for _, err := range []error{os.Mkdir(dir, 0o777), os.Chmod(dir, 0o777), os.Chmod(top, 0o777), os.WriteFile(filepath.Join(top, "canary"), nil, 0o666)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	// A mount without a parent: up from its root is itself.
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	mount := os.NewFile(uintptr(fd), dir)
	defer mount.Close()
	root, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p, err := Start(t.Context(), Config{Args: []string{packer}, Files: []*os.File{w, root}, Folder: true, FileBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	var s seen
	derr := json.NewDecoder(r).Decode(&s)
	if err := errors.Join(p.Wait(), derr); err != nil {
		t.Fatal(err)
	}
	if len(s.Unexpected)+len(s.Opened)+len(s.Allowed) > 0 {
		t.Errorf("could not: %v; could open %v; could %v", s.Unexpected, s.Opened, s.Allowed)
	}
	list, err := os.ReadDir(dir)
	if err != nil || fmt.Sprint(list) != "[d dir/ - file L symlink]" {
		t.Errorf("the folder holds %v, %v", list, err)
	}
}
