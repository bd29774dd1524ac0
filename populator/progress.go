package populator

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
)

// Annotations that a claim shows its progress with.
const (
	AnnotationProgress   = "cdi.kubevirt.io/storage.populator.progress" // "42.17%", "100.0%", "N/A"
	AnnotationPhase      = "longshore.dev/phase"
	AnnotationBytesDone  = "longshore.dev/bytes-done"
	AnnotationBytesTotal = "longshore.dev/bytes-total"
	AnnotationRate       = "longshore.dev/rate" // bytes per second
	// AnnotationDigest is that of the disk that filled the volume: see docs/digest.md.
	AnnotationDigest = "longshore.dev/content-digest"
	// AnnotationVerify asks, by a value that it has not had before, to compare a claim's volume
	// with that disk; AnnotationVerified is that value, a colon and the answer.
	AnnotationVerify   = "longshore.dev/verify-content"
	AnnotationVerified = "longshore.dev/content-verified"
)

// quiet is how long a claim's annotations rest: each change re-queues the claim
// in every sidecar of the cluster (R1).
const quiet = 30 * time.Second

// Progress tells the agent's figures with what follows from them.
func Progress(p *agentv1.Progress, populated bool) *v1alpha1.Progress {
	if p == nil {
		return nil
	}
	out := &v1alpha1.Progress{
		BytesDone: p.GetBytesDone(), BytesTotal: p.GetBytesTotal(), BytesPerSecond: p.GetBytesPerSecond(), ETASeconds: -1,
		Retries: p.GetRetries(), Format: p.GetFormat(), VirtualSizeBytes: p.GetVirtualSizeBytes(),
		Digest: p.GetDigest(), FromCache: p.GetFromCache(),
	}
	if out.BytesTotal > 0 && out.BytesPerSecond > 0 {
		out.ETASeconds = max(0, (out.BytesTotal-out.BytesDone+out.BytesPerSecond-1)/out.BytesPerSecond)
	}
	rate := fmt.Sprintf("%d MiB/s", (out.BytesPerSecond+mib/2)/mib)
	switch {
	case populated:
		out.BytesPerSecond, out.ETASeconds, out.Summary = 0, 0, "100 %"
	case out.BytesTotal == 0:
		out.Summary = fmt.Sprintf("%d MiB, %s", out.BytesDone/mib, rate)
	case out.ETASeconds < 0:
		out.Summary = fmt.Sprintf("%d %%, %s", tenths(out)/10, rate)
	default:
		out.Summary = fmt.Sprintf("%d %%, %s, %s left", tenths(out)/10, rate, time.Duration(out.ETASeconds)*time.Second)
	}
	return out
}

// tenths of a percent that are done, at most 1000; 0 while the total is unknown.
func tenths(p *v1alpha1.Progress) int64 {
	if p.BytesTotal <= 0 {
		return 0
	}
	done, _ := multiply(min(p.BytesDone, p.BytesTotal), 1000, p.BytesTotal)
	return done
}

// ProgressAnnotations are all that Annotations may set.
var ProgressAnnotations = []string{AnnotationProgress, AnnotationPhase, AnnotationBytesDone, AnnotationBytesTotal, AnnotationRate, AnnotationDigest}

// Annotations are what a claim shows of its record; nil: it has none.
func Annotations(nv *v1alpha1.NodeVolume) map[string]string {
	if nv == nil {
		return map[string]string{AnnotationPhase: string(v1alpha1.PhasePending), AnnotationProgress: "N/A"}
	}
	a := map[string]string{AnnotationPhase: string(cmp.Or(nv.Status.Phase, v1alpha1.PhasePending)), AnnotationProgress: "N/A"}
	p := nv.Status.Progress
	if p != nil {
		a[AnnotationBytesDone] = strconv.FormatInt(p.BytesDone, 10)
		a[AnnotationBytesTotal] = strconv.FormatInt(p.BytesTotal, 10)
		a[AnnotationRate] = strconv.FormatInt(p.BytesPerSecond, 10)
		if p.Digest != "" {
			a[AnnotationDigest] = p.Digest
		}
	}
	switch {
	case nv.Status.Populated:
		a[AnnotationProgress] = "100.0%"
	case p != nil && p.BytesTotal > 0:
		a[AnnotationProgress] = fmt.Sprintf("%.2f%%", 100*float64(min(p.BytesDone, p.BytesTotal))/float64(p.BytesTotal))
	}
	return a
}

// Due tells whether a claim that shows old should show next, the last change
// having been since ago: a new phase at once, progress every 10 % and every 30 s
// at most.
func Due(old, next map[string]string, since time.Duration) bool {
	if old[AnnotationPhase] != next[AnnotationPhase] {
		return true
	}
	if since < quiet || old[AnnotationBytesDone] == next[AnnotationBytesDone] {
		return false
	}
	if number(next[AnnotationBytesTotal]) == 0 {
		return true
	}
	return Decile(old) != Decile(next)
}

// Decile is the number of whole 10 % that annotations tell of.
func Decile(a map[string]string) int64 {
	done, total := number(a[AnnotationBytesDone]), number(a[AnnotationBytesTotal])
	if total <= 0 {
		return 0
	}
	return tenths(&v1alpha1.Progress{BytesDone: done, BytesTotal: total}) / 100
}

func number(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0 // absent, or not ours
	}
	return n
}
