package populator

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/longshore-io/longshore/api/v1alpha1"
)

// The PV is what external-provisioner would have written (R5).
func TestPersistentVolume(t *testing.T) {
	vac := "gold"
	s := seen(func(s *Seen) {
		s.Class.MountOptions = []string{"noatime"}
		s.Claim.Spec.VolumeAttributesClassName = &vac
		s.Claim.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
	}, record("b"))
	d := Driver{Name: "csi.longshore.dev", TopologyKey: "topology.longshore.dev/node"}
	got, err := yaml.Marshal(PersistentVolume(d, s.Claim, s.Class, s.Record))
	if err != nil {
		t.Fatal(err)
	}
	want := `metadata:
  annotations:
    pv.kubernetes.io/provisioned-by: csi.longshore.dev
    volume.kubernetes.io/provisioner-deletion-secret-name: ""
    volume.kubernetes.io/provisioner-deletion-secret-namespace: ""
  finalizers:
  - external-provisioner.volume.kubernetes.io/finalizer
  name: pvc-7
spec:
  accessModes:
  - ReadWriteOncePod
  capacity:
    storage: 64Mi
  claimRef:
    apiVersion: v1
    kind: PersistentVolumeClaim
    name: disk
    namespace: tenant
    uid: "7"
  csi:
    driver: csi.longshore.dev
    fsType: ext4
    volumeAttributes:
      longshore.dev/populate: bind
    volumeHandle: pvc-7
  mountOptions:
  - noatime
  nodeAffinity:
    required:
      nodeSelectorTerms:
      - matchExpressions:
        - key: topology.longshore.dev/node
          operator: In
          values:
          - b
  persistentVolumeReclaimPolicy: Delete
  storageClassName: fast
  volumeAttributesClassName: gold
  volumeMode: Filesystem
status: {}
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Error(diff)
	}
	s.Class.ReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	if pv := PersistentVolume(d, s.Claim, s.Class, s.Record); len(pv.Finalizers) > 0 {
		t.Errorf("a PV that is retained has the finalizers %v", pv.Finalizers)
	}
}

func TestRecord(t *testing.T) {
	yes := true
	s := seen(func(s *Seen) {
		mode := corev1.PersistentVolumeBlock
		s.Claim.Spec.VolumeMode = &mode
		s.Claim.Spec.Resources.Requests[corev1.ResourceStorage] = *s.Claim.Spec.Resources.Requests.Storage()
		s.Source.Spec.Preallocation = &yes
		s.Class.FSType = "xfs"
	})
	nv := Record(s.Claim, s.Class, s.Source, "b")
	if nv.Name != "pvc-7" || nv.Finalizers[0] != v1alpha1.Finalizer || nv.Spec.Node != "b" || nv.Spec.FSType != "" || nv.Spec.CapacityBytes != size ||
		nv.Spec.Claim.UID != "7" || !nv.Spec.Import.Preallocation || nv.Spec.Import.SourceUID != "8" {
		t.Errorf("record is %+v", nv)
	}
	s.Source.Spec.Source.HTTP.URL = "changed"
	if nv.Spec.Import.Source.HTTP.URL == "changed" {
		t.Error("the record shares memory with the source")
	}
}
