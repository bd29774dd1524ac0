package nodeplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// stageWait is how long Stage waits for data. The kubelet gives a call two
// minutes; an answer before that lets it unstage when the pod is gone.
const stageWait = 90 * time.Second

// answerMargin is kept of a call's deadline for the answer itself.
const answerMargin = 2 * time.Second

// detachWait bounds the wait for the last user of a loop device.
const detachWait = 20 * time.Second

// changedWait bounds the wait for a loop device that a tenant has changed.
const changedWait = time.Second

// deviceName is the file in a Block volume's staging folder that shows its device.
const deviceName = "device"

// filler fills one target to the end: it returns nil, a terminal fault, or the
// context's error.
type filler interface {
	Fill(ctx context.Context, job Job, report func(Progress)) (Result, error)
}

// Config is what a Stager needs.
type Config struct {
	Pools []pool.Config
	// Fill runs transfers; *Filler does.
	Fill filler
	Log  *slog.Logger
	// StageWait is how long Stage waits for data; 0 means 90 seconds.
	StageWait time.Duration
}

// Stager keeps the life of each volume on this node: empty, filling, populated,
// staged. What must survive a crash is in the pool's metadata; whether a volume
// is staged is read from the kernel's own tables of loop devices and mounts, so
// that no record can disagree with them.
type Stager struct {
	cfg   Config
	log   *slog.Logger
	pools pools
	// life ends with Close; transfers run in it, not in the calls that ask for them.
	life context.Context
	end  context.CancelFunc

	changes changes

	mu sync.Mutex
	// held says which deed has a volume to itself.
	held map[string]holder
	jobs map[string]*job
	// wanted holds the volumes whose data the kubelet waits for.
	wanted map[string]bool
	// loops are the descriptors kept of staged volumes.
	loops map[string]*device.Loop
}

// New opens the pools and puts in order what an earlier life left behind: loop
// devices, mounts and journals of which nobody makes use. The report tells what
// that was. Transfers are not resumed: their credentials are gone, and the
// controller asks again.
func New(ctx context.Context, cfg Config) (*Stager, []string, error) {
	if cfg.StageWait == 0 {
		cfg.StageWait = stageWait
	}
	s := &Stager{
		cfg: cfg, log: cfg.Log,
		held: map[string]holder{}, jobs: map[string]*job{}, wanted: map[string]bool{}, loops: map[string]*device.Loop{},
	}
	s.life, s.end = context.WithCancel(context.WithoutCancel(ctx))
	var report []string
	var err error
	if s.pools, err = openPools(ctx, cfg.Pools); err == nil {
		report, err = s.reconcile(ctx)
	}
	if err != nil {
		s.end()
		return nil, nil, err
	}
	return s, report, nil
}

// Close ends all transfers, waits until they have let go, and leaves staged
// volumes as they are.
func (s *Stager) Close() {
	s.end()
	s.mu.Lock()
	var running []*job
	for _, j := range s.jobs {
		running = append(running, j)
	}
	s.mu.Unlock()
	for _, j := range running {
		<-j.done
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, l := range s.loops {
		l.Close()
		delete(s.loops, id)
	}
}

// Shut is Close, and unmounts the pools; a plugin that only restarts must not.
func (s *Stager) Shut(ctx context.Context) error {
	s.Close()
	var errs []error
	for _, p := range s.pools {
		errs = append(errs, p.Close(ctx))
	}
	return errors.Join(errs...)
}

// holder is who has a volume to itself.
type holder struct {
	deed string
	// giveWay, if it is set, is called when another deed wants the volume.
	giveWay func()
}

// hold gives the caller the volume to itself until it calls release. A volume
// that somebody else holds is ErrBusy at once.
func (s *Stager) hold(id, deed string) (release func(), err error) {
	return s.holdAs(id, holder{deed: deed})
}

func (s *Stager) holdAs(id string, h holder) (release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if by, ok := s.held[id]; ok {
		if by.giveWay != nil && by.deed != h.deed {
			by.giveWay()
		}
		return nil, fmt.Errorf("%s volume %s: %s is under way: %w", h.deed, id, by.deed, csi.ErrBusy)
	}
	s.held[id] = h
	return func() {
		s.mu.Lock()
		delete(s.held, id)
		s.mu.Unlock()
		s.changes.tell(id)
	}, nil
}

// find looks a volume up in the pools. While a pool is missing, a volume that
// is in no other may be in that one: then the error is ErrUnavailable.
func (s *Stager) find(id string) (*pool.Pool, pool.Volume, error) {
	p, v, err := s.pools.find(id)
	if err == nil && v.Snapshot {
		err = fmt.Errorf("volume %s: it is a snapshot: %w", id, csi.ErrNotFound)
	}
	return p, v, err
}

// Stage puts a volume in place at path; see csi.Stager.
func (s *Stager) Stage(ctx context.Context, id, path string, u csi.Use) error {
	if err := s.awaitData(ctx, id, u); err != nil {
		return err
	}
	release, err := s.hold(id, "stage")
	if err != nil {
		return err
	}
	defer release()
	p, v, err := s.find(id) // again: it may have been deleted while we waited
	if err != nil {
		return err
	}
	if v.State != pool.Populated {
		return fmt.Errorf("stage volume %s: its data was taken away: %w", id, csi.ErrBusy)
	}
	if v.Mode == pool.Block {
		err = s.stageBlock(ctx, v, path, u)
	} else {
		err = s.stageFilesystem(ctx, p, v, path, u)
	}
	if err != nil {
		return fmt.Errorf("stage volume %s: %w", id, classed(err))
	}
	s.mu.Lock()
	delete(s.wanted, id)
	s.mu.Unlock()
	return nil
}

func checkUse(v pool.Volume, u csi.Use) error {
	if string(v.Mode) != string(u.Mode) {
		return fmt.Errorf("volume %s is of mode %s, not %s: %w", v.ID, v.Mode, u.Mode, csi.ErrInvalid)
	}
	if v.Mode == pool.Filesystem && u.FSType != "" && u.FSType != v.FSType {
		return fmt.Errorf("volume %s was made for %s, not %s: %w", v.ID, v.FSType, u.FSType, csi.ErrInvalid)
	}
	return nil
}

// awaitData returns nil once the volume is populated.
func (s *Stager) awaitData(ctx context.Context, id string, u csi.Use) error {
	_, v, err := s.find(id)
	if err != nil {
		return err
	}
	if err := checkUse(v, u); err != nil {
		return err
	}
	if v.State == pool.Populated {
		return nil
	}
	release, err := s.hold("data of "+id, "stage")
	if err != nil {
		return err
	}
	defer release()
	watch := s.changes.subscribe()
	defer watch.stop()
	s.mu.Lock()
	s.wanted[id] = true
	s.mu.Unlock()
	s.changes.tell(id)

	wait := s.cfg.StageWait
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(deadline)-answerMargin)
	}
	limit := time.NewTimer(max(wait, 0))
	defer limit.Stop()
	for {
		_, v, err := s.find(id)
		if err != nil {
			return err
		}
		switch {
		case v.State == pool.Populated:
			return nil
		case v.Failure != nil && v.Failure.Terminal && s.job(id) == nil:
			s.mu.Lock()
			delete(s.wanted, id)
			s.mu.Unlock()
			return fmt.Errorf("stage volume %s: its data can't come: %s: %s: %w", id, v.Failure.Reason, v.Failure.Message, csi.ErrPrecondition)
		}
		select {
		case <-watch.ready:
			watch.take()
		case <-limit.C:
			return fmt.Errorf("stage volume %s: %s: %w", id, s.progressLine(id), csi.ErrBusy)
		case <-ctx.Done():
			return fmt.Errorf("stage volume %s: %s: %w: %w", id, s.progressLine(id), context.Cause(ctx), csi.ErrBusy)
		}
	}
}

// classed gives an error from below its csi kind.
func classed(err error) error {
	for _, c := range []struct{ from, to error }{
		{pool.ErrNotFound, csi.ErrNotFound},
		{pool.ErrExists, csi.ErrExists},
		{pool.ErrFull, csi.ErrFull},
		{pool.ErrBusy, csi.ErrBusy},
		{pool.ErrInUse, csi.ErrPrecondition},
		{pool.ErrNotPopulated, csi.ErrPrecondition},
		{pool.ErrInvalid, csi.ErrInvalid},
		{pool.ErrUnavailable, csi.ErrUnavailable},
		{pool.ErrNoPool, csi.ErrUnavailable},
		{device.ErrBusy, csi.ErrBusy},
		{device.ErrMounted, csi.ErrPrecondition},
		{device.ErrOption, csi.ErrInvalid},
	} {
		if errors.Is(err, c.from) && !errors.Is(err, c.to) {
			return fmt.Errorf("%w: %w", err, c.to)
		}
	}
	return err
}

// Unstage takes a volume away from path; see csi.Stager. A transfer goes on.
func (s *Stager) Unstage(ctx context.Context, id, path string) error {
	release, err := s.hold(id, "unstage")
	if err != nil {
		return err
	}
	defer release()
	s.mu.Lock()
	delete(s.wanted, id)
	s.mu.Unlock()
	_, v, err := s.find(id)
	if errors.Is(err, csi.ErrNotFound) {
		return s.clearPath(path)
	}
	if err != nil {
		return err
	}
	if v.State != pool.Populated {
		return nil // a transfer's devices are its own
	}
	loops, err := device.FindLoops(identity(v))
	if err != nil {
		return err
	}
	defer func() {
		for _, l := range loops {
			l.Close()
		}
	}()
	for _, l := range loops {
		at, err := mountsOf(l)
		if err != nil {
			return err
		}
		for _, m := range at {
			if m != path && m != filepath.Join(path, deviceName) {
				return fmt.Errorf("unstage volume %s: it is still at %s: %w", id, m, csi.ErrBusy)
			}
		}
	}
	if err := s.clearPath(path); err != nil {
		return classed(err)
	}
	s.drop(id)
	for _, l := range loops {
		if err := detach(ctx, l); err != nil {
			return fmt.Errorf("unstage volume %s: %w", id, classed(err))
		}
	}
	return nil
}

// clearPath undoes what Stage made at a staging path, whatever the mode was.
func (s *Stager) clearPath(path string) error {
	file := filepath.Join(path, deviceName)
	if mounted, err := device.IsMounted(path); err == nil && !mounted {
		if shown, err := device.IsMounted(file); err == nil && shown {
			if err := device.Unmount(file); err != nil {
				return err
			}
			if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return device.Unmount(path)
}
