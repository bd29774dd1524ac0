package mover

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/archive"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/test/images"
)

// packed is an archive of 5 MiB and a bit.
func packed(t testing.TB) []byte {
	t.Helper()
	return images.Archive(t, images.Folder("d"), images.File("d/first", "first"), images.File("d/big", strings.Repeat("content ", 5*mib/8)), images.Symlink("d/s", "first"))
}

func ofArchive(done int64) Job {
	j := Job{Source: source.Spec{Kind: "shelf"}, Archive: true, TargetBytes: archive.MaxBytes}
	if done > 0 {
		j.Done.Add(0, done)
	}
	return j
}

func folderOf(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func unpackedRight(t *testing.T, dir string) {
	t.Helper()
	first, err := os.ReadFile(filepath.Join(dir, "d/s"))
	big, berr := os.Stat(filepath.Join(dir, "d/big"))
	if err != nil || berr != nil || string(first) != "first" || big.Size() != 5*mib {
		t.Errorf("through the link %q, %v; big %v, %v", first, err, big, berr)
	}
}

// An archive is unpacked whichever way it comes, and the ledger is told all of it, once.
func TestRunUnpacks(t *testing.T) {
	tar := packed(t)
	sum := sha256.Sum256(tar)
	for _, row := range []struct {
		name     string
		etag     string
		oneWay   bool
		checksum string
	}{
		{"in ranges", `"1"`, false, ""},
		{"in ranges, with a weak validator", "", false, ""},
		{"one way", `"1"`, true, ""},
		{"one way, with a weak validator", "", true, ""},
		{"in ranges, with a checksum", `"1"`, false, "sha256:" + hex.EncodeToString(sum[:])},
		{"in ranges, with a checksum and a weak validator", "", false, "sha256:" + hex.EncodeToString(sum[:])},
		{"one way, with a checksum", `"1"`, true, "sha256:" + hex.EncodeToString(sum[:])},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := &shelf{content: tar, validator: source.Validator{ETag: row.etag}, oneWay: row.oneWay}
			dir := t.TempDir()
			b := &book{stop: 2 * mib}
			d := Deps{Kinds: s.kinds(), Root: folderOf(t, dir), Ledger: b}
			j := ofArchive(0)
			j.Checksum = row.checksum
			if _, err := Run(t.Context(), d, j); fault.Of(err) == nil {
				t.Fatal("the ledger's error did not end it")
			}
			// What the book has not taken in is not durable.
			j.Resume, j.Done = &b.facts[0], b.done
			b.stop = 0
			var moved Moved
			d.Moved = &moved
			facts, err := Run(t.Context(), d, j)
			if err != nil {
				t.Fatal(err)
			}
			if facts.Format != "tar" || facts.VirtualBytes != int64(len(tar)) || fmt.Sprint(b.done.Ranges()) != fmt.Sprint([]extent.Range{{Length: int64(len(tar))}}) {
				t.Errorf("facts %+v, told %v of %d bytes", facts, b.done.Ranges(), len(tar))
			}
			if moved.Done.Load() != int64(len(tar)) {
				t.Errorf("%d bytes are counted as done", moved.Done.Load())
			}
			unpackedRight(t, dir)

			// A weak validator does not hide that the content is another now.
			s.content = []byte(strings.ReplaceAll(string(tar), "content ", "contents"))
			j.Checksum, j.Resume, j.Done = "", &b.facts[0], b.done
			_, err = Run(t.Context(), d, j)
			if f := fault.Of(err); row.etag == "" && (f == nil || f.Terminal || f.Reason != fault.SourceChanged) {
				t.Errorf("after a change: %v", err)
			}
		})
	}
}

// In a sandbox a folder is filled that is the root of a mount of its own, and no other.
func TestUnpackInSandbox(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chown(dir, 107, 107); err != nil {
		t.Fatal(err)
	}
	j := ofArchive(0)
	j.Source.Kind = "archive"
	_, err := Launcher{}.Move(t.Context(), folderOf(t, dir), j, &desk{})
	if err == nil || !strings.Contains(err.Error(), "not the root of a mount of its own") {
		t.Errorf("a folder that can be left: %v", err)
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	mount := os.NewFile(uintptr(fd), dir)
	defer mount.Close()
	d := &desk{}
	res, err := Launcher{}.Move(t.Context(), folderOf(t, fmt.Sprintf("/proc/self/fd/%d", fd)), j, d)
	if err != nil {
		t.Fatal(err)
	}
	if !d.done.Contains(0, res.VirtualBytes) || res.VirtualBytes == 0 {
		t.Errorf("%d bytes, done %v", res.VirtualBytes, d.done.Ranges())
	}
	unpackedRight(t, dir)
	if st, err := os.Stat(filepath.Join(dir, "d/first")); err != nil || st.Mode() != 0o644 {
		t.Errorf("%v, %v", st, err)
	}
}

// archived is a source of packed's archive, in a process that has no test.
var archived = source.Kind{Name: "archive", Open: func(context.Context, source.Dialer, json.RawMessage) (source.Blob, error) {
	return shelfRanged{&shelf{content: packed(panics{}), validator: source.Validator{ETag: `"9"`}}}, nil
}}

type panics struct{ testing.TB }

func (panics) Helper()           {}
func (panics) Fatal(args ...any) { panic(fmt.Sprint(args...)) }
