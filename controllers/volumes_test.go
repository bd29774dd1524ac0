package controllers

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

func portText() string { return strconv.Itoa(world.port) }

func wantErr(t *testing.T, err, kind error, words ...string) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Fatalf("got %v, want %v", err, kind)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not name %q", err, w)
		}
	}
}

// Ordinary volumes: made where there is room, once, and the same for the same name.
func TestCreate(t *testing.T) {
	t.Parallel()
	pool, v := poolName(t), world.volumes
	a, b := newNode(t, pool, 100*mib), newNode(t, pool, 60*mib)
	r := csi.Request{Name: "pvc-create-" + pool, RequiredBytes: 40 * mib, Mode: csi.Filesystem, FSType: "ext4", Pool: pool}
	made, err := v.Create(t.Context(), r)
	must(t, err)
	if made.Node != a.name || made.CapacityBytes != 40*mib || made.ID != r.Name {
		t.Errorf("made %+v, want it on %s, which has most room", made, a.name)
	}
	again, err := v.Create(t.Context(), r)
	must(t, err)
	if again != made {
		t.Errorf("the second call answers %+v, the first %+v", again, made)
	}
	for what, change := range map[string]func(*csi.Request){
		"larger":          func(r *csi.Request) { r.RequiredBytes = 41 * mib },
		"limited":         func(r *csi.Request) { r.RequiredBytes, r.LimitBytes = mib, 2*mib },
		"another mode":    func(r *csi.Request) { r.Mode, r.FSType = csi.Block, "" },
		"another node":    func(r *csi.Request) { r.Nodes = []string{b.name} },
		"another fs type": func(r *csi.Request) { r.FSType = "xfs" },
	} {
		other := r
		change(&other)
		if _, err := v.Create(t.Context(), other); !errors.Is(err, csi.ErrExists) {
			t.Errorf("%s: got %v, want ErrExists", what, err)
		}
	}
	r.Name, r.RequiredBytes = "pvc-big-"+pool, 70*mib
	_, err = v.Create(t.Context(), r)
	wantErr(t, err, csi.ErrFull, "73400320", a.name+": 62914560 bytes free")
	if _, err := v.Get(t.Context(), r.Name); !errors.Is(err, csi.ErrNotFound) {
		t.Errorf("the record of a volume that nobody made stays: %v", err)
	}
	r.Nodes = []string{"nowhere"}
	_, err = v.Create(t.Context(), r)
	wantErr(t, err, csi.ErrUnavailable, "nowhere")

	for range 2 {
		must(t, v.Delete(t.Context(), made.ID))
	}
	if a.has(made.ID) {
		t.Error("the node has the volume still")
	}
	must(t, v.Delete(t.Context(), "never-was"))
	must(t, v.Delete(t.Context(), "../not/a/name"))
}

// The node knows better than the controller how much room there is: the next node is asked.
func TestCreateElsewhere(t *testing.T) {
	t.Parallel()
	pool := poolName(t)
	a, b := newNode(t, pool, 100*mib), newNode(t, pool, 90*mib)
	a.mu.Lock()
	a.pool.AvailableBytes = 0 // and it has not told
	a.mu.Unlock()
	made, err := world.volumes.Create(t.Context(), csi.Request{Name: "elsewhere-" + pool, RequiredBytes: 80 * mib, Mode: csi.Block, Pool: pool})
	must(t, err)
	if made.Node != b.name {
		t.Errorf("made %+v, want it on %s", made, b.name)
	}
}

// Snapshots and clones stay on their node and in their mode; both grow.
func TestSnapshotsAndClones(t *testing.T) {
	t.Parallel()
	pool, v := poolName(t), world.volumes
	a, b := newNode(t, pool, 100*mib), newNode(t, pool, 200*mib)
	src, err := v.Create(t.Context(), csi.Request{Name: "source-" + pool, RequiredBytes: 10 * mib, Mode: csi.Block, Pool: pool, Nodes: []string{a.name}})
	must(t, err)
	snap, err := v.CreateSnapshot(t.Context(), "snapshot-"+pool, src.ID)
	must(t, err)
	again, err := v.CreateSnapshot(t.Context(), "snapshot-"+pool, src.ID)
	must(t, err)
	if !snap.Ready || snap.SizeBytes != 10*mib || snap.SourceVolume != src.ID || snap.CreatedAt.Unix() != 1700000000 || again != snap {
		t.Errorf("snapshot is %+v, then %+v", snap, again)
	}
	_, err = v.CreateSnapshot(t.Context(), "snapshot-"+pool, "none-"+pool)
	wantErr(t, err, csi.ErrNotFound)
	other, err := v.Create(t.Context(), csi.Request{Name: "other-" + pool, RequiredBytes: mib, Mode: csi.Block, Pool: pool, Nodes: []string{a.name}})
	must(t, err)
	_, err = v.CreateSnapshot(t.Context(), "snapshot-"+pool, other.ID)
	wantErr(t, err, csi.ErrExists)

	clone := csi.Request{Name: "clone-" + pool, RequiredBytes: 10 * mib, Mode: csi.Block, Pool: pool, FromVolume: src.ID}
	made, err := v.Create(t.Context(), clone)
	must(t, err)
	if made.Node != a.name {
		t.Errorf("the clone is on %s, its source on %s", made.Node, a.name)
	}
	restored := csi.Request{Name: "restored-" + pool, RequiredBytes: 12 * mib, Mode: csi.Block, Pool: pool, FromSnapshot: snap.ID}
	made, err = v.Create(t.Context(), restored)
	must(t, err)
	if made.CapacityBytes != 12*mib {
		t.Errorf("restored to %d bytes", made.CapacityBytes)
	}
	got, err := v.Get(t.Context(), made.ID)
	must(t, err)
	if got.FromSnapshot != snap.ID {
		t.Errorf("its source is told as %+v", got)
	}
	for what, row := range map[string]struct {
		change func(*csi.Request)
		kind   error
	}{
		"on another node":     {func(r *csi.Request) { r.Nodes = []string{b.name} }, csi.ErrFull},
		"in another mode":     {func(r *csi.Request) { r.Mode = csi.Filesystem }, csi.ErrInvalid},
		"in another pool":     {func(r *csi.Request) { r.Pool = "other" }, csi.ErrInvalid},
		"of what is not":      {func(r *csi.Request) { r.FromVolume = "none" }, csi.ErrNotFound},
		"of a snapshot as if": {func(r *csi.Request) { r.FromVolume = snap.ID }, csi.ErrNotFound},
		"smaller":             {func(r *csi.Request) { r.RequiredBytes, r.LimitBytes = mib, 2*mib }, csi.ErrOutOfRange},
	} {
		r := clone
		r.Name = "bad-" + pool
		row.change(&r)
		if _, err := v.Create(t.Context(), r); !errors.Is(err, row.kind) {
			t.Errorf("a clone %s: got %v, want %v", what, err, row.kind)
		}
	}

	grown, onNode, err := v.Expand(t.Context(), src.ID, 20*mib, 0)
	must(t, err)
	if grown != 20*mib || onNode {
		t.Errorf("grown to %d bytes, on node %v", grown, onNode)
	}
	_, _, err = v.Expand(t.Context(), src.ID, 500*mib, 0)
	wantErr(t, err, csi.ErrFull)
	if got, err := v.Get(t.Context(), src.ID); err != nil || got.CapacityBytes != 20*mib {
		t.Errorf("after an expansion that did not fit the volume has %+v (%v)", got, err)
	}
	_, _, err = v.Expand(t.Context(), src.ID, mib, 2*mib)
	wantErr(t, err, csi.ErrOutOfRange)

	all, next, err := v.ListSnapshots(t.Context(), "", src.ID, "", 0)
	must(t, err)
	if len(all) != 1 || next != "" || all[0].ID != snap.ID {
		t.Errorf("snapshots of %s are %+v, next %q", src.ID, all, next)
	}
	must(t, v.DeleteSnapshot(t.Context(), snap.ID))
	must(t, v.DeleteSnapshot(t.Context(), snap.ID))
}

// The list is paged, and a page goes on where the last one ended although that volume is gone.
func TestList(t *testing.T) {
	t.Parallel()
	pool, v := poolName(t), world.volumes
	newNode(t, pool, 100*mib)
	prefix := "list-" + pool + "-"
	for _, s := range []string{"a", "b", "c"} {
		_, err := v.Create(t.Context(), csi.Request{Name: prefix + s, RequiredBytes: mib, Mode: csi.Block, Pool: pool})
		must(t, err)
	}
	page, next, err := v.List(t.Context(), prefix, 2)
	must(t, err)
	if len(page) != 2 || page[0].ID != prefix+"a" || next != prefix+"b" {
		t.Fatalf("page is %+v, next %q", page, next)
	}
	must(t, v.Delete(t.Context(), next))
	page, _, err = v.List(t.Context(), next, 1)
	must(t, err)
	if len(page) != 1 || page[0].ID != prefix+"c" {
		t.Errorf("the next page is %+v", page)
	}
}

// What is not populated is neither cloned nor snapshotted nor grown; its place
// counts as free for the scheduler until its PV is there, and as taken for CreateVolume (R3).
func TestVolumesThatAreFilled(t *testing.T) {
	t.Parallel()
	ns, pool, v := namespace(t), poolName(t), world.volumes
	n := newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	n.ordered(id, 1)
	n.fill(id, mib, 48*mib)

	_, err := v.Create(t.Context(), csi.Request{Name: "clone-" + pool, RequiredBytes: 64 * mib, Mode: csi.Block, Pool: pool, FromVolume: id})
	wantErr(t, err, csi.ErrPrecondition, "not populated")
	_, err = v.CreateSnapshot(t.Context(), "snapshot-"+pool, id)
	wantErr(t, err, csi.ErrPrecondition, "not populated")
	_, _, err = v.Expand(t.Context(), id, 65*mib, 0)
	wantErr(t, err, csi.ErrPrecondition, "not populated")

	capacity := func() int64 {
		t.Helper()
		available, maximum, err := v.Capacity(t.Context(), n.name, pool)
		must(t, err)
		if available != maximum {
			t.Errorf("one node: available %d, maximum %d", available, maximum)
		}
		return available
	}
	if got := capacity(); got != 100*mib {
		t.Errorf("while the claim waits for its data the scheduler sees %d bytes, want all", got)
	}
	_, err = v.Create(t.Context(), csi.Request{Name: "more-" + pool, RequiredBytes: 50 * mib, Mode: csi.Block, Pool: pool})
	wantErr(t, err, csi.ErrFull)
	n.populate(id)
	bound(t, claim)
	if got := capacity(); got != 36*mib {
		t.Errorf("once the PV is there the scheduler sees %d bytes, want 36 MiB", got)
	}
	if available, _, err := v.Capacity(t.Context(), "nowhere", pool); err != nil || available != 0 {
		t.Errorf("a node without plugin offers %d (%v)", available, err)
	}
}
