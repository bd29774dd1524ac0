package controllers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

// Populate fills claims of our classes whose dataSourceRef is a VolumeImportSource.
type Populate struct {
	Client client.Client
	// Live reads Secrets and ConfigMaps, which are not cached, and what must be of now.
	Live    client.Reader
	Agents  *Agents
	Room    *Room
	Network *Network
	Events  record.EventRecorder
	// DigestKey makes the digests of recipes; see populator.RecipeOf.
	DigestKey []byte

	mu      sync.Mutex
	waiting map[reconcile.Request]bool         // for room, or for a node
	shown   map[types.NamespacedName]time.Time // when a claim's annotations were last changed
	told    map[types.NamespacedName]string    // the last event about a claim
	refused map[types.NamespacedName]refusal   // by a node that had no room
}

// refusal is a node's word that it has no room for a claim's volume. It stands for a
// while, or until the node's pools change: what the node says of its room may differ
// (the pool is still to be made, say), and the claim would go to and fro.
type refusal struct {
	node, why string
	until     time.Time
}

const refusalStands = 10 * time.Second

// Reconcile looks, decides, does one thing, and shows it.
func (p *Populate) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	s, err := p.see(ctx, req.NamespacedName)
	if err != nil {
		return ctrl.Result{}, err
	}
	if s == nil {
		p.forget(req)
		return ctrl.Result{}, nil
	}
	act, err := p.act(ctx, s)
	if err == nil {
		err = p.show(ctx, s, act)
	}
	if err == nil && act.Do == populator.LeaveNode {
		// Last: whoever sees the claim without its node sees also why.
		err = p.selectNode(ctx, s.Claim, "")
	}
	p.wait(req, act.Reason == populator.ReasonPoolFull || act.Reason == populator.ReasonNoNode || act.Reason == populator.ReasonNodeUnavailable)
	if err != nil {
		return quietly(ctrl.Result{}, err)
	}
	return ctrl.Result{RequeueAfter: act.Retry}, nil
}

// see gathers what there is to see of a claim; nil when it is not ours to fill.
func (p *Populate) see(ctx context.Context, key types.NamespacedName) (*populator.Seen, error) {
	s := &populator.Seen{Claim: &corev1.PersistentVolumeClaim{}}
	if err := p.Client.Get(ctx, key, s.Claim); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	if sourceOf(s.Claim) == "" || s.Claim.Spec.StorageClassName == nil || *s.Claim.Spec.StorageClassName == "" {
		return nil, nil
	}
	class := &storagev1.StorageClass{}
	if found, err := p.get(ctx, client.ObjectKey{Name: *s.Claim.Spec.StorageClassName}, class); err != nil {
		return nil, err
	} else if found && class.Provisioner == csi.DriverName {
		s.Class = classOf(class)
	} else if found || populator.Provisioner(s.Claim) != csi.DriverName {
		return nil, nil
	}
	record, pv := &v1alpha1.NodeVolume{}, &corev1.PersistentVolume{}
	name := client.ObjectKey{Name: populator.VolumeName(s.Claim)}
	found, err := p.get(ctx, name, record)
	if err != nil {
		return nil, err
	}
	if found {
		s.Record = record
	}
	if s.HasPV, err = p.get(ctx, name, pv); err != nil {
		return nil, err
	}
	src := &cdiv1.VolumeImportSource{}
	if found, err = p.get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: s.Claim.Spec.DataSourceRef.Name}, src); err != nil {
		return nil, err
	} else if found {
		s.Source = src
	}
	if s.Record == nil && s.Class != nil {
		if s.Places, s.Unplaced, err = p.Room.Places(ctx, s.Claim, class, s.Class.Pool); err != nil {
			return nil, err
		}
		for i := range s.Places {
			s.Places[i].Full = p.refusedBy(key, s.Places[i].Node)
		}
	}
	return s, p.seeNode(ctx, s)
}

func (p *Populate) seeNode(ctx context.Context, s *populator.Seen) error {
	node := s.Claim.Annotations[populator.AnnotationSelectedNode]
	if s.Record != nil {
		node = s.Record.Spec.Node
	}
	if node == "" {
		return nil
	}
	there, err := p.get(ctx, client.ObjectKey{Name: node}, &corev1.Node{})
	if err != nil {
		return err
	}
	v, connected := p.Agents.Volume(node, populator.VolumeName(s.Claim))
	s.Agent = populator.Agent{Gone: !there && !connected, Connected: connected, Volume: v}
	return nil
}

func (p *Populate) get(ctx context.Context, key client.ObjectKey, o client.Object) (found bool, err error) {
	err = p.Client.Get(ctx, key, o)
	return err == nil, client.IgnoreNotFound(err)
}

// sourceOf is the name of the VolumeImportSource that a claim refers to; "" for none.
func sourceOf(claim *corev1.PersistentVolumeClaim) string {
	ref := claim.Spec.DataSourceRef
	if ref == nil || ref.APIGroup == nil || *ref.APIGroup != cdiv1.SchemeGroupVersion.Group || ref.Kind != cdiv1.VolumeImportSourceRef {
		return ""
	}
	return ref.Name
}

// act does what Next tells. Where that brings to light what Next did not know, it asks again.
func (p *Populate) act(ctx context.Context, s *populator.Seen) (populator.Act, error) {
	for {
		a := populator.Next(*s)
		switch a.Do {
		case populator.Wait:
			return a, nil
		case populator.ChooseNode:
			return a, p.selectNode(ctx, s.Claim, a.Node)
		case populator.Release, populator.LeaveNode: // Reconcile takes the selected node off
			return a, p.release(ctx, s.Record)
		case populator.WriteRecord:
			return a, p.Client.Create(ctx, populator.Record(s.Claim, s.Class, s.Source, a.Node))
		case populator.AmendRecord:
			return a, p.amend(ctx, s.Record, func(spec *v1alpha1.NodeVolumeSpec) { spec.Import = populator.ImportOf(s.Source, spec.Import.Mode) })
		case populator.Publish:
			return a, p.publish(ctx, s)
		case populator.Populate:
			if err := p.reach(ctx, s); err != nil {
				return a, err
			}
			return p.onNode(ctx, s, a, p.populate)
		case populator.CreateVolume:
			if a, err := p.onNode(ctx, s, a, p.createVolume); err != nil || s.Agent.Full == "" {
				return a, err
			}
		case populator.Resolve:
			if err := p.resolve(ctx, s); err != nil {
				return a, err
			}
		}
	}
}

// release deletes the very record that was seen.
func (p *Populate) release(ctx context.Context, record *v1alpha1.NodeVolume) error {
	if record == nil {
		return nil
	}
	return client.IgnoreNotFound(p.Client.Delete(ctx, record, client.Preconditions{UID: &record.UID, ResourceVersion: &record.ResourceVersion}))
}

// selectNode writes the claim's node, as the scheduler does; "" takes it off.
func (p *Populate) selectNode(ctx context.Context, claim *corev1.PersistentVolumeClaim, node string) error {
	old := claim.DeepCopy()
	if claim.Annotations == nil {
		claim.Annotations = map[string]string{}
	}
	claim.Annotations[populator.AnnotationSelectedNode] = node
	if node == "" {
		delete(claim.Annotations, populator.AnnotationSelectedNode)
	}
	return p.Client.Patch(ctx, claim, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{}))
}

func (p *Populate) amend(ctx context.Context, record *v1alpha1.NodeVolume, change func(*v1alpha1.NodeVolumeSpec)) error {
	old := record.DeepCopy()
	change(&record.Spec)
	return p.Client.Patch(ctx, record, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{}))
}

// publish marks the record, from then on only a person throws the data away, and
// writes the PV, if the claim is still the one that it is for.
func (p *Populate) publish(ctx context.Context, s *populator.Seen) error {
	claim := &corev1.PersistentVolumeClaim{}
	if err := p.Live.Get(ctx, client.ObjectKeyFromObject(s.Claim), claim); err != nil {
		return client.IgnoreNotFound(err)
	}
	if claim.UID != s.Claim.UID || claim.DeletionTimestamp != nil {
		return nil
	}
	if !s.Record.Spec.Published {
		if err := p.amend(ctx, s.Record, func(spec *v1alpha1.NodeVolumeSpec) { spec.Published = true }); err != nil {
			return err
		}
	}
	pv := populator.PersistentVolume(populator.Driver{Name: csi.DriverName, TopologyKey: csi.TopologyKey}, claim, s.Class, s.Record)
	err := p.Client.Create(ctx, pv)
	if apierrors.IsAlreadyExists(err) {
		return nil // the cache is behind
	}
	return err
}

// onNode asks the node. What it cannot do now shows on the claim and is tried again.
func (p *Populate) onNode(ctx context.Context, s *populator.Seen, a populator.Act, f func(context.Context, *populator.Seen) error) (populator.Act, error) {
	err := f(ctx, s)
	switch {
	case err == nil, s.Agent.Full != "":
		return a, nil
	case errors.Is(err, csi.ErrUnavailable):
		return populator.Act{Do: populator.Wait, Reason: populator.ReasonNodeUnavailable, Message: err.Error(), Warn: true, Retry: 10 * time.Second}, nil
	}
	return populator.Act{Do: populator.Wait, Reason: populator.ReasonNodeError, Message: err.Error(), Warn: true, Retry: 30 * time.Second}, nil
}

func (p *Populate) createVolume(ctx context.Context, s *populator.Seen) error {
	if full := p.refusedBy(client.ObjectKeyFromObject(s.Claim), s.Record.Spec.Node); full != "" {
		s.Agent.Full = full // the cache does not know yet that the record is released
		return nil
	}
	uuid, err := poolUUID(ctx, p.Client, s.Record.Spec.Node, s.Record.Spec.Pool)
	if err != nil {
		return err
	}
	r := creation(s.Record, uuid)
	r.AwaitsData, r.Preallocate = true, s.Record.Spec.Import.Preallocation
	_, err = p.Agents.CreateVolume(ctx, s.Record.Spec.Node, r)
	if errors.Is(err, csi.ErrFull) {
		s.Agent.Full = err.Error()
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.refused == nil {
			p.refused = map[types.NamespacedName]refusal{}
		}
		p.refused[client.ObjectKeyFromObject(s.Claim)] = refusal{s.Record.Spec.Node, err.Error(), time.Now().Add(refusalStands)}
	}
	return err
}

// refusedBy is why a node had no room for a claim a moment ago; "" when it was not asked.
func (p *Populate) refusedBy(claim types.NamespacedName, node string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.refused[claim]; r.node == node && time.Now().Before(r.until) {
		return r.why
	}
	return ""
}

// creation is the node's order for a record.
func creation(nv *v1alpha1.NodeVolume, poolUUID string) *agentv1.CreateVolumeRequest {
	mode := agentv1.Mode_MODE_FILESYSTEM
	if nv.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		mode = agentv1.Mode_MODE_BLOCK
	}
	return &agentv1.CreateVolumeRequest{
		Id: nv.Name, Pool: nv.Spec.Pool, PoolUuid: poolUUID, CapacityBytes: nv.Spec.CapacityBytes,
		Mode: mode, FsType: nv.Spec.FSType, From: nv.Spec.From,
	}
}

// poolUUID is that of the pool in which the node keeps volumes already: it must
// never make another one (R2).
func poolUUID(ctx context.Context, c client.Reader, node, pool string) (string, error) {
	records, err := recordsOn(ctx, c, node)
	if err != nil {
		return "", err
	}
	for i := range records {
		if records[i].Spec.Pool == pool && records[i].Status.PoolUUID != "" {
			return records[i].Status.PoolUUID, nil
		}
	}
	return "", nil
}

func (p *Populate) populate(ctx context.Context, s *populator.Seen) error {
	_, err := p.Agents.Populate(ctx, s.Record.Spec.Node, &agentv1.PopulateRequest{
		Id: s.Record.Name, SourceKind: s.Recipe.Kind, SourceParams: s.Recipe.Params, Recipe: s.Recipe.Attempt(), Preallocate: s.Recipe.Preallocate,
		Content: s.Recipe.Content, Owner: s.Claim.Namespace, Format: s.Recipe.Format, Disk: s.Recipe.Disk, Archive: s.Recipe.Archive, Checksum: s.Recipe.Checksum,
		ClusterNetworks: s.Recipe.Reach.Cluster, OwnServices: s.Recipe.Reach.Services,
	})
	return err
}

// resolve reads what the recorded source refers to, in the claim's namespace.
func (p *Populate) resolve(ctx context.Context, s *populator.Seen) error {
	needs := populator.NeedsOf(s.Record.Spec.Import.Source)
	m := populator.Material{Secrets: map[string]map[string][]byte{}, ConfigMaps: map[string]map[string][]byte{}}
	if s.Source != nil {
		m.Source = s.Source.Spec.Source
	}
	for _, name := range needs.Secrets {
		secret := &corev1.Secret{}
		err := p.Live.Get(ctx, client.ObjectKey{Namespace: s.Claim.Namespace, Name: name}, secret)
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("read Secret %s: %w", name, err)
		}
		if err == nil {
			m.Secrets[name] = secret.Data
		}
	}
	for _, name := range needs.ConfigMaps {
		cm := &corev1.ConfigMap{}
		err := p.Live.Get(ctx, client.ObjectKey{Namespace: s.Claim.Namespace, Name: name}, cm)
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("read ConfigMap %s: %w", name, err)
		}
		if err == nil {
			m.ConfigMaps[name] = map[string][]byte{}
			maps.Copy(m.ConfigMaps[name], cm.BinaryData)
			for k, v := range cm.Data {
				m.ConfigMaps[name][k] = []byte(v)
			}
		}
	}
	s.Recipe, s.Unresolved = populator.RecipeOf(s.Record.Spec.Import, m, s.Claim.Annotations[populator.AnnotationRetry], p.DigestKey)
	if s.Recipe == nil || s.Agent.Volume.GetFailure().GetReason() != populator.ReasonAddressNotAllowed {
		return nil // what can be reached decides nothing yet
	}
	return p.reach(ctx, s)
}

func (p *Populate) reach(ctx context.Context, s *populator.Seen) (err error) {
	s.Recipe.Reach, err = p.Network.Reach(ctx, s.Claim.Namespace)
	return err
}

// wait remembers who is to be asked again when there is room or a node.
func (p *Populate) wait(req reconcile.Request, waits bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !waits {
		delete(p.waiting, req)
		return
	}
	if p.waiting == nil {
		p.waiting = map[reconcile.Request]bool{}
	}
	p.waiting[req] = true
}

// forget drops what is remembered of a claim that is gone, or never was ours.
func (p *Populate) forget(req reconcile.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.waiting, req)
	delete(p.shown, req.NamespacedName)
	delete(p.told, req.NamespacedName)
	delete(p.refused, req.NamespacedName)
}

// Indices of claims.
const (
	indexSource = "dataSourceRef"
	indexClass  = "storageClassName"
)

// SetupWithManager starts the reconciler and the indices that it, and Room, read by.
func (p *Populate) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	claims := func(o client.Object) *corev1.PersistentVolumeClaim { return o.(*corev1.PersistentVolumeClaim) }
	ix := mgr.GetFieldIndexer()
	if err := errors.Join(
		ix.IndexField(ctx, &v1alpha1.NodeVolume{}, indexNode, func(o client.Object) []string { return []string{o.(*v1alpha1.NodeVolume).Spec.Node} }),
		ix.IndexField(ctx, &corev1.PersistentVolumeClaim{}, indexKin, func(o client.Object) []string {
			if populator.KinOf(claims(o)) == "" {
				return nil
			}
			return []string{"yes"}
		}),
		ix.IndexField(ctx, &corev1.PersistentVolumeClaim{}, indexSource, func(o client.Object) []string { return nonEmpty(sourceOf(claims(o))) }),
		ix.IndexField(ctx, &corev1.PersistentVolumeClaim{}, indexClass, func(o client.Object) []string {
			if sourceOf(claims(o)) == "" || claims(o).Spec.StorageClassName == nil {
				return nil
			}
			return nonEmpty(*claims(o).Spec.StorageClassName)
		}),
	); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(mgr).Named("populate").
		For(&corev1.PersistentVolumeClaim{}).
		Watches(&v1alpha1.NodeVolume{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			c := o.(*v1alpha1.NodeVolume).Spec.Claim
			if c == nil {
				return nil
			}
			return requestFor(c.Namespace, c.Name)
		})).
		Watches(&corev1.PersistentVolume{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			pv := o.(*corev1.PersistentVolume)
			if pv.Spec.ClaimRef == nil || pv.Spec.CSI == nil || pv.Spec.CSI.Driver != csi.DriverName {
				return nil
			}
			return requestFor(pv.Spec.ClaimRef.Namespace, pv.Spec.ClaimRef.Name)
		})).
		Watches(&cdiv1.VolumeImportSource{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return p.claimsBy(ctx, indexSource, o.GetName(), client.InNamespace(o.GetNamespace()))
		})).
		Watches(&storagev1.StorageClass{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return p.claimsBy(ctx, indexClass, o.GetName())
		})).
		WatchesRawSource(source.Func(p.listen)).
		WithOptions(concurrency(8)).
		Complete(p)
}

func concurrency(n int) controller.Options { return controller.Options{MaxConcurrentReconciles: n} }

func nonEmpty(s string) []string {
	if s == "" {
		return nil
	}
	return []string{s}
}

func requestFor(namespace, name string) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}}}
}

func (p *Populate) claimsBy(ctx context.Context, index, value string, opts ...client.ListOption) []reconcile.Request {
	var list corev1.PersistentVolumeClaimList
	if err := p.Client.List(ctx, &list, append(opts, client.MatchingFields{index: value})...); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "list claims", index, value)
		return nil
	}
	var r []reconcile.Request
	for i := range list.Items {
		r = append(r, requestFor(list.Items[i].Namespace, list.Items[i].Name)...)
	}
	return r
}

// listen looks again at a claim of whose volume the node has news, and wakes those
// who wait for room or a node.
func (p *Populate) listen(ctx context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	p.Agents.Listen(Listener{
		Volume: func(id string) {
			nv := &v1alpha1.NodeVolume{}
			if found, err := p.get(ctx, client.ObjectKey{Name: id}, nv); err == nil && found && nv.Spec.Import != nil && nv.Spec.Claim != nil {
				q.Add(requestFor(nv.Spec.Claim.Namespace, nv.Spec.Claim.Name)[0])
			}
		},
		Node: func(node string) {
			p.mu.Lock()
			defer p.mu.Unlock()
			maps.DeleteFunc(p.refused, func(_ types.NamespacedName, r refusal) bool { return r.node == node })
			for req := range p.waiting {
				q.Add(req)
			}
		},
	})
	return nil
}
