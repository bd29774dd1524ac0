package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

const (
	// A commit makes durable what was written: after so many bytes, or so long.
	commitBytes = 16 << 20
	commitAge   = time.Second

	firstRetry = time.Second
	lastRetry  = 30 * time.Second

	// Where only the whole stream tells how large the disk is, the file begins
	// as a hole of at most this size and is cut to the disk's in the end.
	unknownBytes = 4 << 40
)

// transfer is one run of longshore import.
type transfer struct {
	from        origin
	content     string
	source      string
	target      string
	journalPath string
	force       bool
	size        string
	preallocate bool
	retries     int
	noProgress  bool
}

func importCommand() *cobra.Command {
	var t transfer
	cmd := &cobra.Command{
		Use:   "import SOURCE TARGET",
		Short: "Write the disk in an image to a file or a block device, or unpack an archive",
		Long: `Write the disk that SOURCE, an http(s):// URL or the path of an image, holds to
TARGET, a file or a block device, as a raw disk. With --content archive SOURCE is a
tar, and unpacked into TARGET, a folder that is empty or not there.

Interrupted or killed, an import goes on where it was when the same command is
run again: what is durable is listed in a journal, TARGET.longshore-journal.

Exit codes: 0 done; 1 internal error; 2 wrong command line; 3 failed for good,
something must be changed; 4 failed for now, try again; 130 interrupted.`,
		Args: usageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			t.source, t.target = args[0], args[1]
			return t.run(cmd)
		},
	}
	f := cmd.Flags()
	t.from.flags(f)
	f.StringVar(&t.content, "content", contentDisk, "what SOURCE is: "+contentDisk+" (the image of a disk) or "+contentArchive)
	f.StringVar(&t.journalPath, "journal", "", "path of the journal (default: TARGET.longshore-journal; for a device, in the user's cache folder)")
	f.StringVar(&t.from.checksum, "checksum", "", "that SOURCE, as it is served, must have: md5, sha1, sha256 or sha512, a colon and hex digits")
	f.BoolVar(&t.force, "force", false, "overwrite a target that is not empty")
	f.StringVar(&t.size, "size", "", "grow the disk to this size: bytes, or with a unit as in 10Gi")
	f.BoolVar(&t.preallocate, "preallocate", false, "allocate the whole file, so that it cannot run out of space later")
	f.IntVar(&t.retries, "retries", 8, "tries in a row without a new byte before giving up")
	f.BoolVar(&t.noProgress, "no-progress", false, "say nothing until the end")
	return cmd
}

func (t *transfer) run(cmd *cobra.Command) error {
	ctx := cmd.Context()
	spec, err := t.from.spec(t.source)
	if err != nil {
		return usage(cmd, err)
	}
	if sum := t.from.checksum; sum != "" {
		if err := mover.CheckChecksum(sum); err != nil {
			return usage(cmd, err)
		}
	}
	switch {
	case t.content == contentArchive && (t.from.format != "" || t.from.disk != "" || t.force || t.size != "" || t.preallocate):
		return usage(cmd, errors.New("--content archive: --format, --disk, --force, --size and --preallocate are for disks"))
	case t.content == contentArchive:
		t.from.format = image.Archive
	case t.content != contentDisk:
		return usage(cmd, fmt.Errorf("content %q: use %s or %s", t.content, contentDisk, contentArchive))
	}
	recipe, err := t.from.recipe(t.source)
	if err != nil {
		return err
	}
	var want int64
	if t.size != "" {
		q, err := resource.ParseQuantity(t.size)
		if err != nil || q.Value() <= 0 {
			return usage(cmd, fmt.Errorf("size %q: give bytes, or a number with a unit as in 10Gi", t.size))
		}
		want = q.Value()
	}
	if t.journalPath == "" {
		if t.journalPath, err = defaultJournal(t.target); err != nil {
			return err
		}
	}
	start := time.Now()
	show := newDisplay(cmd.ErrOrStderr(), t.noProgress)
	defer show.stop()

	info, err := t.look(ctx, spec, show)
	if err != nil {
		return t.explain(ctx, err)
	}
	if t.content == contentArchive {
		return t.unpack(cmd, spec, info, recipe, show, start)
	}
	out, err := t.open(info, want, recipe)
	if err != nil {
		return t.explain(ctx, err)
	}
	for _, w := range info.Warnings {
		show.say("warning: " + w)
	}
	if n := out.journal.Done.Bytes(); n > 0 {
		show.say(fmt.Sprintf("going on: %d bytes (%s) are there already", n, human(n)))
	}
	show.start(info.VirtualSize, out.journal.Done.Bytes(), &out.moved)
	facts, err := t.try(ctx, spec, out, show)
	show.stop()
	if err != nil {
		return errors.Join(t.explain(ctx, err), out.abandon())
	}
	sum, err := out.sumUp(ctx, facts.VirtualBytes)
	if err != nil {
		return t.explain(ctx, err)
	}
	bytes, err := out.finish(facts.VirtualBytes, want)
	if err := errors.Join(err, out.file.Close()); err != nil {
		return t.explain(ctx, err)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: disk of %d bytes (%s) from a %s image%s\ndigest %s\n",
		t.target, bytes, human(bytes), formatIn(facts), out.effort(start), sum)
	return nil
}

// formatIn is the format with the compression around it.
func formatIn(f mover.Facts) string {
	if f.Compression != "" {
		return f.Format + "." + f.Compression
	}
	return f.Format
}

// explain adds what a person can do now.
func (t *transfer) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return interrupted("run the same command again to go on")
	}
	if f := (*fault.Fault)(nil); errors.As(err, &f) && !f.Terminal {
		return fmt.Errorf("%w (run the same command again to go on)", err)
	}
	return err
}

// look opens the image to learn what it is, before anything is touched.
func (t *transfer) look(ctx context.Context, spec source.Spec, show *display) (info image.Info, err error) {
	err = t.patiently(ctx, show, nil, func() error {
		blob, err := localSources.Open(ctx, dial, spec)
		if err != nil {
			return fmt.Errorf("open source: %w", err)
		}
		defer blob.Close()
		opened, err := image.Open(ctx, blob, image.Options{Format: t.from.format, Disk: t.from.disk})
		if f := (*fault.Fault)(nil); errors.As(err, &f) && f.Reason == fault.NeedsSpool {
			info = image.Info{VirtualSize: -1, AllocatedBytes: -1} // it is known once the image is unpacked
			return nil
		}
		if err != nil {
			return fmt.Errorf("open image: %w", err)
		}
		defer opened.Close()
		info, err = opened.Measure(ctx)
		return err
	})
	return info, err
}

// patiently repeats f while its error is transient, up to t.retries times in
// which progress, where it is given, did not change.
func (t *transfer) patiently(ctx context.Context, show *display, progress func() int64, f func() error) error {
	wait, tries, was := firstRetry, 0, int64(-1)
	for {
		err := f()
		if err == nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		var fl *fault.Fault
		if !errors.As(err, &fl) || fl.Terminal || fl.Reason == fault.NoSpace { // room is made by a person
			return err
		}
		if progress != nil {
			if now := progress(); now != was {
				wait, tries, was = firstRetry, 0, now
			}
		}
		if tries++; tries > t.retries {
			return err
		}
		show.say(fmt.Sprintf("%s; trying again in %s", inShell.Replace(err.Error()), wait))
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
		wait = min(2*wait, lastRetry)
	}
}

// try moves the disk. A source that changes under way is begun again, once.
func (t *transfer) try(ctx context.Context, spec source.Spec, out *output, show *display) (facts mover.Facts, err error) {
	deps := mover.Deps{Kinds: localSources, Dial: dial, Target: out.disk, Ledger: out, Moved: &out.moved}
	err = t.patiently(ctx, show, func() int64 { return out.journal.Done.Bytes() }, func() error {
		var err error
		facts, err = mover.Run(ctx, deps, out.job(spec, t.from))
		if f := (*fault.Fault)(nil); errors.As(err, &f) && f.Reason == fault.NeedsSpool {
			show.say("the image comes only from its beginning to its end, and has to be read in another order: it is unpacked to a temporary file first")
			facts, err = spooled(out.spoolDir(), func(spool *mover.Spool) (mover.Facts, error) {
				deps := deps
				deps.Spool = spool
				return mover.Run(ctx, deps, out.job(spec, t.from))
			})
		}
		return ended(out, err)
	})
	return facts, err
}

// target is what an import writes to.
type target interface {
	commit() error
	restarts() int
	// restart forgets what is done, because it is of another content than what the
	// source has now.
	restart() error
	// discard takes away what came and is not what was meant.
	discard() error
}

// ended does what the end of a run with err asks for.
func ended(out target, err error) error {
	// What is written counts, whatever ended the run.
	if cerr := out.commit(); cerr != nil {
		return errors.Join(err, cerr)
	}
	var f *fault.Fault
	switch {
	case !errors.As(err, &f):
	case f.Reason == fault.ChecksumMismatch:
		return errors.Join(err, out.discard())
	case f.Reason == fault.SourceChanged && out.restarts() > 0:
		return fault.Terminal(fault.SourceChanged, fmt.Errorf("the source changes again and again while it is read: import from one that stays as it is: %w", err))
	case f.Reason == fault.SourceChanged:
		if rerr := out.restart(); rerr != nil {
			return errors.Join(err, rerr)
		}
	}
	return err
}

// spoolBytes are the most that an image may have that is unpacked; what there is
// room for is found out.
const spoolBytes = 8 << 40

// spoolDir is where images are unpacked to: beside the target where that is a file.
func (o *output) spoolDir() string {
	if o.device {
		return os.TempDir()
	}
	return filepath.Dir(o.path)
}

// spooled runs with a spool, a file without a name in dir.
func spooled(dir string, run func(*mover.Spool) (mover.Facts, error)) (mover.Facts, error) {
	f, err := os.CreateTemp(dir, ".longshore-spool-")
	if err != nil {
		return mover.Facts{}, targetFault(err)
	}
	defer f.Close()
	if err := errors.Join(os.Remove(f.Name()), f.Truncate(spoolBytes)); err != nil {
		return mover.Facts{}, targetFault(err)
	}
	spool, err := mover.NewSpool([]*os.File{f}, spoolBytes, spoolBytes)
	if err != nil {
		return mover.Facts{}, err
	}
	return run(spool)
}

// defaultJournal is the journal of target: beside a file; a device's in the
// user's cache folder, because /dev forgets.
func defaultJournal(target string) (string, error) {
	abs, err := filepath.Abs(target)
	if err != nil {
		return "", err
	}
	info, err := os.Stat(abs)
	if err != nil || info.Mode()&os.ModeDevice == 0 {
		return abs + ".longshore-journal", nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("%w: say where with --journal", err)
	}
	dir := filepath.Join(cache, "longshore", "journals")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	return filepath.Join(dir, filepath.Base(abs)+".longshore-journal"), nil
}

// output is the disk that an import writes to.
type output struct {
	ledger
	file   *os.File
	disk   *device.File
	device bool
	fresh  bool // it reads as zeros where this import has not written
	made   bool // there was no such file before
}

// open opens the target for a disk of info, or makes it, and its journal. It
// refuses to overwrite what another program, or another import, has put there.
func (t *transfer) open(info image.Info, want int64, recipe string) (*output, error) {
	need := max(info.VirtualSize, info.AtLeast)
	if want > 0 && want < need {
		return nil, fault.Terminal(fault.ImageTooLarge, fmt.Errorf("the disk has %d bytes and --size says %d: give at least %d", need, want, need))
	}
	st, err := os.Stat(t.target)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, targetFault(err)
	}
	o := &output{ledger: ledger{path: t.target, disk: true, journalPath: t.journalPath, last: time.Now()}}
	o.sync = func() error { return o.disk.Sync() }
	o.made = err != nil
	if !o.made {
		if from, err := os.Stat(t.source); err == nil && os.SameFile(from, st) {
			return nil, fault.Terminal(fault.TargetError, fmt.Errorf("%s is the source itself: give another target", t.target))
		}
		o.device = st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0
		if st.IsDir() {
			return nil, fault.Terminal(fault.TargetError, fmt.Errorf("%s is a folder: give the path of a file in it, or of a block device", t.target))
		}
		if !o.device && !st.Mode().IsRegular() {
			return nil, fault.Terminal(fault.TargetError, fmt.Errorf("%s is neither a file nor a block device (%s): give the path of one", t.target, st.Mode().Type()))
		}
	}
	flags := os.O_RDWR
	switch {
	case o.device:
		flags |= os.O_EXCL // of a device: nobody has mounted it
	default:
		flags |= os.O_CREATE
	}
	if o.file, err = os.OpenFile(t.target, flags, 0o644); err != nil {
		return nil, targetFault(err)
	}
	if !o.device {
		if err := lock(o.file); err != nil {
			return nil, errors.Join(err, o.file.Close())
		}
	}
	if err := o.prepare(t, need, info, want, recipe); err != nil {
		return nil, errors.Join(err, o.abandon())
	}
	return o, nil
}

// abandon closes the target, and leaves no trace of an import that has written
// nothing to a file that it made.
func (o *output) abandon() error {
	err := o.file.Close()
	if o.made && (o.journal == nil || o.journal.Done.Bytes() == 0) {
		err = errors.Join(err, journal.Remove(o.journalPath), os.Remove(o.path))
	}
	return err
}

func (o *output) prepare(t *transfer, need int64, info image.Info, want int64, recipe string) error {
	had, err := sizeOf(o.file)
	if err != nil {
		return err
	}
	id, err := identity(o.file)
	if err != nil {
		return err
	}
	bytes := had
	if !o.device {
		bytes = max(need, want)
		if info.VirtualSize < 0 && want == 0 {
			bytes = unknownBytes
		}
	} else if want > had {
		return fault.Terminal(fault.ImageTooLarge, fmt.Errorf("%s has %d bytes and --size says %d: use a larger device", o.path, had, want))
	}
	if o.device && need > had {
		return fault.Terminal(fault.ImageTooLarge, fmt.Errorf("the disk has %d bytes and %s only %d: use a device of at least %d bytes", need, o.path, had, need))
	}
	if err := o.load(id, recipe, bytes); err != nil {
		return err
	}
	if o.resumed {
		o.fresh = !o.device && !o.journal.Soiled
	} else {
		full, err := holdsData(o.file, o.device, had)
		if err != nil {
			return err
		}
		if full && !t.force {
			return fault.Terminal(fault.TargetError, fmt.Errorf("%s is not empty and no journal says that it is this import's: give another target, or overwrite it with --force", o.path))
		}
		o.fresh = !o.device
		o.journal = &journal.Journal{Target: id, Recipe: recipe, Bytes: bytes, VirtualBytes: -1}
		// On record before anything is touched: whoever finds the target not empty
		// after a kill also finds whose it is.
		if err := o.save(); err != nil {
			return err
		}
		if !o.device {
			if err := o.file.Truncate(0); err != nil {
				return targetFault(err)
			}
		}
	}
	if !o.device {
		if err := enoughSpace(o.file, info, o.journal.Done, bytes, t.preallocate && info.VirtualSize >= 0); err != nil {
			return err
		}
		if err := o.file.Truncate(bytes); err != nil {
			if info.VirtualSize < 0 && want == 0 {
				return targetFault(fmt.Errorf("%w: the image does not say how large its disk is; say with --size how large it may be", err))
			}
			return targetFault(err)
		}
	}
	if o.disk, err = device.NewFile(o.file, bytes); err != nil {
		return targetFault(err)
	}
	if t.preallocate && !o.device {
		if bytes == unknownBytes {
			return fault.Terminal(fault.TargetError, errors.New("the image does not say how large its disk is: --preallocate needs --size"))
		}
		o.disk.KeepAllocated = true
		if err := o.disk.Preallocate(); err != nil {
			return targetFault(err)
		}
	}
	return nil
}

// job is what is left to do.
func (o *output) job(spec source.Spec, from origin) mover.Job {
	o.mu.Lock()
	defer o.mu.Unlock()
	j := mover.Job{Source: spec, TargetBytes: o.journal.Bytes, KnownZero: o.fresh, KeepAllocated: o.disk.KeepAllocated, Format: from.format, Disk: from.disk, Done: o.journal.Done,
		Checksum: from.checksum, HashState: mover.HashState{At: o.journal.HashAt, State: o.journal.HashState}}
	if o.journal.Validator != nil {
		facts, err := factsOf(o.journal)
		if err == nil {
			j.Resume = &facts
		} else {
			j.Done, j.KnownZero = extent.Set{}, false
		}
	}
	return j
}

func (o *output) restart() error {
	o.fresh = false
	return o.forget()
}

// discard makes zeros of it.
func (o *output) discard() error {
	if err := o.restart(); err != nil {
		return err
	}
	if o.made {
		return nil // it goes as a whole
	}
	if err := errors.Join(o.disk.Zero(0, o.journal.Bytes), o.disk.Sync()); err != nil {
		return targetFault(err)
	}
	return targetFault(journal.Remove(o.journalPath))
}

// sumUp returns the disk's digest; what no hash is recorded of is read once more.
func (o *output) sumUp(ctx context.Context, size int64) (string, error) {
	if err := o.journal.Sums.Complete(ctx, o.disk, size); err != nil {
		return "", targetFault(err)
	}
	return o.journal.Sums.Sum(size)
}

// finish gives the target its final size, returns that, and takes the journal away.
func (o *output) finish(virtual, want int64) (int64, error) {
	bytes := max(virtual, want)
	if !o.device {
		if err := o.file.Truncate(bytes); err != nil {
			return 0, targetFault(err)
		}
	}
	if err := o.file.Sync(); err != nil {
		return 0, targetFault(err)
	}
	if o.device {
		bytes = virtual
	} else if err := syncFolder(o.path); err != nil {
		return 0, targetFault(err)
	}
	if err := journal.Remove(o.journalPath); err != nil {
		return 0, targetFault(err)
	}
	return bytes, nil
}
