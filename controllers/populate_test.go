package controllers

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

// poolName is a pool of the test's own.
func poolName(t *testing.T) string {
	return fmt.Sprintf("p%d", world.nodes.Add(1))
}

// A claim is filled before it binds, on the node with most room, with the tenant's
// credentials, and with them nowhere but on that node.
func TestFill(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	small, large := newNode(t, pool, 100*mib), newNode(t, pool, 200*mib)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: world.ca.cert.Raw})
	for _, o := range []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "login"}, StringData: map[string]string{"accessKeyId": "tenant", "secretKey": "open-sesame"}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "headers"}, StringData: map[string]string{"a": "X-Token: abracadabra\nX-More: 1\n"}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "ca"}, Data: map[string]string{"one.pem": string(ca)}},
	} {
		must(t, world.Create(t.Context(), o))
	}
	source := importSource(t, ns, func(h *cdiv1.DataVolumeSourceHTTP) {
		h.SecretRef, h.SecretExtraHeaders, h.CertConfigMap, h.ExtraHeaders = "login", []string{"headers"}, "ca", []string{"Accept: image/*"}
	})
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)

	order := large.ordered(id, 1)
	var params map[string]any
	must(t, json.Unmarshal(order.SourceParams, &params))
	for key, want := range map[string]any{"url": "https://example.com/disk.qcow2", "user": "tenant", "password": "open-sesame", "caBundle": strings.TrimSpace(string(ca)) + "\n"} {
		if params[key] != want {
			t.Errorf("%s is %q, want %q", key, params[key], want)
		}
	}
	if got, want := fmt.Sprint(params["headers"], params["secretHeaders"]), "[Accept: image/*] [X-Token: abracadabra X-More: 1]"; got != want {
		t.Errorf("headers are %s, want %s", got, want)
	}
	if order.SourceKind != "http" || order.Owner != ns || order.Content == "" || order.Recipe == "" {
		t.Errorf("order is %s %s %q %q", order.SourceKind, order.Owner, order.Content, order.Recipe)
	}

	large.fill(id, 24*mib, 48*mib)
	nv := recorded(t, claim, func(nv *v1alpha1.NodeVolume) error {
		if p := nv.Status.Progress; p == nil || p.BytesDone != 24*mib || p.Summary != "50 %, 1 MiB/s, 24s left" {
			return fmt.Errorf("progress is %+v", p)
		}
		return inPhase(v1alpha1.PhaseFilling)(nv)
	})
	text, err := json.Marshal(nv)
	must(t, err)
	if bytes.Contains(text, []byte("sesame")) || bytes.Contains(text, []byte("abracadabra")) {
		t.Errorf("the record holds a secret: %s", text)
	}
	says(t, claim, populator.ReasonInProgress, large.name, nv.Name)
	if claim.Status.Phase != corev1.ClaimPending {
		t.Errorf("claim is %s while data comes", claim.Status.Phase)
	}
	told(t, claim, "Normal", populator.ReasonScheduled)

	large.populate(id)
	pv := bound(t, claim)
	says(t, claim, populator.ReasonSucceeded)
	for _, o := range []client.Object{claim, source} {
		told(t, o, "Normal", "importSucceeded")
	}
	for key, want := range map[string]string{populator.AnnotationPhase: "Populated", populator.AnnotationProgress: "100.0%"} {
		eventually(t, "annotation "+key, func(ctx context.Context) error {
			if err := world.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil || claim.Annotations[key] != want {
				return fmt.Errorf("it is %q, want %q (%w)", claim.Annotations[key], want, err)
			}
			return nil
		})
	}
	eventually(t, "the source is Ready", func(ctx context.Context) error {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(cdiv1.SchemeGroupVersion.WithKind("VolumeImportSource"))
		if err := world.Get(ctx, client.ObjectKeyFromObject(source), u); err != nil {
			return err
		}
		conditions, _, err := unstructured.NestedSlice(u.Object, "status", "conditions")
		if err != nil || len(conditions) != 1 || conditions[0].(map[string]any)["status"] != "True" {
			return fmt.Errorf("conditions are %v (%v)", conditions, err)
		}
		return nil
	})
	if pv.Name != id || pv.Spec.CSI.VolumeHandle != id || pv.Spec.ClaimRef.UID != claim.UID || pv.Spec.MountOptions[0] != "noatime" ||
		pv.Spec.Capacity.Storage().Value() != 64*mib || pv.Annotations["pv.kubernetes.io/provisioned-by"] != csi.DriverName {
		t.Errorf("PV is %+v", pv)
	}
	if small.has(id) {
		t.Error("the small node has the volume, too")
	}
}

// On a class that waits, nothing happens before the scheduler has chosen; then all happens there.
func TestFillWhereTheSchedulerSays(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	newNode(t, pool, 200*mib)
	chosen := newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, waitsForConsumer), 64*mib, nil)
	told(t, claim, "Normal", populator.ReasonWaitsForConsumer)
	annotate(t, claim, populator.AnnotationSelectedNode, chosen.name)
	id := populator.VolumeName(claim)
	chosen.ordered(id, 1)
	chosen.populate(id)
	pv := bound(t, claim)
	if got := pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0]; got.Key != csi.TopologyKey || got.Values[0] != chosen.name {
		t.Errorf("node affinity is %+v", got)
	}
}

// A claim on a class that waits, and that shall not wait, gets its selected node from us.
func TestFillAtOnceOnAWaitingClass(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, waitsForConsumer), 64*mib, func(c *corev1.PersistentVolumeClaim) { c.Annotations[populator.AnnotationImmediate] = "" })
	n.ordered(populator.VolumeName(claim), 1)
	n.populate(populator.VolumeName(claim))
	bound(t, claim)
	if got := claim.Annotations[populator.AnnotationSelectedNode]; got != n.name {
		t.Errorf("selected node is %q, want %s", got, n.name)
	}
}

// The scheduler's node is full: the claim loses it, and nothing stays.
func TestChosenNodeIsFull(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 32*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, waitsForConsumer), 64*mib, func(c *corev1.PersistentVolumeClaim) {
		c.Annotations[populator.AnnotationSelectedNode] = n.name
	})
	says(t, claim, populator.ReasonPoolFull, "needs 67108864 bytes", "33554432 are free", n.name)
	eventually(t, "the selected node is taken off", func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
			return err
		}
		if node, ok := claim.Annotations[populator.AnnotationSelectedNode]; ok {
			return fmt.Errorf("it is %s", node)
		}
		return nil
	})
	says(t, claim, populator.ReasonPoolFull)
}

// A full pool is said, with figures, and the claim is filled when another goes.
func TestPoolFull(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	sc := class(t, pool, nil)
	first := claimOf(t, ns, "first", sc, 64*mib, nil)
	n.ordered(populator.VolumeName(first), 1)
	second := claimOf(t, ns, "second", sc, 64*mib, nil)
	says(t, second, populator.ReasonPoolFull, "needs 67108864 bytes", "37748736 are free")
	told(t, second, "Warning", populator.ReasonPoolFull)
	must(t, world.Delete(t.Context(), first))
	n.ordered(populator.VolumeName(second), 1)
}

// In mode stage the claim binds at once; the data comes when a pod wants it, and
// comes on although the source is gone and the plugin restarts.
func TestStage(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	source := importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, staged), 64*mib, nil)
	id := populator.VolumeName(claim)
	bound(t, claim)
	says(t, claim, populator.ReasonWaitsForPod)
	if got := n.ordersOf(id); len(got) > 0 {
		t.Fatalf("the volume is filled before anybody wants it: %v", got)
	}
	n.change(id, func(v *agentv1.Volume) { v.Wanted = true })
	first := n.ordered(id, 1)
	must(t, world.Delete(t.Context(), source))
	gone(t, source)
	n.restart()
	if second := n.ordered(id, 2); second.Recipe != first.Recipe {
		t.Errorf("the recipe is another after the restart")
	}
	n.populate(id)
	says(t, claim, populator.ReasonSucceeded)
}

// A plugin that restarts in mid-transfer is given the credentials again, as they are now.
func TestRestartGetsFreshCredentials(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "login"}, StringData: map[string]string{"accessKeyId": "tenant", "secretKey": "old"}}
	must(t, world.Create(t.Context(), secret))
	importSource(t, ns, func(h *cdiv1.DataVolumeSourceHTTP) { h.SecretRef = "login" })
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	first := n.ordered(id, 1)
	secret.StringData = map[string]string{"secretKey": "new"}
	must(t, world.Update(t.Context(), secret))
	n.restart()
	second := n.ordered(id, 2)
	if !bytes.Contains(second.SourceParams, []byte(`"password":"new"`)) {
		t.Errorf("the second order has the params %s", second.SourceParams)
	}
	if first.Recipe == second.Recipe || first.Content != second.Content {
		t.Errorf("other credentials: the recipe must differ, the content not: %s %s, %s %s", first.Recipe, second.Recipe, first.Content, second.Content)
	}
}

// What failed for good is said everywhere and tried again only when something
// changes: the Secret, or the person's wish.
func TestTerminalFailure(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "login"}, StringData: map[string]string{"accessKeyId": "tenant", "secretKey": "wrong"}}
	must(t, world.Create(t.Context(), secret))
	source := importSource(t, ns, func(h *cdiv1.DataVolumeSourceHTTP) { h.SecretRef = "login" })
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	n.ordered(id, 1)
	n.fail(id, "Unauthorized")
	says(t, claim, "Unauthorized", "401 at example.com", "login", populator.AnnotationRetry)
	for _, o := range []client.Object{claim, source} {
		told(t, o, "Warning", "importFailed", "Unauthorized")
	}
	recorded(t, claim, inPhase(v1alpha1.PhaseFailed))
	annotate(t, claim, "example.com/poke", "1") // looked at again, and nothing has changed
	says(t, claim, "Unauthorized")
	annotate(t, claim, populator.AnnotationRetry, "please")
	n.ordered(id, 2)
	n.fail(id, "Unauthorized")
	says(t, claim, "Unauthorized")
	secret.StringData = map[string]string{"secretKey": "right"}
	must(t, world.Update(t.Context(), secret))
	n.ordered(id, 3)
	n.populate(id)
	bound(t, claim)
	if got := len(n.ordersOf(id)); got != 3 {
		t.Errorf("the volume was ordered %d times, want 3", got)
	}
}

// A Secret that is missing is named; the import starts when it is there.
func TestSecretComesLater(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	importSource(t, ns, func(h *cdiv1.DataVolumeSourceHTTP) { h.SecretRef = "login" })
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	says(t, claim, "SecretNotFound", `"login"`)
	must(t, world.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "login"}, StringData: map[string]string{"accessKeyId": "tenant"}}))
	says(t, claim, "SecretKeyNotFound", "secretKey")
	must(t, world.Patch(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "login"}}, client.RawPatch("application/merge-patch+json", []byte(`{"stringData":{"secretKey":"x"}}`))))
	n.ordered(populator.VolumeName(claim), 1)
}

// What is wrong with source, class or claim is said on the claim before any node is asked.
func TestRefusals(t *testing.T) {
	t.Parallel()
	pool := poolName(t)
	newNode(t, pool, 100*mib)
	rows := []struct {
		name   string
		class  func(*storagev1.StorageClass)
		source func(*cdiv1.VolumeImportSource)
		claim  func(*corev1.PersistentVolumeClaim)
		reason string
		words  string
	}{
		{"no source", nil, nil, func(c *corev1.PersistentVolumeClaim) { c.Spec.DataSourceRef.Name = "none" }, populator.ReasonSourceNotFound, `"none"`},
		{"a source to come", nil, func(s *cdiv1.VolumeImportSource) {
			s.Spec.Source = &cdiv1.ImportSourceType{S3: &cdiv1.DataVolumeSourceS3{URL: "s3://x"}}
		}, nil, "SourceNotSupported", "s3"},
		{"a format that is no choice", nil, func(s *cdiv1.VolumeImportSource) {
			s.Annotations = map[string]string{populator.AnnotationImageFormat: "vmdk"}
		}, nil, populator.ReasonInvalidSource, `"vmdk"`},
		{"two sources", nil, func(s *cdiv1.VolumeImportSource) { s.Spec.Source.Blank = &cdiv1.DataVolumeBlankImage{} }, nil, "InvalidSource", "http, blank"},
		{"a wrong mode of filling", func(sc *storagev1.StorageClass) { sc.Parameters[csi.ParameterPopulate] = "instant" }, nil, nil, populator.ReasonClassInvalid, `"instant"`},
		{"a misspelt parameter", func(sc *storagev1.StorageClass) { sc.Parameters["longshore.dev/poll"] = "x" }, nil, nil, populator.ReasonClassInvalid, "longshore.dev/poll"},
		{"a filesystem that we do not make", func(sc *storagev1.StorageClass) { sc.Parameters[csi.ParameterFSType] = "ntfs" }, nil, nil, populator.ReasonClassInvalid, "ext4, xfs"},
		{"many writers", nil, nil, func(c *corev1.PersistentVolumeClaim) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
		}, populator.ReasonInvalidClaim, "ReadWriteMany"},
		{"no such pool", func(sc *storagev1.StorageClass) { sc.Parameters[csi.ParameterPool] = "other" }, nil, nil, populator.ReasonNoNode, `no pool "other"`},
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			ns := namespace(t)
			imageSource(t, ns, r.source)
			claim := claimOf(t, ns, "disk", class(t, pool, r.class), 64*mib, r.claim)
			says(t, claim, r.reason, r.words)
			told(t, claim, "Warning", r.reason)
			if err := world.Get(t.Context(), client.ObjectKey{Name: populator.VolumeName(claim)}, &v1alpha1.NodeVolume{}); client.IgnoreNotFound(err) != nil || err == nil {
				t.Errorf("there is a record: %v", err)
			}
		})
	}
}

// The claim goes in mid-transfer: the node deletes the data, and nothing stays.
func TestClaimGoesInMidTransfer(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	n.ordered(id, 1)
	n.fill(id, mib, 48*mib)
	must(t, world.Delete(t.Context(), claim))
	gone(t, &v1alpha1.NodeVolume{ObjectMeta: metav1.ObjectMeta{Name: id}})
	if n.has(id) {
		t.Error("the node has the volume still")
	}
}

// The source goes in mid-transfer: the transfer ends, the claim says what to do,
// and is filled once the source is back.
func TestSourceGoesInMidTransfer(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	source := importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	n.ordered(id, 1)
	must(t, world.Delete(t.Context(), source))
	says(t, claim, populator.ReasonSourceNotFound, "create it")
	gone(t, &v1alpha1.NodeVolume{ObjectMeta: metav1.ObjectMeta{Name: id}})
	if n.has(id) {
		t.Error("the node has the volume still")
	}
	importSource(t, ns, nil)
	n.ordered(id, 2)
}

// The source is changed in mid-transfer: what came of the old one is thrown away.
func TestSourceChangesInMidTransfer(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	source := importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	first := n.ordered(id, 1)
	must(t, world.Patch(t.Context(), source, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"source":{"http":{"url":"https://example.com/other.qcow2"}}}}`))))
	second := n.ordered(id, 2)
	if !bytes.Contains(second.SourceParams, []byte("other.qcow2")) || first.Content == second.Content {
		t.Errorf("the second order is %s", second.SourceParams)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.deleted) == 0 {
		t.Error("the node has kept what came of the old source")
	}
}

// Nothing of ours is on a claim before Kubernetes has asked for its volume, though
// events tell how things stand (R5).
func TestQuietUntilKubernetesHasAsked(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 300*mib)
	watcher, err := client.NewWithWatch(world.config, client.Options{Scheme: world.Scheme()})
	must(t, err)
	versions, err := watcher.Watch(t.Context(), &corev1.PersistentVolumeClaimList{}, client.InNamespace(ns))
	must(t, err)
	defer versions.Stop()
	sc := class(t, pool, waitsForConsumer)
	waiting := claimOf(t, ns, "waiting", sc, 64*mib, nil)
	told(t, waiting, "Warning", populator.ReasonSourceNotFound)
	importSource(t, ns, nil)
	told(t, waiting, "Normal", populator.ReasonWaitsForConsumer)
	annotate(t, waiting, populator.AnnotationSelectedNode, n.name)
	claims := []*corev1.PersistentVolumeClaim{
		waiting,
		claimOf(t, ns, "immediate", class(t, pool, nil), 64*mib, nil),
		claimOf(t, ns, "hurried", sc, 64*mib, func(c *corev1.PersistentVolumeClaim) { c.Annotations[populator.AnnotationImmediate] = "" }),
	}
	for _, c := range claims {
		n.ordered(populator.VolumeName(c), 1)
		says(t, c, populator.ReasonInProgress)
	}
	left := map[string]bool{}
	for _, c := range claims {
		left[c.Name] = true
	}
	for len(left) > 0 {
		e, open := <-versions.ResultChan()
		if !open {
			t.Fatalf("the watch ended, %v are not seen to the end", left)
		}
		c := e.Object.(*corev1.PersistentVolumeClaim)
		ours := slices.DeleteFunc(slices.Collect(maps.Keys(c.Annotations)), func(k string) bool { return !slices.Contains(populator.ProgressAnnotations, k) })
		for _, condition := range c.Status.Conditions {
			ours = append(ours, condition.Reason)
			if condition.Reason == populator.ReasonInProgress {
				delete(left, c.Name)
			}
		}
		if populator.Provisioner(c) == "" && len(ours) > 0 {
			t.Errorf("claim %s shows %q before Kubernetes has asked", c.Name, ours)
		}
	}
}

func inGroup(c *corev1.PersistentVolumeClaim) { c.Annotations[populator.AnnotationGroup] = "database" }

// Where the first volume of a machine is, room is kept for the others, until they
// are there or gone (R4).
func TestRoomIsKeptForKin(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 200*mib)
	importSource(t, ns, nil)
	sc, later := class(t, pool, nil), class(t, pool, waitsForConsumer)
	rest := claimOf(t, ns, "rest", later, 64*mib, inGroup)
	told(t, rest, "Normal", populator.ReasonWaitsForConsumer)
	first := claimOf(t, ns, "first", sc, 64*mib, inGroup)
	n.ordered(populator.VolumeName(first), 1)
	stranger := claimOf(t, ns, "stranger", sc, 100*mib, nil)
	says(t, stranger, populator.ReasonPoolFull, "needs 104857600 bytes", "75497472 are free")
	_, err := world.volumes.Create(t.Context(), csi.Request{Name: "pvc-stranger-" + pool, RequiredBytes: 100 * mib, Mode: csi.Block, Pool: pool})
	wantErr(t, err, csi.ErrFull, "75497472 bytes free")
	annotate(t, rest, populator.AnnotationImmediate, "")
	n.ordered(populator.VolumeName(rest), 1)
	must(t, world.Delete(t.Context(), first))
	n.ordered(populator.VolumeName(stranger), 1)
}

// An ordinary volume of the machine takes the room that is kept for it.
func TestOrdinaryVolumeOfKin(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	elsewhere := newNode(t, pool, 80*mib)
	importSource(t, ns, nil)
	sc := class(t, pool, nil)
	scratch := claimOf(t, ns, "scratch", class(t, pool, waitsForConsumer), 30*mib, func(c *corev1.PersistentVolumeClaim) {
		inGroup(c)
		c.Spec.DataSourceRef = nil
	})
	first := claimOf(t, ns, "first", sc, 64*mib, inGroup)
	n.ordered(populator.VolumeName(first), 1)
	r := csi.Request{Name: populator.VolumeName(scratch), RequiredBytes: 30 * mib, Mode: csi.Block, Pool: pool}
	stranger := r
	stranger.Name = "pvc-other-" + pool
	other, err := world.volumes.Create(t.Context(), stranger)
	must(t, err)
	r.ClaimNamespace, r.ClaimName = ns, scratch.Name
	made, err := world.volumes.Create(t.Context(), r)
	must(t, err)
	if other.Node != elsewhere.name || made.Node != n.name {
		t.Errorf("the stranger's volume is on %s, want %s; the machine's on %s, want %s", other.Node, elsewhere.name, made.Node, n.name)
	}
}

// Where no node takes all volumes of a machine that is said, and they are placed all the same.
func TestKinFitsNowhere(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	large, small := newNode(t, pool, 100*mib), newNode(t, pool, 80*mib)
	importSource(t, ns, nil)
	rest := claimOf(t, ns, "rest", class(t, pool, waitsForConsumer), 64*mib, inGroup)
	told(t, rest, "Normal", populator.ReasonWaitsForConsumer)
	first := claimOf(t, ns, "first", class(t, pool, nil), 64*mib, inGroup)
	large.ordered(populator.VolumeName(first), 1)
	told(t, first, "Warning", populator.ReasonGroupSplit, "2 claims of 134217728 bytes", large.name)
	annotate(t, rest, populator.AnnotationImmediate, "")
	small.ordered(populator.VolumeName(rest), 1)
	told(t, rest, "Warning", populator.ReasonGroupSplit, small.name)
}

// A disk without a signature is imported when its source says that it is raw.
func TestImageFormat(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	source := importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	if order := n.ordered(id, 1); order.Format != "" {
		t.Errorf("the format is %q though nobody names it", order.Format)
	}
	n.fail(id, "NotADiskImage")
	says(t, claim, "NotADiskImage")
	annotate(t, source, populator.AnnotationImageFormat, "raw")
	if order := n.ordered(id, 2); order.Format != "raw" {
		t.Errorf("the format is %q", order.Format)
	}
}

// A node that has less room than it tells is not asked again and again: the claim
// goes to another, or waits.
func TestNodeTellsOfMoreRoomThanItHas(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 200*mib)
	importSource(t, ns, nil)
	n.mu.Lock()
	n.full = true
	n.mu.Unlock()
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	says(t, claim, populator.ReasonPoolFull, n.name+": ", "its disk is full")
	eventually(t, "the node is asked again", func(context.Context) error {
		if asked := n.askedFor(populator.VolumeName(claim)); len(asked) < 2 {
			return fmt.Errorf("it was asked at %v", asked)
		}
		return nil
	})
	asked := n.askedFor(populator.VolumeName(claim))
	if pause := asked[1].Sub(asked[0]); pause < refusalStands {
		t.Errorf("it was asked again after %s, want %s", pause, refusalStands)
	}
	n.mu.Lock()
	n.full, n.pool.TotalBytes = false, 300*mib
	n.tell()
	n.mu.Unlock()
	n.ordered(populator.VolumeName(claim), 1)
}
