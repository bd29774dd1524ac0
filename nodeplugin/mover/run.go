// Package mover is the engine as a whole, and as a process of its own: it opens
// a source and the image in it, checks that the disk fits, and copies it.
//
// It knows nothing of volumes, journals or retries: whoever runs it is told what
// is written, makes that durable, and says what to skip the next time. Run is
// the engine for a caller in the same process; a Launcher runs it in a sandbox,
// where Main is the program.
package mover

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"

	"github.com/longshore-io/longshore/nodeplugin/blockcopy"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// Job is one transfer, or what is left of it.
type Job struct {
	Source source.Spec `json:"source"`
	// TargetBytes is the size of the target.
	TargetBytes int64 `json:"targetBytes"`
	// KnownZero says that the target reads as zeros where no earlier run of this
	// transfer has written.
	KnownZero bool `json:"knownZero"`
	// KeepAllocated says that the target's blocks are allocated and stay so.
	KeepAllocated bool `json:"keepAllocated"`
	// Format of the image where it is known, else "".
	Format string `json:"format,omitempty"`
	// Disk of a bundle where it is chosen, else "".
	Disk string `json:"disk,omitempty"`
	// Archive: the source is a tar, and the target a folder that it is unpacked in.
	// What is said of the disk's bytes is true of the tar's, decompressed; TargetBytes is
	// archive.MaxBytes.
	Archive bool `json:"archive,omitempty"`
	// Spool is empty, or files as long as the target, beside it, that may hold
	// SpoolBytes in all; only a Launcher looks at it.
	Spool      []*os.File `json:"-"`
	SpoolFiles int        `json:"spoolFiles,omitempty"`
	SpoolBytes int64      `json:"spoolBytes,omitempty"`
	// Checksum of the source's bytes, "algorithm:hex", that must be right; "" is none.
	// HashState is how far an earlier run had come with it, and with the digests in an OVA.
	Checksum  string    `json:"checksum,omitempty"`
	HashState HashState `json:"hashState,omitzero"`
	// Resume is what an earlier run found; nil for the first. Done is what it has
	// written and what has been made durable since.
	Resume *Facts     `json:"resume,omitempty"`
	Done   extent.Set `json:"-"`
}

// Facts are what is known before the first byte is written.
type Facts struct {
	Validator source.Validator `json:"validator"`
	// Format of the disk and Compression around it, as image.Info has them.
	Format      string `json:"format"`
	Compression string `json:"compression,omitempty"`
	// VirtualBytes is the size of the disk, -1 unknown until it is read.
	VirtualBytes int64 `json:"virtualBytes"`
	// AllocatedBytes of it hold data, -1 unknown.
	AllocatedBytes int64    `json:"allocatedBytes"`
	Warnings       []string `json:"warnings,omitempty"`
}

// Ledger is told what is written.
type Ledger interface {
	// Began is told the facts before the first byte is written. It returns when
	// they are on record; an error ends the run.
	Began(ctx context.Context, f Facts) error
	// Done and its errors are as blockcopy.Ledger has them; of an archive there are no data.
	Done(ctx context.Context, off, n int64, data []byte) error
	// Flush returns when all that Done was told is durable.
	Flush(ctx context.Context) error
	// Hashed is told how far the checksum has come; it does not wait for anything to be
	// durable. A later run may begin from there whatever of the disk is written.
	Hashed(s HashState)
}

// Deps are what a run works with.
type Deps struct {
	Kinds  source.Kinds
	Dial   source.Dialer
	Target blockcopy.Target
	// Root is the target of an archive.
	Root   *os.File
	Ledger Ledger
	// Spool, if there is one, is used for an image that is the fault NeedsSpool
	// without it.
	Spool image.Spool
	// Moved, if it is set, counts along: bytes of the disk that are done, those
	// of earlier runs included, and bytes read from the network.
	Moved *Moved
}

// Moved are the counters of a run; they may be read at any time.
type Moved struct{ Done, Read atomic.Int64 }

const (
	// samples is how many pieces of a source without a strong validator are
	// compared with what an earlier run has written.
	samples     = 16
	sampleBytes = 1 << 20
)

// Run moves the disk, or the archive, that the job's source holds onto the target, and returns
// what it was. Errors are faults, or ctx's. After nil the target holds the disk
// and zeros behind it, and all of that is durable as far as the Ledger keeps its
// word.
func Run(ctx context.Context, d Deps, j Job) (Facts, error) {
	if d.Moved == nil {
		d.Moved = &Moved{}
	}
	blob, err := d.Kinds.Open(ctx, counted(d.Dial, &d.Moved.Read), j.Source)
	if err != nil {
		return Facts{}, fmt.Errorf("open source: %w", err)
	}
	defer blob.Close()
	opened, sum, err := open(ctx, d, blob, j)
	if err != nil {
		return Facts{}, err
	}
	defer opened.Close()
	if sum != nil && opened.Resumable() {
		sum.tellTo(d.Ledger.Hashed)
	}
	facts := Facts{
		Validator: blob.Validator(), Format: opened.Info.Format, Compression: opened.Info.Compression,
		VirtualBytes: opened.Info.VirtualSize, AllocatedBytes: opened.Info.AllocatedBytes, Warnings: opened.Info.Warnings,
	}
	disk := opened.Disk
	if j.Archive {
		facts.Format, disk = image.Archive, nil // it is compared while it is unpacked
	} else if err := fit(opened.Info, j.TargetBytes); err != nil {
		return facts, err
	}
	if err := unchanged(ctx, j, facts, disk, d.Target); err != nil {
		return facts, err
	}
	if j.Archive {
		if err := inspect(ctx, d.Root, j, facts, opened); err != nil {
			return facts, err
		}
	}
	if err := d.Ledger.Began(ctx, facts); err != nil {
		return facts, fmt.Errorf("record the facts: %w", err)
	}
	account := &account{ledger: d.Ledger, written: j.Done}
	if j.Archive {
		facts.VirtualBytes, err = unpack(ctx, d, j, facts, opened, account)
	} else {
		facts.VirtualBytes, err = move(ctx, d, j, facts, opened, account)
	}
	if err != nil {
		return facts, fmt.Errorf("copy: %w", err)
	}
	if err := opened.Verify(ctx); err != nil {
		return facts, err
	}
	if sum != nil {
		if err := sum.check(blob.Size()); err != nil {
			return facts, err
		}
	}
	if err := d.Ledger.Flush(ctx); err != nil {
		return facts, fmt.Errorf("flush: %w", err)
	}
	return facts, account.complete(facts.VirtualBytes)
}

// open opens the image. Where a checksum is asked for, or a bundle has digests of the
// files that the disk is in, the source's bytes are summed up on their way to the disk.
func open(ctx context.Context, d Deps, blob source.Blob, j Job) (*image.Opened, *checksums, error) {
	o := image.Options{Format: formatOf(blob, j), Disk: j.Disk, Spool: d.Spool}
	sum, err := pass(&o, blob, j, nil)
	if err != nil {
		return nil, nil, err
	}
	opened, err := image.Open(ctx, blob, o)
	if err == nil && len(opened.Digests) > 0 {
		if sum, err = pass(&o, blob, j, opened.Digests); err != nil {
			return nil, nil, errors.Join(err, opened.Close())
		}
		if err := opened.Close(); err != nil {
			return nil, nil, err
		}
		opened, err = image.Open(ctx, blob, o)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("open image: %w", err)
	}
	return opened, sum, nil
}

// pass has the source's bytes summed up where the job or digests ask for that. Only a strong
// validator proves that bytes which are read twice are the same.
func pass(o *image.Options, blob source.Blob, j Job, digests []image.Digest) (*checksums, error) {
	if j.Checksum == "" && len(digests) == 0 {
		return nil, nil
	}
	v := blob.Validator()
	var from HashState
	if v.Strong() && j.Resume != nil && j.Resume.Validator == v && j.HashState.At <= blob.Size() {
		from = j.HashState
	}
	sum, err := newChecksums(j.Checksum, digests, from)
	if err != nil {
		return nil, err
	}
	o.Pass = &image.Pass{Tap: sum.tap, From: sum.from(), To: sum.to(), Pinned: v.Strong()}
	return sum, nil
}

// formatOf is the image's format where somebody knows it.
func formatOf(blob source.Blob, j Job) string {
	if j.Archive {
		return image.Archive
	}
	if f, ok := blob.(source.Formatted); ok {
		return f.Format()
	}
	return j.Format
}

// fit refuses a disk that is larger than the target. One of unknown size is
// refused by the copy when it turns out to be.
func fit(info image.Info, target int64) error {
	need := max(info.VirtualSize, info.AtLeast)
	if need <= target {
		return nil
	}
	least := ""
	if info.VirtualSize < 0 {
		least = "at least "
	}
	return fault.Terminal(fault.ImageTooLarge,
		fmt.Errorf("the %s image holds a disk of %s%d bytes and the volume has %d: request at least %d bytes (spec.resources.requests.storage)",
			info.Format, least, need, target, need))
}

// move copies the disk and returns its size.
func move(ctx context.Context, d Deps, j Job, f Facts, opened *image.Opened, a *account) (int64, error) {
	d.Moved.Done.Store(j.Done.Bytes())
	o := blockcopy.Options{
		Skip: j.Done, Ledger: a,
		Progress: func(n int64) { d.Moved.Done.Add(n) },
		// Of a source that cannot prove that it is the same, an earlier run may
		// have left other bytes where it had recorded nothing.
		KnownZero: j.KnownZero && (j.Resume == nil || f.Validator.Strong()),
	}
	if opened.Stream != nil {
		return blockcopy.CopyStream(ctx, d.Target, opened.Stream, o)
	}
	return opened.Disk.Size(), blockcopy.Copy(ctx, d.Target, opened.Disk, o)
}

// unchanged returns the fault SourceChanged if the source is not what the run
// that the job resumes has read. Equal strong validators prove it; with weak ones
// pieces of what is done are read again and compared. Streams are compared as a
// whole while they are copied.
func unchanged(ctx context.Context, j Job, f Facts, disk image.Disk, target blockcopy.Target) error {
	if j.Resume == nil {
		return nil
	}
	was := *j.Resume
	switch {
	case was.Validator != f.Validator:
		return fault.Transient(fault.SourceChanged, fmt.Errorf("the source was %s and is now %s", describe(was.Validator), describe(f.Validator)))
	case was.Format != f.Format || was.VirtualBytes >= 0 && f.VirtualBytes >= 0 && was.VirtualBytes != f.VirtualBytes:
		return fault.Transient(fault.SourceChanged, fmt.Errorf("the source was a %s image of %d bytes and is now a %s image of %d bytes", was.Format, was.VirtualBytes, f.Format, f.VirtualBytes))
	case f.Validator.Strong() || disk == nil:
		return nil
	}
	if _, ok := disk.(blockcopy.InOrder); ok { // told before any of it has passed
		return fault.Terminal(fault.NeedsSpool, errors.New("the source cannot prove that it is what an earlier run has read, and comes only from its beginning to its end: pieces of it cannot be compared before the rest is read"))
	}
	pieces, err := choose(ctx, j.Done, disk)
	if err != nil {
		return err
	}
	want, got := make([]byte, sampleBytes), make([]byte, sampleBytes)
	for _, p := range pieces {
		want, got := want[:p.Length], got[:p.Length]
		if _, err := disk.ReadAtContext(ctx, want, p.Start); err != nil {
			return fmt.Errorf("read %d bytes at %d of the source again: %w", p.Length, p.Start, err)
		}
		if _, err := target.ReadAt(got, p.Start); err != nil && !errors.Is(err, io.EOF) {
			return fault.Transient(fault.TargetError, fmt.Errorf("read %d bytes at %d of the target: %w: check the disk that it lies on", p.Length, p.Start, err))
		}
		if !bytes.Equal(want, got) {
			return fault.Transient(fault.SourceChanged, fmt.Errorf("the source says that it is %s as before, but its %d bytes at %d differ from what was copied", describe(f.Validator), p.Length, p.Start))
		}
	}
	return nil
}

// choose picks pieces of done at random, those with data rather than holes,
// which any image may have.
func choose(ctx context.Context, done extent.Set, disk image.Disk) ([]extent.Range, error) {
	inside := done.Intersect(0, disk.Size())
	var data, holes []extent.Range
	for _, r := range pick(inside, 4*samples, rand.Int64N) {
		list, err := disk.Extents(ctx, r.Start, r.Length)
		if err != nil {
			return nil, fmt.Errorf("ask the extents of %d bytes at %d again: %w", r.Length, r.Start, err)
		}
		full := false
		for _, e := range list {
			full = full || e.Kind == extent.Data
		}
		if full {
			data = append(data, r)
		} else {
			holes = append(holes, r)
		}
		if len(data) == samples {
			return data, nil
		}
	}
	all := append(data, holes...)
	return all[:min(len(all), samples)], nil
}

// pick returns up to n pieces of set, of at most sampleBytes, that do not
// overlap, at places that are random in its bytes.
func pick(set extent.Set, n int, random func(int64) int64) []extent.Range {
	total := set.Bytes()
	var left []extent.Range
	var chosen extent.Set
	for range n {
		if total == 0 {
			break
		}
		at := random(total)
		for _, r := range set.Ranges() {
			if at >= r.Length {
				at -= r.Length
				continue
			}
			start := max(r.Start, min(r.Start+at, r.End()-sampleBytes))
			for _, free := range chosen.Missing(start, min(sampleBytes, r.End()-start)) {
				chosen.Add(free.Start, free.Length)
				left = append(left, free)
			}
			break
		}
	}
	return left
}

func describe(v source.Validator) string {
	switch {
	case v.Digest != "":
		return v.Digest
	case v.ETag != "":
		return fmt.Sprintf("%d bytes with the ETag %s", v.Size, v.ETag)
	case v.LastModified != "":
		return fmt.Sprintf("%d bytes of %s", v.Size, v.LastModified)
	}
	return fmt.Sprintf("%d bytes", v.Size)
}

// account is a ledger that also keeps for itself what is written.
type account struct {
	ledger Ledger

	mu      sync.Mutex
	written extent.Set
}

func (a *account) Done(ctx context.Context, off, n int64, data []byte) error {
	a.mu.Lock()
	a.written.Add(off, n)
	a.mu.Unlock()
	return a.ledger.Done(ctx, off, n, data)
}

// complete checks that nothing of the disk was left out.
func (a *account) complete(size int64) error {
	if gaps := a.written.Missing(0, size); len(gaps) > 0 {
		return fmt.Errorf("the copy left out %d ranges, first %d bytes at %d", len(gaps), gaps[0].Length, gaps[0].Start)
	}
	return nil
}

// counted counts the bytes that come in over dial's connections.
func counted(dial source.Dialer, n *atomic.Int64) source.Dialer {
	if dial == nil {
		return nil
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &countedConn{conn, n}, nil
	}
}

type countedConn struct {
	net.Conn
	n *atomic.Int64
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.n.Add(int64(n))
	return n, err
}
