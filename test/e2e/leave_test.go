package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/test/e2e/lab"
)

// filling waits until so many bytes of the claim's data have come, and returns its NodeVolume.
func filling(t *testing.T, claim *corev1.PersistentVolumeClaim, atLeast int64) *v1alpha1.NodeVolume {
	t.Helper()
	nv := &v1alpha1.NodeVolume{}
	nv.Name = "pvc-" + string(claim.UID)
	world.Eventually(t, "data comes for claim "+claim.Name, func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(nv), nv); err != nil {
			return err
		}
		p := nv.Status.Progress
		if p == nil || p.BytesDone < atLeast {
			return fmt.Errorf("phase %q, progress %+v", nv.Status.Phase, p)
		}
		if nv.Status.Populated {
			t.Fatal("the transfer ended before the test could interfere: slow the image down")
		}
		return nil
	})
	return nv
}

// holdsNothing waits until the node has nothing of the volume.
func holdsNothing(t *testing.T, nv *v1alpha1.NodeVolume) {
	t.Helper()
	world.Eventually(t, "the node holds nothing of "+nv.Name, func(ctx context.Context) error {
		if err := world.Gone(ctx, &v1alpha1.NodeVolume{ObjectMeta: nv.ObjectMeta}); err != nil {
			return err
		}
		for _, h := range world.Held(ctx) {
			if h.Volume == nv.Name {
				return fmt.Errorf("it holds %s", h.What)
			}
		}
		return nil
	})
}

// The claim is deleted in mid-transfer: the transfer ends and nothing stays.
func TestDeleteClaimInMidTransfer(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"bind", "stage"} {
		for _, block := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, block %v", mode, block), func(t *testing.T) {
				t.Parallel()
				ns := world.NewNamespace(t)
				class := world.StorageClass(t, lab.Class{Wait: true, Populate: mode})
				img := lab.Serve(t, lab.Image{Bytes: 96 * mib, Slow: true})
				world.HTTPSource(t, ns, "image", img.URL("raw"))
				claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: 128 * mib, Block: block, ImportSource: "image"})
				pod := world.Pod(t, claim, "consumer", "sleep 1000")
				nv := filling(t, claim, 1)
				world.Must(t, world.Delete(t.Context(), claim))
				world.Must(t, world.Delete(t.Context(), pod))
				holdsNothing(t, nv)
			})
		}
	}
}

// The consumer is deleted in mid-transfer: the transfer goes on, and the next consumer finds the data.
func TestDeleteConsumerInMidTransfer(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"bind", "stage"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			ns := world.NewNamespace(t)
			class := world.StorageClass(t, lab.Class{Wait: true, Populate: mode})
			img := lab.Serve(t, lab.Image{Bytes: 96 * mib, Slow: true})
			world.HTTPSource(t, ns, "image", img.URL("raw"))
			claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: 128 * mib, Block: true, ImportSource: "image"})
			pod := world.Pod(t, claim, "consumer", "sleep 1000")
			filling(t, claim, 1)
			world.Must(t, world.Delete(t.Context(), pod))
			img.Hurry(t)
			checkRead(t, world.Output(t, world.Pod(t, claim, "next", read(img.Bytes, true))), img, true)
		})
	}
}

// The VolumeImportSource is deleted in mid-transfer of a claim that is not bound yet: the transfer
// ends, nothing stays on the node, the claim says what to do, and is filled once the source is back.
func TestDeleteSourceInMidTransfer(t *testing.T) {
	t.Parallel()
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{})
	img := lab.Serve(t, lab.Image{Bytes: 96 * mib, Slow: true})
	source := world.HTTPSource(t, ns, "image", img.URL("raw"))
	claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: 96 * mib, Block: true, ImportSource: "image"})
	nv := filling(t, claim, 1)
	world.Must(t, world.Delete(t.Context(), source))
	holdsNothing(t, nv)
	saysOnClaim(t, claim, "SourceNotFound", "image")
	img.Hurry(t)
	world.HTTPSource(t, ns, "image", img.URL("raw"))
	checkRead(t, world.Output(t, world.Pod(t, claim, "consumer", read(img.Bytes, true))), img, true)
}

// saysOnClaim waits for the claim's Populated condition to have the reason, and words in its message.
func saysOnClaim(t *testing.T, claim *corev1.PersistentVolumeClaim, reason string, words ...string) {
	t.Helper()
	world.Eventually(t, "claim "+claim.Name+" says "+reason, func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
			return err
		}
		c := lab.Condition(claim, v1alpha1.ConditionPopulated)
		if c == nil {
			return fmt.Errorf("no condition Populated")
		}
		if c.Reason != reason || c.Status != corev1.ConditionFalse {
			return fmt.Errorf("condition is %s %s: %s", c.Status, c.Reason, c.Message)
		}
		for _, w := range words {
			if !strings.Contains(c.Message, w) {
				return fmt.Errorf("message %q does not name %q", c.Message, w)
			}
		}
		return nil
	})
}
