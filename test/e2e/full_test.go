package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/test/e2e/lab"
)

// most of a pool of lab.SmallBytes: two such volumes have no room in it.
const most = lab.SmallBytes * 3 / 4

// The pool is full: the claim says so, with the figures, and is filled when another claim goes.
func TestFullPool(t *testing.T) {
	t.Parallel()
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{Pool: "full"})
	img := lab.Serve(t, lab.Image{Bytes: 16 * mib})
	world.HTTPSource(t, ns, "image", img.URL("qcow2"))
	first := world.Claim(t, lab.Claim{Namespace: ns, Name: "first", Class: class, Bytes: most, Block: true, ImportSource: "image"})
	world.Bound(t, first)
	second := world.Claim(t, lab.Claim{Namespace: ns, Name: "second", Class: class, Bytes: most, Block: true, ImportSource: "image"})
	saysOnClaim(t, second, "PoolFull")
	world.Must(t, world.Delete(t.Context(), first))
	world.Bound(t, second)
	checkRead(t, world.Output(t, world.Pod(t, second, "consumer", read(img.Bytes, true))), img, true)
}

// A transfer takes longer than the scheduler waits for a volume, and the pool has room for that one
// volume only: when the scheduler looks again, the room must not seem taken by the very claim that it is for.
func TestSlowerThanTheScheduler(t *testing.T) {
	t.Parallel()
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{Wait: true, Pool: "slow"})
	img := lab.Serve(t, lab.Image{Bytes: 256 * mib, Slow: true})
	world.HTTPSource(t, ns, "image", img.URL("raw"))
	claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: most, Block: true, ImportSource: "image"})
	pod := world.Pod(t, claim, "consumer", read(img.Bytes, true))
	world.Eventually(t, "the scheduler gives the claim up", func(ctx context.Context) error {
		events, err := world.Events(ctx, pod)
		if err != nil {
			return err
		}
		if all := strings.Join(events, "\n"); !strings.Contains(all, "FailedScheduling") || !strings.Contains(all, "binding volumes") {
			return fmt.Errorf("events on the pod: %q", events)
		}
		return nil
	})
	filling(t, claim, 1) // else the scheduler was not the faster one
	img.Hurry(t)
	checkRead(t, world.Output(t, pod), img, true)
}
