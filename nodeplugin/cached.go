package nodeplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/blockcopy"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/pool"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// errCached ends a mover that has shown what the source holds: the node has it.
var errCached = errors.New("the node has the disk in its cache")

// imageKey is the key of what an order fetches, and whether it has one (R16): a
// validator that is weak stands for nothing. Who gets to know the validator has
// opened the source with the claim's own credentials. An order with a checksum gets
// only what that checksum has proved.
func imageKey(o Order, v source.Validator) (pool.ImageKey, bool) {
	k := pool.ImageKey{Scope: o.Owner, Locator: strings.Join([]string{o.Recipe.Source.Kind, o.Recipe.Digest, strings.ToLower(o.Recipe.Checksum)}, " "), Validator: v.Digest}
	if v.Digest == "" {
		k.Validator = fmt.Sprintf("%d:%s", v.Size, v.ETag)
	}
	return k, v.Strong() && o.Owner != "" && o.Recipe.Digest != "" && !o.Recipe.Preallocate
}

// useImages lets the job find its disk in the pool's cache.
func (s *Stager) useImages(p *pool.Pool, o Order, work *Job) {
	work.Cached = func(v source.Validator) *pool.CachedImage {
		if k, ok := imageKey(o, v); ok {
			return p.FindImage(k)
		}
		return nil
	}
	work.Spoilt = func(c *pool.CachedImage) {
		if err := p.DropImage(c.ImageKey); err != nil {
			s.log.Warn("a cached image that is of no use stays", "scope", c.Scope, "error", err)
		}
	}
}

// keepImage keeps the disk of a volume that was just filled and that nobody has
// seen yet. The volume is as good without it.
func (s *Stager) keepImage(ctx context.Context, p *pool.Pool, file *os.File, o Order, r Result, parts func() ([]device.Mapped, error)) {
	k, ok := imageKey(o, r.Validator)
	if !ok || r.Cached || r.VirtualSize <= 0 {
		return
	}
	list, err := parts()
	if err == nil {
		err = p.KeepImage(ctx, pool.Image{ImageKey: k, Format: r.Format, VirtualBytes: r.VirtualSize, Digest: r.Digest, Warnings: r.Warnings}, file, list)
	}
	if err != nil && ctx.Err() == nil {
		s.log.Info("the image is not kept for the next import", "error", err)
	}
}

// wholeFile is where the disk of a Block volume lies in its file.
func wholeFile(r Result) func() ([]device.Mapped, error) {
	return func() ([]device.Mapped, error) {
		return []device.Mapped{{Length: (r.VirtualSize + imageUnit - 1) / imageUnit * imageUnit}}, nil
	}
}

// imageUnit is the block of pools: what shares blocks starts and ends with one.
const imageUnit = 4096

// withinVolume is where the disk in img lies in the file of the volume whose
// filesystem img is on: the filesystem's device is that file.
func withinVolume(img *os.File, r Result) func() ([]device.Mapped, error) {
	return func() ([]device.Mapped, error) {
		var parts []device.Mapped
		end := (r.VirtualSize + imageUnit - 1) / imageUnit * imageUnit
		err := device.Extents(img, func(m device.Mapped) error {
			m.Length = min(m.Length, end-m.Logical)
			switch {
			case m.Unwritten || m.Length <= 0:
				return nil
			case !m.Plain || (m.Logical|m.Physical|m.Length)%imageUnit != 0:
				return fmt.Errorf("%s has %d bytes at %d that can't be shared", img.Name(), m.Length, m.Logical)
			}
			parts = append(parts, m)
			return nil
		})
		return parts, err
	}
}

// find looks for what the mover has found in the cache, as long as the target is
// what it was at first.
func (r *filling) find(f mover.Facts) bool {
	if r.job.Cached == nil || r.spoilt || r.journal.Validator != nil || !r.journal.Zeroed {
		return false
	}
	hit := r.job.Cached(f.Validator)
	if hit == nil {
		return false
	}
	if hit.VirtualBytes > r.job.TargetBytes {
		_ = hit.Close() // nothing was written to it
		return false    // the mover words it better
	}
	r.hit = hit
	r.tell(func(p *Progress) {
		r.facts = f
		r.facts.Warnings = hit.Warnings
		p.Phase, p.Format, p.BytesTotal, p.VirtualSize = PhaseCopying, hit.Format, hit.VirtualBytes, hit.VirtualBytes
	})
	return true
}

// fromCache fills the target with what Began found. Until that is recorded as
// complete the target is recorded as soiled: a crash between begins again.
func (r *filling) fromCache(ctx context.Context) error {
	hit := r.hit
	r.hit = nil
	defer hit.Close()
	validator, err := json.Marshal(r.facts.Validator)
	if err != nil {
		return err
	}
	r.journal = &journal.Journal{Target: r.journal.Target, Recipe: r.journal.Recipe, Bytes: r.journal.Bytes, VirtualBytes: -1, Restarts: r.journal.Restarts, Read: r.journal.Read, Soiled: true}
	if err := r.save(); err != nil {
		return err
	}
	err = hit.CloneTo(r.job.Target)
	if errors.Is(err, unix.EXDEV) { // a disk.img
		err = r.copyImage(ctx, hit)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil {
		err = r.job.Target.Sync()
	}
	if err != nil {
		if !errors.Is(err, unix.ENOSPC) {
			r.spoilt = true
			r.job.Spoilt(hit)
		}
		return targetFault(fmt.Errorf("take the disk from the node's cache: %w", err))
	}
	r.log.Info("the disk came from the node's cache", "bytes", hit.VirtualBytes)
	r.tell(func(p *Progress) { p.Phase = PhaseFinishing })
	r.journal.Validator, r.journal.Format, r.journal.VirtualBytes, r.journal.Digest = validator, hit.Format, hit.VirtualBytes, hit.Digest
	r.journal.Soiled, r.journal.Complete, r.journal.Cached = false, true, true
	r.journal.Done.Add(0, hit.VirtualBytes)
	return r.save()
}

// copyImage writes the image's data to the target, which reads as zeros.
func (r *filling) copyImage(ctx context.Context, hit *pool.CachedImage) error {
	src, err := device.NewFile(hit.File, (hit.VirtualBytes+imageUnit-1)/imageUnit*imageUnit)
	if err != nil {
		return err
	}
	return r.onTarget(func(dst *device.File) error {
		var done int64
		return blockcopy.Copy(ctx, dst, src, blockcopy.Options{KnownZero: true, Progress: func(n int64) {
			done += n
			r.Moved(min(done, hit.VirtualBytes), 0)
		}})
	})
}

// TrimCaches has the pools give up images where others took the room for volumes.
func (s *Stager) TrimCaches() error {
	var errs []error
	for _, p := range s.pools {
		errs = append(errs, p.Trim())
	}
	return errors.Join(errs...)
}

// CacheStats tells how each pool's images fare, by the pool's name.
func (s *Stager) CacheStats() map[string]pool.CacheStats {
	stats := map[string]pool.CacheStats{}
	for _, p := range s.pools {
		stats[p.Name()] = p.CacheStats()
	}
	return stats
}
