package populator

import (
	"testing"
	"time"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
)

func TestProgressSummary(t *testing.T) {
	for _, r := range []struct {
		p         *agentv1.Progress
		populated bool
		want      string
		eta       int64
	}{
		{&agentv1.Progress{BytesDone: 42 * mib, BytesTotal: 100 * mib, BytesPerSecond: 2 * mib}, false, "42 %, 2 MiB/s, 29s left", 29},
		{&agentv1.Progress{BytesDone: 100*mib - 1, BytesTotal: 100 * mib, BytesPerSecond: mib}, false, "99 %, 1 MiB/s, 1s left", 1},
		{&agentv1.Progress{BytesDone: 5 * mib, BytesPerSecond: mib}, false, "5 MiB, 1 MiB/s", -1},
		{&agentv1.Progress{BytesDone: 5 * mib, BytesTotal: 10 * mib}, false, "50 %, 0 MiB/s", -1},
		{&agentv1.Progress{BytesDone: 12 * mib, BytesTotal: 10 * mib, BytesPerSecond: mib}, false, "100 %, 1 MiB/s, 0s left", 0},
		{&agentv1.Progress{BytesDone: 10 * mib, BytesTotal: 10 * mib, BytesPerSecond: mib}, true, "100 %", 0},
		{&agentv1.Progress{BytesDone: 1 << 50, BytesTotal: 1 << 51, BytesPerSecond: 1 << 40}, false, "50 %, 1048576 MiB/s, 17m4s left", 1024},
	} {
		got := Progress(r.p, r.populated)
		if got.Summary != r.want || got.ETASeconds != r.eta {
			t.Errorf("%v is %q, %d s; want %q, %d s", r.p, got.Summary, got.ETASeconds, r.want, r.eta)
		}
	}
	if Progress(nil, true) != nil {
		t.Error("nothing is known of a volume that was never filled")
	}
}

func at(done, total int64) map[string]string {
	return Annotations(&v1alpha1.NodeVolume{Status: v1alpha1.NodeVolumeStatus{Phase: v1alpha1.PhaseFilling, Progress: &v1alpha1.Progress{BytesDone: done, BytesTotal: total, BytesPerSecond: 7}}})
}

// Claims are changed at most every 10 % and every 30 s, and at once for a new phase (R1).
func TestDue(t *testing.T) {
	populated := Annotations(&v1alpha1.NodeVolume{Status: v1alpha1.NodeVolumeStatus{Phase: v1alpha1.PhasePopulated, Populated: true}})
	for _, r := range []struct {
		what      string
		old, next map[string]string
		since     time.Duration
		want      bool
	}{
		{"a claim without a record shows that it waits", nil, Annotations(nil), time.Hour, true},
		{"and shows it once", Annotations(nil), Annotations(nil), time.Hour, false},
		{"the transfer starts", Annotations(nil), at(0, 100), 0, true},
		{"9 % in an hour", at(10, 100), at(19, 100), time.Hour, false},
		{"10 % in 29 s", at(10, 100), at(20, 100), 29 * time.Second, false},
		{"10 % in 30 s", at(10, 100), at(20, 100), 30 * time.Second, true},
		{"the same for an hour", at(10, 100), at(10, 100), time.Hour, false},
		{"without a total, after 30 s", at(10, 0), at(20, 0), 30 * time.Second, true},
		{"without a total, after 29 s", at(10, 0), at(20, 0), 29 * time.Second, false},
		{"it starts again at nought", at(50, 100), at(0, 100), time.Minute, true},
		{"it ends", at(95, 100), populated, 0, true},
		{"the record goes", at(95, 100), Annotations(nil), 0, true},
	} {
		if got := Due(r.old, r.next, r.since); got != r.want {
			t.Errorf("%s: %v", r.what, got)
		}
	}
	if a := at(4217, 10000); a[AnnotationProgress] != "42.17%" || a[AnnotationBytesDone] != "4217" || a[AnnotationBytesTotal] != "10000" || a[AnnotationRate] != "7" {
		t.Errorf("annotations are %v", a)
	}
	if populated[AnnotationProgress] != "100.0%" || at(1, 0)[AnnotationProgress] != "N/A" {
		t.Errorf("progress is %v, then %v", at(1, 0), populated)
	}
	if Decile(at(39, 100)) != 3 || Decile(at(40, 100)) != 4 || Decile(nil) != 0 {
		t.Error("deciles")
	}
}
