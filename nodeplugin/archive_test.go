package nodeplugin

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/archive"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/pool"
	"github.com/longshore-io/longshore/test/images"
)

// startFilling is start with movers that are real.
func startFilling(t *testing.T, bytes int64) *fixture {
	t.Helper()
	f := start(t, bytes, nil)
	f.shut(t)
	s, _, err := New(t.Context(), Config{Pools: poolConfig(f.pool, bytes), Fill: newFiller(t), Log: logTo(t), StageWait: 50 * time.Millisecond})
	must(t, err)
	f.Stager = s
	return f
}

// hostile is an archive whose second member leads out.
func hostile(t *testing.T, size int) []byte {
	t.Helper()
	return images.Archive(t, images.File("good", strings.Repeat("good ", size/5)), images.Symlink("bad", "../.."), images.File("behind", "x"))
}

func write(t *testing.T, name string, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	must(t, os.WriteFile(path, b, 0o600))
	if strings.HasSuffix(name, ".gz") {
		must(t, os.Rename(path, strings.TrimSuffix(path, ".gz")))
		must(t, exec.Command("gzip", "-1", strings.TrimSuffix(path, ".gz")).Run())
	}
	return path
}

// packed is a random tree with a file of some MiB at its beginning and one at its end, as
// tar packs it, and what the oracle makes of that.
func packed(t *testing.T, seed uint64, size int64, args ...string) (path string, want map[string]images.Found) {
	t.Helper()
	dir := t.TempDir()
	tree := filepath.Join(dir, "tree")
	must(t, os.Mkdir(tree, 0o755))
	images.Tree(t, rand.New(rand.NewPCG(seed, 2)), tree, false)
	must(t, os.Chmod(tree, 0o755))
	must(t, exec.Command("cp", noise(t, byte(seed), size/8), filepath.Join(tree, "first file")).Run())
	must(t, exec.Command("cp", noise(t, byte(seed+1), size/8*7), filepath.Join(tree, "last file")).Run())
	path = filepath.Join(dir, "x.tar")
	list := []string{"-C", tree, "--format=pax", "-S", "-cf", path, "./first file"}
	list = append(append(list, args...), "--exclude=./first file", "--exclude=./last file", ".")
	out, err := exec.Command("tar", list...).CombinedOutput()
	if err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	if out, err := exec.Command("tar", "-C", tree, "--format=pax", "-S", "-rf", path, "./last file").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	images.Unpack(t, path, filepath.Join(dir, "want"))
	return path, images.Walk(t, filepath.Join(dir, "want"))
}

func archiveOrder(t *testing.T, url, attempt string) Order {
	t.Helper()
	o, err := wholeOrder(url, attempt)
	must(t, err)
	o.Recipe.Archive = true
	return o
}

// unpackedRight stages the volume and compares what a pod sees with the oracle.
func unpackedRight(t *testing.T, f *fixture, spec pool.Spec, want map[string]images.Found, first *unix.Statx_t) {
	t.Helper()
	use := csi.Use{Mode: csi.Mode(spec.Mode), FSType: spec.FSType}
	must(t, f.Stage(t.Context(), "v", f.path("s"), use))
	must(t, f.Publish(t.Context(), "v", f.path("s"), f.path("t"), use))
	if first != nil && first.Ino != 0 {
		var now unix.Statx_t
		must(t, unix.Statx(unix.AT_FDCWD, filepath.Join(f.path("t"), "first file"), 0, unix.STATX_BASIC_STATS, &now))
		if now.Ino != first.Ino || now.Ctime != first.Ctime {
			t.Errorf("a file that was on record was changed: %+v, was %+v", now, *first)
		}
	}
	got := images.Walk(t, f.path("t"))
	delete(got, "lost+found")
	for name, w := range want {
		g := got[name]
		g.Blocks, w.Blocks = 0, 0 // of another filesystem
		if g != w {
			t.Errorf("%q is\n%+v, want\n%+v", name, g, w)
		}
		info, err := os.Lstat(filepath.Join(f.path("t"), name))
		must(t, err)
		if st := info.Sys().(*syscall.Stat_t); st.Uid != 107 || st.Gid != 107 {
			t.Errorf("%q belongs to %d:%d", name, st.Uid, st.Gid)
		}
	}
	if len(got) != len(want) {
		t.Errorf("got %d files, want %d", len(got), len(want))
	}
	must(t, f.Unpublish(t.Context(), "v", f.path("t")))
	must(t, f.Unstage(t.Context(), "v", f.path("s")))
}

func populated(f *fixture) func() bool {
	return func() bool { return f.state("v") == pool.Populated && f.job("v") == nil }
}

// An archive comes over HTTP by real movers into a real pool. They are killed again and
// again, and what is unpacked and on record is not touched any more.
func TestArchiveTheWholeWay(t *testing.T) {
	const size = 96 * testMiB
	compared := 0
	for seed, row := range []struct {
		name, fsType string
		compress     bool
		etag         string
	}{
		{"in ranges, ext4", "ext4", false, `"1"`},
		{"in ranges, xfs, with a weak validator", "xfs", false, ""},
		{"compressed, ext4", "ext4", true, `"1"`},
		{"compressed, with a weak validator, ext4", "ext4", true, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			path, want := packed(t, uint64(seed), size)
			info, err := os.Stat(path)
			must(t, err)
			if row.compress {
				must(t, exec.Command("gzip", "-1", path).Run())
				path += ".gz"
			}
			w := serveFile(t, path)
			w.etag = row.etag
			f := startFilling(t, 1600*testMiB)
			spec := wholeSpec(row.fsType)
			spec.Bytes = max(spec.Bytes, 200*testMiB)
			f.create(t, spec)
			w.holdAt(16 * testMiB)
			must(t, f.Populate(t.Context(), "v", archiveOrder(t, w.url(), "a1")))
			rnd := rand.New(rand.NewPCG(uint64(seed), 3))
			var first unix.Statx_t
			kills, until := 0, int64(16*testMiB)
			for ; kills < 4; kills++ {
				var p Progress
				f.eventually(t, "a mover has got so far", func() bool {
					j := f.job("v")
					if j != nil {
						p, _ = j.seen()
					}
					return j == nil || copying(p) && w.sent.Load() >= until
				})
				if f.job("v") == nil {
					break
				}
				pid := sole(t, os.Getpid())
				if p.BytesDone > size/8+34*testMiB && first.Ino == 0 {
					// Long durable by now, and the next movers leave it alone.
					must(t, unix.Statx(unix.AT_FDCWD, fmt.Sprintf("/proc/%d/fd/4/first file", pid), 0, unix.STATX_BASIC_STATS, &first))
				}
				must(t, unix.Kill(pid, unix.SIGKILL))
				more := (8 + rnd.Int64N(12)) * testMiB
				if row.compress { // it is read from its beginning each time
					more = (20 + rnd.Int64N(70)) * testMiB
				}
				until = w.sent.Load() + more
				w.holdAt(more)
			}
			w.holdAt(-1)
			f.eventually(t, "it is populated", populated(f))
			t.Logf("%d kills, %d bytes of an archive of %d sent", kills, w.sent.Load(), info.Size())
			if kills < 2 {
				t.Errorf("only %d movers were killed", kills)
			}
			if sent := w.sent.Load(); !row.compress && sent > info.Size()+int64(kills+1)*perKill {
				t.Errorf("the server sent %d bytes of an archive of %d, with %d kills", sent, info.Size(), kills)
			}
			if n, left := f.volumeLoops(t), movers(t, os.Getpid()); n != 0 || len(left) != 0 {
				t.Errorf("left of the transfer: %d loop devices, movers %v", n, left)
			}
			unpackedRight(t, f, spec, want, &first)
			if first.Ino != 0 {
				compared++
			}
		})
	}
	if compared == 0 {
		t.Error("no mover was killed when the first file was on record")
	}
}

// What an archive tells that is not to be unpacked ends the transfer for good, and nothing
// of it stays; another one can be unpacked in its place.
func TestArchiveRefused(t *testing.T) {
	big := noise(t, 5, 80*testMiB)
	dense := func(name string) string {
		return write(t, name, images.Archive(t, images.File("big", string(read(t, big)))))
	}
	for _, row := range []struct {
		name, path, reason, says string
		block                    bool
		sum                      string
		sent                     int64 // bytes by the server at most; 0: any
	}{
		{name: "hostile", path: write(t, "x.tar", hostile(t, 20<<20)), reason: fault.UnsafeArchive, says: `symbolic link "bad"`, sent: testMiB},
		{name: "hostile, compressed", path: write(t, "x.tar.gz", hostile(t, 40<<20)), reason: fault.UnsafeArchive, says: `symbolic link "bad"`},
		{name: "too large", path: dense("x.tar"), reason: fault.ImageTooLarge, says: "request at least", sent: testMiB},
		{name: "too large, compressed", path: dense("x.tar.gz"), reason: fault.ImageTooLarge, says: "request more"},
		{name: "more files than inodes", path: write(t, "x.tar.gz", manyFiles(t, 20_000)), reason: fault.ImageTooLarge, says: "request more"},
		{name: "no archive", path: big, reason: fault.NotAnArchive, says: "not a tar archive"},
		{name: "cut short, compressed", path: write(t, "x.tar.gz", hostile(t, 20<<20)[:20<<20]), reason: fault.CorruptImage, says: "cut short"},
		{name: "another checksum", path: write(t, "x.tar", images.Archive(t, images.File("a", strings.Repeat("x", 30<<20)))), sum: "md5:" + strings.Repeat("0", 32), reason: fault.ChecksumMismatch, says: "checksum"},
		{name: "block", path: write(t, "x.tar", images.Archive(t)), reason: fault.InvalidSource, says: "volumeMode: Filesystem", block: true},
	} {
		t.Run(row.name, func(t *testing.T) {
			w := serveFile(t, row.path)
			f := startFilling(t, 600*testMiB)
			spec := pool.Spec{ID: "v", Bytes: 64 * testMiB, Mode: pool.Filesystem, FSType: "ext4", AwaitsData: true}
			if row.block {
				spec.Mode, spec.FSType = pool.Block, ""
			}
			f.create(t, spec)
			order := archiveOrder(t, w.url(), "a1")
			order.Recipe.Checksum = row.sum
			must(t, f.Populate(t.Context(), "v", order))
			f.eventually(t, "it has failed", func() bool { return f.job("v") == nil })
			p, v, err := f.pools.find("v")
			must(t, err)
			if v.Failure == nil || !v.Failure.Terminal || v.Failure.Reason != row.reason || !strings.Contains(v.Failure.Message, row.says) {
				t.Errorf("got %+v, want %s that says %q", v.Failure, row.reason, row.says)
			}
			if sent := w.sent.Load(); row.sent > 0 && sent > row.sent {
				t.Errorf("the server sent %d bytes, want the headers, at most %d", sent, row.sent)
			}
			file, err := open(v, true)
			must(t, err)
			empty, err := holdsNothing(file)
			must(t, errors.Join(err, file.Close()))
			if !empty {
				t.Error("the volume holds something")
			}
			if _, err := os.Stat(p.JournalPath("v")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the journal is still there: %v", err)
			}
			if row.block {
				return
			}
			w.change(write(t, "good.tar", images.Archive(t, images.File("other", "content"))), `"2"`)
			must(t, f.Populate(t.Context(), "v", archiveOrder(t, w.url(), "a2")))
			f.eventually(t, "it is populated", populated(f))
			use := csi.Use{Mode: csi.Filesystem, FSType: "ext4"}
			must(t, f.Stage(t.Context(), "v", f.path("s"), use))
			if got := images.Walk(t, f.path("s")); len(got) != 3 || got["other"].Size != 7 {
				t.Errorf("it holds %v", got)
			}
			must(t, f.Unstage(t.Context(), "v", f.path("s")))
		})
	}
}

func manyFiles(t *testing.T, n int) []byte {
	t.Helper()
	var list []images.Member
	for i := range n {
		list = append(list, images.File(fmt.Sprintf("%d/%d", i%100, i), "x"))
	}
	return images.Archive(t, list...)
}

// An archive that changes while it is unpacked is begun again, in an empty filesystem.
func TestArchiveChanges(t *testing.T) {
	old := write(t, "old.tar", images.Archive(t, images.File("old", "x"), images.File("a", string(read(t, noise(t, 6, 60*testMiB))))))
	w := serveFile(t, old)
	f := startFilling(t, 600*testMiB)
	f.create(t, pool.Spec{ID: "v", Bytes: 128 * testMiB, Mode: pool.Filesystem, FSType: "ext4", AwaitsData: true})
	w.holdAt(40 * testMiB)
	must(t, f.Populate(t.Context(), "v", archiveOrder(t, w.url(), "a1")))
	f.eventually(t, "a part is on record", func() bool {
		p, _, err := f.pools.find("v")
		must(t, err)
		j, err := journal.Load(p.JournalPath("v"), "v", "content", archive.MaxBytes)
		return err == nil && j.Done.Bytes() > 0
	})
	w.change(write(t, "new.tar", images.Archive(t, images.File("new", "y"))), `"2"`)
	for _, pid := range movers(t, os.Getpid()) { // unless it has noticed the change by itself
		must(t, unix.Kill(pid, unix.SIGKILL))
	}
	w.holdAt(-1)
	f.eventually(t, "it is populated", populated(f))
	use := csi.Use{Mode: csi.Filesystem, FSType: "ext4"}
	must(t, f.Stage(t.Context(), "v", f.path("s"), use))
	if got := images.Walk(t, f.path("s")); len(got) != 3 || got["new"].Size != 1 {
		t.Errorf("it holds %v", got)
	}
	must(t, f.Unstage(t.Context(), "v", f.path("s")))
}
