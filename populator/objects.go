package populator

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/longshore-io/longshore/api/v1alpha1"
)

// What external-provisioner writes on PersistentVolumes, so that it deletes ours too (R5).
const (
	annotationProvisionedBy           = "pv.kubernetes.io/provisioned-by"
	annotationDeletionSecretName      = "volume.kubernetes.io/provisioner-deletion-secret-name"
	annotationDeletionSecretNamespace = "volume.kubernetes.io/provisioner-deletion-secret-namespace"
	finalizerProvisioner              = "external-provisioner.volume.kubernetes.io/finalizer"
)

// VolumeName is the name of a claim's NodeVolume and PersistentVolume, and the CSI volume id.
func VolumeName(claim *corev1.PersistentVolumeClaim) string { return "pvc-" + string(claim.UID) }

// ModeOf is the claim's volume mode; Filesystem where it says none.
func ModeOf(claim *corev1.PersistentVolumeClaim) corev1.PersistentVolumeMode {
	if claim.Spec.VolumeMode == nil {
		return corev1.PersistentVolumeFilesystem
	}
	return *claim.Spec.VolumeMode
}

// FSTypeOf is the filesystem of the claim's volume; "" for Block.
func FSTypeOf(claim *corev1.PersistentVolumeClaim, class *Class) string {
	switch {
	case ModeOf(claim) == corev1.PersistentVolumeBlock:
		return ""
	case class.FSType == "":
		return "ext4"
	}
	return class.FSType
}

// NeedOf is the capacity in bytes of the claim's volume.
func NeedOf(claim *corev1.PersistentVolumeClaim, class *Class) int64 {
	request := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	return VolumeBytes(request.Value(), FSTypeOf(claim, class))
}

// ImportOf is what a record keeps of a source: all that a transfer needs when
// the source is gone, save what may be a password. Whoever reads a NodeVolume need
// not have the right to read the source.
func ImportOf(source *cdiv1.VolumeImportSource, mode v1alpha1.PopulateMode) *v1alpha1.Import {
	from := source.Spec.Source.DeepCopy()
	if from != nil && from.HTTP != nil {
		from.HTTP.URL, from.HTTP.ExtraHeaders = withoutUser(from.HTTP.URL), nil
	}
	return &v1alpha1.Import{
		Mode:          mode,
		SourceName:    source.Name,
		SourceUID:     source.UID,
		Source:        from,
		ContentType:   source.Spec.ContentType,
		Preallocation: source.Spec.Preallocation != nil && *source.Spec.Preallocation,
		Format:        source.Annotations[AnnotationImageFormat],
		Disk:          source.Annotations[AnnotationImageDisk],
	}
}

// withoutUser is a URL without the user and password that may be in it, and
// otherwise letter for letter.
func withoutUser(url string) string {
	scheme, rest, ok := strings.Cut(url, "://")
	if !ok {
		return url
	}
	end := strings.IndexAny(rest, "/?#")
	if end < 0 {
		end = len(rest)
	}
	return scheme + "://" + rest[strings.LastIndex(rest[:end], "@")+1:]
}

// Record is the NodeVolume of a claim on a node.
func Record(claim *corev1.PersistentVolumeClaim, class *Class, source *cdiv1.VolumeImportSource, node string) *v1alpha1.NodeVolume {
	return &v1alpha1.NodeVolume{
		ObjectMeta: metav1.ObjectMeta{Name: VolumeName(claim), Finalizers: []string{v1alpha1.Finalizer}},
		Spec: v1alpha1.NodeVolumeSpec{
			Kind:          v1alpha1.KindVolume,
			Node:          node,
			Pool:          class.Pool,
			CapacityBytes: NeedOf(claim, class),
			VolumeMode:    ModeOf(claim),
			FSType:        FSTypeOf(claim, class),
			Claim:         &v1alpha1.ClaimReference{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID},
			Import:        ImportOf(source, class.Populate),
		},
	}
}

// Driver is what a PersistentVolume says of us.
type Driver struct {
	Name, TopologyKey string
}

// PersistentVolume is the PV of a record, bound to its claim and no other.
func PersistentVolume(d Driver, claim *corev1.PersistentVolumeClaim, class *Class, record *v1alpha1.NodeVolume) *corev1.PersistentVolume {
	mode := record.Spec.VolumeMode
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name: record.Name,
			Annotations: map[string]string{
				annotationProvisionedBy:           d.Name,
				annotationDeletionSecretName:      "",
				annotationDeletionSecretNamespace: "",
			},
		},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(record.Spec.CapacityBytes, resource.BinarySI)},
			AccessModes:                   slices.Clone(claim.Spec.AccessModes),
			PersistentVolumeReclaimPolicy: class.ReclaimPolicy,
			StorageClassName:              class.Name,
			MountOptions:                  slices.Clone(class.MountOptions),
			VolumeMode:                    &mode,
			ClaimRef: &corev1.ObjectReference{
				APIVersion: "v1", Kind: "PersistentVolumeClaim",
				Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: d.TopologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{record.Spec.Node}}},
			}}}},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver:       d.Name,
				VolumeHandle: record.Name,
				FSType:       record.Spec.FSType,
				// For people: how the volume got, or gets, its data.
				VolumeAttributes: map[string]string{"longshore.dev/populate": string(record.Spec.Import.Mode)},
			}},
		},
	}
	if name := claim.Spec.VolumeAttributesClassName; name != nil && *name != "" {
		pv.Spec.VolumeAttributesClassName = name
	}
	if class.ReclaimPolicy == corev1.PersistentVolumeReclaimDelete {
		pv.Finalizers = []string{finalizerProvisioner}
	}
	return pv
}
