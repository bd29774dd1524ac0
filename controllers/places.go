package controllers

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
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
// records that the node has not made yet; obstacle says why it gives none at all.
func (r *Room) Free(ctx context.Context, node, pool string) (bytes int64, obstacle string, err error) {
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
	free := p.GetAvailableBytes()
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

// Places judges all nodes with a plugin for one claim.
func (r *Room) Places(ctx context.Context, claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, pool string) ([]populator.Place, error) {
	kin, err := r.kin(ctx, claim)
	if err != nil {
		return nil, err
	}
	var places []populator.Place
	for name := range r.Agents.Nodes() {
		node := &corev1.Node{}
		if err := r.Client.Get(ctx, client.ObjectKey{Name: name}, node); apierrors.IsNotFound(err) {
			continue
		} else if err != nil {
			return nil, err
		}
		free, obstacle, err := r.Free(ctx, name, pool)
		if err != nil {
			return nil, err
		}
		places = append(places, populator.Place{Node: name, Obstacle: obstacle, Unfit: unfit(node, class.AllowedTopologies), FreeBytes: free, Kin: kin[name]})
	}
	return places, nil
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

// kin finds the nodes with volumes of claims of the same machine (R4).
func (r *Room) kin(ctx context.Context, claim *corev1.PersistentVolumeClaim) (map[string]bool, error) {
	key := populator.KinOf(claim)
	if key == "" {
		return nil, nil
	}
	var claims corev1.PersistentVolumeClaimList
	if err := r.Client.List(ctx, &claims, client.InNamespace(claim.Namespace)); err != nil {
		return nil, err
	}
	nodes := map[string]bool{}
	for i := range claims.Items {
		other := &claims.Items[i]
		if other.UID == claim.UID || populator.KinOf(other) != key {
			continue
		}
		nv := &v1alpha1.NodeVolume{}
		err := r.Client.Get(ctx, types.NamespacedName{Name: populator.VolumeName(other)}, nv)
		if client.IgnoreNotFound(err) != nil {
			return nil, err
		}
		if err == nil {
			nodes[nv.Spec.Node] = true
		}
	}
	return nodes, nil
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
