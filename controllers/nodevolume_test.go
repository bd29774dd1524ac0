package controllers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

// A published volume whose claim and PV vanish is shown as Orphaned and deleted by
// nobody but a person.
func TestOrphan(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, retained), 64*mib, nil)
	id := populator.VolumeName(claim)
	n.ordered(id, 1)
	n.populate(id)
	pv := bound(t, claim)
	nv := recorded(t, claim, inPhase(v1alpha1.PhasePopulated))

	// While the PV is bound, not even a person gets rid of the data this way.
	must(t, world.Delete(t.Context(), nv))
	recorded(t, claim, func(nv *v1alpha1.NodeVolume) error {
		if c := meta.FindStatusCondition(nv.Status.Conditions, v1alpha1.ConditionDeleted); c == nil || c.Reason != "InUse" {
			return fmt.Errorf("condition Deleted is %+v", c)
		}
		return nil
	})
	if !n.has(id) {
		t.Fatal("the data of a bound claim was deleted")
	}
	must(t, world.Delete(t.Context(), claim))
	gone(t, claim)
	eventually(t, "the PV is released", func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(pv), pv); err != nil || pv.Status.Phase != corev1.VolumeReleased {
			return fmt.Errorf("it is %s (%v)", pv.Status.Phase, err)
		}
		return nil
	})
	must(t, world.Delete(t.Context(), pv))
	gone(t, nv)

	second := claimOf(t, ns, "second", class(t, pool, retained), 64*mib, nil)
	id = populator.VolumeName(second)
	n.ordered(id, 1)
	n.populate(id)
	pv = bound(t, second)
	must(t, world.Delete(t.Context(), second))
	gone(t, second)
	must(t, world.Delete(t.Context(), pv))
	gone(t, pv)
	nv = recorded(t, second, inPhase(v1alpha1.PhaseOrphaned))
	if !n.has(id) {
		t.Fatal("an orphan's data was deleted")
	}
	must(t, world.Delete(t.Context(), nv))
	gone(t, nv)
	if n.has(id) {
		t.Error("the person's order was not carried out")
	}
}

// The node is away when its volume is to go: the record stays and says why, and goes when the node is back.
func TestDeleteWhileNodeIsAway(t *testing.T) {
	t.Parallel()
	pool := poolName(t)
	n := newNode(t, pool, 100*mib)
	id := "away-" + pool
	_, err := world.volumes.Create(t.Context(), csi.Request{Name: id, RequiredBytes: mib, Mode: csi.Block, Pool: pool})
	must(t, err)
	n.stop()
	n.connected(false)
	if err := world.volumes.Delete(t.Context(), id); !errors.Is(err, csi.ErrUnavailable) {
		t.Fatalf("got %v, want ErrUnavailable", err)
	}
	nv := &v1alpha1.NodeVolume{ObjectMeta: metav1.ObjectMeta{Name: id}}
	eventually(t, "the record says why it stays", func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(nv), nv); err != nil {
			return err
		}
		if c := meta.FindStatusCondition(nv.Status.Conditions, v1alpha1.ConditionDeleted); c == nil || c.Reason != populator.ReasonNodeUnavailable {
			return fmt.Errorf("condition Deleted is %+v", c)
		}
		return nil
	})
	n.start()
	gone(t, nv)
	if n.has(id) {
		t.Error("the node has the volume still")
	}
}

// The node of a claim that waits is gone for good before any data was complete:
// the claim is filled on another.
func TestNodeIsGone(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	first := newNode(t, pool, 200*mib)
	second := newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	first.ordered(id, 1)
	first.stop()
	must(t, world.Delete(t.Context(), first.pod, client.GracePeriodSeconds(0)))
	must(t, world.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: first.name}}))
	second.ordered(id, 1)
	second.populate(id)
	bound(t, claim)
}

// A node that tells of volumes of another node is not believed.
func TestHostileReports(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	honest, hostile := newNode(t, pool, 200*mib), newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	honest.ordered(id, 1)
	honest.fill(id, mib, 48*mib)
	hostile.mu.Lock()
	hostile.lies = []*agentv1.Volume{{Id: id, CapacityBytes: 64 * mib, State: agentv1.State_STATE_POPULATED}}
	hostile.tell()
	hostile.mu.Unlock()
	eventually(t, "the lie is told", func(context.Context) error {
		if v, _ := world.volumes.Agents.Volume(hostile.name, id); v == nil {
			return errors.New("it is not")
		}
		return nil
	})
	honest.fill(id, 2*mib, 48*mib)
	nv := recorded(t, claim, func(nv *v1alpha1.NodeVolume) error {
		if nv.Status.Progress == nil || nv.Status.Progress.BytesDone != 2*mib {
			return fmt.Errorf("progress is %+v", nv.Status.Progress)
		}
		return nil
	})
	if nv.Status.Populated || nv.Spec.Published {
		t.Errorf("the lie is believed: %+v", nv.Status)
	}
	if len(hostile.ordersOf(id)) > 0 {
		t.Error("the hostile node got the order, and with it the credentials")
	}
}

// The pool that holds the data is no longer in the node's configuration: the
// deletion waits and says what to do, and is carried out when the pool is back.
func TestDeleteFromPoolThatIsNotConfigured(t *testing.T) {
	t.Parallel()
	pool := poolName(t)
	n := newNode(t, pool, 100*mib)
	nv := &v1alpha1.NodeVolume{ObjectMeta: metav1.ObjectMeta{Name: "stranded-" + pool}}
	_, err := world.volumes.Create(t.Context(), csi.Request{Name: nv.Name, RequiredBytes: mib, Mode: csi.Block, Pool: pool})
	must(t, err)
	eventually(t, "the record names the pool that holds the data", func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(nv), nv); err != nil || nv.Status.PoolUUID == "" {
			return fmt.Errorf("status is %+v (%w)", nv.Status, err)
		}
		return nil
	})
	named := func(name string) {
		n.stop()
		n.connected(false)
		n.mu.Lock()
		n.pool.Name = name
		n.mu.Unlock()
		n.start()
		n.connected(true)
	}
	named(pool + "-other")
	err = world.volumes.Delete(t.Context(), nv.Name)
	wantErr(t, err, csi.ErrUnavailable, fmt.Sprintf("pool %q, which is not configured on node %s", pool, n.name))
	eventually(t, "the record says why it stays", func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(nv), nv); err != nil {
			return err
		}
		if c := meta.FindStatusCondition(nv.Status.Conditions, v1alpha1.ConditionDeleted); c == nil || c.Reason != reasonNoPool || !strings.Contains(c.Message, "configure the pool there again") {
			return fmt.Errorf("condition Deleted is %+v", c)
		}
		return nil
	})
	if !n.has(nv.Name) {
		t.Fatal("the data was deleted all the same")
	}
	named(pool)
	gone(t, nv)
	if n.has(nv.Name) {
		t.Error("the node has the volume still")
	}
}
