package controllers

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/api/v1alpha1"
)

// Metrics tells Prometheus what the records and the nodes say at the moment of
// the scrape; it keeps nothing itself. Sizes are bytes.
type Metrics struct {
	Client client.Reader
	Agents *Agents
}

var (
	descImport = prometheus.NewDesc("kubevirt_cdi_import_progress_total", "Percent of the import that is done, by uid of the claim.", []string{"ownerUID"}, nil)
	descDone   = prometheus.NewDesc("longshore_import_bytes_done", "Bytes of the disk that are done.", []string{"namespace", "claim", "volume", "node"}, nil)
	descTotal  = prometheus.NewDesc("longshore_import_bytes_total", "Bytes of the disk in all; 0 while unknown.", []string{"namespace", "claim", "volume", "node"}, nil)
	descRetry  = prometheus.NewDesc("longshore_import_retries", "Tries of the import after the first.", []string{"namespace", "claim", "volume", "node"}, nil)
	descPhase  = prometheus.NewDesc("longshore_node_volumes", "NodeVolumes by node, kind and phase.", []string{"node", "kind", "phase"}, nil)
	descAgent  = prometheus.NewDesc("longshore_agent_connected", "1 while the controller is connected to the node's plugin.", []string{"node"}, nil)
	descSize   = prometheus.NewDesc("longshore_pool_bytes", "Size of the pool.", []string{"node", "pool"}, nil)
	descFree   = prometheus.NewDesc("longshore_pool_available_bytes", "What the pool gives to new volumes.", []string{"node", "pool"}, nil)
	descStray  = prometheus.NewDesc("longshore_unrecorded_volumes", "Volumes and snapshots that the node keeps and no NodeVolume places there: nobody deletes them but a person.", []string{"node"}, nil)
	descUsable = prometheus.NewDesc("longshore_pool_usable", "1 while the pool can be used.", []string{"node", "pool"}, nil)
)

func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descImport, descDone, descTotal, descRetry, descPhase, descAgent, descSize, descFree, descStray, descUsable} {
		ch <- d
	}
}

func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for node, connected := range m.Agents.Nodes() {
		gauge(descAgent, number(connected), node)
	}
	for node, pools := range m.Agents.Pools() {
		for _, p := range pools {
			gauge(descSize, float64(p.GetTotalBytes()), node, p.GetName())
			gauge(descFree, float64(p.GetAvailableBytes()), node, p.GetName())
			gauge(descUsable, number(p.GetProblem() == ""), node, p.GetName())
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // Collect has no context of its own
	defer cancel()
	var list v1alpha1.NodeVolumeList
	if err := m.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		ch <- prometheus.NewInvalidMetric(descPhase, fmt.Errorf("list NodeVolumes: %w", err))
		return
	}
	phases := map[[3]string]int{}
	placed := map[[2]string]bool{}
	for i := range list.Items {
		nv := &list.Items[i]
		placed[[2]string{nv.Spec.Node, nv.Name}] = true
		phases[[3]string{nv.Spec.Node, string(nv.Spec.Kind), string(nv.Status.Phase)}]++
		p := nv.Status.Progress
		if nv.Spec.Import == nil || nv.Spec.Claim == nil || p == nil {
			continue
		}
		if p.BytesTotal > 0 {
			ch <- prometheus.MustNewConstMetric(descImport, prometheus.CounterValue, 100*float64(p.BytesDone)/float64(p.BytesTotal), string(nv.Spec.Claim.UID))
		}
		if !nv.Status.Populated {
			labels := []string{nv.Spec.Claim.Namespace, nv.Spec.Claim.Name, nv.Name, nv.Spec.Node}
			gauge(descDone, float64(p.BytesDone), labels...)
			gauge(descTotal, float64(p.BytesTotal), labels...)
			gauge(descRetry, float64(p.Retries), labels...)
		}
	}
	for node, ids := range m.Agents.Volumes() {
		stray := 0
		for _, id := range ids {
			if !placed[[2]string{node, id}] {
				stray++
			}
		}
		gauge(descStray, float64(stray), node)
	}
	for l, n := range phases {
		gauge(descPhase, float64(n), l[:]...)
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
