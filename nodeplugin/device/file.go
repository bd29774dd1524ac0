package device

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/extent"
)

// blockBytes is the unit of direct I/O: a page, and a multiple of every sector
// size. XFS may demand larger units for files that share blocks.
const blockBytes = 4096

// bounceBytes is how much of an unaligned buffer is moved at once.
const bounceBytes = mib

// File is random access to a raw file, a disk.img or a block device, past the
// page cache where the filesystem can do that. Any offset and length may be
// used, and calls may be made at once from several goroutines as long as their
// ranges do not overlap; multiples of Align bytes in aligned memory (AlignedBuffer)
// are fastest.
//
// It needs no ioctl and no /proc, so that it works on a descriptor handed to a
// process that has neither.
type File struct {
	// KeepAllocated makes Zero leave the blocks allocated: for volumes that
	// were preallocated.
	KeepAllocated bool

	f     *os.File
	size  int64
	unit  int64
	block bool

	direct atomic.Bool
	edges  sync.Mutex // one read-modify-write at a time
}

// NewFile uses f, which was opened for reading and writing, as a disk of size
// bytes; f is switched to direct I/O if it can be, for all who share its open
// file description. It does not own f.
func NewFile(f *os.File, size int64) (*File, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS|unix.STATX_DIOALIGN, &st); err != nil {
		return nil, fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	d := &File{f: f, size: size, unit: blockBytes}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		d.block = true
		if size%blockBytes != 0 {
			d.unit = 512 // nothing can be written past the end of a device
		}
	case unix.S_IFREG:
		if int64(st.Size) < size {
			return nil, fmt.Errorf("%s has %d bytes, not the %d asked for: make it as large first", f.Name(), st.Size, size)
		}
	default:
		return nil, fmt.Errorf("%s: neither a file nor a block device", f.Name())
	}
	if st.Mask&unix.STATX_DIOALIGN != 0 {
		d.unit = max(d.unit, int64(st.Dio_offset_align))
	}
	if size%d.unit == 0 || !d.block {
		flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
		if err != nil {
			return nil, fmt.Errorf("flags of %s: %w", f.Name(), err)
		}
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags|unix.O_DIRECT)
		d.direct.Store(err == nil)
	}
	return d, nil
}

// Size is the disk's size in bytes.
func (d *File) Size() int64 { return d.size }

// Align is the unit, in bytes, in which access is fastest.
func (d *File) Align() int { return int(d.unit) }

// Direct tells whether the page cache is bypassed.
func (d *File) Direct() bool { return d.direct.Load() }

// AlignedBuffer returns n bytes of memory that direct I/O can use without a copy.
func AlignedBuffer(n int) []byte {
	raw := make([]byte, n+blockBytes)
	skip := (blockBytes - int(uintptr(unsafe.Pointer(unsafe.SliceData(raw)))%blockBytes)) % blockBytes
	return raw[skip : skip+n : skip+n]
}

var bounces = sync.Pool{New: func() any { b := AlignedBuffer(bounceBytes); return &b }}

func memoryAligned(p []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(p)))%512 == 0
}

func (d *File) check(deed string, off, n int64) error {
	if off < 0 || n < 0 || off > d.size-n {
		return fmt.Errorf("%s %d bytes at %d of %s: outside its %d bytes", deed, n, off, d.f.Name(), d.size)
	}
	return nil
}

// ReadAtContext is ReadAt; a read of a disk can't be broken off.
func (d *File) ReadAtContext(_ context.Context, p []byte, off int64) (int, error) {
	return d.ReadAt(p, off)
}

// Extents returns the parts of [off, off+n) in order and without gaps. All of a
// device is data.
func (d *File) Extents(_ context.Context, off, n int64) ([]extent.Extent, error) {
	if err := d.check("ask the extents of", off, n); err != nil {
		return nil, err
	}
	if d.block {
		return extent.Append(nil, extent.Extent{Start: off, Length: n, Kind: extent.Data}), nil
	}
	var list []extent.Extent
	for at, end := off, off+n; at < end; {
		data, err := unix.Seek(int(d.f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // none behind
			data, err = end, nil
		}
		if err != nil {
			return nil, fmt.Errorf("look for data in %s: %w", d.f.Name(), err)
		}
		data = min(data, end)
		list = extent.Append(list, extent.Extent{Start: at, Length: data - at, Kind: extent.Hole})
		if at = data; at == end {
			break
		}
		hole, err := unix.Seek(int(d.f.Fd()), at, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("look for the end of data in %s: %w", d.f.Name(), err)
		}
		hole = min(hole, end)
		list = extent.Append(list, extent.Extent{Start: at, Length: hole - at, Kind: extent.Data})
		at = hole
	}
	return list, nil
}

// ReadAt reads as io.ReaderAt; the disk ends at Size.
func (d *File) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read at %d of %s: negative offset", off, d.f.Name())
	}
	if off >= d.size {
		return 0, io.EOF
	}
	short := int64(len(p)) > d.size-off
	if short {
		p = p[:d.size-off]
	}
	n, err := d.read(p, off)
	if err == nil && short {
		err = io.EOF
	}
	return n, err
}

func (d *File) read(p []byte, off int64) (int, error) {
	if !d.Direct() || d.aligned(p, off) {
		n, err := d.pread(p, off)
		return n, err
	}
	buf := bounces.Get().(*[]byte)
	defer bounces.Put(buf)
	done := 0
	for done < len(p) {
		at := off + int64(done)
		from := at / d.unit * d.unit
		want := min(roundUp(off+int64(len(p)), d.unit)-from, bounceBytes)
		n, err := d.pread((*buf)[:want], from)
		got := copy(p[done:], (*buf)[min(int64(n), at-from):n])
		done += got
		if err != nil && done < len(p) {
			return done, err
		}
		if got == 0 {
			return done, fmt.Errorf("read %d bytes at %d of %s, got %d: %w", len(p), off, d.f.Name(), done, io.ErrUnexpectedEOF)
		}
	}
	return done, nil
}

func (d *File) aligned(p []byte, off int64) bool {
	return off%d.unit == 0 && int64(len(p))%d.unit == 0 && memoryAligned(p)
}

// pread fills p or says why not; io.ErrUnexpectedEOF where the file ends.
func (d *File) pread(p []byte, off int64) (int, error) {
	done, direct := 0, d.Direct()
	for done < len(p) {
		n, err := unix.Pread(int(d.f.Fd()), p[done:], off+int64(done))
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EINVAL) && direct:
			d.endDirect()
			direct = false
		case err != nil:
			return done, fmt.Errorf("read %d bytes at %d of %s: %w", len(p), off, d.f.Name(), err)
		case n == 0 || direct && n%512 != 0: // the latter is a file's end too
			done += n
			if done == len(p) {
				return done, nil
			}
			return done, fmt.Errorf("read %d bytes at %d of %s, got %d: %w", len(p), off, d.f.Name(), done, io.ErrUnexpectedEOF)
		default:
			done += n
		}
	}
	return done, nil
}

// pwrite writes all of p or says why not.
func (d *File) pwrite(p []byte, off int64) (int, error) {
	done, direct := 0, d.Direct()
	for done < len(p) {
		n, err := unix.Pwrite(int(d.f.Fd()), p[done:], off+int64(done))
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EINVAL) && direct:
			d.endDirect()
			direct = false
		case err != nil:
			return done, fmt.Errorf("write %d bytes at %d of %s: %w", len(p), off, d.f.Name(), err)
		case n == 0:
			return done, fmt.Errorf("write %d bytes at %d of %s, wrote %d: %w", len(p), off, d.f.Name(), done, io.ErrShortWrite)
		default:
			done += n
		}
	}
	return done, nil
}

// endDirect goes on through the page cache: some filesystems take O_DIRECT and
// then refuse the access.
func (d *File) endDirect() {
	if flags, err := unix.FcntlInt(d.f.Fd(), unix.F_GETFL, 0); err == nil {
		_, _ = unix.FcntlInt(d.f.Fd(), unix.F_SETFL, flags&^unix.O_DIRECT)
	}
	d.direct.Store(false)
}

// WriteAt writes all of p; it never makes the disk larger.
func (d *File) WriteAt(p []byte, off int64) (int, error) {
	if err := d.check("write", off, int64(len(p))); err != nil {
		return 0, err
	}
	if !d.Direct() || d.aligned(p, off) {
		return d.pwrite(p, off)
	}
	done := 0
	for done < len(p) {
		n, err := d.writePart(p[done:], off+int64(done))
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// writePart writes the first bytes of p: up to the next unit, or whole units.
func (d *File) writePart(p []byte, off int64) (int, error) {
	if head := off % d.unit; head != 0 || int64(len(p)) < d.unit {
		n := min(int64(len(p)), d.unit-head)
		return d.writeEdge(p[:n], off)
	}
	whole := p[:int64(len(p))/d.unit*d.unit]
	if memoryAligned(whole) {
		return d.pwrite(whole, off)
	}
	buf := bounces.Get().(*[]byte)
	defer bounces.Put(buf)
	n := copy(*buf, whole)
	return d.pwrite((*buf)[:n], off)
}

// writeEdge writes a part of one unit: the whole unit is read, changed and written.
func (d *File) writeEdge(p []byte, off int64) (int, error) {
	d.edges.Lock()
	defer d.edges.Unlock()
	unit := AlignedBuffer(int(d.unit))
	from := off / d.unit * d.unit
	if _, err := d.pread(unit, from); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return 0, err
	}
	copy(unit[off-from:], p)
	if _, err := d.pwrite(unit, from); err != nil {
		return 0, err
	}
	if from+d.unit > d.size {
		// The last unit of a file that is no multiple of it: what was written
		// past the end goes again.
		if err := unix.Ftruncate(int(d.f.Fd()), d.size); err != nil {
			return 0, fmt.Errorf("cut %s to its %d bytes: %w", d.f.Name(), d.size, err)
		}
	}
	return len(p), nil
}

// Zero makes a range read as zeros, and gives its blocks back unless KeepAllocated is set.
func (d *File) Zero(off, n int64) error {
	if err := d.check("zero", off, n); err != nil {
		return err
	}
	if n == 0 {
		return nil
	}
	from, to := off, off+n
	if d.block {
		// The kernel zeroes whole sectors of a device only.
		from, to = roundUp(from, d.unit), to/d.unit*d.unit
	}
	if from >= to {
		return d.writeZeros(off, n)
	}
	err := d.deallocate(from, to-from)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return d.writeZeros(off, n)
	}
	if err != nil {
		return fmt.Errorf("zero %d bytes at %d of %s: %w", n, off, d.f.Name(), err)
	}
	if err := d.writeZeros(off, from-off); err != nil {
		return err
	}
	return d.writeZeros(to, off+n-to)
}

func (d *File) deallocate(off, n int64) error {
	modes := []uint32{unix.FALLOC_FL_PUNCH_HOLE, unix.FALLOC_FL_ZERO_RANGE}
	if d.KeepAllocated {
		modes = modes[1:]
	}
	var err error
	for _, mode := range modes {
		for {
			err = unix.Fallocate(int(d.f.Fd()), mode|unix.FALLOC_FL_KEEP_SIZE, off, n)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		if !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
	}
	return err
}

var zeros = AlignedBuffer(bounceBytes)

func (d *File) writeZeros(off, n int64) error {
	for n > 0 {
		w, err := d.WriteAt(zeros[:min(n, bounceBytes)], off)
		if err != nil {
			return err
		}
		off, n = off+int64(w), n-int64(w)
	}
	return nil
}

// Preallocate reserves blocks for the whole of a file, so that writing to it
// can't run out of space. Of a block device nothing is asked.
func (d *File) Preallocate() error {
	if d.block {
		return nil
	}
	for {
		err := unix.Fallocate(int(d.f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, d.size)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("preallocate %d bytes of %s: %w", d.size, d.f.Name(), err)
		}
		return nil
	}
}

// Allocate makes blocks for a part of a file and says whether it did, so that
// pieces of it that are written at once need not wait for each other: a filesystem
// lets only one writer at a time fill holes. Where there is no room, writing says so.
func (d *File) Allocate(off, n int64) bool {
	if d.block || d.KeepAllocated || d.check("allocate", off, n) != nil {
		return false
	}
	return unix.Fallocate(int(d.f.Fd()), unix.FALLOC_FL_KEEP_SIZE, off, n) == nil
}

// Sync returns when all that was written is on stable storage. After an error
// nothing written since the last success may be taken as stored.
func (d *File) Sync() error {
	if err := unix.Fdatasync(int(d.f.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", d.f.Name(), err)
	}
	if !d.Direct() {
		// What is stored need not fill the memory that is counted as the mover's.
		_ = unix.Fadvise(int(d.f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	return nil
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
