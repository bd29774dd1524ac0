package peers

import (
	"context"
	"fmt"
	"net"
	"net/rpc"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Disk is a file that fails as a disk does, and that forgets in a power cut what
// was not flushed. It is shown by FUSE: nobody who writes to it can tell.
//
// A process of its own serves it, this program once more: one that serves a file to
// itself cannot even be killed while it waits for itself.
type Disk struct {
	// Path is where it shows.
	Path string

	t      testing.TB
	server *rpc.Client
	hooks  *askedHooks
}

// DiskHooks are asked before something is done; an error, a syscall.Errno, is what
// the disk answers with instead. They are called one after the other. nil is no hook.
type DiskHooks struct {
	// Write is also asked before a range is zeroed.
	Write func(off, n int64) error
	// Flush fails as Linux has it: what was not flushed yet counts as flushed from
	// then on, and of it every second block is lost.
	Flush func() error
}

const (
	// diskArg makes the program a disk; its size in bytes follows.
	diskArg = "peers-disk"
	// diskBlock is what is written whole or not at all, in bytes.
	diskBlock = 4096
	// diskRequest is the longest read or write.
	diskRequest = 512 << 10

	// What the process that serves a disk has open.
	diskFUSE, diskAsks, diskObeys = 3, 4, 5
)

// NewDisk makes a disk of zeros; bytes is a multiple of 4096.
func NewDisk(t testing.TB, bytes int64) *Disk {
	t.Helper()
	dir := t.TempDir()
	d := &Disk{Path: filepath.Join(dir, "disk"), t: t, hooks: &askedHooks{}}
	check := func(deed string, err error) {
		if err != nil {
			t.Helper()
			t.Fatalf("%s: %v", deed, err)
		}
	}
	dev, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	check("open FUSE", err)
	defer dev.Close()
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,max_read=%d", dev.Fd(), diskRequest)
	check("mount a FUSE filesystem (needs CAP_SYS_ADMIN)", unix.Mount("disk", dir, "fuse.disk", unix.MS_NOSUID|unix.MS_NODEV, options))
	asks, asked, err := connPair()
	check("make sockets", err)
	defer asks.Close()
	obeys, ordered, err := connPair()
	check("make sockets", err)
	defer obeys.Close()

	cmd := exec.Command("/proc/self/exe", diskArg, strconv.FormatInt(bytes, 10))
	cmd.ExtraFiles = []*os.File{dev, asks, obeys}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		// It ends with this thread, which therefore has to be there until then and must
		// not wait for a disk itself.
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	check("start the process of a disk", <-started)
	questions := rpc.NewServer()
	check("answer to a disk", questions.RegisterName("Hooks", d.hooks))
	go questions.ServeConn(asked)
	d.server = rpc.NewClient(ordered)
	t.Cleanup(func() {
		// A process that is just being started may still have what this one has open.
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount the disk: %v", err)
			cmd.Process.Kill()
		}
		late := time.AfterFunc(time.Minute, func() {
			t.Error("the disk is still open somewhere a minute after it was unmounted")
			cmd.Process.Kill()
		})
		if err := <-ended; err != nil {
			t.Errorf("the process of the disk: %v", err)
		}
		late.Stop()
		d.server.Close()
	})
	return d
}

// connPair is a pair of sockets, one for another process.
func connPair() (theirs *os.File, ours net.Conn, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	f := os.NewFile(uintptr(pair[1]), "socket")
	defer f.Close()
	ours, err = net.FileConn(f)
	return os.NewFile(uintptr(pair[0]), "socket"), ours, err
}

// Hook changes the hooks.
func (d *Disk) Hook(h DiskHooks) {
	d.hooks.mu.Lock()
	defer d.hooks.mu.Unlock()
	d.hooks.hooks = h
}

// CutPower loses of what was not flushed every second block: those that are even
// or those that are odd, as the caller says.
func (d *Disk) CutPower(odd bool) {
	d.t.Helper()
	if err := d.server.Call("Disk.CutPower", odd, &struct{}{}); err != nil {
		d.t.Fatalf("cut the power of a disk: %v", err)
	}
}

// askedHooks answer to the process of a disk.
type askedHooks struct {
	mu    sync.Mutex
	hooks DiskHooks
}

// Write is told offset and length.
func (h *askedHooks) Write(at [2]int64, errno *syscall.Errno) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.hooks.Write != nil {
		*errno = fs.ToErrno(h.hooks.Write(at[0], at[1]))
	}
	return nil
}

func (h *askedHooks) Flush(_ struct{}, errno *syscall.Errno) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.hooks.Flush != nil {
		*errno = fs.ToErrno(h.hooks.Flush())
	}
	return nil
}

// The process of a disk is this very program, whose tests have a TestMain of their
// own; what the program is must be settled before that.
func init() {
	if len(os.Args) != 3 || os.Args[1] != diskArg {
		return
	}
	if err := serveDisk(os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serveDisk(size string) error {
	bytes, err := strconv.ParseInt(size, 10, 64)
	if err != nil {
		return err
	}
	var conns [2]net.Conn
	for i := range conns {
		f := os.NewFile(uintptr(diskAsks+i), "socket")
		conns[i], err = net.FileConn(f)
		f.Close()
		if err != nil {
			return err
		}
	}
	d := &served{now: make([]byte, bytes), flushed: make([]byte, bytes), dirty: map[int]bool{}, hooks: rpc.NewClient(conns[0])}
	orders := rpc.NewServer()
	if err := orders.RegisterName("Disk", &orderedDisk{d}); err != nil {
		return err
	}
	go orders.ServeConn(conns[1])
	root := &fs.Inode{}
	server, err := fs.Mount(fmt.Sprintf("/dev/fd/%d", diskFUSE), root, &fs.Options{
		MountOptions: fuse.MountOptions{MaxWrite: diskRequest, DisableXAttrs: true},
		OnAdd: func(ctx context.Context) {
			root.AddChild("disk", root.NewPersistentInode(ctx, d, fs.StableAttr{Mode: fuse.S_IFREG}), true)
		},
	})
	if err != nil {
		return err
	}
	server.Wait() // until it is unmounted
	return nil
}

// orderedDisk is what the test may order.
type orderedDisk struct{ d *served }

func (o *orderedDisk) CutPower(odd bool, _ *struct{}) error {
	o.d.mu.Lock()
	defer o.d.mu.Unlock()
	o.d.lose(odd)
	return nil
}

// served is the disk in its process.
type served struct {
	fs.Inode
	hooks *rpc.Client

	mu      sync.Mutex
	now     []byte       // what is read
	flushed []byte       // what a power cut leaves
	dirty   map[int]bool // blocks that differ
}

// ask asks a hook of the test; without the test the disk is dead.
func (d *served) ask(hook string, what any) syscall.Errno {
	var errno syscall.Errno
	if err := d.hooks.Call("Hooks."+hook, what, &errno); err != nil {
		return syscall.EIO
	}
	return errno
}

func (d *served) lose(odd bool) {
	for b := range d.dirty {
		if b%2 == 1 == odd {
			copy(d.block(d.now, b), d.block(d.flushed, b))
		} else {
			copy(d.block(d.flushed, b), d.block(d.now, b))
		}
	}
	clear(d.dirty)
}

func (d *served) block(of []byte, b int) []byte { return of[b*diskBlock : (b+1)*diskBlock] }

// change asks the hook and hands out the part that is about to be changed.
func (d *served) change(off, n int64) ([]byte, syscall.Errno) {
	if off < 0 || n < 0 || off > int64(len(d.now))-n {
		return nil, syscall.EFBIG
	}
	if errno := d.ask("Write", [2]int64{off, n}); errno != 0 {
		return nil, errno
	}
	for b := int(off / diskBlock); int64(b)*diskBlock < off+n; b++ {
		d.dirty[b] = true
	}
	return d.now[off : off+n], 0
}

// Open has the kernel keep no page of it: what a power cut takes is gone at once.
func (d *served) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES, 0
}

func (d *served) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode, out.Size, out.Blksize = fuse.S_IFREG|0o600, uint64(len(d.now)), diskBlock
	return 0
}

// Setattr takes everything but another size.
func (d *served) Setattr(ctx context.Context, f fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if size, ok := in.GetSize(); ok && size != uint64(len(d.now)) {
		return syscall.EPERM
	}
	return d.Getattr(ctx, f, out)
}

func (d *served) Read(_ context.Context, _ fs.FileHandle, p []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := copy(p, d.now[min(off, int64(len(d.now))):])
	return fuse.ReadResultData(p[:n]), 0
}

func (d *served) Write(_ context.Context, _ fs.FileHandle, p []byte, off int64) (uint32, syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to, errno := d.change(off, int64(len(p)))
	return uint32(copy(to, p)), errno
}

// Allocate zeroes where that is asked for; there are no blocks to reserve.
func (d *served) Allocate(_ context.Context, _ fs.FileHandle, off, n uint64, mode uint32) syscall.Errno {
	if mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) == 0 {
		return 0
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	to, errno := d.change(int64(off), int64(n))
	clear(to)
	return errno
}

func (d *served) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	if errno := d.ask("Flush", struct{}{}); errno != 0 {
		d.lose(true)
		return errno
	}
	for b := range d.dirty {
		copy(d.block(d.flushed, b), d.block(d.now, b))
	}
	clear(d.dirty)
	return 0
}
