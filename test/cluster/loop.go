package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

// Loop devices are the kernel's, not a namespace's: each node has a range of its
// own and sees no other.
const loopsPerNode = 64

const (
	loopClrFD       = 0x4c01
	loopGetStatus64 = 0x4c05
	loopCtlRemove   = 0x4c81
	loopMajor       = 7
	loopControl     = "/dev/loop-control"
	loopSysPattern  = "/sys/block/loop%d"
)

type loopRange struct{ first, count int }

// loops of node n, which counts from 1.
func (s state) loops(n int) loopRange {
	return loopRange{s.LoopBase + (n-1)*loopsPerNode, loopsPerNode}
}

// freeLoopBase finds room for the loops of that many nodes: node1 has loop64 and
// the 63 after it, unless someone else uses one of them.
func freeLoopBase(nodes int) (int, error) {
	for base := loopsPerNode; base < 1<<14; base += loopsPerNode {
		if (loopRange{base, nodes * loopsPerNode}).unused() {
			return base, nil
		}
	}
	return 0, fmt.Errorf("no %d loop devices in a row are free", nodes*loopsPerNode)
}

func (r loopRange) unused() bool {
	for i := r.first; i < r.first+r.count; i++ {
		if bound(i) {
			return false
		}
	}
	return true
}

func bound(loop int) bool {
	return exists(fmt.Sprintf(loopSysPattern, loop) + "/loop/backing_file")
}

// loopMinor is the minor number of a loop: the kernel may leave room between
// two of them for partitions.
func loopMinor(loop int) (int, error) {
	parts, err := readInt("/sys/module/loop/parameters/max_part")
	if errors.Is(err, os.ErrNotExist) {
		return loop, nil
	}
	return loop << bits.Len(uint(parts)), err
}

// free detaches the loops and takes them out of the kernel. Those that the kernel
// gave to a program of the host, because the node did not use them just then, stay:
// they are of a file that the host finds under the loop's name for it, and outside
// of dir.
func (r loopRange) free(ctx context.Context, dir string) error {
	var there []int
	for i := r.first; i < r.first+r.count; i++ {
		if !exists(fmt.Sprintf(loopSysPattern, i)) {
			continue
		}
		foreign, err := ofHost(i, dir)
		if err != nil {
			return fmt.Errorf("look at loop%d: %w", i, err)
		}
		if !foreign {
			there = append(there, i)
		}
	}
	if len(there) == 0 {
		return nil
	}
	control, err := os.OpenFile(loopControl, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer control.Close()
	// A loop may lie on another: the kubelet's on a volume's, a volume's on its
	// pool's. The lower one is free only after the upper one, whatever their numbers;
	// and a mount of a namespace that is just dying may hold one for a moment.
	return poll(ctx, time.Minute, func() error {
		var left []int
		var errs []error
		for _, i := range there {
			if err := freeLoop(control, i); err != nil {
				left, errs = append(left, i), append(errs, fmt.Errorf("free loop%d: %w", i, err))
			}
		}
		there = left
		return errors.Join(errs...)
	})
}

func freeLoop(control *os.File, loop int) error {
	if bound(loop) {
		if err := detach(loop); err != nil {
			return err
		}
	}
	err := ioctl(control.Fd(), loopCtlRemove, uintptr(loop))
	if errors.Is(err, syscall.ENODEV) {
		return nil
	}
	return err
}

func detach(loop int) error {
	f, err := openLoop(loop)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := ioctl(f.Fd(), loopClrFD, 0); err != nil && !errors.Is(err, syscall.ENXIO) {
		return err
	}
	return nil
}

func ofHost(loop int, dir string) (bool, error) {
	name, err := os.ReadFile(fmt.Sprintf(loopSysPattern, loop) + "/loop/backing_file")
	if err != nil {
		return false, nil // not bound
	}
	path := strings.TrimSuffix(string(name), "\n")
	var seen syscall.Stat_t
	if syscall.Stat(path, &seen) != nil || strings.HasPrefix(path, dir+"/") {
		return false, nil
	}
	f, err := openLoop(loop)
	if err != nil {
		return false, err
	}
	defer f.Close()
	var info struct { // of struct loop_info64 only the start matters
		Device, Inode uint64
		_             [216]byte
	}
	err = ioctl(f.Fd(), loopGetStatus64, uintptr(unsafe.Pointer(&info)))
	if errors.Is(err, syscall.ENXIO) {
		return false, nil // not bound any more
	}
	return info.Device == seen.Dev && info.Inode == seen.Ino, err
}

func openLoop(loop int) (*os.File, error) {
	node := fmt.Sprintf("/dev/loop%d", loop)
	if !exists(node) { // a /dev that the kernel does not fill
		minor, err := loopMinor(loop)
		if err != nil {
			return nil, err
		}
		if err := syscall.Mknod(node, syscall.S_IFBLK|0o600, loopMajor<<8|minor&0xff|(minor&^0xff)<<12); err != nil {
			return nil, err
		}
		defer os.Remove(node)
	}
	return os.Open(node)
}

func ioctl(fd, request, arg uintptr) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, request, arg); errno != 0 {
		return errno
	}
	return nil
}

// final is an error that waiting does not mend.
type final struct{ error }

func (f final) Unwrap() error { return f.error }

// poll calls f until it returns nil or a final error, for at most d, and returns
// its last error.
func poll(ctx context.Context, d time.Duration, f func() error) error {
	limit, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		if f := (final{}); errors.As(err, &f) {
			return f.error
		}
		select {
		case <-limit.Done():
			if ctx.Err() != nil {
				return fmt.Errorf("%w: %w", ctx.Err(), err)
			}
			return fmt.Errorf("after %s: %w", d, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
