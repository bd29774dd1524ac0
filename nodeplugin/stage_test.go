package nodeplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/pool"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

const testMiB = 1 << 20

// fakeFill stands for the mover; do is what a transfer does.
type fakeFill struct {
	mu    sync.Mutex
	calls []Job
	do    func(ctx context.Context, job Job, report func(Progress)) (Result, error)
}

func (f *fakeFill) Fill(ctx context.Context, job Job, report func(Progress)) (Result, error) {
	f.mu.Lock()
	f.calls = append(f.calls, job)
	do := f.do
	f.mu.Unlock()
	return do(ctx, job, report)
}

func (f *fakeFill) seen() []Job {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]Job(nil), f.calls...)
}

var content = bytes.Repeat([]byte("a guest's disk. "), 64<<10/16)

// complete writes the content and reports it.
func complete(_ context.Context, job Job, report func(Progress)) (Result, error) {
	if _, err := job.Target.WriteAt(content, 0); err != nil {
		return Result{}, err
	}
	n := int64(len(content))
	report(Progress{Phase: "copy", BytesDone: n, BytesTotal: n, Format: "raw", VirtualSize: n})
	return Result{Format: "raw", VirtualSize: n, Validator: source.Validator{Size: n, ETag: `"1"`}}, nil
}

// halfway writes half of the content and a journal, and goes on only when ctx ends.
func halfway(ctx context.Context, job Job, report func(Progress)) (Result, error) {
	n := len(content) / 2
	if _, err := job.Target.WriteAt(content[:n], 0); err != nil {
		return Result{}, err
	}
	if err := os.WriteFile(job.Journal, []byte("half"), 0o600); err != nil {
		return Result{}, err
	}
	report(Progress{Phase: "copy", BytesDone: int64(n), BytesTotal: int64(len(content)), Format: "raw"})
	<-ctx.Done()
	return Result{}, context.Cause(ctx)
}

type fixture struct {
	*Stager
	dir  string // staging and target folders
	pool string
	fill *fakeFill
}

func logTo(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

func poolConfig(dir string, bytes int64) []pool.Config {
	return []pool.Config{{Name: "default", Dir: dir, Bytes: bytes}}
}

// start opens a Stager on a pool of its own, and at the end of the test checks
// that nothing of it is left in the kernel.
func start(t *testing.T, bytes int64, do func(context.Context, Job, func(Progress)) (Result, error)) *fixture {
	t.Helper()
	dir := t.TempDir()
	f := &fixture{dir: filepath.Join(dir, "kubelet"), pool: filepath.Join(dir, "pool"), fill: &fakeFill{do: do}}
	if err := os.MkdirAll(f.pool, 0o700); err != nil {
		t.Fatal(err)
	}
	f.open(t, bytes)
	t.Cleanup(func() {
		if t.Failed() {
			clearMounts(t, dir) // the next test must not suffer
		}
		f.shut(t)
		if left := leftOf(t, dir); len(left) > 0 {
			t.Errorf("left behind: %s", strings.Join(left, ", "))
		}
	})
	return f
}

func (f *fixture) open(t *testing.T, bytes int64) []string {
	t.Helper()
	s, report, err := New(t.Context(), Config{Pools: poolConfig(f.pool, bytes), Fill: f.fill, Log: logTo(t), StageWait: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	f.Stager = s
	return report
}

// shut ends the Stager and unmounts its pool.
func (f *fixture) shut(t *testing.T) {
	t.Helper()
	if err := f.Shut(context.Background()); err != nil {
		t.Error(err)
	}
}

// clearMounts unmounts what a failed test has mounted and detaches its loops.
func clearMounts(t *testing.T, dir string) {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(filepath.Join(dir, "kubelet")))
	if err != nil {
		t.Error(err)
	}
	for _, m := range slices.Backward(mounts) {
		if err := device.Unmount(m.Mountpoint); err != nil {
			t.Error(err)
		}
	}
	files, _ := filepath.Glob(filepath.Join(dir, "pool/mnt/volumes/*/data.raw"))
	for _, name := range files {
		file, err := os.Open(name)
		if err != nil {
			t.Error(err)
			continue
		}
		loops, err := device.FindLoopsOf(file)
		file.Close()
		if err != nil {
			t.Error(err)
		}
		for _, l := range loops {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
			_ = l.Detach(ctx) // goes when the Stager closes its own
			cancel()
		}
	}
}

// leftOf lists the mounts and loop devices that belong to a folder.
func leftOf(t testing.TB, dir string) (left []string) {
	t.Helper()
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (bool, bool) {
		return !strings.HasPrefix(m.Mountpoint, dir+"/") && !strings.Contains(m.Root, dir), false
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		left = append(left, "mount "+m.Mountpoint)
	}
	return append(left, loopsOf(t, dir)...)
}

func loopsOf(t testing.TB, dir string) (loops []string) {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil && strings.Contains(string(b), dir+"/") {
			loops = append(loops, strings.Split(f, "/")[3]+" on "+strings.TrimSpace(string(b)))
		}
	}
	return loops
}

// volumeLoops counts the loop devices on volumes: the pool has one itself.
func (f *fixture) volumeLoops(t testing.TB) int {
	n := 0
	for _, l := range loopsOf(t, f.pool) {
		if strings.HasSuffix(l, "data.raw") {
			n++
		}
	}
	return n
}

func (f *fixture) create(t *testing.T, s pool.Spec) {
	t.Helper()
	if err := f.Create(t.Context(), "default", "", s); err != nil {
		t.Fatal(err)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, err, kind error, words ...string) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Fatalf("got error %v, want one that is %q", err, kind)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

// eventually waits until ok, looking whenever something changes.
func (f *fixture) eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	w := f.changes.subscribe()
	defer w.stop()
	limit := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-w.ready:
			w.take()
		case <-limit:
			t.Fatalf("waited 20 s until %s", what)
		}
	}
}

func (f *fixture) state(id string) pool.State {
	_, v, err := f.pools.find(id)
	if err != nil {
		return ""
	}
	return v.State
}

// recipe is an attempt to fill a volume from one and the same source.
func recipe(attempt string) Order {
	return Order{Recipe: Recipe{Source: source.Spec{Kind: "test"}, Digest: "content"}, Attempt: attempt, Owner: "ns"}
}

// path is a folder or file of the test's kubelet.
func (f *fixture) path(name string) string {
	p := filepath.Join(f.dir, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o750); err != nil {
		panic(err)
	}
	return p
}

// disk reads the beginning of the disk that a pod finds at a target.
func disk(t *testing.T, mode pool.Mode, target string, n int) []byte {
	t.Helper()
	if mode == pool.Filesystem {
		target = filepath.Join(target, "disk.img")
	}
	f, err := os.Open(target)
	must(t, err)
	defer f.Close()
	got := make([]byte, n)
	_, err = io.ReadFull(f, got)
	must(t, err)
	return got
}

func sizeOf(t *testing.T, path string) int64 {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	n, err := f.Seek(0, io.SeekEnd)
	must(t, err)
	return n
}

func TestLifeOfAVolume(t *testing.T) {
	for _, c := range []struct {
		name      string
		mode      pool.Mode
		fsType    string
		mib, pool int64
	}{
		{"Block", pool.Block, "", 16, 400},
		{"ext4", pool.Filesystem, "ext4", 32, 400},
		{"xfs", pool.Filesystem, "xfs", 320, 1600},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := start(t, c.pool*testMiB, complete)
			ctx := t.Context()
			use := csi.Use{Mode: csi.Mode(c.mode), FSType: c.fsType}
			spec := pool.Spec{ID: "v", Bytes: c.mib * testMiB, Mode: c.mode, FSType: c.fsType, AwaitsData: true}
			f.create(t, spec)
			f.create(t, spec) // again is the same

			staging, target := f.path("staging"), f.path("target/x")
			want(t, f.Stage(ctx, "v", staging, use), csi.ErrBusy, "waiting for the controller")
			if v := f.Report().Volumes[0]; !v.Wanted || v.Staged {
				t.Errorf("the kubelet waits, and the report says %v", v)
			}
			want(t, f.Publish(ctx, "v", staging, target, use), csi.ErrPrecondition)
			want(t, f.Snapshot(ctx, "s", "v"), csi.ErrPrecondition)
			want(t, f.ExpandStorage(ctx, "v", c.mib*2*testMiB), csi.ErrPrecondition)

			must(t, f.Populate(ctx, "v", recipe("r1")))
			f.eventually(t, "it is populated", func() bool { return f.state("v") == pool.Populated && f.job("v") == nil })
			if n := f.volumeLoops(t); n != 0 {
				t.Errorf("%d loop devices are left of the transfer", n)
			}
			must(t, f.Populate(ctx, "v", recipe("r2"))) // nothing to do any more
			if calls := f.fill.seen(); len(calls) != 1 || !calls[0].KnownZero {
				t.Errorf("got transfers %+v, want one on a target known to be zero", calls)
			}

			for range 2 {
				must(t, f.Stage(ctx, "v", staging, use))
			}
			for range 2 {
				must(t, f.Publish(ctx, "v", staging, target, use))
			}
			if got := disk(t, c.mode, target, len(content)); !bytes.Equal(got, content) {
				t.Error("the disk differs from what was written")
			}
			if n := f.volumeLoops(t); n != 1 {
				t.Errorf("got %d loop devices, want 1", n)
			}
			if v := f.Report().Volumes[0]; v.Wanted || !v.Staged || v.Progress.Format != "raw" {
				t.Errorf("it is staged, and the report says %v", v)
			}
			if c.mode == pool.Filesystem {
				checkDiskImage(t, target, c.mib*testMiB)
			}
			single := use
			single.SingleWriter = true
			want(t, f.Publish(ctx, "v", staging, f.path("target/y"), single), csi.ErrPrecondition, target)
			want(t, f.Delete(ctx, "v", "", ""), csi.ErrPrecondition, "in use")
			want(t, f.Unstage(ctx, "v", staging), csi.ErrBusy, target)

			// A second pod, which may only read.
			readOnly := use
			readOnly.ReadOnly = true
			must(t, f.Publish(ctx, "v", staging, f.path("target/ro"), readOnly))
			if c.mode == pool.Filesystem {
				if err := os.WriteFile(f.path("target/ro/file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
					t.Errorf("writing to a read-only target: got %v, want %v", err, unix.EROFS)
				}
			}
			must(t, f.Unpublish(ctx, "v", f.path("target/ro")))

			// A snapshot of the volume in use, and a larger volume from it.
			must(t, f.Snapshot(ctx, "s", "v"))
			must(t, f.Snapshot(ctx, "s", "v"))
			overwrite(t, c.mode, target)
			f.create(t, pool.Spec{ID: "c", Bytes: (c.mib + 8) * testMiB, Mode: c.mode, FSType: c.fsType, From: "s"})
			must(t, f.Stage(ctx, "c", f.path("staging-c"), use))
			must(t, f.Publish(ctx, "c", f.path("staging-c"), f.path("target/c"), use))
			if got := disk(t, c.mode, f.path("target/c"), len(content)); !bytes.Equal(got, content) {
				t.Error("the clone differs from what its source held at the time of the snapshot")
			}
			stats, err := f.Stats(ctx, "c", f.path("target/c"))
			must(t, err)
			if low := (c.mib + 8) * testMiB * 3 / 4; stats.TotalBytes < low {
				t.Errorf("the larger clone shows %d bytes, want at least %d", stats.TotalBytes, low)
			}
			must(t, f.Unpublish(ctx, "c", f.path("target/c")))
			must(t, f.Unstage(ctx, "c", f.path("staging-c")))
			must(t, f.Delete(ctx, "c", "", ""))

			// Growing in use; of ext4 the kernel does that for CAP_SYS_RESOURCE only.
			before, err := f.Stats(ctx, "v", target)
			must(t, err)
			larger := (c.mib + 32) * testMiB
			must(t, f.ExpandStorage(ctx, "v", larger))
			if got, err := f.Expand(ctx, "v", target); errors.Is(err, device.ErrMounted) && !mayResize(t) {
				want(t, err, csi.ErrPrecondition)
				must(t, f.Unpublish(ctx, "v", target))
				must(t, f.Unstage(ctx, "v", staging))
				must(t, f.Stage(ctx, "v", staging, use))
				must(t, f.Publish(ctx, "v", staging, target, use))
			} else if err != nil || got != larger {
				t.Errorf("got %d, %v, want %d bytes", got, err, larger)
			}
			after, err := f.Stats(ctx, "v", target)
			must(t, err)
			if grown := after.TotalBytes - before.TotalBytes; grown < 24*testMiB {
				t.Errorf("a pod sees %d bytes more, want nearly %d", grown, 32*testMiB)
			}
			_, err = f.Stats(ctx, "v", "some/path")
			want(t, err, csi.ErrNotFound)
			_, err = f.Expand(ctx, "none", target)
			want(t, err, csi.ErrNotFound)

			for range 2 {
				must(t, f.Unpublish(ctx, "v", target))
			}
			if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the target is still there: %v", err)
			}
			for range 2 {
				must(t, f.Unstage(ctx, "v", staging))
			}
			if n := f.volumeLoops(t); n != 0 {
				t.Errorf("%d loop devices are left", n)
			}
			must(t, f.Stage(ctx, "v", staging, use)) // it can be used again
			must(t, f.Unstage(ctx, "v", staging))
			for range 2 {
				must(t, f.Delete(ctx, "s", "", ""))
				must(t, f.Delete(ctx, "v", "", ""))
			}
			if report := f.Report(); len(report.Volumes) != 0 {
				t.Errorf("still there: %v", report.Volumes)
			}
		})
	}
}

// mayResize tells whether this process has CAP_SYS_RESOURCE.
func mayResize(t *testing.T) bool {
	var data [2]unix.CapUserData
	must(t, unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]))
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// checkDiskImage checks what KubeVirt expects of /disk.img on a volume of that many bytes.
func checkDiskImage(t *testing.T, target string, bytes int64) {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(filepath.Join(target, "disk.img"), &st))
	if st.Uid != 107 || st.Gid != 107 || st.Mode&0o7777 != 0o660 {
		t.Errorf("disk.img is of %d:%d with mode %o, want 107:107 and 660", st.Uid, st.Gid, st.Mode&0o7777)
	}
	if st.Size%testMiB != 0 || st.Size > bytes*100/106 || st.Size < bytes/2 {
		t.Errorf("disk.img has %d bytes on a volume of %d, want whole MiB and 6 %% left over", st.Size, bytes)
	}
}

// overwrite is a guest at work: what it has written and flushed before a
// snapshot is in it, what it writes after is not.
func overwrite(t *testing.T, mode pool.Mode, target string) {
	t.Helper()
	if mode == pool.Filesystem {
		target = filepath.Join(target, "disk.img")
	}
	f, err := os.OpenFile(target, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt(bytes.Repeat([]byte("new!"), 1024), 0)
	must(t, errors.Join(err, f.Sync(), f.Close()))
}

func TestSnapshotHoldsWhatWasWrittenBefore(t *testing.T) {
	f := start(t, 400*testMiB, complete)
	ctx := t.Context()
	for _, mode := range []pool.Mode{pool.Block, pool.Filesystem} {
		id := strings.ToLower(string(mode))
		spec := pool.Spec{ID: id, Bytes: 32 * testMiB, Mode: mode, AwaitsData: true}
		if mode == pool.Filesystem {
			spec.FSType = "ext4"
		}
		use := csi.Use{Mode: csi.Mode(mode), FSType: spec.FSType}
		f.create(t, spec)
		must(t, f.Populate(ctx, id, recipe("r")))
		f.eventually(t, "it is populated", func() bool { return f.state(id) == pool.Populated })
		must(t, f.Stage(ctx, id, f.path("s/"+id), use))
		must(t, f.Publish(ctx, id, f.path("s/"+id), f.path("t/"+id), use))
		// Not flushed by the writer: it lies in the page cache.
		name := f.path("t/" + id)
		if mode == pool.Filesystem {
			name = filepath.Join(name, "disk.img")
		}
		w, err := os.OpenFile(name, os.O_WRONLY, 0)
		must(t, err)
		defer w.Close()
		_, err = w.WriteAt([]byte("late"), 0)
		must(t, err)

		must(t, f.Snapshot(ctx, "snap-"+id, id))
		_, err = w.WriteAt([]byte("later"), 8) // not frozen any more
		must(t, err)
		spec.ID, spec.From, spec.AwaitsData = "clone-"+id, "snap-"+id, false
		f.create(t, spec)
		must(t, f.Stage(ctx, spec.ID, f.path("s/"+spec.ID), use))
		must(t, f.Publish(ctx, spec.ID, f.path("s/"+spec.ID), f.path("t/"+spec.ID), use))
		if got := disk(t, mode, f.path("t/"+spec.ID), 4); string(got) != "late" {
			t.Errorf("%s: the snapshot holds %q, want what was written before it", mode, got)
		}
		w.Close()
		for _, id := range []string{id, spec.ID} {
			must(t, f.Unpublish(ctx, id, f.path("t/"+id)))
			must(t, f.Unstage(ctx, id, f.path("s/"+id)))
		}
	}
}

func TestOrdinaryVolumeIsFormattedOnce(t *testing.T) {
	f := start(t, 400*testMiB, complete)
	ctx := t.Context()
	use := csi.Use{Mode: csi.Filesystem, FSType: "ext4", MountOptions: []string{"noatime"}}
	f.create(t, pool.Spec{ID: "v", Bytes: 32 * testMiB, Mode: pool.Filesystem, FSType: "ext4"})
	want(t, f.Populate(ctx, "v", recipe("r")), csi.ErrPrecondition)
	staging := f.path("staging")
	must(t, f.Stage(ctx, "v", staging, use))
	must(t, os.WriteFile(filepath.Join(staging, "file"), []byte("kept"), 0o600))
	must(t, os.Symlink("/etc/passwd", filepath.Join(staging, "link")))
	if _, err := os.ReadFile(filepath.Join(staging, "link")); !errors.Is(err, unix.ELOOP) {
		t.Errorf("following a tenant's link: got %v, want %v", err, unix.ELOOP)
	}
	want(t, f.Stage(ctx, "v", f.path("elsewhere"), use), csi.ErrPrecondition, staging)
	want(t, f.Stage(ctx, "v", staging, csi.Use{Mode: csi.Block}), csi.ErrInvalid)
	want(t, f.Stage(ctx, "v", staging, csi.Use{Mode: csi.Filesystem, FSType: "xfs"}), csi.ErrInvalid)
	must(t, f.Unstage(ctx, "v", staging))
	must(t, f.Stage(ctx, "v", staging, use))
	if got, err := os.ReadFile(filepath.Join(staging, "file")); string(got) != "kept" {
		t.Errorf("got %q, %v", got, err)
	}
	must(t, f.Unstage(ctx, "v", staging))
}

func TestForeignContentIsNotFormattedOver(t *testing.T) {
	f := start(t, 400*testMiB, complete)
	f.create(t, pool.Spec{ID: "v", Bytes: 32 * testMiB, Mode: pool.Filesystem, FSType: "ext4"})
	_, v, err := f.find("v")
	must(t, err)
	precious := []byte("not a filesystem, and somebody's all the same")
	must(t, os.WriteFile(v.Path, precious, 0o600))
	want(t, f.Stage(t.Context(), "v", f.path("s"), csi.Use{Mode: csi.Filesystem, FSType: "ext4"}), csi.ErrPrecondition, "not formatted over")
	if got, err := os.ReadFile(v.Path); !bytes.Equal(got, precious) {
		t.Errorf("got %q, %v", got, err)
	}
	if n := f.volumeLoops(t); n != 0 {
		t.Errorf("%d loop devices are left of the refusal", n)
	}
}

func TestTerminalFailureIsFinalForItsRecipe(t *testing.T) {
	f := start(t, 400*testMiB, func(context.Context, Job, func(Progress)) (Result, error) {
		return Result{}, fault.Terminal(fault.NotADiskImage, errors.New("https://x/y serves a web page: check spec.source.http.url"))
	})
	ctx := t.Context()
	use := csi.Use{Mode: csi.Filesystem, FSType: "ext4"}
	f.create(t, pool.Spec{ID: "v", Bytes: 32 * testMiB, Mode: pool.Filesystem, FSType: "ext4", AwaitsData: true})
	failed := func() bool { v := f.Report().Volumes[0]; return v.State.String() == "STATE_FAILED" }
	must(t, f.Populate(ctx, "v", recipe("r1")))
	f.eventually(t, "it has failed", failed)
	want(t, f.Stage(ctx, "v", f.path("s"), use), csi.ErrPrecondition, "NotADiskImage", "spec.source.http.url")
	if n := f.volumeLoops(t); n != 0 {
		t.Errorf("%d loop devices are left", n)
	}
	must(t, f.Populate(ctx, "v", recipe("r1")))
	f.shut(t)
	f.open(t, 400*testMiB) // after a reboot
	must(t, f.Populate(ctx, "v", recipe("r1")))
	if n := len(f.fill.seen()); n != 1 || !failed() {
		t.Fatalf("got %d tries of a recipe that has failed for good, want 1", n)
	}
	f.fill.mu.Lock()
	f.fill.do = complete
	f.fill.mu.Unlock()
	must(t, f.Populate(ctx, "v", recipe("r2")))
	f.eventually(t, "the next recipe is carried out", func() bool { return f.state("v") == pool.Populated })
	if calls := f.fill.seen(); len(calls) != 2 || calls[0].Recipe.Digest != calls[1].Recipe.Digest {
		t.Errorf("got %+v, want a second try of the same content", calls)
	}
}

func TestTransientFailureIsTriedAgain(t *testing.T) {
	var tries int
	f := start(t, 400*testMiB, nil)
	f.fill.do = func(ctx context.Context, job Job, report func(Progress)) (Result, error) {
		if tries++; tries == 1 {
			return Result{}, errors.New("something broke")
		}
		return complete(ctx, job, report)
	}
	f.create(t, pool.Spec{ID: "v", Bytes: 32 * testMiB, Mode: pool.Block, AwaitsData: true})
	must(t, f.Populate(t.Context(), "v", recipe("r")))
	f.eventually(t, "the failure is told", func() bool {
		v := f.Report().Volumes[0]
		return v.Failure != nil && !v.Failure.Terminal && v.State.String() == "STATE_FILLING"
	})
	f.eventually(t, "it is populated", func() bool { return f.state("v") == pool.Populated })
}

func TestTransfersEnd(t *testing.T) {
	for _, mode := range []pool.Mode{pool.Block, pool.Filesystem} {
		t.Run(string(mode), func(t *testing.T) {
			f := start(t, 400*testMiB, halfway)
			ctx := t.Context()
			spec := pool.Spec{ID: "v", Bytes: 32 * testMiB, Mode: mode, AwaitsData: true}
			if mode == pool.Filesystem {
				spec.FSType = "ext4"
			}
			use := csi.Use{Mode: csi.Mode(mode), FSType: spec.FSType}
			f.create(t, spec)
			half := func() bool {
				v := f.Report().Volumes[0]
				return v.State.String() == "STATE_FILLING" && v.Progress.BytesDone > 0
			}
			short, cancel := context.WithCancel(ctx)
			must(t, f.Populate(short, "v", recipe("r1")))
			cancel() // the call is over, the job is not
			f.eventually(t, "it is half done", half)
			must(t, f.Populate(ctx, "v", recipe("r1")))
			want(t, f.Stage(ctx, "v", f.path("s"), use), csi.ErrBusy, "50 %")
			must(t, f.Unstage(ctx, "v", f.path("s")))
			if wantLoops := map[pool.Mode]int{pool.Block: 0, pool.Filesystem: 1}[mode]; f.volumeLoops(t) != wantLoops {
				t.Errorf("got %d loop devices while it fills, want %d", f.volumeLoops(t), wantLoops)
			}
			if mounts := leftOf(t, f.dir); len(mounts) > 0 {
				t.Errorf("the filling volume can be seen: %v", mounts)
			}
			if !half() || len(f.fill.seen()) != 1 {
				t.Error("the job has not survived")
			}

			// Another recipe takes the place of the first.
			must(t, f.Populate(ctx, "v", recipe("r2")))
			f.eventually(t, "the second recipe is half done", func() bool { return len(f.fill.seen()) == 2 && half() })

			// The plugin ends: the journal stays, nothing else does.
			f.Close()
			if n := f.volumeLoops(t); n != 0 {
				t.Errorf("%d loop devices are left after Close", n)
			}
			want(t, f.Populate(ctx, "v", recipe("r3")), csi.ErrUnavailable)
			for _, p := range f.pools {
				must(t, p.Close(ctx))
			}
			f.open(t, 400*testMiB)
			_, v, err := f.find("v")
			must(t, err)
			p, _, _ := f.pools.find("v")
			if b, err := os.ReadFile(p.JournalPath("v")); string(b) != "half" {
				t.Errorf("journal: got %q, %v", b, err)
			}
			if v.State == pool.Populated || f.Report().Volumes[0].State.String() != "STATE_EMPTY" {
				t.Errorf("after a restart: got %v, want an empty volume", f.Report().Volumes[0])
			}
			must(t, f.Populate(ctx, "v", recipe("r3")))
			f.eventually(t, "it is half done again", half)
			if mode == pool.Filesystem {
				calls := f.fill.seen()
				if a, b := calls[0].TargetBytes, calls[len(calls)-1].TargetBytes; a != b {
					t.Errorf("disk.img had %d bytes at first and %d later", a, b)
				}
			}
			must(t, f.Delete(ctx, "v", "default", f.pools[0].UUID()))
			if n := f.volumeLoops(t); n != 0 || f.job("v") != nil {
				t.Errorf("after Delete: %d loop devices, job %v", n, f.job("v"))
			}
		})
	}
}

func TestCallsForOneVolumeNeverOverlap(t *testing.T) {
	f := start(t, 400*testMiB, complete)
	f.create(t, pool.Spec{ID: "v", Bytes: 32 * testMiB, Mode: pool.Block})
	release, err := f.hold("v", "test")
	must(t, err)
	ctx := t.Context()
	use := csi.Use{Mode: csi.Block}
	want(t, f.Stage(ctx, "v", f.path("s"), use), csi.ErrBusy, "test is under way")
	want(t, f.Unstage(ctx, "v", f.path("s")), csi.ErrBusy)
	want(t, f.Publish(ctx, "v", f.path("s"), f.path("t"), use), csi.ErrBusy)
	want(t, f.Unpublish(ctx, "v", f.path("t")), csi.ErrBusy)
	want(t, f.Delete(ctx, "v", "", ""), csi.ErrBusy)
	want(t, f.Snapshot(ctx, "s", "v"), csi.ErrBusy)
	want(t, f.ExpandStorage(ctx, "v", 64*testMiB), csi.ErrBusy)
	want(t, f.Populate(ctx, "v", recipe("r")), csi.ErrBusy)
	release()
	must(t, f.Snapshot(ctx, "s", "v"))
}

// A tenant who can write to the loop device can have it detached.
func TestChangedLoopIsReplaced(t *testing.T) {
	f := start(t, 400*testMiB, complete)
	ctx := t.Context()
	use := csi.Use{Mode: csi.Block}
	f.create(t, pool.Spec{ID: "v", Bytes: 16 * testMiB, Mode: pool.Block, AwaitsData: true})
	must(t, f.Populate(ctx, "v", recipe("r")))
	f.eventually(t, "it is populated", func() bool { return f.state("v") == pool.Populated })
	must(t, f.Stage(ctx, "v", f.path("s"), use))
	must(t, f.Publish(ctx, "v", f.path("s"), f.path("t1"), use))
	w, err := os.OpenFile(f.path("t1"), os.O_RDWR, 0)
	must(t, err)
	must(t, unix.IoctlSetInt(int(w.Fd()), unix.LOOP_CLR_FD, 0))
	w.Close()
	must(t, f.Publish(ctx, "v", f.path("s"), f.path("t2"), use))
	if got := disk(t, pool.Block, f.path("t2"), len(content)); !bytes.Equal(got, content) {
		t.Error("the disk differs after its loop device was replaced")
	}
	must(t, f.Unpublish(ctx, "v", f.path("t1")))
	must(t, f.Unpublish(ctx, "v", f.path("t2")))
	must(t, f.Unstage(ctx, "v", f.path("s")))
}

func TestPoolThatIsAwayIsNeitherMadeNorForgotten(t *testing.T) {
	f := start(t, 400*testMiB, complete)
	ctx := t.Context()
	known := "6b7c1c3e-0000-4000-8000-000000000000"
	spec := pool.Spec{ID: "v", Bytes: 16 * testMiB, Mode: pool.Block}
	want(t, f.Create(ctx, "default", known, spec), csi.ErrUnavailable, known)
	want(t, f.Delete(ctx, "v", "default", known), csi.ErrUnavailable, known)
	if f.pools[0].UUID() != "" {
		t.Fatal("a pool was made in place of the one that is away")
	}
	want(t, f.Create(ctx, "other", "", spec), csi.ErrInvalid, "other")
	f.create(t, spec)
	uuid := f.pools[0].UUID()
	want(t, f.Create(ctx, "default", known, spec), csi.ErrUnavailable, known, uuid)
	must(t, f.Create(ctx, "default", uuid, spec))

	// The disk is away at the start of the plugin, and comes later.
	f.shut(t)
	away := f.pool + ".away"
	must(t, os.Rename(f.pool, away))
	must(t, os.Mkdir(f.pool, 0o700))
	f.open(t, 400*testMiB)
	want(t, f.Delete(ctx, "v", "default", uuid), csi.ErrUnavailable, uuid)
	must(t, os.Remove(f.pool))
	must(t, os.Rename(away, f.pool))
	spec.ID = "w"
	must(t, f.Create(ctx, "default", uuid, spec))
	if n := len(f.Report().Volumes); n != 2 {
		t.Errorf("got %d volumes, want the old and the new one", n)
	}
}

func TestFullPoolSaysSo(t *testing.T) {
	f := start(t, 400*testMiB, complete)
	err := f.Create(t.Context(), "default", "", pool.Spec{ID: "v", Bytes: 1 << 40, Mode: pool.Block})
	want(t, err, csi.ErrFull, fmt.Sprint(1<<40), "free")
}
