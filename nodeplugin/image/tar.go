package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const (
	// tarMaxMembers are enough for a disk of 8 TiB in files of 2 GiB.
	tarMaxMembers = 4096
	tarBlock      = 512
)

// member is a file in a tar.
type member struct {
	name string // without "./" before it
	at   span   // its bytes, in the tar
}

// readTar lists the files of a tar from its headers.
func readTar(ctx context.Context, blob Ranged) ([]member, error) {
	r := newTarReader(&tarSource{ctx: ctx, pages: newPageCache(blob), size: blob.Size()})
	var members []member
	for {
		m, err := r.next(ctx)
		if errors.Is(err, io.EOF) && !isFault(err) {
			return members, nil
		}
		if err != nil {
			return nil, err
		}
		members = append(members, m)
	}
}

// tarReader lists the files of a tar. Whatever could be read otherwise by another
// program is refused: the names of members and their lengths mean one thing, and
// their bytes lie in one piece.
type tarReader struct {
	src  tarBytes
	tar  *tar.Reader
	seen map[string]bool
}

// tarBytes are those of a tar, from its beginning.
type tarBytes interface {
	io.Reader
	// at is how many have been read, room how many there may be behind.
	at() int64
	room() int64
	// header is the one that has just been read.
	header(ctx context.Context) ([]byte, error)
	// broke is the error with which they ended too early.
	broke() error
}

func newTarReader(src tarBytes) *tarReader {
	return &tarReader{src: src, tar: tar.NewReader(src), seen: map[string]bool{}}
}

// next is the next file; io.EOF, and no fault, is the tar's end.
func (r *tarReader) next(ctx context.Context) (member, error) {
	for {
		if err := ctx.Err(); err != nil {
			return member{}, err
		}
		h, err := r.tar.Next()
		if err := r.src.broke(); err != nil {
			return member{}, fmt.Errorf("read the tar's headers: %w", err)
		}
		if errors.Is(err, io.EOF) {
			return member{}, io.EOF
		}
		if err != nil {
			return member{}, corruptTar("its header before byte %d: %w: it is cut short or damaged, upload it again", r.src.at(), err)
		}
		// Where the name is anything, what else there is does not matter.
		name := strings.TrimPrefix(h.Name, "./")
		if h.Typeflag != tar.TypeXGlobalHeader && !local(name) && (h.Typeflag != tar.TypeDir || name != "") {
			return member{}, corruptTar("its member %s points out of it, or its name is no text", quote(h.Name))
		}
		if err := plainMember(h); err != nil {
			return member{}, err
		}
		if h.Typeflag == tar.TypeDir || h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if h.Size > r.src.room() {
			return member{}, corruptTar("its member %s has %d bytes at %d of a file of %d bytes: the file is cut short, upload it again", quote(name), h.Size, r.src.at(), r.src.at()+r.src.room())
		}
		if err := honest(ctx, r.src, h); err != nil {
			return member{}, err
		}
		name = path.Clean(name)
		if r.seen[name] {
			return member{}, corruptTar("it has the member %s twice", quote(name))
		}
		if r.seen[name] = true; len(r.seen) > tarMaxMembers {
			return member{}, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("a tar of more than %d files is not supported: give the disk alone", tarMaxMembers))
		}
		return member{name: name, at: span{r.src.at(), h.Size}}, nil
	}
}

// local says whether a name stays in the folder that it is read in, for
// everybody, and can be shown to anybody.
func local(name string) bool {
	return filepath.IsLocal(name) && utf8.ValidString(name) && !strings.Contains(name, `\`) && !strings.ContainsFunc(name, unicode.IsControl)
}

// plainMember refuses what is no file whose bytes lie in one piece.
func plainMember(h *tar.Header) error {
	for key := range h.PAXRecords {
		sparse := strings.HasPrefix(key, "GNU.sparse.") || key == "SCHILY.realsize"
		if sparse || h.Typeflag == tar.TypeXGlobalHeader && (key == "size" || key == "path") {
			return fault.Terminal(fault.FormatNotSupported,
				fmt.Errorf("the tar's member %s is sparse or described by %s, which is not supported: pack it without --sparse", quote(h.Name), quote(key)))
		}
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir, tar.TypeXGlobalHeader:
		return nil
	case tar.TypeGNUSparse:
		return fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the tar's member %s is sparse, which is not supported: pack it without --sparse", quote(h.Name)))
	}
	return fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the tar's member %s is neither a file nor a folder (type %q): give a tar of files only", quote(h.Name), h.Typeflag))
}

// tarSource reads a blob from its beginning, and seeks.
type tarSource struct {
	ctx   context.Context //nolint:containedctx // lives as long as the call of readTar
	pages *pageCache
	size  int64
	off   int64
	err   error // of the blob
}

func (s *tarSource) Read(p []byte) (int, error) {
	if s.off >= s.size || len(p) == 0 {
		return 0, io.EOF
	}
	b, err := s.pages.at(s.ctx, s.off)
	if err != nil {
		s.err = err
		return 0, err
	}
	n := copy(p, b)
	s.off += int64(n)
	return n, nil
}

// Seek goes forwards from here: more is not asked of it.
func (s *tarSource) Seek(off int64, whence int) (int64, error) {
	if whence != io.SeekCurrent || off < 0 || off > s.size-s.off {
		return 0, errors.New("the tar ends before its member does")
	}
	s.off += off
	return s.off, nil
}

func (s *tarSource) at() int64    { return s.off }
func (s *tarSource) room() int64  { return s.size - s.off }
func (s *tarSource) broke() error { return s.err }

func (s *tarSource) header(ctx context.Context) ([]byte, error) {
	return s.pages.at(ctx, s.off-tarBlock)
}

// honest compares the length of a member with the one in the header right before
// its bytes. An extended header may tell another, and does so where that one has
// no room for it; else one of the two is a lie, and programs differ in which
// they believe.
func honest(ctx context.Context, src tarBytes, h *tar.Header) error {
	if _, ok := h.PAXRecords["size"]; !ok {
		return nil
	}
	const field, length = 124, 12 // of "ustar Interchange Format" in POSIX's pax
	b, err := src.header(ctx)
	if err != nil {
		return fmt.Errorf("read the tar's headers: %w", err)
	}
	text := strings.Trim(string(b[field:field+length]), " \x00")
	size, err := strconv.ParseInt("0"+text, 8, 64)
	const most = 1<<33 - 1 // that it has room for
	if err != nil || size != 0 && size != h.Size && h.Size <= most || size != 0 && size != most && h.Size > most {
		return corruptTar("its member %s has %d bytes by its extended header and %s by its header", quote(h.Name), h.Size, quote(text))
	}
	return nil
}

func corruptTar(format string, args ...any) error { return corrupt("tar", format, args...) }

// section is a part of a blob.
type section struct {
	blob Ranged
	at   span
}

func (s section) Size() int64 { return s.at.length }

func (s section) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if off < 0 || off > s.at.length {
		return 0, fmt.Errorf("read at %d of %d bytes", off, s.at.length)
	}
	want := min(int64(len(p)), s.at.length-off)
	n, err := s.blob.ReadAtContext(ctx, p[:want], s.at.at+off)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}
