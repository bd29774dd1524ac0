package device

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// disk opens a disk of that many bytes of zeros.
type disk func(t *testing.T, size int64) *os.File

func fileIn(dir func(t *testing.T) string) disk {
	return func(t *testing.T, size int64) *os.File {
		t.Helper()
		f, err := os.Create(filepath.Join(dir(t), "disk"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		return f
	}
}

var onDisk = fileIn(func(t *testing.T) string { return t.TempDir() })

func inMemory(t *testing.T) string {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

func loopDisk(t *testing.T, size int64) *os.File {
	t.Helper()
	l := attach(t, onDisk(t, size), LoopOptions{DirectIO: true})
	f, err := os.OpenFile(l.Path(), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

var disks = map[string]struct {
	open   disk
	size   int64
	direct bool
}{
	"file":                         {onDisk, 1 << 20, true},
	"file of an odd size":          {onDisk, 1<<20 + 10007, true},
	"file smaller than a page":     {onDisk, 700, true},
	"file in memory":               {fileIn(inMemory), 1 << 20, true},
	"loop device":                  {loopDisk, 1 << 20, true},
	"loop device of odd sectors":   {loopDisk, 1<<20 + 3*512, false},
	"loop device of three sectors": {loopDisk, 3 * 512, false},
}

// Whatever is done to a File, it holds what a slice of bytes would hold.
func TestFileIsLikeMemory(t *testing.T) {
	for name, row := range disks {
		t.Run(name, func(t *testing.T) {
			f := row.open(t, row.size)
			d, err := NewFile(f, row.size)
			if err != nil {
				t.Fatal(err)
			}
			if row.direct && !d.Direct() {
				t.Error("direct I/O is not used")
			}
			seed := rand.Uint64()
			rnd := rand.New(rand.NewPCG(seed, 0))
			model := make([]byte, row.size)
			memory := AlignedBuffer(int(row.size) + 4096)
			for step := range 300 {
				off := rnd.Int64N(row.size)
				n := rnd.Int64N(row.size - off + 1)
				if rnd.IntN(2) == 0 {
					off, n = off/4096*4096, n/4096*4096
				}
				// Aligned memory and other.
				buf := memory[rnd.IntN(2)*(1+rnd.IntN(600)):][:n]
				switch rnd.IntN(3) {
				case 0:
					for i := range buf {
						buf[i] = byte(rnd.Uint32())
					}
					if w, err := d.WriteAt(buf, off); err != nil || w != len(buf) {
						t.Fatalf("seed %d step %d: write %d bytes at %d: %d, %v", seed, step, n, off, w, err)
					}
					copy(model[off:], buf)
				case 1:
					d.KeepAllocated = rnd.IntN(2) == 0
					if err := d.Zero(off, n); err != nil {
						t.Fatalf("seed %d step %d: zero %d bytes at %d: %v", seed, step, n, off, err)
					}
					clear(model[off : off+n])
				case 2:
					if r, err := d.ReadAt(buf, off); err != nil || r != len(buf) {
						t.Fatalf("seed %d step %d: read %d bytes at %d: %d, %v", seed, step, n, off, r, err)
					}
					if !bytes.Equal(buf, model[off:off+n]) {
						t.Fatalf("seed %d step %d: read other than was written at %d, %d bytes", seed, step, off, n)
					}
				}
			}
			if err := d.Sync(); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, model) {
				t.Errorf("seed %d: the disk of %d bytes holds %d others than the model of %d", seed, row.size, len(got), len(model))
			}
		})
	}
}

func TestFileEnds(t *testing.T) {
	for name, row := range disks {
		d, err := NewFile(row.open(t, row.size), row.size)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.WriteAt(make([]byte, 2), row.size-1); err == nil {
			t.Errorf("%s: a write past the end succeeds", name)
		}
		if err := d.Zero(row.size-1, 2); err == nil {
			t.Errorf("%s: zeroing past the end succeeds", name)
		}
		if n, err := d.ReadAt(make([]byte, 10), row.size-3); n != 3 || err != io.EOF {
			t.Errorf("%s: reading over the end: %d bytes, %v", name, n, err)
		}
		if n, err := d.ReadAt(make([]byte, 10), row.size); n != 0 || err != io.EOF {
			t.Errorf("%s: reading at the end: %d bytes, %v", name, n, err)
		}
		if n, err := d.ReadAt(make([]byte, 3), row.size-3); n != 3 || err != nil {
			t.Errorf("%s: reading up to the end: %d bytes, %v", name, n, err)
		}
	}
}

func TestFileShorterThanItsDisk(t *testing.T) {
	if _, err := NewFile(onDisk(t, 4096), 8192); err == nil {
		t.Error("a disk of 8192 bytes in a file of 4096")
	}
}

func TestZeroGivesBlocksBackOrKeepsThem(t *testing.T) {
	const size = 1 << 20
	f := onDisk(t, size)
	d, err := NewFile(f, size)
	if err != nil {
		t.Fatal(err)
	}
	blocks := func() int64 {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	if err := d.Preallocate(); err != nil {
		t.Fatal(err)
	}
	if got := blocks(); got < size {
		t.Errorf("preallocated %d of %d bytes", got, size)
	}
	d.KeepAllocated = true
	if err := d.Zero(0, size); err != nil {
		t.Fatal(err)
	}
	if got := blocks(); got < size {
		t.Errorf("zeroing left %d of %d preallocated bytes", got, size)
	}
	d.KeepAllocated = false
	if err := d.Zero(0, size); err != nil {
		t.Fatal(err)
	}
	if got := blocks(); got > 4096 {
		t.Errorf("zeroing kept %d bytes", got)
	}
}

// Disjoint ranges may be written at once even where they share a block.
func TestAllocateMakesBlocksAndChangesNoByte(t *testing.T) {
	f := fileIn((*testing.T).TempDir)(t, 4*mib)
	d, err := NewFile(f, 4*mib)
	if err != nil {
		t.Fatal(err)
	}
	blocks := func() int64 {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	if _, err := d.WriteAt(bytes.Repeat([]byte{7}, blockBytes), mib); err != nil {
		t.Fatal(err)
	}
	if !d.Allocate(mib, 2*mib) || blocks() < 2*mib {
		t.Errorf("%d bytes have blocks, want %d", blocks(), 2*mib)
	}
	got, want := make([]byte, 4*mib), make([]byte, 4*mib)
	copy(want[mib:], bytes.Repeat([]byte{7}, blockBytes))
	if _, err := d.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the content changed (%v)", err)
	}
	if d.Allocate(3*mib, 2*mib) {
		t.Error("allocated behind the end")
	}
}

func TestWritersSideBySide(t *testing.T) {
	const size, part = 64 << 10, 1000
	d, err := NewFile(onDisk(t, size), size)
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for off := int64(0); off < size; off += part {
		all.Go(func() {
			n := min(part, size-off)
			if _, err := d.WriteAt(bytes.Repeat([]byte{byte(off/part) + 1}, int(n)), off); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	got := make([]byte, size)
	if _, err := d.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	for i, b := range got {
		if b != byte(i/part)+1 {
			t.Fatalf("byte %d is %d, want %d", i, b, i/part+1)
		}
	}
}

const confinedEnv = "LONGSHORE_TEST_CONFINED"

func TestMain(m *testing.M) {
	for env, run := range map[string]func(string) error{confinedEnv: confined, ownDevEnv: withOwnDev} {
		if arg := os.Getenv(env); arg != "" {
			if err := run(arg); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// confined uses the disk at descriptor 3 in a process that may call nothing but
// what File promises to get by with and what the Go runtime needs: ioctl, open
// and everything else with a path end it.
func confined(text string) error {
	size, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return err
	}
	if err := refuse(unix.SYS_IOCTL, unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_READLINKAT); err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	d, err := NewFile(os.NewFile(3, "disk"), size)
	if err != nil {
		return err
	}
	if !d.Direct() {
		return errors.New("direct I/O is not used")
	}
	if _, err := d.WriteAt([]byte("hello"), 4090); err != nil {
		return err
	}
	if _, err := d.WriteAt(bytes.Repeat([]byte{1}, 3*4096), 8192); err != nil {
		return err
	}
	if err := d.Zero(8192, 4096); err != nil {
		return err
	}
	if err := d.Preallocate(); err != nil {
		return err
	}
	got := make([]byte, 5)
	if _, err := d.ReadAt(got, 4090); err != nil {
		return err
	}
	if string(got) != "hello" {
		return fmt.Errorf("read %q", got)
	}
	return d.Sync()
}

// refuse kills this process if it makes one of these calls.
func refuse(calls ...uint32) error {
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}}
	for _, nr := range calls {
		filter = append(filter,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 0, Jf: 1, K: nr},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_KILL_PROCESS})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if e != 0 {
		return e
	}
	return nil
}

func TestFileInAConfinedProcess(t *testing.T) {
	for name, open := range map[string]disk{"file": onDisk, "loop device": loopDisk} {
		const size = 1 << 20
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), confinedEnv+"="+strconv.Itoa(size))
		cmd.ExtraFiles = []*os.File{open(t, size)}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}

func TestUsableBytes(t *testing.T) {
	for range 100000 {
		available := rand.Int64N(1 << (1 + rand.IntN(62)))
		got := UsableBytes(available)
		// got is the largest multiple of 1 MiB with got <= ceil(available/1.06).
		fits := func(n int64) bool { return (n-1)*53/50 < available } // floor((n-1)*1.06) < available
		if available < 1<<56 && (got%mib != 0 || got > 0 && !fits(got) || fits(got+mib) && got+mib <= available) {
			t.Fatalf("of %d bytes %d are usable", available, got)
		}
		if got < 0 || got > available {
			t.Fatalf("of %d bytes %d are usable", available, got)
		}
	}
	if got := UsableBytes(1060 * mib); got != 1000*mib {
		t.Errorf("of %d bytes %d are usable, want %d", 1060*mib, got, 1000*mib)
	}
	if got := UsableBytes(-1); got != 0 {
		t.Errorf("of nothing %d bytes are usable", got)
	}
}

func TestToolError(t *testing.T) {
	err := run(context.Background(), "sh", "-c", "echo one >&2; echo two >&2; exit 3")
	var tool *ToolError
	if !errors.As(err, &tool) || tool.ExitCode != 3 || tool.Line != "two" {
		t.Errorf("got %#v", err)
	}
	err = run(context.Background(), "sh", "-c", "echo reason >&2; echo 'Usage: x' >&2; yes | head -c 100000 >&2; exit 1")
	if !errors.As(err, &tool) || tool.Line != "reason" {
		t.Errorf("got %#v", err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("stopped"))
	if err := run(ctx, "sleep", "60"); err == nil || !strings.Contains(err.Error(), "stopped") {
		t.Errorf("got %v", err)
	}
	if err := run(context.Background(), "no-such-tool"); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("got %v", err)
	}
}
