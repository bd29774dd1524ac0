package nodeplugin

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// A volume is compared with what filled it whenever nobody uses it, also after a restart,
// and what was written since is found.
func TestVerify(t *testing.T) {
	image := noise(t, 11, 20*testMiB+512)
	w := serveFile(t, image)
	f := startFilling(t, 2400*testMiB)
	ctx := t.Context()
	for _, spec := range []pool.Spec{
		{ID: "block", Bytes: 64 * testMiB, Mode: pool.Block},
		{ID: "ext4", Bytes: 64 * testMiB, Mode: pool.Filesystem, FSType: "ext4"},
		{ID: "xfs", Bytes: 400 * testMiB, Mode: pool.Filesystem, FSType: "xfs"},
	} {
		t.Run(spec.ID, func(t *testing.T) {
			id := spec.ID
			spec.AwaitsData = true
			f.create(t, spec)
			_, _, err := f.Verify(ctx, id)
			want(t, err, csi.ErrPrecondition, "not populated")
			order, err := wholeOrder(w.url(), id)
			must(t, err)
			must(t, f.Populate(ctx, id, order))
			f.eventually(t, "it is populated", func() bool { return f.state(id) == pool.Populated && f.job(id) == nil })
			same := func() {
				t.Helper()
				sum, d, err := f.Verify(ctx, id)
				if must(t, err); d.String() != "it is the same" || !strings.HasPrefix(sum, "blake3-64k:20972032:") {
					t.Errorf("%s: %s", sum, d)
				}
			}
			same()
			use := csi.Use{Mode: csi.Mode(spec.Mode), FSType: spec.FSType}
			stage := func() {
				t.Helper()
				must(t, f.Stage(ctx, id, f.path("s"), use))
				must(t, f.Publish(ctx, id, f.path("s"), f.path("t"), use))
			}
			unstage := func() {
				t.Helper()
				must(t, f.Unpublish(ctx, id, f.path("t")))
				must(t, f.Unstage(ctx, id, f.path("s")))
			}
			stage()
			_, _, err = f.Verify(ctx, id)
			want(t, err, csi.ErrBusy, "a pod uses it")
			unstage()
			same()
			stage()
			overwrite(t, spec.Mode, f.path("t"))
			unstage()
			if _, d, err := f.Verify(ctx, id); err != nil || !strings.HasPrefix(d.String(), "its digest is blake3-64k:20972032:") {
				t.Errorf("of a volume that was written to: %s, %v", d, err)
			}
			if n := f.volumeLoops(t); n != 0 {
				t.Errorf("%d loop devices are left", n)
			}
			must(t, f.Delete(ctx, id, "", ""))
		})
	}
	f.create(t, pool.Spec{ID: "ordinary", Bytes: 8 * testMiB, Mode: pool.Block})
	_, _, err := f.Verify(ctx, "ordinary")
	want(t, err, csi.ErrPrecondition, "nothing to compare")
}

// Whoever wants the volume ends its verification.
func TestVerifyGivesWay(t *testing.T) {
	f := start(t, 200*testMiB, complete)
	ctx, end := context.WithCancelCause(t.Context())
	verifying := holder{deed: "verify", giveWay: func() { end(errGivesWay) }}
	release, err := f.holdAs("v", verifying)
	must(t, err)
	defer release()
	if _, err := f.holdAs("v", verifying); !errors.Is(err, csi.ErrBusy) || ctx.Err() != nil {
		t.Errorf("another verification: %v, %v", err, context.Cause(ctx))
	}
	if _, err := f.hold("v", "stage"); !errors.Is(err, csi.ErrBusy) || !errors.Is(context.Cause(ctx), csi.ErrBusy) {
		t.Errorf("stage: %v, %v", err, context.Cause(ctx))
	}
}
