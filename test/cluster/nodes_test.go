package cluster

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestNodesFailAndComeBack(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	c, err := Up(ctx, Options{Dir: filepath.Join(t.TempDir(), "cluster"), Nodes: 2, BindTimeout: 5 * time.Second, Log: logTo{t}, Wait: true, DieWithParent: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Down(true); err != nil {
			t.Error(err)
		}
	}()
	a, err := c.newAPI()
	if err != nil {
		t.Fatal(err)
	}
	loses := func(node string) {
		t.Helper()
		err := poll(ctx, 2*time.Minute, func() error {
			if err := nodeReady(ctx, a, node); err != nil {
				return nil
			}
			return errors.New(node + " still counts as ready")
		})
		if err != nil {
			t.Fatal(err)
		}
	}

	if err := c.CutNode(ctx, "node2"); err != nil {
		t.Fatal(err)
	}
	loses("node2")
	if err := c.HealNode(ctx, "node2"); err != nil {
		t.Fatal(err)
	}
	if err := c.waitNode(ctx, a, 2); err != nil {
		t.Fatal(err)
	}

	const disk = "/var/lib/longshore/disk"
	if out, err := c.Command(ctx, "node2", "truncate", "--size=1M", disk).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	if out, err := c.Command(ctx, "node2", "losetup", "--find", disk).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	if err := c.KillNode(ctx, "node2"); err != nil {
		t.Fatal(err)
	}
	if !c.state.loops(2).unused() {
		t.Error("loop devices of node2 live on after its death")
	}
	loses("node2")
	if err := c.StartNode(ctx, "node2"); err != nil {
		t.Fatal(err)
	}
	if err := c.Command(ctx, "node2", "test", "-e", disk).Run(); err != nil {
		t.Errorf("the disk of node2 is gone after its death: %v", err)
	}
	if err := c.Command(ctx, "node1", "test", "-e", disk).Run(); err == nil {
		t.Error("the disk of node2 shows on node1")
	}
}

// cutAt ends a context once Up has said something.
type cutAt struct {
	words string
	cut   context.CancelFunc
}

func (c cutAt) Write(p []byte) (int, error) {
	if strings.Contains(string(p), c.words) {
		c.cut()
	}
	return len(p), nil
}

func TestUpThatIsCutShortLeavesNothing(t *testing.T) {
	for _, words := range []string{"the hub runs", "node1 has containerd", "node1 is ready"} {
		t.Run(words, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			dir := filepath.Join(t.TempDir(), "cluster")
			c, err := Up(ctx, Options{Dir: dir, Log: cutAt{words, cancel}, Wait: true})
			if err == nil {
				c.Down(true)
				t.Fatal("it came up all the same")
			}
			// Of a tool that it runs, the context tells only that it was killed.
			if !errors.Is(err, context.Canceled) && !strings.Contains(err.Error(), "signal: killed") {
				t.Errorf("got %v, want %v", err, context.Canceled)
			}
			base, err := freeLoopBase(1)
			if err != nil {
				t.Fatal(err)
			}
			if err := Down(dir, true); err != nil {
				t.Fatal(err)
			}
			if got := traces(t, dir, state{LoopBase: base, Nodes: 1, MadeDirs: []string{"/var/lib/longshore"}}, nil); got != "" {
				t.Errorf("left:\n%s", got)
			}
		})
	}
}
