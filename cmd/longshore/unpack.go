package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/archive"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// What a source may be.
const (
	contentDisk    = "kubevirt"
	contentArchive = "archive"
)

// unpack unpacks the archive, as an archive is unpacked into a volume.
func (t *transfer) unpack(cmd *cobra.Command, spec source.Spec, info image.Info, recipe string, show *display, start time.Time) error {
	ctx := cmd.Context()
	out, err := t.openFolder(recipe)
	if err != nil {
		return t.explain(ctx, err)
	}
	if n := out.journal.Done.Bytes(); n > 0 {
		show.say(fmt.Sprintf("going on: %d bytes (%s) of the archive are unpacked already", n, human(n)))
	}
	show.start(info.VirtualSize, out.journal.Done.Bytes(), &out.moved)
	deps := mover.Deps{Kinds: localSources, Dial: dial, Root: out.dir, Ledger: out, Moved: &out.moved}
	var facts mover.Facts
	err = t.patiently(ctx, show, func() int64 { return out.journal.Done.Bytes() }, func() error {
		var err error
		facts, err = mover.Run(ctx, deps, out.job(spec, t.from))
		if err = ended(out, err); isNoGood(err) {
			return errors.Join(err, out.discard())
		}
		return err
	})
	show.stop()
	if err != nil {
		return errors.Join(t.explain(ctx, err), out.abandon())
	}
	if err := errors.Join(out.finish(), out.dir.Close()); err != nil {
		return t.explain(ctx, err)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: unpacked a %s archive of %d bytes (%s)%s\n",
		t.target, formatIn(facts), facts.VirtualBytes, human(facts.VirtualBytes), out.effort(start))
	return nil
}

// folder is what an archive is unpacked in.
type folder struct {
	ledger
	dir  *os.File
	made bool // there was none before
}

// lostAndFound is in a new ext4 before anybody has put anything there.
const lostAndFound = "lost+found"

// openFolder opens the target, or makes it, and its journal. It refuses what somebody
// else has put something in.
func (t *transfer) openFolder(recipe string) (*folder, error) {
	o := &folder{ledger: ledger{path: t.target, journalPath: t.journalPath, last: time.Now()}}
	err := os.Mkdir(t.target, 0o755)
	if o.made = err == nil; err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, targetFault(err)
	}
	if o.dir, err = os.OpenFile(t.target, unix.O_DIRECTORY, 0); err != nil {
		return nil, targetFault(err)
	}
	o.sync = func() error { return unix.Syncfs(int(o.dir.Fd())) }
	if err = lock(o.dir); err == nil {
		err = o.prepare(recipe)
	}
	if err != nil {
		return nil, errors.Join(err, o.abandon())
	}
	return o, nil
}

func (o *folder) prepare(recipe string) error {
	id, err := identity(o.dir)
	if err != nil {
		return err
	}
	if err := o.load(id, recipe, archive.MaxBytes); err != nil {
		return err
	}
	if o.resumed {
		if o.journal.Soiled {
			return o.clear()
		}
		return nil
	}
	names, err := o.names()
	if err != nil {
		return err
	}
	if len(names) > 0 {
		return fault.Terminal(fault.TargetError, fmt.Errorf("%s is not empty and no journal says that it is this import's: give an empty folder", o.path))
	}
	o.journal = &journal.Journal{Target: id, Recipe: recipe, Bytes: archive.MaxBytes, VirtualBytes: -1}
	return o.save()
}

// names are those of what is in the folder.
func (o *folder) names() ([]string, error) {
	_, err := o.dir.Seek(0, io.SeekStart)
	if err != nil {
		return nil, targetFault(err)
	}
	names, err := o.dir.Readdirnames(-1)
	if err != nil {
		return nil, targetFault(err)
	}
	return slices.DeleteFunc(names, func(name string) bool { return name == lostAndFound }), nil
}

// job is what is left to do.
func (o *folder) job(spec source.Spec, from origin) mover.Job {
	o.mu.Lock()
	defer o.mu.Unlock()
	j := mover.Job{Source: spec, Archive: true, TargetBytes: archive.MaxBytes, Checksum: from.checksum, HashState: mover.HashState{At: o.journal.HashAt, State: o.journal.HashState}}
	if facts, err := factsOf(o.journal); err == nil {
		j.Resume, j.Done = &facts, o.journal.Done
	}
	return j
}

func (o *folder) restart() error {
	return errors.Join(o.forget(), o.clear())
}

// clear empties the folder, which was empty before this import.
func (o *folder) clear() error {
	names, err := o.names()
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(o.path)
	if err != nil {
		return targetFault(err)
	}
	defer root.Close()
	for _, name := range names {
		if err := root.RemoveAll(name); err != nil {
			return targetFault(err)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.journal.Soiled = false
	return o.save()
}

func (o *folder) discard() error { return o.restart() }

// isNoGood says that the archive itself is what is wrong. Then nothing of it stays.
func isNoGood(err error) bool {
	var f *fault.Fault
	return errors.As(err, &f) && slices.Contains([]string{fault.UnsafeArchive, fault.CorruptImage, fault.FormatNotSupported, fault.NotAnArchive}, f.Reason)
}

// abandon closes the folder, and leaves no trace of an import of which nothing is there.
func (o *folder) abandon() error {
	if o.journal == nil {
		return o.dir.Close()
	}
	names, err := o.names()
	if err == nil && len(names) == 0 {
		err = journal.Remove(o.journalPath)
		if o.made && err == nil {
			err = os.Remove(o.path)
		}
	}
	return errors.Join(err, o.dir.Close())
}

// finish makes everything durable and takes the journal away.
func (o *folder) finish() error {
	if err := o.sync(); err != nil {
		return targetFault(err)
	}
	return targetFault(journal.Remove(o.journalPath))
}
