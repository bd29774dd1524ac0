package e2e

import (
	"testing"

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
