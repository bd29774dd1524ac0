package main

import (
	"context"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/nodeplugin"
	"github.com/longshore-io/longshore/nodeplugin/mover"
)

// nodeMetrics reads its figures from the Stager when it is asked.
type nodeMetrics struct {
	stager  *nodeplugin.Stager
	movers  prometheus.Counter
	peak    prometheus.Histogram
	reading *prometheus.Registry
}

var (
	// Named as KubeVirt's CDI names it, so that dashboards go on working.
	progressDesc = prometheus.NewDesc("kubevirt_cdi_import_progress_total", "The import progress in percentage", []string{"ownerUID"}, nil)

	doneDesc      = prometheus.NewDesc("longshore_transfer_bytes_done", "Bytes of the guest's disk that are in place.", []string{"volume"}, nil)
	totalDesc     = prometheus.NewDesc("longshore_transfer_bytes_total", "Bytes of the guest's disk; 0 while unknown.", []string{"volume"}, nil)
	rateDesc      = prometheus.NewDesc("longshore_transfer_bytes_per_second", "Rate of the transfer over the last ten seconds.", []string{"volume"}, nil)
	retriesDesc   = prometheus.NewDesc("longshore_transfer_retries", "Retries of the transfer that runs.", []string{"volume"}, nil)
	volumesDesc   = prometheus.NewDesc("longshore_volumes", "Volumes by state: empty, filling, populated, failed, staged.", []string{"pool", "state"}, nil)
	snapshotsDesc = prometheus.NewDesc("longshore_snapshots", "Snapshots.", []string{"pool"}, nil)
	poolUpDesc    = prometheus.NewDesc("longshore_pool_up", "1 while the pool can be used.", []string{"pool"}, nil)
	poolTotalDesc = prometheus.NewDesc("longshore_pool_bytes", "Size of the pool.", []string{"pool"}, nil)
	poolGivenDesc = prometheus.NewDesc("longshore_pool_provisioned_bytes", "What volumes may grow to and snapshots hold, in sum.", []string{"pool"}, nil)
	poolFreeDesc  = prometheus.NewDesc("longshore_pool_available_bytes", "What a new volume may have.", []string{"pool"}, nil)
	imagesDesc    = prometheus.NewDesc("longshore_cache_images", "Imported images that are kept for the next import.", []string{"pool"}, nil)
	imageByteDesc = prometheus.NewDesc("longshore_cache_bytes", "What the kept images hold, blocks shared with volumes included.", []string{"pool"}, nil)
	extentsDesc   = prometheus.NewDesc("longshore_cache_extents", "Extents of all kept images: a clone takes the longer the more there are.", []string{"pool"}, nil)
	hitsDesc      = prometheus.NewDesc("longshore_cache_hits_total", "Imports that found their image on the node.", []string{"pool"}, nil)
	missesDesc    = prometheus.NewDesc("longshore_cache_misses_total", "Imports that did not, of those that may.", []string{"pool"}, nil)
	evictedDesc   = prometheus.NewDesc("longshore_cache_evictions_total", "Images that made way.", []string{"pool"}, nil)
	loopsDesc     = prometheus.NewDesc("longshore_loop_devices", "Loop devices of volumes that are staged or being filled.", nil, nil)
)

func newNodeMetrics() *nodeMetrics {
	m := &nodeMetrics{
		movers:  prometheus.NewCounter(prometheus.CounterOpts{Name: "longshore_movers_ended_total", Help: "Mover processes that have ended."}),
		reading: prometheus.NewRegistry(),
		peak: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "longshore_mover_peak_memory_bytes", Help: "Most memory that a mover had, page cache included.",
			Buckets: prometheus.ExponentialBuckets(16<<20, 2, 6),
		}),
	}
	m.reading.MustRegister(m, m.movers, m.peak, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *nodeMetrics) moverEnded(u mover.Usage) {
	m.movers.Inc()
	if u.PeakBytes > 0 {
		m.peak.Observe(float64(u.PeakBytes))
	}
}

// Describe is prometheus.Collector's.
func (m *nodeMetrics) Describe(c chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{progressDesc, doneDesc, totalDesc, rateDesc, retriesDesc, volumesDesc, snapshotsDesc, poolUpDesc, poolTotalDesc, poolGivenDesc, poolFreeDesc, loopsDesc, imagesDesc, imageByteDesc, extentsDesc, hitsDesc, missesDesc, evictedDesc} {
		c <- d
	}
}

// Collect is prometheus.Collector's.
func (m *nodeMetrics) Collect(c chan<- prometheus.Metric) {
	if m.stager == nil {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		c <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for name, s := range m.stager.CacheStats() {
		gauge(imagesDesc, float64(s.Images), name)
		gauge(imageByteDesc, float64(s.Bytes), name)
		gauge(extentsDesc, float64(s.Extents), name)
		for d, n := range map[*prometheus.Desc]int64{hitsDesc: s.Hits, missesDesc: s.Misses, evictedDesc: s.Evictions} {
			c <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), name)
		}
	}
	report := m.stager.Report()
	type key struct{ pool, state string }
	volumes, snapshots, loops := map[key]int{}, map[string]int{}, 0
	for _, p := range report.GetPools() {
		up := 1.0
		if p.GetProblem() != "" {
			up = 0
		}
		gauge(poolUpDesc, up, p.GetName())
		gauge(poolTotalDesc, float64(p.GetTotalBytes()), p.GetName())
		gauge(poolGivenDesc, float64(p.GetProvisionedBytes()), p.GetName())
		gauge(poolFreeDesc, float64(p.GetAvailableBytes()), p.GetName())
		snapshots[p.GetName()] = 0
		for _, s := range []string{"empty", "filling", "populated", "failed", "staged"} {
			volumes[key{p.GetName(), s}] = 0
		}
	}
	for _, v := range report.GetVolumes() {
		if v.GetSnapshot() {
			snapshots[v.GetPool()]++
			continue
		}
		filling := v.GetState() == agentv1.State_STATE_FILLING
		volumes[key{v.GetPool(), strings.ToLower(strings.TrimPrefix(v.GetState().String(), "STATE_"))}]++
		if v.GetStaged() {
			volumes[key{v.GetPool(), "staged"}]++
		}
		if v.GetStaged() || filling && v.GetMode() == agentv1.Mode_MODE_FILESYSTEM {
			loops++
		}
		p := v.GetProgress()
		if p == nil {
			continue
		}
		percent := 0.0
		switch {
		case v.GetState() == agentv1.State_STATE_POPULATED:
			percent = 100
		case p.GetBytesTotal() > 0:
			percent = 100 * float64(p.GetBytesDone()) / float64(p.GetBytesTotal())
		}
		if uid, ok := strings.CutPrefix(v.GetId(), "pvc-"); ok {
			c <- prometheus.MustNewConstMetric(progressDesc, prometheus.CounterValue, percent, uid)
		}
		if filling {
			gauge(doneDesc, float64(p.GetBytesDone()), v.GetId())
			gauge(totalDesc, float64(p.GetBytesTotal()), v.GetId())
			gauge(rateDesc, float64(p.GetBytesPerSecond()), v.GetId())
			gauge(retriesDesc, float64(p.GetRetries()), v.GetId())
		}
	}
	for k, n := range volumes {
		gauge(volumesDesc, float64(n), k.pool, k.state)
	}
	for p, n := range snapshots {
		gauge(snapshotsDesc, float64(n), p)
	}
	gauge(loopsDesc, float64(loops))
}

// handler serves /metrics, /healthz (the process answers) and /readyz (kubelet
// and controller can reach it).
func (m *nodeMetrics) handler(ready func(context.Context) error) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.reading, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if err := ready(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		w.WriteHeader(http.StatusOK)
	})
	return mux
}
