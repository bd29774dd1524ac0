package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/mover"
)

// ledger is the mover's, and the record of what is durable of an import's target.
type ledger struct {
	path    string       // of the target, for messages
	sync    func() error // makes durable what the target holds
	disk    bool         // else an archive, which has no digest
	resumed bool
	moved   mover.Moved

	journalPath string
	mu          sync.Mutex // held for what follows
	journal     *journal.Journal
	pending     extent.Set
	sums        digest.Tree // of what is pending
	unread      int64       // bytes pending
	last        time.Time
}

// load reads the journal. One of another target or another source is no
// reason to stop here: the target is looked at instead.
func (l *ledger) load(id, recipe string, bytes int64) error {
	_, err := os.Stat(l.journalPath)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	j, err := journal.Load(l.journalPath, id, recipe, bytes)
	var discarded *journal.Discarded
	if errors.As(err, &discarded) {
		return nil
	}
	if err != nil {
		return targetFault(err)
	}
	l.journal, l.resumed = j, true
	return nil
}

// Began puts what is known of the source on record before the first write.
func (l *ledger) Began(_ context.Context, f mover.Facts) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := recordFacts(l.journal, f); err != nil {
		return err
	}
	return l.save()
}

// save makes the journal durable.
func (l *ledger) save() error {
	if err := l.journal.Save(l.journalPath); err != nil {
		return targetFault(fmt.Errorf("journal %s: %w", l.journalPath, err))
	}
	return nil
}

// Done is told that a range is written. It commits when enough is written, and
// the other workers wait meanwhile: so a kill costs a bounded number of bytes.
func (l *ledger) Done(_ context.Context, off, n int64, data []byte) error {
	sums := digest.Sums(off, data)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.disk {
		if err := l.sums.Add(off, n, sums); err != nil {
			return err
		}
	}
	l.pending.Add(off, n)
	l.unread += n
	if l.unread < commitBytes && time.Since(l.last) < commitAge {
		return nil
	}
	return l.commitLocked()
}

// Hashed notes how far the checksum has come.
func (l *ledger) Hashed(s mover.HashState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.journal.HashAt, l.journal.HashState = s.At, s.State
}

// Flush commits all that is written.
func (l *ledger) Flush(context.Context) error { return l.commit() }

func (l *ledger) commit() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.commitLocked()
}

func (l *ledger) commitLocked() error {
	if len(l.pending.Ranges()) == 0 {
		return nil
	}
	pending, sums := l.pending, l.sums
	l.pending, l.sums, l.unread, l.last = extent.Set{}, digest.Tree{}, 0, time.Now()
	// After a failed sync nothing of it counts: it is read from the source again.
	if err := l.sync(); err != nil {
		return fault.Transient(fault.TargetError, fmt.Errorf("sync %s: %w", l.path, err))
	}
	for _, done := range pending.Ranges() {
		l.journal.Done.Add(done.Start, done.Length)
	}
	l.journal.Sums.Join(&sums)
	l.journal.Read = l.moved.Read.Load()
	return l.save()
}

// restarts counts how often the source was found changed.
func (l *ledger) restarts() int { return l.journal.Restarts }

// forget records that nothing is done, and that the target holds something else.
func (l *ledger) forget() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.journal
	l.journal = &journal.Journal{Target: old.Target, Recipe: old.Recipe, Bytes: old.Bytes, VirtualBytes: -1, Restarts: old.Restarts + 1, Soiled: true}
	return l.save()
}

// effort is what the import took, for its last words.
func (l *ledger) effort(start time.Time) string {
	took := time.Since(start).Round(10 * time.Millisecond)
	if n := l.moved.Read.Load(); n > 0 {
		return fmt.Sprintf(", %d bytes read over the network, %s", n, took)
	}
	return fmt.Sprintf(", %s", took)
}
