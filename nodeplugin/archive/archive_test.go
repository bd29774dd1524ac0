package archive_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/archive"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

// memory is a tar that is read in ranges, and counts what is.
type memory struct {
	b    []byte
	read atomic.Int64
}

func (m *memory) Size() int64 { return int64(len(m.b)) }
func (m *memory) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	m.read.Add(int64(len(p)))
	return bytes.NewReader(m.b).ReadAt(p, off)
}

// oneWay hides that a reader seeks.
type oneWay struct{ io.Reader }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func folder(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Open(t.TempDir())
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// same compares a folder with what the oracle has made.
func same(t *testing.T, got, want map[string]images.Found) {
	t.Helper()
	for name, w := range want {
		g, ok := got[name]
		if !ok {
			t.Errorf("%q is missing", name)
			continue
		}
		if g.Blocks > w.Blocks {
			t.Errorf("%q has %d blocks, want at most %d", name, g.Blocks, w.Blocks)
		}
		g.Blocks, w.Blocks = 0, 0
		if g != w {
			t.Errorf("%q is\n%+v, want\n%+v", name, g, w)
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%q is too much", name)
		}
	}
}

// What is unpacked is what GNU tar makes of it, also when it is interrupted.
func TestLikeTar(t *testing.T) {
	formats := [][]string{
		{"--format=gnu"}, {"--format=gnu", "-S"}, {"--format=oldgnu", "-S"}, {"--format=ustar"}, {"--format=v7"},
		{"--format=pax"}, {"--format=pax", "-S", "--sparse-version=0.0"}, {"--format=pax", "-S", "--sparse-version=0.1"}, {"--format=pax", "-S", "--sparse-version=1.0"},
	}
	for seed := range uint64(45) {
		args := formats[seed%uint64(len(formats))]
		t.Run(fmt.Sprint(seed, args), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			from, tar, want := t.TempDir(), filepath.Join(t.TempDir(), "x.tar"), filepath.Join(t.TempDir(), "want")
			images.Tree(t, rnd, from, slices.Contains([]string{"--format=ustar", "--format=v7"}, args[0]))
			images.Pack(t, from, tar, args...)
			images.Unpack(t, tar, want)
			b, err := os.ReadFile(tar)
			must(t, err)
			root := folder(t)
			sum, tries := unpackInPieces(t, rnd, b, root)
			if sum.Bytes != int64(len(b)) {
				t.Errorf("got %d bytes of %d", sum.Bytes, len(b))
			}
			t.Logf("%d bytes, %d entries, in %d runs", len(b), sum.Entries, tries)
			same(t, images.Walk(t, root.Name()), images.Walk(t, want))
			checked, err := archive.Check(t.Context(), bytes.NewReader(b))
			must(t, err)
			if checked != sum {
				t.Errorf("checked %+v, unpacked %+v", checked, sum)
			}
		})
	}
}

var errKilled = errors.New("killed")

// unpackInPieces kills every other run at some place, and loses some of what it told last.
func unpackInPieces(t *testing.T, rnd *rand.Rand, b []byte, root *os.File) (sum archive.Summary, tries int) {
	t.Helper()
	durable := int64(0)
	for {
		tries++
		var src io.Reader = bytes.NewReader(b)
		switch rnd.IntN(3) {
		case 0:
			src = oneWay{src}
		case 1:
			a := archive.NewAhead(t.Context(), &memory{b: b})
			defer a.Close()
			src = a
		}
		told, stop := durable, rnd.Int64N(int64(2*len(b)))
		o := archive.Options{Done: durable, Ledger: func(_ context.Context, off, n int64) error {
			if off != told || n <= 0 || off+n > int64(len(b)) {
				t.Errorf("told %d bytes at %d of %d after %d", n, off, len(b), told)
			}
			if told += n; told > stop {
				return errKilled
			}
			if rnd.IntN(3) == 0 {
				durable = told
			}
			return nil
		}}
		if rnd.IntN(2) == 0 {
			o.Compare = func(n int64) bool { return rnd.IntN(2) == 0 }
		}
		sum, err := archive.Unpack(t.Context(), &killed{src, stop, rnd.IntN(2) == 0}, root, o)
		if err == nil {
			return sum, tries
		}
		if !errors.Is(err, errKilled) {
			t.Fatal(err)
		}
	}
}

// killed is a source that ends a run, in the middle of a member as a rule.
type killed struct {
	io.Reader
	left int64
	on   bool
}

func (k *killed) Read(p []byte) (int, error) {
	n, err := k.Reader.Read(p)
	if k.left -= int64(n); k.on && k.left < 0 {
		return 0, errKilled
	}
	return n, err
}

func (k *killed) Seek(n int64, whence int) (int64, error) {
	if s, ok := k.Reader.(io.Seeker); ok {
		return s.Seek(n, whence)
	}
	return 0, errors.ErrUnsupported
}

// Of what is read in ranges a check reads the headers, and a run that goes on what is left.
func TestReadsWhatItNeeds(t *testing.T) {
	half := strings.Repeat("content ", 2<<20)
	m := &memory{b: images.Archive(t, images.File("a", half), images.Folder("d"), images.File("d/b", half), images.Symlink("s", "d/b"))}
	for _, row := range []struct {
		name string
		most int64
		do   func(a *archive.Ahead) error
	}{
		{"check", 1 << 20, func(a *archive.Ahead) error {
			s, err := archive.Check(t.Context(), a)
			if want := (archive.Summary{Bytes: int64(len(m.b)), Data: int64(2 * len(half)), Entries: 4}); s != want {
				t.Errorf("got %+v, want %+v", s, want)
			}
			return err
		}},
		{"go on", 9 << 20, func(a *archive.Ahead) error {
			root := folder(t)
			must(t, os.Mkdir(filepath.Join(root.Name(), "d"), 0o755))
			must(t, os.WriteFile(filepath.Join(root.Name(), "d/b"), []byte(half[:8<<20]), 0o600))
			done := int64(512 + len(half) + 512 + 512 + 8<<20)
			_, err := archive.Unpack(t.Context(), a, root, archive.Options{Done: done})
			if b, err := os.ReadFile(filepath.Join(root.Name(), "d/b")); err != nil || string(b) != half {
				t.Errorf("the rest of the file: %v", err)
			}
			return err
		}},
	} {
		m.read.Store(0)
		a := archive.NewAhead(t.Context(), m)
		must(t, row.do(a))
		must(t, a.Close())
		if got := m.read.Load(); got > row.most {
			t.Errorf("%s: %d bytes of %d were read, want at most %d", row.name, got, len(m.b), row.most)
		}
	}
}

// A run that goes on with another archive says so.
func TestChanged(t *testing.T) {
	content := strings.Repeat("content ", 1<<18)
	b := images.Archive(t, images.File("a", content), images.File("b", "x"))
	for _, row := range []struct {
		name string
		tar  []byte
		done int64
		says string
	}{
		{"other content", images.Archive(t, images.File("a", strings.Replace(content, "t", "T", 1)), images.File("b", "x")), int64(len(b)), "differ"},
		{"a part of a part", b, 512 + 1000, "of which 1000"},
		{"shorter", images.Archive(t), int64(len(b)), "it ends after"},
		{"another name", images.Archive(t, images.File("c", content), images.File("b", "x")), 512 + 1<<20, "no longer there"},
	} {
		root := folder(t)
		_, err := archive.Unpack(t.Context(), bytes.NewReader(b), root, archive.Options{})
		must(t, err)
		_, err = archive.Unpack(t.Context(), oneWay{bytes.NewReader(row.tar)}, root, archive.Options{Done: row.done, Compare: func(int64) bool { return true }})
		if f := fault.Of(err); f == nil || f.Terminal || f.Reason != fault.SourceChanged || !strings.Contains(f.Error(), row.says) {
			t.Errorf("%s: got %v", row.name, err)
		}
	}
}

// Rights that the archive's owner would give are not given by another.
func TestModes(t *testing.T) {
	root := folder(t)
	suid, dir := images.File("suid", "x"), images.Folder("dir")
	suid.Mode, dir.Mode = 0o6755, 0o7777
	_, err := archive.Unpack(t.Context(), bytes.NewReader(images.Archive(t, suid, dir)), root, archive.Options{})
	must(t, err)
	got := images.Walk(t, root.Name())
	if m := got["suid"].Mode & 0o7777; m != 0o755 {
		t.Errorf("the file has mode %o", m)
	}
	if m := got["dir"].Mode & 0o7777; m != 0o1777 {
		t.Errorf("the folder has mode %o", m)
	}
}

func TestFit(t *testing.T) {
	root := folder(t)
	must(t, archive.Fit(root, archive.Summary{Data: 1 << 20, Entries: 10}))
	for _, s := range []archive.Summary{{Data: 1 << 60, Entries: 1}, {Entries: 1 << 50}} {
		if f := fault.Of(archive.Fit(root, s)); f == nil || !f.Terminal || f.Reason != fault.ImageTooLarge {
			t.Errorf("%+v: got %v", s, f)
		}
	}
}
