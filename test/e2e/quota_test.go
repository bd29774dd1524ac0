package e2e

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/test/e2e/lab"
)

// A tenant whose quota is exactly one claim of the requested size and one pod, its consumer, imports an image.
func TestQuotaOfOneClaim(t *testing.T) {
	t.Parallel()
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{Wait: true})
	img := lab.Serve(t, lab.Image{Bytes: 32 * mib})
	quota := &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "one"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			corev1.ResourcePersistentVolumeClaims: resource.MustParse("1"),
			corev1.ResourceRequestsStorage:        lab.Size(64 * mib),
			corev1.ResourcePods:                   resource.MustParse("1"),
		}},
	}
	world.Must(t, world.Create(t.Context(), quota))
	world.Eventually(t, "the quota is in force", func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(quota), quota); err != nil {
			return err
		}
		if _, ok := quota.Status.Used[corev1.ResourcePods]; !ok {
			return fmt.Errorf("status has no figures")
		}
		return nil
	})
	world.HTTPSource(t, ns, "image", img.URL("qcow2"))
	claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: 64 * mib, ImportSource: "image"})
	checkRead(t, world.Output(t, world.Pod(t, claim, "consumer", read(img.Bytes, false))), img, false)
}
