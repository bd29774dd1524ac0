package image

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/longshore-io/longshore/nodeplugin/extent"
)

const (
	// aheadWindow bytes of the disk have their compressed segments fetched together:
	// writers that compress several clusters at once put them into the file in the order
	// in which they were done, and in what lies between two of one window there is
	// little of another.
	aheadWindow = 8 << 20
	// aheadWindows behind the one that is read are fetched before they are wanted, so
	// that nobody waits for answers that come late. What is not read yet is kept until the
	// first reader is aheadBehind bytes farther: several of them come in any order.
	aheadWindows = 2
	aheadBehind  = 64 << 20
	// aheadBytes of the file are held at most, save that a single longer run may be alone;
	// nothing is fetched before it is wanted that leaves less than aheadSpare of them.
	aheadBytes = 16 << 20
	aheadSpare = 8 << 20
)

// ahead holds compressed parts of a mapped disk's file, each fetched by one request and
// once, as long as the disk is read in about the order of its bytes.
type ahead struct {
	mu      sync.Mutex
	windows map[int64][]*run // by their first byte in the disk
	last    int64            // the window that was read last
	held    []*held          // what the runs have, as long as they have it
	bytes   int64            // of them
	changed chan struct{}    // closed when some of them may be free
}

// run is one part of the file.
type run struct {
	segments []segment // in order of the file
	end      int64     // in the file

	// Guarded by ahead.mu.
	left int64 // bytes of the disk that nobody has read yet
	now  *held // nil: its bytes are neither in memory nor on their way
}

// held are the bytes of a run.
type held struct {
	run    *run
	users  int           // guarded by ahead.mu
	loaded chan struct{} // closed when b or err is there
	b      []byte
	err    error
}

func (r *run) start() int64 { return r.segments[0].host }

func newAhead() *ahead {
	return &ahead{windows: map[int64][]*run{}, last: -aheadWindow, changed: make(chan struct{})}
}

// straight tells whether any byte of the file is as near as any other: of one that
// passes, or is decompressed on the way, those in front come first.
func straight(file Ranged) bool {
	for {
		switch f := file.(type) {
		case section:
			file = f.blob
			continue
		case *tape, *blocked:
			return false
		}
		return true
	}
}

// spans cuts segments, in order of the file, where the next one is not worth to be read
// together with those before it.
func spans(list []segment, each func(run []segment, end int64)) {
	for len(list) > 0 {
		n, end := 1, list[0].hostEnd()
		for n < len(list) && list[n].host-end <= mappedGap && list[n].hostEnd()-list[0].host <= mappedSpan {
			end = max(end, list[n].hostEnd())
			n++
		}
		each(list[:n], end)
		list = list[n:]
	}
}

func byHost(a, b segment) int { return cmp.Compare(a.host, b.host) }

// window returns the runs of the window at byte at of the disk.
func (m *mapped) window(ctx context.Context, at int64) ([]*run, error) {
	a := m.ahead
	a.mu.Lock()
	runs, ok := a.windows[at]
	a.mu.Unlock()
	if ok {
		return runs, nil
	}
	var list []segment
	err := m.walk(ctx, at, min(aheadWindow, m.size-at), func(s segment) {
		if s.kind == extent.Data && s.compressed {
			list = append(list, s)
		}
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(list, byHost)
	spans(list, func(segments []segment, end int64) {
		r := &run{segments: segments, end: end}
		for _, s := range segments {
			r.left += s.length
		}
		runs = append(runs, r)
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	if first, ok := a.windows[at]; ok {
		return first, nil
	}
	a.windows[at] = runs
	return runs, nil
}

// come says that the window at byte at is read. It returns the one that will be read next
// if the reader goes on from window to window, -1 if he does not, and forgets what is far
// from there or read.
func (a *ahead) come(at int64) (next int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	next = -1
	if at >= a.last-aheadBehind && at <= a.last+aheadWindow {
		at = max(at, a.last)
		next = at + aheadWindow
	}
	a.last = at
	for w, runs := range a.windows {
		near := w >= at-aheadBehind && w <= at+aheadWindows*aheadWindow
		if near && (w >= at || slices.ContainsFunc(runs, func(r *run) bool { return r.left > 0 })) {
			continue
		}
		delete(a.windows, w)
		for _, r := range runs {
			r.left = 0
			a.drop(r.now)
		}
	}
	return next
}

// take returns the bytes of r, which the caller gives back. mine says that he has to load
// them.
func (a *ahead) take(ctx context.Context, r *run) (h *held, mine bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	size := r.end - r.start()
	for {
		if r.now != nil {
			r.now.users++
			return r.now, false, nil
		}
		for a.bytes+size > aheadBytes && a.releaseFarthest() {
		}
		if a.bytes == 0 || a.bytes+size <= aheadBytes {
			return a.hold(r), true, nil
		}
		changed := a.changed
		a.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		a.mu.Lock()
		if err := ctx.Err(); err != nil {
			return nil, false, err
		}
	}
}

// reserve is take for what nobody wants yet: nil where there is nothing to load. full says
// that there is no room.
func (a *ahead) reserve(r *run) (h *held, full bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case r.now != nil || r.left <= 0:
		return nil, false
	case a.bytes+r.end-r.start() > aheadBytes-aheadSpare:
		return nil, true
	}
	return a.hold(r), false
}

func (a *ahead) hold(r *run) *held {
	r.now = &held{run: r, users: 1, loaded: make(chan struct{})}
	a.bytes += r.end - r.start()
	a.held = append(a.held, r.now)
	return r.now
}

// releaseFarthest makes room where it is wanted last: a reader comes to the front of the
// disk first. false: all that is held is in somebody's hand.
func (a *ahead) releaseFarthest() bool {
	var farthest *held
	for _, h := range a.held {
		if h.users == 0 && (farthest == nil || h.run.segments[0].start > farthest.run.segments[0].start) {
			farthest = h
		}
	}
	if farthest == nil {
		return false
	}
	a.release(farthest)
	return true
}

// give puts h back, of which the caller has read so many bytes of the disk.
func (a *ahead) give(h *held, read int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	h.users--
	h.run.left -= read
	a.drop(h)
	close(a.changed)
	a.changed = make(chan struct{})
}

// drop releases h if nobody wants it any more.
func (a *ahead) drop(h *held) {
	if h != nil && h.users == 0 && h.run.left <= 0 && h.run.now == h {
		a.release(h)
	}
}

// release forgets h, whose bytes nobody has in hand.
func (a *ahead) release(h *held) {
	free(h.b)
	h.run.now = nil
	a.bytes -= h.run.end - h.run.start()
	a.held = slices.DeleteFunc(a.held, func(other *held) bool { return other == h })
}

// load fetches h, which the caller has to. What fails is not held: the next one tries anew.
func (m *mapped) load(ctx context.Context, h *held) {
	h.b = scratch(int(h.run.end - h.run.start()))
	_, h.err = readExactly(ctx, m.file, h.b, h.run.start())
	if h.err != nil {
		m.ahead.mu.Lock()
		m.ahead.release(h)
		m.ahead.mu.Unlock()
	}
	close(h.loaded)
}

// fetch has loaded what will be wanted from byte next of the disk on, as far as there is
// room; next is -1 where that is not known. The caller waits for it by wg. What goes wrong
// is found again by whoever wants it.
func (m *mapped) fetch(ctx context.Context, next int64, wg *sync.WaitGroup) {
	if next < 0 {
		return
	}
	for at := next; at < min(next+aheadWindows*aheadWindow, m.size); at += aheadWindow {
		runs, err := m.window(ctx, at)
		if err != nil {
			return
		}
		for _, r := range runs {
			h, full := m.ahead.reserve(r)
			if full {
				return
			}
			if h != nil {
				wg.Go(func() {
					m.load(ctx, h)
					m.ahead.give(h, 0)
				})
			}
		}
	}
}

// readPacked fills what of p, the disk's bytes at off, is in r.
func (m *mapped) readPacked(ctx context.Context, r *run, p []byte, off int64) error {
	for {
		h, mine, err := m.ahead.take(ctx, r)
		if err != nil {
			return err
		}
		if mine {
			m.load(ctx, h)
		}
		var read int64
		select {
		case <-h.loaded:
			if err = h.err; err == nil {
				read, err = m.unpack(ctx, h, p, off)
			}
		case <-ctx.Done():
			err = ctx.Err()
		}
		m.ahead.give(h, read)
		// Whoever loaded it was told to stop; that is not our end.
		stopped := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
		if mine || !stopped || ctx.Err() != nil {
			return err
		}
	}
}

// unpack decodes what of p is in h, and returns how many bytes that are.
func (m *mapped) unpack(ctx context.Context, h *held, p []byte, off int64) (read int64, err error) {
	if err := m.decoders.Acquire(ctx, 1); err != nil {
		return 0, err
	}
	defer m.decoders.Release(1)
	for _, s := range h.run.segments {
		if s = s.within(off, off+int64(len(p))); s.length <= 0 {
			continue
		}
		in := h.b[s.host-h.run.start() : s.hostEnd()-h.run.start()]
		if err := m.decode(s, p[s.start-off:s.end()-off], in); err != nil {
			return read, err
		}
		read += s.length
	}
	return read, nil
}

// within is the part of a compressed segment that is in [from, to), of no or less length
// where there is none.
func (s segment) within(from, to int64) segment {
	start := max(s.start, from)
	s.skip += start - s.start
	s.length = min(s.end(), to) - start
	s.start = start
	return s
}
