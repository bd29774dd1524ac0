// Package csi speaks to the kubelet and the CSI sidecars: it checks a request,
// makes one call, and translates the error.
//
// It knows nothing of Kubernetes objects, pools or loop devices: what it needs
// of them are the interfaces Volumes (controller side) and Stager (node side).
package csi

import (
	"context"
	"errors"
	"time"
)

// DriverName is the name that StorageClasses and PVs carry.
const DriverName = "csi.longshore.dev"

// TopologyKey is the node label key of a volume's place; its value is the node's name.
const TopologyKey = "topology.longshore.dev/node"

// StorageClass parameters.
const (
	ParameterPool     = "longshore.dev/pool"
	ParameterPopulate = "longshore.dev/populate"
	ParameterFSType   = "csi.storage.k8s.io/fstype"
)

// Errors that Volumes and Stager wrap; each stands for one gRPC code.
var (
	ErrNotFound     = errors.New("not found")          // NOT_FOUND
	ErrExists       = errors.New("exists differently") // ALREADY_EXISTS
	ErrFull         = errors.New("no space")           // RESOURCE_EXHAUSTED
	ErrBusy         = errors.New("busy")               // ABORTED: the same call later
	ErrPrecondition = errors.New("not possible now")   // FAILED_PRECONDITION: final for the kubelet
	ErrUnavailable  = errors.New("unavailable")        // UNAVAILABLE
	ErrInvalid      = errors.New("invalid")            // INVALID_ARGUMENT
	ErrOutOfRange   = errors.New("out of range")       // OUT_OF_RANGE
)

// Mode is how a volume shows in a pod.
type Mode string

const (
	Block      Mode = "Block"
	Filesystem Mode = "Filesystem"
)

// Request says what CreateVolume wants.
type Request struct {
	// Name is the volume's id, derived from the CSI name: a DNS-1123 subdomain of at
	// most 128 bytes, the same for the same name.
	Name string
	// RequiredBytes > 0; LimitBytes 0 means no limit.
	RequiredBytes, LimitBytes int64
	Mode                      Mode
	FSType                    string // ext4, xfs; "" for Block
	Pool                      string
	// Nodes in order of preference; empty means any.
	Nodes []string
	// FromVolume or FromSnapshot names the source of the blocks; at most one is set.
	FromVolume, FromSnapshot string
	// ClaimNamespace, ClaimName: from external-provisioner's --extra-create-metadata; may be "".
	ClaimNamespace, ClaimName string
}

// Volume is a volume as the controller side tells it.
type Volume struct {
	ID                       string
	CapacityBytes            int64
	Node                     string
	Mode                     Mode
	FromVolume, FromSnapshot string
}

// Snapshot is a snapshot as the controller side tells it.
type Snapshot struct {
	ID, SourceVolume string
	SizeBytes        int64
	CreatedAt        time.Time
	Ready            bool
}

// Volumes keeps the cluster's record of volumes and has nodes carry it out.
// All methods may be called at once and repeated; deletions of what is unknown succeed.
type Volumes interface {
	// Create answers the same for the same request, ErrExists for another request of that
	// name, and ErrInvalid where the source of the blocks has another Mode.
	Create(ctx context.Context, r Request) (Volume, error)
	Delete(ctx context.Context, id string) error
	Get(ctx context.Context, id string) (Volume, error)
	// List returns at most max volumes (0: all) with ids after start, in order of id;
	// next is "" at the end.
	List(ctx context.Context, start string, max int) (v []Volume, next string, err error)
	// Expand returns the capacity and whether the node has still to grow the filesystem.
	Expand(ctx context.Context, id string, requiredBytes, limitBytes int64) (capacity int64, nodeExpansion bool, err error)
	// Capacity is what the pool could still give: to one volume at most (maximum), and in all.
	// node "" means all nodes.
	Capacity(ctx context.Context, node, pool string) (available, maximum int64, err error)
	CreateSnapshot(ctx context.Context, id, volume string) (Snapshot, error)
	DeleteSnapshot(ctx context.Context, id string) error
	// ListSnapshots filters by snapshot id and source volume where they are not "".
	ListSnapshots(ctx context.Context, id, volume, start string, max int) (s []Snapshot, next string, err error)
}

// Use says how a volume is staged and published.
type Use struct {
	Mode         Mode
	FSType       string
	MountOptions []string
	ReadOnly     bool
	// SingleWriter: at most one target on this node (access mode SINGLE_NODE_SINGLE_WRITER).
	SingleWriter bool
}

// Stats are the figures of NodeGetVolumeStats, in bytes; inodes are 0 for Block.
type Stats struct {
	TotalBytes, UsedBytes, AvailableBytes    int64
	TotalInodes, UsedInodes, AvailableInodes int64
}

// Stager puts volumes in place on this node, filled with their data.
// Calls for one volume never overlap: a second one answers ErrBusy at once.
type Stager interface {
	// Stage returns nil once the volume is at path. Called again for a volume already
	// there it does nothing. While the data is still coming it waits within ctx and at most
	// its own limit, then returns ErrBusy with the progress; a transfer that has failed for
	// good returns ErrPrecondition and leaves nothing behind.
	Stage(ctx context.Context, id, path string, u Use) error
	Unstage(ctx context.Context, id, path string) error
	// Publish binds the staged volume to target: a directory, or a file for Block.
	Publish(ctx context.Context, id, staging, target string, u Use) error
	Unpublish(ctx context.Context, id, target string) error
	// Expand grows loop device and filesystem to the volume's capacity, which it returns.
	Expand(ctx context.Context, id, path string) (int64, error)
	Stats(ctx context.Context, id, path string) (Stats, error)
}
