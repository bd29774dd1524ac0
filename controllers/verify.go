package controllers

import (
	"context"
	"errors"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

const (
	eventVerified    = "ContentVerified"
	eventDiffers     = "ContentDiffers"
	eventNotVerified = "ContentNotVerified"

	// verifyAgain is when a node that could not answer is asked again.
	verifyAgain = 10 * time.Second
	// verifyAtOnce is how many volumes are read at once, in the whole cluster.
	verifyAtOnce = 4
)

// Verify compares the volumes of claims that ask for it with what filled them.
type Verify struct {
	Client client.Client
	Agents *Agents
	Events record.EventRecorder
}

// Reconcile answers one claim.
func (v *Verify) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	claim := &corev1.PersistentVolumeClaim{}
	if err := v.Client.Get(ctx, req.NamespacedName, claim); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !asksToVerify(claim) {
		return ctrl.Result{}, nil
	}
	nv := &v1alpha1.NodeVolume{}
	if err := v.Client.Get(ctx, client.ObjectKey{Name: claim.Spec.VolumeName}, nv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err) // a volume of another driver
	}
	kind, reason := corev1.EventTypeNormal, eventVerified
	var answer string
	r, err := v.Agents.Verify(ctx, nv.Spec.Node, nv.Name)
	switch {
	case ctx.Err() != nil:
		return ctrl.Result{}, nil
	case errors.Is(err, csi.ErrUnavailable), errors.Is(err, csi.ErrBusy):
		v.Events.Event(claim, corev1.EventTypeNormal, eventNotVerified, "tried again until it is possible: "+err.Error())
		return ctrl.Result{RequeueAfter: verifyAgain}, nil
	case err != nil:
		kind, reason, answer = corev1.EventTypeWarning, eventNotVerified, "not verified: "+err.Error()
	case r.GetDifference() != "":
		kind, reason, answer = corev1.EventTypeWarning, eventDiffers, "differs from what it was filled with ("+r.GetDigest()+"): "+r.GetDifference()
	default:
		answer = "is what it was filled with (" + r.GetDigest() + ")"
	}
	old := claim.DeepCopy()
	claim.Annotations[populator.AnnotationVerified] = claim.Annotations[populator.AnnotationVerify] + ": " + time.Now().UTC().Format(time.RFC3339) + " " + answer
	if err := v.Client.Patch(ctx, claim, client.MergeFrom(old)); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	v.Events.Event(claim, kind, reason, "the volume "+answer)
	return ctrl.Result{}, nil
}

// asksToVerify tells whether a claim with a volume asks for something that is not answered.
func asksToVerify(o client.Object) bool {
	claim, ok := o.(*corev1.PersistentVolumeClaim)
	if !ok || claim.Spec.VolumeName == "" {
		return false
	}
	wants := claim.Annotations[populator.AnnotationVerify]
	return wants != "" && !strings.HasPrefix(claim.Annotations[populator.AnnotationVerified], wants+": ")
}

// SetupWithManager starts the reconciler.
func (v *Verify) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("verify").
		For(&corev1.PersistentVolumeClaim{}, builder.WithPredicates(predicate.NewPredicateFuncs(asksToVerify))).
		WithOptions(concurrency(verifyAtOnce)).
		Complete(v)
}
