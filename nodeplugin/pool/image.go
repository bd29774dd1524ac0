package pool

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/device"
)

// ImageKey names the content of an imported disk. Who asks for it by the same key
// has shown that the source would give it the same bytes: the pool only compares.
type ImageKey struct {
	// Scope is within whom the disk is shared: a namespace.
	Scope string `json:"scope"`
	// Locator is where the disk came from and how it was read.
	Locator string `json:"locator"`
	// Validator is what the source said of its content; equal ones mean equal bytes.
	Validator string `json:"validator"`
}

// id is a file name that no volume can have, for it begins with an underscore.
func (k ImageKey) id() string {
	h := sha256.New()
	for _, part := range []string{k.Scope, k.Locator, k.Validator} {
		fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	return "_" + hex.EncodeToString(h.Sum(nil))
}

// Image is a disk that was imported and is kept for whoever imports it again. It
// shares its blocks with the volume that it was imported for.
type Image struct {
	ImageKey
	Format string `json:"format"`
	// VirtualBytes is the size of the disk; its file ends with the block after it.
	VirtualBytes int64 `json:"virtualBytes"`
	// Digest of the disk, as package digest has it.
	Digest   string    `json:"digest"`
	Warnings []string  `json:"warnings,omitempty"`
	MadeAt   time.Time `json:"madeAt"`
	// AllocatedBytes is what the file holds.
	AllocatedBytes int64 `json:"-"`
	// UsedAt is the time of the record's file: it need not survive a crash.
	UsedAt time.Time `json:"-"`
}

// imageMeta is an image's meta.json.
type imageMeta struct {
	Version int `json:"version"`
	Image
}

// CachedImage is an image in use: it stays readable until it is closed, evicted or not.
type CachedImage struct {
	Image
	File *os.File
}

// Close lets go of the image.
func (c *CachedImage) Close() error { return c.File.Close() }

// CloneTo makes the start of dst share the image's blocks; holes become holes. The
// error is EXDEV where dst lies on another filesystem.
func (c *CachedImage) CloneTo(dst *os.File) error {
	return cloneRange(dst, c.File, device.Mapped{Length: roundUp(c.VirtualBytes)})
}

// CacheStats count since the pool was opened, save for Images and their Bytes.
type CacheStats struct {
	Images                  int
	Bytes, Extents          int64
	Hits, Misses, Evictions int64
}

// CacheStats tells how the pool's images fare. Extents is of all of them together.
func (p *Pool) CacheStats() CacheStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.counts
	s.Images, s.Bytes = len(p.images), p.cachedBytes()
	for id := range p.images {
		_ = p.imageExtents(id, func(device.Mapped) { s.Extents++ }) // a figure to look at, no more
	}
	return s
}

func (p *Pool) imageExtents(id string, visit func(device.Mapped)) error {
	f, err := os.Open(filepath.Join(p.root, imagesName, id, dataName))
	if err != nil {
		return err
	}
	defer f.Close()
	return device.Extents(f, func(m device.Mapped) error { visit(m); return nil })
}

// Images lists the images, in no order.
func (p *Pool) Images() []Image {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []Image
	for _, i := range p.images {
		list = append(list, i)
	}
	return list
}

// FindImage returns the image of that key, or nil, and remembers that it is in use.
func (p *Pool) FindImage(k ImageKey) *CachedImage {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cfg.CachePercent <= 0 || p.ready() != nil {
		return nil
	}
	id := k.id()
	i, ok := p.images[id]
	if !ok {
		p.counts.Misses++
		return nil
	}
	folder := filepath.Join(p.root, imagesName, id)
	f, err := os.Open(filepath.Join(folder, dataName))
	if err != nil {
		p.counts.Misses++
		return nil
	}
	i.UsedAt = time.Now()
	p.images[id] = i
	_ = os.Chtimes(filepath.Join(folder, metaName), i.UsedAt, i.UsedAt) // the order of eviction, no more
	p.counts.Hits++
	return &CachedImage{i, f}
}

// DropImage removes an image that is of no use.
func (p *Pool) DropImage(k ImageKey) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.images[k.id()]; !ok {
		return nil
	}
	return p.evict(k.id())
}

// KeepImage keeps a disk that was just imported: its parts lie at Physical in from
// and at Logical in the disk. Nobody may write to from meanwhile. There is no error
// where it is kept already, or the cache has no room for it, or is switched off.
func (p *Pool) KeepImage(ctx context.Context, i Image, from *os.File, parts []device.Mapped) (err error) {
	id := i.id()
	need := int64(0)
	for _, part := range parts {
		need += part.Length
	}
	need = min(need, allocated(from.Name()))
	end, err := p.begin(id)
	if errors.Is(err, ErrBusy) {
		return nil // somebody else keeps it now
	}
	if err != nil {
		return fmt.Errorf("keep image: %w", err)
	}
	defer end()
	room, err := p.reserveImage(id, need)
	if room == nil || err != nil {
		return err
	}
	defer room.undo()
	i.MadeAt = time.Now().UTC()
	tmp := filepath.Join(p.root, tmpName, id)
	defer func() {
		if err != nil {
			err = fmt.Errorf("keep image: %w", errors.Join(err, os.RemoveAll(tmp)))
		}
	}()
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return err
	}
	p.step("image: folder")
	if err := p.makeImage(filepath.Join(tmp, dataName), roundUp(i.VirtualBytes), from, parts); err != nil {
		return err
	}
	p.step("image: data")
	if err := p.writeJSON(filepath.Join(tmp, metaName), imageMeta{1, i}); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	folder := filepath.Join(p.root, imagesName)
	p.mu.Lock()
	defer p.mu.Unlock()
	// Pools of earlier versions have no such folder.
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	p.step("image: place")
	if err := os.Rename(tmp, filepath.Join(folder, id)); err != nil {
		return err
	}
	p.step("image: renamed")
	i.AllocatedBytes, i.UsedAt = allocated(filepath.Join(folder, id, dataName)), time.Now()
	p.images[id] = i
	room.done()
	if err := errors.Join(syncDir(p.root), syncDir(folder), syncDir(filepath.Dir(tmp))); err != nil {
		return err
	}
	p.step("image: synced")
	return nil
}

func (p *Pool) makeImage(path string, bytes int64, from *os.File, parts []device.Mapped) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(bytes); err != nil {
		return err
	}
	for _, part := range parts {
		if err := cloneRange(f, from, part); err != nil {
			return err
		}
		p.step("image: shared")
	}
	return f.Sync()
}

func cloneRange(dst, src *os.File, m device.Mapped) error {
	err := unix.IoctlFileCloneRange(int(dst.Fd()), &unix.FileCloneRange{
		Src_fd: int64(src.Fd()), Src_offset: uint64(m.Physical), Src_length: uint64(m.Length), Dest_offset: uint64(m.Logical),
	})
	if err != nil {
		return fmt.Errorf("share %d bytes of %s: %w", m.Length, src.Name(), err)
	}
	return nil
}

// reserveImage takes room for an image of so many bytes from older ones and from
// what nobody has. Nil: there is none, or the image is kept already.
func (p *Pool) reserveImage(id string, bytes int64) (*reservation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.images[id]; ok || p.cfg.CachePercent <= 0 {
		return nil, nil
	}
	s, err := p.stats()
	if err != nil {
		return nil, err
	}
	limit := s.TotalBytes / 100 * int64(p.cfg.CachePercent)
	if bytes > min(limit, s.AvailableBytes) {
		return nil, nil
	}
	if err := p.giveBack(max(bytes-s.spare, p.cachedBytes()+bytes-limit)); err != nil {
		return nil, err
	}
	p.pending += bytes
	return &reservation{p, bytes}, nil
}

// Trim evicts images until no room is missing for what volumes may still write;
// others may write to the filesystem below.
func (p *Pool) Trim() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.images) == 0 {
		return nil
	}
	s, err := p.stats()
	if err != nil {
		return err
	}
	return p.giveBack(-s.spare)
}

func (p *Pool) cachedBytes() (n int64) {
	for _, i := range p.images {
		n += i.AllocatedBytes
	}
	return n
}

// giveBack evicts images, those first that were not used for longest, until they
// held so many bytes. It is called with mu held.
func (p *Pool) giveBack(bytes int64) error {
	for bytes > 0 && len(p.images) > 0 {
		oldest := ""
		for id, i := range p.images {
			if oldest == "" || i.UsedAt.Before(p.images[oldest].UsedAt) {
				oldest = id
			}
		}
		bytes -= p.images[oldest].AllocatedBytes
		if err := p.evict(oldest); err != nil {
			return fmt.Errorf("pool %s: make room: %w", p.cfg.Name, err)
		}
	}
	return nil
}

// evict removes an image; who has it open goes on reading. It is called with mu held.
func (p *Pool) evict(id string) error {
	trash := filepath.Join(p.root, trashName, id)
	if err := os.RemoveAll(trash); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(p.root, imagesName, id), trash); err != nil {
		return err
	}
	p.step("evict: renamed")
	delete(p.images, id)
	p.counts.Evictions++
	if err := os.RemoveAll(trash); err != nil {
		return err
	}
	p.step("evict: removed")
	return nil
}

// cachedAlone is what the images hold and nobody else, in bytes.
func (p *Pool) cachedAlone() (n int64) {
	for id := range p.images {
		_ = p.imageExtents(id, func(m device.Mapped) { // unknown counts as shared
			if !m.Shared {
				n += m.Length
			}
		})
	}
	return n
}
