package device

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// attach attaches a loop that is gone with t.
func attach(t *testing.T, f *os.File, o LoopOptions) *Loop {
	t.Helper()
	l, err := AttachLoop(f, o)
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		loops, err := FindLoops(st.Dev, st.Ino)
		if err != nil {
			t.Error(err)
		}
		for _, l := range loops {
			if err := l.Detach(ctx); err != nil {
				t.Error(err)
			}
		}
	})
	return l
}

func TestLoopShowsItsFile(t *testing.T) {
	f := onDisk(t, 1<<20)
	want := bytes.Repeat([]byte("longshore"), 1000)
	if _, err := f.WriteAt(want, 12345); err != nil {
		t.Fatal(err)
	}
	l := attach(t, f, LoopOptions{DirectIO: true})
	if !l.DirectIO() {
		t.Error("no direct I/O on a filesystem that can")
	}
	if flag, err := os.ReadFile("/sys/block/" + filepath.Base(l.Path()) + "/loop/dio"); err != nil || flag[0] != '1' {
		t.Errorf("the kernel says of direct I/O %q, %v", flag, err)
	}
	got := make([]byte, len(want))
	dev, err := os.Open(l.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	if _, err := dev.ReadAt(got, 12345); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the device holds other bytes than its file (%v)", err)
	}
	if err := l.Verify(f, LoopOptions{DirectIO: true}); err != nil {
		t.Error(err)
	}
	if sector, err := unix.IoctlGetUint32(int(dev.Fd()), unix.BLKSSZGET); err != nil || sector != 512 {
		t.Errorf("sectors of %d bytes, %v", sector, err)
	}
}

func TestReadOnlyLoop(t *testing.T) {
	f := onDisk(t, 1<<20)
	l := attach(t, f, LoopOptions{ReadOnly: true, DirectIO: true})
	if w, err := os.OpenFile(l.Path(), os.O_RDWR, 0); err == nil {
		if _, err := w.WriteAt([]byte("x"), 0); err == nil {
			t.Error("a read-only loop can be written")
		}
		w.Close()
	}
	if err := l.Verify(f, LoopOptions{}); !errors.Is(err, ErrChanged) {
		t.Errorf("verified as writable: %v", err)
	}
}

func TestLoopIsFoundByInode(t *testing.T) {
	f := onDisk(t, 1<<20)
	l := attach(t, f, LoopOptions{DirectIO: true})
	if err := os.Rename(f.Name(), f.Name()+".moved"); err != nil {
		t.Fatal(err)
	}
	// Another file under the old name is not it.
	other, err := os.Create(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if loops, err := FindLoopsOf(other); err != nil || len(loops) != 0 {
		t.Errorf("found %v, %v of another file", loops, err)
	}
	loops, err := FindLoopsOf(f)
	if err != nil || len(loops) != 1 {
		t.Fatalf("found %v, %v", loops, err)
	}
	defer loops[0].Close()
	if loops[0].Path() != l.Path() || !loops[0].DirectIO() {
		t.Errorf("found %s, direct %t, want %s", loops[0].Path(), loops[0].DirectIO(), l.Path())
	}
}

func TestLoopGrows(t *testing.T) {
	f := onDisk(t, 1<<20)
	l := attach(t, f, LoopOptions{DirectIO: true})
	if err := f.Truncate(3 << 20); err != nil {
		t.Fatal(err)
	}
	if err := l.Grow(); err != nil {
		t.Fatal(err)
	}
	if size, err := l.Size(); err != nil || size != 3<<20 {
		t.Errorf("the device has %d bytes, %v", size, err)
	}
}

// What a tenant who can write to the device can do to it.
func TestVerifyNoticesChanges(t *testing.T) {
	status := func(change func(*unix.LoopInfo64)) func(t *testing.T, w *os.File) {
		return func(t *testing.T, w *os.File) {
			info, err := unix.IoctlLoopGetStatus64(int(w.Fd()))
			if err != nil {
				t.Fatal(err)
			}
			change(info)
			if err := unix.IoctlLoopSetStatus64(int(w.Fd()), info); err != nil {
				t.Fatal(err)
			}
		}
	}
	ioctl := func(request uint, arg func(t *testing.T) int) func(t *testing.T, w *os.File) {
		return func(t *testing.T, w *os.File) {
			if err := unix.IoctlSetInt(int(w.Fd()), request, arg(t)); err != nil {
				t.Fatal(err)
			}
		}
	}
	number := func(n int) func(*testing.T) int { return func(*testing.T) int { return n } }
	for name, change := range map[string]func(t *testing.T, w *os.File){
		"a part of the file":     status(func(i *unix.LoopInfo64) { i.Sizelimit = 4096 }),
		"an offset":              status(func(i *unix.LoopInfo64) { i.Offset = 4096 }),
		"scanned for partitions": status(func(i *unix.LoopInfo64) { i.Flags |= unix.LO_FLAGS_PARTSCAN }),
		"gone with its last use": status(func(i *unix.LoopInfo64) { i.Flags |= unix.LO_FLAGS_AUTOCLEAR }),
		"being detached":         ioctl(unix.LOOP_CLR_FD, number(0)),
		"sectors of 4096 bytes":  ioctl(unix.LOOP_SET_BLOCK_SIZE, number(4096)),
	} {
		t.Run(name, func(t *testing.T) {
			f := onDisk(t, 1<<20)
			l := attach(t, f, LoopOptions{DirectIO: true})
			w, err := os.OpenFile(l.Path(), os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			change(t, w)
			w.Close()
			if err := l.Verify(f, LoopOptions{DirectIO: true}); !errors.Is(err, ErrChanged) {
				t.Errorf("got %v, want ErrChanged", err)
			}
		})
	}
	t.Run("another file", func(t *testing.T) {
		l := attach(t, onDisk(t, 1<<20), LoopOptions{DirectIO: true})
		if err := l.Verify(onDisk(t, 1<<20), LoopOptions{DirectIO: true}); !errors.Is(err, ErrChanged) {
			t.Errorf("got %v, want ErrChanged", err)
		}
	})
	t.Run("direct I/O is switched on again", func(t *testing.T) {
		f := onDisk(t, 1<<20)
		l := attach(t, f, LoopOptions{DirectIO: true})
		ioctl(unix.LOOP_SET_DIRECT_IO, number(0))(t, l.f)
		if err := l.Verify(f, LoopOptions{DirectIO: true}); err != nil || !l.DirectIO() {
			t.Errorf("direct I/O is %t, %v", l.DirectIO(), err)
		}
	})
}

func TestDetachWaitsForTheLastUser(t *testing.T) {
	f := onDisk(t, 1<<20)
	l := attach(t, f, LoopOptions{DirectIO: true})
	user, err := os.Open(l.Path())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := l.Detach(ctx); !errors.Is(err, ErrBusy) {
		t.Fatalf("with a user: got %v, want ErrBusy", err)
	}
	loops, err := FindLoopsOf(f)
	if err != nil || len(loops) != 1 {
		t.Fatalf("with a user: found %v, %v", loops, err)
	}
	gone := make(chan error)
	go func() { gone <- loops[0].Detach(t.Context()) }()
	if err := user.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-gone; err != nil {
		t.Fatal(err)
	}
	if loops, err := FindLoopsOf(f); err != nil || len(loops) != 0 {
		t.Errorf("after the last user: found %v, %v", loops, err)
	}
}

func TestFree(t *testing.T) {
	f := onDisk(t, 8<<20)
	l := attach(t, f, LoopOptions{DirectIO: true})
	if !l.Free() {
		t.Error("a device that nobody uses is not free")
	}
	mountAt(t, l.Path(), Ext4, MountOptions{})
	if l.Free() {
		t.Error("a mounted device is free")
	}
}

// Many at once: more than there are nodes in /dev, and each gets one of its own.
func TestManyLoops(t *testing.T) {
	const n = 24
	files := make([]*os.File, n)
	for i := range files {
		files[i] = onDisk(t, 1<<20)
		if _, err := files[i].WriteAt([]byte{byte(i)}, 0); err != nil {
			t.Fatal(err)
		}
	}
	type result struct {
		i   int
		l   *Loop
		err error
	}
	results := make(chan result)
	for i, f := range files {
		go func() {
			l, err := AttachLoop(f, LoopOptions{DirectIO: true})
			results <- result{i, l, err}
		}()
	}
	seen := map[string]bool{}
	for range files {
		r := <-results
		if r.err != nil {
			t.Error(r.err)
			continue
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := r.l.Detach(ctx); err != nil {
				t.Error(err)
			}
		})
		if seen[r.l.Path()] {
			t.Errorf("%s was given twice", r.l.Path())
		}
		seen[r.l.Path()] = true
		b := make([]byte, 1)
		dev, err := os.Open(r.l.Path())
		if err != nil {
			t.Error(err)
			continue
		}
		if _, err := dev.ReadAt(b, 0); err != nil || b[0] != byte(r.i) {
			t.Errorf("%s holds %d, want %d (%v)", r.l.Path(), b[0], r.i, err)
		}
		dev.Close()
	}
}

const ownDevEnv = "LONGSHORE_TEST_OWN_DEV"

// Several nodes on one machine have loop devices of their own, in a /dev of
// their own; the kernel may not have heard of these yet.
func TestLoopsOfAnOwnDev(t *testing.T) {
	for _, control := range []string{"without loop-control", "with loop-control"} {
		t.Run(control, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
			cmd.Env = append(os.Environ(), ownDevEnv+"="+control+":"+t.TempDir())
			t.Cleanup(func() { forgetLoops(t) })
			cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// firstOwn is a number that no other test reaches.
const firstOwn = 240

// forgetLoops has the kernel forget the test's loop devices, so that the next
// run finds it ignorant again.
func forgetLoops(t *testing.T) {
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer ctl.Close()
	for _, n := range []int{firstOwn, firstOwn + 1} {
		if err := unix.IoctlSetInt(int(ctl.Fd()), unix.LOOP_CTL_REMOVE, n); err != nil && !errors.Is(err, unix.ENODEV) {
			t.Errorf("remove loop%d: %v", n, err)
		}
	}
}

// withOwnDev is the process of TestLoopsOfAnOwnDev.
func withOwnDev(arg string) error {
	control, dir, _ := strings.Cut(arg, ":")
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", 0, ""); err != nil {
		return err
	}
	numbers := []int{firstOwn, firstOwn + 1}
	for _, n := range numbers {
		if err := unix.Mknod(fmt.Sprintf("/dev/loop%d", n), unix.S_IFBLK|0o600, int(unix.Mkdev(7, uint32(n)))); err != nil {
			return err
		}
	}
	further := control == "with loop-control"
	if further {
		if err := unix.Mknod("/dev/loop-control", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 237))); err != nil {
			return err
		}
	}
	for i := range 4 {
		f, err := os.Create(filepath.Join(dir, fmt.Sprint(i)))
		if err != nil {
			return err
		}
		if err := f.Truncate(1 << 20); err != nil {
			return err
		}
		l, err := AttachLoop(f, LoopOptions{DirectIO: true})
		if i >= len(numbers) && !further {
			if !errors.Is(err, ErrNoLoop) {
				return fmt.Errorf("with all nodes taken: got %v, want ErrNoLoop", err)
			}
			continue
		}
		if err != nil {
			return err
		}
		defer l.Detach(context.Background())
		if i < len(numbers) && l.Path() != fmt.Sprintf("/dev/loop%d", numbers[i]) {
			return fmt.Errorf("file %d is at %s", i, l.Path())
		}
		found, err := FindLoopsOf(f)
		if err != nil || len(found) != 1 || found[0].Path() != l.Path() {
			return fmt.Errorf("found %v, %v instead of %s", found, err, l.Path())
		}
		found[0].Close()
	}
	return nil
}

func mountAt(t *testing.T, dev, fstype string, o MountOptions) string {
	t.Helper()
	if err := Mkfs(t.Context(), dev, fstype, MkfsOptions{Zeroed: true}); err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(t.TempDir(), "mnt")
	if err := Mount(dev, target, fstype, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		Thaw(target)
		if err := Unmount(target); err != nil {
			t.Error(err)
		}
	})
	return target
}
