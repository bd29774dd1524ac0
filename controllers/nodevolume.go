package controllers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

const (
	// statusEvery is how often progress alone changes a NodeVolume.
	statusEvery = 2 * time.Second
	// releaseRetry is when a node is asked again that could not delete.
	releaseRetry = 15 * time.Second
)

// Reasons of a NodeVolume's conditions, beside those of the transfer and populator's.
const (
	reasonCreated   = "Created"
	reasonPopulated = "Populated"
	reasonPending   = "Pending"
	reasonMissing   = "Missing"
	reasonInUse     = "InUse"
	reasonNoPool    = "PoolNotConfigured"
	reasonError     = "Error"
)

// NodeVolumes keeps the records true: their status is what the node says, and a
// record that goes takes the node's data along first.
type NodeVolumes struct {
	Client client.Client
	// Live reads past the cache, before something is given up for good.
	Live   client.Reader
	Agents *Agents

	mu      sync.Mutex
	written map[string]time.Time // when a status was last written
}

// Reconcile settles one record.
func (n *NodeVolumes) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	nv := &v1alpha1.NodeVolume{}
	if err := n.Client.Get(ctx, req.NamespacedName, nv); err != nil {
		n.forget(req.Name)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if nv.DeletionTimestamp != nil {
		return quietly(n.release(ctx, nv))
	}
	unclaimed, err := n.unclaimed(ctx, nv)
	if err != nil {
		return ctrl.Result{}, err
	}
	if unclaimed && nv.Spec.Import != nil && !nv.Spec.Published {
		ctrl.LoggerFrom(ctx).Info("claim is gone, volume was never published: deleting it", "volume", nv.Name, "node", nv.Spec.Node)
		return quietly(ctrl.Result{}, client.IgnoreNotFound(n.Client.Delete(ctx, nv, client.Preconditions{UID: &nv.UID, ResourceVersion: &nv.ResourceVersion})))
	}
	v, connected := n.Agents.Volume(nv.Spec.Node, nv.Name)
	return quietly(n.write(ctx, nv, statusOf(nv, v, connected, unclaimed)))
}

// quietly looks again when somebody was quicker: that is no error.
func quietly(r ctrl.Result, err error) (ctrl.Result, error) {
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: 200 * time.Millisecond}, nil
	}
	return r, err
}

// unclaimed tells whether neither the claim that the volume is for nor a
// PersistentVolume exists. Volumes of an unknown claim are never unclaimed.
func (n *NodeVolumes) unclaimed(ctx context.Context, nv *v1alpha1.NodeVolume) (bool, error) {
	if nv.Spec.Kind != v1alpha1.KindVolume || nv.Spec.Claim == nil || nv.Spec.Claim.UID == "" {
		return false, nil
	}
	for _, r := range []client.Reader{n.Client, n.Live} {
		claim, pv := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
		err := r.Get(ctx, client.ObjectKey{Namespace: nv.Spec.Claim.Namespace, Name: nv.Spec.Claim.Name}, claim)
		if err == nil && claim.UID == nv.Spec.Claim.UID || client.IgnoreNotFound(err) != nil {
			return false, client.IgnoreNotFound(err)
		}
		if err := r.Get(ctx, client.ObjectKey{Name: nv.Name}, pv); !apierrors.IsNotFound(err) {
			return false, err
		}
	}
	return true, nil
}

// statusOf is the status of a record whose node says v.
func statusOf(nv *v1alpha1.NodeVolume, v *agentv1.Volume, connected, unclaimed bool) *v1alpha1.NodeVolumeStatus {
	s := nv.Status.DeepCopy()
	created := metav1.Condition{Type: v1alpha1.ConditionCreated, Status: metav1.ConditionTrue, Reason: reasonCreated, Message: "the node keeps the volume"}
	filled := metav1.Condition{Type: v1alpha1.ConditionPopulated, Status: metav1.ConditionTrue, Reason: reasonPopulated, Message: "the data is complete"}
	if connected && v != nil {
		s.Created = true
		s.PoolUUID, s.CapacityBytes = v.GetPoolUuid(), v.GetCapacityBytes()
		if v.GetCreatedAt() > 0 {
			s.CreatedAt = &metav1.Time{Time: time.Unix(v.GetCreatedAt(), 0)}
		}
		s.Populated = s.Populated || v.GetState() == agentv1.State_STATE_POPULATED
		if p := populator.Progress(v.GetProgress(), s.Populated); p != nil {
			s.Progress = p
		}
	}
	switch {
	case !connected:
		s.Phase = phaseAt(s, nil, unclaimed)
		created.Status, created.Reason, created.Message = boolStatus(s.Created), populator.ReasonNodeUnavailable, fmt.Sprintf("the Longshore plugin of node %s is not connected", nv.Spec.Node)
	case v == nil && s.Created:
		s.Phase = phaseAt(s, nil, unclaimed)
		created.Status, created.Reason, created.Message = metav1.ConditionFalse, reasonMissing, fmt.Sprintf("node %s does not know the volume any more: is the disk of pool %q there?", nv.Spec.Node, nv.Spec.Pool)
	case v == nil:
		s.Phase = v1alpha1.PhasePending
		created.Status, created.Reason, created.Message = metav1.ConditionFalse, reasonPending, "the node has not made the volume yet"
	default:
		s.Phase = phaseAt(s, v, unclaimed)
	}
	if !s.Populated {
		filled.Status, filled.Reason, filled.Message = metav1.ConditionFalse, string(s.Phase), "the data is not complete"
		if f := v.GetFailure(); f.GetReason() != "" {
			filled.Reason, filled.Message = f.GetReason(), f.GetMessage()
		}
	}
	meta.SetStatusCondition(&s.Conditions, created)
	meta.SetStatusCondition(&s.Conditions, filled)
	return s
}

// phaseAt sums up; without the node's word what was known stays.
func phaseAt(s *v1alpha1.NodeVolumeStatus, v *agentv1.Volume, unclaimed bool) v1alpha1.NodeVolumePhase {
	switch {
	case s.Populated && unclaimed:
		return v1alpha1.PhaseOrphaned
	case s.Populated:
		return v1alpha1.PhasePopulated
	case !s.Created:
		return v1alpha1.PhasePending
	case v.GetState() == agentv1.State_STATE_FILLING:
		return v1alpha1.PhaseFilling
	case v.GetState() == agentv1.State_STATE_FAILED:
		return v1alpha1.PhaseFailed
	case v != nil || s.Phase == "":
		return v1alpha1.PhaseEmpty
	}
	return s.Phase
}

func boolStatus(b bool) metav1.ConditionStatus {
	if b {
		return metav1.ConditionTrue
	}
	return metav1.ConditionFalse
}

// write patches the status where it differs: at once, or after a while where only progress does.
func (n *NodeVolumes) write(ctx context.Context, nv *v1alpha1.NodeVolume, s *v1alpha1.NodeVolumeStatus) (ctrl.Result, error) {
	if equality.Semantic.DeepEqual(s, &nv.Status) {
		return ctrl.Result{}, nil
	}
	quiet := s.DeepCopy()
	quiet.Progress = nv.Status.Progress
	if wait := n.until(nv.Name); wait > 0 && equality.Semantic.DeepEqual(quiet, &nv.Status) {
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	old := nv.DeepCopy()
	nv.Status = *s
	if err := n.Client.Status().Patch(ctx, nv, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.written == nil {
		n.written = map[string]time.Time{}
	}
	n.written[nv.Name] = time.Now()
	return ctrl.Result{}, nil
}

// until is how long progress has still to wait.
func (n *NodeVolumes) until(name string) time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Until(n.written[name].Add(statusEvery))
}

func (n *NodeVolumes) forget(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.written, name)
}

// release has the node delete the data, then lets the record go. What hinders it
// shows as a condition.
func (n *NodeVolumes) release(ctx context.Context, nv *v1alpha1.NodeVolume) (ctrl.Result, error) {
	// A record that the cache still shows may be gone, and another of its name have data.
	live := &v1alpha1.NodeVolume{}
	if err := n.Live.Get(ctx, client.ObjectKeyFromObject(nv), live); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if live.UID != nv.UID || !controllerutil.ContainsFinalizer(live, v1alpha1.Finalizer) {
		return ctrl.Result{}, nil
	}
	nv = live
	hindrance := n.used(ctx, nv)
	if hindrance == nil {
		hindrance = n.deleteOnNode(ctx, nv)
	}
	if hindrance == nil {
		return ctrl.Result{}, letGo(ctx, n.Client, nv)
	}
	ctrl.LoggerFrom(ctx).Info("volume stays", "volume", nv.Name, "node", nv.Spec.Node, "why", hindrance.Error())
	s := nv.Status.DeepCopy()
	meta.SetStatusCondition(&s.Conditions, metav1.Condition{Type: v1alpha1.ConditionDeleted, Status: metav1.ConditionFalse, Reason: hindranceReason(hindrance), Message: hindrance.Error()})
	if _, err := n.write(ctx, nv, s); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: releaseRetry}, nil
}

var errInUse = errors.New("in use")

// used refuses to delete the data under a PersistentVolume that somebody may be using.
func (n *NodeVolumes) used(ctx context.Context, nv *v1alpha1.NodeVolume) error {
	pv := &corev1.PersistentVolume{}
	err := n.Live.Get(ctx, client.ObjectKey{Name: nv.Name}, pv)
	switch {
	case apierrors.IsNotFound(err) || nv.Spec.Kind != v1alpha1.KindVolume:
		return nil
	case err != nil:
		return err
	case pv.DeletionTimestamp != nil || pv.Status.Phase == corev1.VolumeReleased || pv.Status.Phase == corev1.VolumeFailed:
		return nil
	}
	return fmt.Errorf("PersistentVolume %s is %s: delete its claim first: %w", pv.Name, pv.Status.Phase, errInUse)
}

// deleteOnNode has the node let go. Where the Node object is gone, and the volume
// never held data that anybody could use, there is nothing to wait for (R6).
func (n *NodeVolumes) deleteOnNode(ctx context.Context, nv *v1alpha1.NodeVolume) error {
	err := n.Agents.Delete(ctx, nv.Spec.Node, nv.Name, poolOf(nv), nv.Status.PoolUUID, nv.Spec.Kind == v1alpha1.KindSnapshot)
	if !errors.Is(err, csi.ErrUnavailable) || nv.Spec.Import == nil || nv.Spec.Published {
		return err
	}
	if notThere := n.Live.Get(ctx, client.ObjectKey{Name: nv.Spec.Node}, &corev1.Node{}); apierrors.IsNotFound(notThere) {
		return nil
	}
	return err
}

// poolOf is the pool that holds the data; "" while no node has confirmed that one does.
func poolOf(nv *v1alpha1.NodeVolume) string {
	if nv.Status.PoolUUID == "" {
		return ""
	}
	return nv.Spec.Pool
}

func hindranceReason(err error) string {
	switch {
	case errors.Is(err, errInUse), errors.Is(err, csi.ErrPrecondition), errors.Is(err, csi.ErrBusy):
		return reasonInUse
	case errors.Is(err, errNoPool):
		return reasonNoPool
	case errors.Is(err, csi.ErrUnavailable):
		return populator.ReasonNodeUnavailable
	}
	return reasonError
}

// letGo takes the finalizer off.
func letGo(ctx context.Context, c client.Client, nv *v1alpha1.NodeVolume) error {
	old := nv.DeepCopy()
	controllerutil.RemoveFinalizer(nv, v1alpha1.Finalizer)
	return client.IgnoreNotFound(c.Patch(ctx, nv, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})))
}

// SetupWithManager starts the reconciler, which hears of records, of what nodes
// say, and of claims and PVs that go.
func (n *NodeVolumes) SetupWithManager(mgr ctrl.Manager) error {
	comesOrGoes := builder.WithPredicates(predicate.Funcs{UpdateFunc: func(event.UpdateEvent) bool { return false }})
	named := func(f func(client.Object) string) handler.EventHandler {
		return handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return []reconcile.Request{{NamespacedName: client.ObjectKey{Name: f(o)}}}
		})
	}
	return ctrl.NewControllerManagedBy(mgr).Named("nodevolumes").
		For(&v1alpha1.NodeVolume{}).
		WatchesRawSource(source.Func(n.listen)).
		Watches(&corev1.PersistentVolumeClaim{}, named(func(o client.Object) string { return populator.VolumeName(o.(*corev1.PersistentVolumeClaim)) }), comesOrGoes).
		Watches(&corev1.PersistentVolume{}, named(client.Object.GetName), comesOrGoes).
		WithOptions(concurrency(8)).
		Complete(n)
}

func (n *NodeVolumes) listen(ctx context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	add := func(name string) { q.Add(reconcile.Request{NamespacedName: client.ObjectKey{Name: name}}) }
	n.Agents.Listen(Listener{Volume: add, Node: func(node string) {
		records, err := recordsOn(ctx, n.Client, node)
		if err != nil {
			ctrl.LoggerFrom(ctx).Error(err, "list the node's volumes", "node", node)
			return
		}
		for i := range records {
			add(records[i].Name)
		}
	}})
	return nil
}
