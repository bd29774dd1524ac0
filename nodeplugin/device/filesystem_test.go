package device

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestFilesystemLife(t *testing.T) {
	for _, fstype := range []string{Ext4, XFS} {
		for _, zeroed := range []bool{true, false} {
			t.Run(fstype, func(t *testing.T) {
				f := onDisk(t, 320<<20)
				if got, err := ProbeFS(f); err != nil || got != "" {
					t.Errorf("an empty disk is %q, %v", got, err)
				}
				l := attach(t, f, LoopOptions{DirectIO: true})
				if err := Mkfs(t.Context(), l.Path(), fstype, MkfsOptions{Zeroed: zeroed}); err != nil {
					t.Fatal(err)
				}
				if got, err := ProbeFS(f); err != nil || got != fstype {
					t.Errorf("a disk with %s is %q, %v", fstype, got, err)
				}
				if repaired, err := Fsck(t.Context(), l.Path(), fstype); err != nil || repaired {
					t.Errorf("check: repaired %t, %v", repaired, err)
				}
				target := filepath.Join(t.TempDir(), "mnt")
				if mounted, err := IsMounted(target); err != nil || mounted {
					t.Errorf("mounted %t, %v before its mount point was made", mounted, err)
				}
				if err := Mount(l.Path(), target, fstype, MountOptions{Options: []string{"noatime,discard"}}); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { Unmount(target) })
				if mounted, err := IsMounted(target); err != nil || !mounted {
					t.Errorf("mounted %t, %v", mounted, err)
				}
				dev, err := l.Device()
				if on, err2 := MountedDevice(target); err != nil || err2 != nil || on != dev {
					t.Errorf("mounted from %d, want %d (%v, %v)", on, dev, err, err2)
				}
				var st unix.Statfs_t
				if err := unix.Statfs(target, &st); err != nil {
					t.Fatal(err)
				}
				if want := int64(unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOATIME | 0x2000 /* ST_NOSYMFOLLOW */); int64(st.Flags)&want != want {
					t.Errorf("mount flags %#x lack some of %#x", st.Flags, want)
				}
				before, err := Stats(target)
				if err != nil || before.TotalBytes == 0 || before.AvailableBytes == 0 || before.TotalInodes == 0 {
					t.Errorf("usage %+v, %v", before, err)
				}
				if kept := before.TotalBytes - before.UsedBytes - before.AvailableBytes; fstype == Ext4 && kept > before.TotalBytes/50 {
					t.Errorf("some of %d free bytes are kept back: %d are available", before.TotalBytes-before.UsedBytes, before.AvailableBytes)
				}
				if err := f.Truncate(400 << 20); err != nil {
					t.Fatal(err)
				}
				if err := l.Grow(); err != nil {
					t.Fatal(err)
				}
				err = GrowFS(t.Context(), l.Path(), target, fstype)
				if fstype == Ext4 && !mayResize(t) {
					if !errors.Is(err, ErrMounted) {
						t.Fatalf("without CAP_SYS_RESOURCE: got %v, want ErrMounted", err)
					}
					if err = Unmount(target); err == nil {
						err = GrowFS(t.Context(), l.Path(), "", fstype)
					}
					if err == nil {
						err = Mount(l.Path(), target, fstype, MountOptions{})
					}
				}
				if err != nil {
					t.Fatal(err)
				}
				if after, err := Stats(target); err != nil || after.TotalBytes < before.TotalBytes+70<<20 {
					t.Errorf("grew from %d to %d bytes, %v", before.TotalBytes, after.TotalBytes, err)
				}
				if u, err := Stats(l.Path()); err != nil || u.TotalBytes != 400<<20 {
					t.Errorf("the device has %d bytes, %v", u.TotalBytes, err)
				}
				busy, err := os.Open(target)
				if err != nil {
					t.Fatal(err)
				}
				if err := Unmount(target); !errors.Is(err, ErrBusy) {
					t.Errorf("unmount with an open file: got %v, want ErrBusy", err)
				}
				busy.Close()
				for range 2 {
					if err := Unmount(target); err != nil {
						t.Error(err)
					}
				}
				if mounted, err := IsMounted(target); err != nil || mounted {
					t.Errorf("mounted %t, %v after unmount", mounted, err)
				}
			})
		}
	}
}

// mayResize tells whether this process has CAP_SYS_RESOURCE.
func mayResize(t *testing.T) bool {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		t.Fatal(err)
	}
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// A new filesystem on a new file takes little room, writes no more once it is
// mounted, and leaves preallocated blocks allocated.
func TestExt4HasNoWorkLeft(t *testing.T) {
	f := onDisk(t, 1<<30)
	l := attach(t, f, LoopOptions{DirectIO: true})
	target := mountAt(t, l.Path(), Ext4, MountOptions{})
	unix.Sync()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if got := st.Blocks * 512; got > 48<<20 {
		t.Errorf("an empty ext4 of %d bytes takes %d", 1<<30, got)
	}
	if err := Unmount(target); err != nil {
		t.Fatal(err)
	}

	groups, err := exec.Command("dumpe2fs", l.Path()).Output()
	if err != nil {
		t.Fatal(err)
	}
	all, zeroed := len(regexp.MustCompile(`\nGroup [0-9]`).FindAll(groups, -1)), bytes.Count(groups, []byte("ITABLE_ZEROED"))
	if all == 0 || all != zeroed {
		t.Errorf("the kernel would go on to initialise: of %d groups %d are done", all, zeroed)
	}

	full := onDisk(t, 32<<20)
	d, err := NewFile(full, 32<<20)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Preallocate(); err != nil {
		t.Fatal(err)
	}
	l = attach(t, full, LoopOptions{DirectIO: true})
	if err := Mkfs(t.Context(), l.Path(), Ext4, MkfsOptions{Zeroed: true}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fstat(int(full.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if got := st.Blocks * 512; got < 32<<20 {
		t.Errorf("mkfs left %d of %d preallocated bytes", got, 32<<20)
	}
}

func TestMkfsOnTooLittle(t *testing.T) {
	l := attach(t, onDisk(t, 100<<20), LoopOptions{})
	err := Mkfs(t.Context(), l.Path(), XFS, MkfsOptions{})
	var tool *ToolError
	if !errors.As(err, &tool) || !strings.Contains(tool.Line, "300MB") {
		t.Errorf("got %v", err)
	}
	if err := Mkfs(t.Context(), l.Path(), "vfat", MkfsOptions{}); err == nil {
		t.Error("made a vfat")
	}
}

func TestProbeUnknown(t *testing.T) {
	f := onDisk(t, 1<<20)
	if _, err := f.WriteAt([]byte("MZ"), 0); err != nil {
		t.Fatal(err)
	}
	if got, err := ProbeFS(f); err != nil || got != "unknown" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestFsckRepairs(t *testing.T) {
	f := onDisk(t, 16<<20)
	l := attach(t, f, LoopOptions{})
	if err := Mkfs(t.Context(), l.Path(), Ext4, MkfsOptions{}); err != nil {
		t.Fatal(err)
	}
	dev, err := os.OpenFile(l.Path(), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	// Errors were detected, and the count of free blocks is wrong.
	for _, request := range []string{"ssv state 2", "ssv free_blocks_count 7"} {
		if out, err := exec.Command("debugfs", "-w", "-R", request, l.Path()).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	if repaired, err := Fsck(t.Context(), l.Path(), Ext4); err != nil || !repaired {
		t.Errorf("repaired %t, %v", repaired, err)
	}
	if _, err := dev.WriteAt(make([]byte, 8192), 0); err != nil {
		t.Fatal(err)
	}
	if err := dev.Sync(); err != nil {
		t.Fatal(err)
	}
	if _, err := Fsck(t.Context(), l.Path(), Ext4); err == nil {
		t.Error("a disk without a superblock passes")
	}
}

func TestMountOptions(t *testing.T) {
	for _, o := range []string{"suid", "dev", "symfollow", "remount", "bind", "loop", "logdev=/dev/sda", "journal_path=/dev/sda", "noatime,suid"} {
		if err := CheckMountOptions([]string{"ro", o}); !errors.Is(err, ErrOption) {
			t.Errorf("%s: got %v, want ErrOption", o, err)
		}
		if err := Mount("/dev/null", t.TempDir(), Ext4, MountOptions{Options: []string{o}}); !errors.Is(err, ErrOption) {
			t.Errorf("mount with %s: got %v, want ErrOption", o, err)
		}
	}
	if err := CheckMountOptions([]string{"defaults", "noatime,discard", "nosuid", "commit=30"}); err != nil {
		t.Error(err)
	}
	flags, data, err := parseOptions([]string{"ro,noatime", "rw", "commit=30"})
	if err != nil || flags != unix.MS_NOATIME || strings.Join(data, ",") != "commit=30" {
		t.Errorf("got %#x %q, %v", flags, data, err)
	}
}

func TestXFSTwins(t *testing.T) {
	f := onDisk(t, 300<<20)
	l := attach(t, f, LoopOptions{DirectIO: true})
	mountAt(t, l.Path(), XFS, MountOptions{Only: true})
	unix.Sync()
	twin := onDisk(t, 300<<20)
	if _, err := f.Seek(0, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := twin.ReadFrom(f); err != nil {
		t.Fatal(err)
	}
	l2 := attach(t, twin, LoopOptions{DirectIO: true})
	target := filepath.Join(t.TempDir(), "twin")
	if err := Mount(l2.Path(), target, XFS, MountOptions{Only: true}); err == nil {
		t.Error("a twin was mounted where none may be")
		Unmount(target)
	}
	if err := Mount(l2.Path(), target, XFS, MountOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := Unmount(target); err != nil {
		t.Error(err)
	}
}

func TestFreeze(t *testing.T) {
	l := attach(t, onDisk(t, 16<<20), LoopOptions{DirectIO: true})
	target := mountAt(t, l.Path(), Ext4, MountOptions{})
	if err := Freeze(target); err != nil {
		t.Fatal(err)
	}
	if err := Freeze(target); !errors.Is(err, ErrBusy) {
		t.Errorf("frozen twice: got %v, want ErrBusy", err)
	}
	written := make(chan error, 1)
	go func() { written <- os.WriteFile(filepath.Join(target, "a"), nil, 0o600) }()
	select {
	case err := <-written:
		t.Errorf("a write to a frozen filesystem ended: %v", err)
	case <-time.After(50 * time.Millisecond): // nothing tells of what does not happen
	}
	for range 2 {
		if err := Thaw(target); err != nil {
			t.Fatal(err)
		}
	}
	if !t.Failed() {
		if err := <-written; err != nil {
			t.Error(err)
		}
	}
}

func TestBind(t *testing.T) {
	l := attach(t, onDisk(t, 16<<20), LoopOptions{DirectIO: true})
	source := mountAt(t, l.Path(), Ext4, MountOptions{})
	if err := os.WriteFile(filepath.Join(source, "a"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("a", filepath.Join(source, "link")); err != nil {
		t.Fatal(err)
	}
	bind := func(source, target string, o BindOptions) {
		t.Helper()
		if err := Bind(source, target, o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := Unmount(target); err != nil {
				t.Error(err)
			}
		})
	}
	if _, err := os.ReadFile(filepath.Join(source, "link")); !errors.Is(err, unix.ELOOP) {
		t.Errorf("a symbolic link on the private mount: got %v, want ELOOP", err)
	}
	pod := t.TempDir()
	bind(source, pod, BindOptions{Symlinks: true})
	if got, err := os.ReadFile(filepath.Join(pod, "link")); err != nil || string(got) != "x" {
		t.Errorf("a symbolic link where a pod sees it: %q, %v", got, err)
	}
	reader := t.TempDir()
	bind(source, reader, BindOptions{ReadOnly: true})
	if err := os.WriteFile(filepath.Join(reader, "b"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a write to a read-only bind: got %v, want EROFS", err)
	}
	node := filepath.Join(t.TempDir(), "dev")
	if err := os.WriteFile(node, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	bind(l.Path(), node, BindOptions{Device: true})
	if u, err := Stats(node); err != nil || u.TotalBytes != 16<<20 {
		t.Errorf("the bound device has %d bytes, %v", u.TotalBytes, err)
	}
}

func TestOpenDiskImage(t *testing.T) {
	l := attach(t, onDisk(t, 16<<20), LoopOptions{DirectIO: true})
	target := mountAt(t, l.Path(), Ext4, MountOptions{})
	path := filepath.Join(target, DiskImageName)
	if _, err := OpenDiskImage(target, false, 0); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("none there: got %v, want ErrNotExist", err)
	}
	f, err := OpenDiskImage(target, true, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	f, err = OpenDiskImage(target, true, 1<<19)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	if st.Uid != 107 || st.Gid != 107 || st.Mode != unix.S_IFREG|0o660 || st.Size != 1<<20 {
		t.Errorf("disk.img of %d:%d, mode %o, %d bytes", st.Uid, st.Gid, st.Mode, st.Size)
	}
	outside := filepath.Join(t.TempDir(), "shadow")
	if err := os.WriteFile(outside, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, put := range map[string]func() error{
		"a symbolic link out":      func() error { return os.Symlink(outside, path) },
		"a symbolic link within":   func() error { return errors.Join(os.WriteFile(target+"/a", nil, 0o600), os.Symlink("a", path)) },
		"a dangling symbolic link": func() error { return os.Symlink("nowhere", path) },
		"a second link":            func() error { return errors.Join(os.WriteFile(target+"/b", nil, 0o600), os.Link(target+"/b", path)) },
		"a folder":                 func() error { return os.Mkdir(path, 0o700) },
		"a fifo":                   func() error { return unix.Mkfifo(path, 0o600) },
		"a device":                 func() error { return unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 0))) },
		"a file mounted over it": func() error {
			return errors.Join(os.WriteFile(path, nil, 0o600), unix.Mount(outside, path, "", unix.MS_BIND, ""))
		},
		"a socket": func() error { return unix.Mknod(path, unix.S_IFSOCK|0o600, 0) },
	} {
		if err := errors.Join(os.RemoveAll(path), put()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, create := range []bool{false, true} {
			f, err := OpenDiskImage(target, create, 1<<20)
			if err == nil {
				f.Close()
			}
			if !errors.Is(err, ErrNotADiskFile) {
				t.Errorf("%s, create %t: got %v, want ErrNotADiskFile", name, create, err)
			}
		}
		if err := Unmount(path); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Stat(outside, &st); err != nil || st.Uid != 0 || st.Mode&0o777 != 0o600 || st.Size != 6 {
		t.Errorf("the file outside was changed: %d, mode %o, %d bytes (%v)", st.Uid, st.Mode, st.Size, err)
	}
}
