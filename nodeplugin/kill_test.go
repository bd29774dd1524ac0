package nodeplugin

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// victimDir names the folder of a process that TestKill starts to kill it.
const victimDir = "LONGSHORE_TEST_VICTIM"

// victim brings volumes into every state of their life, freezes a filesystem as
// a snapshot does, says so, and waits to be killed.
func victim(dir string) error {
	ctx := context.Background()
	fill := &fakeFill{do: func(ctx context.Context, job Job, report func(Progress)) (Result, error) {
		if strings.HasPrefix(job.Volume, "half-") {
			return halfway(ctx, job, report)
		}
		return complete(ctx, job, report)
	}}
	s, _, err := New(ctx, Config{Pools: poolConfig(filepath.Join(dir, "pool"), 600*testMiB), Fill: fill, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	w := s.changes.subscribe()
	for _, id := range []string{"half-block", "half-ext4", "block", "ext4"} {
		spec := pool.Spec{ID: id, Bytes: 32 * testMiB, Mode: pool.Block, AwaitsData: true}
		if strings.HasSuffix(id, "ext4") {
			spec.Mode, spec.FSType = pool.Filesystem, "ext4"
		}
		if err := s.Create(ctx, "default", "", spec); err != nil {
			return err
		}
		if err := s.Populate(ctx, id, recipe("r")); err != nil {
			return err
		}
		done := func() bool {
			_, v, err := s.pools.find(id)
			j := s.job(id)
			if j == nil {
				return err == nil && v.State == pool.Populated
			}
			p, _ := j.seen()
			return strings.HasPrefix(id, "half-") && p.BytesDone > 0
		}
		for !done() {
			<-w.ready
			w.take()
		}
		if strings.HasPrefix(id, "half-") {
			continue
		}
		use := csi.Use{Mode: csi.Mode(spec.Mode), FSType: spec.FSType}
		staging := filepath.Join(dir, "kubelet", id)
		if err := s.Stage(ctx, id, staging, use); err != nil {
			return err
		}
		if err := s.Publish(ctx, id, staging, filepath.Join(dir, "kubelet/target-"+id), use); err != nil {
			return err
		}
	}
	if err := device.Freeze(filepath.Join(dir, "kubelet/ext4")); err != nil {
		return err
	}
	// A device that was attached, and the process killed before it was used.
	_, v, err := s.find("half-block")
	if err != nil {
		return err
	}
	file, err := os.OpenFile(v.Path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if _, err := device.AttachLoop(file, device.LoopOptions{}); err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(victimDir); dir != "" {
		if err := victim(dir); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

func TestKill(t *testing.T) {
	f := start(t, 600*testMiB, complete)
	f.shut(t)
	dir := filepath.Dir(f.pool)
	must(t, os.MkdirAll(f.dir, 0o750))
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), victimDir+"="+dir)
	out, err := cmd.StdoutPipe()
	must(t, err)
	cmd.Stderr = t.Output()
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	must(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if line != "ready\n" || err != nil {
		t.Fatalf("the victim said %q, %v", line, err)
	}
	if n := f.volumeLoops(t); n < 3 {
		t.Fatalf("the victim left %d loop devices on volumes, want at least 3 to put in order", n)
	}

	report := f.open(t, 600*testMiB)
	t.Logf("put in order: %q", report)
	if n := f.volumeLoops(t); n != 2 {
		t.Errorf("got %d loop devices on volumes, want those of the 2 that are staged", n)
	}
	if len(report) < 2 {
		t.Errorf("the report does not tell of the leftovers: %q", report)
	}
	ctx := t.Context()
	for _, id := range []string{"block", "ext4"} {
		use := csi.Use{Mode: csi.Block}
		if id == "ext4" {
			use = csi.Use{Mode: csi.Filesystem, FSType: "ext4"}
		}
		staging, target := f.path(id), f.path("target-"+id)
		must(t, f.Stage(ctx, id, staging, use))
		must(t, f.Publish(ctx, id, staging, target, use))
		must(t, f.Publish(ctx, id, staging, f.path("second-"+id), use))
		if id == "ext4" {
			// Not frozen any more: a write ends.
			written := make(chan error, 1)
			go func() { written <- os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o600) }()
			select {
			case err := <-written:
				must(t, err)
			case <-time.After(10 * time.Second):
				must(t, device.Thaw(staging))
				t.Error("the filesystem is still frozen")
			}
		}
		must(t, f.Unpublish(ctx, id, target))
		must(t, f.Unpublish(ctx, id, f.path("second-"+id)))
		must(t, f.Unstage(ctx, id, staging))
	}
	for _, v := range f.Report().Volumes {
		if strings.HasPrefix(v.Id, "half-") && v.State.String() != "STATE_EMPTY" {
			t.Errorf("half-filled volume after the kill: %v", v)
		}
	}
	for _, id := range []string{"half-block", "half-ext4"} {
		p, _, err := f.pools.find(id)
		must(t, err)
		if _, err := os.Stat(p.JournalPath(id)); err != nil {
			t.Errorf("the journal is gone: %v", err)
		}
		must(t, f.Populate(ctx, id, recipe("r")))
		f.eventually(t, "it is populated", func() bool { return f.state(id) == pool.Populated && f.job(id) == nil })
	}
	if n := f.volumeLoops(t); n != 0 {
		t.Errorf("%d loop devices are left", n)
	}
}
