// Package v1alpha1 holds the longshore.dev kinds: NodeVolume, the durable record
// of what a node keeps.
//
// It says nothing that the cdi.kubevirt.io, forklift.konveyor.io or
// snapshot.storage.k8s.io kinds can say themselves.
//
// +kubebuilder:object:generate=true
// +groupName=longshore.dev
package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
)

// Finalizer keeps a NodeVolume until its node has let go of the data.
const Finalizer = "longshore.dev/node-volume"

// NodeVolume is a volume or a snapshot that a node keeps for the cluster. The
// controller writes it before it asks the node for anything; the node never
// deletes data on its own evidence. Its name is the CSI volume or snapshot id.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=nv
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.node`
// +kubebuilder:printcolumn:name="Namespace",type=string,JSONPath=`.spec.claim.namespace`
// +kubebuilder:printcolumn:name="Claim",type=string,JSONPath=`.spec.claim.name`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Done",type=string,JSONPath=`.status.progress.summary`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type NodeVolume struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec NodeVolumeSpec `json:"spec"`
	// +optional
	Status NodeVolumeStatus `json:"status,omitempty"`
}

// NodeVolumeKind tells volumes from snapshots.
// +kubebuilder:validation:Enum=Volume;Snapshot
type NodeVolumeKind string

const (
	KindVolume   NodeVolumeKind = "Volume"
	KindSnapshot NodeVolumeKind = "Snapshot"
)

// NodeVolumeSpec is what the controller has decided. Later capacityBytes may grow, published
// become true, and the import change while the volume is not populated.
type NodeVolumeSpec struct {
	// +kubebuilder:default=Volume
	Kind NodeVolumeKind `json:"kind"`
	// Node is the name of the node that keeps the data.
	// +kubebuilder:validation:MinLength=1
	Node string `json:"node"`
	// Pool is the name of the node's pool.
	// +kubebuilder:validation:MinLength=1
	Pool string `json:"pool"`
	// CapacityBytes is the size of the volume in bytes.
	// +kubebuilder:validation:Minimum=1
	CapacityBytes int64 `json:"capacityBytes"`
	// +kubebuilder:validation:Enum=Block;Filesystem
	VolumeMode corev1.PersistentVolumeMode `json:"volumeMode"`
	// FSType is ext4 or xfs; empty for Block.
	// +optional
	FSType string `json:"fsType,omitempty"`
	// Claim is the claim that the volume is for.
	// +optional
	Claim *ClaimReference `json:"claim,omitempty"`
	// From names the NodeVolume (volume or snapshot) whose blocks this one shares.
	// +optional
	From string `json:"from,omitempty"`
	// Import says what fills the volume; absent for volumes that are not filled by us.
	// +optional
	Import *Import `json:"import,omitempty"`
	// Published is set before the PersistentVolume of a filled volume is written: from then
	// on somebody may have used the data, so that nobody but a person may throw it away.
	// +optional
	Published bool `json:"published,omitempty"`
}

// ClaimReference names one life of a claim.
type ClaimReference struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// UID is empty where only the name is known.
	// +optional
	UID types.UID `json:"uid,omitempty"`
}

// PopulateMode is the StorageClass parameter longshore.dev/populate.
// +kubebuilder:validation:Enum=bind;stage
type PopulateMode string

const (
	PopulateBind  PopulateMode = "bind"
	PopulateStage PopulateMode = "stage"
)

// Import is the recipe of a volume as it stood when the volume was made; it
// names Secrets and never holds them.
type Import struct {
	Mode PopulateMode `json:"mode"`
	// SourceName and SourceUID are those of the VolumeImportSource.
	SourceName string    `json:"sourceName"`
	SourceUID  types.UID `json:"sourceUID"`
	// +optional
	Source *cdiv1.ImportSourceType `json:"source,omitempty"`
	// +optional
	ContentType cdiv1.DataVolumeContentType `json:"contentType,omitempty"`
	// +optional
	Preallocation bool `json:"preallocation,omitempty"`
	// Format of the image where the source's annotation longshore.dev/image-format names
	// it: raw or vhd. Empty has it recognised.
	// +optional
	Format string `json:"format,omitempty"`
	// Disk of a bundle (tar, OVA) that the source's annotation longshore.dev/image-disk names.
	// +optional
	Disk string `json:"disk,omitempty"`
}

// NodeVolumePhase sums a NodeVolume up for people; nothing decides on it.
type NodeVolumePhase string

const (
	PhasePending   NodeVolumePhase = "Pending"   // the node has not made it yet
	PhaseEmpty     NodeVolumePhase = "Empty"     // made, awaits data
	PhaseFilling   NodeVolumePhase = "Filling"   // data is coming
	PhaseFailed    NodeVolumePhase = "Failed"    // the transfer failed for good
	PhasePopulated NodeVolumePhase = "Populated" // complete
	PhaseOrphaned  NodeVolumePhase = "Orphaned"  // complete, but claim and PV are gone: only a person deletes it
)

// Condition types.
const (
	// ConditionCreated is False, with the reason, while the node cannot make the volume.
	ConditionCreated = "Created"
	// ConditionPopulated is True once the data is complete; False with reason and message before.
	ConditionPopulated = "Populated"
	// ConditionDeleted is False, with the reason, while a volume that is to go stays on its node.
	ConditionDeleted = "Deleted"
)

// NodeVolumeStatus is what the node last said.
type NodeVolumeStatus struct {
	// +optional
	Phase NodeVolumePhase `json:"phase,omitempty"`
	// PoolUUID is the pool that holds the data; a node whose pool has another never makes a new one.
	// +optional
	PoolUUID string `json:"poolUUID,omitempty"`
	// Created is true once the node has said that it keeps the volume.
	// +optional
	Created bool `json:"created,omitempty"`
	// Populated is true once the data is complete and durable.
	// +optional
	Populated bool `json:"populated,omitempty"`
	// CapacityBytes is what the node has made.
	// +optional
	CapacityBytes int64 `json:"capacityBytes,omitempty"`
	// CreatedAt is when the node made it: for a snapshot, the moment that it shows.
	// +optional
	CreatedAt *metav1.Time `json:"createdAt,omitempty"`
	// +optional
	Progress *Progress `json:"progress,omitempty"`
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Progress of a transfer; sizes in bytes.
type Progress struct {
	BytesDone int64 `json:"bytesDone"`
	// BytesTotal is 0 while the size is unknown (one-way streams).
	BytesTotal     int64 `json:"bytesTotal"`
	BytesPerSecond int64 `json:"bytesPerSecond"`
	// ETASeconds is -1 while it cannot be told.
	ETASeconds int64 `json:"etaSeconds"`
	// +optional
	Retries int32 `json:"retries,omitempty"`
	// Format as recognised, such as qcow2 or raw.gz.
	// +optional
	Format string `json:"format,omitempty"`
	// +optional
	VirtualSizeBytes int64 `json:"virtualSizeBytes,omitempty"`
	// Digest of the disk that the volume was filled with: see docs/digest.md.
	// +optional
	Digest string `json:"digest,omitempty"`
	// FromCache: the disk came from the node's cache of images.
	// +optional
	FromCache bool `json:"fromCache,omitempty"`
	// Summary is "42 %, 118 MiB/s, 1m10s left", for kubectl get.
	// +optional
	Summary string `json:"summary,omitempty"`
}

// NodeVolumeList is a list of NodeVolumes.
//
// +kubebuilder:object:root=true
type NodeVolumeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NodeVolume `json:"items"`
}
