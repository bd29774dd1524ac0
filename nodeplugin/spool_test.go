package nodeplugin

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// packedVDI is an image that has to be read again, and comes only once.
func packedVDI(t *testing.T, raw string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.vdi")
	if out, err := exec.Command("qemu-img", "convert", "-f", "raw", "-O", "vdi", raw, path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command("gzip", "-1", path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path + ".gz"
}

// An image that must be unpacked is: in the pool, past the page cache, by a mover
// that can write nowhere else; and afterwards the room is there again.
func TestUnpackedInThePool(t *testing.T) {
	const imageBytes = 64 * testMiB
	raw := noise(t, 21, imageBytes)
	packed := packedVDI(t, raw)
	for _, fsType := range []string{"block", "ext4"} {
		t.Run(fsType, func(t *testing.T) {
			f := start(t, 900*testMiB, nil)
			f.shut(t)
			filler := newFiller(t)
			var usage mover.Usage
			filler.Launcher.Ended = func(u mover.Usage) { usage.PeakBytes = max(usage.PeakBytes, u.PeakBytes) }
			s, _, err := New(t.Context(), Config{Pools: poolConfig(f.pool, 900*testMiB), Fill: filler, Log: logTo(t)})
			must(t, err)
			f.Stager = s
			f.create(t, wholeSpec(fsType))
			p, _, err := f.pools.find("v")
			must(t, err)
			before, err := p.Stats()
			must(t, err)
			w := serveFile(t, packed)
			order, err := wholeOrder(w.url(), "a1")
			must(t, err)
			must(t, f.Populate(t.Context(), "v", order))
			f.eventually(t, "it is populated", func() bool { return f.state("v") == pool.Populated && f.job("v") == nil })
			after, err := p.Stats()
			must(t, err)
			if after.AvailableBytes != before.AvailableBytes {
				t.Errorf("%d bytes of the pool are available, before it were %d", after.AvailableBytes, before.AvailableBytes)
			}
			if usage.PeakBytes >= 64*testMiB {
				t.Errorf("a mover had %d bytes of memory", usage.PeakBytes)
			}
			spec := wholeSpec(fsType)
			use := csi.Use{Mode: csi.Mode(spec.Mode), FSType: spec.FSType}
			must(t, f.Stage(t.Context(), "v", f.path("s"), use))
			must(t, f.Publish(t.Context(), "v", f.path("s"), f.path("t"), use))
			name := f.path("t")
			if spec.Mode == pool.Filesystem {
				name = filepath.Join(name, "disk.img")
			}
			disk, err := os.Open(name)
			must(t, err)
			equal(t, disk, raw)
			must(t, disk.Close())
			must(t, f.Unpublish(t.Context(), "v", f.path("t")))
			must(t, f.Unstage(t.Context(), "v", f.path("s")))
		})
	}
}

// tmpSpool is two files in a folder.
type tmpSpool struct {
	files  []*os.File
	bytes  int64
	closed bool
}

func (s *tmpSpool) Files() []*os.File { return s.files }
func (s *tmpSpool) Bytes() int64      { return s.bytes }
func (s *tmpSpool) Close()            { s.closed = true }

// An image that is longer than its target goes to both files of the spool; one that
// is longer than there is room waits for room; a mover that is killed is followed by
// another.
func TestSpoolOfAFilling(t *testing.T) {
	const imageBytes = 40 * mib
	raw := specks(t, 22, imageBytes, 16)
	packed := packedVDI(t, raw)
	newJob := func(t *testing.T, w *web, bytes int64) (Job, *tmpSpool) {
		job := volume(t, t.TempDir(), imageBytes, w.url())
		s := &tmpSpool{bytes: bytes}
		for range 2 {
			f, err := os.CreateTemp(t.TempDir(), "spool")
			must(t, err)
			t.Cleanup(func() { f.Close() })
			must(t, f.Truncate(imageBytes))
			s.files = append(s.files, f)
		}
		job.Spool = func() (Spool, error) { return s, nil }
		return job, s
	}
	t.Run("both files", func(t *testing.T) {
		job, s := newJob(t, serveFile(t, packed), 2*imageBytes)
		fill(t, newFiller(t), job).ok()
		equal(t, job.Target, raw)
		if !s.closed {
			t.Error("the spool was not closed")
		}
		b := device.AlignedBuffer(4096) // the mover has switched the files to direct I/O
		if _, err := s.files[1].ReadAt(b, 0); err != nil || len(strings.Trim(string(b), "\x00")) == 0 {
			t.Errorf("nothing in the second file, %v", err)
		}
	})
	t.Run("too little room", func(t *testing.T) {
		job, _ := newJob(t, serveFile(t, packed), imageBytes/2)
		r := fill(t, newFiller(t), job)
		p := r.until("it is retried", func(p Progress) bool { return p.Phase == PhaseRetrying })
		if p.Reason != fault.NoSpace || !strings.Contains(p.Message, "free space") {
			t.Errorf("%s: %s", p.Reason, p.Message)
		}
	})
	t.Run("no spool", func(t *testing.T) {
		job, _ := newJob(t, serveFile(t, packed), 0)
		job.Spool = nil
		r := fill(t, newFiller(t), job)
		<-r.done
		if f := fault.Of(r.err); f == nil || !f.Terminal || f.Reason != fault.NeedsSpool {
			t.Errorf("%v", r.err)
		}
	})
	t.Run("the mover is killed", func(t *testing.T) {
		w := serveFile(t, packed)
		w.holdAt(30 * mib)
		job, _ := newJob(t, w, 2*imageBytes)
		f := newFiller(t)
		r := fill(t, f, job)
		r.until("it is in the middle of unpacking", func(p Progress) bool { return p.BytesRead > 15*mib })
		must(t, unix.Kill(sole(t, os.Getpid()), unix.SIGKILL))
		w.holdAt(-1)
		r.ok()
		equal(t, job.Target, raw)
	})
}
