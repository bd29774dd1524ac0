package nodeplugin

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/broker"
	"github.com/longshore-io/longshore/nodeplugin/pool"
	"github.com/longshore-io/longshore/nodeplugin/source/httpsrc"
)

// pluginArg makes the test binary a node plugin that fills one volume from a URL
// and says so when a part is done: args are pool folder, URL, filesystem.
const pluginArg = "node-plugin-with-a-pool"

func init() {
	if len(os.Args) < 5 || os.Args[1] != pluginArg {
		return
	}
	if err := plugin(os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func wholeSpec(fsType string) pool.Spec {
	spec := pool.Spec{ID: "v", Bytes: 128 * testMiB, Mode: pool.Block, AwaitsData: true}
	if fsType != "block" {
		spec.Mode, spec.FSType = pool.Filesystem, fsType
	}
	if fsType == "xfs" {
		spec.Bytes = 400 * testMiB
	}
	return spec
}

func wholeOrder(url, attempt string) (Order, error) {
	params, err := httpsrc.Params{URL: url}.Reveal()
	o := Order{Attempt: attempt, Owner: "ns", Recipe: Recipe{Digest: "content"}}
	o.Recipe.Source.Kind, o.Recipe.Source.Params = "http", params
	return o, err
}

func plugin(dir, url, fsType string) error {
	ctx := context.Background()
	log := slog.New(slog.DiscardHandler)
	s, _, err := New(ctx, Config{Pools: poolConfig(dir, 1600*testMiB), Fill: &Filler{Policy: broker.AllowAll(), Log: log}, Log: log})
	if err != nil {
		return err
	}
	w := s.changes.subscribe()
	if err := s.Create(ctx, "default", "", wholeSpec(fsType)); err != nil {
		return err
	}
	order, err := wholeOrder(url, "a1")
	if err != nil {
		return err
	}
	if err := s.Populate(ctx, "v", order); err != nil {
		return err
	}
	for {
		<-w.ready
		w.take()
		j := s.job("v")
		if j == nil {
			return fmt.Errorf("the transfer has ended: %v", s.Report())
		}
		if p, _ := j.seen(); p.BytesDone >= 8*testMiB {
			break
		}
	}
	fmt.Println("ready")
	select {}
}

// An image comes over HTTP by real movers into a real pool; the plugin is killed
// in the middle, and its successor goes on; so does its mover, and another goes on.
func TestTheWholeWay(t *testing.T) {
	const imageBytes = 96 * testMiB
	image := noise(t, 7, imageBytes)
	for _, fsType := range []string{"block", "ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			f := start(t, 1600*testMiB, nil)
			f.shut(t)
			w := serveFile(t, image)
			w.holdAt(40 * testMiB)
			cmd := exec.Command("/proc/self/exe", pluginArg, f.pool, w.url(), fsType)
			out, err := cmd.StdoutPipe()
			must(t, err)
			cmd.Stderr = t.Output()
			cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
			must(t, cmd.Start())
			line, err := bufio.NewReader(out).ReadString('\n')
			running := movers(t, cmd.Process.Pid)
			if len(running) != 1 {
				t.Errorf("got movers %v under the plugin, want 1", running)
			}
			var end []unix.PollFd
			for _, pid := range running {
				fd, err := unix.PidfdOpen(pid, 0)
				must(t, err)
				defer unix.Close(fd)
				end = append(end, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
			}
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if line != "ready\n" || err != nil {
				t.Fatalf("the plugin said %q, %v", line, err)
			}
			if n, err := unix.Poll(end, 10_000); n != len(end) || err != nil {
				t.Fatalf("the mover lives 10 s longer than its plugin (%v)", err)
			}

			real := Config{Pools: poolConfig(f.pool, 1600*testMiB), Fill: newFiller(t), Log: logTo(t), StageWait: 50 * time.Millisecond}
			s, report, err := New(t.Context(), real)
			must(t, err)
			f.Stager = s
			t.Logf("put in order: %q", report)
			if n := f.volumeLoops(t); n != 0 {
				t.Errorf("%d loop devices are left of the killed transfer", n)
			}
			w.holdAt(24 * testMiB)
			ctx := t.Context()
			order, err := wholeOrder(w.url(), "a2")
			must(t, err)
			must(t, f.Populate(ctx, "v", order))
			f.eventually(t, "more is done", func() bool {
				p, _ := f.job("v").seen()
				return copying(p) && p.BytesRead > 16*testMiB
			})
			must(t, unix.Kill(sole(t, os.Getpid()), unix.SIGKILL)) // the mover alone
			w.holdAt(-1)
			f.eventually(t, "it is populated", func() bool { return f.state("v") == pool.Populated && f.job("v") == nil })
			if sent := w.sent.Load(); sent > imageBytes+64*testMiB {
				t.Errorf("the server sent %d bytes of an image of %d: more than 64 MiB again", sent, int64(imageBytes))
			} else {
				t.Logf("sent %d bytes of an image of %d", sent, int64(imageBytes))
			}
			if n, left := f.volumeLoops(t), movers(t, os.Getpid()); n != 0 || len(left) != 0 {
				t.Errorf("left of the transfer: %d loop devices, movers %v", n, left)
			}
			p, _, err := f.pools.find("v")
			must(t, err)
			if _, err := os.Stat(p.JournalPath("v")); !os.IsNotExist(err) {
				t.Errorf("the journal is still there: %v", err)
			}

			spec := wholeSpec(fsType)
			use := csi.Use{Mode: csi.Mode(spec.Mode), FSType: spec.FSType}
			must(t, f.Stage(ctx, "v", f.path("s"), use))
			must(t, f.Publish(ctx, "v", f.path("s"), f.path("t"), use))
			name := f.path("t")
			if spec.Mode == pool.Filesystem {
				checkDiskImage(t, name, spec.Bytes)
				name = filepath.Join(name, "disk.img")
			} else if got := sizeOf(t, name); got != spec.Bytes {
				t.Errorf("the device has %d bytes, want %d", got, spec.Bytes)
			}
			disk, err := os.Open(name)
			must(t, err)
			equal(t, disk, image)
			must(t, disk.Close())
			must(t, f.Unpublish(ctx, "v", f.path("t")))
			must(t, f.Unstage(ctx, "v", f.path("s")))
			must(t, f.Delete(ctx, "v", "", ""))

			// A volume that is deleted in the middle.
			w.holdAt(16 * testMiB)
			f.create(t, spec)
			must(t, f.Populate(ctx, "v", order))
			f.eventually(t, "a part is done", func() bool {
				j := f.job("v")
				if j == nil {
					return false
				}
				p, _ := j.seen()
				return p.BytesDone > 0
			})
			must(t, f.Delete(ctx, "v", "", ""))
			if n, left := f.volumeLoops(t), movers(t, os.Getpid()); n != 0 || len(left) != 0 {
				t.Errorf("left of the deleted volume: %d loop devices, movers %v", n, left)
			}
		})
	}
}
