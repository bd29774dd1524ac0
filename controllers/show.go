package controllers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/populator"
)

// Events that clients of CDI know by these very names.
const (
	eventSucceeded = "importSucceeded"
	eventFailed    = "importFailed"
)

// conditionReady is a VolumeImportSource's condition.
const conditionReady = "Ready"

// show tells people how things stand: condition, annotations and events of the
// claim, condition and events of the source. What is shown already is not shown again.
func (p *Populate) show(ctx context.Context, s *populator.Seen, a populator.Act) error {
	if s.Claim.DeletionTimestamp != nil {
		return nil
	}
	if !a.Quiet {
		if err := p.annotate(ctx, s); err != nil {
			return err
		}
	}
	if a.Reason == "" || !a.Quiet && shows(s.Claim, a) {
		return nil
	}
	// The claim's condition comes last: until it is there all of this is tried again.
	text := fmt.Sprintf("%s %s: %s", s.Claim.UID, a.Reason, a.Message)
	if p.lastTold(s.Claim) != text {
		if err := p.ready(ctx, s, a); err != nil {
			return err
		}
		p.tell(s, a)
		p.remember(s.Claim, text)
	}
	if a.Quiet {
		return nil
	}
	return p.condition(ctx, s.Claim, a)
}

// tell writes the events of an act.
func (p *Populate) tell(s *populator.Seen, a populator.Act) {
	switch {
	case a.Done:
		p.event(s, corev1.EventTypeNormal, eventSucceeded, a.Message)
	case a.Failed:
		p.event(s, corev1.EventTypeWarning, eventFailed, a.Reason+": "+a.Message)
	case a.Warn:
		p.event(s, corev1.EventTypeWarning, a.Reason, a.Message)
	default:
		p.event(s, corev1.EventTypeNormal, a.Reason, a.Message)
	}
}

func (p *Populate) lastTold(claim *corev1.PersistentVolumeClaim) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.told[client.ObjectKeyFromObject(claim)]
}

func (p *Populate) remember(claim *corev1.PersistentVolumeClaim, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.told == nil {
		p.told = map[types.NamespacedName]string{}
	}
	p.told[client.ObjectKeyFromObject(claim)] = text
}

func (p *Populate) event(s *populator.Seen, kind, reason, message string) {
	p.Events.Event(s.Claim, kind, reason, message)
	if s.Source != nil {
		p.Events.Event(s.Source, kind, reason, fmt.Sprintf("claim %q: %s", s.Claim.Name, message))
	}
}

// conditionOf is the claim's condition Populated as the act has it.
func conditionOf(a populator.Act) corev1.PersistentVolumeClaimCondition {
	c := corev1.PersistentVolumeClaimCondition{Type: v1alpha1.ConditionPopulated, Status: corev1.ConditionFalse, Reason: a.Reason, Message: a.Message, LastTransitionTime: metav1.Now()}
	if a.Done {
		c.Status = corev1.ConditionTrue
	}
	return c
}

// shows tells whether the claim shows the act already.
func shows(claim *corev1.PersistentVolumeClaim, a populator.Act) bool {
	next := conditionOf(a)
	return slices.ContainsFunc(claim.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
		return c.Type == next.Type && c.Status == next.Status && c.Reason == next.Reason && c.Message == next.Message
	})
}

// condition writes the claim's condition Populated and leaves all others alone.
func (p *Populate) condition(ctx context.Context, claim *corev1.PersistentVolumeClaim, a populator.Act) error {
	next, old := conditionOf(a), claim.DeepCopy()
	at := slices.IndexFunc(claim.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool { return c.Type == next.Type })
	if at < 0 {
		claim.Status.Conditions = append(claim.Status.Conditions, next)
	} else {
		if was := claim.Status.Conditions[at]; was.Status == next.Status {
			next.LastTransitionTime = was.LastTransitionTime
		}
		claim.Status.Conditions[at] = next
	}
	return client.IgnoreNotFound(p.Client.Status().Patch(ctx, claim, client.StrategicMergeFrom(old)))
}

// annotate shows phase and progress on the claim, seldom: see populator.Due.
func (p *Populate) annotate(ctx context.Context, s *populator.Seen) error {
	next := populator.Annotations(s.Record)
	before := s.Claim.Annotations
	p.mu.Lock()
	since := time.Since(p.shown[client.ObjectKeyFromObject(s.Claim)])
	p.mu.Unlock()
	if !populator.Due(before, next, since) {
		return nil
	}
	old := s.Claim.DeepCopy()
	if s.Claim.Annotations == nil {
		s.Claim.Annotations = map[string]string{}
	}
	for _, k := range populator.ProgressAnnotations {
		delete(s.Claim.Annotations, k)
	}
	maps.Copy(s.Claim.Annotations, next)
	if err := p.Client.Patch(ctx, s.Claim, client.MergeFrom(old)); err != nil {
		return client.IgnoreNotFound(err)
	}
	p.mu.Lock()
	if p.shown == nil {
		p.shown = map[types.NamespacedName]time.Time{}
	}
	p.shown[client.ObjectKeyFromObject(s.Claim)] = time.Now()
	p.mu.Unlock()
	if s.Record != nil && s.Record.Status.Phase == v1alpha1.PhaseFilling && populator.Decile(next) > populator.Decile(old.Annotations) {
		p.event(s, corev1.EventTypeNormal, populator.ReasonInProgress, s.Record.Status.Progress.Summary)
	}
	return nil
}

// ready writes the condition Ready of the source: how its latest claim fares. The
// published Go type has no conditions, so the object is read and patched untyped.
func (p *Populate) ready(ctx context.Context, s *populator.Seen, a populator.Act) error {
	if s.Source == nil {
		return nil
	}
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(cdiv1.SchemeGroupVersion.WithKind(cdiv1.VolumeImportSourceRef))
	if err := p.Live.Get(ctx, client.ObjectKeyFromObject(s.Source), u); err != nil {
		return client.IgnoreNotFound(err)
	}
	var status struct {
		Conditions []metav1.Condition `json:"conditions,omitempty"`
	}
	if raw, ok := u.Object["status"].(map[string]any); ok {
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw, &status); err != nil {
			return fmt.Errorf("status of VolumeImportSource %s/%s: %w", u.GetNamespace(), u.GetName(), err)
		}
	}
	c := metav1.Condition{Type: conditionReady, Status: metav1.ConditionFalse, Reason: a.Reason, Message: fmt.Sprintf("claim %q: %s", s.Claim.Name, a.Message), ObservedGeneration: u.GetGeneration()}
	if a.Done {
		c.Status = metav1.ConditionTrue
	}
	if !meta.SetStatusCondition(&status.Conditions, c) {
		return nil
	}
	raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&status)
	if err != nil {
		return err
	}
	old := u.DeepCopy()
	u.Object["status"] = raw
	err = p.Client.Patch(ctx, u, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // another claim of the source was quicker, and its news is as good
	}
	return err
}
