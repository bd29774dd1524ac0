package pool

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/device"
)

// newPool makes an embedded pool of that many bytes, gone with t.
func newPool(t *testing.T, bytes int64) *Pool {
	t.Helper()
	p := open(t, Config{Name: "test", Dir: filepath.Join(t.TempDir(), "pool"), Bytes: bytes})
	if err := p.Make(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p
}

// open opens a pool and sees to it that nothing of it outlives t.
func open(t *testing.T, c Config) *Pool {
	t.Helper()
	p, err := Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return p
}

// reopen is what a restart of the plugin does: nothing is closed in order.
func reopen(t *testing.T, p *Pool) *Pool {
	t.Helper()
	p.forget()
	return open(t, p.cfg)
}

func create(t *testing.T, p *Pool, s Spec) Volume {
	t.Helper()
	if s.Mode == "" {
		s.Mode = Block
	}
	v, err := p.Create(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func writeRandom(t *testing.T, path string, off, n int64) []byte {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, n)
	rand.Read(b)
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	return b
}

func read(t *testing.T, path string, off, n int64) []byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, n)
	if _, err := f.ReadAt(b, off); err != nil {
		t.Fatal(err)
	}
	return b
}

const mib = 1 << 20

func TestOpenMakesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pool")
	p := open(t, Config{Name: "test", Dir: dir, Bytes: MinBytes})
	if p.UUID() != "" || p.Problem() != "" {
		t.Errorf("got UUID %q, problem %q", p.UUID(), p.Problem())
	}
	if _, err := p.Create(t.Context(), Spec{ID: "a", Bytes: mib, Mode: Block}); !errors.Is(err, ErrNoPool) {
		t.Errorf("create: got %v, want ErrNoPool", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s was made", dir)
	}
	s, err := p.Stats()
	if err != nil || s.TotalBytes <= 0 || s.AvailableBytes <= 0 || s.AvailableBytes >= MinBytes {
		t.Errorf("expected figures of a pool to be made: %+v, %v", s, err)
	}
}

func TestExpectedFiguresAreKept(t *testing.T) {
	embedded := open(t, Config{Name: "embedded", Dir: filepath.Join(t.TempDir(), "pool"), Bytes: 512 * mib})
	outer := newPool(t, MinBytes)
	direct := open(t, Config{Name: "direct", Dir: filepath.Join(outer.root, "inner")})
	for _, p := range []*Pool{embedded, direct} {
		before, err := p.Stats()
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Make(t.Context()); err != nil {
			t.Fatal(err)
		}
		after, err := p.Stats()
		if err != nil {
			t.Fatal(err)
		}
		if before.AvailableBytes <= 0 || before.AvailableBytes > after.AvailableBytes+mib {
			t.Errorf("%s: %d bytes were announced, %d are there", p.Name(), before.AvailableBytes, after.AvailableBytes)
		}
	}
}

func TestPoolThatIsTooLarge(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pool")
	p := open(t, Config{Name: "test", Dir: dir, Bytes: 1 << 50})
	err := p.Make(t.Context())
	if !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "does not fit") {
		t.Errorf("got %v", err)
	}
	entries, _ := os.ReadDir(dir)
	if len(entries) != 0 {
		t.Errorf("left behind: %v", entries)
	}
}

func TestOnePoolOneProcess(t *testing.T) {
	p := newPool(t, MinBytes)
	if _, err := Open(t.Context(), p.cfg); !errors.Is(err, ErrBusy) {
		t.Errorf("second open: got %v, want ErrBusy", err)
	}
}

func TestRestartFindsLoopAndMount(t *testing.T) {
	p := newPool(t, MinBytes)
	uuid := p.UUID()
	create(t, p, Spec{ID: "a", Bytes: mib})
	p = reopen(t, p)
	if p.UUID() != uuid || p.Problem() != "" || len(p.Repairs()) != 0 {
		t.Fatalf("after a restart: UUID %q, want %q; problem %q; repairs %q", p.UUID(), uuid, p.Problem(), p.Repairs())
	}
	if _, err := p.Get("a"); err != nil {
		t.Error(err)
	}
	if n := loopsOf(t, p.image); n != 1 {
		t.Errorf("%d loop devices show the pool file, want 1", n)
	}
	// The mount is gone with its namespace, the loop device is not.
	if err := device.Unmount(p.root); err != nil {
		t.Fatal(err)
	}
	p = reopen(t, p)
	if p.UUID() != uuid || p.Problem() != "" || len(p.Repairs()) != 1 {
		t.Fatalf("after the mount went: UUID %q, want %q; problem %q; repairs %q", p.UUID(), uuid, p.Problem(), p.Repairs())
	}
	if n := loopsOf(t, p.image); n != 1 {
		t.Errorf("%d loop devices show the pool file, want 1", n)
	}
	image := p.image
	if err := p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := loopsOf(t, image); n != 0 {
		t.Errorf("%d loop devices show the closed pool's file", n)
	}
	p = open(t, p.cfg)
	if p.UUID() != uuid {
		t.Errorf("after a reboot: UUID %q, want %q; problem %q", p.UUID(), uuid, p.Problem())
	}
}

// XFS shuts itself down when its disk fails; here it is told to.
func TestFailedFilesystem(t *testing.T) {
	p := newPool(t, MinBytes)
	create(t, p, Spec{ID: "a", Bytes: mib})
	dir, err := os.Open(p.root)
	if err != nil {
		t.Fatal(err)
	}
	const goingDown, noLogFlush = 0x8004587d, 2 // XFS_IOC_GOINGDOWN, linux/xfs_fs.h
	err = unix.IoctlSetPointerInt(int(dir.Fd()), goingDown, noLogFlush)
	dir.Close()
	if err != nil {
		t.Fatal(err)
	}
	failed := func(deed string, err error) {
		t.Helper()
		if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), p.root) {
			t.Errorf("%s: got %v, want ErrUnavailable that names %s", deed, err, p.root)
		}
	}
	_, err = p.Stats()
	failed("stats", err)
	_, err = p.Create(t.Context(), Spec{ID: "b", Bytes: mib, Mode: Block})
	failed("create", err)
	_, err = p.Update("a", func(v *Volume) { v.State = Filling })
	failed("update", err)
	failed("delete", p.Delete(t.Context(), "a"))
	// What is known without the disk is told: volumes must be let go of.
	if v, err := p.Get("a"); err != nil || v.State != Populated {
		t.Errorf("get: state %q, %v", v.State, err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	p = open(t, p.cfg)
	if _, err := p.Stats(); err != nil {
		t.Errorf("after the remedy: %v", err)
	}
}

func loopsOf(t *testing.T, path string) int {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	loops, err := device.FindLoopsOf(f)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range loops {
		l.Close()
	}
	return len(loops)
}

func TestPoolThatCannotBeMounted(t *testing.T) {
	p := newPool(t, MinBytes)
	image := p.image
	if err := p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	saved := read(t, image, 0, 4096)
	writeRandom(t, image, 0, 4096)
	p = open(t, p.cfg)
	if p.Problem() == "" || p.UUID() != "" {
		t.Errorf("problem %q, UUID %q", p.Problem(), p.UUID())
	}
	if _, err := p.Create(t.Context(), Spec{ID: "a", Bytes: mib, Mode: Block}); !errors.Is(err, ErrUnavailable) {
		t.Errorf("create: got %v, want ErrUnavailable", err)
	}
	if err := p.Make(t.Context()); !errors.Is(err, ErrUnavailable) {
		t.Errorf("make: got %v, want ErrUnavailable", err)
	}
	if n := loopsOf(t, image); n != 0 {
		t.Errorf("%d loop devices are left", n)
	}
	if err := os.WriteFile(image+".head", saved, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(saved, 0); err != nil {
		t.Fatal(err)
	}
	if err := p.Look(t.Context()); err != nil || p.UUID() == "" {
		t.Errorf("after the repair: UUID %q, %v", p.UUID(), err)
	}
}

func TestDirectPool(t *testing.T) {
	outer := newPool(t, MinBytes)
	p := open(t, Config{Name: "direct", Dir: filepath.Join(outer.root, "inner"), Bytes: MinBytes})
	if err := p.Make(t.Context()); err != nil {
		t.Fatal(err)
	}
	if p.image != "" || p.root != p.cfg.Dir {
		t.Errorf("a pool file was made in a folder with reflinks: %q", p.image)
	}
	create(t, p, Spec{ID: "a", Bytes: mib})
	if _, err := p.Snapshot(t.Context(), "s", "a"); err != nil {
		t.Error(err)
	}
	uuid := p.UUID()
	p = reopen(t, p)
	if p.UUID() != uuid || len(p.List()) != 2 {
		t.Errorf("after a restart: UUID %q, want %q; volumes %v", p.UUID(), uuid, p.List())
	}
	s, err := p.Stats()
	if err != nil {
		t.Fatal(err)
	}
	// Others fill the filesystem.
	full, err := os.Create(filepath.Join(outer.root, "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	if err := fallocate(full, 0, 100*mib); err != nil {
		t.Fatal(err)
	}
	now, err := p.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if taken := s.AvailableBytes - now.AvailableBytes; taken < 95*mib {
		t.Errorf("another program took %d bytes; available went from %d to %d", 100*mib, s.AvailableBytes, now.AvailableBytes)
	}
}

func TestCreate(t *testing.T) {
	p := newPool(t, MinBytes)
	spec := Spec{ID: "pvc-1", Bytes: 10*mib + 1, Mode: Filesystem, FSType: "ext4", AwaitsData: true}
	v := create(t, p, spec)
	st, err := os.Stat(v.Path)
	if err != nil {
		t.Fatal(err)
	}
	if v.Bytes != 10*mib+4096 || st.Size() != v.Bytes {
		t.Errorf("got %d bytes in a file of %d", v.Bytes, st.Size())
	}
	if v.State != Empty {
		t.Errorf("a volume that awaits data is %s", v.State)
	}
	if got := allocated(v.Path); got != 0 {
		t.Errorf("an empty volume takes %d bytes", got)
	}
	if again := create(t, p, spec); again.Path != v.Path || !again.CreatedAt.Equal(v.CreatedAt) {
		t.Errorf("created again: %+v", again)
	}
	other := spec
	other.Bytes = 20 * mib
	if _, err := p.Create(t.Context(), other); !errors.Is(err, ErrExists) {
		t.Errorf("other size: got %v, want ErrExists", err)
	}
	pre := create(t, p, Spec{ID: "pre", Bytes: 8 * mib, Preallocate: true})
	if got := allocated(pre.Path); got < 8*mib {
		t.Errorf("a preallocated volume of %d bytes holds %d", pre.Bytes, got)
	}
}

func TestBadRequests(t *testing.T) {
	p := newPool(t, MinBytes)
	create(t, p, Spec{ID: "block", Bytes: 2 * mib})
	create(t, p, Spec{ID: "empty", Bytes: 2 * mib, AwaitsData: true})
	for name, row := range map[string]struct {
		spec Spec
		want error
	}{
		"id with a slash":         {Spec{ID: "a/b", Bytes: mib, Mode: Block}, ErrInvalid},
		"id of two dots":          {Spec{ID: "..", Bytes: mib, Mode: Block}, ErrInvalid},
		"hidden id":               {Spec{ID: ".a", Bytes: mib, Mode: Block}, ErrInvalid},
		"empty id":                {Spec{ID: "", Bytes: mib, Mode: Block}, ErrInvalid},
		"long id":                 {Spec{ID: strings.Repeat("a", 201), Bytes: mib, Mode: Block}, ErrInvalid},
		"no size":                 {Spec{ID: "a", Mode: Block}, ErrInvalid},
		"no mode":                 {Spec{ID: "a", Bytes: mib}, ErrInvalid},
		"block with a filesystem": {Spec{ID: "a", Bytes: mib, Mode: Block, FSType: "ext4"}, ErrInvalid},
		"unknown filesystem":      {Spec{ID: "a", Bytes: mib, Mode: Filesystem, FSType: "vfat"}, ErrInvalid},
		"source unknown":          {Spec{ID: "a", Bytes: mib, Mode: Block, From: "nobody"}, ErrNotFound},
		"source not populated":    {Spec{ID: "a", Bytes: 2 * mib, Mode: Block, From: "empty"}, ErrNotPopulated},
		"smaller than its source": {Spec{ID: "a", Bytes: mib, Mode: Block, From: "block"}, ErrInvalid},
		"other mode than source":  {Spec{ID: "a", Bytes: 2 * mib, Mode: Filesystem, FSType: "ext4", From: "block"}, ErrInvalid},
		"larger than the pool":    {Spec{ID: "a", Bytes: 1 << 40, Mode: Block}, ErrFull},
	} {
		if _, err := p.Create(t.Context(), row.spec); !errors.Is(err, row.want) {
			t.Errorf("%s: got %v, want %v", name, err, row.want)
		}
	}
	if len(p.List()) != 2 {
		t.Errorf("volumes: %v", p.List())
	}
}

func TestSnapshotAndClone(t *testing.T) {
	p := newPool(t, MinBytes)
	v := create(t, p, Spec{ID: "v", Bytes: 64 * mib})
	first := writeRandom(t, v.Path, 0, 4*mib)
	s, err := p.Snapshot(t.Context(), "s", "v")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := p.Snapshot(t.Context(), "s", "v"); err != nil || again.Path != s.Path {
		t.Errorf("snapshot again: %v, %v", again, err)
	}
	if _, err := p.Snapshot(t.Context(), "s", "other"); !errors.Is(err, ErrExists) {
		t.Errorf("snapshot of another volume under this id: got %v, want ErrExists", err)
	}
	second := writeRandom(t, v.Path, 0, 4*mib)
	if !bytes.Equal(read(t, s.Path, 0, 4*mib), first) {
		t.Error("a write to the volume changed its snapshot")
	}
	if s.AllocatedBytes != 4*mib {
		t.Errorf("the snapshot holds %d bytes, want %d", s.AllocatedBytes, 4*mib)
	}
	c := create(t, p, Spec{ID: "c", Bytes: 70 * mib, From: "s"})
	if !bytes.Equal(read(t, c.Path, 0, 4*mib), first) || c.SourceID != "s" {
		t.Error("the clone does not hold what its snapshot holds")
	}
	if tail := read(t, c.Path, 64*mib, 6*mib); !bytes.Equal(tail, make([]byte, 6*mib)) {
		t.Error("the clone does not end in zeros")
	}
	if !bytes.Equal(read(t, v.Path, 0, 4*mib), second) {
		t.Error("the volume lost its own data")
	}
	before, err := p.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(64+70+4) * mib; before.ProvisionedBytes != want {
		t.Errorf("provisioned %d bytes, want %d", before.ProvisionedBytes, want)
	}
	for _, id := range []string{"v", "s", "c", "c"} {
		if err := p.Delete(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	if after, err := p.Stats(); err != nil || after.ProvisionedBytes != 0 {
		t.Errorf("provisioned %d bytes of nothing, %v", after.ProvisionedBytes, err)
	}
}

func TestExpand(t *testing.T) {
	p := newPool(t, MinBytes)
	create(t, p, Spec{ID: "v", Bytes: 10 * mib, Preallocate: true})
	v, err := p.Expand(t.Context(), "v", 20*mib)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(v.Path)
	if err != nil {
		t.Fatal(err)
	}
	if v.Bytes != 20*mib || st.Size() != 20*mib || allocated(v.Path) < 20*mib {
		t.Errorf("recorded %d, file of %d, allocated %d", v.Bytes, st.Size(), allocated(v.Path))
	}
	if v, err := p.Expand(t.Context(), "v", 5*mib); err != nil || v.Bytes != 20*mib {
		t.Errorf("expanding to less: %d bytes, %v", v.Bytes, err)
	}
	var full *FullError
	if _, err := p.Expand(t.Context(), "v", 1<<40); !errors.As(err, &full) || full.Need != 1<<40-20*mib {
		t.Errorf("expanding beyond the pool: %v", err)
	}
	if v, _ := p.Get("v"); v.Bytes != 20*mib {
		t.Errorf("a refused expansion left %d bytes", v.Bytes)
	}
}

func TestUpdateKeepsWhatIsNotTheCallers(t *testing.T) {
	p := newPool(t, MinBytes)
	create(t, p, Spec{ID: "v", Bytes: mib, AwaitsData: true})
	_, err := p.Update("v", func(v *Volume) {
		v.State, v.Recipe, v.Source = Populated, "sha256:1", []byte(`{"format":"qcow2"}`)
		v.Failure = &Failure{Reason: "X", Message: "m", Terminal: true}
		v.Bytes, v.ID, v.Snapshot = 1, "w", true
	})
	if err != nil {
		t.Fatal(err)
	}
	p = reopen(t, p)
	v, err := p.Get("v")
	if err != nil {
		t.Fatal(err)
	}
	if v.State != Populated || v.Recipe != "sha256:1" || v.Failure == nil || !v.Failure.Terminal || string(v.Source) != `{"format":"qcow2"}` {
		t.Errorf("not kept: %+v", v)
	}
	if v.Bytes != mib || v.Snapshot {
		t.Errorf("changed: %+v", v)
	}
	if _, err := p.Update("nobody", func(*Volume) {}); !errors.Is(err, ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

func attach(t *testing.T, v Volume) *device.Loop {
	t.Helper()
	f, err := os.OpenFile(v.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l, err := device.AttachLoop(f, device.LoopOptions{DirectIO: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Detach(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return l
}

// Guests and filesystems remember the sector size of their disk, so a snapshot
// or a clone must not change it, even where it costs direct I/O.
func TestSharedBlocksKeepTheSectorSize(t *testing.T) {
	p := newPool(t, MinBytes)
	v := create(t, p, Spec{ID: "v", Bytes: 8 * mib})
	writeRandom(t, v.Path, 0, mib)
	sector := func(v Volume) uint32 {
		l := attach(t, v)
		dev, err := os.Open(l.Path())
		if err != nil {
			t.Fatal(err)
		}
		defer dev.Close()
		bytes, err := unix.IoctlGetUint32(int(dev.Fd()), unix.BLKSSZGET)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: sectors of %d bytes, direct I/O %t", v.ID, bytes, l.DirectIO())
		return bytes
	}
	before := sector(v)
	clone := create(t, p, Spec{ID: "c", Bytes: 8 * mib, From: "v"})
	if after := sector(v); after != before {
		t.Errorf("the source of a clone had sectors of %d bytes, and now of %d", before, after)
	}
	if of := sector(clone); of != before {
		t.Errorf("a volume has sectors of %d bytes, its clone of %d", before, of)
	}
}

// A snapshot of a frozen filesystem is one that can be mounted beside it.
func TestSnapshotOfAMountedFilesystem(t *testing.T) {
	for fstype, bytes := range map[string]int64{device.Ext4: 64 * mib, device.XFS: 300 * mib} {
		p := newPool(t, 1024*mib)
		v := create(t, p, Spec{ID: "v", Bytes: bytes, Mode: Filesystem, FSType: fstype})
		mount := func(l *device.Loop) string {
			dir := t.TempDir()
			if err := device.Mount(l.Path(), dir, fstype, device.MountOptions{}); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := device.Unmount(dir); err != nil {
					t.Error(err)
				}
			})
			return dir
		}
		l := attach(t, v)
		if err := device.Mkfs(t.Context(), l.Path(), fstype, device.MkfsOptions{Zeroed: true}); err != nil {
			t.Fatal(err)
		}
		dir := mount(l)
		// Not synced: freezing does that.
		if err := os.WriteFile(filepath.Join(dir, "a"), []byte("before"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := device.Freeze(dir); err != nil {
			t.Fatal(err)
		}
		_, err := p.Snapshot(t.Context(), "s", "v")
		if err := device.Thaw(dir); err != nil {
			t.Fatal(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "a"), []byte("after"), 0o600); err != nil {
			t.Fatal(err)
		}
		clone := mount(attach(t, create(t, p, Spec{ID: "c", Bytes: bytes, Mode: Filesystem, FSType: fstype, From: "s"})))
		if got, err := os.ReadFile(filepath.Join(clone, "a")); err != nil || string(got) != "before" {
			t.Errorf("%s: the clone of the snapshot holds %q, %v", fstype, got, err)
		}
	}
}

// A volume whose record is damaged is neither used nor removed, and its room is
// not given to others.
func TestDamagedRecord(t *testing.T) {
	p := newPool(t, MinBytes)
	v := create(t, p, Spec{ID: "v", Bytes: 8 * mib})
	data := writeRandom(t, v.Path, 0, 8*mib)
	record := filepath.Join(filepath.Dir(v.Path), metaName)
	if err := os.WriteFile(record, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	p = reopen(t, p)
	if p.Problem() != "" || len(p.Repairs()) != 1 || len(p.List()) != 0 {
		t.Errorf("problem %q, repairs %q, volumes %v", p.Problem(), p.Repairs(), p.List())
	}
	if err := p.Delete(t.Context(), "v"); !errors.Is(err, ErrUnavailable) {
		t.Errorf("delete: got %v, want ErrUnavailable", err)
	}
	if _, err := p.Create(t.Context(), v.Spec); !errors.Is(err, ErrUnavailable) {
		t.Errorf("create: got %v, want ErrUnavailable", err)
	}
	if s, err := p.Stats(); err != nil || s.ProvisionedBytes != 8*mib {
		t.Errorf("provisioned %d bytes, %v", s.ProvisionedBytes, err)
	}
	if !bytes.Equal(read(t, v.Path, 0, 8*mib), data) {
		t.Error("the data is gone")
	}
}

// The pool may be mounted in a mount namespace of which nobody takes care any more.
func TestPoolThatIsMountedElsewhereToo(t *testing.T) {
	p := newPool(t, MinBytes)
	v := create(t, p, Spec{ID: "v", Bytes: mib})
	data := writeRandom(t, v.Path, 0, 4096)
	elsewhere := t.TempDir()
	if err := device.Bind(p.root, elsewhere, device.BindOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.Unmount(elsewhere); err != nil {
			t.Error(err)
		}
	})
	if err := device.Unmount(p.root); err != nil {
		t.Fatal(err)
	}
	p = reopen(t, p)
	if p.Problem() != "" || loopsOf(t, p.image) != 1 {
		t.Fatalf("problem %q, %d loop devices", p.Problem(), loopsOf(t, p.image))
	}
	if v, err := p.Get("v"); err != nil || !bytes.Equal(read(t, v.Path, 0, 4096), data) {
		t.Errorf("the volume is not there: %v", err)
	}
	if err := device.Unmount(elsewhere); err != nil {
		t.Fatal(err)
	}
}

func TestDeleteRefusesWhatALoopShows(t *testing.T) {
	p := newPool(t, MinBytes)
	v := create(t, p, Spec{ID: "v", Bytes: mib})
	f, err := os.OpenFile(v.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l, err := device.AttachLoop(f, device.LoopOptions{DirectIO: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Delete(t.Context(), "v"); !errors.Is(err, ErrInUse) {
		t.Errorf("got %v, want ErrInUse", err)
	}
	if err := l.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Delete(t.Context(), "v"); err != nil {
		t.Error(err)
	}
}

// A pool promises no more than it can hold: every volume can be written full,
// clones included, and what is deleted can be had again.
func TestFullPool(t *testing.T) {
	p := newPool(t, 320*mib)
	s, err := p.Stats()
	if err != nil {
		t.Fatal(err)
	}
	half := s.AvailableBytes / 2 / mib * mib
	a := create(t, p, Spec{ID: "a", Bytes: half})
	fill(t, a)
	b := create(t, p, Spec{ID: "b", Bytes: half, From: "a"})
	scatter(t, b)
	fill(t, b)
	_, err = p.Create(t.Context(), Spec{ID: "c", Bytes: half, Mode: Block})
	var full *FullError
	if !errors.As(err, &full) || !errors.Is(err, ErrFull) || full.Need != half || full.Free >= half {
		t.Errorf("got %v (%+v), want ErrFull", err, full)
	}
	if _, err := p.Snapshot(t.Context(), "s", "a"); !errors.Is(err, ErrFull) {
		t.Errorf("snapshot of a full volume: got %v, want ErrFull", err)
	}
	if _, err := p.Expand(t.Context(), "a", 2*half); !errors.Is(err, ErrFull) {
		t.Errorf("expand: got %v, want ErrFull", err)
	}
	if err := p.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	fill(t, create(t, p, Spec{ID: "c", Bytes: half, Preallocate: true}))
}

// scatter writes every second block, last to first: the most records that a
// volume can make the filesystem keep.
func scatter(t *testing.T, v Volume) {
	t.Helper()
	f, err := os.OpenFile(v.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 4096)
	rand.Read(b)
	for off := v.Bytes - 4096; off >= 0; off -= 8192 {
		if _, err := f.WriteAt(b, off); err != nil {
			t.Fatalf("volume %s of %d bytes: %v", v.ID, v.Bytes, err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatalf("volume %s of %d bytes: %v", v.ID, v.Bytes, err)
	}
}

func fill(t *testing.T, v Volume) {
	t.Helper()
	f, err := os.OpenFile(v.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, mib)
	rand.Read(b)
	for off := int64(0); off < v.Bytes; off += mib {
		if _, err := f.WriteAt(b, off); err != nil {
			t.Fatalf("volume %s of %d bytes: %v", v.ID, v.Bytes, err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatalf("volume %s of %d bytes: %v", v.ID, v.Bytes, err)
	}
}

// Blocks that were discarded from the pool file may be lost to others.
func TestAvailableIsWhatTheBackingFilesystemStillHas(t *testing.T) {
	p := newPool(t, MinBytes)
	before, err := p.Stats()
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(p.image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got := allocated(p.image); got < MinBytes {
		t.Errorf("of the pool file's %d bytes %d are reserved", MinBytes, got)
	}
	// As long as the filesystem below has room, holes cost nothing.
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 200*mib, 8*mib); err != nil {
		t.Fatal(err)
	}
	after, err := p.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if after.AvailableBytes != before.AvailableBytes {
		t.Errorf("available went from %d to %d", before.AvailableBytes, after.AvailableBytes)
	}
}

func TestAtOnce(t *testing.T) {
	p := newPool(t, MinBytes)
	done := make(chan error)
	const n = 16
	for i := range n {
		go func() {
			id := fmt.Sprintf("v%d", i)
			_, err := p.Create(t.Context(), Spec{ID: id, Bytes: mib, Mode: Block})
			if err == nil {
				_, err = p.Snapshot(t.Context(), "s"+id, id)
			}
			if err == nil {
				err = p.Delete(t.Context(), id)
			}
			done <- err
		}()
	}
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if got := len(p.List()); got != n {
		t.Errorf("%d snapshots, want %d", got, n)
	}
	if s, _ := p.Stats(); s.ProvisionedBytes != 0 {
		t.Errorf("provisioned %d bytes of %d empty snapshots", s.ProvisionedBytes, n)
	}
}

// Scratch takes room from new volumes while it is there, and leaves nothing.
func TestScratch(t *testing.T) {
	p := newPool(t, 600*mib)
	if _, err := p.Create(t.Context(), Spec{ID: "v", Bytes: 64 * mib, Mode: Block}); err != nil {
		t.Fatal(err)
	}
	before, err := p.Stats()
	if err != nil {
		t.Fatal(err)
	}
	s, err := p.NewScratch(64 * mib)
	if err != nil {
		t.Fatal(err)
	}
	if s.Bytes() != 128*mib || len(s.Files()) != 2 {
		t.Errorf("%d bytes in %d files", s.Bytes(), len(s.Files()))
	}
	if now, err := p.Stats(); err != nil || now.AvailableBytes != before.AvailableBytes-128*mib {
		t.Errorf("%d bytes are available beside it, before it %d: %v", now.AvailableBytes, before.AvailableBytes, err)
	}
	if _, err := s.Files()[1].WriteAt(make([]byte, mib), 63*mib); err != nil {
		t.Error(err)
	}
	s.Close()
	if now, err := p.Stats(); err != nil || now.AvailableBytes != before.AvailableBytes {
		t.Errorf("%d bytes are available behind it, before it %d: %v", now.AvailableBytes, before.AvailableBytes, err)
	}
	// What there is, where that is less than might be wanted; nothing where that is of no use.
	all, err := p.NewScratch(1 << 40)
	if err != nil || all.Bytes() != before.AvailableBytes {
		t.Fatalf("%+v, %v", all, err)
	}
	if _, err := p.NewScratch(mib); !errors.Is(err, ErrFull) {
		t.Errorf("a second one beside it: %v", err)
	}
	all.Close()
}
