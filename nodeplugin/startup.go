package nodeplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// reconcile compares the metadata of all volumes with the kernel's tables, takes
// away what is of no use, and takes staged volumes over.
func (s *Stager) reconcile(ctx context.Context) (report []string, err error) {
	for _, p := range s.pools {
		r, err := s.reconcilePool(ctx, p)
		report = append(report, r...)
		if err != nil {
			return report, err
		}
	}
	return report, nil
}

func (s *Stager) reconcilePool(ctx context.Context, p *pool.Pool) (report []string, err error) {
	report = p.Repairs()
	for _, v := range p.List() {
		if v.Snapshot {
			continue
		}
		loops, err := device.FindLoops(identity(v))
		if err != nil {
			return report, err
		}
		for _, l := range loops {
			did, err := s.adopt(ctx, v, l)
			if err != nil {
				// One volume in disorder must not keep the others away.
				did = fmt.Sprintf("volume %s: %s could not be put in order: %v", v.ID, l.Path(), err)
			}
			if did != "" {
				report = append(report, did)
			}
		}
		if v.State != pool.Populated {
			continue
		}
		if _, err := os.Stat(p.JournalPath(v.ID)); err == nil {
			if err := journal.Remove(p.JournalPath(v.ID)); err != nil {
				return report, err
			}
			report = append(report, fmt.Sprintf("volume %s: removed the journal of its finished transfer", v.ID))
		} else if !errors.Is(err, fs.ErrNotExist) {
			return report, err
		}
	}
	return report, nil
}

// adopt takes over the loop device of a staged volume, and detaches any other.
func (s *Stager) adopt(ctx context.Context, v pool.Volume, l *device.Loop) (did string, err error) {
	at, err := mountsOf(l)
	if err != nil {
		l.Close()
		return "", err
	}
	path := l.Path()
	if len(at) == 0 || v.State != pool.Populated {
		for _, m := range at {
			if err := device.Unmount(m); err != nil {
				l.Close()
				return "", err
			}
		}
		if err := detach(ctx, l); err != nil {
			return "", err
		}
		return fmt.Sprintf("volume %s: detached %s, which nobody used", v.ID, path), nil
	}
	s.mu.Lock()
	known := s.loops[v.ID] != nil
	s.mu.Unlock()
	if known {
		// The replacement of a device that a tenant had changed is the later one.
		s.log.Warn("a volume is seen through two loop devices", "volume", v.ID, "device", path)
	}
	s.keep(v.ID, l)
	if v.Mode == pool.Filesystem {
		// A snapshot may have been cut off with the filesystem frozen.
		if err := device.Thaw(at[0]); err != nil {
			return "", err
		}
	}
	return "", nil
}
