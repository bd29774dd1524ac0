package controllers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
)

// Volumes carries out what the CSI sidecars ask for: ordinary volumes, clones,
// snapshots. It implements csi.Volumes. Filled volumes are Populate's, save that
// they are deleted and expanded here too.
type Volumes struct {
	Client client.Client
	// Live reads records past the cache: the sidecars repeat a call at once.
	Live   client.Reader
	Agents *Agents
	Room   *Room
}

var _ csi.Volumes = (*Volumes)(nil)

// Create writes the record, then has the node make the volume.
func (v *Volumes) Create(ctx context.Context, r csi.Request) (csi.Volume, error) {
	from, err := v.from(ctx, &r)
	if err != nil {
		return csi.Volume{}, err
	}
	nv, err := v.record(ctx, r.Name)
	switch {
	case err == nil:
		return v.again(ctx, nv, r)
	case !errors.Is(err, csi.ErrNotFound):
		return csi.Volume{}, err
	}
	nodes, err := v.nodes(ctx, r, from)
	if err != nil {
		return csi.Volume{}, err
	}
	var full error
	for _, node := range nodes {
		nv := recordOf(r, from, node)
		if err := v.Client.Create(ctx, nv); apierrors.IsAlreadyExists(err) {
			return csi.Volume{}, fmt.Errorf("volume %s is being made by another call: %w", r.Name, csi.ErrBusy)
		} else if err != nil {
			return csi.Volume{}, fmt.Errorf("record volume %s: %w", r.Name, err)
		}
		err := v.make(ctx, nv)
		if err == nil {
			return v.told(nv), nil
		}
		if !errors.Is(err, csi.ErrFull) {
			return csi.Volume{}, err // the record stays: nobody knows what the node has done
		}
		full = err
		if err := v.drop(ctx, nv); err != nil {
			return csi.Volume{}, err
		}
	}
	return csi.Volume{}, full
}

// from reads the source of the blocks, and checks that it can be one.
func (v *Volumes) from(ctx context.Context, r *csi.Request) (*v1alpha1.NodeVolume, error) {
	id, kind := r.FromVolume, v1alpha1.KindVolume
	if r.FromSnapshot != "" {
		id, kind = r.FromSnapshot, v1alpha1.KindSnapshot
	}
	if id == "" {
		return nil, nil
	}
	from, err := v.record(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case from.Spec.Kind != kind || from.DeletionTimestamp != nil:
		return nil, fmt.Errorf("%s %s: %w", strings.ToLower(string(kind)), id, csi.ErrNotFound)
	case string(from.Spec.VolumeMode) != string(r.Mode):
		return nil, fmt.Errorf("%s %s has the mode %s, the new volume %s: ask for the same mode: %w", strings.ToLower(string(kind)), id, from.Spec.VolumeMode, r.Mode, csi.ErrInvalid)
	case from.Spec.Pool != r.Pool:
		return nil, fmt.Errorf("%s %s is in pool %q, the new volume's class names pool %q: blocks are shared inside a pool only: %w", strings.ToLower(string(kind)), id, from.Spec.Pool, r.Pool, csi.ErrInvalid)
	case r.RequiredBytes < from.Spec.CapacityBytes:
		if r.LimitBytes > 0 && r.LimitBytes < from.Spec.CapacityBytes {
			return nil, fmt.Errorf("%s %s has %d bytes, the new volume may have %d at most: %w", strings.ToLower(string(kind)), id, from.Spec.CapacityBytes, r.LimitBytes, csi.ErrOutOfRange)
		}
		r.RequiredBytes = from.Spec.CapacityBytes
	}
	r.FSType = from.Spec.FSType
	return from, v.checkPopulated(from)
}

// checkPopulated asks the record, and the node, whose word may be newer.
func (v *Volumes) checkPopulated(nv *v1alpha1.NodeVolume) error {
	if said, connected := v.Agents.Volume(nv.Spec.Node, nv.Name); nv.Status.Populated || connected && said.GetState() == agentv1.State_STATE_POPULATED {
		return nil
	}
	return fmt.Errorf("volume %s is not populated yet (phase %s): wait until its claim says Populated: %w", nv.Name, nv.Status.Phase, csi.ErrPrecondition)
}

// again answers for a name that there is already.
func (v *Volumes) again(ctx context.Context, nv *v1alpha1.NodeVolume, r csi.Request) (csi.Volume, error) {
	differs := ""
	switch s := nv.Spec; {
	case nv.DeletionTimestamp != nil:
		return csi.Volume{}, fmt.Errorf("volume %s of that name is being deleted: %w", nv.Name, csi.ErrBusy)
	case s.Kind != v1alpha1.KindVolume:
		differs = "is a snapshot"
	case s.Import != nil:
		differs = "is filled by an import"
	case string(s.VolumeMode) != string(r.Mode):
		differs = fmt.Sprintf("has the mode %s, not %s", s.VolumeMode, r.Mode)
	case s.FSType != r.FSType:
		differs = fmt.Sprintf("has the filesystem %q, not %q", s.FSType, r.FSType)
	case s.Pool != r.Pool:
		differs = fmt.Sprintf("is in pool %q, not %q", s.Pool, r.Pool)
	case s.From != cmp.Or(r.FromVolume, r.FromSnapshot):
		differs = fmt.Sprintf("shares the blocks of %q, not of %q", s.From, cmp.Or(r.FromVolume, r.FromSnapshot))
	case s.CapacityBytes < r.RequiredBytes || r.LimitBytes > 0 && s.CapacityBytes > r.LimitBytes:
		differs = fmt.Sprintf("has %d bytes, which %d to %d do not allow", s.CapacityBytes, r.RequiredBytes, r.LimitBytes)
	case len(r.Nodes) > 0 && !slices.Contains(r.Nodes, s.Node):
		differs = fmt.Sprintf("is on node %s, not on one of %s", s.Node, strings.Join(r.Nodes, ", "))
	}
	if differs != "" {
		return csi.Volume{}, fmt.Errorf("volume %s %s: %w", nv.Name, differs, csi.ErrExists)
	}
	// The node answers the same for the same order, so that a call that was cut off ends well.
	err := v.make(ctx, nv)
	if errors.Is(err, csi.ErrFull) {
		if err := v.drop(ctx, nv); err != nil {
			return csi.Volume{}, err
		}
	}
	return v.told(nv), err
}

// nodes lists where the volume may be, the best first.
func (v *Volumes) nodes(ctx context.Context, r csi.Request, from *v1alpha1.NodeVolume) ([]string, error) {
	candidates := r.Nodes
	if from != nil {
		if len(r.Nodes) > 0 && !slices.Contains(r.Nodes, from.Spec.Node) {
			return nil, fmt.Errorf("%s is on node %s, whose blocks no other node can share; the volume is wanted on %s: choose that node, or import the image: %w", from.Name, from.Spec.Node, strings.Join(r.Nodes, ", "), csi.ErrFull)
		}
		candidates = []string{from.Spec.Node}
	}
	anywhere := len(candidates) == 0
	if anywhere {
		for node := range v.Agents.Nodes() {
			candidates = append(candidates, node)
		}
	}
	type place struct {
		node string
		free int64
	}
	key, err := v.Room.kinOf(ctx, r.ClaimNamespace, r.ClaimName)
	if err != nil {
		return nil, err
	}
	kins, err := v.Room.kins(ctx)
	if err != nil {
		return nil, err
	}
	kin, held := kins[key], kins.Held(key)
	var places []place
	var full, other []string
	for _, node := range candidates {
		free, obstacle, err := v.Room.Free(ctx, node, r.Pool, held)
		switch {
		case err != nil:
			return nil, err
		case obstacle != "":
			other = append(other, "node "+node+": "+obstacle)
		case free < r.RequiredBytes:
			full = append(full, fmt.Sprintf("node %s: %d bytes free", node, max(free, 0)))
		default:
			places = append(places, place{node, free})
		}
	}
	if len(places) == 0 {
		kind := csi.ErrUnavailable
		if len(full) > 0 {
			kind = csi.ErrFull
		}
		slices.Sort(full)
		return nil, fmt.Errorf("no node takes a volume of %d bytes in pool %q (%s): %w", r.RequiredBytes, r.Pool, strings.Join(append(full, other...), ", "), kind)
	}
	if anywhere {
		slices.SortFunc(places, func(a, b place) int {
			return cmp.Or(cmp.Compare(number(kin.On(b.node)), number(kin.On(a.node))), cmp.Compare(b.free, a.free), strings.Compare(a.node, b.node))
		})
	}
	var nodes []string
	for _, p := range places {
		nodes = append(nodes, p.node)
	}
	return nodes, nil
}

func recordOf(r csi.Request, from *v1alpha1.NodeVolume, node string) *v1alpha1.NodeVolume {
	nv := &v1alpha1.NodeVolume{
		ObjectMeta: metav1.ObjectMeta{Name: r.Name, Finalizers: []string{v1alpha1.Finalizer}},
		Spec: v1alpha1.NodeVolumeSpec{
			Kind: v1alpha1.KindVolume, Node: node, Pool: r.Pool, CapacityBytes: r.RequiredBytes,
			VolumeMode: corev1.PersistentVolumeMode(r.Mode), FSType: r.FSType,
		},
	}
	if from != nil {
		nv.Spec.From = from.Name
	}
	if r.ClaimName != "" {
		// external-provisioner names volumes after the claim's uid.
		uid, _ := strings.CutPrefix(r.Name, "pvc-")
		if uid == r.Name {
			uid = ""
		}
		nv.Spec.Claim = &v1alpha1.ClaimReference{Namespace: r.ClaimNamespace, Name: r.ClaimName, UID: types.UID(uid)}
	}
	return nv
}

// make has the node make the volume of a record.
func (v *Volumes) make(ctx context.Context, nv *v1alpha1.NodeVolume) error {
	uuid, err := poolUUID(ctx, v.Client, nv.Spec.Node, nv.Spec.Pool)
	if err != nil {
		return err
	}
	_, err = v.Agents.CreateVolume(ctx, nv.Spec.Node, creation(nv, uuid))
	return err
}

// drop takes back a record of which the node has said that it made nothing.
func (v *Volumes) drop(ctx context.Context, nv *v1alpha1.NodeVolume) error {
	if err := v.Client.Delete(ctx, nv, client.Preconditions{UID: &nv.UID}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take back record %s: %w", nv.Name, err)
	}
	return v.letGo(ctx, nv.Name)
}

// letGo takes the finalizer off the record as it is now; the reconciler of
// NodeVolumes may be writing to it.
func (v *Volumes) letGo(ctx context.Context, name string) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		nv, err := v.record(ctx, name)
		switch {
		case errors.Is(err, csi.ErrNotFound):
			return nil
		case err != nil:
			return err
		}
		return letGo(ctx, v.Client, nv)
	})
}

func (v *Volumes) record(ctx context.Context, id string) (*v1alpha1.NodeVolume, error) {
	nv := &v1alpha1.NodeVolume{}
	err := v.Live.Get(ctx, client.ObjectKey{Name: id}, nv)
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err):
		return nil, fmt.Errorf("volume or snapshot %s: %w", id, csi.ErrNotFound)
	case err != nil:
		return nil, fmt.Errorf("read record %s: %w", id, err)
	}
	return nv, nil
}

// Delete has the node delete the data and then lets the record go. While the node
// is away the record stays, being deleted, and says why (R6).
func (v *Volumes) Delete(ctx context.Context, id string) error {
	return v.delete(ctx, id, v1alpha1.KindVolume)
}

// DeleteSnapshot is Delete for snapshots.
func (v *Volumes) DeleteSnapshot(ctx context.Context, id string) error {
	return v.delete(ctx, id, v1alpha1.KindSnapshot)
}

func (v *Volumes) delete(ctx context.Context, id string, kind v1alpha1.NodeVolumeKind) error {
	if strings.ContainsAny(id, "/%") || id == "." || id == ".." {
		return nil // no record can have such a name
	}
	nv, err := v.record(ctx, id)
	switch {
	case errors.Is(err, csi.ErrNotFound):
		return nil
	case err != nil:
		return err
	case nv.Spec.Kind != kind:
		return nil
	}
	if nv.DeletionTimestamp == nil {
		if err := v.Client.Delete(ctx, nv, client.Preconditions{UID: &nv.UID}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete record %s: %w", id, err)
		}
	}
	// The reconciler of NodeVolumes sees the deletion too, and the node refuses
	// whoever comes second for as long as the first takes.
	var busy error
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, deletionPatience, true, func(ctx context.Context) (bool, error) {
		err := v.Agents.Delete(ctx, nv.Spec.Node, id, poolOf(nv), nv.Status.PoolUUID, kind == v1alpha1.KindSnapshot)
		if errors.Is(err, csi.ErrBusy) {
			busy = err
			return false, nil
		}
		return err == nil, err
	})
	if wait.Interrupted(err) && busy != nil {
		return busy
	}
	if err != nil {
		return err
	}
	return v.letGo(ctx, id)
}

// deletionPatience is how long a deletion waits for a node that is busy with the volume.
const deletionPatience = 5 * time.Second

func (v *Volumes) Get(ctx context.Context, id string) (csi.Volume, error) {
	nv, err := v.record(ctx, id)
	if err != nil {
		return csi.Volume{}, err
	}
	if nv.Spec.Kind != v1alpha1.KindVolume || nv.DeletionTimestamp != nil {
		return csi.Volume{}, fmt.Errorf("volume %s: %w", id, csi.ErrNotFound)
	}
	return v.volume(ctx, nv)
}

// volume tells whether the source was a volume or a snapshot, as far as it is still known.
func (v *Volumes) volume(ctx context.Context, nv *v1alpha1.NodeVolume) (csi.Volume, error) {
	out := v.told(nv)
	if nv.Spec.From == "" {
		return out, nil
	}
	from, err := v.record(ctx, nv.Spec.From)
	switch {
	case errors.Is(err, csi.ErrNotFound):
		return out, nil
	case err != nil:
		return out, err
	case from.Spec.Kind == v1alpha1.KindSnapshot:
		out.FromSnapshot = from.Name
	default:
		out.FromVolume = from.Name
	}
	return out, nil
}

func (v *Volumes) told(nv *v1alpha1.NodeVolume) csi.Volume {
	return csi.Volume{ID: nv.Name, CapacityBytes: v.capacity(nv), Node: nv.Spec.Node, Mode: csi.Mode(nv.Spec.VolumeMode)}
}

// capacity is what the node has made, by its own word or, while it is away, by the record.
func (v *Volumes) capacity(nv *v1alpha1.NodeVolume) int64 {
	if said, connected := v.Agents.Volume(nv.Spec.Node, nv.Name); connected && said != nil {
		return said.GetCapacityBytes()
	}
	return cmp.Or(nv.Status.CapacityBytes, nv.Spec.CapacityBytes)
}

func (v *Volumes) List(ctx context.Context, start string, max int) ([]csi.Volume, string, error) {
	var out []csi.Volume
	page, next, err := v.page(ctx, start, max, func(nv *v1alpha1.NodeVolume) bool { return nv.Spec.Kind == v1alpha1.KindVolume })
	for _, nv := range page {
		out = append(out, v.told(nv))
	}
	return out, next, err
}

// page lists records that the filter takes, by name, after start.
func (v *Volumes) page(ctx context.Context, start string, max int, take func(*v1alpha1.NodeVolume) bool) (page []*v1alpha1.NodeVolume, next string, err error) {
	var list v1alpha1.NodeVolumeList
	if err := v.Live.List(ctx, &list); err != nil {
		return nil, "", fmt.Errorf("list records: %w", err)
	}
	for i := range list.Items {
		if nv := &list.Items[i]; nv.Name > start && nv.DeletionTimestamp == nil && take(nv) {
			page = append(page, nv)
		}
	}
	slices.SortFunc(page, func(a, b *v1alpha1.NodeVolume) int { return strings.Compare(a.Name, b.Name) })
	if max > 0 && len(page) > max {
		return page[:max], page[max-1].Name, nil
	}
	return page, "", nil
}

// Expand records the new capacity, then has the node grow the volume.
func (v *Volumes) Expand(ctx context.Context, id string, requiredBytes, limitBytes int64) (int64, bool, error) {
	nv, err := v.record(ctx, id)
	if err != nil {
		return 0, false, err
	}
	onNode := nv.Spec.VolumeMode != corev1.PersistentVolumeBlock
	switch {
	case nv.Spec.Kind != v1alpha1.KindVolume || nv.DeletionTimestamp != nil:
		return 0, false, fmt.Errorf("volume %s: %w", id, csi.ErrNotFound)
	case limitBytes > 0 && nv.Spec.CapacityBytes > limitBytes:
		return 0, false, fmt.Errorf("volume %s has %d bytes already, more than the limit of %d: %w", id, nv.Spec.CapacityBytes, limitBytes, csi.ErrOutOfRange)
	case nv.Status.Created && v.capacity(nv) >= requiredBytes:
		return v.capacity(nv), onNode, nil
	}
	if err := v.checkPopulated(nv); err != nil {
		return 0, false, err
	}
	before := nv.Spec.CapacityBytes
	if err := v.setCapacity(ctx, nv, max(before, requiredBytes)); err != nil {
		return 0, false, err
	}
	grown, err := v.Agents.Expand(ctx, nv.Spec.Node, id, nv.Spec.CapacityBytes)
	if errors.Is(err, csi.ErrFull) && nv.Spec.CapacityBytes != before {
		// Nothing has grown, so that the record shall not promise it.
		return 0, false, errors.Join(err, v.setCapacity(ctx, nv, before))
	}
	if err != nil {
		return 0, false, err
	}
	return grown.GetCapacityBytes(), onNode, nil
}

func (v *Volumes) setCapacity(ctx context.Context, nv *v1alpha1.NodeVolume, bytes int64) error {
	if nv.Spec.CapacityBytes == bytes {
		return nil
	}
	old := nv.DeepCopy()
	nv.Spec.CapacityBytes = bytes
	if err := v.Client.Patch(ctx, nv, client.MergeFrom(old)); err != nil {
		return fmt.Errorf("record the capacity of %d bytes of volume %s: %w", bytes, nv.Name, err)
	}
	return nil
}

func (v *Volumes) Capacity(ctx context.Context, node, pool string) (available, maximum int64, err error) {
	nodes := []string{node}
	if node == "" {
		nodes = nil
		for n := range v.Agents.Nodes() {
			nodes = append(nodes, n)
		}
	}
	for _, n := range nodes {
		bytes, err := v.Room.Offered(ctx, n, pool)
		if err != nil {
			return 0, 0, err
		}
		available, maximum = available+max(bytes, 0), max(maximum, bytes)
	}
	return available, maximum, nil
}

// CreateSnapshot records the snapshot, then has the volume's node make it.
func (v *Volumes) CreateSnapshot(ctx context.Context, id, volume string) (csi.Snapshot, error) {
	of, err := v.record(ctx, volume)
	if err != nil {
		return csi.Snapshot{}, err
	}
	if of.Spec.Kind != v1alpha1.KindVolume || of.DeletionTimestamp != nil {
		return csi.Snapshot{}, fmt.Errorf("volume %s: %w", volume, csi.ErrNotFound)
	}
	nv, err := v.record(ctx, id)
	if errors.Is(err, csi.ErrNotFound) {
		if err := v.checkPopulated(of); err != nil {
			return csi.Snapshot{}, err
		}
		nv = &v1alpha1.NodeVolume{ObjectMeta: metav1.ObjectMeta{Name: id, Finalizers: []string{v1alpha1.Finalizer}}, Spec: *of.Spec.DeepCopy()}
		nv.Spec.Kind, nv.Spec.From, nv.Spec.Import, nv.Spec.Published = v1alpha1.KindSnapshot, volume, nil, false
		if err = v.Client.Create(ctx, nv); apierrors.IsAlreadyExists(err) {
			err = fmt.Errorf("snapshot %s is being made by another call: %w", id, csi.ErrBusy)
		}
	}
	switch {
	case err != nil:
		return csi.Snapshot{}, err
	case nv.DeletionTimestamp != nil:
		return csi.Snapshot{}, fmt.Errorf("snapshot %s of that name is being deleted: %w", id, csi.ErrBusy)
	case nv.Spec.Kind != v1alpha1.KindSnapshot || nv.Spec.From != volume:
		return csi.Snapshot{}, fmt.Errorf("%s %s of %q exists: %w", strings.ToLower(string(nv.Spec.Kind)), id, nv.Spec.From, csi.ErrExists)
	}
	made, err := v.Agents.Snapshot(ctx, nv.Spec.Node, id, volume)
	if errors.Is(err, csi.ErrFull) {
		return csi.Snapshot{}, errors.Join(err, v.drop(ctx, nv))
	}
	if err != nil {
		return csi.Snapshot{}, err
	}
	nv.Status.CreatedAt = &metav1.Time{Time: metav1.Unix(made.GetCreatedAt(), 0).Time}
	nv.Status.Created, nv.Status.CapacityBytes = true, made.GetCapacityBytes()
	return v.snapshot(nv), nil
}

func (v *Volumes) snapshot(nv *v1alpha1.NodeVolume) csi.Snapshot {
	s := csi.Snapshot{ID: nv.Name, SourceVolume: nv.Spec.From, SizeBytes: v.capacity(nv), CreatedAt: nv.CreationTimestamp.Time, Ready: nv.Status.Created}
	if said, connected := v.Agents.Volume(nv.Spec.Node, nv.Name); connected && said != nil {
		s.Ready = true
		if said.GetCreatedAt() > 0 {
			s.CreatedAt = metav1.Unix(said.GetCreatedAt(), 0).Time
		}
	} else if nv.Status.CreatedAt != nil {
		s.CreatedAt = nv.Status.CreatedAt.Time
	}
	return s
}

func (v *Volumes) ListSnapshots(ctx context.Context, id, volume, start string, max int) ([]csi.Snapshot, string, error) {
	var out []csi.Snapshot
	page, next, err := v.page(ctx, start, max, func(nv *v1alpha1.NodeVolume) bool {
		return nv.Spec.Kind == v1alpha1.KindSnapshot && (id == "" || nv.Name == id) && (volume == "" || nv.Spec.From == volume)
	})
	for _, nv := range page {
		out = append(out, v.snapshot(nv))
	}
	return out, next, err
}
