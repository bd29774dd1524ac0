package controllers

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

// The autoscaler leaves a node alone while it holds a volume; what an administrator has set stays.
func TestAutoscalerLeavesVolumesAlone(t *testing.T) {
	t.Parallel()
	pool := poolName(t)
	n, administered := newNode(t, pool, 100*mib), newNode(t, pool, 50*mib)
	kept := func(n *node, want string) {
		t.Helper()
		object := &corev1.Node{}
		eventually(t, fmt.Sprintf("node %s has %q", n.name, want), func(ctx context.Context) error {
			if err := world.Get(ctx, client.ObjectKey{Name: n.name}, object); err != nil {
				return err
			}
			if got := object.Annotations[annotationKeep]; got != want {
				return fmt.Errorf("it has %q", got)
			}
			return nil
		})
	}
	object := &corev1.Node{}
	must(t, world.Get(t.Context(), client.ObjectKey{Name: administered.name}, object))
	annotate(t, object, annotationKeep, "by hand")
	for _, n := range []*node{n, administered} {
		_, err := world.volumes.Create(t.Context(), csi.Request{Name: "kept-" + n.name, RequiredBytes: mib, Mode: csi.Block, Pool: pool, Nodes: []string{n.name}})
		must(t, err)
	}
	kept(n, "true")
	kept(administered, "by hand")
	for _, n := range []*node{n, administered} {
		must(t, world.volumes.Delete(t.Context(), "kept-"+n.name))
	}
	kept(n, "")
	kept(administered, "by hand")
}

// Prometheus sees the import, the node and its pool, and what a node keeps unrecorded.
func TestMetrics(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	n.ordered(id, 1)
	n.fill(id, 12*mib, 48*mib)
	n.mu.Lock()
	n.volumes["stray"] = &agentv1.Volume{Id: "stray", State: agentv1.State_STATE_POPULATED}
	n.tell()
	n.mu.Unlock()
	registry := prometheus.NewPedanticRegistry()
	must(t, registry.Register(&Metrics{Client: world.volumes.Client, Agents: world.volumes.Agents}))
	want := map[string]float64{
		fmt.Sprintf(`kubevirt_cdi_import_progress_total{ownerUID=%s}`, claim.UID):                              25,
		fmt.Sprintf(`longshore_import_bytes_done{claim=disk,namespace=%s,node=%s,volume=%s}`, ns, n.name, id):  12 * mib,
		fmt.Sprintf(`longshore_import_bytes_total{claim=disk,namespace=%s,node=%s,volume=%s}`, ns, n.name, id): 48 * mib,
		fmt.Sprintf(`longshore_agent_connected{node=%s}`, n.name):                                              1,
		fmt.Sprintf(`longshore_pool_available_bytes{node=%s,pool=%s}`, n.name, pool):                           36 * mib,
		fmt.Sprintf(`longshore_unrecorded_volumes{node=%s}`, n.name):                                           1,
		fmt.Sprintf(`longshore_node_volumes{kind=Volume,node=%s,phase=Filling}`, n.name):                       1,
	}
	eventually(t, "the metrics", func(context.Context) error {
		families, err := registry.Gather()
		if err != nil {
			return err
		}
		got := map[string]float64{}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				var labels []string
				for _, l := range m.GetLabel() {
					labels = append(labels, l.GetName()+"="+l.GetValue())
				}
				got[fmt.Sprintf("%s{%s}", f.GetName(), strings.Join(labels, ","))] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
		for series, value := range want {
			if got[series] != value {
				return fmt.Errorf("%s is %v, want %v", series, got[series], value)
			}
		}
		return nil
	})
}
