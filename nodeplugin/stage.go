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

	"golang.org/x/sys/unix"

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
	held map[string]string
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
		held: map[string]string{}, jobs: map[string]*job{}, wanted: map[string]bool{}, loops: map[string]*device.Loop{},
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

// hold gives the caller the volume to itself until it calls release. A volume
// that somebody else holds is ErrBusy at once.
func (s *Stager) hold(id, deed string) (release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if by, ok := s.held[id]; ok {
		return nil, fmt.Errorf("%s volume %s: %s is under way: %w", deed, id, by, csi.ErrBusy)
	}
	s.held[id] = deed
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

// open opens the volume's file.
func open(v pool.Volume, readOnly bool) (*os.File, error) {
	if readOnly {
		return os.Open(v.Path)
	}
	return os.OpenFile(v.Path, os.O_RDWR, 0)
}

// loopFor returns a loop device on the volume's file that shows it as it is: one
// that is there, or a new one. Of those that are there and do not (a tenant may
// have changed them) the idle are taken away. made tells of a new one.
func loopFor(ctx context.Context, file *os.File, o device.LoopOptions) (l *device.Loop, made bool, err error) {
	loops, err := device.FindLoopsOf(file)
	if err != nil {
		return nil, false, err
	}
	for _, found := range loops {
		switch err := found.Verify(file, o); {
		case err == nil && l == nil:
			l = found
		case found.Free():
			// Told to go, it goes with its last user, who may be a tenant.
			dctx, cancel := context.WithTimeout(ctx, changedWait)
			err := found.Detach(dctx)
			cancel()
			if err != nil && !errors.Is(err, device.ErrBusy) {
				return nil, false, err
			}
		default:
			found.Close()
		}
	}
	if l != nil {
		return l, false, nil
	}
	l, err = device.AttachLoop(file, o)
	return l, true, err
}

// detach detaches even when the call that wants it has ended: a device that
// stays behind is worse than an answer that comes late.
func detach(ctx context.Context, l *device.Loop) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), detachWait)
	defer cancel()
	return l.Detach(ctx)
}

// keep keeps the descriptor of a staged volume's loop device, so that the device
// can't go away under a tenant's ioctl while the volume is staged.
func (s *Stager) keep(id string, l *device.Loop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.loops[id]; old != nil && old != l {
		old.Close()
	}
	s.loops[id] = l
}

// drop forgets the kept descriptor.
func (s *Stager) drop(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.loops[id]; l != nil {
		l.Close()
		delete(s.loops, id)
	}
}

func (s *Stager) stageBlock(ctx context.Context, v pool.Volume, path string, u csi.Use) error {
	file, err := open(v, u.ReadOnly)
	if err != nil {
		return err
	}
	defer file.Close()
	l, made, err := loopFor(ctx, file, device.LoopOptions{ReadOnly: u.ReadOnly, DirectIO: true})
	if err != nil {
		return err
	}
	err = os.MkdirAll(path, 0o750)
	if err == nil {
		err = showDevice(l, filepath.Join(path, deviceName))
	}
	if err != nil {
		if made {
			return errors.Join(err, detach(ctx, l))
		}
		l.Close()
		return err
	}
	s.keep(v.ID, l)
	return nil
}

// showDevice binds the loop's node to target, a file that it makes. What it
// shows already stays; what it shows wrongly is replaced.
func showDevice(l *device.Loop, target string) error {
	number, err := l.Device()
	if err != nil {
		return err
	}
	mounted, err := device.IsMounted(target)
	if err != nil {
		return err
	}
	if mounted {
		if shown, err := deviceAt(target); err == nil && shown == number {
			return nil
		}
		if err := device.Unmount(target); err != nil {
			return err
		}
	}
	f, err := os.OpenFile(target, os.O_RDONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o640)
	if err != nil {
		return err
	}
	f.Close()
	if err := device.Bind(l.Path(), target, device.BindOptions{Device: true}); err != nil {
		return errors.Join(err, os.Remove(target))
	}
	return nil
}

// deviceAt is the number of the block device whose node lies at path.
func deviceAt(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, fmt.Errorf("%s is no block device", path)
	}
	return st.Rdev, nil
}

func (s *Stager) stageFilesystem(ctx context.Context, p *pool.Pool, v pool.Volume, path string, u csi.Use) error {
	file, err := open(v, false)
	if err != nil {
		return err
	}
	defer file.Close()
	l, made, err := loopFor(ctx, file, device.LoopOptions{DirectIO: true})
	if err != nil {
		return err
	}
	if !made {
		at, err := mountsOf(l)
		if err != nil {
			l.Close()
			return err
		}
		for _, m := range at {
			if m == path {
				s.keep(v.ID, l)
				return nil
			}
		}
		if len(at) > 0 {
			l.Close()
			return fmt.Errorf("it is staged at %s: %w", at[0], csi.ErrPrecondition)
		}
	}
	if err := s.mountFilesystem(ctx, p, v, l, path, u); err != nil {
		return errors.Join(err, detach(ctx, l))
	}
	s.keep(v.ID, l)
	return nil
}

// mountFilesystem makes the filesystem if there is none yet, mounts it and
// grows it to the device. After an error nothing is mounted.
func (s *Stager) mountFilesystem(ctx context.Context, p *pool.Pool, v pool.Volume, l *device.Loop, path string, u csi.Use) error {
	made, err := s.makeFilesystem(ctx, p, v, l)
	if err != nil {
		return err
	}
	if !made {
		// Its log must be replayed, and its errors found, before a pod is.
		repaired, err := device.Fsck(ctx, l.Path(), v.FSType)
		if err != nil {
			return err
		}
		if repaired {
			s.log.Warn("repaired the filesystem of a volume", "volume", v.ID)
		}
	}
	if mounted, err := device.IsMounted(path); err != nil || mounted {
		return errors.Join(err, fmt.Errorf("something else is mounted at %s: %w", path, csi.ErrPrecondition))
	}
	mount := func() error {
		return device.Mount(l.Path(), path, v.FSType, device.MountOptions{ReadOnly: u.ReadOnly, Options: u.MountOptions})
	}
	if err := mount(); err != nil || u.ReadOnly {
		return err
	}
	// A clone may be larger than its source, and an expansion may have come while
	// the volume was not mounted.
	err = device.GrowFS(ctx, l.Path(), path, v.FSType)
	if err == nil {
		return nil
	}
	if uerr := device.Unmount(path); uerr != nil || !errors.Is(err, device.ErrMounted) {
		return errors.Join(err, uerr)
	}
	if err := device.GrowFS(ctx, l.Path(), "", v.FSType); err != nil {
		return err
	}
	return mount()
}

// makeFilesystem runs mkfs on a volume that has none. It never does over
// content that is not its own unfinished work.
func (s *Stager) makeFilesystem(ctx context.Context, p *pool.Pool, v pool.Volume, l *device.Loop) (made bool, err error) {
	f := factsOf(v)
	if f.Filesystem == fsMade {
		return false, nil
	}
	file, err := open(v, true)
	if err != nil {
		return false, err
	}
	defer file.Close()
	empty, err := holdsNothing(file)
	if err != nil {
		return false, err
	}
	if !empty && f.Filesystem != fsMaking {
		content, err := device.ProbeFS(file)
		if err != nil {
			return false, err
		}
		if content != v.FSType {
			return false, fmt.Errorf("it should hold %s and holds something else (%q); it is not formatted over: %w", v.FSType, content, csi.ErrPrecondition)
		}
		return false, setFacts(p, v.ID, func(f *facts) { f.Filesystem = fsMade })
	}
	if err := setFacts(p, v.ID, func(f *facts) { f.Filesystem = fsMaking }); err != nil {
		return false, err
	}
	if err := device.Mkfs(ctx, l.Path(), v.FSType, device.MkfsOptions{Zeroed: empty}); err != nil {
		return false, err
	}
	return true, setFacts(p, v.ID, func(f *facts) { f.Filesystem = fsMade })
}

// holdsNothing tells whether nothing was ever written to a sparse or
// preallocated file.
func holdsNothing(f *os.File) (bool, error) {
	_, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("look for data in %s: %w", f.Name(), err)
	}
	return false, nil
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

// Publish shows the staged volume at target; see csi.Stager.
func (s *Stager) Publish(ctx context.Context, id, staging, target string, u csi.Use) error {
	release, err := s.hold(id, "publish")
	if err != nil {
		return err
	}
	defer release()
	_, v, err := s.find(id)
	if err != nil {
		return err
	}
	if err := checkUse(v, u); err != nil {
		return err
	}
	if err := s.publish(ctx, v, staging, target, u); err != nil {
		return fmt.Errorf("publish volume %s: %w", id, classed(err))
	}
	return nil
}

func (s *Stager) publish(ctx context.Context, v pool.Volume, staging, target string, u csi.Use) error {
	l, err := s.stagedAt(ctx, v, staging)
	if err != nil {
		return err
	}
	at, err := mountsOf(l)
	if err != nil {
		return err
	}
	for _, m := range at {
		switch {
		case m == target:
			return nil
		case u.SingleWriter && m != staging && m != filepath.Join(staging, deviceName):
			return fmt.Errorf("its access mode allows one pod and it is at %s: %w", m, csi.ErrPrecondition)
		}
	}
	// Whatever lies at the target now is not this volume: left by a crash, or by
	// another life of the loop device.
	if err := device.Unmount(target); err != nil {
		return err
	}
	if v.Mode == pool.Block {
		return showDevice(l, target)
	}
	if err := os.MkdirAll(target, 0o750); err != nil {
		return err
	}
	if err := device.Bind(staging, target, device.BindOptions{ReadOnly: u.ReadOnly, Symlinks: true}); err != nil {
		return errors.Join(err, os.Remove(target))
	}
	return nil
}

// stagedAt returns the loop device of a volume that is staged at path. The
// device of a Block volume is verified first, and replaced when a tenant who
// could write to it has detached or changed it.
func (s *Stager) stagedAt(ctx context.Context, v pool.Volume, path string) (*device.Loop, error) {
	s.mu.Lock()
	l := s.loops[v.ID]
	s.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("it is not staged: %w", csi.ErrPrecondition)
	}
	if v.Mode == pool.Filesystem {
		number, err := l.Device()
		if err != nil {
			return nil, err
		}
		if on, err := device.MountedDevice(path); err != nil || on != number {
			return nil, fmt.Errorf("it is not staged at %s: %w", path, csi.ErrPrecondition)
		}
		return l, nil
	}
	shown := filepath.Join(path, deviceName)
	if mounted, err := device.IsMounted(shown); err != nil || !mounted {
		return nil, fmt.Errorf("it is not staged at %s: %w", path, csi.ErrPrecondition)
	}
	readOnly, err := isReadOnly(l)
	if err != nil {
		return nil, err
	}
	file, err := open(v, readOnly)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	o := device.LoopOptions{ReadOnly: readOnly, DirectIO: true}
	err = l.Verify(file, o)
	if !errors.Is(err, device.ErrChanged) {
		return l, err
	}
	s.log.Warn("a staged volume's loop device was changed from outside; it is replaced", "volume", v.ID, "error", err)
	s.drop(v.ID) // we must not be the last user that keeps it
	fresh, made, err := loopFor(ctx, file, o)
	if err != nil {
		return nil, err
	}
	if err := showDevice(fresh, shown); err != nil {
		if made {
			return nil, errors.Join(err, detach(ctx, fresh))
		}
		fresh.Close()
		return nil, err
	}
	s.keep(v.ID, fresh)
	return fresh, nil
}

// Unpublish takes the volume away from target; see csi.Stager.
func (s *Stager) Unpublish(_ context.Context, id, target string) error {
	release, err := s.hold(id, "unpublish")
	if err != nil {
		return err
	}
	defer release()
	if err := device.Unmount(target); err != nil {
		return fmt.Errorf("unpublish volume %s: %w", id, classed(err))
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpublish volume %s: %w", id, err)
	}
	return nil
}

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
