package archive_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/archive"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

// guarded makes a folder to unpack in, two levels below a file that nobody may touch.
func guarded(t testing.TB) (root *os.File, canary string) {
	t.Helper()
	top := t.TempDir()
	canary = filepath.Join(top, "canary")
	must(t, os.WriteFile(canary, []byte("alive"), 0o640))
	must(t, os.Chtimes(canary, time.Unix(1, 0), time.Unix(1, 0)))
	must(t, os.MkdirAll(filepath.Join(top, "a/root"), 0o755))
	root, err := os.Open(filepath.Join(top, "a/root"))
	must(t, err)
	t.Cleanup(func() { root.Close() })
	return root, canary
}

// unharmed checks what is outside of the folder.
func unharmed(t *testing.T, canary string) {
	t.Helper()
	info, err := os.Lstat(canary)
	must(t, err)
	if b, err := os.ReadFile(canary); err != nil || string(b) != "alive" || info.Mode() != 0o640 || info.ModTime().Unix() != 1 {
		t.Errorf("the canary: %q, %v, %v of %v", b, err, info.Mode(), info.ModTime())
	}
	for dir, want := range map[string]string{filepath.Dir(canary): "[d a/ - canary]", filepath.Join(filepath.Dir(canary), "a"): "[d root/]"} {
		list, err := os.ReadDir(dir)
		must(t, err)
		if got := fmt.Sprint(list); got != want {
			t.Errorf("%s holds %s", dir, got)
		}
	}
}

func isFault(t *testing.T, how string, err error, h images.Hostile) {
	t.Helper()
	f := fault.Of(err)
	if f == nil || !f.Terminal || f.Reason != h.Reason || !strings.Contains(f.Error(), h.Says) {
		t.Errorf("%s: got %+v (%v), want %s that says %q", how, f, err, h.Reason, h.Says)
	}
}

// What is no good is found from the headers, before anything is written where these
// can be read alone, and in front of the member otherwise.
func TestHostile(t *testing.T) {
	_, canary := guarded(t)
	for i, h := range images.HostileArchives(t, canary, "canary") {
		t.Run(h.Name, func(t *testing.T) {
			root, canary := guarded(t)
			h := images.HostileArchives(t, canary, "canary")[i]
			if h.Reason != fault.ImageTooLarge {
				a := archive.NewAhead(t.Context(), &memory{b: h.Tar})
				defer a.Close()
				_, err := archive.Check(t.Context(), a)
				isFault(t, "checked", err, h)
			}
			_, err := archive.Unpack(t.Context(), oneWay{bytes.NewReader(h.Tar)}, root, archive.Options{})
			isFault(t, "unpacked", err, h)
			unharmed(t, canary)
			for name, f := range images.Walk(t, root.Name()) {
				if f.Mode&0o170000 == 0o100000 && !slices.Contains(h.Wrote, name) && !strings.HasPrefix(name, "a/") {
					t.Errorf("%q was made", name)
				}
			}
		})
	}
}

// Somebody else may write to the folder of a person; not even then is it left.
func TestLinksFromOutside(t *testing.T) {
	for _, row := range []struct {
		name   string
		tar    []images.Member
		resume bool
	}{
		{"file below a link", []images.Member{images.File("out/x", "x")}, false},
		{"file in a link", []images.Member{images.File("out", "x")}, true},
		{"folder in a link", []images.Member{images.Folder("out"), images.File("out/x", "x")}, false},
		{"hard link from below a link", []images.Member{images.File("f", "x"), images.File("in/x", "x"), images.Link("b", "in/x")}, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			root, canary := guarded(t)
			must(t, os.Symlink("../..", filepath.Join(root.Name(), "out")))
			if row.resume {
				must(t, os.Remove(filepath.Join(root.Name(), "out")))
				must(t, os.Symlink("../../canary", filepath.Join(root.Name(), "out")))
			}
			b := images.Archive(t, row.tar...)
			_, err := archive.Unpack(t.Context(), bytes.NewReader(b), root, archive.Options{})
			t.Log(err)
			unharmed(t, canary)
			if !row.resume && strings.HasPrefix(row.tar[0].Name, "out") {
				if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.TargetError {
					t.Errorf("got %v", err)
				}
			}
		})
	}
}

// An archive that has no end is not read for ever.
func TestBombs(t *testing.T) {
	_, err := archive.CheckWithin(t.Context(), images.Headers(t), 64<<20)
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.CorruptImage || !strings.Contains(f.Error(), "too much that is no content") {
		t.Errorf("headers: got %v", err)
	}
	r, w := io.Pipe()
	go func() {
		tw := tar.NewWriter(bufio.NewWriterSize(w, 1<<20))
		for i := 0; ; i++ {
			if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprint(i)}); err != nil {
				return
			}
		}
	}()
	_, err = archive.Check(t.Context(), r)
	r.CloseWithError(errors.New("enough"))
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.FormatNotSupported || !strings.Contains(f.Error(), "1048576 files") {
		t.Errorf("members: got %v", err)
	}
}
