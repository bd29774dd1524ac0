package nodeplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/archive"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// A job that ends in something transient around the transfer (the transfer
// itself has retries of its own) begins again after a while.
const (
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
)

// Order asks for a volume to be filled.
type Order struct {
	Recipe Recipe
	// Attempt is the digest of everything that decides the outcome, credentials
	// and wishes to try again included. An attempt that has failed for good is
	// not repeated; a new one of the same recipe goes on where the last was.
	Attempt string
	// Owner is whose turn it is: the claim's namespace.
	Owner string
}

// job is one volume being filled.
type job struct {
	order  Order
	cancel context.CancelFunc
	// done is closed when the job has let go of everything.
	done chan struct{}

	mu       sync.Mutex
	progress Progress
	failure  *fault.Fault // of the last try, while the next is awaited
}

func (j *job) seen() (Progress, *fault.Fault) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.progress, j.failure
}

func (s *Stager) job(id string) *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.jobs[id]
}

// progressLine says in a few words what a volume that is not populated is waiting for.
func (s *Stager) progressLine(id string) string {
	j := s.job(id)
	if j == nil {
		return "waiting for the controller to start the transfer"
	}
	p, f := j.seen()
	switch {
	case f != nil:
		return fmt.Sprintf("%d bytes copied, retry %d after %s: %v", p.BytesDone, p.Retries, f.Reason, f)
	case p.Message != "":
		return fmt.Sprintf("%d bytes copied, retry %d after %s: %s", p.BytesDone, p.Retries, p.Reason, p.Message)
	case p.BytesTotal > 0:
		return fmt.Sprintf("%d of %d bytes copied (%d %%), %d bytes/s", p.BytesDone, p.BytesTotal, p.BytesDone*100/p.BytesTotal, p.BytesPerSecond)
	}
	return fmt.Sprintf("%d bytes copied, %d bytes/s", p.BytesDone, p.BytesPerSecond)
}

// Populate starts the transfer that fills a volume, or joins the one that runs,
// and returns at once. Another attempt is ended first. An attempt that has failed
// for good is not made again.
func (s *Stager) Populate(ctx context.Context, id string, o Order) error {
	release, err := s.hold(id, "populate")
	if err != nil {
		return err
	}
	defer release()
	p, v, err := s.find(id)
	if err != nil {
		return err
	}
	switch {
	case v.State == pool.Populated && v.AwaitsData:
		return nil
	case v.State == pool.Populated:
		return fmt.Errorf("populate volume %s: it was made to hold data of its own: %w", id, csi.ErrPrecondition)
	}
	if j := s.job(id); j != nil {
		if j.order.Attempt == o.Attempt {
			return nil
		}
		if err := s.stop(ctx, j); err != nil {
			return fmt.Errorf("populate volume %s: end its earlier transfer: %w", id, err)
		}
		if _, v, err = s.find(id); err != nil || v.State == pool.Populated {
			return err
		}
	}
	if v.Failure != nil && v.Failure.Terminal && v.Recipe == o.Attempt {
		return nil
	}
	_, err = p.Update(id, func(v *pool.Volume) { v.Recipe, v.Failure = o.Attempt, nil })
	if err != nil {
		return fmt.Errorf("populate volume %s: %w", id, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life.Err() != nil {
		return fmt.Errorf("populate volume %s: the node plugin is ending: %w", id, csi.ErrUnavailable)
	}
	jctx, cancel := context.WithCancel(s.life)
	j := &job{order: o, cancel: cancel, done: make(chan struct{})}
	s.jobs[id] = j
	go s.run(jctx, p, id, j)
	return nil
}

// stop ends a job and waits until it has let go.
func (s *Stager) stop(ctx context.Context, j *job) error {
	j.cancel()
	select {
	case <-j.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", context.Cause(ctx), csi.ErrBusy)
	}
}

// run fills a volume until that is done, has failed for good, or is to end.
func (s *Stager) run(ctx context.Context, p *pool.Pool, id string, j *job) {
	defer func() {
		j.cancel()
		s.mu.Lock()
		delete(s.jobs, id)
		s.mu.Unlock()
		s.changes.tell(id)
		close(j.done)
	}()
	log := s.log.With("volume", id, "source", j.order.Recipe.Source.Kind)
	log.Info("transfer starts")
	start := time.Now()
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		err := s.fill(ctx, p, id, j)
		if err == nil {
			log.Info("transfer is complete", "took", time.Since(start))
			return
		}
		if ctx.Err() != nil {
			log.Info("transfer ends before it is complete; its journal stays", "error", err)
			return
		}
		f := fault.Of(err)
		if f.Terminal {
			_, err := p.Update(id, func(v *pool.Volume) {
				v.Failure = &pool.Failure{Terminal: true, Reason: f.Reason, Message: f.Error()}
			})
			if err == nil {
				log.Warn("transfer has failed for good", "reason", f.Reason, "error", f)
				return
			}
			f = fault.Of(fmt.Errorf("%w (and that could not be recorded: %w)", f, err))
		}
		log.Warn("transfer is tried again", "reason", f.Reason, "error", f, "after", wait)
		j.mu.Lock()
		j.failure = f
		j.progress.Retries++
		j.mu.Unlock()
		s.changes.tell(id)
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// fill is one try. When it returns, no device, mount or process of it is left.
func (s *Stager) fill(ctx context.Context, p *pool.Pool, id string, j *job) error {
	v, err := p.Get(id)
	if err != nil {
		return err
	}
	// The pool makes files of nothing but zeros, and so is a new disk.img.
	work := Job{Volume: id, Owner: j.order.Owner, TargetBytes: v.Bytes, KnownZero: true, Recipe: j.order.Recipe, Journal: p.JournalPath(id)}
	if work.Recipe.Archive {
		if v.Mode == pool.Block {
			return fault.Terminal(fault.InvalidSource, errors.New("an archive is unpacked into a filesystem, and the volume has none: set volumeMode: Filesystem in the claim, or import a disk (contentType kubevirt)"))
		}
		work.TargetBytes = archive.MaxBytes
	} else {
		work.Spool = spoolOf(p, v.Bytes)
		s.useImages(p, j.order, &work)
	}
	report := func(progress Progress) {
		j.mu.Lock()
		progress.Retries = max(progress.Retries, j.progress.Retries)
		j.progress, j.failure = progress, nil
		j.mu.Unlock()
		s.changes.tell(id)
	}
	file, err := open(v, false)
	if err != nil {
		return err
	}
	defer file.Close()
	var result Result
	switch {
	case v.Mode == pool.Block:
		work.Target = file
		result, err = s.cfg.Fill.Fill(ctx, work, report)
	case work.Recipe.Archive:
		result, err = s.fillFolder(ctx, p, v, file, work, report)
	default:
		result, err = s.fillFilesystem(ctx, p, v, file, work, j.order, report)
	}
	if err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return fmt.Errorf("sync volume: %w", err)
	}
	if v.Mode == pool.Block {
		s.keepImage(ctx, p, file, j.order, result, wholeFile(result))
	}
	validator, err := json.Marshal(result.Validator)
	if err != nil {
		return fmt.Errorf("validator of the source: %w", err)
	}
	f := factsOf(v)
	f.Format, f.VirtualBytes, f.Digest, f.Validator = result.Format, result.VirtualSize, result.Digest, validator
	f.Warnings, f.Cached = result.Warnings, result.Cached
	if v.Mode == pool.Filesystem {
		f.Filesystem = fsMade
	}
	if err := f.into(&v); err != nil {
		return err
	}
	_, err = p.Update(id, func(now *pool.Volume) { now.State, now.Failure, now.Source = pool.Populated, nil, v.Source })
	if err != nil {
		return err
	}
	// Only now: with the journal gone first, a crash would start over.
	if err := journal.Remove(work.Journal); err != nil {
		s.log.Warn("a journal that is no longer needed stays", "volume", id, "error", err)
	}
	return nil
}

// spoolOf makes room in the pool for an image that is unpacked for a target of so
// many bytes.
func spoolOf(p *pool.Pool, target int64) func() (Spool, error) {
	return func() (Spool, error) {
		s, err := p.NewScratch(target)
		if errors.Is(err, pool.ErrFull) {
			return nil, fault.Transient(fault.NoSpace, fmt.Errorf("the image has to be unpacked beside the volume, for it is compressed as a whole or its server answers no Range requests: %w", err))
		}
		if err != nil {
			return nil, err
		}
		return s, nil
	}
}

// mountToFill mounts the filesystem of a volume, which it makes if there is none, where
// nobody else sees it.
func (s *Stager) mountToFill(ctx context.Context, p *pool.Pool, v pool.Volume, l *device.Loop, journalPath string) (*os.File, error) {
	made, err := s.makeFilesystem(ctx, p, v, l)
	if err != nil {
		return nil, err
	}
	mount, err := privateMount(l.Path(), v.FSType)
	if err == nil || made {
		return mount, err
	}
	// A filesystem that only we have ever written to and that does not mount
	// is worth nothing, and with it what the journal says of it.
	s.log.Warn("the unfinished filesystem of a volume is made anew", "volume", v.ID, "error", err)
	if rerr := journal.Remove(journalPath); rerr != nil {
		return nil, errors.Join(err, rerr)
	}
	return s.mountAnew(ctx, p, v.ID, l)
}

// mountAnew makes the filesystem of a volume once more, and with that empties it.
func (s *Stager) mountAnew(ctx context.Context, p *pool.Pool, id string, l *device.Loop) (*os.File, error) {
	if err := setFacts(p, id, func(f *facts) { f.Filesystem = fsMaking }); err != nil {
		return nil, err
	}
	v, err := p.Get(id)
	if err == nil {
		_, err = s.makeFilesystem(ctx, p, v, l)
	}
	if err != nil {
		return nil, err
	}
	return privateMount(l.Path(), v.FSType)
}

// fillFilesystem fills /disk.img of a filesystem volume, which nobody can see
// until it is populated.
func (s *Stager) fillFilesystem(ctx context.Context, p *pool.Pool, v pool.Volume, file *os.File, work Job, o Order, report func(Progress)) (result Result, err error) {
	l, err := soleLoop(ctx, file)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, detach(ctx, l)) }()
	mount, err := s.mountToFill(ctx, p, v, l, work.Journal)
	if err != nil {
		return result, err
	}
	defer mount.Close()
	img, err := diskImage(mount)
	if err != nil {
		return result, err
	}
	defer img.Close()
	st, err := img.Stat()
	if err != nil {
		return result, err
	}
	work.Target, work.TargetBytes = img, st.Size()
	work.Spool = spoolOf(p, work.TargetBytes)
	result, err = s.cfg.Fill.Fill(ctx, work, report)
	if err != nil {
		return result, err
	}
	if err := img.Sync(); err != nil {
		return result, fmt.Errorf("sync %s: %w", img.Name(), err)
	}
	root, err := os.Open(within(mount))
	if err != nil {
		return result, err
	}
	defer root.Close()
	if err := unix.Syncfs(int(root.Fd())); err != nil {
		return result, fmt.Errorf("sync the filesystem of volume %s: %w", v.ID, err)
	}
	s.keepImage(ctx, p, file, o, result, withinVolume(img, result))
	return result, nil
}

// soleLoop makes the file a block device of which it is certain that nobody
// else has one: two mounts of one filesystem through two devices destroy it.
func soleLoop(ctx context.Context, file *os.File) (*device.Loop, error) {
	loops, err := device.FindLoopsOf(file)
	if err != nil {
		return nil, err
	}
	for _, l := range loops {
		if !l.Free() {
			l.Close()
			return nil, fmt.Errorf("%s still uses %s: %w", l.Path(), file.Name(), device.ErrBusy)
		}
		if err := detach(ctx, l); err != nil {
			return nil, err
		}
	}
	return device.AttachLoop(file, device.LoopOptions{DirectIO: true})
}

// diskImage opens /disk.img, or makes it as large as the new filesystem has
// room for. Its size is chosen once: a later try finds less room.
func diskImage(mount *os.File) (*os.File, error) {
	img, err := device.OpenDiskImage(within(mount), false, 0)
	if err == nil {
		st, err := img.Stat()
		if err == nil && st.Size() > 0 {
			return img, nil
		}
		img.Close()
		if err != nil {
			return nil, err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	u, err := device.Stats(within(mount) + "/.")
	if err != nil {
		return nil, err
	}
	bytes := device.UsableBytes(u.AvailableBytes)
	if bytes <= 0 {
		return nil, fault.Terminal(fault.NoSpace, fmt.Errorf("the volume's filesystem has %d bytes available, too few for a disk: ask for a larger volume", u.AvailableBytes))
	}
	return device.OpenDiskImage(within(mount), true, bytes)
}
