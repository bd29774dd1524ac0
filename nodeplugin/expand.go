package nodeplugin

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// Expand grows what the kubelet sees of a volume to its capacity; see csi.Stager.
func (s *Stager) Expand(ctx context.Context, id, path string) (int64, error) {
	release, err := s.hold(id, "expand")
	if err != nil {
		return 0, err
	}
	defer release()
	_, v, err := s.find(id)
	if err != nil {
		return 0, err
	}
	if err := s.at(v, path); err != nil {
		return 0, err
	}
	return v.Bytes, classed(s.grow(ctx, v))
}

// grow grows loop device and filesystem of a staged volume; of one that is not
// staged nothing is asked: Stage grows it.
func (s *Stager) grow(ctx context.Context, v pool.Volume) error {
	s.mu.Lock()
	l := s.loops[v.ID]
	s.mu.Unlock()
	if l == nil {
		return nil
	}
	if err := l.Grow(); err != nil {
		return fmt.Errorf("expand volume %s: %w", v.ID, err)
	}
	if v.Mode == pool.Block {
		return nil
	}
	at, err := mountsOf(l)
	if err != nil {
		return err
	}
	if len(at) == 0 {
		return nil
	}
	if err := device.GrowFS(ctx, l.Path(), at[0], v.FSType); err != nil {
		return fmt.Errorf("expand volume %s: %w", v.ID, err)
	}
	return nil
}

// at is nil when the staged volume is at path.
func (s *Stager) at(v pool.Volume, path string) error {
	s.mu.Lock()
	l := s.loops[v.ID]
	s.mu.Unlock()
	if l != nil {
		at, err := mountsOf(l)
		if err != nil {
			return err
		}
		for _, m := range at {
			if m == path || m == filepath.Join(path, deviceName) {
				return nil
			}
		}
	}
	return fmt.Errorf("volume %s is not at %s: %w", v.ID, path, csi.ErrNotFound)
}

// Stats tells the usage of a volume; see csi.Stager.
func (s *Stager) Stats(_ context.Context, id, path string) (csi.Stats, error) {
	_, v, err := s.find(id)
	if err != nil {
		return csi.Stats{}, err
	}
	if err := s.at(v, path); err != nil {
		return csi.Stats{}, err
	}
	if v.Mode == pool.Block {
		return csi.Stats{TotalBytes: v.Bytes}, nil
	}
	u, err := device.Stats(path)
	if err != nil {
		return csi.Stats{}, err
	}
	return csi.Stats(u), nil
}
