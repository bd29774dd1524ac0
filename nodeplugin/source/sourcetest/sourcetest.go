// Package sourcetest holds what every source promises, as tests.
//
// It knows nothing of any one source: a Peer says how content is put where the
// source finds it.
package sourcetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// Peer is a source and the place that it reads from.
type Peer struct {
	Kind source.Kind
	Dial source.Dialer
	// Serve puts content in a new place and returns the parameters that lead there.
	Serve func(t *testing.T, content []byte) json.RawMessage
	// Change puts other content in the place that Serve returned last.
	Change func(t *testing.T, content []byte)
	// ChangeIsSeen says that the source sees a change of content that keeps its
	// length; a change of length is always seen.
	ChangeIsSeen bool
	// Refused are parameters that lead nowhere, by the reason of the terminal
	// fault that they end in.
	Refused map[string]func(t *testing.T) json.RawMessage
	// OneWay says that the source can't read ranges.
	OneWay bool
}

// Dial connects without any policy.
func Dial(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, address)
}

// Content returns n bytes of noise.
func Content(seed uint64, n int) []byte {
	rnd := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), 1})
	b := make([]byte, n)
	rnd.Read(b)
	return b
}

// Run holds the source against its promises.
func Run(t *testing.T, p Peer) {
	t.Run("size and validator", p.identity)
	t.Run("empty", p.empty)
	t.Run("close", p.closed)
	t.Run("cancel", p.cancelled)
	t.Run("change", p.changed)
	if p.OneWay {
		t.Run("stream", p.stream)
	} else {
		t.Run("ranges", p.rangesAreRight)
		t.Run("past the end", p.pastTheEnd)
	}
	for reason, params := range p.Refused {
		t.Run(reason, func(t *testing.T) {
			blob, err := p.Kind.Open(t.Context(), p.Dial, params(t))
			if err == nil {
				blob.Close()
				t.Fatalf("opened, want a terminal fault %s", reason)
			}
			if f := fault.Of(err); !f.Terminal || f.Reason != reason {
				t.Errorf("got the fault %s (terminal %v), want a terminal %s: %v", f.Reason, f.Terminal, reason, err)
			}
		})
	}
}

func (p Peer) open(t *testing.T, content []byte) source.Blob {
	t.Helper()
	return p.openAt(t, p.Serve(t, content))
}

func (p Peer) openAt(t *testing.T, params json.RawMessage) source.Blob {
	t.Helper()
	blob, err := source.Kinds{p.Kind}.Open(t.Context(), p.Dial, source.Spec{Kind: p.Kind.Name, Params: params})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { blob.Close() })
	_, isRanged := blob.(source.Ranged)
	_, isOneWay := blob.(source.OneWay)
	if isRanged == isOneWay || isOneWay != p.OneWay {
		t.Fatalf("the blob is ranged: %v, one way: %v; want one way: %v", isRanged, isOneWay, p.OneWay)
	}
	return blob
}

func (p Peer) identity(t *testing.T) {
	content := Content(1, 300_000)
	params := p.Serve(t, content)
	a, b := p.openAt(t, params), p.openAt(t, params)
	if a.Size() != int64(len(content)) {
		t.Errorf("size is %d, want %d", a.Size(), len(content))
	}
	if a.Validator() != b.Validator() || a.Validator().Size != a.Size() {
		t.Errorf("validators of the same content are %+v and %+v", a.Validator(), b.Validator())
	}
	p.Change(t, Content(2, 299_999))
	if c := p.openAt(t, params); c.Validator() == a.Validator() || c.Size() != 299_999 {
		t.Errorf("the validator of other content is the same: %+v", c.Validator())
	}
}

func (p Peer) empty(t *testing.T) {
	// Nothing can be read in any way.
	blob, err := p.Kind.Open(t.Context(), p.Dial, p.Serve(t, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	if blob.Size() != 0 {
		t.Errorf("size is %d, want 0", blob.Size())
	}
}

// read reads some of the content, by whatever way the blob has.
func read(ctx context.Context, blob source.Blob, off int64) ([]byte, error) {
	if b, ok := blob.(source.Ranged); ok {
		p := make([]byte, 1000)
		n, err := b.ReadAtContext(ctx, p, off)
		return p[:n], err
	}
	r, err := blob.(source.OneWay).Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func (p Peer) closed(t *testing.T) {
	blob := p.open(t, Content(3, 500_000))
	for range 2 {
		if err := blob.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	if b, err := read(t.Context(), blob, 400_000); err == nil {
		t.Errorf("read %d bytes of a closed blob", len(b))
	}
}

func (p Peer) cancelled(t *testing.T) {
	blob := p.open(t, Content(4, 500_000))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if b, err := read(ctx, blob, 400_000); !errors.Is(err, context.Canceled) {
		t.Errorf("read %d bytes under a cancelled context: %v", len(b), err)
	}
	if _, err := read(t.Context(), blob, 400_000); err != nil {
		t.Errorf("the next read: %v", err)
	}
}

func (p Peer) changed(t *testing.T) {
	for _, row := range []struct {
		name string
		size int
		seen bool
	}{
		{"longer", 500_001, true},
		{"shorter", 450_000, true},
		{"of the same length", 500_000, p.ChangeIsSeen},
	} {
		t.Run(row.name, func(t *testing.T) {
			blob := p.open(t, Content(5, 500_000))
			if _, err := read(t.Context(), blob, 300_000); err != nil {
				t.Fatal(err)
			}
			p.Change(t, Content(6, row.size))
			_, err := read(t.Context(), blob, 400_000)
			if f := fault.Of(err); row.seen && (f == nil || f.Reason != fault.SourceChanged) {
				t.Errorf("a read after the change says %v, want a fault %s", err, fault.SourceChanged)
			}
		})
	}
}

func (p Peer) rangesAreRight(t *testing.T) {
	content := Content(7, 3_000_001)
	blob := p.open(t, content).(source.Ranged)
	var wg sync.WaitGroup
	for worker := range uint64(8) {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(worker, 1))
			for range 40 {
				off := rnd.IntN(len(content))
				b := make([]byte, rnd.IntN(min(len(content)-off, 400_000)+1))
				n, err := blob.ReadAtContext(t.Context(), b, int64(off))
				if err != nil || n != len(b) || !bytes.Equal(b, content[off:off+n]) {
					t.Errorf("read %d bytes at %d, got %d, equal %v: %v", len(b), off, n, bytes.Equal(b[:n], content[off:off+n]), err)
				}
			}
		})
	}
	wg.Wait()
}

func (p Peer) pastTheEnd(t *testing.T) {
	content := Content(8, 200_000)
	blob := p.open(t, content).(source.Ranged)
	for _, row := range []struct{ off, length, want int }{
		{199_990, 10, 10},
		{199_990, 11, 10},
		{100_000, 500_000, 100_000},
		{200_000, 1, 0},
		{300_000, 10, 0},
		{200_000, 0, 0},
	} {
		t.Run(fmt.Sprintf("%d at %d", row.length, row.off), func(t *testing.T) {
			b := make([]byte, row.length)
			n, err := blob.ReadAtContext(t.Context(), b, int64(row.off))
			if n != row.want || row.length > row.want && !errors.Is(err, io.EOF) || row.length == row.want && err != nil {
				t.Errorf("got %d bytes and %v, want %d", n, err, row.want)
			}
			if n > 0 && !bytes.Equal(b[:n], content[row.off:row.off+n]) {
				t.Error("the bytes are others")
			}
		})
	}
}

func (p Peer) stream(t *testing.T) {
	content := Content(9, 2_000_003)
	blob := p.open(t, content).(source.OneWay)
	for range 2 {
		r, err := blob.Stream(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("read %d bytes, want %d, equal %v: %v", len(got), len(content), bytes.Equal(got, content), err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}
