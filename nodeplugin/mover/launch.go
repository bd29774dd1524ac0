package mover

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/archive"
	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/sandbox"
)

const (
	// DefaultMemoryBytes is what a mover may have, with the page cache that it
	// causes: four times what it needs, for the images that want to be looked back at
	// from afar while they are decompressed.
	DefaultMemoryBytes = 256 << 20

	// A batch is made durable when it has so many bytes that were read for it, when
	// its first range is so old, or when the mover waits for that.
	batchBytes = 16 << 20
	batchAge   = time.Second
	batchMost  = 4096 // ranges

	silence    = time.Minute      // a mover that says nothing, or does not listen, for so long is stuck
	standstill = 10 * time.Minute // one that reads and writes nothing is of no use
	lastWords  = 5 * time.Second
	dialsMost  = 32

	maxHashState = 512 // bytes: that of SHA-512 has 204
)

// Node is what a mover may ask of the one who launched it. Began and Commit are
// called one after the other, Moved and Dial beside them.
type Node interface {
	// Began is told what the mover found before it writes anything; once it
	// returned nil that is on record.
	Began(ctx context.Context, f Facts) error
	// Commit makes durable what the mover wrote to ranges of the target, all of
	// them inside it, and records that. sums are of what lies there now; those of an
	// archive are empty. After an error nothing of it may be recorded, and the mover is killed.
	Commit(ctx context.Context, ranges []extent.Range, sums *digest.Tree) error
	// Hashed is told how far the checksum has come, as Ledger's.
	Hashed(s HashState)
	// Moved is told the counters of this mover about once a second.
	Moved(done, read int64)
	// Dial connects, or returns a fault. It is called from many goroutines.
	Dial(ctx context.Context, network, address string) (net.Conn, error)
}

// Result is how a mover ended that did its job.
type Result struct {
	// VirtualBytes is the size of the disk that the target now holds.
	VirtualBytes int64
}

// Usage is what a mover took, also one that did not do its job.
type Usage struct {
	// PeakBytes is the most memory it had, page cache included; 0 where no
	// cgroup counted it.
	PeakBytes int64
	// Bound is what kept it in its bound, as sandbox.Process has it.
	Bound string
}

// Launcher starts movers. The zero Launcher is usable.
type Launcher struct {
	// Program is the path of the movers' program; "" is this very one.
	Program string
	// MemoryBytes bounds each; 0 is DefaultMemoryBytes.
	MemoryBytes int64
	// Roots are the certificates, PEM, that servers are checked with; nil is
	// the system's.
	Roots []byte
	// UID and GID of the movers; 0 is sandbox.NobodyID.
	UID, GID int
	// Ended, if it is set, is told what each mover took.
	Ended func(Usage)
}

// Move runs j in a mover of its own, on target, and serves it until it ends.
// target is a regular file or a disk of j.TargetBytes; that of an archive is the root
// of a mount that no path leads to. Errors are faults, or ctx's. When Move returns,
// the mover is gone.
func (l Launcher) Move(ctx context.Context, target *os.File, j Job, n Node) (Result, error) {
	// A descriptor shares its flags and offset with its duplicates; the mover
	// gets one that it shares with nobody.
	flags, longest := os.O_RDWR, j.TargetBytes
	if j.Archive {
		flags, longest = os.O_RDONLY|unix.O_DIRECTORY, archive.MaxFileBytes
	}
	own, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", target.Fd()), flags, 0)
	if err != nil {
		return Result{}, fault.Transient(fault.TargetError, fmt.Errorf("open %s for the mover: %w", target.Name(), err))
	}
	defer own.Close()
	if j.Archive {
		if err := noWayUp(own); err != nil {
			return Result{}, err
		}
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return Result{}, err
	}
	defer ours.conn.Close()
	defer theirs.Close()
	c := sandbox.Config{
		Program: l.Program,
		Args:    []string{Subcommand}, Env: []string{"SSL_CERT_FILE=/" + rootsName}, Files: append([]*os.File{theirs, own}, j.Spool...),
		Text: map[string][]byte{rootsName: l.Roots}, Folder: j.Archive, MemoryBytes: l.MemoryBytes, FileBytes: longest, UID: l.UID, GID: l.GID,
	}
	if c.MemoryBytes == 0 {
		c.MemoryBytes = DefaultMemoryBytes
	}
	if l.Roots == nil {
		if c.Text[rootsName], err = systemRoots(); err != nil {
			return Result{}, err
		}
	}
	j.SpoolFiles = len(j.Spool)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p, err := sandbox.Start(ctx, c)
	if err != nil {
		return Result{}, fault.Transient(fault.MoverDied, fmt.Errorf("start a mover: %w", err))
	}
	theirs.Close() // so that the mover's end is the last one
	res, err := newSession(ours, j, n).serve(ctx)
	if errors.Is(err, errEnded) {
		// It is about to end; how, is what we want to know.
		defer time.AfterFunc(lastWords, p.Kill).Stop()
	} else {
		p.Kill()
	}
	died := p.Wait()
	if l.Ended != nil {
		l.Ended(Usage{PeakBytes: p.PeakBytes(), Bound: p.Bound()})
	}
	if errors.Is(err, errEnded) {
		return Result{}, deathFault(ctx, died, c.MemoryBytes)
	}
	return res, err
}

// noWayUp refuses a folder that a process, to which it is handed, could leave upwards.
func noWayUp(dir *os.File) error {
	var here, up unix.Stat_t
	if err := errors.Join(unix.Fstat(int(dir.Fd()), &here), unix.Fstatat(int(dir.Fd()), "..", &up, 0)); err != nil {
		return fault.Transient(fault.TargetError, fmt.Errorf("look at the folder above %s: %w", dir.Name(), err))
	}
	if here.Dev != up.Dev || here.Ino != up.Ino {
		return fault.Transient(fault.TargetError, fmt.Errorf("%s is not the root of a mount of its own: a mover could leave it", dir.Name()))
	}
	return nil
}

// deathFault words the end of a mover that gave no result.
func deathFault(ctx context.Context, err error, memory int64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var d *sandbox.Died
	if errors.As(err, &d) && d.OutOfMemory {
		return fault.Transient(fault.MoverMemory, fmt.Errorf("the mover needs more than the %d bytes of memory that it may have: if the image is sound, raise the Helm value mover.memoryBytes", memory))
	}
	if err == nil {
		err = errEnded
	}
	return fault.Transient(fault.MoverDied, fmt.Errorf("the mover ended in the middle of its work: %w", err))
}

// errEnded says that the mover closed the control socket and gave no result.
var errEnded = errors.New("no result was given")

// session is one mover being served.
type session struct {
	socket  *socket
	node    Node
	job     Job
	silence time.Duration // the constants, save in tests
	age     time.Duration

	committing sync.Mutex // held while a batch is made durable
	mu         sync.Mutex // held for what follows
	batch      []extent.Range
	sums       *digest.Tree // of the batch
	upTo       uint64       // the number of the last done in batch
	bytes      int64        // read for batch
	full       chan struct{}
	fresh      chan struct{}
}

func newSession(sock *socket, j Job, n Node) *session {
	return &session{socket: sock, node: n, job: j, sums: &digest.Tree{}, silence: silence, age: batchAge, full: make(chan struct{}, 1), fresh: make(chan struct{}, 1)}
}

// serve hands the mover its job and does what it asks until it has told the
// result. What it has written so far is committed also if that is a fault.
func (s *session) serve(ctx context.Context) (Result, error) {
	g, inner := errgroup.WithContext(ctx)
	dials := &errgroup.Group{} // they end with inner
	dials.SetLimit(dialsMost)
	var res Result
	if err := s.mayWrite(ctx); err != nil {
		return Result{}, err
	}
	g.Go(func() error {
		if err := s.socket.sendJob(s.job); err != nil {
			return s.stuck(inner, orEnded(err))
		}
		var err error
		res, err = s.read(inner, dials)
		if err == nil {
			err = errDone // ends the others
		}
		return s.stuck(inner, err)
	})
	g.Go(func() error { return s.stuck(inner, s.commitBatches(inner)) })
	g.Go(func() error { // a read or write that waits for the mover ends with inner
		<-inner.Done()
		return s.socket.conn.SetDeadline(time.Unix(1, 0))
	})
	err := g.Wait()
	if derr := dials.Wait(); err == nil {
		err = derr
	}
	if ctx.Err() != nil {
		return Result{}, context.Cause(ctx)
	}
	if errors.Is(err, errCommit) {
		return Result{}, err
	}
	// What the mover said to be done is written, whatever became of the mover.
	if cerr := s.commit(ctx, false); cerr != nil {
		return Result{}, cerr
	}
	if errors.Is(err, errDone) {
		return res, nil
	}
	return Result{}, err
}

var (
	errDone   = errors.New("the mover is done")
	errCommit = errors.New("not committed")
)

// read does what the mover's packets ask for and returns the result.
func (s *session) read(ctx context.Context, dials *errgroup.Group) (Result, error) {
	var begun bool
	var lastDone, lastRead int64
	moved := time.Now()
	for {
		if err := s.socket.conn.SetReadDeadline(time.Now().Add(s.silence)); err != nil {
			return Result{}, err
		}
		if ctx.Err() != nil { // the deadline that ends us may have been overwritten
			return Result{}, ctx.Err()
		}
		p, err := s.socket.receive()
		if err != nil {
			return Result{}, orEnded(err)
		}
		switch p.Kind {
		case found:
			f, err := decodeFacts(p.Text)
			if err != nil || begun {
				return Result{}, misbehaved("second or bad facts", err)
			}
			if f.VirtualBytes < -1 || f.VirtualBytes > s.job.TargetBytes || f.AllocatedBytes < -1 {
				return Result{}, misbehaved(fmt.Sprintf("a disk of %d bytes, %d of them allocated, for a target of %d", f.VirtualBytes, f.AllocatedBytes, s.job.TargetBytes), nil)
			}
			begun = true
			if err := s.node.Began(ctx, f); err != nil {
				return Result{}, err
			}
			if err := s.send(ctx, packet{Kind: proceed}); err != nil {
				return Result{}, orEnded(err)
			}
		case dial:
			network, address, _ := strings.Cut(string(p.Text), " ")
			id := p.ID
			if !dials.TryGo(func() error { return s.dial(ctx, id, network, address) }) {
				err := fault.Transient(fault.ConnectionFailed, fmt.Errorf("connect to %.64q: more than %d connections are being made", address, dialsMost))
				if err := s.send(ctx, packet{Kind: refused, ID: id}.withFault(err)); err != nil {
					return Result{}, orEnded(err)
				}
			}
		case done:
			if !begun || p.A < 0 || p.B <= 0 || p.A > s.job.TargetBytes-p.B {
				return Result{}, misbehaved(fmt.Sprintf("%d bytes at %d done of a target of %d", p.B, p.A, s.job.TargetBytes), nil)
			}
			if err := s.add(ctx, p); err != nil {
				return Result{}, err
			}
		case hashed:
			if p.A < 0 || len(p.Text) > maxHashState {
				return Result{}, misbehaved(fmt.Sprintf("a hash of %d bytes, %d bytes long", p.A, len(p.Text)), nil)
			}
			s.node.Hashed(HashState{At: p.A, State: bytes.Clone(p.Text)})
		case progress:
			if p.A != lastDone || p.B != lastRead {
				lastDone, lastRead, moved = p.A, p.B, time.Now()
			} else if time.Since(moved) > standstill {
				return Result{}, fault.Transient(fault.TooSlow, fmt.Errorf("nothing was read or written for %v", standstill))
			}
			s.node.Moved(clamp(p.A, s.job.TargetBytes), max(p.B, 0))
		case flush:
			notify(s.full)
		case result:
			if p.Flags&ok == 0 {
				return Result{}, p.fault()
			}
			if !begun || p.A < 0 || p.A > s.job.TargetBytes {
				return Result{}, misbehaved(fmt.Sprintf("a disk of %d bytes on a target of %d", p.A, s.job.TargetBytes), nil)
			}
			return Result{VirtualBytes: p.A}, nil
		default:
			return Result{}, misbehaved(fmt.Sprintf("packet of kind %d", p.Kind), nil)
		}
	}
}

func clamp(n, most int64) int64 { return max(0, min(n, most)) }

// misbehaved words what a sound mover never does.
func misbehaved(what string, err error) error {
	if err != nil {
		what += ": " + err.Error()
	}
	return fault.Transient(fault.MoverDied, fmt.Errorf("the mover was killed, it said: %s", clean(what, 256)))
}

// stuck words a deadline that passed though nobody ended the session.
func (s *session) stuck(ctx context.Context, err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() == nil {
		return fault.Transient(fault.MoverDied, fmt.Errorf("the mover says nothing, or does not listen, for %v", s.silence))
	}
	return err
}

// orEnded makes the end of the other side out of what that looks like here.
func orEnded(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return errEnded
	}
	return err
}

// dial connects and hands the connection over. Only a broken control socket is
// an error of the session, and its reader finds that too.
func (s *session) dial(ctx context.Context, id uint64, network, address string) error {
	conn, err := s.node.Dial(ctx, network, address)
	if err != nil {
		_ = s.send(ctx, packet{Kind: refused, ID: id}.withFault(err))
		return nil
	}
	defer conn.Close()
	raw, ok := conn.(syscall.Conn)
	if !ok {
		return fmt.Errorf("hand over a connection of type %T", conn)
	}
	rc, err := raw.SyscallConn()
	if err != nil {
		return err
	}
	if s.mayWrite(ctx) == nil {
		_ = s.socket.sendWith(packet{Kind: dialled, ID: id}, rc)
	}
	return nil
}

// send waits for the mover to listen, but not for ever.
func (s *session) send(ctx context.Context, p packet) error {
	if err := s.mayWrite(ctx); err != nil {
		return err
	}
	return s.socket.send(p)
}

func (s *session) mayWrite(ctx context.Context) error {
	if err := s.socket.conn.SetWriteDeadline(time.Now().Add(s.silence)); err != nil {
		return err
	}
	return ctx.Err() // the deadline that ends us may have been overwritten
}

// add puts a done range into the batch.
func (s *session) add(ctx context.Context, p packet) error {
	var sums []digest.Hash
	for h := range slices.Chunk(p.Text, digest.HashBytes) {
		if len(h) != digest.HashBytes {
			return misbehaved(fmt.Sprintf("hashes of %d bytes", len(p.Text)), nil)
		}
		sums = append(sums, digest.Hash(h))
	}
	s.mu.Lock()
	if !s.job.Archive {
		if err := s.sums.Add(p.A, p.B, sums); err != nil {
			s.mu.Unlock()
			return misbehaved("a range is done", err)
		}
	}
	if len(s.batch) == 0 {
		notify(s.fresh)
	}
	if last := len(s.batch) - 1; last >= 0 && s.batch[last].End() == p.A {
		s.batch[last].Length += p.B
	} else {
		s.batch = append(s.batch, extent.Range{Start: p.A, Length: p.B})
	}
	s.upTo = p.ID
	s.bytes += clamp(p.C, p.B)
	full, overfull := s.bytes >= batchBytes, len(s.batch) >= batchMost
	s.mu.Unlock()
	if full {
		notify(s.full)
	}
	if overfull {
		return s.commit(ctx, true)
	}
	return nil
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// commitBatches makes batches durable when they are full or old.
func (s *session) commitBatches(ctx context.Context) error {
	timer := time.NewTimer(s.age)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.fresh:
		}
		timer.Reset(s.age)
		select {
		case <-ctx.Done():
			return nil
		case <-s.full:
		case <-timer.C:
		}
		if err := s.commit(ctx, true); err != nil {
			return err
		}
	}
}

// commit makes the batch durable and, if tell is set, says so.
func (s *session) commit(ctx context.Context, tell bool) error {
	s.committing.Lock()
	defer s.committing.Unlock()
	s.mu.Lock()
	batch, sums, upTo := s.batch, s.sums, s.upTo
	s.batch, s.sums, s.bytes = nil, &digest.Tree{}, 0
	s.mu.Unlock()
	if len(batch) == 0 {
		return nil
	}
	if err := s.node.Commit(ctx, batch, sums); err != nil {
		return &notCommitted{err}
	}
	if !tell {
		return nil
	}
	return orEndedNil(s.send(ctx, packet{Kind: durable, ID: upTo}))
}

// orEndedNil leaves the end of the other side to the reader.
func orEndedNil(err error) error {
	if err = orEnded(err); errors.Is(err, errEnded) {
		return nil
	}
	return err
}

// notCommitted marks an error of Node.Commit.
type notCommitted struct{ error }

func (e *notCommitted) Unwrap() []error { return []error{e.error, errCommit} }
