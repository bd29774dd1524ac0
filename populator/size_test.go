package populator

import (
	"math/rand/v2"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestVolumeBytes(t *testing.T) {
	for _, r := range []struct {
		request int64
		fsType  string
		want    int64
	}{
		{1, "", mib}, {mib, "ext4", mib}, {mib + 1, "", 2 * mib}, {mib, "xfs", 300 * mib}, {301 * mib, "xfs", 301 * mib},
	} {
		if got := VolumeBytes(r.request, r.fsType); got != r.want {
			t.Errorf("a request of %d bytes for %q makes %d, want %d", r.request, r.fsType, got, r.want)
		}
	}
}

func TestParseOverhead(t *testing.T) {
	for s, want := range map[string]Overhead{"0": 0, "0.06": 60, "0.055": 55, "1": 1000, "1.000": 1000, "0.5": 500} {
		if got, err := ParseOverhead(s); err != nil || got != want {
			t.Errorf("%q is %d (%v), want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "1.1", "-0.1", "0.0555", ".5", "6%", "0.", "NaN"} {
		if got, err := ParseOverhead(s); err == nil || got != DefaultOverhead {
			t.Errorf("%q is %d (%v), want an error and the default", s, got, err)
		}
	}
	if OverheadOf(corev1.PersistentVolumeBlock, 60) != 0 || OverheadOf(corev1.PersistentVolumeFilesystem, 60) != 60 {
		t.Error("Block volumes lose nothing, Filesystem volumes the overhead")
	}
}

// A claim of the size that Request tells has room for the disk, at every size up to 64 TiB.
func TestRequestHoldsTheDisk(t *testing.T) {
	if got := DefaultOverhead.Request(1 << 30); got != 1138166334 { // ceil(1 GiB * 1.06)
		t.Errorf("1 GiB needs %d bytes", got)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		disk := 1 + r.Int64N(64<<40)
		o := Overhead(r.Int64N(1001))
		request := o.Request(disk)
		if usable := o.Usable(request); usable < disk {
			t.Fatalf("disk %d, overhead %d/1000: a claim of %d bytes holds %d", disk, o, request, usable)
		}
		if usable := o.Usable(request); usable%mib != 0 || usable > request {
			t.Fatalf("disk %d, overhead %d/1000: usable are %d of %d bytes", disk, o, usable, request)
		}
	}
}
