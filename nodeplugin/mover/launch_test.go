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

	"github.com/longshore-io/longshore/nodeplugin/digest"
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
	archived,
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
	sums    digest.Tree
	commits int
	fail    func(commit int) error
	dialled atomic.Int32
	refuse  error
}

func (d *desk) Began(_ context.Context, f Facts) error {
	d.facts = append(d.facts, f)
	return nil
}

func (d *desk) Commit(_ context.Context, ranges []extent.Range, sums *digest.Tree) error {
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
	d.sums.Join(sums)
	return nil
}

func (d *desk) Hashed(HashState)   {}
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
	var want digest.Tree
	if err := want.Add(0, 24*mib, digest.Sums(0, disk(9, 24*mib))); err != nil {
		t.Fatal(err)
	}
	sum, err := d.sums.Sum(24 * mib)
	if other, werr := want.Sum(24 * mib); err != nil || werr != nil || sum != other {
		t.Errorf("the mover's hashes make %s, %v; want %s, %v", sum, err, other, werr)
	}
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

// pair returns both ends of a control socket.
func pair(t *testing.T) (node, mover *socket) {
	t.Helper()
	node, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { node.conn.Close() })
	if mover, err = newSocket(theirs); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mover.conn.Close() })
	return node, mover
}

// drain receives until the other end has enough.
func drain(s *socket) {
	for {
		if _, err := s.receive(); err != nil {
			return
		}
	}
}

// played serves someone who plays the mover on the other end of the socket, and
// listens to the end.
func played(t *testing.T, n Node, play func(t *testing.T, s *socket)) (Result, error) {
	t.Helper()
	return playedFor(t, 32*mib, batchAge, n, play)
}

// playedFor is played on so large a target, with batches that become so old.
func playedFor(t *testing.T, bytes int64, age time.Duration, n Node, play func(t *testing.T, s *socket)) (Result, error) {
	t.Helper()
	ours, other := pair(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer other.conn.Close()
		if _, err := other.receiveJob(); err != nil {
			t.Error(err)
			return
		}
		play(t, other)
		drain(other)
	})
	defer wg.Wait()
	defer ours.conn.Close()
	j := named("disk", "")
	j.TargetBytes = bytes
	s := newSession(ours, j, n)
	s.age = age
	return s.serve(t.Context())
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
		{"done of a part of a block", say(packet{Kind: done, ID: 1, A: 4096, B: 4096})},
		{"too few hashes", say(packet{Kind: done, ID: 1, A: 0, B: 3 * digest.Block, Text: make([]byte, digest.HashBytes)})},
		{"too many hashes", say(packet{Kind: done, ID: 1, A: 0, B: 4 * digest.Block, Text: make([]byte, 2*digest.HashBytes)})},
		{"half a hash", say(packet{Kind: done, ID: 1, A: 0, B: digest.Block, Text: make([]byte, digest.HashBytes/2)})},
		{"done of a negative length", say(packet{Kind: done, ID: 1, A: 8, B: -8})},
		{"a second hello", say(packet{Kind: found, Text: []byte(`{}`)})},
		{"facts of a disk larger than the target", func(_ *testing.T, s *socket) { s.send(packet{Kind: found, Text: []byte(`{"virtualBytes": 33554433}`)}) }},
		{"facts of a disk of negative size", func(_ *testing.T, s *socket) { s.send(packet{Kind: found, Text: []byte(`{"virtualBytes": -2}`)}) }},
		{"facts of negative bytes", func(_ *testing.T, s *socket) { s.send(packet{Kind: found, Text: []byte(`{"allocatedBytes": -2}`)}) }},
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

func expect(t *testing.T, s *socket, k kind, id uint64) {
	t.Helper()
	p, err := s.receive()
	if err != nil || p.Kind != k || p.ID != id {
		t.Errorf("got packet %d, %d, %v; want %d, %d", p.Kind, p.ID, err, k, id)
	}
}

// A batch is made durable when it is full, and only then the mover is told.
func TestFullBatch(t *testing.T) {
	d := &desk{}
	_, err := playedFor(t, 32*mib, time.Hour, d, func(t *testing.T, s *socket) {
		if err := hello(s); err != nil {
			t.Error(err)
		}
		expect(t, s, proceed, 0)
		for i := range int64(16) {
			s.send(packet{Kind: done, ID: uint64(i + 1), A: i * mib, B: mib, C: mib})
		}
		expect(t, s, durable, 16)
		// What is not durable yet when the mover is done becomes it then.
		s.send(packet{Kind: done, ID: 17, A: 16 * mib, B: 16 * mib})
		s.send(packet{Kind: result, Flags: ok, A: 32 * mib})
	})
	if err != nil {
		t.Fatal(err)
	}
	if !d.done.Contains(0, 32*mib) || d.commits != 2 {
		t.Errorf("recorded %v in %d commits", d.done.Ranges(), d.commits)
	}
}

// A batch that is not full becomes durable when it is old.
func TestOldBatch(t *testing.T) {
	_, err := playedFor(t, 32*mib, time.Millisecond, &desk{}, func(t *testing.T, s *socket) {
		if err := hello(s); err != nil {
			t.Error(err)
		}
		expect(t, s, proceed, 0)
		for id := range uint64(3) {
			s.send(packet{Kind: done, ID: id + 1, A: int64(id) * mib, B: mib, C: mib})
			expect(t, s, durable, id+1)
		}
		s.send(packet{Kind: result, Flags: ok, A: 32 * mib})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// At the end nobody waits for a batch to become full or old.
func TestFlush(t *testing.T) {
	_, err := playedFor(t, 32*mib, time.Hour, &desk{}, func(t *testing.T, s *socket) {
		if err := hello(s); err != nil {
			t.Error(err)
		}
		expect(t, s, proceed, 0)
		s.send(packet{Kind: done, ID: 1, A: 0, B: mib, C: mib})
		s.send(packet{Kind: flush})
		expect(t, s, durable, 1)
		s.send(packet{Kind: result, Flags: ok, A: 32 * mib})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Scattered ranges do not pile up in the node plugin.
func TestFloodOfRanges(t *testing.T) {
	n := &counting{desk: &desk{}}
	_, err := playedFor(t, 1<<40, batchAge, n, func(t *testing.T, s *socket) {
		if err := hello(s); err != nil {
			t.Error(err)
		}
		var listening sync.WaitGroup
		listening.Go(func() { drain(s) }) // answers must not pile up either
		defer listening.Wait()
		for i := range uint64(3 * batchMost) {
			if err := s.send(packet{Kind: done, ID: i + 1, A: int64(i) * 2 * digest.Block, B: digest.Block}); err != nil {
				t.Error(err)
				return
			}
		}
		s.send(packet{Kind: result, Flags: ok, A: 32 * mib})
	})
	if err != nil {
		t.Fatal(err)
	}
	if n.most > batchMost || n.done.Len() != 3*batchMost {
		t.Errorf("up to %d ranges at once, %d in all", n.most, n.done.Len())
	}
}

// A mover that is stuck, or pretends to be, does not hold its place for ever.
func TestMoverThatIsStuck(t *testing.T) {
	for _, row := range []struct {
		name string
		play func(s *socket)
	}{
		{"takes no job", func(*socket) {}},
		{"says nothing", func(s *socket) { s.receiveJob() }},
		{"asks and does not listen", func(s *socket) {
			for id := uint64(1); s.send(packet{Kind: dial, ID: id, Text: []byte("tcp host:1")}) == nil; id++ {
			}
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			ours, other := pair(t)
			var wg sync.WaitGroup
			wg.Go(func() { row.play(other) })
			j := named("disk", `"`+strings.Repeat("p", 200<<10)+`"`) // more than a socket holds
			s := newSession(ours, j, &desk{refuse: errors.New("no")})
			if row.name != "takes no job" {
				s.job = named("disk", "")
			}
			s.silence = 200 * time.Millisecond
			_, err := s.serve(t.Context())
			if f := fault.Of(err); f == nil || f.Terminal || f.Reason != fault.MoverDied || !strings.Contains(f.Error(), "does not listen") {
				t.Errorf("got %+v, want a transient %s", f, fault.MoverDied)
			}
			ours.conn.Close()
			wg.Wait()
		})
	}
}

type counting struct {
	*desk
	most int
}

func (c *counting) Commit(ctx context.Context, ranges []extent.Range, sums *digest.Tree) error {
	c.most = max(c.most, len(ranges))
	return c.desk.Commit(ctx, ranges, sums)
}

func TestCancelEndsService(t *testing.T) {
	ours, _ := pair(t) // the other end never reads, never writes
	ctx, cancel := context.WithCancel(t.Context())
	go cancel()
	if _, err := newSession(ours, named("disk", ""), &desk{}).serve(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestJobOverTheSocket(t *testing.T) {
	ours, other := pair(t)
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

// FuzzDecode takes any bytes for a packet, and for what each kind has in its text.
func FuzzDecode(f *testing.F) {
	for _, p := range []packet{
		{Kind: done, ID: 1, A: 2, B: 3, Text: []byte("x")},
		{Kind: found, Text: []byte(`{"validator": {"size": 1, "etag": "\u0000"}, "warnings": ["a", ""]}`)},
		packet{Kind: result}.withFault(fault.Terminal(fault.NotFound, errors.New("not there"))),
	} {
		b, err := p.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decode(b)
		if err != nil {
			return
		}
		if again, err := p.encode(); err == nil && !bytes.Equal(again, b) {
			t.Errorf("%x became %x", b, again)
		}
		fl := fault.Of(p.fault())
		if len(fl.Reason) > 64 || len(fl.Error()) > 2048 || strings.ContainsAny(fl.Reason+fl.Error(), "\n\x00\x1b") {
			t.Errorf("a fault of reason %q, message %q", fl.Reason, fl.Error())
		}
		if facts, err := decodeFacts(p.Text); err == nil {
			if text, err := encodeFacts(facts); err == nil && len(text) > textBytes {
				t.Errorf("facts of %d bytes", len(text))
			}
		}
	})
}

// FuzzSession lets a mover say anything: packets, each of a length and bytes.
// Whatever it is, the session ends, and nothing outside the target is recorded.
func FuzzSession(f *testing.F) {
	seed := func(list ...packet) {
		var all []byte
		for _, p := range list {
			b, err := p.encode()
			if err != nil {
				f.Fatal(err)
			}
			all = append(binary.LittleEndian.AppendUint16(all, uint16(len(b))), b...)
		}
		f.Add(all)
	}
	facts := packet{Kind: found, Text: []byte(`{"format": "raw", "virtualBytes": 33554432}`)}
	seed()
	seed(facts, packet{Kind: done, ID: 1, B: 4096, C: 4096}, packet{Kind: progress, A: 4096, B: 1}, packet{Kind: result, Flags: ok, A: 32 * mib})
	seed(facts, packet{Kind: dial, ID: 1, Text: []byte("tcp host:1")}, packet{Kind: done, ID: 1, A: 32*mib - 1, B: 2})
	seed(facts, packet{Kind: done, ID: 1, A: 1, B: 1}, packet{Kind: done, ID: 2, A: 1, B: 3, C: -1}, packet{Kind: result, Text: []byte("NotFound\nnot there")})
	f.Fuzz(func(t *testing.T, b []byte) {
		d := &desk{refuse: fault.Terminal(fault.AddressNotAllowed, errors.New("not there"))}
		res, err := played(t, d, func(_ *testing.T, s *socket) {
			defer s.conn.CloseWrite()
			for len(b) >= 2 {
				n := int(binary.LittleEndian.Uint16(b))
				b = b[2:]
				n = min(n, len(b))
				if _, err := s.conn.Write(b[:n]); err != nil {
					return
				}
				b = b[n:]
			}
		})
		if err == nil && (len(d.facts) != 1 || res.VirtualBytes < 0 || res.VirtualBytes > 32*mib) {
			t.Errorf("result %+v with the facts %+v", res, d.facts)
		}
		for _, r := range d.done.Ranges() {
			if r.Start < 0 || r.End() > 32*mib || len(d.facts) == 0 {
				t.Errorf("recorded %+v with the facts %+v", r, d.facts)
			}
		}
	})
}
