package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	"path"
	"strings"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// ovaForward is an OVA that is read while it passes. Its description comes first
// ("Distribution"), and so it is known which file is the disk before that comes; the
// manifest may come before it, or behind.
type ovaForward struct {
	bundle
	src     *tarStream
	r       *tarReader
	ovf     member
	text    []byte // of the description, until the manifest has come
	mf      *member
	disk    member
	sums    map[string]hash.Hash // of the disk's file, by algorithm
	literal string               // another name that the disk's file may have, if there is such a file
}

// openOVAForward opens the disk o.Disk of a tar that comes once, or its only one. It
// takes stream over when it returns no error.
func openOVAForward(ctx context.Context, stream io.ReadCloser, size int64, compression string, o Options) (*Opened, error) {
	f := &ovaForward{bundle: bundle{kind: "ova"}, src: &tarStream{src: stream, size: size}}
	f.r = newTarReader(f.src)
	m, err := f.member(ctx)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if err != nil || !strings.EqualFold(path.Ext(m.name), ".ovf") {
		return nil, needsSpool(errors.New("a tar that does not begin with the description of its disks (.ovf)"))
	}
	f.ovf = m
	if f.text, err = f.read(m, ovfBytes); err != nil {
		return nil, err
	}
	literals := map[string]string{}
	disks, err := disksOf(f.text, func(href string) (member, error) {
		names := besides(m, href)
		if len(names) == 0 {
			return member{}, f.missing(href)
		}
		name := names[len(names)-1]
		if len(names) > 1 {
			literals[name] = names[0]
		}
		return member{name: name, at: span{0, -1}}, nil
	})
	if err != nil {
		return nil, err
	}
	d, err := choose(disks, o.Disk)
	if err != nil {
		return nil, err
	}
	f.literal = literals[d.file.name]
	for f.disk.name == "" {
		m, err := f.next(ctx)
		if errors.Is(err, io.EOF) {
			return nil, f.missing(d.file.name)
		}
		if err != nil {
			return nil, err
		}
		if m.name == d.file.name {
			f.disk = m
		}
	}
	opened, err := f.open(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("disk %s of the ova: %w", quote(f.disk.name), err)
	}
	opened.Info.Bundle, opened.Info.Disk, opened.Info.Compression = f.kind, f.disk.name, cmp.Or(compression, opened.Info.Compression)
	if d.size >= 0 && d.size != f.disk.at.length {
		opened.Info.Warnings = append(opened.Info.Warnings, otherSize(f.disk, d.size))
	}
	if _, ok := f.manifest[f.disk.name]; f.manifest != nil && !ok {
		opened.Info.Warnings = append(opened.Info.Warnings, f.undigested(f.disk))
	}
	before, tape := opened.end, opened.tape
	opened.end = func(ctx context.Context) error {
		if before != nil {
			if err := before(ctx); err != nil {
				return err
			}
		}
		if tape != nil { // it has what the disk's own checks are in
			if err := tape.rest(ctx, math.MaxInt64); err != nil {
				return err
			}
		}
		return f.end(ctx)
	}
	return opened, nil
}

// member is the next file of the tar that matters; io.EOF is the tar's end.
func (f *ovaForward) member(ctx context.Context) (member, error) {
	for {
		m, err := f.r.next(ctx)
		if err != nil || !foreign(m) {
			return m, err
		}
	}
}

// next is the next file of the tar. What it means for the others is seen to.
func (f *ovaForward) next(ctx context.Context) (member, error) {
	m, err := f.member(ctx)
	if err != nil {
		return m, err
	}
	switch ext := path.Ext(m.name); {
	case strings.EqualFold(ext, ".ovf"):
		return m, twoDescriptions(f.ovf, m)
	case strings.EqualFold(ext, ".mf") && f.mf != nil:
		return m, twoManifests(*f.mf, m)
	case strings.EqualFold(ext, ".mf"):
		return m, f.manifestCame(m)
	case m.name == f.literal:
		return m, needsSpool(fmt.Errorf("it has a file %s, which may be the disk", quote(m.name)))
	}
	return m, nil
}

func (f *ovaForward) manifestCame(m member) error {
	text, err := f.read(m, manifestBytes)
	if err != nil {
		return err
	}
	if f.manifest, err = parseManifest(text, path.Dir(m.name)); err != nil {
		return err
	}
	f.mf = &m
	d, ok := f.manifest[f.ovf.name]
	text, f.text = f.text, nil
	if ok {
		return d.compare(f.kind, f.ovf.name, d.of(text))
	}
	return nil
}

// read reads the file at hand, which is text.
func (f *ovaForward) read(m member, most int64) ([]byte, error) {
	if m.at.length > most {
		return nil, tooMuchText(m, most)
	}
	text := make([]byte, m.at.length)
	_, err := io.ReadFull(f, text)
	return text, err
}

// Read reads the file at hand, and sums it up if it is the disk's.
func (f *ovaForward) Read(p []byte) (int, error) {
	n, err := f.r.tar.Read(p)
	for _, h := range f.sums {
		h.Write(p[:n]) // it returns no error
	}
	switch {
	case err == nil || errors.Is(err, io.EOF) && !isFault(err):
	case f.src.err != nil:
		err = f.src.err
	default:
		err = corruptTar("a member ends before byte %d, where the file does: %w: it is cut short, upload it again", f.src.off, err)
	}
	return n, err
}

// open opens the disk in the file at hand.
func (f *ovaForward) open(ctx context.Context, o Options) (*Opened, error) {
	f.sums = map[string]hash.Hash{}
	for algorithm, h := range sums {
		if d, ok := f.manifest[f.disk.name]; ok && d.algorithm == algorithm || f.manifest == nil {
			f.sums[algorithm] = h()
		}
	}
	r := &peeker{r: f}
	format, found, err := wrapper(head{first: r.peek})
	switch {
	case err != nil:
		return nil, err
	case found && format.opens == asTar:
		return nil, tarInTar()
	case found && format.opens == asVMDKText:
		return nil, needsSpool(errors.New("a vmdk disk of several files"))
	}
	return openStream(ctx, f.disk.at.length, both{r, f.src.src}, Options{Format: o.Format}, false)
}

// end reads the rest of the tar, and compares the disk's file with the manifest.
func (f *ovaForward) end(ctx context.Context) error {
	if _, err := io.Copy(io.Discard, under(ctx, f)); err != nil {
		return err
	}
	sums := f.sums
	f.sums = nil
	for {
		if _, err := f.next(ctx); errors.Is(err, io.EOF) && !isFault(err) {
			break
		} else if err != nil {
			return err
		}
	}
	if d, ok := f.manifest[f.disk.name]; ok {
		if err := d.compare(f.kind, f.disk.name, sums[d.algorithm].Sum(nil)); err != nil {
			return err
		}
	}
	_, err := io.Copy(io.Discard, under(ctx, f.src)) // where the checks of a compression are
	return err
}

// under is r until ctx ends.
func under(ctx context.Context, r io.Reader) io.Reader { return contextReader{ctx, r} }

type contextReader struct {
	ctx context.Context //nolint:containedctx // lives as long as one call
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// tarStream is a tar that comes once.
type tarStream struct {
	src  io.ReadCloser
	size int64 // -1 unknown
	off  int64
	last [tarBlock]byte // that came
	err  error          // of src
}

func (s *tarStream) Read(p []byte) (int, error) {
	n, err := s.src.Read(p)
	s.off += int64(n)
	if n >= len(s.last) {
		copy(s.last[:], p[n-len(s.last):n])
	} else {
		copy(s.last[:], s.last[n:])
		copy(s.last[len(s.last)-n:], p[:n])
	}
	switch {
	case err == nil:
	case !errors.Is(err, io.EOF) || isFault(err):
		s.err = err
	case s.size >= 0 && s.off != s.size:
		s.err = fault.Transient(fault.ConnectionFailed, fmt.Errorf("the stream of %d bytes ended after %d", s.size, s.off))
		err = s.err
	}
	return n, err
}

func (s *tarStream) at() int64    { return s.off }
func (s *tarStream) broke() error { return s.err }

func (s *tarStream) header(context.Context) ([]byte, error) { return s.last[:], nil }

// room is unknown: a member that has less than it says ends with an error.
func (s *tarStream) room() int64 { return 1<<63 - 1 }
