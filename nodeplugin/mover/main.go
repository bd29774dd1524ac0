package mover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/sandbox"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// Subcommand is the first argument of the program that calls Main.
const Subcommand = "mover"

const (
	controlFD = 3 // the control socket
	targetFD  = 4 // the target: open for reading and writing, or a folder
	spoolFD   = 5 // and the following, Job.SpoolFiles of them

	// maxUnflushed is the most that is read and said to be done while the node
	// has not made it durable: with the copy's buffers, what a kill costs.
	maxUnflushed = 32 << 20
	// maxData is longer than any piece that the copy reads at once; what is
	// longer was not read, it is zeros.
	maxData = 4 << 20

	heapBytes   = 40 << 20 // of the copy and its buffers
	tick        = time.Second
	maxInFlight = 64
)

// Main is the mover's program: it is called for Subcommand, in a process that a
// Launcher started, before anything else is opened. It returns the exit status:
// 0 when the node was told the result, good or bad.
func Main(kinds source.Kinds) int {
	if err := sandbox.Enter(); err != nil {
		fmt.Fprintf(os.Stderr, "longshore %s is started by the node plugin, not by hand: %v\n", Subcommand, err)
		return 2
	}
	// What is kept of an image (windows of decompressors, what has just passed) is no
	// garbage, and a limit below that would only keep the collector busy.
	debug.SetMemoryLimit(heapBytes + image.WindowBytes)
	debug.SetGCPercent(25)
	// A direct write blocks a thread and, until the runtime notices, what a
	// processor is to it.
	runtime.GOMAXPROCS(max(4, runtime.NumCPU()))
	if err := serveNode(kinds); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func serveNode(kinds source.Kinds) error {
	control, err := newSocket(os.NewFile(controlFD, "control"))
	if err != nil {
		return err
	}
	job, err := control.receiveJob()
	if err != nil {
		return fmt.Errorf("receive the job: %w", err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	n := &node{control: control, changed: make(chan struct{}), dials: map[uint64]chan<- answer{}}
	go func() {
		cancel(fmt.Errorf("the node plugin is gone: %w", n.listen()))
	}()
	moved := &Moved{}
	facts, err := runJob(ctx, kinds, n, moved, job)
	p := packet{Kind: result, Flags: ok, A: facts.VirtualBytes}
	if err != nil {
		p = p.withFault(err)
	}
	if err := n.tell(moved); err != nil {
		return err
	}
	return control.send(p)
}

func runJob(ctx context.Context, kinds source.Kinds, n *node, moved *Moved, job Job) (Facts, error) {
	d := Deps{Kinds: kinds, Dial: n.dial, Ledger: n, Moved: moved}
	if target := os.NewFile(targetFD, "the volume"); job.Archive {
		d.Root = target
	} else {
		disk, err := device.NewFile(target, job.TargetBytes)
		if err != nil {
			return Facts{}, fault.Transient(fault.TargetError, fmt.Errorf("open the target: %w", err))
		}
		disk.KeepAllocated = job.KeepAllocated
		d.Target = disk
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		ticker := time.NewTicker(tick)
		defer ticker.Stop()
		for {
			select {
			case <-stop:
				return
			case <-ticker.C:
				if n.tell(moved) != nil {
					return // the listener says why
				}
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	if job.SpoolFiles > 0 {
		var files []*os.File
		for i := range job.SpoolFiles {
			files = append(files, os.NewFile(uintptr(spoolFD+i), "the spool"))
		}
		var err error
		if d.Spool, err = NewSpool(files, job.TargetBytes, job.SpoolBytes); err != nil {
			return Facts{}, fault.Transient(fault.TargetError, fmt.Errorf("open the spool: %w", err))
		}
	}
	return Run(ctx, d, job)
}

// node is the node plugin as its mover sees it: it makes connections and keeps
// the ledger.
type node struct {
	control *socket

	order sync.Mutex // held from a done packet's number until it is sent

	// mu is never held while something is sent: the listener needs it, and the
	// node plugin may wait for the listener before it reads on.
	mu       sync.Mutex
	changed  chan struct{} // closed and replaced when something below changes
	begun    bool
	sequence uint64
	waiting  []entry // told to be done, not durable, in order
	unflush  int64   // bytes read for them
	dials    map[uint64]chan<- answer
	lastDial uint64
}

type entry struct {
	sequence uint64
	read     int64
}

type answer struct {
	conn net.Conn
	err  error
}

// listen hands the node's packets to whoever waits for them.
func (n *node) listen() error {
	for {
		p, f, err := n.control.receiveWith()
		if err != nil {
			return err
		}
		if err := n.take(p, f); err != nil {
			return err
		}
	}
}

func (n *node) take(p packet, f *os.File) error {
	var a answer
	if p.Kind == dialled {
		if f == nil {
			return errors.New("a connection was announced and did not come")
		}
		a.conn, a.err = net.FileConn(f)
	} else if p.Kind == refused {
		a.err = p.fault()
	}
	if f != nil {
		f.Close()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch p.Kind {
	case proceed:
		n.begun = true
	case durable:
		for len(n.waiting) > 0 && n.waiting[0].sequence <= p.ID {
			n.unflush -= n.waiting[0].read
			n.waiting = n.waiting[1:]
		}
	case dialled, refused:
		c, ok := n.dials[p.ID]
		delete(n.dials, p.ID)
		if ok {
			c <- a // has room for one
		} else if a.conn != nil {
			a.conn.Close()
		}
		return nil
	default:
		return fmt.Errorf("packet of kind %d from the node plugin", p.Kind)
	}
	close(n.changed)
	n.changed = make(chan struct{})
	return nil
}

// until waits for condition, which is called with n locked, and returns with n
// locked unless there is an error.
func (n *node) until(ctx context.Context, condition func() bool) error {
	for {
		n.mu.Lock()
		if condition() {
			return nil
		}
		changed := n.changed
		n.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// tell sends the counters; it is also the sign of life.
func (n *node) tell(m *Moved) error {
	return n.control.send(packet{Kind: progress, A: m.Done.Load(), B: m.Read.Load()})
}

// Began is Ledger's.
func (n *node) Began(ctx context.Context, f Facts) error {
	text, err := encodeFacts(f)
	if err != nil {
		return err
	}
	if err := n.control.send(packet{Kind: found, Text: text}); err != nil {
		return err
	}
	if err := n.until(ctx, func() bool { return n.begun }); err != nil {
		return err
	}
	n.mu.Unlock()
	return nil
}

// Done is Ledger's.
func (n *node) Done(ctx context.Context, off, length int64, data []byte) error {
	var sums []byte
	for _, h := range digest.Sums(off, data) {
		sums = append(sums, h[:]...)
	}
	read := length
	if read > maxData {
		read = 0
	}
	if err := n.until(ctx, func() bool { return read == 0 || n.unflush == 0 || n.unflush+read <= maxUnflushed }); err != nil {
		return err
	}
	n.unflush += read
	n.mu.Unlock()
	n.order.Lock()
	defer n.order.Unlock()
	n.mu.Lock()
	n.sequence++
	id := n.sequence
	n.waiting = append(n.waiting, entry{id, read})
	n.mu.Unlock()
	return n.control.send(packet{Kind: done, ID: id, A: off, B: length, C: read, Text: sums})
}

// Flush is Ledger's.
func (n *node) Flush(ctx context.Context) error {
	if err := n.control.send(packet{Kind: flush}); err != nil {
		return err
	}
	if err := n.until(ctx, func() bool { return len(n.waiting) == 0 }); err != nil {
		return err
	}
	n.mu.Unlock()
	return nil
}

// Hashed is Ledger's.
func (n *node) Hashed(s HashState) {
	_ = n.control.send(packet{Kind: hashed, A: s.At, Text: s.State}) // the listener says what is wrong with the node
}

// dial has the node plugin connect.
func (n *node) dial(ctx context.Context, network, address string) (net.Conn, error) {
	text := network + " " + address
	if len(text) > textBytes || strings.ContainsAny(network, " ") {
		return nil, fault.Terminal(fault.InvalidSource, fmt.Errorf("connect to %.64q: the address is too long", address))
	}
	c := make(chan answer, 1)
	n.mu.Lock()
	if len(n.dials) >= maxInFlight {
		n.mu.Unlock()
		return nil, fault.Transient(fault.ConnectionFailed, fmt.Errorf("connect to %s: %d connections are being made already", address, maxInFlight))
	}
	n.lastDial++
	id := n.lastDial
	n.dials[id] = c
	n.mu.Unlock()
	if err := n.control.send(packet{Kind: dial, ID: id, Text: []byte(text)}); err != nil {
		return nil, err
	}
	select {
	case a := <-c:
		return a.conn, a.err
	case <-ctx.Done():
	}
	n.mu.Lock()
	_, pending := n.dials[id]
	delete(n.dials, id)
	n.mu.Unlock()
	if !pending { // the answer came meanwhile
		if a := <-c; a.conn != nil {
			a.conn.Close()
		}
	}
	return nil, fmt.Errorf("connect to %s: %w", address, context.Cause(ctx))
}
