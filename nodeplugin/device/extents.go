package device

import (
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Mapped is where a piece of a file lies on the device below its filesystem. All
// three figures are bytes.
type Mapped struct {
	Logical, Physical, Length int64
	// Shared: another file has these blocks too.
	Shared bool
	// Unwritten blocks are allocated and read as zeros.
	Unwritten bool
	// Plain blocks hold the file's bytes as they are, at Physical.
	Plain bool
}

// From linux/fiemap.h and linux/fs.h.
const (
	fsIocFiemap     = 0xc020660b
	fiemapFlagSync  = 0x1
	fiemapLast      = 0x1
	fiemapNotPlain  = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400 // unknown, delayed, encoded, encrypted, unaligned, inline, tail
	fiemapUnwritten = 0x800
	fiemapShared    = 0x2000
)

type fiemapExtent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

type fiemap struct {
	start, length                uint64
	flags, mapped, room, _unused uint32
	extents                      [256]fiemapExtent
}

// Extents calls visit for each allocated piece of f, in order, once what was
// written to f is on the disk. An error of visit ends it.
func Extents(f *os.File, visit func(Mapped) error) error {
	m := &fiemap{}
	for start := uint64(0); ; {
		*m = fiemap{start: start, length: math.MaxUint64 - start, flags: fiemapFlagSync, room: uint32(len(m.extents))}
		_, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(m)))
		switch {
		case errors.Is(e, unix.EINTR):
			continue
		case e != 0:
			return fmt.Errorf("extents of %s: %w", f.Name(), e)
		}
		for _, x := range m.extents[:m.mapped] {
			err := visit(Mapped{
				Logical: int64(x.logical), Physical: int64(x.physical), Length: int64(x.length),
				Shared: x.flags&fiemapShared != 0, Unwritten: x.flags&fiemapUnwritten != 0, Plain: x.flags&fiemapNotPlain == 0,
			})
			if err != nil {
				return err
			}
			if x.flags&fiemapLast != 0 {
				return nil
			}
			start = x.logical + x.length
		}
		if m.mapped == 0 {
			return nil
		}
	}
}
