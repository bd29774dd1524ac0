package mover

import (
	"fmt"
	"io"
	"os"

	"github.com/longshore-io/longshore/nodeplugin/device"
)

// Spool is room for an image that comes once and has to be read again, see
// image.Spool: files that are used one behind the other, past the page cache.
type Spool struct {
	files []*device.File
	each  int64
	bytes int64
}

// NewSpool holds bytes in files that are each bytes long already. They stay the
// caller's, and stay as long as they are.
func NewSpool(files []*os.File, each, bytes int64) (*Spool, error) {
	if bytes > each*int64(len(files)) {
		return nil, fmt.Errorf("a spool of %d bytes in %d files of %d", bytes, len(files), each)
	}
	s := &Spool{each: each, bytes: bytes}
	for _, f := range files {
		d, err := device.NewFile(f, each)
		if err != nil {
			return nil, err
		}
		s.files = append(s.files, d)
	}
	return s, nil
}

// Bytes are the most that it holds.
func (s *Spool) Bytes() int64 { return s.bytes }

// WriteAt is io.WriterAt's.
func (s *Spool) WriteAt(p []byte, off int64) (int, error) {
	return s.pieces(p, off, (*device.File).WriteAt)
}

// ReadAt is io.ReaderAt's.
func (s *Spool) ReadAt(p []byte, off int64) (int, error) {
	return s.pieces(p, off, (*device.File).ReadAt)
}

func (s *Spool) pieces(p []byte, off int64, do func(*device.File, []byte, int64) (int, error)) (n int, err error) {
	if off < 0 || off+int64(len(p)) > s.bytes {
		return 0, fmt.Errorf("%d bytes at %d of a spool of %d: %w", len(p), off, s.bytes, io.ErrShortWrite)
	}
	for n < len(p) {
		at := off + int64(n)
		in := at % s.each
		part := p[n:min(int64(len(p)), int64(n)+s.each-in)]
		m, err := do(s.files[at/s.each], part, in)
		n += m
		if err != nil && m < len(part) {
			return n, err
		}
	}
	return n, nil
}
