package pool

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const (
	// scratchFiles is how many files a Scratch has: none may become longer than the
	// volume that it is for, and what is unpacked may be a little longer.
	scratchFiles = 2
	// scratchLeast bytes are worth making one.
	scratchLeast = 64 << 20
)

// Scratch is room in a pool beside its volumes, for a while: files without a name,
// that are gone with the process.
type Scratch struct {
	files []*os.File
	room  *reservation
	bytes int64
}

// NewScratch makes two files of each bytes, without data yet. What may be written to
// them together is what the pool has to give, and no more than they have. ErrFull:
// that is too little to be of use.
func (p *Pool) NewScratch(each int64) (_ *Scratch, err error) {
	stats, err := p.Stats()
	if err != nil {
		return nil, err
	}
	want := scratchFiles * each
	s := &Scratch{bytes: min(want, stats.AvailableBytes)}
	if s.bytes < min(want, scratchLeast) {
		return nil, &FullError{Pool: p.cfg.Name, Need: min(want, scratchLeast), Free: s.bytes}
	}
	if s.room, err = p.reserve(s.bytes); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	for range scratchFiles {
		fd, err := unix.Open(p.root, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return nil, fmt.Errorf("pool %s: make a file in %s: %w", p.cfg.Name, p.root, err)
		}
		f := os.NewFile(uintptr(fd), p.root+"/scratch")
		s.files = append(s.files, f)
		if err := f.Truncate(each); err != nil {
			return nil, fmt.Errorf("pool %s: make a file of %d bytes: %w", p.cfg.Name, each, err)
		}
	}
	return s, nil
}

// Files are the files; they stay the Scratch's.
func (s *Scratch) Files() []*os.File { return s.files }

// Bytes are the most that may be written to the files together.
func (s *Scratch) Bytes() int64 { return s.bytes }

// Close gives the room back.
func (s *Scratch) Close() {
	for _, f := range s.files {
		_ = f.Close() // nobody will see it again
	}
	s.room.undo()
}
