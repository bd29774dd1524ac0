package controllers

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/longshore-io/longshore/api/v1alpha1"
)

const (
	// annotationKeep has the cluster autoscaler leave a node alone.
	annotationKeep = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
	// annotationKeepOurs tells that it was us who set it: an administrator's own stays.
	annotationKeepOurs = "longshore.dev/scale-down-disabled"
)

// NodeKeeper has the cluster autoscaler leave nodes alone that hold volumes: the
// data is there and nowhere else (R6).
type NodeKeeper struct {
	Client client.Client
}

// Reconcile settles one node.
func (k *NodeKeeper) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	node := &corev1.Node{}
	if err := k.Client.Get(ctx, req.NamespacedName, node); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	records, err := recordsOn(ctx, k.Client, node.Name)
	if err != nil {
		return ctrl.Result{}, err
	}
	_, ours := node.Annotations[annotationKeepOurs]
	_, kept := node.Annotations[annotationKeep]
	old := node.DeepCopy()
	switch {
	case len(records) > 0 && !kept:
		if node.Annotations == nil {
			node.Annotations = map[string]string{}
		}
		node.Annotations[annotationKeep], node.Annotations[annotationKeepOurs] = "true", "true"
	case len(records) == 0 && ours:
		delete(node.Annotations, annotationKeep)
		delete(node.Annotations, annotationKeepOurs)
	default:
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, client.IgnoreNotFound(k.Client.Patch(ctx, node, client.MergeFrom(old)))
}

// SetupWithManager starts the reconciler, which hears of records that come and go.
func (k *NodeKeeper) SetupWithManager(mgr ctrl.Manager) error {
	comesOrGoes := predicate.Funcs{UpdateFunc: func(event.UpdateEvent) bool { return false }}
	return ctrl.NewControllerManagedBy(mgr).Named("nodes").
		For(&corev1.Node{}, builder.WithPredicates(comesOrGoes)).
		Watches(&v1alpha1.NodeVolume{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return []reconcile.Request{{NamespacedName: client.ObjectKey{Name: o.(*v1alpha1.NodeVolume).Spec.Node}}}
		}), builder.WithPredicates(comesOrGoes)).
		Complete(k)
}
