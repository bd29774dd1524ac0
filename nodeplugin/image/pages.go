package image

import (
	"container/list"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const (
	pageBytes = 64 << 10
	// maxPages bounds the cache to 4 MiB; one page of an L2 table describes
	// 512 MiB of a disk with the usual clusters of 64 KiB.
	maxPages = 64
)

// pageCache holds the pages of a file that were used last. A page that several
// goroutines want is read once.
type pageCache struct {
	file  Ranged
	bytes int64 // of a page
	most  int   // pages that are held

	mu    sync.Mutex
	pages map[int64]*list.Element // of *page
	used  *list.List              // front: used last
}

type page struct {
	number int64
	loaded chan struct{} // closed when b or err is there
	b      []byte
	err    error
}

func newPageCache(file Ranged) *pageCache { return newCacheOf(file, pageBytes, maxPages) }

// newCacheOf is a cache of most pages of so many bytes, for what lies scattered.
func newCacheOf(file Ranged, bytes int64, most int) *pageCache {
	return &pageCache{file: file, bytes: bytes, most: most, pages: map[int64]*list.Element{}, used: list.New()}
}

// at returns the bytes from off to the end of off's page. The caller must know
// that off lies in the file.
func (c *pageCache) at(ctx context.Context, off int64) ([]byte, error) {
	for {
		p, mine := c.page(off / c.bytes)
		if mine {
			c.load(ctx, p)
		}
		select {
		case <-p.loaded:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if p.err == nil && off%c.bytes < int64(len(p.b)) {
			return p.b[off%c.bytes:], nil
		}
		if p.err == nil { // the caller could not know, for the file's end came only now
			return nil, fault.Terminal(fault.CorruptImage, fmt.Errorf("the image ends before byte %d, which it refers to: it is cut short, upload it again", off))
		}
		// Whoever read the page was told to stop; that is not our end.
		stopped := errors.Is(p.err, context.Canceled) || errors.Is(p.err, context.DeadlineExceeded)
		if mine || !stopped || ctx.Err() != nil {
			return nil, p.err
		}
	}
}

func (c *pageCache) uint64(ctx context.Context, off int64) (uint64, error) {
	b, err := c.at(ctx, off)
	if err != nil {
		return 0, err
	}
	return binary.BigEndian.Uint64(b), nil
}

// page returns the page with that number; mine says that the caller must load it.
func (c *pageCache) page(number int64) (_ *page, mine bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.pages[number]; ok {
		c.used.MoveToFront(e)
		return e.Value.(*page), false
	}
	p := &page{number: number, loaded: make(chan struct{})}
	c.pages[number] = c.used.PushFront(p)
	if c.used.Len() > c.most {
		last := c.used.Back()
		delete(c.pages, last.Value.(*page).number)
		c.used.Remove(last)
	}
	return p, true
}

func (c *pageCache) load(ctx context.Context, p *page) {
	defer close(p.loaded)
	start := p.number * c.bytes
	b := make([]byte, max(0, min(c.bytes, c.file.Size()-start)))
	if _, err := readExactly(ctx, c.file, b, start); err != nil {
		p.err = err
		c.mu.Lock()
		defer c.mu.Unlock()
		if e, ok := c.pages[p.number]; ok && e.Value.(*page) == p {
			delete(c.pages, p.number)
			c.used.Remove(e)
		}
		return
	}
	p.b = b
}
