package pool

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// FullError says how much was asked of a pool that has less. It is ErrFull.
type FullError struct {
	Pool string
	// Need and Free are bytes; Free is what a new volume may have at most.
	Need, Free int64
}

func (e *FullError) Error() string {
	return fmt.Sprintf("pool %s: %d bytes needed, %d free: delete volumes or snapshots, or make the pool larger", e.Pool, e.Need, e.Free)
}

// Is makes the error an ErrFull.
func (e *FullError) Is(target error) bool { return target == ErrFull }

// Stats are a pool's figures in bytes.
type Stats struct {
	TotalBytes int64
	// ProvisionedBytes is what volumes may grow to and snapshots hold, in sum.
	ProvisionedBytes int64
	// AvailableBytes is what one new volume may have at most, after the reserve;
	// cached images make way.
	AvailableBytes int64
	// BackingFree is what is free on the filesystem below.
	BackingFree int64
	// spare is what would be available without evicting an image; it may be
	// negative.
	spare int64
}

// Stats tells the pool's figures; those of a pool that is not made yet are what
// it would have.
func (p *Pool) Stats() (Stats, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.problem != "" {
		return Stats{}, fmt.Errorf("pool %s: %s: %w", p.cfg.Name, p.problem, ErrUnavailable)
	}
	return p.stats()
}

// stats is called with mu held.
func (p *Pool) stats() (Stats, error) {
	if p.uuid == "" {
		return p.expected()
	}
	if err := p.writable(); err != nil {
		return Stats{}, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(p.root, &st); err != nil {
		return Stats{}, fmt.Errorf("pool %s: free space of %s: %w", p.cfg.Name, p.root, err)
	}
	s := Stats{TotalBytes: int64(st.Blocks) * st.Bsize, BackingFree: int64(st.Bavail) * st.Bsize}
	if p.usable != 0 {
		s.TotalBytes = p.usable
	}
	unwritten := int64(0)
	for _, v := range p.volumes {
		if v.Snapshot {
			s.ProvisionedBytes += v.AllocatedBytes
			continue
		}
		s.ProvisionedBytes += charge(v.Bytes)
		if p.image == "" {
			unwritten += max(0, v.Bytes-allocated(v.Path))
		}
	}
	for _, bytes := range p.lost {
		s.ProvisionedBytes += bytes
	}
	s.ProvisionedBytes += p.pending
	reserve := s.TotalBytes / 100 * reservePercent
	s.AvailableBytes = s.TotalBytes - reserve - s.ProvisionedBytes
	if p.image == "" {
		// Others write to this filesystem too.
		if free := s.BackingFree - unwritten - p.pending - reserve; free < s.AvailableBytes {
			s.AvailableBytes = min(s.AvailableBytes, free+p.cachedAlone())
		}
	} else {
		free, err := freeBytes(p.cfg.Dir)
		if err != nil {
			return Stats{}, err
		}
		s.BackingFree = free
		// Discarded blocks of the pool file went back to the filesystem below,
		// and others may have taken them.
		if size, err := os.Stat(p.image); err == nil {
			s.AvailableBytes -= max(0, size.Size()-allocated(p.image)-free)
		}
	}
	s.spare = s.AvailableBytes - p.cachedBytes()
	s.AvailableBytes = max(0, s.AvailableBytes) / extentBytes * extentBytes
	return s, nil
}

// charge is what a volume of that many bytes may come to take: whole extents.
func charge(bytes int64) int64 { return (bytes + extentBytes - 1) / extentBytes * extentBytes }

// expected is what Make would give.
func (p *Pool) expected() (Stats, error) {
	dir := p.cfg.Dir
	for {
		ok, err := exists(dir)
		if err != nil {
			return Stats{}, err
		}
		if ok {
			break
		}
		dir = filepath.Dir(dir)
	}
	free, err := freeBytes(dir)
	if err != nil {
		return Stats{}, err
	}
	reflinks, err := hasReflinks(dir)
	if err != nil {
		return Stats{}, err
	}
	total := p.cfg.Bytes
	if reflinks {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return Stats{}, err
		}
		total = int64(st.Blocks) * st.Bsize
	} else if free < total {
		return Stats{TotalBytes: total, BackingFree: free}, nil
	}
	if !reflinks {
		// XFS takes a log of 64 MiB at least, and some for its tables.
		total -= max(64<<20, total/100) + total/10
	}
	available := min(total, free) - total/100*reservePercent
	return Stats{TotalBytes: total, BackingFree: free, AvailableBytes: max(0, available) / extentBytes * extentBytes}, nil
}

func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// allocated is what a file holds in bytes, its shared blocks included; 0 when it is gone.
func allocated(path string) int64 {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}
