package e2e

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/test/e2e/lab"
)

func keyOf(o client.Object) client.ObjectKey { return client.ObjectKeyFromObject(o) }

// An ordinary claim: written, snapshotted, cloned, restored, expanded.
func TestOrdinaryVolume(t *testing.T) {
	t.Parallel()
	for _, block := range []bool{true, false} {
		t.Run(fmt.Sprintf("block %v", block), func(t *testing.T) {
			t.Parallel()
			ns := world.NewNamespace(t)
			// xfs: ext4 grows online only with CAP_SYS_RESOURCE, which not every test machine gives.
			class, size := world.StorageClass(t, lab.Class{Wait: true, FSType: "xfs"}), int64(320*mib)
			file := "/data/file"
			if block {
				class, size = world.StorageClass(t, lab.Class{Wait: true}), 64*mib
				file = "/dev/disk"
			}
			write := func(s string) string {
				return fmt.Sprintf("echo %s | dd of=%s conv=notrunc 2>/dev/null; sync", s, file)
			}
			show := fmt.Sprintf("head -n1 %s", file)
			claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: size, Block: block})
			world.Output(t, world.Pod(t, claim, "writes", write("first")))

			snapClass := &snapshotv1.VolumeSnapshotClass{ObjectMeta: metav1.ObjectMeta{GenerateName: "story-"}, Driver: csi.DriverName, DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete}
			world.Must(t, world.Create(t.Context(), snapClass))
			t.Cleanup(func() { _ = world.Delete(context.Background(), snapClass) })
			snap := &snapshotv1.VolumeSnapshot{
				ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "snap"},
				Spec: snapshotv1.VolumeSnapshotSpec{VolumeSnapshotClassName: &snapClass.Name,
					Source: snapshotv1.VolumeSnapshotSource{PersistentVolumeClaimName: &claim.Name}},
			}
			world.Must(t, world.Create(t.Context(), snap))
			world.Eventually(t, "the snapshot is ready", func(ctx context.Context) error {
				if err := world.Get(ctx, keyOf(snap), snap); err != nil {
					return err
				}
				if snap.Status == nil || snap.Status.ReadyToUse == nil || !*snap.Status.ReadyToUse {
					return fmt.Errorf("snapshot status is %+v", snap.Status)
				}
				return nil
			})
			world.Output(t, world.Pod(t, claim, "writes-again", write("second")))
			group := "snapshot.storage.k8s.io"
			restored := world.Claim(t, lab.Claim{Namespace: ns, Name: "restored", Class: class, Bytes: size, Block: block,
				DataSource: &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "snap"}})
			clone := world.Claim(t, lab.Claim{Namespace: ns, Name: "clone", Class: class, Bytes: size, Block: block,
				DataSource: &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "disk"}})
			if got := world.Output(t, world.Pod(t, restored, "reads-restored", show)); got != "first" {
				t.Errorf("the restored snapshot reads %q, want first", got)
			}
			if got := world.Output(t, world.Pod(t, clone, "reads-clone", show)); got != "second" {
				t.Errorf("the clone reads %q, want second", got)
			}
			expand(t, claim, block, 2*size)
		})
	}
}

// expand grows a claim while a pod uses it; the pod sees the new size without a restart.
func expand(t *testing.T, claim *corev1.PersistentVolumeClaim, block bool, size int64) {
	t.Helper()
	script := "df -Pk /data | tail -n1 | tr -s ' ' | cut -d' ' -f2"
	if block {
		script = "echo $(( $(blockdev --getsize64 /dev/disk) / 1024 ))"
	}
	pod := world.Pod(t, claim, "grows", "while :; do "+script+"; sleep 1; done")
	world.Eventually(t, "the pod runs", func(ctx context.Context) error {
		if err := world.Get(ctx, keyOf(pod), pod); err != nil {
			return err
		}
		if pod.Status.Phase != corev1.PodRunning {
			return fmt.Errorf("pod is %s", pod.Status.Phase)
		}
		return nil
	})
	world.Must(t, world.Get(t.Context(), keyOf(claim), claim))
	claim.Spec.Resources.Requests[corev1.ResourceStorage] = lab.Size(size)
	world.Must(t, world.Update(t.Context(), claim))
	world.Eventually(t, "the pod sees the new size", func(ctx context.Context) error {
		out, err := world.Logs(ctx, pod)
		if err != nil {
			return err
		}
		lines := strings.Fields(out)
		if len(lines) == 0 {
			return fmt.Errorf("it has said nothing yet")
		}
		kib, err := strconv.ParseInt(lines[len(lines)-1], 10, 64)
		if err != nil {
			return err
		}
		if kib < size/1024*8/10 {
			return fmt.Errorf("it sees %d KiB", kib)
		}
		return nil
	})
	world.Must(t, world.Delete(t.Context(), pod))
}
