package controllers

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

// Room tells what nodes could still take.
type Room struct {
	Client client.Reader
	Agents *Agents
}

// Free is what a node's pool gives to one more volume, less what is promised to
// records that the node has not made yet, and less what is held for other machines;
// obstacle says why it gives none at all.
func (r *Room) Free(ctx context.Context, node, pool string, held map[populator.Spot]int64) (bytes int64, obstacle string, err error) {
	p, connected := r.Agents.Pool(node, pool)
	switch {
	case !connected:
		return 0, "its Longshore plugin is not connected", nil
	case p == nil:
		return 0, fmt.Sprintf("it has no pool %q", pool), nil
	case p.GetProblem() != "":
		return 0, fmt.Sprintf("pool %q: %s", pool, p.GetProblem()), nil
	}
	records, err := recordsOn(ctx, r.Client, node)
	if err != nil {
		return 0, "", err
	}
	free := p.GetAvailableBytes() - held[populator.Spot{Node: node, Pool: pool}]
	for i := range records {
		nv := &records[i]
		if v, _ := r.Agents.Volume(node, nv.Name); v == nil && nv.Spec.Pool == pool && nv.DeletionTimestamp == nil {
			free -= nv.Spec.CapacityBytes
		}
	}
	return free, "", nil
}

// Offered is Free as the scheduler shall see it: what is taken by volumes whose PV
// is still to come counts as free, or else the scheduler, which asks again while
// the claim waits for its data, would find no room for that very claim (R3).
func (r *Room) Offered(ctx context.Context, node, pool string) (int64, error) {
	p, _ := r.Agents.Pool(node, pool)
	if p == nil || p.GetProblem() != "" {
		return 0, nil
	}
	records, err := recordsOn(ctx, r.Client, node)
	if err != nil {
		return 0, err
	}
	offered := p.GetAvailableBytes()
	for i := range records {
		nv := &records[i]
		if v, _ := r.Agents.Volume(node, nv.Name); v != nil && nv.Spec.Pool == pool && nv.Spec.Import != nil && !nv.Spec.Published {
			offered += v.GetCapacityBytes()
		}
	}
	return min(offered, p.GetTotalBytes()), nil
}

// Places judges all nodes with a plugin for one claim, and sums up those of its
// machine that are still to be placed.
func (r *Room) Places(ctx context.Context, claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, pool string) (places []populator.Place, unplaced populator.Sum, err error) {
	kins, err := r.kins(ctx)
	if err != nil {
		return nil, unplaced, err
	}
	key := populator.KinOf(claim)
	kin, held := kins[key], kins.Held(key)
	for name := range r.Agents.Nodes() {
		node := &corev1.Node{}
		if err := r.Client.Get(ctx, client.ObjectKey{Name: name}, node); apierrors.IsNotFound(err) {
			continue
		} else if err != nil {
			return nil, unplaced, err
		}
		free, obstacle, err := r.Free(ctx, name, pool, held)
		if err != nil {
			return nil, unplaced, err
		}
		whole, err := r.whole(ctx, name, kin, held)
		if err != nil {
			return nil, unplaced, err
		}
		places = append(places, populator.Place{Node: name, Obstacle: obstacle, Unfit: unfit(node, class.AllowedTopologies), FreeBytes: free, Kin: kin.On(name), Whole: whole})
	}
	return places, kin.Unplaced, nil
}

// whole tells whether a node has room for all of a machine that is still to be placed.
func (r *Room) whole(ctx context.Context, node string, kin populator.Kin, held map[populator.Spot]int64) (bool, error) {
	for pool, need := range kin.Needs {
		if free, obstacle, err := r.Free(ctx, node, pool, held); err != nil || obstacle != "" || free < need {
			return false, err
		}
	}
	return true, nil
}

// unfit is why a volume is better not put on a node that no pod has chosen.
func unfit(node *corev1.Node, allowed []corev1.TopologySelectorTerm) string {
	if node.Spec.Unschedulable {
		return "it is cordoned"
	}
	for _, t := range node.Spec.Taints {
		if t.Effect != corev1.TaintEffectPreferNoSchedule {
			return fmt.Sprintf("it has the taint %s", t.ToString())
		}
	}
	if len(allowed) > 0 && !slices.ContainsFunc(allowed, func(t corev1.TopologySelectorTerm) bool { return matches(node, t) }) {
		return "the StorageClass's allowedTopologies leave it out"
	}
	return ""
}

func matches(node *corev1.Node, term corev1.TopologySelectorTerm) bool {
	for _, e := range term.MatchLabelExpressions {
		value, ok := node.Labels[e.Key]
		if e.Key == csi.TopologyKey {
			value, ok = node.Name, true // the label comes with the kubelet's registration
		}
		if !ok || !slices.Contains(e.Values, value) {
			return false
		}
	}
	return true
}

// indexKin lists claims that belong to a machine.
const indexKin = "kin"

// kins tells of all machines which nodes have volumes of theirs, and what their
// other claims on our classes need (R4). It stands in claims and records only: a
// controller that comes new to it keeps the same room free.
func (r *Room) kins(ctx context.Context) (populator.Kins, error) {
	var claims corev1.PersistentVolumeClaimList
	if err := r.Client.List(ctx, &claims, client.MatchingFields{indexKin: "yes"}, client.UnsafeDisableDeepCopy); err != nil || len(claims.Items) == 0 {
		return nil, err
	}
	var list v1alpha1.NodeVolumeList
	if err := r.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	records := map[string]*v1alpha1.NodeVolume{}
	for i := range list.Items {
		if nv := &list.Items[i]; nv.DeletionTimestamp == nil {
			records[nv.Name] = nv
		}
	}
	var members []populator.Member
	for i := range claims.Items {
		claim := &claims.Items[i]
		m := populator.Member{Kin: populator.KinOf(claim)}
		if nv := records[populator.VolumeName(claim)]; nv != nil {
			m.Node, m.Since = nv.Spec.Node, nv.CreationTimestamp.Time
		} else if class, err := r.unplaced(ctx, claim); err != nil {
			return nil, err
		} else if class != nil {
			m.Pool, m.Bytes = class.Pool, populator.NeedOf(claim, class)
		} else {
			continue
		}
		members = append(members, m)
	}
	return populator.KinsOf(members), nil
}

// kinOf is the machine of a claim that is known by name; "" for none.
func (r *Room) kinOf(ctx context.Context, namespace, name string) (string, error) {
	claim := &corev1.PersistentVolumeClaim{}
	if name == "" {
		return "", nil
	}
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, claim)
	return populator.KinOf(claim), client.IgnoreNotFound(err)
}

// unplaced is the class of a claim that is to have a volume from us and has none
// yet; nil for any other.
func (r *Room) unplaced(ctx context.Context, claim *corev1.PersistentVolumeClaim) (*populator.Class, error) {
	name := claim.Spec.StorageClassName
	if claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil || name == nil || *name == "" {
		return nil, nil
	}
	sc := &storagev1.StorageClass{}
	if err := r.Client.Get(ctx, client.ObjectKey{Name: *name}, sc); err != nil || sc.Provisioner != csi.DriverName {
		return nil, client.IgnoreNotFound(err)
	}
	class := classOf(sc)
	if class.Problem != "" {
		return nil, nil
	}
	return class, nil
}

// indexNode lists NodeVolumes by node.
const indexNode = "spec.node"

func recordsOn(ctx context.Context, c client.Reader, node string) ([]v1alpha1.NodeVolume, error) {
	var list v1alpha1.NodeVolumeList
	if err := c.List(ctx, &list, client.MatchingFields{indexNode: node}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	return list.Items, nil
}
