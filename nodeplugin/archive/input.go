package archive

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const blockLength = 512 // of the blocks that a tar is made of

// input is the bytes of a tar, counted.
type input struct {
	r     io.Reader
	seek  io.Seeker // nil: what is not wanted is read nevertheless
	off   int64
	limit int64
	// hollow is the end of bytes that nobody looks at.
	hollow int64
	first  [blockLength]byte
	zeros  bool  // the last block that was read alone, as headers are, is nothing else
	err    error // of r, or that there is too much
}

func newInput(src io.Reader) *input {
	in := &input{r: src}
	if s, ok := src.(io.Seeker); ok {
		if _, err := s.Seek(0, io.SeekCurrent); err == nil {
			in.seek = s
		}
	}
	return in
}

func (in *input) Read(p []byte) (int, error) {
	if in.off >= in.limit {
		in.err = fault.Terminal(fault.CorruptImage, fmt.Errorf("the archive has too much that is no content: the content of its members ends before byte %d of it, and there is more: pack it anew", in.off))
	}
	if in.err != nil {
		return 0, in.err
	}
	if n := min(int64(len(p)), in.hollow-in.off); in.seek != nil && n > 0 {
		_, err := in.Seek(n, io.SeekCurrent)
		return int(n), err
	}
	var n int
	var err error
	if len(p) == blockLength {
		if n, err = io.ReadFull(in.r, p); errors.Is(err, io.ErrUnexpectedEOF) {
			err = io.EOF
		}
		if in.off == 0 {
			copy(in.first[:], p[:n])
		}
		if n > 0 {
			in.zeros = len(bytes.Trim(p[:n], "\x00")) == 0
		}
	} else {
		n, err = in.r.Read(p)
	}
	in.off += int64(n)
	if err != nil && err != io.EOF { //nolint:errorlint // an end that is wrapped in something is none
		in.err = err
	}
	return n, err
}

// Seek goes forwards from here, as the reader of package tar does.
func (in *input) Seek(n int64, _ int) (int64, error) {
	if in.seek == nil {
		return 0, errors.ErrUnsupported
	}
	if in.off+n > in.limit {
		n = in.limit - in.off // the next read says what is wrong
	}
	if _, err := in.seek.Seek(n, io.SeekCurrent); err != nil {
		in.err = err
		return 0, err
	}
	in.off += n
	return in.off, nil
}

// explain says of an error of package tar's whose fault it is.
func (in *input) explain(err error) error {
	switch {
	case in.err != nil:
		return fmt.Errorf("read the archive at %d: %w", in.off, in.err)
	case in.off == 0:
		return fault.Terminal(fault.NotAnArchive, errors.New("the source is empty (0 bytes), not a tar archive: check the url"))
	case in.off <= blockLength && string(in.first[257:262]) != "ustar":
		return fault.Terminal(fault.NotAnArchive, fmt.Errorf("the source is not a tar archive: it begins with %s; check the url", quote(string(bytes.TrimRight(in.first[:min(in.off, 64)], "\x00")))))
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return fault.Terminal(fault.CorruptImage, fmt.Errorf("the archive ends after %d bytes in the middle of a member: it is cut short, upload it again", in.off))
	case errors.Is(err, tar.ErrHeader):
		return fault.Terminal(fault.CorruptImage, fmt.Errorf("the archive has no valid header before byte %d: it is damaged, upload it again", in.off))
	}
	return fault.Terminal(fault.CorruptImage, fmt.Errorf("the archive before byte %d: %w: it is damaged, upload it again", in.off, err))
}
