package image

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const (
	// mappedScratch bytes at most are held by reads that can't go straight into
	// the caller's buffer.
	mappedScratch = 12 << 20
	// mappedSpan is the longest read of several segments, mappedGap the most
	// bytes between two segments that are read over rather than asked apart.
	mappedSpan = 1 << 20
	mappedGap  = 32 << 10
	// mappedRuns of the spans of one read are read at once.
	mappedRuns = 4
)

// layout tells where in its file the parts of a disk lie. Its methods are called
// from several goroutines at once.
type layout interface {
	// walk calls each with the segments of [off, off+n), which lies in the disk,
	// in order and without gaps.
	walk(ctx context.Context, off, n int64, each func(segment)) error
}

// packed is a layout with compressed segments.
type packed interface {
	layout
	// compression names how they are.
	compression() string
	// decode fills out, the bytes of s, from the decompressed bytes of in behind
	// s.skip; in may be longer than the compressed data.
	decode(s segment, out, in []byte) error
}

// boastful is a layout in which few bytes can claim more tables than a day
// suffices to read.
type boastful interface {
	layout
	// honest returns an error where there are more tables than the file has room for.
	honest(ctx context.Context) error
}

// segment is a part of the disk that lies in one piece in the file.
type segment struct {
	start, length int64 // in the disk
	kind          extent.Kind
	compressed    bool
	host, hostLen int64 // in the file; of the whole compressed piece when compressed
	skip          int64 // where a compressed segment starts in what it decompresses to
}

func (s segment) end() int64     { return s.start + s.length }
func (s segment) hostEnd() int64 { return s.host + s.hostLen }

// mapped is a disk whose parts lie anywhere in a file. Its memory is bounded
// whatever the file says: mappedScratch and aheadBytes for reads, and what the layout
// caches.
type mapped struct {
	layout
	packed  packed // the layout, if it is one
	format  string
	size    int64
	grain   int64
	file    Ranged
	scratch *semaphore.Weighted
	// decoders are as many as there are processors: more would only push each
	// other's data out of the caches.
	decoders *semaphore.Weighted
	ahead    *ahead // nil where nothing is fetched before it is wanted
}

// openMapped opens the disk of info.VirtualSize bytes that lies in file as l
// says and is read best in pieces of grain bytes.
func openMapped(info Info, l layout, file Ranged, grain int64) *Opened {
	info.AtLeast, info.AllocatedBytes = info.VirtualSize, -1
	m := &mapped{layout: l, format: info.Format, size: info.VirtualSize, grain: grain, file: file, scratch: semaphore.NewWeighted(mappedScratch), decoders: semaphore.NewWeighted(int64(runtime.NumCPU()))}
	if m.packed, _ = l.(packed); m.packed != nil && straight(file) {
		m.ahead = newAhead()
	}
	return &Opened{Info: info, Disk: m}
}

func (m *mapped) Size() int64 { return m.size }

// Grain is the cluster: a compressed one is decoded whole.
func (m *mapped) Grain() int64 { return m.grain }

func (m *mapped) walk(ctx context.Context, off, n int64, each func(segment)) error {
	if off < 0 || n < 0 || n > m.size-off {
		return fmt.Errorf("%d bytes at %d of a disk of %d", n, off, m.size)
	}
	return m.layout.walk(ctx, off, n, each)
}

func (m *mapped) Extents(ctx context.Context, off, n int64) ([]extent.Extent, error) {
	var list []extent.Extent
	err := m.walk(ctx, off, n, func(s segment) {
		list = extent.Append(list, extent.Extent{Start: s.start, Length: s.length, Kind: s.kind})
	})
	return list, err
}

// measure counts the bytes of the disk that have data, and those of them that
// are compressed. Every table is read for that.
func (m *mapped) measure(ctx context.Context) (data, compressed int64, err error) {
	if b, ok := m.layout.(boastful); ok {
		if err := b.honest(ctx); err != nil {
			return 0, 0, err
		}
	}
	err = m.walk(ctx, 0, m.size, func(s segment) {
		if s.kind == extent.Data {
			data += s.length
		}
		if s.compressed {
			compressed += s.length
		}
	})
	return data, compressed, err
}

func (m *mapped) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	var read []segment
	compressed := false // and not in read
	err := m.walk(ctx, off, int64(len(p)), func(s segment) {
		if s.kind != extent.Data {
			clear(p[s.start-off : s.end()-off])
			return
		}
		if s.compressed && m.ahead != nil {
			compressed = true
			return
		}
		if n := len(read); n > 0 && !s.compressed && !read[n-1].compressed && read[n-1].end() == s.start && read[n-1].hostEnd() == s.host {
			read[n-1].length += s.length
			read[n-1].hostLen += s.hostLen
			return
		}
		read = append(read, s)
	})
	if err != nil {
		return 0, err
	}
	slices.SortFunc(read, byHost)
	// Side by side, so that a chunk in many places takes no longer than the others
	// where each request is answered late.
	g, run := errgroup.WithContext(ctx)
	g.SetLimit(mappedRuns)
	if _, ok := m.file.(*tape); ok {
		g.SetLimit(1) // it is read in order
	}
	spans(read, func(segments []segment, end int64) {
		g.Go(func() error { return m.readRun(run, segments, end, p, off) })
	})
	if compressed {
		g.Go(func() error { return m.readWindows(run, p, off) })
	}
	return len(p), g.Wait()
}

// readWindows fills what of p, the disk's bytes at off, is compressed.
func (m *mapped) readWindows(ctx context.Context, p []byte, off int64) error {
	var before sync.WaitGroup
	defer before.Wait()
	g, run := errgroup.WithContext(ctx)
	g.SetLimit(mappedRuns)
	end := off + int64(len(p))
	next := int64(-1)
	for at := off - off%aheadWindow; at < end; at += aheadWindow {
		next = m.ahead.come(at)
		runs, err := m.window(ctx, at)
		if err != nil {
			return errors.Join(err, g.Wait())
		}
		for _, r := range runs {
			if slices.ContainsFunc(r.segments, func(s segment) bool { return s.within(off, end).length > 0 }) {
				g.Go(func() error { return m.readPacked(run, r, p, off) })
			}
		}
	}
	m.fetch(ctx, next, &before)
	return g.Wait()
}

// readRun fills the parts of p, the disk's bytes at off, that run describes:
// segments in order of the file, which end before end.
func (m *mapped) readRun(ctx context.Context, run []segment, end int64, p []byte, off int64) error {
	if len(run) == 1 && !run[0].compressed {
		s := run[0]
		_, err := readExactly(ctx, m.file, p[s.start-off:s.end()-off], s.host)
		return err
	}
	start := run[0].host
	weight := min(end-start, mappedScratch) // nobody ever gets more: a longer run has all to itself
	if err := m.scratch.Acquire(ctx, weight); err != nil {
		return err
	}
	defer m.scratch.Release(weight)
	buf := scratch(int(end - start))
	defer free(buf)
	if _, err := readExactly(ctx, m.file, buf, start); err != nil {
		return err
	}
	if err := m.decoders.Acquire(ctx, 1); err != nil {
		return err
	}
	defer m.decoders.Release(1)
	for _, s := range run {
		in, out := buf[s.host-start:s.hostEnd()-start], p[s.start-off:s.end()-off]
		if !s.compressed {
			copy(out, in)
			continue
		}
		if t, ok := m.file.(*tape); ok {
			t.keep(s.host, s.hostLen)
		}
		if err := m.decode(s, out, in); err != nil {
			return err
		}
	}
	return nil
}

func (m *mapped) decode(s segment, out, in []byte) error {
	if err := m.packed.decode(s, out, in); err != nil {
		return corrupt(m.format, "the compressed data for byte %d, %d bytes at %d, do not decompress: %w", s.start, s.hostLen, s.host, err)
	}
	return nil
}

// scratches holds buffers of mappedSpan bytes.
var scratches = sync.Pool{New: func() any { return new([mappedSpan]byte) }}

func scratch(n int) []byte {
	if n > mappedSpan {
		return make([]byte, n)
	}
	return scratches.Get().(*[mappedSpan]byte)[:n]
}

func free(b []byte) {
	if cap(b) == mappedSpan {
		scratches.Put((*[mappedSpan]byte)(b[:mappedSpan]))
	}
}

// corrupt is the fault of an image that contradicts itself.
func corrupt(format, message string, args ...any) error {
	return fault.Terminal(fault.CorruptImage, fmt.Errorf("the %s image is corrupt: %w", format, fmt.Errorf(message, args...)))
}
