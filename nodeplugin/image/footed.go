package image

import (
	"errors"
	"fmt"
	"io"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// footed is a stream that may end with a footer, which is none of the disk's bytes. As
// many as a footer has are kept back until the end tells.
type footed struct {
	io.ReadCloser
	format string // that somebody has named, "" for none
	given  int64  // bytes of the disk
	kept   []byte
	err    error // when kept is given
}

// openFooted opens a raw disk, or with f.opens asFooted a fixed vhd, in a stream of size
// bytes (-1 unknown).
func openFooted(stream io.ReadCloser, size int64, f format, o Options) *Opened {
	opened := &Opened{Info: Info{Format: f.name, VirtualSize: -1, AllocatedBytes: -1}, Stream: stream}
	if size >= 0 {
		opened.bytes(size)
		opened.Info.VirtualSize = opened.Info.AtLeast
	}
	if f.name != Archive {
		opened.Stream = &footed{ReadCloser: stream, format: o.Format}
	}
	return opened
}

// bytes notes that the file of a disk that is a stream has at least size bytes.
func (o *Opened) bytes(size int64) {
	if o.Info.Format == "vhd" { // of two lengths of a footer, and a disk of whole sectors
		size = max(0, size-vhdFooterBytes+1) / vhdSector * vhdSector
	}
	o.Info.AtLeast = size
}

func (s *footed) Read(p []byte) (int, error) {
	for s.err == nil && len(p) > 0 {
		buf := p
		if len(p) < 2*footBytes {
			buf = make([]byte, len(p)+footBytes)
		}
		have := copy(buf, s.kept)
		n, err := s.ReadCloser.Read(buf[have:min(have+len(p), len(buf))])
		buf = buf[:have+n]
		out := max(0, len(buf)-footBytes)
		s.kept = append(s.kept[:0], buf[out:]...)
		s.given += int64(copy(p, buf[:out]))
		switch {
		case err == nil:
		case errors.Is(err, io.EOF) && !isFault(err):
			s.kept, s.err = s.end(s.kept)
		default:
			s.kept, s.err = nil, err
		}
		if out > 0 {
			return out, nil
		}
	}
	n := copy(p, s.kept)
	s.kept = s.kept[n:]
	if len(s.kept) > 0 || len(p) == 0 {
		return n, nil
	}
	return n, s.err
}

// end tells which of the last bytes are the disk's, with io.EOF, or what is wrong.
func (s *footed) end(last []byte) ([]byte, error) {
	var f format
	for _, one := range footers {
		if len(last) == footBytes && one.matches(last) {
			f = one
		}
	}
	switch {
	case f.name == "" && s.format == "vhd":
		return nil, corruptVHD("a fixed disk has no footer at its end: the file is cut short, upload it again")
	case f.name == "":
		return last, io.EOF
	case s.format == "raw":
		return nil, notThe("raw", f.name)
	case f.opens != asVHD:
		return nil, f.refusal()
	}
	disk := last[:f.at]
	foot, err := parseVHDFooter(last[f.at:])
	size := s.given + int64(len(disk))
	switch {
	case err != nil:
		return nil, err
	case foot.kind == vhdFixed && foot.size == size:
		return disk, io.EOF
	case s.format == "vhd":
		return nil, needsSpool(fmt.Errorf("its footer has a disk of %d bytes (type %d), and %d come before it", foot.size, foot.kind, size))
	}
	return nil, fault.Terminal(fault.NotADiskImage,
		fmt.Errorf("what began as a raw disk of %d bytes ends with the footer of a vhd image, which has a disk of %d: name the format (--format vhd, or the annotation longshore.dev/image-format: vhd on the VolumeImportSource)", size, foot.size))
}
