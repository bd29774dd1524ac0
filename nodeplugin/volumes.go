package nodeplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// usePool returns the pool of that name and UUID ("": whatever it is). One that
// has come since the start is put in order first.
func (s *Stager) usePool(ctx context.Context, name, uuid string) (*pool.Pool, error) {
	p, came, err := s.pools.named(ctx, name, uuid)
	if !came {
		return p, err
	}
	for _, q := range s.pools {
		if q.Name() != name {
			continue
		}
		report, rerr := s.reconcilePool(ctx, q)
		for _, line := range report {
			s.log.Info("put in order", "what", line)
		}
		err = errors.Join(err, rerr)
		for _, v := range q.List() {
			s.changes.tell(v.ID)
		}
	}
	s.changes.tell("")
	return p, err
}

// LookForPools looks again for pools that were not there or could not be used.
func (s *Stager) LookForPools(ctx context.Context) error {
	var errs []error
	for _, p := range s.pools {
		if p.Problem() != "" {
			_, err := s.usePool(ctx, p.Name(), "")
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Create makes a volume in a pool. The pool itself is made with the first
// volume, unless uuid says that there is one somewhere.
func (s *Stager) Create(ctx context.Context, poolName, uuid string, spec pool.Spec) error {
	p, err := s.usePool(ctx, poolName, uuid)
	if err != nil {
		return err
	}
	release, err := s.hold(spec.ID, "create")
	if err != nil {
		return err
	}
	defer release()
	if p.UUID() == "" {
		if err := p.Make(ctx); err != nil {
			return fmt.Errorf("make pool %s: %w", poolName, classed(err))
		}
		s.changes.tell("")
	}
	if _, err := p.Get(spec.ID); errors.Is(err, pool.ErrNotFound) && spec.From != "" {
		thaw, err := s.quiesce(p, spec.From)
		if err != nil {
			return fmt.Errorf("create volume %s from %s: %w", spec.ID, spec.From, err)
		}
		defer thaw()
	}
	if _, err := p.Create(ctx, spec); err != nil {
		return fmt.Errorf("create volume %s: %w", spec.ID, classed(err))
	}
	return nil
}

// quiesce makes the file of a populated volume or snapshot hold what its users
// have written, and keeps it so until thaw is called. It holds the volume.
func (s *Stager) quiesce(p *pool.Pool, id string) (thaw func(), err error) {
	release, err := s.hold(id, "copy")
	if err != nil {
		return nil, err
	}
	thaw = release
	defer func() {
		if err != nil {
			release()
		}
	}()
	v, err := p.Get(id)
	if err != nil {
		return nil, classed(err)
	}
	if v.State != pool.Populated {
		return nil, fmt.Errorf("%s is not populated: %w", id, csi.ErrPrecondition)
	}
	s.mu.Lock()
	l := s.loops[id]
	s.mu.Unlock()
	if l == nil {
		return thaw, nil
	}
	if v.Mode == pool.Block {
		// What was written through the page cache of the device.
		f, err := os.Open(l.Path())
		if err != nil {
			return nil, err
		}
		defer f.Close()
		if err := f.Sync(); err != nil {
			return nil, fmt.Errorf("flush %s: %w", l.Path(), err)
		}
		return thaw, nil
	}
	at, err := mountsOf(l)
	if err != nil || len(at) == 0 {
		return thaw, err
	}
	if err := device.Freeze(at[0]); err != nil {
		return nil, classed(err)
	}
	return func() {
		defer release()
		if err := device.Thaw(at[0]); err != nil {
			s.log.Error("a volume's filesystem stays frozen", "volume", id, "error", err)
		}
	}, nil
}

// Snapshot shares the blocks of a populated volume under a new id.
func (s *Stager) Snapshot(ctx context.Context, id, volume string) error {
	p, found, err := s.pools.find(volume)
	if err != nil {
		return err
	}
	if found.Snapshot {
		return fmt.Errorf("snapshot %s: %s is a snapshot itself: %w", id, volume, csi.ErrInvalid)
	}
	release, err := s.hold(id, "create")
	if err != nil {
		return err
	}
	defer release()
	if _, err := p.Get(id); errors.Is(err, pool.ErrNotFound) {
		thaw, err := s.quiesce(p, volume)
		if err != nil {
			return fmt.Errorf("snapshot %s of %s: %w", id, volume, err)
		}
		defer thaw()
	}
	if _, err := p.Snapshot(ctx, id, volume); err != nil {
		return fmt.Errorf("snapshot %s of %s: %w", id, volume, classed(err))
	}
	return nil
}

// Delete removes a volume or a snapshot; its transfer is ended first. What is
// unknown is removed already, unless it may be in a pool that is not there.
// poolName and uuid may be "".
func (s *Stager) Delete(ctx context.Context, id, poolName, uuid string) error {
	if poolName != "" {
		if _, err := s.usePool(ctx, poolName, uuid); err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
	}
	release, err := s.hold(id, "delete")
	if err != nil {
		return err
	}
	defer release()
	p, v, err := s.pools.find(id)
	if errors.Is(err, csi.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if j := s.job(id); j != nil {
		if err := s.stop(ctx, j); err != nil {
			return fmt.Errorf("delete volume %s: end its transfer: %w", id, err)
		}
	}
	if err := s.freeLoops(ctx, v); err != nil {
		return fmt.Errorf("delete volume %s: %w", id, classed(err))
	}
	if err := p.Delete(ctx, id); err != nil && !errors.Is(err, pool.ErrNotFound) {
		return fmt.Errorf("delete %s: %w", id, classed(err))
	}
	s.mu.Lock()
	delete(s.wanted, id)
	s.mu.Unlock()
	s.changes.tell("")
	return nil
}

// freeLoops takes away the loop devices of a volume that nobody sees; one that
// is seen somewhere is ErrPrecondition.
func (s *Stager) freeLoops(ctx context.Context, v pool.Volume) error {
	loops, err := device.FindLoops(identity(v))
	if err != nil {
		return err
	}
	for i, l := range loops {
		at, err := mountsOf(l)
		if err == nil && len(at) > 0 {
			where := at[0]
			if filepath.Base(where) == deviceName {
				where = filepath.Dir(where)
			}
			err = fmt.Errorf("it is in use at %s: %w", where, csi.ErrPrecondition)
		}
		if err != nil {
			for _, l := range loops[i:] {
				l.Close()
			}
			return err
		}
		s.drop(v.ID)
		if err := detach(ctx, l); err != nil {
			return err
		}
	}
	return nil
}

// ExpandStorage gives a volume more bytes; one that is staged shows them at once.
func (s *Stager) ExpandStorage(ctx context.Context, id string, bytes int64) error {
	release, err := s.hold(id, "expand")
	if err != nil {
		return err
	}
	defer release()
	p, v, err := s.find(id)
	if err != nil {
		return err
	}
	if v.State != pool.Populated {
		return fmt.Errorf("expand volume %s: it awaits its data: expand it when it is populated: %w", id, csi.ErrPrecondition)
	}
	if v, err = p.Expand(ctx, id, bytes); err != nil {
		return fmt.Errorf("expand volume %s: %w", id, classed(err))
	}
	err = s.grow(ctx, v)
	if errors.Is(err, device.ErrMounted) {
		return nil // the storage has grown; the filesystem does when it is next staged
	}
	return classed(err)
}
