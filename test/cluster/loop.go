package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"syscall"
	"time"
)

// Loop devices are the kernel's, not a namespace's: each node has a range of its
// own and sees no other.
const loopsPerNode = 64

const (
	loopClrFD      = 0x4c01
	loopCtlRemove  = 0x4c81
	loopMajor      = 7
	loopControl    = "/dev/loop-control"
	loopSysPattern = "/sys/block/loop%d"
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

// free detaches the loops and takes them out of the kernel.
func (r loopRange) free(ctx context.Context) error {
	var there []int
	for i := r.first; i < r.first+r.count; i++ {
		if exists(fmt.Sprintf(loopSysPattern, i)) {
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
	for _, i := range there {
		if err := freeLoop(ctx, control, i); err != nil {
			return fmt.Errorf("free loop%d: %w", i, err)
		}
	}
	return nil
}

func freeLoop(ctx context.Context, control *os.File, loop int) error {
	// A mount of a namespace that is just dying may hold it for a moment.
	return poll(ctx, 10*time.Second, func() error {
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
	})
}

func detach(loop int) error {
	node := fmt.Sprintf("/dev/loop%d", loop)
	if !exists(node) { // a /dev that the kernel does not fill
		minor, err := loopMinor(loop)
		if err != nil {
			return err
		}
		if err := syscall.Mknod(node, syscall.S_IFBLK|0o600, loopMajor<<8|minor&0xff|(minor&^0xff)<<12); err != nil {
			return err
		}
		defer os.Remove(node)
	}
	f, err := os.Open(node)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := ioctl(f.Fd(), loopClrFD, 0); err != nil && !errors.Is(err, syscall.ENXIO) {
		return err
	}
	return nil
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
	ctx, cancel := context.WithTimeout(ctx, d)
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
		case <-ctx.Done():
			return fmt.Errorf("%w (waited %s)", err, d)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
