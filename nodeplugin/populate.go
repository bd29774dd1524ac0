// Package nodeplugin is what runs on every node: it fills volumes with the data
// of their sources and puts them in place.
//
// It knows nothing of claims, classes and Secrets; what it needs of Kubernetes
// it is handed, or declares as an interface.
package nodeplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/broker"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/pool"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// Recipe is what a volume is filled with.
type Recipe struct {
	Source source.Spec
	// Format of the image where the user names it, else "".
	Format string
	// Disk of a bundle where the user chooses one, else "".
	Disk string
	// Checksum of the source's bytes, "algorithm:hex"; "" is none.
	Checksum string
	// Archive: the source is a tar, and unpacked into the volume's filesystem.
	Archive bool
	// Preallocate reserves every block of the volume.
	Preallocate bool
	// Digest names the recipe without its credentials: a volume that was partly
	// filled by another one is begun again.
	Digest string
	// Cluster is the cluster's own network, and Services those addresses of it that
	// may be fetched from for this volume; see broker.FetchPolicy.
	Cluster, Services []netip.Prefix
}

// Job is one volume to fill.
type Job struct {
	Volume string
	// Owner shares the movers with other owners in turns: the claim's namespace.
	Owner string
	// Target is the volume's raw file or disk.img, open for reading and writing,
	// TargetBytes long; that is a multiple of 4096. It stays the caller's.
	//
	// That of an archive is the root of the volume's filesystem, which is mounted where
	// no path leads to and holds nothing else; TargetBytes is archive.MaxBytes.
	Target      *os.File
	TargetBytes int64
	// Anew, of an archive, empties the filesystem and returns its root, the new Target.
	Anew func() (*os.File, error)
	// KnownZero says that the target was zeros before the first Fill; it is looked
	// at while there is no journal.
	KnownZero bool
	Recipe    Recipe
	// Spool makes room for an image that has to be read again and comes only once;
	// see mover.Spool. It is called at most once; nil: there is none.
	Spool func() (Spool, error)
	// Cached returns the disk that a source with this validator gave before, or nil;
	// the caller closes it. What is wrong with one is told to Spoilt. nil: there are none.
	Cached func(source.Validator) *pool.CachedImage
	Spoilt func(*pool.CachedImage)
	// Journal is the path of the volume's journal. The caller removes it, once
	// it has recorded that the volume is populated.
	Journal string
}

// Spool is room beside a volume: files as long as its target, that may hold Bytes in
// all. Close gives it back.
type Spool interface {
	Files() []*os.File
	Bytes() int64
	Close()
}

// Phases of a job, in the order of its life; Retrying leads back to Waiting.
const (
	PhaseWaiting    = "Waiting"    // for a free mover
	PhaseConnecting = "Connecting" // to the source, until its size and format are known
	PhaseCopying    = "Copying"
	PhaseRetrying   = "Retrying" // a transient fault, told in Message, is waited out
	PhaseFinishing  = "Finishing"
)

// Progress is where a job is.
type Progress struct {
	Phase string
	// BytesDone of BytesTotal bytes of the disk hold their final content;
	// BytesTotal is -1 while it is unknown. What was done before a restart counts.
	BytesDone, BytesTotal int64
	// BytesPerSecond is the average of about the last ten seconds; ETA what is
	// left to do at that rate, -1 unknown.
	BytesPerSecond int64
	ETA            time.Duration
	// BytesRead from the network for this volume, over all attempts.
	BytesRead int64
	// Retries after transient faults.
	Retries int
	// Reason and Message of the last fault, "" once something was copied after it.
	Reason, Message string
	Format          string
	VirtualSize     int64
}

// Result is what a filled volume holds.
type Result struct {
	Format string
	// VirtualSize in bytes; zeros follow up to the volume's end.
	VirtualSize int64
	Validator   source.Validator
	// Digest of the disk's VirtualSize bytes, as package digest has it; "" of an archive.
	Digest   string
	Warnings []string
	// Cached: the disk came from the node's cache of images.
	Cached bool
}

// Filler fills volumes. Its fields are set before the first Fill.
type Filler struct {
	Launcher mover.Launcher
	// Policy says where movers may connect to.
	Policy broker.FetchPolicy
	// Slots is how many movers run at once; 0 is DefaultSlots.
	Slots int
	// Backoff is the first wait after a transient fault, MaxBackoff the
	// longest; 0 is 1 s and 2 min.
	Backoff, MaxBackoff time.Duration
	// Log; nil is slog.Default().
	Log *slog.Logger

	once  sync.Once
	slots *slots
}

// DefaultSlots is how many movers a node runs at once unless it is told.
const DefaultSlots = 4

const (
	defaultBackoff    = time.Second
	defaultMaxBackoff = 2 * time.Minute
	// rereadFactor: what is read again may come to so many times the image.
	rereadFactor = 3
	// mostDeaths of movers in a row, without progress between, end a job.
	mostDeaths = 5
)

// Fill fills the job's target with its recipe and returns when that is done and
// durable, with a terminal fault, or when ctx ends. It starts where an earlier
// Fill of the same volume, whatever became of it, had come to. Transient faults
// are waited out. report is called about once a second, not at the same time.
func (f *Filler) Fill(ctx context.Context, job Job, report func(Progress)) (Result, error) {
	f.once.Do(func() {
		if f.Slots <= 0 {
			f.Slots = DefaultSlots
		}
		f.slots = newSlots(f.Slots)
	})
	log := f.Log
	if log == nil {
		log = slog.Default()
	}
	r := &filling{filler: f, job: job, log: log.With("volume", job.Volume, "source", job.Recipe.Source.Kind), report: report}
	if job.TargetBytes <= 0 || job.TargetBytes%4096 != 0 {
		return Result{}, fault.Terminal(fault.TargetError, fmt.Errorf("fill a volume of %d bytes: its size must be a multiple of 4096", job.TargetBytes))
	}
	if err := r.load(); err != nil {
		return Result{}, err
	}
	defer func() {
		if r.spool != nil {
			r.spool.Close()
		}
	}()
	for !r.journal.Complete {
		err := r.attempt(ctx)
		if ctx.Err() != nil {
			return Result{}, context.Cause(ctx)
		}
		if err == nil {
			break
		}
		f := fault.Of(err)
		if f.Reason == fault.NeedsSpool && r.spool == nil && r.job.Spool != nil {
			r.log.Info("the image is spooled, for it comes once and has to be read again", "error", f.Error())
			if r.spool, err = r.job.Spool(); err == nil {
				continue
			}
			f = fault.Of(err)
		}
		if f.Reason == fault.ChecksumMismatch {
			// Whatever came is not what was meant: nothing of it stays.
			if err := errors.Join(r.restart(false), r.prepare()); err != nil {
				return Result{}, err
			}
		}
		if err := r.recover(ctx, f); err != nil {
			return Result{}, err
		}
	}
	return r.result()
}

// filling is one Fill.
type filling struct {
	filler  *Filler
	job     Job
	log     *slog.Logger
	report  func(Progress)
	journal *journal.Journal

	mu       sync.Mutex // held for what follows: movers report beside commits
	progress Progress
	rate     rate
	facts    mover.Facts // of the last mover
	hash     mover.HashState
	readMark int64 // the journal's Read when the current mover started

	spool                      Spool             // nil until it is needed
	hit                        *pool.CachedImage // found by Began
	spoilt                     bool              // a hit was of no use: there is no other
	retries, fruitless, deaths int
	doneMark                   int64 // bytes done when the last attempt began
}

// load reads the journal.
func (r *filling) load() error {
	j, err := journal.Load(r.job.Journal, r.job.Volume, r.job.Recipe.Digest, r.job.TargetBytes)
	var discarded *journal.Discarded
	if errors.As(err, &discarded) {
		r.log.Warn("journal discarded, the volume is filled from the beginning", "reason", discarded.Reason)
	} else if err != nil {
		return fault.Transient(fault.TargetError, err)
	}
	if j.Validator == nil && !j.Soiled { // nothing was written yet
		j.Zeroed = r.job.KnownZero
	}
	r.journal = j
	r.progress = Progress{BytesTotal: j.VirtualBytes, VirtualSize: j.VirtualBytes, Format: j.Format, BytesDone: j.Done.Bytes(), BytesRead: j.Read, ETA: -1}
	return nil
}

// attempt runs one mover, from what the journal says to the end if it can.
func (r *filling) attempt(ctx context.Context) error {
	r.tell(func(p *Progress) { p.Phase = PhaseWaiting })
	release, err := r.filler.slots.acquire(ctx, r.job.Owner)
	if err != nil {
		return err
	}
	defer release()
	r.tell(func(p *Progress) { p.Phase = PhaseConnecting })
	r.doneMark = r.journal.Done.Bytes()
	r.readMark = r.journal.Read
	if err := r.prepare(); err != nil {
		return err
	}
	j := mover.Job{
		Source: r.job.Recipe.Source, Format: r.job.Recipe.Format, Disk: r.job.Recipe.Disk, TargetBytes: r.job.TargetBytes,
		Checksum: r.job.Recipe.Checksum, HashState: mover.HashState{At: r.journal.HashAt, State: r.journal.HashState},
		KnownZero: r.journal.Zeroed, KeepAllocated: r.job.Recipe.Preallocate, Done: r.journal.Done, Archive: r.job.Recipe.Archive,
	}
	if r.journal.Validator != nil {
		j.Resume = &mover.Facts{Format: r.journal.Format, VirtualBytes: r.journal.VirtualBytes}
		if err := json.Unmarshal(r.journal.Validator, &j.Resume.Validator); err != nil {
			return fmt.Errorf("decode the journal's validator: %w", err)
		}
	}
	if r.spool != nil {
		j.Spool, j.SpoolBytes = r.spool.Files(), r.spool.Bytes()
	}
	res, err := r.filler.Launcher.Move(ctx, r.job.Target, j, r)
	if errors.Is(err, errCached) {
		return r.fromCache(ctx)
	}
	if err != nil {
		return err
	}
	r.tell(func(p *Progress) { p.Phase = PhaseFinishing })
	return r.finish(ctx, res)
}

// prepare gives the target what the mover relies on.
func (r *filling) prepare() error {
	if r.journal.Soiled {
		if err := r.clear(); err != nil {
			return fmt.Errorf("clear the volume to begin again: %w", err)
		}
		r.journal.Soiled, r.journal.Zeroed = false, true
		if err := r.save(); err != nil {
			return err
		}
	}
	if r.job.Recipe.Preallocate && !r.job.Recipe.Archive {
		if err := r.onTarget((*device.File).Preallocate); err != nil {
			return err
		}
	}
	return nil
}

// clear takes away what is in the target.
func (r *filling) clear() (err error) {
	if !r.job.Recipe.Archive {
		return r.onTarget(func(d *device.File) error { return d.Zero(0, r.job.TargetBytes) })
	}
	r.job.Target, err = r.job.Anew()
	return err
}

// sync makes durable what the target holds.
func (r *filling) sync() error {
	if r.job.Recipe.Archive {
		return targetFault(unix.Syncfs(int(r.job.Target.Fd())))
	}
	return targetFault(r.job.Target.Sync())
}

// onTarget does something to the target by a descriptor of its own and syncs.
func (r *filling) onTarget(do func(*device.File) error) error {
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", r.job.Target.Fd()), os.O_RDWR, 0)
	if err != nil {
		return targetFault(err)
	}
	defer f.Close()
	d, err := device.NewFile(f, r.job.TargetBytes)
	if err != nil {
		return targetFault(err)
	}
	d.KeepAllocated = r.job.Recipe.Preallocate
	if err := do(d); err != nil {
		return targetFault(err)
	}
	return targetFault(d.Sync())
}

// finish records that everything is in place.
func (r *filling) finish(ctx context.Context, res mover.Result) error {
	if gaps := r.journal.Done.Missing(0, res.VirtualBytes); len(gaps) > 0 && r.journal.Done.Len() < journal.MaxRanges {
		return fault.Transient(fault.MoverDied, fmt.Errorf("the mover says that %d bytes are copied and left out %d ranges, first %d bytes at %d", res.VirtualBytes, len(gaps), gaps[0].Length, gaps[0].Start))
	}
	// What is behind the disk's end was zeroed and told to nobody.
	if err := r.sync(); err != nil {
		return err
	}
	if !r.job.Recipe.Archive {
		if err := r.sumUp(ctx, res.VirtualBytes); err != nil {
			return err
		}
	}
	r.journal.VirtualBytes = res.VirtualBytes
	r.journal.Complete = true
	return r.save()
}

// sumUp makes the disk's digest. What no hash is recorded of is read once more.
func (r *filling) sumUp(ctx context.Context, size int64) error {
	if len(r.journal.Sums.Missing(size)) > 0 {
		err := r.onTarget(func(d *device.File) error { return r.journal.Sums.Complete(ctx, d, size) })
		if err != nil {
			return fmt.Errorf("sum up the volume: %w", err)
		}
	}
	var err error
	if r.journal.Digest, err = r.journal.Sums.Sum(size); err != nil {
		return err
	}
	r.journal.Sums = digest.Tree{}
	return nil
}

func (r *filling) result() (Result, error) {
	res := Result{Format: r.journal.Format, VirtualSize: r.journal.VirtualBytes, Digest: r.journal.Digest, Warnings: r.facts.Warnings, Cached: r.journal.Cached}
	if err := json.Unmarshal(r.journal.Validator, &res.Validator); err != nil {
		return Result{}, fmt.Errorf("decode the journal's validator: %w", err)
	}
	r.tell(func(p *Progress) {
		p.Phase, p.BytesDone, p.BytesTotal, p.VirtualSize, p.ETA = PhaseFinishing, res.VirtualSize, res.VirtualSize, res.VirtualSize, 0
	})
	return res, nil
}

// recover decides what follows a fault and waits as long as that asks for. It
// returns the fault, terminal, if nothing does.
func (r *filling) recover(ctx context.Context, f *fault.Fault) error {
	s := setback{
		Fault: f, Restarts: r.journal.Restarts, Recorded: r.journal.Done.Bytes() > 0, Read: r.journal.Read,
		ImageBytes: r.imageBytes(), Fruitless: r.fruitless, Deaths: r.deaths,
		Progressed: r.journal.Done.Bytes() > r.doneMark,
	}
	v := s.decide()
	r.fruitless, r.deaths = v.Fruitless, v.Deaths
	if v.Give != nil {
		r.log.Error("filling given up", "reason", v.Give.Reason, "error", v.Give.Error())
		return v.Give
	}
	if v.Restart {
		r.log.Warn("filling begins again", "reason", f.Reason, "error", f.Error())
		if err := r.restart(s.Recorded); err != nil {
			return err
		}
	}
	wait := backoff(v.Fruitless, r.filler.Backoff, r.filler.MaxBackoff)
	if v.Restart {
		wait = 0
	}
	r.retries++
	r.log.Info("filling is tried again", "reason", f.Reason, "error", f.Error(), "wait", wait)
	r.tell(func(p *Progress) {
		p.Phase, p.Retries, p.Reason, p.Message = PhaseRetrying, r.retries, f.Reason, f.Error()
		p.BytesPerSecond, p.ETA = 0, -1
		r.rate = rate{}
	})
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// restart forgets what was copied. The order matters: a crash between the two
// steps must not leave a journal that believes in bytes that were cleared.
func (r *filling) restart(counts bool) error {
	j := &journal.Journal{Target: r.journal.Target, Recipe: r.journal.Recipe, Bytes: r.journal.Bytes, VirtualBytes: -1, Restarts: r.journal.Restarts, Read: r.journal.Read, Soiled: true}
	if counts {
		j.Restarts++
	}
	r.journal = j
	r.tell(func(p *Progress) {
		r.hash = mover.HashState{}
		p.BytesDone, p.BytesTotal, p.VirtualSize, p.Format = 0, -1, -1, ""
	})
	return r.save()
}

func (r *filling) imageBytes() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(r.facts.Validator.Size, r.facts.VirtualBytes, r.journal.VirtualBytes)
}

// setback is all that the next step after a fault depends on.
type setback struct {
	Fault    *fault.Fault
	Restarts int // because the source had changed
	// Recorded: something was copied and recorded; Progressed: by this attempt.
	Recorded, Progressed bool
	Read                 int64 // bytes, over all attempts
	ImageBytes           int64 // -1 or 0 unknown
	Fruitless, Deaths    int   // attempts in a row
}

// verdict is what follows a setback.
type verdict struct {
	Give              *fault.Fault // the end, terminal
	Restart           bool         // forget what was copied
	Fruitless, Deaths int
}

// decide looks at nothing but s.
func (s setback) decide() verdict {
	v := verdict{Fruitless: s.Fruitless + 1, Deaths: s.Deaths}
	if s.Progressed {
		v.Fruitless, v.Deaths = 1, 0
	}
	died := s.Fault.Reason == fault.MoverDied || s.Fault.Reason == fault.MoverMemory
	if died {
		v.Deaths++
	}
	changed := s.Fault.Reason == fault.SourceChanged
	give := func(reason, format string, a ...any) verdict {
		v.Give = &fault.Fault{Terminal: true, Reason: reason, Err: fmt.Errorf(format, a...)}
		return v
	}
	switch {
	case changed && !s.Recorded:
		v.Restart = true // nothing is lost
	case changed && s.Restarts > 0:
		return give(fault.SourceChanged, "%w: it has changed before during this transfer: give a source that stays as it is", s.Fault)
	case changed:
		v.Restart = true
	case s.Fault.Terminal:
		v.Give = s.Fault
		return v
	case v.Deaths >= mostDeaths:
		return give(s.Fault.Reason, "%w: %d movers in a row made no progress", s.Fault, v.Deaths)
	}
	// The first pass over the image is free; a small one may be read more often.
	if budget := (1+rereadFactor)*s.ImageBytes + 64<<20; s.ImageBytes > 0 && s.Read > budget {
		return give(fault.TooManyRetries, "%d bytes were read for an image of %d, and it is not complete: give a source that answers reliably; the last fault was %s: %w", s.Read, s.ImageBytes, s.Fault.Reason, s.Fault)
	}
	return v
}

// backoff is how long to wait after n attempts in a row without progress: it
// doubles from first to most, less up to half of it at random, so that many
// volumes do not return to a server at once.
func backoff(n int, first, most time.Duration) time.Duration {
	if first <= 0 {
		first = defaultBackoff
	}
	if most <= 0 {
		most = defaultMaxBackoff
	}
	d := first
	for ; n > 1 && d < most; n-- {
		d *= 2
	}
	d = min(d, most)
	return d - rand.N(d/2+1)
}

// Began is mover.Node's.
func (r *filling) Began(_ context.Context, f mover.Facts) error {
	if r.find(f) {
		return errCached
	}
	validator, err := json.Marshal(f.Validator)
	if err != nil {
		return err
	}
	r.tell(func(p *Progress) {
		r.facts = f
		p.Phase, p.Format = PhaseCopying, f.Format
		if f.VirtualBytes >= 0 {
			p.BytesTotal, p.VirtualSize = f.VirtualBytes, f.VirtualBytes
		}
	})
	r.journal.Validator, r.journal.Format, r.journal.VirtualBytes = validator, f.Format, f.VirtualBytes
	return r.save()
}

// Commit is mover.Node's.
func (r *filling) Commit(_ context.Context, ranges []extent.Range, sums *digest.Tree) error {
	if err := r.sync(); err != nil {
		return err
	}
	for _, e := range ranges {
		r.journal.Done.Add(e.Start, e.Length)
	}
	r.journal.Sums.Join(sums)
	return r.save()
}

// Hashed is mover.Node's.
func (r *filling) Hashed(s mover.HashState) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hash = s
}

// Moved is mover.Node's.
func (r *filling) Moved(done, read int64) {
	r.tell(func(p *Progress) {
		p.BytesRead = r.readMark + read
		if done > p.BytesDone {
			p.Reason, p.Message = "", ""
		}
		p.BytesDone = done
		p.BytesPerSecond = r.rate.add(time.Now(), done)
		p.ETA = -1
		if left := p.BytesTotal - done; p.BytesTotal >= 0 && p.BytesPerSecond > 0 {
			p.ETA = time.Duration(float64(left) / float64(p.BytesPerSecond) * float64(time.Second)).Round(time.Second)
		}
	})
}

// Dial is mover.Node's.
func (r *filling) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	policy := r.filler.Policy
	policy.Cluster, policy.Services = r.job.Recipe.Cluster, r.job.Recipe.Services
	return broker.Broker{Policy: policy}.DialContext(ctx, network, address)
}

// tell changes the progress and reports it.
func (r *filling) tell(change func(*Progress)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.progress)
	if r.report != nil {
		r.report(r.progress)
	}
}

// save writes the journal with what was read so far.
func (r *filling) save() error {
	r.mu.Lock()
	r.journal.Read = max(r.journal.Read, r.progress.BytesRead)
	if r.hash.At > 0 {
		r.journal.HashAt, r.journal.HashState = r.hash.At, r.hash.State
	}
	r.mu.Unlock()
	return targetFault(r.journal.Save(r.job.Journal))
}

// targetFault classes errors of the volume and its journal, which lie on one
// filesystem: a full one may have room later.
func targetFault(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fault.Transient(fault.NoSpace, fmt.Errorf("%w: free space where the pool lies", err))
	}
	return fault.Transient(fault.TargetError, err)
}

// rate is a moving average of bytes per second.
type rate struct {
	at      time.Time
	bytes   int64
	average float64
}

// rateWindow is the time after which an old rate counts for a third.
const rateWindow = 10 * time.Second

// add is told that bytes were done at now, and returns the average.
func (r *rate) add(now time.Time, bytes int64) int64 {
	took := now.Sub(r.at)
	switch {
	case r.at.IsZero():
		r.at, r.bytes, r.average = now, bytes, -1
		return 0
	case took < 100*time.Millisecond:
		return max(0, int64(r.average))
	}
	current := float64(max(0, bytes-r.bytes)) / took.Seconds()
	if r.average < 0 {
		r.average = current
	} else {
		weight := min(1, took.Seconds()/rateWindow.Seconds())
		r.average += weight * (current - r.average)
	}
	r.at, r.bytes = now, bytes
	return int64(r.average)
}

// slots bounds how many movers run at once and shares them between owners in
// turns.
type slots struct {
	mu      sync.Mutex
	free    int
	turn    []string // owners that wait, the next one first
	waiting map[string][]chan struct{}
}

func newSlots(n int) *slots { return &slots{free: n, waiting: map[string][]chan struct{}{}} }

// acquire waits for a slot; release gives it back.
func (s *slots) acquire(ctx context.Context, owner string) (release func(), err error) {
	s.mu.Lock()
	if s.free > 0 { // then nobody waits
		s.free--
		s.mu.Unlock()
		return s.release, nil
	}
	granted := make(chan struct{})
	if len(s.waiting[owner]) == 0 {
		s.turn = append(s.turn, owner)
	}
	s.waiting[owner] = append(s.waiting[owner], granted)
	s.mu.Unlock()
	select {
	case <-granted:
		return s.release, nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	mine := s.drop(owner, granted)
	s.mu.Unlock()
	if !mine { // granted meanwhile
		s.release()
	}
	return nil, context.Cause(ctx)
}

// drop takes a waiting channel away and tells whether it was there.
func (s *slots) drop(owner string, c chan struct{}) bool {
	for i, w := range s.waiting[owner] {
		if w == c {
			s.waiting[owner] = append(s.waiting[owner][:i:i], s.waiting[owner][i+1:]...)
			if len(s.waiting[owner]) == 0 {
				s.leave(owner)
			}
			return true
		}
	}
	return false
}

// leave forgets an owner that no longer waits.
func (s *slots) leave(owner string) {
	delete(s.waiting, owner)
	for i, o := range s.turn {
		if o == owner {
			s.turn = append(s.turn[:i:i], s.turn[i+1:]...)
			return
		}
	}
}

func (s *slots) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.turn) == 0 {
		s.free++
		return
	}
	owner := s.turn[0]
	c := s.waiting[owner][0]
	s.waiting[owner] = s.waiting[owner][1:]
	if len(s.waiting[owner]) == 0 {
		s.leave(owner)
	} else {
		s.turn = append(s.turn[1:], owner)
	}
	close(c)
}

var _ mover.Node = (*filling)(nil)
