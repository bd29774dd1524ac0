package pool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/device"
)

// change is one change of a pool, as the pool makes it and as the model sees it.
type change struct {
	name string
	do   func(*Pool) error
	then func(map[string]Volume)
}

func (c change) String() string { return c.name }

func makes(s Spec) change {
	s.Mode = Block
	return change{"create " + s.ID,
		func(p *Pool) error { _, err := p.Create(context.Background(), s); return err },
		func(m map[string]Volume) {
			v := Volume{Spec: s, State: Populated, SourceID: s.From}
			if s.AwaitsData {
				v.State = Empty
			}
			m[s.ID] = v
		}}
}

func snaps(id, of string) change {
	return change{"snapshot " + id,
		func(p *Pool) error { _, err := p.Snapshot(context.Background(), id, of); return err },
		func(m map[string]Volume) {
			m[id] = Volume{Spec: Spec{ID: id, Bytes: m[of].Bytes, Mode: Block, From: of}, State: Populated, Snapshot: true, SourceID: of}
		}}
}

func grows(id string, bytes int64) change {
	return change{"expand " + id,
		func(p *Pool) error { _, err := p.Expand(context.Background(), id, bytes); return err },
		func(m map[string]Volume) {
			v := m[id]
			v.Bytes = bytes
			m[id] = v
		}}
}

func fills(id string) change {
	return change{"update " + id,
		func(p *Pool) error {
			_, err := p.Update(id, func(v *Volume) { v.State, v.Recipe = Populated, "r" })
			return err
		},
		func(m map[string]Volume) {
			v := m[id]
			v.State, v.Recipe = Populated, "r"
			m[id] = v
		}}
}

func deletes(id string) change {
	return change{"delete " + id,
		func(p *Pool) error { return p.Delete(context.Background(), id) },
		func(m map[string]Volume) { delete(m, id) }}
}

// keeps keeps the first 2 MiB of a volume as an image, the second of them first.
func keeps(of string) change {
	return change{"keep an image of " + of,
		func(p *Pool) error {
			v, err := p.Get(of)
			if err != nil {
				return err
			}
			return keep(p, v, "1")
		},
		func(map[string]Volume) {}}
}

func evicts() change {
	return change{"evict", func(p *Pool) error { return p.DropImage(testKey("1")) }, func(map[string]Volume) {}}
}

// script is what the child does. The volume "base" is there before and has data.
var script = []change{
	makes(Spec{ID: "a", Bytes: 3 * mib, AwaitsData: true}),
	fills("a"),
	snaps("s", "base"),
	makes(Spec{ID: "b", Bytes: 12 * mib, From: "s"}),
	grows("b", 16*mib),
	makes(Spec{ID: "p", Bytes: 4 * mib, Preallocate: true}),
	grows("p", 6*mib),
	deletes("a"),
	keeps("base"),
	deletes("s"),
	makes(Spec{ID: "a", Bytes: 5 * mib, From: "base2"}),
	deletes("b"),
	evicts(),
	keeps("base"),
}

const (
	killDirEnv  = "LONGSHORE_TEST_POOL"
	killStepEnv = "LONGSHORE_TEST_KILL_AT"
	makeEnv     = "LONGSHORE_TEST_MAKE"
)

// TestMain is also the child: it carries out the script and is killed at a step.
func TestMain(m *testing.M) {
	dir := os.Getenv(killDirEnv)
	if dir == "" {
		os.Exit(m.Run())
	}
	if err := child(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func child(dir string) error {
	at, err := strconv.Atoi(os.Getenv(killStepEnv))
	if err != nil {
		return err
	}
	p, err := Open(context.Background(), Config{Name: "test", Dir: dir, Bytes: MinBytes, CachePercent: 50})
	if err != nil {
		return err
	}
	p.step = func(string) {
		at--
		if at == 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	if os.Getenv(makeEnv) != "" {
		return p.Make(context.Background())
	}
	for i, c := range script {
		// The parent reads how far we came: what is told as done stays done.
		fmt.Println(i)
		if err := c.do(p); err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
	}
	return nil
}

// runChild returns how many changes the child began, and whether it was killed.
func runChild(t *testing.T, dir string, step int, env ...string) (begun int, killed bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, killDirEnv+"="+dir, fmt.Sprintf("%s=%d", killStepEnv, step))...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
		killed = true
	} else if err != nil {
		t.Fatalf("step %d: %v: %s", step, err, stderr.String())
	}
	return strings.Count(string(out), "\n"), killed
}

// Killed between any two steps, a pool has each volume as before the change or
// as after it, and nothing else.
func TestKilledAtEveryStep(t *testing.T) {
	p := newPool(t, MinBytes)
	dir := p.cfg.Dir
	repairs, kept := "", 0
	for step := 1; ; step++ {
		base := create(t, p, Spec{ID: "base", Bytes: 10 * mib})
		data := writeRandom(t, base.Path, 0, 2*mib)
		create(t, p, Spec{ID: "base2", Bytes: 5 * mib})
		p.forget()

		begun, killed := runChild(t, dir, step)
		p = open(t, Config{Name: "test", Dir: dir, Bytes: MinBytes, CachePercent: 50})
		if p.Problem() != "" {
			t.Fatalf("step %d: %s", step, p.Problem())
		}
		repairs += strings.Join(p.Repairs(), "\n") + "\n"
		before := map[string]Volume{"base": {Spec: base.Spec, State: Populated}, "base2": {Spec: Spec{ID: "base2", Bytes: 5 * mib, Mode: Block}, State: Populated}}
		for _, c := range script[:begun-1] {
			c.then(before)
		}
		after := map[string]Volume{}
		for id, v := range before {
			after[id] = v
		}
		last := script[begun-1]
		last.then(after)
		got := compare(p, after)
		if got != "" && killed {
			got = compare(p, before)
		}
		if got != "" {
			t.Errorf("step %d, killed in %s: neither as before nor as after: %s", step, last, got)
		}
		for _, id := range []string{"base", "b", "s"} {
			if v, err := p.Get(id); err == nil && !bytes.Equal(read(t, v.Path, 0, 2*mib), data) {
				t.Errorf("step %d, killed in %s: %s lost its data", step, last, id)
			}
		}
		checkFiles(t, p, fmt.Sprintf("step %d, killed in %s", step, last))
		if c := p.FindImage(testKey("1")); c != nil {
			if got := read(t, c.File.Name(), 0, 2*mib); !bytes.Equal(got, slices.Concat(data[mib:], data[:mib])) {
				t.Errorf("step %d, killed in %s: the image is another", step, last)
			}
			kept++
			must(t, c.Close())
			must(t, p.DropImage(testKey("1")))
		} else if !killed {
			t.Error("the script's image is not kept")
		}
		for _, v := range p.List() {
			if err := p.Delete(t.Context(), v.ID); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
		}
		if !killed {
			if step < 70 {
				t.Errorf("the script has %d steps only", step-1)
			}
			t.Logf("killed at each of %d steps, %d of them with an image", step-1, kept)
			for _, kind := range []string{"from tmp", "from trash", "meta.json.new", "finished the expansion"} {
				if !strings.Contains(repairs, kind) {
					t.Errorf("no repair tells of %q:\n%s", kind, repairs)
				}
			}
			return
		}
		if t.Failed() {
			return
		}
	}
}

// compare tells how the pool differs from what it should hold; "" when it does not.
func compare(p *Pool, want map[string]Volume) string {
	provisioned := int64(0)
	for id, w := range want {
		v, err := p.Get(id)
		if err != nil {
			return err.Error()
		}
		if v.Spec != w.Spec || v.State != w.State || v.Recipe != w.Recipe || v.Snapshot != w.Snapshot || v.SourceID != w.SourceID {
			return fmt.Sprintf("got %+v, want %+v", v, w)
		}
		st, err := os.Stat(v.Path)
		if err != nil {
			return err.Error()
		}
		if st.Size() != v.Bytes {
			return fmt.Sprintf("%s of %d bytes has a file of %d", id, v.Bytes, st.Size())
		}
		if v.Preallocate && allocated(v.Path) < v.Bytes {
			return fmt.Sprintf("%s of %d bytes has %d allocated", id, v.Bytes, allocated(v.Path))
		}
		if v.Snapshot {
			provisioned += min(allocated(v.Path), v.Bytes)
		} else {
			provisioned += v.Bytes
		}
	}
	if n := len(p.List()); n != len(want) {
		return fmt.Sprintf("%d volumes, want %d", n, len(want))
	}
	if s, err := p.Stats(); err != nil || s.ProvisionedBytes != provisioned {
		return fmt.Sprintf("provisioned %d bytes, want %d (%v)", s.ProvisionedBytes, provisioned, err)
	}
	return ""
}

// checkFiles sees to it that the pool holds what volumes consist of and no more.
func checkFiles(t *testing.T, p *Pool, when string) {
	t.Helper()
	expected := map[string]bool{recordName: true}
	for _, v := range p.List() {
		folder, _ := filepath.Rel(p.root, v.folder(p.root))
		expected[filepath.Join(folder, dataName)] = true
		expected[filepath.Join(folder, metaName)] = true
	}
	for _, i := range p.Images() {
		expected[filepath.Join(imagesName, i.id(), dataName)] = true
		expected[filepath.Join(imagesName, i.id(), metaName)] = true
	}
	err := filepath.WalkDir(p.root, func(path string, e os.DirEntry, err error) error {
		name, _ := filepath.Rel(p.root, path)
		if err == nil && !e.IsDir() && !expected[name] {
			t.Errorf("%s: %s is left", when, name)
		}
		if err == nil && e.IsDir() && (filepath.Dir(name) == tmpName || filepath.Dir(name) == trashName) {
			t.Errorf("%s: %s is left", when, name)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// Killed while it makes a pool, the plugin finds either none or a whole one, and
// no loop device, mount or file is left of the first.
func TestKilledWhileMaking(t *testing.T) {
	for step := 1; ; step++ {
		dir := filepath.Join(t.TempDir(), "pool")
		_, killed := runChild(t, dir, step, makeEnv+"=1")
		p := open(t, Config{Name: "test", Dir: dir, Bytes: MinBytes})
		if p.Problem() != "" {
			t.Fatalf("step %d: %s", step, p.Problem())
		}
		if p.UUID() == "" {
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				if e.Name() != mountName {
					t.Errorf("step %d: %s is left", step, e.Name())
				}
			}
			if mounted, err := device.IsMounted(filepath.Join(dir, mountName)); err != nil || mounted {
				t.Errorf("step %d: a mount is left (%v)", step, err)
			}
			if err := p.Make(t.Context()); err != nil {
				t.Fatalf("step %d: make again: %v", step, err)
			}
		}
		create(t, p, Spec{ID: "a", Bytes: mib})
		if n := loopsOf(t, p.image); n != 1 {
			t.Errorf("step %d: %d loop devices", step, n)
		}
		if err := p.Close(t.Context()); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		if !killed {
			if step < 10 {
				t.Errorf("making has %d steps only", step-1)
			}
			return
		}
	}
}
