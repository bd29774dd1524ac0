package mover

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == Subcommand {
		os.Exit(Main(testKinds))
	}
	os.Exit(m.Run())
}

// testKinds are sources that need no server: they misbehave as hostile images
// or broken code might.
var testKinds = source.Kinds{
	{Name: "disk", Open: func(context.Context, source.Dialer, json.RawMessage) (source.Blob, error) {
		return shelfRanged{&shelf{content: disk(9, 24*mib), validator: source.Validator{ETag: `"9"`}}}, nil
	}},
	{Name: "panic", Open: func(context.Context, source.Dialer, json.RawMessage) (source.Blob, error) {
		panic("a parser's bug")
	}},
	{Name: "glutton", Open: func(context.Context, source.Dialer, json.RawMessage) (source.Blob, error) {
		var all [][]byte
		for {
			all = append(all, bytes.Repeat([]byte{1}, mib))
			if len(all) > 1<<20 {
				return nil, nil
			}
		}
	}},
	{Name: "caller", Open: func(ctx context.Context, dial source.Dialer, params json.RawMessage) (source.Blob, error) {
		var address string
		if err := json.Unmarshal(params, &address); err != nil {
			return nil, err
		}
		conn, err := dial(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		said, err := io.ReadAll(conn)
		return nil, fault.Terminal(fault.NotADiskImage, errors.Join(errors.New("it says "+string(said)), err))
	}},
}

// desk is a Node that remembers.
type desk struct {
	mu      sync.Mutex
	facts   []Facts
	done    extent.Set
	commits int
	fail    func(commit int) error
	dialled atomic.Int32
	refuse  error
}

func (d *desk) Began(_ context.Context, f Facts) error {
	d.facts = append(d.facts, f)
	return nil
}

func (d *desk) Commit(_ context.Context, ranges []extent.Range) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.commits++
	if d.fail != nil {
		if err := d.fail(d.commits); err != nil {
			return err
		}
	}
	for _, r := range ranges {
		d.done.Add(r.Start, r.Length)
	}
	return nil
}

func (d *desk) Moved(int64, int64) {}

func (d *desk) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	d.dialled.Add(1)
	if d.refuse != nil {
		return nil, d.refuse
	}
	return (&net.Dialer{}).DialContext(ctx, network, address)
}

func file(t *testing.T, size int64) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "target"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

func named(kind string, params string) Job {
	if params == "" {
		params = "null"
	}
	return Job{Source: source.Spec{Kind: kind, Params: json.RawMessage(params)}, TargetBytes: 32 * mib, KnownZero: true}
}

func TestMoveInSandbox(t *testing.T) {
	target, d := file(t, 32*mib), &desk{}
	var usage Usage
	l := Launcher{Ended: func(u Usage) { usage = u }}
	res, err := l.Move(t.Context(), target, named("disk", ""), d)
	if err != nil {
		t.Fatal(err)
	}
	if res.VirtualBytes != 24*mib || len(d.facts) != 1 || d.facts[0].Validator.ETag != `"9"` || !d.done.Contains(0, 24*mib) {
		t.Errorf("result %+v, facts %+v, done %v", res, d.facts, d.done.Ranges())
	}
	got := make([]byte, 32*mib)
	if _, err := target.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	check(t, &memory{data: got}, disk(9, 24*mib))
	if usage.Bound == "" || usage.Bound != "rlimit" && usage.PeakBytes == 0 {
		t.Errorf("usage %+v", usage)
	}
	// The mover's flags are not ours.
	if flags, err := unix.FcntlInt(target.Fd(), unix.F_GETFL, 0); err != nil || flags&unix.O_DIRECT != 0 {
		t.Errorf("the target's flags are %#x, %v", flags, err)
	}
}

// Whatever becomes of a mover is a fault that says so.
func TestDeaths(t *testing.T) {
	for _, row := range []struct{ kind, reason, says string }{
		{"panic", fault.MoverDied, "a parser's bug"},
		{"glutton", fault.MoverMemory, "mover.memoryBytes"},
	} {
		t.Run(row.kind, func(t *testing.T) {
			_, err := Launcher{}.Move(t.Context(), file(t, 32*mib), named(row.kind, ""), &desk{})
			f := fault.Of(err)
			if f == nil || f.Terminal || f.Reason != row.reason || !strings.Contains(f.Error(), row.says) {
				t.Errorf("got %+v, want %s that says %q", f, row.reason, row.says)
			}
		})
	}
}

// A connection that the node made works in the mover, and a refusal arrives as
// the fault that it was.
func TestDialling(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err == nil {
			io.WriteString(c, "welcome")
			c.Close()
		}
	}()
	address, err := json.Marshal(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_, err = Launcher{}.Move(t.Context(), file(t, 32*mib), named("caller", string(address)), &desk{})
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.NotADiskImage || !strings.Contains(f.Error(), "it says welcome") {
		t.Errorf("got %+v", f)
	}
	d := &desk{refuse: fault.Terminal(fault.AddressNotAllowed, errors.New("not there"))}
	_, err = Launcher{}.Move(t.Context(), file(t, 32*mib), named("caller", string(address)), d)
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.AddressNotAllowed || f.Error() != "open source: not there" {
		t.Errorf("got %+v", f)
	}
}

// After a failed sync nothing of the batch counts, and the mover goes.
func TestFailedCommit(t *testing.T) {
	d := &desk{fail: func(n int) error { return fault.Transient(fault.TargetError, errors.New("sync: input/output error")) }}
	_, err := Launcher{}.Move(t.Context(), file(t, 32*mib), named("disk", ""), d)
	if f := fault.Of(err); f == nil || f.Terminal || f.Reason != fault.TargetError {
		t.Errorf("got %+v", f)
	}
	if d.done.Len() > 0 || d.commits != 1 {
		t.Errorf("%d commits, done %v", d.commits, d.done.Ranges())
	}
}

// played serves someone who plays the mover on the other end of the socket.
func played(t *testing.T, d *desk, play func(t *testing.T, s *socket)) (Result, error) {
	t.Helper()
	ours, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.conn.Close()
	other, err := newSocket(theirs)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer other.conn.Close()
		if _, err := other.receiveJob(); err != nil {
			t.Error(err)
			return
		}
		play(t, other)
		for { // until the node has enough
			if _, err := other.receive(); err != nil {
				return
			}
		}
	})
	defer wg.Wait()
	defer ours.conn.Close()
	return serve(t.Context(), ours, named("disk", ""), d)
}

func hello(s *socket) error {
	text, err := encodeFacts(Facts{Format: "raw", VirtualBytes: 32 * mib})
	if err != nil {
		return err
	}
	return s.send(packet{Kind: found, Text: text})
}

// A mover that was taken over says what it likes; nothing of that is believed.
func TestHostileMover(t *testing.T) {
	raw := func(b []byte) func(*testing.T, *socket) {
		return func(t *testing.T, s *socket) { s.conn.Write(b) }
	}
	say := func(list ...packet) func(*testing.T, *socket) {
		return func(t *testing.T, s *socket) {
			if err := hello(s); err != nil {
				t.Error(err)
			}
			for _, p := range list {
				s.send(p)
			}
		}
	}
	long := make([]byte, packetBytes+1)
	binary.LittleEndian.PutUint16(long, uint16(progress))
	for _, row := range []struct {
		name string
		play func(*testing.T, *socket)
	}{
		{"an empty-headed packet", raw([]byte("x"))},
		{"a packet that lies about its text", raw(append(make([]byte, headBytes), "text"...))},
		{"a packet that is too long", raw(long)},
		{"an unknown kind", say(packet{Kind: 99})},
		{"a kind of the node's", say(packet{Kind: durable, ID: 1})},
		{"done before the facts", func(_ *testing.T, s *socket) { s.send(packet{Kind: done, ID: 1, A: 0, B: 4096}) }},
		{"done below the target", say(packet{Kind: done, ID: 1, A: -4096, B: 4096})},
		{"done behind the target", say(packet{Kind: done, ID: 1, A: 32 * mib, B: 4096})},
		{"done across the target's end", say(packet{Kind: done, ID: 1, A: 32*mib - 1, B: 2})},
		{"done of nothing", say(packet{Kind: done, ID: 1, A: 0, B: 0})},
		{"done of an overflow", say(packet{Kind: done, ID: 1, A: 1 << 62, B: 1 << 62})},
		{"done of a negative length", say(packet{Kind: done, ID: 1, A: 8, B: -8})},
		{"a second hello", say(packet{Kind: found, Text: []byte(`{}`)})},
		{"facts that are none", func(_ *testing.T, s *socket) { s.send(packet{Kind: found, Text: []byte(`[1`)}) }},
		{"a disk larger than the target", say(packet{Kind: result, Flags: ok, A: 1 << 50})},
		{"a disk of negative size", say(packet{Kind: result, Flags: ok, A: -1})},
		{"success before the facts", func(_ *testing.T, s *socket) { s.send(packet{Kind: result, Flags: ok}) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			d := &desk{}
			res, err := played(t, d, row.play)
			if err == nil {
				t.Fatalf("taken for good: %+v", res)
			}
			if f := fault.Of(err); f.Terminal {
				t.Errorf("got %+v, want a transient fault", f)
			}
			if d.done.Len() > 0 {
				t.Errorf("recorded %v", d.done.Ranges())
			}
		})
	}
}

// What a mover says of its fault is shown to people: it is one line, printable,
// and the reason is a word.
func TestHostileFault(t *testing.T) {
	for _, row := range []struct{ text, reason, message string }{
		{"NotFound\nno such file", fault.NotFound, "no such file"},
		{"<b>x</b>\nmessage", fault.Error, "message"},
		{"", fault.Error, ""},
		{"A\nred \x1b[31m\r\n\x00\xff text", "A", "red  [31m     text"},
		{"A\n" + strings.Repeat("é", 1500), "A", strings.Repeat("é", 1024)},
	} {
		_, err := played(t, &desk{}, func(t *testing.T, s *socket) { s.send(packet{Kind: result, Text: []byte(row.text)}) })
		if f := fault.Of(err); f == nil || f.Reason != row.reason || f.Error() != row.message {
			t.Errorf("%.20q: got %s, %q", row.text, f.Reason, f.Error())
		}
	}
}

// A batch is made durable when it is full or old, and only then the mover is told.
func TestBatches(t *testing.T) {
	d := &desk{}
	_, err := played(t, d, func(t *testing.T, s *socket) {
		if err := hello(s); err != nil {
			t.Error(err)
		}
		expect := func(k kind, id uint64) {
			t.Helper()
			p, err := s.receive()
			if err != nil || p.Kind != k || p.ID != id {
				t.Errorf("got packet %d, %d, %v; want %d, %d", p.Kind, p.ID, err, k, id)
			}
		}
		expect(proceed, 0)
		start := time.Now()
		for i := range int64(16) { // full
			s.send(packet{Kind: done, ID: uint64(i + 1), A: i * mib, B: mib, C: mib})
		}
		expect(durable, 16)
		if took := time.Since(start); took >= batchAge {
			t.Errorf("a full batch waited %v", took)
		}
		s.send(packet{Kind: done, ID: 17, A: 16 * mib, B: mib, C: mib}) // old
		start = time.Now()
		expect(durable, 17)
		if took := time.Since(start); took < batchAge/2 {
			t.Errorf("a small batch waited only %v", took)
		}
		// What is not durable yet when the mover is done becomes it then.
		s.send(packet{Kind: done, ID: 18, A: 17 * mib, B: 15 * mib})
		s.send(packet{Kind: result, Flags: ok, A: 32 * mib})
	})
	if err != nil {
		t.Fatal(err)
	}
	if !d.done.Contains(0, 32*mib) {
		t.Errorf("recorded %v", d.done.Ranges())
	}
}

// Scattered ranges do not pile up in the node plugin.
func TestFloodOfRanges(t *testing.T) {
	d := &desk{}
	most := 0
	d.fail = func(int) error { return nil }
	count := &counting{desk: d, most: &most}
	ours, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	other, err := newSocket(theirs)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer other.conn.Close()
		if _, err := other.receiveJob(); err != nil {
			t.Error(err)
			return
		}
		if err := hello(other); err != nil {
			t.Error(err)
		}
		go func() { // answers are of no interest, but must not pile up either
			for {
				if _, err := other.receive(); err != nil {
					return
				}
			}
		}()
		for i := range uint64(3 * batchMost) {
			if err := other.send(packet{Kind: done, ID: i + 1, A: int64(i) * 2048, B: 1024}); err != nil {
				t.Error(err)
				return
			}
		}
		other.send(packet{Kind: result, Flags: ok, A: 32 * mib})
	})
	_, err = serve(t.Context(), ours, named("disk", ""), count)
	ours.conn.Close()
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if most > batchMost || d.done.Len() != 3*batchMost {
		t.Errorf("up to %d ranges at once, %d in all", most, d.done.Len())
	}
}

type counting struct {
	*desk
	most *int
}

func (c *counting) Commit(ctx context.Context, ranges []extent.Range) error {
	*c.most = max(*c.most, len(ranges))
	return c.desk.Commit(ctx, ranges)
}

func TestCancelEndsService(t *testing.T) {
	ours, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.conn.Close()
	defer theirs.Close() // never reads, never writes
	ctx, cancel := context.WithCancel(t.Context())
	go cancel()
	if _, err := serve(ctx, ours, named("disk", ""), &desk{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestJobOverTheSocket(t *testing.T) {
	ours, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.conn.Close()
	other, err := newSocket(theirs)
	if err != nil {
		t.Fatal(err)
	}
	defer other.conn.Close()
	params, err := json.Marshal(strings.Repeat("c", 200<<10))
	if err != nil {
		t.Fatal(err)
	}
	want := named("disk", string(params))
	want.TargetBytes = 1 << 40
	for i := range int64(20000) {
		want.Done.Add(i<<20, 4096*(1+i%7))
	}
	want.Resume = &Facts{Validator: source.Validator{ETag: `"1"`}, Format: "qcow2", VirtualBytes: 1 << 40}
	sent := make(chan error, 1)
	go func() { sent <- ours.sendJob(want) }()
	got, err := other.receiveJob()
	if err := errors.Join(err, <-sent); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Source.Params, want.Source.Params) || !got.Done.Equal(want.Done) || got.Resume.Validator != want.Resume.Validator || got.TargetBytes != want.TargetBytes {
		t.Error("another job arrived")
	}
	huge := named("disk", `"`+strings.Repeat("c", maxJob)+`"`)
	if f := fault.Of(ours.sendJob(huge)); f == nil || !f.Terminal || f.Reason != fault.InvalidSource {
		t.Errorf("a job that is too long: %+v", f)
	}
}

func FuzzDecode(f *testing.F) {
	b, err := packet{Kind: done, ID: 1, A: 2, B: 3, Text: []byte("x")}.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decode(b)
		if err != nil {
			return
		}
		again, err := p.encode()
		if err == nil && len(again) <= packetBytes && len(again) != len(b) {
			t.Errorf("%d bytes became %d", len(b), len(again))
		}
		_ = p.fault().Error()
		_, _ = decodeFacts(p.Text)
	})
}
