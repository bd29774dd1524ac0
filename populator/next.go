// Package populator decides how a claim gets its data, and says which objects that takes.
//
// It knows no client, no clock and no network: Next tells what to do for what
// was seen, and the builders return objects that somebody else writes.
package populator

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
)

// Annotations that Next reads on a claim.
const (
	// AnnotationSelectedNode is the scheduler's choice; for claims that ask for it, ours.
	AnnotationSelectedNode = "volume.kubernetes.io/selected-node"
	// AnnotationImmediate, with whatever value, asks to fill a claim that has no consumer yet.
	AnnotationImmediate = "cdi.kubevirt.io/storage.bind.immediate.requested"
	// AnnotationRetry, when it changes, has a transfer tried again that failed for good.
	AnnotationRetry = "longshore.dev/retry"
	// AnnotationProvisioner is set by Kubernetes on a claim that waits for its volume; by
	// AnnotationBetaProvisioner until it drops that.
	AnnotationProvisioner     = "volume.kubernetes.io/storage-provisioner"
	AnnotationBetaProvisioner = "volume.beta.kubernetes.io/storage-provisioner"
	// AnnotationGroup names claims of a namespace whose volumes shall be on one node.
	AnnotationGroup = "longshore.dev/group"
)

// Reasons of the Populated condition; those of a transfer that goes wrong are the
// node's (nodeplugin/fault), of which these know the ones that they share.
const (
	ReasonWaitsForConsumer   = "WaitForFirstConsumer"
	ReasonWaitsForPod        = "WaitForPod" // mode stage: filled when the first pod uses it
	ReasonScheduled          = "ImportScheduled"
	ReasonGroupSplit         = "GroupSplit" // the volumes of a machine do not fit one node
	ReasonInProgress         = "ImportInProgress"
	ReasonSucceeded          = "ImportSucceeded"
	ReasonPoolFull           = "PoolFull"
	ReasonNoNode             = "NoNode"
	ReasonNodeUnavailable    = "NodeUnavailable"
	ReasonNodeGone           = "NodeGone"
	ReasonNodeError          = "NodeError"
	ReasonSourceNotFound     = "SourceNotFound"
	ReasonSourceReplaced     = "SourceReplaced"
	ReasonSourceNotSupported = "SourceNotSupported"
	ReasonInvalidSource      = "InvalidSource"
	ReasonSecretNotFound     = "SecretNotFound"
	ReasonSecretKeyNotFound  = "SecretKeyNotFound"
	ReasonSecretInvalid      = "SecretInvalid"
	ReasonConfigMapNotFound  = "ConfigMapNotFound"
	ReasonConfigMapInvalid   = "ConfigMapInvalid"
	ReasonClassNotFound      = "StorageClassNotFound"
	ReasonClassInvalid       = "StorageClassInvalid"
	ReasonInvalidClaim       = "InvalidClaim"
	ReasonAddressNotAllowed  = "AddressNotAllowed"
)

// Waits, for what no watch tells of.
const (
	// soon is when a claim is looked at again whose Secret or room is missing.
	soon = 10 * time.Second
	// later is when a transfer that failed for good is compared with its recipe again.
	later = 20 * time.Second
)

// Class is what a StorageClass says of a claim's volume, checked.
type Class struct {
	Name          string
	Pool, FSType  string
	Populate      v1alpha1.PopulateMode
	ReclaimPolicy corev1.PersistentVolumeReclaimPolicy
	MountOptions  []string
	// WaitsForConsumer: volumeBindingMode is WaitForFirstConsumer.
	WaitsForConsumer bool
	// Problem is what is wrong with the parameters; "" when nothing is.
	Problem string
}

// Place is a node where the volume might be.
type Place struct {
	Node string
	// Obstacle is why it cannot be there; "" when it can. Unfit is why we would not put it
	// there, though the scheduler may.
	Obstacle, Unfit string
	// FreeBytes is what the node's pool gives to one more volume; Full what the node said
	// when it refused this very one a moment ago, for it knows better.
	FreeBytes int64
	Full      string
	// Kin: volumes of the same machine are there already. Whole: there is room for all
	// that are still to be placed.
	Kin, Whole bool
}

// Agent is what the node of the record, or the selected node, says.
type Agent struct {
	// Gone: the cluster has no such Node.
	Gone bool
	// Connected: its word is of now. Volume is nil when it knows none of the record's name.
	Connected bool
	Volume    *agentv1.Volume
	// Full is its answer to CreateVolume when it had no room.
	Full string
}

// Seen is everything that Next looks at.
type Seen struct {
	Claim  *corev1.PersistentVolumeClaim
	Class  *Class                    // nil: there is none of that name
	Source *cdiv1.VolumeImportSource // nil: there is none of that name
	Record *v1alpha1.NodeVolume      // nil: none is written
	// HasPV: the PersistentVolume of the record's name exists.
	HasPV  bool
	Places []Place // where there is no record yet
	Agent  Agent
	// Unplaced are the claims of the same machine that have no node, this one among them.
	Unplaced Sum
	// After Resolve one of these is set.
	Recipe     *Recipe
	Unresolved *Problem
}

// Sum is so many claims, and the bytes of their volumes.
type Sum struct {
	Claims int
	Bytes  int64
}

// Deed is what the caller is to do.
type Deed string

const (
	Wait         Deed = "Wait"         // a change, or Retry, will call again
	ChooseNode   Deed = "ChooseNode"   // write Node as the claim's selected node
	LeaveNode    Deed = "LeaveNode"    // release the record, if any, and take the selected node off the claim
	WriteRecord  Deed = "WriteRecord"  // write the NodeVolume, on Node
	AmendRecord  Deed = "AmendRecord"  // give the record the source as it is now
	Release      Deed = "Release"      // delete the record, and with it what the node holds
	CreateVolume Deed = "CreateVolume" // have the node make the volume
	Resolve      Deed = "Resolve"      // read Secrets and ConfigMaps, set Recipe or Unresolved, ask again
	Populate     Deed = "Populate"     // have the node fill the volume by Recipe
	Publish      Deed = "Publish"      // mark the record published and write the PV
)

// Act is what to do, and what the claim shows meanwhile.
type Act struct {
	Do   Deed
	Node string
	// Reason and Message of the condition Populated; no Reason leaves what it shows.
	Reason, Message string
	// Done: the condition is True. Warn: a person is to look at it. Failed: the transfer
	// has ended, and only a person has it tried again.
	Done, Warn, Failed bool
	// Quiet: nothing may be written on the claim now, save its selected node. What is to
	// be shown there shows once it may.
	Quiet bool
	// Retry is when to look again at the latest; 0: when something changes.
	Retry time.Duration
}

// Next tells what to do for s. It looks at nothing else.
//
// Until Kubernetes has named the provisioner on the claim, it is about to write
// there by what it has read before. If somebody else wrote in between, it would
// tell of its failure by an event ProvisioningFailed, which clients (virtctl
// image-upload) take for the end. Only the selected node cannot wait, for that is
// what makes Kubernetes name the provisioner.
func Next(s Seen) Act {
	a := s.next()
	if a.Quiet = Provisioner(s.Claim) == "" && s.Claim.Spec.VolumeName == ""; a.Quiet && a.Do == LeaveNode {
		a.Do = Wait
	}
	return a
}

// Provisioner is whom Kubernetes has asked for the claim's volume; "" for nobody yet.
func Provisioner(claim *corev1.PersistentVolumeClaim) string {
	return cmp.Or(claim.Annotations[AnnotationProvisioner], claim.Annotations[AnnotationBetaProvisioner])
}

// next is Next but for Quiet; the order of the cases is the order of a claim's life.
func (s Seen) next() Act {
	r := s.Record
	switch {
	case s.Claim.DeletionTimestamp != nil:
		return s.withdraw(Act{Do: Wait})
	case r == nil && s.Claim.Spec.VolumeName != "", r != nil && r.Spec.Import == nil:
		return Act{Do: Wait} // a volume that is not ours to fill
	case r != nil && r.DeletionTimestamp != nil:
		return Act{Do: Wait} // the next volume has the same name
	case r != nil && r.Status.Populated && s.HasPV:
		return Act{Do: Wait, Done: true, Reason: ReasonSucceeded, Message: "the volume holds the whole image" + origin(r)}
	}
	if p := s.obstacle(); p != nil && !s.HasPV {
		a := Act{Do: Wait, Reason: p.Reason, Message: p.Message, Warn: true, Retry: retryOf(p)}
		if !p.Terminal {
			return a // the class may come back, and the data with it is still good
		}
		return s.withdraw(a)
	}
	if r != nil && r.Status.Populated {
		return Act{Do: Publish, Reason: ReasonInProgress, Message: "the volume holds the whole image; its PersistentVolume is being written"}
	}
	if p := s.sourceProblem(); p != nil && !s.published() {
		return s.withdraw(Act{Do: Wait, Reason: p.Reason, Message: p.Message, Warn: true, Retry: retryOf(p)})
	}
	if r == nil {
		return s.place()
	}
	if again := s.replaced(); again != nil {
		if s.published() || again.SourceUID != r.Spec.Import.SourceUID && sameRecipe(again, r.Spec.Import) {
			return Act{Do: AmendRecord}
		}
		return Act{Do: Release, Reason: ReasonSourceReplaced, Message: fmt.Sprintf("VolumeImportSource %q was changed: the import starts again", s.Source.Name)}
	}
	if !s.published() && s.Class.WaitsForConsumer {
		switch s.selected() {
		case r.Spec.Node:
		case "":
			return Act{Do: ChooseNode, Node: r.Spec.Node}
		default:
			return Act{Do: Release, Reason: ReasonScheduled, Message: fmt.Sprintf("the scheduler has chosen node %s instead of %s: the import starts again there", s.selected(), r.Spec.Node)}
		}
	}
	return s.onNode()
}

// origin says where the image came from if that was not its source.
func origin(r *v1alpha1.NodeVolume) string {
	if p := r.Status.Progress; p != nil && p.FromCache {
		return ", which node " + r.Spec.Node + " had in its cache"
	}
	return ""
}

// withdraw has the record, if there is one that nobody can have used, released.
func (s Seen) withdraw(a Act) Act {
	if s.Record != nil && !s.published() && s.Record.DeletionTimestamp == nil {
		a.Do = Release
	}
	return a
}

func (s Seen) published() bool { return s.HasPV || s.Record != nil && s.Record.Spec.Published }

func (s Seen) selected() string { return s.Claim.Annotations[AnnotationSelectedNode] }

// obstacle is what is wrong with the claim or its class.
func (s Seen) obstacle() *Problem {
	ref := s.Claim.Spec.DataSourceRef
	switch {
	case s.Class == nil:
		return transient(ReasonClassNotFound, "StorageClass %q does not exist: create it, or make the claim again with another", className(s.Claim))
	case s.Class.Problem != "":
		return terminal(ReasonClassInvalid, "StorageClass %q: %s: make the class again", s.Class.Name, s.Class.Problem)
	case ref != nil && ref.Namespace != nil && *ref.Namespace != s.Claim.Namespace:
		return terminal(ReasonInvalidClaim, "dataSourceRef.namespace is %q: the VolumeImportSource must be in the claim's own namespace %q; leave the field out", *ref.Namespace, s.Claim.Namespace)
	case s.Claim.Spec.Selector != nil:
		return terminal(ReasonInvalidClaim, "spec.selector is set, but the volume is made for the claim: leave it out")
	}
	for _, m := range s.Claim.Spec.AccessModes {
		if m == corev1.ReadWriteMany {
			return terminal(ReasonInvalidClaim, "access mode %s: a volume of a node's pool serves that node only; use ReadWriteOnce or ReadWriteOncePod", m)
		}
	}
	return nil
}

func (s Seen) sourceProblem() *Problem {
	if s.Source == nil {
		return transient(ReasonSourceNotFound, "VolumeImportSource %q does not exist in namespace %q: create it, or make the claim again without it", s.Claim.Spec.DataSourceRef.Name, s.Claim.Namespace)
	}
	if mode := s.Claim.Spec.VolumeMode; s.Source.Spec.ContentType == cdiv1.DataVolumeArchive && mode != nil && *mode == corev1.PersistentVolumeBlock {
		return terminal(ReasonInvalidClaim, "spec.volumeMode is Block, and VolumeImportSource %q has the contentType archive, which is unpacked into a filesystem: make the claim again with volumeMode Filesystem, or use contentType kubevirt", s.Source.Name)
	}
	return CheckSource(s.Source)
}

func retryOf(p *Problem) time.Duration {
	if p.Terminal {
		return 0
	}
	return soon
}

// replaced is the import as the record would have it today; nil when the record is right.
func (s Seen) replaced() *v1alpha1.Import {
	if s.sourceProblem() != nil {
		return nil // published: what is recorded goes on
	}
	if again := ImportOf(s.Source, s.Record.Spec.Import.Mode); !equality.Semantic.DeepEqual(again, s.Record.Spec.Import) {
		return again
	}
	return nil
}

func sameRecipe(a, b *v1alpha1.Import) bool {
	c := *a
	c.SourceUID = b.SourceUID
	return equality.Semantic.DeepEqual(&c, b)
}

// place finds the node for a claim that has none.
func (s Seen) place() Act {
	waits := s.Class.WaitsForConsumer
	_, immediate := s.Claim.Annotations[AnnotationImmediate]
	if waits && s.selected() == "" && !immediate {
		if c := shown(s.Claim); c != nil && c.Reason == ReasonPoolFull {
			return Act{Do: Wait} // the reason that the last node was left is worth more
		}
		return Act{Do: Wait, Reason: ReasonWaitsForConsumer, Message: "the data is fetched on the node of the first pod that uses the claim"}
	}
	if waits && s.selected() != "" {
		return s.placeAt(s.selected())
	}
	best, free, why := choose(s.Places, s.need())
	switch {
	case best != nil:
		a := s.write(best.Node)
		if waits {
			a = Act{Do: ChooseNode, Node: best.Node}
		}
		if s.splits(best) {
			a.Reason, a.Warn = ReasonGroupSplit, true
			a.Message = fmt.Sprintf("no node has room for all volumes of the claim's machine (%d claims of %d bytes in all are still to be placed): this one will be on node %s, the others may not; a pod that uses them together cannot run then; enlarge a pool, or delete volumes and make the claims again", s.Unplaced.Claims, s.Unplaced.Bytes, best.Node)
		}
		return a
	case free >= 0:
		return Act{Do: Wait, Reason: ReasonPoolFull, Message: s.full(free, "") + "; " + why, Warn: true, Retry: soon}
	}
	return Act{Do: Wait, Reason: ReasonNoNode, Message: "no node can take the volume: " + why, Warn: true, Retry: soon}
}

// placeAt judges the node that the scheduler has chosen.
func (s Seen) placeAt(node string) Act {
	if s.Agent.Gone {
		return Act{Do: LeaveNode, Reason: ReasonNodeGone, Message: fmt.Sprintf("node %s, which was chosen, does not exist any more", node), Warn: true}
	}
	if !s.Agent.Connected {
		return s.unavailable(node)
	}
	for _, p := range s.Places {
		switch {
		case p.Node != node:
		case p.Obstacle != "":
			return Act{Do: LeaveNode, Reason: ReasonNoNode, Message: fmt.Sprintf("node %s, which was chosen, cannot take the volume: %s", node, p.Obstacle), Warn: true, Retry: soon}
		case p.Full != "":
			return Act{Do: LeaveNode, Reason: ReasonPoolFull, Message: p.Full, Warn: true, Retry: soon}
		case p.FreeBytes < s.need():
			return Act{Do: LeaveNode, Reason: ReasonPoolFull, Message: s.full(p.FreeBytes, " of node "+node), Warn: true, Retry: soon}
		}
	}
	return s.write(node)
}

func (s Seen) write(node string) Act {
	return Act{Do: WriteRecord, Node: node, Reason: ReasonScheduled, Message: fmt.Sprintf("the import will run on node %s; its progress shows on NodeVolume %s", node, VolumeName(s.Claim))}
}

func (s Seen) need() int64 { return NeedOf(s.Claim, s.Class) }

func (s Seen) full(free int64, of string) string {
	return fmt.Sprintf("pool %q%s has no room: the volume needs %d bytes, %d are free; delete volumes, or enlarge the pool", s.Class.Pool, of, s.need(), max(free, 0))
}

// splits tells whether the volumes of one machine come to lie on several nodes.
func (s Seen) splits(best *Place) bool {
	elsewhere := slices.ContainsFunc(s.Places, func(p Place) bool { return p.Kin })
	return !best.Kin && (elsewhere || !best.Whole)
}

// choose takes the place with room that has kin, then room for all kin, then the
// most free bytes, then the first name. Without one it tells the most free bytes of
// the places that could be (-1: none) and why each is out.
func choose(places []Place, need int64) (best *Place, free int64, why string) {
	var fit []Place
	var out []string
	free = -1
	for _, p := range places {
		switch {
		case p.Obstacle != "" || p.Unfit != "":
			out = append(out, p.Node+": "+cmp.Or(p.Obstacle, p.Unfit))
		case p.Full != "":
			free = max(free, 0)
			out = append(out, p.Node+": "+p.Full)
		case p.FreeBytes < need:
			free = max(free, p.FreeBytes)
			out = append(out, fmt.Sprintf("%s: %d bytes free", p.Node, max(p.FreeBytes, 0)))
		default:
			fit = append(fit, p)
		}
	}
	if len(fit) > 0 {
		p := slices.MinFunc(fit, comparePlaces)
		return &p, 0, ""
	}
	if len(places) == 0 {
		return nil, -1, "the cluster has no node with the Longshore plugin"
	}
	slices.Sort(out)
	if more := len(out) - 5; more > 0 {
		out = append(out[:5], fmt.Sprintf("and %d more nodes", more))
	}
	return nil, free, strings.Join(out, ", ")
}

// comparePlaces puts the better place first.
func comparePlaces(a, b Place) int {
	first := func(a, b bool) int {
		switch {
		case a && !b:
			return -1
		case b && !a:
			return 1
		}
		return 0
	}
	return cmp.Or(first(a.Kin, b.Kin), first(a.Whole, b.Whole), cmp.Compare(b.FreeBytes, a.FreeBytes), strings.Compare(a.Node, b.Node))
}

// onNode goes on with a record whose node is settled.
func (s Seen) onNode() Act {
	r, node := s.Record, s.Record.Spec.Node
	switch {
	case s.Agent.Full != "":
		return s.leave(ReasonPoolFull, s.Agent.Full)
	case s.Agent.Gone && !s.published():
		return s.leave(ReasonNodeGone, fmt.Sprintf("node %s is gone: the import starts again on another", node))
	case !s.Agent.Connected:
		return s.unavailable(node)
	case !r.Status.Created || s.Agent.Volume == nil:
		return Act{Do: CreateVolume}
	case r.Spec.Import.Mode == v1alpha1.PopulateStage && !s.HasPV:
		return Act{Do: Publish, Reason: ReasonWaitsForPod, Message: "the data is fetched when the first pod uses the volume"}
	}
	return s.fill()
}

// leave gives up the record's node for another, unless somebody uses the volume.
func (s Seen) leave(reason, message string) Act {
	a := Act{Do: Release, Reason: reason, Message: message, Warn: true, Retry: soon}
	switch {
	case s.published():
		a.Do = Wait
	case s.Class.WaitsForConsumer:
		a.Do = LeaveNode
	}
	return a
}

func (s Seen) unavailable(node string) Act {
	return Act{Do: Wait, Reason: ReasonNodeUnavailable, Message: fmt.Sprintf("the Longshore plugin of node %s does not answer: the import goes on when it is back", node), Warn: true, Retry: soon}
}

// fill follows the transfer.
func (s Seen) fill() Act {
	v := s.Agent.Volume
	switch v.GetState() {
	case agentv1.State_STATE_POPULATED:
		return Act{Do: Wait} // until the record says so
	case agentv1.State_STATE_FILLING:
		if f := v.GetFailure(); f.GetReason() != "" {
			return Act{Do: Wait, Reason: f.GetReason(), Message: f.GetMessage() + " (it is being tried again)", Warn: true}
		}
		return Act{Do: Wait, Reason: ReasonInProgress, Message: fmt.Sprintf("data comes in on node %s; its progress shows on NodeVolume %s", s.Record.Spec.Node, s.Record.Name)}
	case agentv1.State_STATE_FAILED:
		if f := v.GetFailure(); s.Recipe != nil && s.Recipe.tried(v.GetRecipe(), f.GetReason()) {
			return Act{Do: Wait, Reason: f.GetReason(), Message: f.GetMessage() + s.remedy(f.GetReason()), Warn: true, Failed: true, Retry: later}
		}
	default:
		if s.Record.Spec.Import.Mode == v1alpha1.PopulateStage && !v.GetWanted() {
			return Act{Do: Wait, Reason: ReasonWaitsForPod, Message: "the data is fetched when the first pod uses the volume"}
		}
	}
	switch {
	case s.Unresolved != nil:
		return Act{Do: Wait, Reason: s.Unresolved.Reason, Message: s.Unresolved.Message, Warn: true, Retry: soon}
	case s.Recipe == nil:
		return Act{Do: Resolve}
	}
	return Act{Do: Populate, Reason: ReasonScheduled, Message: fmt.Sprintf("the import starts on node %s; its progress shows on NodeVolume %s", s.Record.Spec.Node, s.Record.Name)}
}

// remedy names what has a failed transfer tried again.
func (s Seen) remedy(failed string) string {
	what := append([]string{fmt.Sprintf("VolumeImportSource %q", s.Record.Spec.Import.SourceName)}, NeedsOf(s.Record.Spec.Import.Source).names()...)
	if failed == ReasonAddressNotAllowed {
		what = append(what, fmt.Sprintf("the addresses of namespace %s's Services", s.Claim.Namespace))
	}
	return fmt.Sprintf(" (not tried again until %s or the claim's annotation %s changes)", strings.Join(what, ", "), AnnotationRetry)
}

func shown(claim *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaimCondition {
	for i, c := range claim.Status.Conditions {
		if string(c.Type) == v1alpha1.ConditionPopulated {
			return &claim.Status.Conditions[i]
		}
	}
	return nil
}

func className(claim *corev1.PersistentVolumeClaim) string {
	if claim.Spec.StorageClassName == nil {
		return ""
	}
	return *claim.Spec.StorageClassName
}
