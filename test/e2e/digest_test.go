package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/test/e2e/lab"
)

// A person reads on the claim what digest its disk has, has it compared with the volume,
// writes to the volume and has it compared again.
func TestContentDigest(t *testing.T) {
	t.Parallel()
	img := lab.Serve(t, lab.Image{Bytes: 24*mib + 512})
	for _, block := range []bool{true, false} {
		t.Run(map[bool]string{true: "Block", false: "Filesystem"}[block], func(t *testing.T) {
			t.Parallel()
			ns := world.NewNamespace(t)
			world.HTTPSource(t, ns, "image", img.URL("qcow2"))
			claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: world.StorageClass(t, lab.Class{}), Bytes: 64 * mib, Block: block, ImportSource: "image"})
			world.Bound(t, claim)
			sum := annotated(t, claim, "longshore.dev/content-digest", "blake3-64k:25166336:")
			if cli := sumOf(t, img.URL("raw.gz")); cli != sum {
				t.Errorf("the claim says %s, longshore inspect --digest %s", sum, cli)
			}
			annotate(t, claim, "longshore.dev/verify-content", "first")
			said := annotated(t, claim, "longshore.dev/content-verified", "first: ")
			if !strings.Contains(said, "is what it was filled with ("+sum+")") {
				t.Errorf("it says %s", said)
			}
			target := "/dev/disk"
			if !block {
				target = "/data/disk.img"
			}
			pod := world.Pod(t, claim, "writer", "printf changed | dd of="+target+" bs=1 seek=4096 conv=notrunc,fsync 2>&1")
			world.Output(t, pod)
			world.Must(t, world.Delete(t.Context(), pod))
			world.Eventually(t, "the pod is gone", func(ctx context.Context) error { return world.Gone(ctx, pod) })
			annotate(t, claim, "longshore.dev/verify-content", "second")
			said = annotated(t, claim, "longshore.dev/content-verified", "second: ")
			if !strings.Contains(said, "differs from what it was filled with ("+sum+"): its digest is blake3-64k:25166336:") {
				t.Errorf("it says %s", said)
			}
		})
	}
}

func annotate(t *testing.T, claim *corev1.PersistentVolumeClaim, key, value string) {
	t.Helper()
	old := claim.DeepCopy()
	claim.Annotations[key] = value
	world.Must(t, world.Patch(t.Context(), claim, client.MergeFrom(old)))
}

// annotated waits for a claim's annotation that begins so, and returns it.
func annotated(t *testing.T, claim *corev1.PersistentVolumeClaim, key, begins string) string {
	t.Helper()
	world.Eventually(t, "claim "+claim.Name+" has "+key+" "+begins, func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
			return err
		}
		if got := claim.Annotations[key]; !strings.HasPrefix(got, begins) {
			return fmt.Errorf("it says %q", got)
		}
		return nil
	})
	return claim.Annotations[key]
}

// sumOf is what the command line says of an image.
func sumOf(t *testing.T, url string) string {
	t.Helper()
	out, err := exec.Command(filepath.Join("..", "..", "bin", "longshore"), "inspect", "--digest", url).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, rest, _ := strings.Cut(string(out), "digest:")
	return strings.Fields(rest + " none")[0]
}
