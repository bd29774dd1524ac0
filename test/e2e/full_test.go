package e2e

import (
	"testing"
	"time"

	"github.com/longshore-io/longshore/test/e2e/lab"
)

// The pool is full: the claim says so, with the figures, and is filled when another claim goes.
// Not parallel: it leaves no room for anybody.
func TestFullPool(t *testing.T) {
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{})
	img := lab.Serve(t, lab.Image{Bytes: 16 * mib})
	world.HTTPSource(t, ns, "image", img.URL("qcow2"))
	most := lab.PoolBytes * 3 / 4
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
// Not parallel: it leaves no room for anybody.
func TestSlowerThanTheScheduler(t *testing.T) {
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{Wait: true})
	img := lab.Serve(t, lab.Image{Bytes: 200 * mib, Slow: true})
	world.HTTPSource(t, ns, "image", img.URL("raw"))
	claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: lab.PoolBytes * 3 / 4, Block: true, ImportSource: "image"})
	began := time.Now()
	pod := world.Pod(t, claim, "consumer", read(img.Bytes, true))
	world.Bound(t, claim)
	if took := time.Since(began); took < lab.BindTimeout {
		t.Fatalf("the transfer took %s, less than the scheduler's patience of %s: slow the image down", took, lab.BindTimeout)
	}
	checkRead(t, world.Output(t, pod), img, true)
}
