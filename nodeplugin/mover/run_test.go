package mover

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/test/images"
)

const mib = 1 << 20

// memory is a target in memory.
type memory struct {
	mu   sync.Mutex
	data []byte
}

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return copy(m.data[off:], p), nil
}

func (m *memory) ReadAt(p []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := copy(p, m.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (m *memory) Zero(off, n int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.data[off : off+n])
	return nil
}

func (m *memory) Size() int64 { return int64(len(m.data)) }
func (m *memory) Align() int  { return 4096 }

// book is a ledger that remembers, and fails after some bytes.
type book struct {
	mu     sync.Mutex
	facts  []Facts
	done   extent.Set
	stop   int64 // 0 never
	hashed HashState
}

var errStop = errors.New("enough")

func (b *book) Began(_ context.Context, f Facts) error {
	b.facts = append(b.facts, f)
	return nil
}

func (b *book) Done(_ context.Context, off, n int64, data []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stop > 0 && b.done.Bytes() >= b.stop {
		return errStop
	}
	b.done.Add(off, n)
	return nil
}

func (b *book) Hashed(h HashState)          { b.hashed = h }
func (b *book) Flush(context.Context) error { return nil }

// shelf is a source in memory.
type shelf struct {
	content   []byte
	validator source.Validator
	oneWay    bool
	read      extent.Set
	mu        sync.Mutex
}

func (s *shelf) kinds() source.Kinds {
	return source.Kinds{{Name: "shelf", Open: func(context.Context, source.Dialer, json.RawMessage) (source.Blob, error) {
		if s.oneWay {
			return shelfStream{s}, nil
		}
		return shelfRanged{s}, nil
	}}}
}

func (s *shelf) Size() int64 { return int64(len(s.content)) }
func (s *shelf) Validator() source.Validator {
	v := s.validator
	v.Size = s.Size()
	return v
}
func (s *shelf) Close() error { return nil }

type shelfRanged struct{ *shelf }

func (s shelfRanged) ReadAtContext(_ context.Context, p []byte, off int64) (int, error) {
	s.mu.Lock()
	s.read.Add(off, int64(len(p)))
	s.mu.Unlock()
	return bytes.NewReader(s.content).ReadAt(p, off)
}

type shelfStream struct{ *shelf }

func (s shelfStream) Stream(context.Context) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(s.content)), nil
}

// disk is a raw image of random bytes with a boot sector and a hole.
func disk(seed byte, size int) []byte {
	b := make([]byte, size)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	copy(b[510:], "\x55\xaa")
	clear(b[size/2 : size/2+size/8])
	return b
}

func job(target *memory) Job {
	return Job{Source: source.Spec{Kind: "shelf"}, TargetBytes: target.Size(), KnownZero: true}
}

func run(t *testing.T, s *shelf, target *memory, b *book, j Job) (Facts, error) {
	t.Helper()
	return Run(t.Context(), Deps{Kinds: s.kinds(), Target: target, Ledger: b}, j)
}

func check(t *testing.T, target *memory, want []byte) {
	t.Helper()
	full := append(bytes.Clone(want), make([]byte, len(target.data)-len(want))...)
	if !bytes.Equal(target.data, full) {
		t.Error("the target has other bytes")
	}
}

func TestRun(t *testing.T) {
	for _, row := range []struct {
		name   string
		oneWay bool
		tag    string
		zero   bool
	}{
		{"in ranges", false, `"1"`, true},
		{"in ranges, onto old bytes", false, `"1"`, false},
		{"in ranges, without a validator", false, "", true},
		{"one way", true, `"1"`, true},
		{"one way, onto old bytes, without a validator", true, "", false},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := &shelf{content: disk(1, 20*mib+700), validator: source.Validator{ETag: row.tag}, oneWay: row.oneWay}
			target := &memory{data: make([]byte, 24*mib)}
			if !row.zero {
				for i := range target.data {
					target.data[i] = 7
				}
			}
			j := job(target)
			j.KnownZero = row.zero
			// Broken off three times, then to the end.
			b := &book{}
			for range 3 {
				b.stop = b.done.Bytes() + 4*mib
				if _, err := run(t, s, target, b, j); !errors.Is(err, errStop) {
					t.Fatal(err)
				}
				j.Resume, j.Done = &b.facts[len(b.facts)-1], b.done
			}
			b.stop = 0
			done := b.done
			s.read = extent.Set{}
			f, err := run(t, s, target, b, j)
			if err != nil {
				t.Fatal(err)
			}
			if f.VirtualBytes != 20*mib+700 || f.Format != "raw" {
				t.Errorf("facts %+v", f)
			}
			check(t, target, s.content)
			if again := s.read.Bytes() - (s.Size() - done.Bytes()); row.tag != "" && again > 2*mib { // the head and the tail tell the format
				t.Errorf("%d bytes of what was done were read again", again)
			}
		})
	}
}

func TestChangedSource(t *testing.T) {
	content := disk(2, 24*mib)
	other := bytes.Clone(content)
	for i := range other[:20*mib] {
		other[i] ^= 1
	}
	copy(other[510:], "\x55\xaa")
	tag := func(e string) source.Validator { return source.Validator{ETag: e} }
	date := func(d string) source.Validator { return source.Validator{LastModified: d} }
	for _, row := range []struct {
		name          string
		before, after source.Validator
		content       []byte
		changed       bool
	}{
		{"the same ETag", tag(`"1"`), tag(`"1"`), content, false},
		{"another ETag", tag(`"1"`), tag(`"2"`), content, true},
		{"the same date and bytes", date("Mon"), date("Mon"), content, false},
		{"another date", date("Mon"), date("Tue"), content, true},
		{"the same date and other bytes", date("Mon"), date("Mon"), other, true},
		{"a weak ETag and other bytes", tag(`W/"1"`), tag(`W/"1"`), other, true},
		{"nothing and the same bytes", source.Validator{}, source.Validator{}, content, false},
		{"nothing and another length", source.Validator{}, source.Validator{}, content[:23*mib], true},
	} {
		t.Run(row.name, func(t *testing.T) {
			target := &memory{data: make([]byte, 24*mib)}
			s := &shelf{content: content, validator: row.before}
			b := &book{stop: 12 * mib}
			j := job(target)
			if _, err := run(t, s, target, b, j); !errors.Is(err, errStop) {
				t.Fatal(err)
			}
			j.Resume, j.Done, b.stop = &b.facts[0], b.done, 0
			s = &shelf{content: row.content, validator: row.after}
			before := bytes.Clone(target.data)
			_, err := run(t, s, target, b, j)
			if !row.changed {
				if err != nil {
					t.Fatal(err)
				}
				check(t, target, row.content)
				return
			}
			if f := fault.Of(err); f == nil || f.Terminal || f.Reason != fault.SourceChanged {
				t.Fatalf("got %+v, want SourceChanged", f)
			}
			if !bytes.Equal(before, target.data) {
				t.Error("something was written")
			}
		})
	}
}

func TestTooLargeSaysBothSizes(t *testing.T) {
	target := &memory{data: make([]byte, 4*mib)}
	s := &shelf{content: disk(3, 8*mib)}
	b := &book{}
	_, err := run(t, s, target, b, job(target))
	f := fault.Of(err)
	if f == nil || !f.Terminal || f.Reason != fault.ImageTooLarge {
		t.Fatalf("got %+v", f)
	}
	for _, part := range []string{"8388608", "4194304", "request at least 8388608"} {
		if !strings.Contains(f.Error(), part) {
			t.Errorf("%q does not say %q", f, part)
		}
	}
	if len(b.facts) > 0 || !bytes.Equal(target.data, make([]byte, 4*mib)) {
		t.Error("it began all the same")
	}
}

// Whatever the set, the pieces lie in it, do not overlap and are as many as fit.
func TestPick(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	for i := range 300 {
		var set extent.Set
		for range rnd.IntN(10) {
			set.Add(rnd.Int64N(100*mib), 1+rnd.Int64N(20*mib))
		}
		var chosen extent.Set
		var sum int64
		for _, r := range pick(set, 16, rnd.Int64N) {
			if r.Length <= 0 || r.Length > sampleBytes || !set.Contains(r.Start, r.Length) {
				t.Fatalf("%d: piece %v of %v", i, r, set.Ranges())
			}
			chosen.Add(r.Start, r.Length)
			sum += r.Length
		}
		if chosen.Bytes() != sum {
			t.Fatalf("%d: pieces overlap", i)
		}
		if set.Bytes() > 0 && sum == 0 {
			t.Fatalf("%d: nothing of %v", i, set.Ranges())
		}
	}
}

// A copy that leaves something out is no success.
func TestAccountFindsGaps(t *testing.T) {
	a := &account{ledger: &book{}}
	for _, r := range []extent.Range{{Start: 0, Length: 10}, {Start: 20, Length: 10}} {
		if err := a.Done(t.Context(), r.Start, r.Length, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.complete(30); err == nil || !strings.Contains(err.Error(), fmt.Sprint("10 bytes at 10")) {
		t.Errorf("got %v", err)
	}
	if err := a.complete(10); err != nil {
		t.Error(err)
	}
}

// The digests of an OVA's manifest are compared whichever way it comes, whether the
// manifest comes before the disk or behind it, and after an interruption from where the
// run before had come where the source can prove that it is the same.
func TestRunComparesManifests(t *testing.T) {
	content := disk(7, 48*mib)
	vmdk := images.TarMember{Name: "disk1.vmdk", Body: images.VMDK{Compressed: true, Footer: true, Version: 3}.Bytes(content)}
	other := images.TarMember{Name: "disk2.vmdk", Body: disk(8, 24*mib)}
	ovf := images.TarMember{Name: "vm.ovf", Body: []byte(images.OVF("disk1.vmdk", "disk2.vmdk"))}
	went := int64(0)
	for _, algorithm := range []string{"SHA1", "SHA256", "SHA512"} {
		mf := images.Manifest(algorithm, ovf, vmdk, other)
		for name, ova := range map[string][]byte{"the manifest first": images.Tar(ovf, mf, vmdk, other), "the manifest last": images.Tar(ovf, vmdk, other, mf)} {
			damaged := bytes.Clone(ova)
			damaged[bytes.Index(ova, []byte("ddb.geometry"))] ^= 1 // a comment to the disk
			for _, row := range []struct {
				name   string
				etag   string
				oneWay bool
			}{{"in ranges", `"1"`, false}, {"in ranges, with a weak validator", "", false}, {"one way", `"1"`, true}} {
				t.Run(algorithm+", "+name+", "+row.name, func(t *testing.T) {
					s := &shelf{content: ova, validator: source.Validator{ETag: row.etag}, oneWay: row.oneWay}
					target, b := &memory{data: make([]byte, len(content))}, &book{stop: 36 * mib}
					j := job(target)
					j.Disk = "1"
					if _, err := run(t, s, target, b, j); fault.Of(err) == nil {
						t.Fatal("the ledger's error did not end it")
					}
					j.Resume, j.Done, j.HashState = &b.facts[0], b.done, b.hashed
					b.stop, s.read = 0, extent.Set{}
					if row.etag == "" {
						// What an unproven source has is compared at random, which wants a spool.
						if _, err := run(t, s, target, b, j); fault.Of(err) == nil || fault.Of(err).Reason != fault.NeedsSpool || s.read.Bytes() > 20*mib {
							t.Errorf("%d bytes were read, %v", s.read.Bytes(), err)
						}
						j.Resume, j.Done = nil, extent.Set{}
					}
					if _, err := run(t, s, target, b, j); err != nil {
						t.Fatal(err)
					}
					check(t, target, content)
					if row.etag != "" && !row.oneWay {
						// How much of what is not done was fetched before depends on the order of the
						// readers; what is sure is that it does not begin again.
						if most := int64(len(vmdk.Body)) - 4*mib; s.read.Bytes() > most {
							t.Errorf("%d bytes were read again, want at most %d", s.read.Bytes(), most)
						}
						went += j.HashState.At
					}

					s.content = damaged
					_, err := run(t, s, &memory{data: make([]byte, len(content))}, &book{}, Job{Source: j.Source, TargetBytes: j.TargetBytes, Disk: "1"})
					if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.ChecksumMismatch || !strings.Contains(err.Error(), `"disk1.vmdk"`) {
						t.Errorf("of a damaged disk: %v", err)
					}
				})
			}
		}
	}
	if went == 0 {
		t.Error("no run went on from the sums of the one before")
	}
}
