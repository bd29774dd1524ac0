package populator

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
)

const size = 64 * mib

// A story is told by changing what is seen; each function is one clause of a sentence.
type clause func(*Seen)

func seen(clauses ...clause) Seen {
	class := "fast"
	group := "cdi.kubevirt.io"
	s := Seen{
		Claim: &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: "disk", UID: "7", Annotations: map[string]string{AnnotationProvisioner: "csi.longshore.dev"}},
			Spec: corev1.PersistentVolumeClaimSpec{
				StorageClassName: &class,
				AccessModes:      []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:        corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(size, resource.BinarySI)}},
				DataSourceRef:    &corev1.TypedObjectReference{APIGroup: &group, Kind: "VolumeImportSource", Name: "image"},
			},
		},
		Class: &Class{Name: "fast", Pool: "default", Populate: v1alpha1.PopulateBind, ReclaimPolicy: corev1.PersistentVolumeReclaimDelete},
		Source: &cdiv1.VolumeImportSource{
			ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: "image", UID: "8"},
			Spec:       cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{HTTP: &cdiv1.DataVolumeSourceHTTP{URL: "https://example.com/disk.qcow2", SecretRef: "login"}}},
		},
		Places: []Place{{Node: "a", FreeBytes: size, Whole: true}, {Node: "b", FreeBytes: 4 * size, Whole: true}, {Node: "c", FreeBytes: 2 * size, Whole: true}},
	}
	for _, c := range clauses {
		c(&s)
	}
	return s
}

func waits(s *Seen)      { s.Class.WaitsForConsumer = true }
func stage(s *Seen)      { s.Class.Populate = v1alpha1.PopulateStage }
func connected(s *Seen)  { s.Agent.Connected = true }
func noClass(s *Seen)    { s.Class = nil }
func noSource(s *Seen)   { s.Source = nil }
func pv(s *Seen)         { s.HasPV = true; s.Record.Spec.Published = true }
func published(s *Seen)  { s.Record.Spec.Published = true }
func populated(s *Seen)  { s.Record.Status.Populated = true }
func created(s *Seen)    { s.Record.Status.Created = true }
func releasing(s *Seen)  { s.Record.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }
func deleted(s *Seen)    { s.Claim.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }
func immediate(s *Seen)  { s.Claim.Annotations[AnnotationImmediate] = "" }
func nodeGone(s *Seen)   { s.Agent.Gone = true }
func unresolved(s *Seen) { s.Unresolved = transient("SecretNotFound", "Secret %q", "login") }
func recipe(s *Seen)     { s.Recipe = &Recipe{Digest: "new"} }
func unasked(s *Seen)    { delete(s.Claim.Annotations, AnnotationProvisioner) }
func wanted(s *Seen)     { s.Agent.Volume.Wanted = true }
func changed(s *Seen)    { s.Source.Spec.Source.HTTP.URL = "https://example.com/other.qcow2" }
func remade(s *Seen)     { s.Source.UID = "9" }
func s3(s *Seen) {
	s.Source.Spec.Source = &cdiv1.ImportSourceType{S3: &cdiv1.DataVolumeSourceS3{}}
}
func selected(node string) clause {
	return func(s *Seen) { s.Claim.Annotations[AnnotationSelectedNode] = node }
}
func record(node string) clause {
	return func(s *Seen) { s.Record = Record(s.Claim, s.Class, s.Source, node) }
}
func volume(state agentv1.State) clause {
	return func(s *Seen) {
		s.Agent = Agent{Connected: true, Volume: &agentv1.Volume{State: state, Recipe: "old"}}
		s.Record.Status.Created = true
	}
}
func failure(terminal bool) clause {
	return func(s *Seen) {
		s.Agent.Volume.Failure = &agentv1.Failure{Terminal: terminal, Reason: "Unauthorized", Message: "401"}
	}
}
func refused(s *Seen) {
	s.Agent.Volume.Recipe = Recipe{Digest: "old"}.Attempt()
	s.Agent.Volume.Failure = &agentv1.Failure{Terminal: true, Reason: ReasonAddressNotAllowed, Message: "10.0.0.7"}
}
func showing(reason string) clause {
	return func(s *Seen) {
		s.Claim.Status.Conditions = []corev1.PersistentVolumeClaimCondition{{Type: v1alpha1.ConditionPopulated, Status: "False", Reason: reason}}
	}
}
func free(bytes int64) clause {
	return func(s *Seen) {
		for i := range s.Places {
			s.Places[i].FreeBytes = bytes
		}
	}
}

type story struct {
	when   string
	seen   Seen
	do     Deed
	node   string
	reason string
	words  string
}

// stories are the lives of claims, told in the order of life.
func stories() []story {
	const (
		empty   = agentv1.State_STATE_EMPTY
		filling = agentv1.State_STATE_FILLING
		failed  = agentv1.State_STATE_FAILED
		full    = agentv1.State_STATE_POPULATED
	)
	other := "other"
	return []story{
		{"a claim that waits for its consumer has none", seen(waits), Wait, "", ReasonWaitsForConsumer, "first pod"},
		{"its last node was full, and the scheduler has not chosen again", seen(waits, showing(ReasonPoolFull)), Wait, "", "", ""},
		{"nobody consumes it, but it shall be filled at once", seen(waits, immediate), ChooseNode, "b", "", ""},
		{"the same, and no node has room", seen(waits, immediate, free(mib)), Wait, "", ReasonPoolFull, "needs 67108864 bytes, 1048576 are free"},
		{"the scheduler has chosen a node", seen(waits, selected("c"), connected), WriteRecord, "c", ReasonScheduled, "c"},
		{"the chosen node has no plugin", seen(waits, selected("c")), Wait, "", ReasonNodeUnavailable, "c"},
		{"the chosen node is too small", seen(waits, selected("a"), connected, free(mib)), LeaveNode, "", ReasonPoolFull, "of node a"},
		{"the chosen node has no such pool", seen(waits, selected("a"), connected, func(s *Seen) { s.Places[0].Obstacle = "no pool" }), LeaveNode, "", ReasonNoNode, "no pool"},
		{"the chosen node is cordoned since", seen(waits, selected("a"), connected, func(s *Seen) { s.Places[0].Unfit = "cordoned" }), WriteRecord, "a", ReasonScheduled, ""},
		{"the chosen node is too small, and Kubernetes has not asked for the volume yet", seen(waits, selected("a"), connected, free(mib), unasked), Wait, "", ReasonPoolFull, "of node a"},
		{"the chosen node is gone", seen(waits, selected("z"), nodeGone), LeaveNode, "", ReasonNodeGone, "z"},
		{"an immediate claim goes where most is free", seen(), WriteRecord, "b", ReasonScheduled, "b"},
		{"an immediate claim goes to its kin", seen(func(s *Seen) { s.Places[0].Kin = true }), WriteRecord, "a", ReasonScheduled, ""},
		{"kin without room does not help", seen(func(s *Seen) { s.Places[0] = Place{Node: "a", Kin: true} }), WriteRecord, "b", ReasonGroupSplit, "on node b"},
		{"one node has room for all kin, another more room for this one", seen(func(s *Seen) { s.Places[1].Whole = false }), WriteRecord, "c", ReasonScheduled, ""},
		{"no node has room for all kin", seen(func(s *Seen) {
			s.Unplaced = Sum{Claims: 3, Bytes: 9 * size}
			for i := range s.Places {
				s.Places[i].Whole = false
			}
		}), WriteRecord, "b", ReasonGroupSplit, "3 claims of 603979776 bytes"},
		{"the same on a class that waits", seen(waits, immediate, func(s *Seen) {
			for i := range s.Places {
				s.Places[i].Whole = false
			}
		}), ChooseNode, "b", ReasonGroupSplit, "on node b"},
		{"kin is on a node that has no room for the rest", seen(func(s *Seen) { s.Places[0].Kin, s.Places[0].Whole = true, false }), WriteRecord, "a", ReasonScheduled, ""},
		{"the best node is cordoned", seen(func(s *Seen) { s.Places[1].Unfit = "cordoned" }), WriteRecord, "c", ReasonScheduled, ""},
		{"the best node has refused the volume a moment ago", seen(func(s *Seen) { s.Places[1].Full = "disk is full" }), WriteRecord, "c", ReasonScheduled, ""},
		{"so have all", seen(func(s *Seen) {
			for i := range s.Places {
				s.Places[i].Full = "disk is full"
			}
		}), Wait, "", ReasonPoolFull, "b: disk is full"},
		{"so has the chosen node", seen(waits, selected("b"), connected, func(s *Seen) { s.Places[1].Full = "disk is full" }), LeaveNode, "", ReasonPoolFull, "disk is full"},
		{"equal nodes go by name", seen(free(size)), WriteRecord, "a", ReasonScheduled, ""},
		{"no node has room", seen(free(mib)), Wait, "", ReasonPoolFull, "needs 67108864 bytes, 1048576 are free"},
		{"no node is fit", seen(func(s *Seen) {
			for i := range s.Places {
				s.Places[i].Unfit = "cordoned"
			}
		}), Wait, "", ReasonNoNode, "a: cordoned, b: cordoned"},
		{"there is no node", seen(func(s *Seen) { s.Places = nil }), Wait, "", ReasonNoNode, "no node"},

		{"the source does not exist", seen(noSource), Wait, "", ReasonSourceNotFound, `"image"`},
		{"the source is of a kind to come", seen(s3), Wait, "", "SourceNotSupported", "s3"},
		{"the source is in another namespace", seen(func(s *Seen) { s.Claim.Spec.DataSourceRef.Namespace = &other }), Wait, "", ReasonInvalidClaim, `"other"`},
		{"many nodes shall write", seen(func(s *Seen) { s.Claim.Spec.AccessModes[0] = corev1.ReadWriteMany }), Wait, "", ReasonInvalidClaim, "ReadWriteMany"},
		{"an archive for a block volume", seen(func(s *Seen) {
			s.Claim.Spec.VolumeMode = new(corev1.PersistentVolumeBlock)
			s.Source.Spec.ContentType = "archive"
		}), Wait, "", ReasonInvalidClaim, "volumeMode Filesystem"},
		{"the claim selects volumes", seen(func(s *Seen) { s.Claim.Spec.Selector = &metav1.LabelSelector{} }), Wait, "", ReasonInvalidClaim, "selector"},
		{"the class does not exist", seen(noClass), Wait, "", ReasonClassNotFound, `"fast"`},
		{"the class has a wrong parameter", seen(func(s *Seen) { s.Class.Problem = "parameter x" }), Wait, "", ReasonClassInvalid, "parameter x"},
		{"the claim is bound to somebody else's volume", seen(func(s *Seen) { s.Claim.Spec.VolumeName = "pv" }), Wait, "", "", ""},
		{"the record is of a volume that nobody fills", seen(record("b"), func(s *Seen) { s.Record.Spec.Import = nil }), Wait, "", "", ""},

		{"the node has not made the volume", seen(record("b"), connected), CreateVolume, "", "", ""},
		{"the node turned out full", seen(record("b"), connected, func(s *Seen) { s.Agent.Full = "full" }), Release, "", ReasonPoolFull, "full"},
		{"the scheduler's node turned out full", seen(waits, selected("b"), record("b"), connected, func(s *Seen) { s.Agent.Full = "full" }), LeaveNode, "", ReasonPoolFull, "full"},
		{"the node of a bound claim has no room to make its volume again", seen(stage, record("b"), connected, pv, func(s *Seen) { s.Agent.Full = "full" }), Wait, "", ReasonPoolFull, "full"},
		{"the node does not answer", seen(record("b")), Wait, "", ReasonNodeUnavailable, "b"},
		{"the node is gone before the volume was used", seen(record("b"), nodeGone), Release, "", ReasonNodeGone, "b"},
		{"the scheduler's node is gone before the volume was used", seen(waits, selected("b"), record("b"), nodeGone), LeaveNode, "", ReasonNodeGone, "b"},
		{"the node is gone, and somebody may use the volume", seen(record("b"), nodeGone, published), Wait, "", ReasonNodeUnavailable, ""},
		{"the node has lost the volume", seen(record("b"), connected, created), CreateVolume, "", "", ""},
		{"the last record still goes", seen(record("b"), releasing), Wait, "", "", ""},
		{"the scheduler has changed its mind", seen(waits, selected("c"), record("b"), connected), Release, "", ReasonScheduled, "c instead of b"},
		{"somebody took the selected node away", seen(waits, record("b"), connected), ChooseNode, "b", "", ""},

		{"the volume is empty", seen(record("b"), volume(empty)), Resolve, "", "", ""},
		{"the volume is empty and the recipe known", seen(record("b"), volume(empty), recipe), Populate, "", ReasonScheduled, "b"},
		{"the volume is empty and a Secret missing", seen(record("b"), volume(empty), unresolved), Wait, "", "SecretNotFound", "login"},
		{"data comes", seen(record("b"), volume(filling)), Wait, "", ReasonInProgress, "pvc-7"},
		{"data shall come again", seen(record("b"), volume(filling), failure(false)), Wait, "", "Unauthorized", "401 (it is being tried again)"},
		{"the transfer failed for good", seen(record("b"), volume(failed), failure(true)), Resolve, "", "", ""},
		{"it failed for good by the very recipe", seen(record("b"), volume(failed), failure(true), func(s *Seen) { s.Recipe = &Recipe{Digest: "old"} }), Wait, "", "Unauthorized", `401 (not tried again until VolumeImportSource "image", Secret "login" or the claim's annotation longshore.dev/retry changes)`},
		{"it failed for good by the very recipe, when other Services were there", seen(record("b"), volume(failed), failure(true), func(s *Seen) {
			s.Recipe = &Recipe{Digest: "old", Reach: Reach{Services: []string{"10.0.0.7"}}}
		}), Wait, "", "Unauthorized", "401"},
		{"it was refused an address, and is still", seen(record("b"), volume(failed), refused, func(s *Seen) {
			s.Recipe = &Recipe{Digest: "old", Reach: Reach{Cluster: []string{"10.0.0.0/8"}}}
		}), Wait, "", ReasonAddressNotAllowed, "the addresses of namespace tenant's Services"},
		{"it was refused an address, and the namespace has other Services now", seen(record("b"), volume(failed), refused, func(s *Seen) {
			s.Recipe = &Recipe{Digest: "old", Reach: Reach{Services: []string{"10.0.0.7"}}}
		}), Populate, "", ReasonScheduled, ""},
		{"it failed for good by another recipe", seen(record("b"), volume(failed), failure(true), recipe), Populate, "", ReasonScheduled, ""},
		{"it failed for good and now the Secret is gone", seen(record("b"), volume(failed), failure(true), unresolved), Wait, "", "SecretNotFound", ""},
		{"the node has all data, the record does not say so yet", seen(record("b"), volume(full)), Wait, "", "", ""},
		{"the record says that all data is there", seen(record("b"), volume(full), populated), Publish, "", ReasonInProgress, ""},
		{"all data is there and the source is gone", seen(record("b"), volume(full), populated, noSource), Publish, "", ReasonInProgress, ""},
		{"all data is there and the class is gone", seen(record("b"), volume(full), populated, noClass), Wait, "", ReasonClassNotFound, ""},
		{"all data is there and the node does not answer", seen(record("b"), created, populated), Publish, "", ReasonInProgress, ""},
		{"the volume is published", seen(record("b"), volume(full), populated, pv), Wait, "", ReasonSucceeded, ""},
		{"the volume is published, and its disk came from the cache", seen(record("b"), volume(full), populated, pv, func(s *Seen) { s.Record.Status.Progress = &v1alpha1.Progress{FromCache: true} }), Wait, "", ReasonSucceeded, "which node b had in its cache"},
		{"the volume is published, its class and source are gone", seen(record("b"), volume(full), populated, pv, noClass, noSource), Wait, "", ReasonSucceeded, ""},

		{"a volume that is filled on demand is published first", seen(stage, record("b"), volume(empty)), Publish, "", ReasonWaitsForPod, ""},
		{"it was marked, and the PV not written", seen(stage, record("b"), volume(empty), published), Publish, "", ReasonWaitsForPod, ""},
		{"it is published and nobody wants it", seen(stage, record("b"), volume(empty), pv), Wait, "", ReasonWaitsForPod, ""},
		{"a pod wants it", seen(stage, record("b"), volume(empty), pv, wanted), Resolve, "", "", ""},
		{"a pod wants it and the recipe is known", seen(stage, record("b"), volume(empty), pv, wanted, recipe), Populate, "", ReasonScheduled, ""},
		{"a pod wants it and the source is gone", seen(stage, record("b"), volume(empty), pv, wanted, recipe, noSource), Populate, "", ReasonScheduled, ""},
		{"a pod wants it and the class is gone", seen(stage, record("b"), volume(empty), pv, wanted, recipe, noClass), Populate, "", ReasonScheduled, ""},
		{"a pod wants it and the scheduler's annotation differs", seen(stage, waits, selected("c"), record("b"), volume(empty), pv, wanted, recipe), Populate, "", ReasonScheduled, ""},
		{"a pod wants it and the source has changed", seen(stage, record("b"), volume(empty), pv, wanted, recipe, changed), AmendRecord, "", "", ""},
		{"a pod wants it and the source has become one to come", seen(stage, record("b"), volume(empty), pv, wanted, recipe, s3), Populate, "", ReasonScheduled, ""},

		{"the claim goes in mid-transfer", seen(record("b"), volume(filling), deleted), Release, "", "", ""},
		{"the claim goes before anything was written", seen(deleted), Wait, "", "", ""},
		{"the claim of a published volume goes", seen(record("b"), volume(filling), pv, deleted), Wait, "", "", ""},
		{"the source goes in mid-transfer", seen(record("b"), volume(filling), noSource), Release, "", ReasonSourceNotFound, "create it"},
		{"the source changes in mid-transfer", seen(record("b"), volume(filling), changed), Release, "", ReasonSourceReplaced, "starts again"},
		{"the source is made again as it was", seen(record("b"), volume(filling), remade), AmendRecord, "", "", ""},
		{"the source is made again otherwise", seen(record("b"), volume(filling), remade, changed), Release, "", ReasonSourceReplaced, ""},
		{"the class goes in mid-transfer", seen(record("b"), volume(filling), noClass), Wait, "", ReasonClassNotFound, ""},
	}
}

func TestNext(t *testing.T) {
	for _, r := range stories() {
		t.Run(r.when, func(t *testing.T) {
			a := Next(r.seen)
			if a.Do != r.do || a.Node != r.node || a.Reason != r.reason || !strings.Contains(a.Message, r.words) {
				t.Errorf("got %+v\nwant %s %q, reason %s, words %q", a, r.do, r.node, r.reason, r.words)
			}
			if a.Reason != "" && a.Message == "" {
				t.Error("a reason without a message")
			}
			if a.Done != (a.Reason == ReasonSucceeded) {
				t.Errorf("Done is %v", a.Done)
			}
		})
	}
}

// Whatever is seen: data that somebody may have used is never released, and data
// that is complete never waits for its source.
func TestNextNeverReleasesWhatIsPublished(t *testing.T) {
	all := map[string]clause{"waits": waits, "elsewhere": selected("z"), "noClass": noClass, "noSource": noSource, "changed": func(s *Seen) {
		if s.Source != nil {
			changed(s)
		}
	}, "deleted": deleted, "nodeGone": nodeGone, "full": func(s *Seen) { s.Agent.Full = "full" }, "connected": connected}
	names := make([]string, 0, len(all))
	for n := range all {
		names = append(names, n)
	}
	for mask := range 1 << len(names) {
		for _, p := range []clause{published, pv} {
			cs := []clause{record("b"), p, created}
			var told []string
			for i, n := range names {
				if mask&(1<<i) != 0 && n != "noClass" {
					cs, told = append(cs, all[n]), append(told, n)
				}
			}
			if mask&1 != 0 {
				cs, told = append(cs, noClass), append(told, "noClass")
			}
			if a := Next(seen(cs...)); a.Do == Release || a.Do == LeaveNode {
				t.Fatalf("%v: %+v", told, a)
			}
		}
	}
}

// Until Kubernetes has named the provisioner, nobody but it writes on the claim,
// save that a node is written where there is none (R5).
func TestNextIsQuietUntilKubernetesHasAsked(t *testing.T) {
	for _, r := range stories() {
		loud := Next(r.seen)
		if r.seen.Claim.Annotations[AnnotationProvisioner] != "" && loud.Quiet {
			t.Errorf("%s: quiet although Kubernetes has asked", r.when)
		}
		s := r.seen
		s.Claim = s.Claim.DeepCopy()
		delete(s.Claim.Annotations, AnnotationProvisioner)
		a := Next(s)
		switch bound := s.Claim.Spec.VolumeName != ""; {
		case a.Quiet == bound:
			t.Errorf("%s: quiet is %v, bound %v", r.when, a.Quiet, bound)
		case bound:
		case a.Do == LeaveNode, a.Do == ChooseNode && s.selected() != "":
			t.Errorf("%s: %s of a claim with the selected node %q", r.when, a.Do, s.selected())
		}
		s.Claim.Annotations[AnnotationBetaProvisioner] = "csi.longshore.dev"
		if again := Next(s); again.Quiet {
			t.Errorf("%s: quiet although Kubernetes has asked by the older name", r.when)
		}
	}
}
