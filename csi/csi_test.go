package csi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// fakeVolumes keeps volumes in a map; err, when set, is what every method answers.
type fakeVolumes struct {
	err       error
	volumes   map[string]Volume
	snapshots map[string]Snapshot
	asked     Request
	limit     int64
	node      string
	pool      string
}

func (f *fakeVolumes) Create(_ context.Context, r Request) (Volume, error) {
	f.asked = r
	v := Volume{ID: r.Name, CapacityBytes: r.RequiredBytes, Node: "n1", Mode: r.Mode, FromVolume: r.FromVolume, FromSnapshot: r.FromSnapshot}
	return v, f.err
}
func (f *fakeVolumes) Delete(_ context.Context, id string) error { delete(f.volumes, id); return f.err }
func (f *fakeVolumes) Get(_ context.Context, id string) (Volume, error) {
	if v, ok := f.volumes[id]; ok {
		return v, f.err
	}
	return Volume{}, fmt.Errorf("volume %s: %w", id, ErrNotFound)
}

func after[T any](m map[string]T, start string, max int) (out []T, next string) {
	var keys []string
	for k := range m {
		if k > start {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, cmp.Compare)
	for i, k := range keys {
		if max > 0 && i == max {
			return out, keys[i-1]
		}
		out = append(out, m[k])
	}
	return out, ""
}

func (f *fakeVolumes) List(_ context.Context, start string, max int) ([]Volume, string, error) {
	v, next := after(f.volumes, start, max)
	return v, next, f.err
}
func (f *fakeVolumes) Expand(_ context.Context, id string, required, limit int64) (int64, bool, error) {
	f.limit = limit
	return required, true, f.err
}
func (f *fakeVolumes) Capacity(_ context.Context, node, pool string) (int64, int64, error) {
	f.node, f.pool = node, pool
	return 100 << 30, 40 << 30, f.err
}
func (f *fakeVolumes) CreateSnapshot(_ context.Context, id, volume string) (Snapshot, error) {
	return Snapshot{ID: id, SourceVolume: volume, SizeBytes: 5, CreatedAt: time.Unix(7, 0), Ready: true}, f.err
}
func (f *fakeVolumes) DeleteSnapshot(context.Context, string) error { return f.err }
func (f *fakeVolumes) ListSnapshots(_ context.Context, id, _, start string, max int) ([]Snapshot, string, error) {
	if id != "" {
		if s, ok := f.snapshots[id]; ok {
			return []Snapshot{s}, "", f.err
		}
		return nil, "", f.err
	}
	s, next := after(f.snapshots, start, max)
	return s, next, f.err
}

func block(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

func mount(fsType string, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
	}
}

func topology(nodes ...string) (ts []*csi.Topology) {
	for _, n := range nodes {
		ts = append(ts, &csi.Topology{Segments: map[string]string{TopologyKey: n, "other/key": "x"}})
	}
	return ts
}

const writer = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER

// wantError checks code and that the message holds each of the words.
func wantError(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("got %v, want code %s", err, code)
	}
	for _, w := range words {
		if !strings.Contains(status.Convert(err).Message(), w) {
			t.Errorf("message %q does not say %q", status.Convert(err).Message(), w)
		}
	}
}

func TestCreateVolumeAsks(t *testing.T) {
	for name, c := range map[string]struct {
		in   *csi.CreateVolumeRequest
		want Request
	}{
		"a block volume without a size gets 1 GiB in the default pool": {
			&csi.CreateVolumeRequest{Name: "pvc-1", VolumeCapabilities: []*csi.VolumeCapability{block(writer)}},
			Request{Name: "pvc-1", RequiredBytes: 1 << 30, Mode: Block, Pool: "default"},
		},
		"a filesystem without a type is ext4, and a size is rounded up to whole MiB": {
			&csi.CreateVolumeRequest{Name: "pvc-1", VolumeCapabilities: []*csi.VolumeCapability{mount("")}, CapacityRange: &csi.CapacityRange{RequiredBytes: 5<<20 + 1}},
			Request{Name: "pvc-1", RequiredBytes: 6 << 20, Mode: Filesystem, FSType: "ext4", Pool: "default"},
		},
		"xfs has a smallest size": {
			&csi.CreateVolumeRequest{Name: "pvc-1", VolumeCapabilities: []*csi.VolumeCapability{mount("xfs")}, CapacityRange: &csi.CapacityRange{RequiredBytes: 1}},
			Request{Name: "pvc-1", RequiredBytes: MinimumXFSBytes, Mode: Filesystem, FSType: "xfs", Pool: "default"},
		},
		"a limit alone bounds the default size from above": {
			&csi.CreateVolumeRequest{Name: "pvc-1", VolumeCapabilities: []*csi.VolumeCapability{block(writer)}, CapacityRange: &csi.CapacityRange{LimitBytes: 3<<20 + 5}},
			Request{Name: "pvc-1", RequiredBytes: 3 << 20, LimitBytes: 3<<20 + 5, Mode: Block, Pool: "default"},
		},
		"every parameter that a class and the sidecar may send is taken": {
			&csi.CreateVolumeRequest{Name: "pvc-1", VolumeCapabilities: []*csi.VolumeCapability{mount("")}, Parameters: map[string]string{
				ParameterPool: "fast", ParameterPopulate: "stage", ParameterFSType: "xfs",
				"csi.storage.k8s.io/pvc/name": "c", "csi.storage.k8s.io/pvc/namespace": "ns", "csi.storage.k8s.io/pv/name": "pvc-1"}},
			Request{Name: "pvc-1", RequiredBytes: 1 << 30, Mode: Filesystem, FSType: "xfs", Pool: "fast", ClaimNamespace: "ns", ClaimName: "c"},
		},
		"preferred nodes come first and only requisite ones come at all": {
			&csi.CreateVolumeRequest{Name: "pvc-1", VolumeCapabilities: []*csi.VolumeCapability{block(writer)},
				AccessibilityRequirements: &csi.TopologyRequirement{Requisite: topology("n1", "n2", "n3"), Preferred: topology("n3", "n9")}},
			Request{Name: "pvc-1", RequiredBytes: 1 << 30, Mode: Block, Pool: "default", Nodes: []string{"n3", "n1", "n2"}},
		},
		"a name that Kubernetes would refuse becomes its digest": {
			&csi.CreateVolumeRequest{Name: "Sanity_9F-" + strings.Repeat("x", 118), VolumeCapabilities: []*csi.VolumeCapability{block(writer)}},
			Request{Name: "n-0ed5c458573a5e10a709602f4f137e6989bca806", RequiredBytes: 1 << 30, Mode: Block, Pool: "default"},
		},
		"a clone names its source": {
			&csi.CreateVolumeRequest{Name: "pvc-1", VolumeCapabilities: []*csi.VolumeCapability{block(writer)}, VolumeContentSource: &csi.VolumeContentSource{
				Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: "pvc-0"}}}},
			Request{Name: "pvc-1", RequiredBytes: 1 << 30, Mode: Block, Pool: "default", FromVolume: "pvc-0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeVolumes{}
			resp, err := (&Controller{Volumes: f}).CreateVolume(t.Context(), c.in)
			if err != nil {
				t.Fatal(err)
			}
			if d := gocmp.Diff(c.want, f.asked); d != "" {
				t.Error(d)
			}
			if got := resp.Volume.AccessibleTopology; len(got) != 1 || len(got[0].Segments) != 1 || got[0].Segments[TopologyKey] != "n1" {
				t.Errorf("got topology %v, want that of n1 alone", got)
			}
			if resp.Volume.VolumeContext != nil {
				t.Errorf("got volume context %v, want none", resp.Volume.VolumeContext)
			}
			if got, want := resp.Volume.GetContentSource().GetVolume().GetVolumeId(), c.want.FromVolume; got != want {
				t.Errorf("got content source %q, want %q", got, want)
			}
		})
	}
}

func TestCreateVolumeRefuses(t *testing.T) {
	with := func(change func(*csi.CreateVolumeRequest)) *csi.CreateVolumeRequest {
		r := &csi.CreateVolumeRequest{Name: "pvc-1", VolumeCapabilities: []*csi.VolumeCapability{block(writer)}}
		change(r)
		return r
	}
	parameter := func(key, value string) *csi.CreateVolumeRequest {
		return with(func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{key: value} })
	}
	for name, c := range map[string]struct {
		in    *csi.CreateVolumeRequest
		code  codes.Code
		words []string
	}{
		"no name":          {with(func(r *csi.CreateVolumeRequest) { r.Name = "" }), codes.InvalidArgument, nil},
		"a name too long":  {with(func(r *csi.CreateVolumeRequest) { r.Name = strings.Repeat("a", 129) }), codes.InvalidArgument, []string{"129 bytes", "128"}},
		"no capabilities":  {with(func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = nil }), codes.InvalidArgument, nil},
		"a populate mode":  {parameter(ParameterPopulate, "eager"), codes.InvalidArgument, []string{ParameterPopulate, `"eager"`, "bind", "stage"}},
		"a mode to come":   {parameter(ParameterPopulate, "instant"), codes.InvalidArgument, []string{ParameterPopulate, "yet", "bind", "stage"}},
		"a filesystem":     {parameter(ParameterFSType, "btrfs"), codes.InvalidArgument, []string{ParameterFSType, `"btrfs"`, "ext4", "xfs"}},
		"a pool's name":    {parameter(ParameterPool, "../x"), codes.InvalidArgument, []string{ParameterPool, `"../x"`}},
		"an own parameter": {parameter("longshore.dev/pol", "x"), codes.InvalidArgument, []string{"longshore.dev/pol", `"x"`, ParameterPool}},
		"another's":        {parameter("replicas", "3"), codes.InvalidArgument, []string{"replicas"}},
		"many writers": {with(func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0] = block(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
		}), codes.InvalidArgument, []string{"MULTI_NODE_MULTI_WRITER"}},
		"a capability's fs": {with(func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = mount("zfs") }), codes.InvalidArgument, []string{"zfs"}},
		"suid":              {with(func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = mount("ext4", "noatime", "suid") }), codes.InvalidArgument, []string{"suid"}},
		"both modes":        {with(func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = append(r.VolumeCapabilities, mount("ext4")) }), codes.InvalidArgument, nil},
		"no room to round": {with(func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 1<<20 + 1, LimitBytes: 1<<20 + 2}
		}), codes.OutOfRange, []string{"1048578"}},
		"limit < required": {with(func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}
		}), codes.InvalidArgument, nil},
		"foreign topology": {with(func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{"zone": "a"}}}}
		}), codes.InvalidArgument, []string{TopologyKey}},
		"mutable parameters": {with(func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"iops": "1"} }), codes.InvalidArgument, []string{"iops"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeVolumes{}
			_, err := (&Controller{Volumes: f}).CreateVolume(t.Context(), c.in)
			wantError(t, err, c.code, c.words...)
			if f.asked.Name != "" {
				t.Error("the volume was asked for all the same")
			}
		})
	}
}

func TestErrorsBecomeCodes(t *testing.T) {
	for err, code := range map[error]codes.Code{
		ErrNotFound: codes.NotFound, ErrExists: codes.AlreadyExists, ErrFull: codes.ResourceExhausted, ErrBusy: codes.Aborted,
		ErrPrecondition: codes.FailedPrecondition, ErrUnavailable: codes.Unavailable, ErrInvalid: codes.InvalidArgument,
		ErrOutOfRange: codes.OutOfRange, context.DeadlineExceeded: codes.DeadlineExceeded, errors.New("x"): codes.Internal,
	} {
		f := &fakeVolumes{err: fmt.Errorf("pool default: %w", err)}
		_, got := (&Controller{Volumes: f}).DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "v"})
		wantError(t, got, code, "pool default")
	}
}

func TestListsGoOnWhereTheyStopped(t *testing.T) {
	f := &fakeVolumes{volumes: map[string]Volume{}, snapshots: map[string]Snapshot{}}
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		f.volumes[id] = Volume{ID: id}
		f.snapshots[id] = Snapshot{ID: id}
	}
	c := &Controller{Volumes: f}
	var got []string
	token := ""
	for {
		resp, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range resp.Entries {
			got = append(got, e.Volume.VolumeId)
		}
		if token = resp.NextToken; token == "" {
			break
		}
		delete(f.volumes, "b") // gone between pages: the token that names it stays good
	}
	if want := "a b c d e"; strings.Join(got, " ") != want {
		t.Errorf("got %v, want %s", got, want)
	}
	for _, bad := range []string{"invalid-token", "61", "x"} {
		_, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: bad})
		wantError(t, err, codes.Aborted, bad)
		_, err = c.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: bad})
		wantError(t, err, codes.Aborted, bad)
	}
	_, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
	wantError(t, err, codes.InvalidArgument, "-1")
}

func TestSnapshots(t *testing.T) {
	f := &fakeVolumes{snapshots: map[string]Snapshot{"s": {ID: "s", SourceVolume: "v", Ready: true}}}
	c := &Controller{Volumes: f}
	_, err := c.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{SourceVolumeId: "v"})
	wantError(t, err, codes.InvalidArgument)
	_, err = c.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s"})
	wantError(t, err, codes.InvalidArgument)
	_, err = c.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "v", Parameters: map[string]string{"longshore.dev/x": "1"}})
	wantError(t, err, codes.InvalidArgument, "longshore.dev/x")
	resp, err := c.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "v", Parameters: map[string]string{"csi.storage.k8s.io/volumesnapshot/name": "x"}})
	if err != nil || !resp.Snapshot.ReadyToUse || resp.Snapshot.CreationTime.Seconds != 7 || resp.Snapshot.SizeBytes != 5 {
		t.Errorf("got %v, %v", resp, err)
	}
	if got, err := c.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: "s"}); err != nil || got.Snapshot.SourceVolumeId != "v" {
		t.Errorf("got %v, %v", got, err)
	}
	_, err = c.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: "none"})
	wantError(t, err, codes.NotFound, "none")
}

func TestCapacityAndExpansion(t *testing.T) {
	f := &fakeVolumes{}
	c := &Controller{Volumes: f}
	got, err := c.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: topology("n2")[0], Parameters: map[string]string{ParameterPool: "fast"}})
	if err != nil || got.AvailableCapacity != 100<<30 || got.MaximumVolumeSize.Value != 40<<30 || f.node != "n2" || f.pool != "fast" {
		t.Errorf("got %v, %v of node %q pool %q", got, err, f.node, f.pool)
	}
	got, err = c.GetCapacity(t.Context(), &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{block(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)}})
	if err != nil || got.AvailableCapacity != 0 {
		t.Errorf("for shared volumes got %v, %v, want none", got, err)
	}
	got, err = c.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{Segments: map[string]string{"zone": "a"}}})
	if err != nil || got.AvailableCapacity != 0 {
		t.Errorf("for a foreign topology got %v, %v, want none", got, err)
	}
	_, err = c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: "v"})
	wantError(t, err, codes.InvalidArgument)
	_, err = c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{CapacityRange: &csi.CapacityRange{RequiredBytes: 1}})
	wantError(t, err, codes.InvalidArgument)
	resp, err := c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: 1<<20 + 1, LimitBytes: 9 << 20}})
	if err != nil || resp.CapacityBytes != 2<<20 || !resp.NodeExpansionRequired || f.limit != 9<<20 {
		t.Errorf("got %v, %v, limit %d", resp, err, f.limit)
	}
}

func TestValidateConfirmsOnlyWhatTheVolumeIs(t *testing.T) {
	c := &Controller{Volumes: &fakeVolumes{volumes: map[string]Volume{"v": {ID: "v", Mode: Block}}}}
	ask := func(caps ...*csi.VolumeCapability) (*csi.ValidateVolumeCapabilitiesResponse, error) {
		return c.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "v", VolumeCapabilities: caps})
	}
	if resp, err := ask(block(writer)); err != nil || resp.Confirmed == nil {
		t.Errorf("got %v, %v, want it confirmed", resp, err)
	}
	for _, cap := range []*csi.VolumeCapability{mount("ext4"), block(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)} {
		if resp, err := ask(cap); err != nil || resp.Confirmed != nil || resp.Message == "" {
			t.Errorf("%v: got %v, %v, want a message and no confirmation", cap, resp, err)
		}
	}
	_, err := ask()
	wantError(t, err, codes.InvalidArgument)
	_, err = c.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "w", VolumeCapabilities: []*csi.VolumeCapability{block(writer)}})
	wantError(t, err, codes.NotFound, "w")
}

// fakeStager remembers the last call.
type fakeStager struct {
	err  error
	call string
	use  Use
}

func (f *fakeStager) Stage(_ context.Context, id, path string, u Use) error {
	f.call, f.use = "stage "+id+" "+path, u
	return f.err
}
func (f *fakeStager) Unstage(_ context.Context, id, path string) error {
	f.call = "unstage " + id + " " + path
	return f.err
}
func (f *fakeStager) Publish(_ context.Context, id, staging, target string, u Use) error {
	f.call, f.use = "publish "+id+" "+staging+" "+target, u
	return f.err
}
func (f *fakeStager) Unpublish(_ context.Context, id, target string) error {
	f.call = "unpublish " + id + " " + target
	return f.err
}
func (f *fakeStager) Expand(_ context.Context, id, path string) (int64, error) {
	f.call = "expand " + id + " " + path
	return 5 << 20, f.err
}
func (f *fakeStager) Stats(_ context.Context, id, path string) (Stats, error) {
	f.call = "stats " + id + " " + path
	return Stats{TotalBytes: 3, UsedBytes: 1, AvailableBytes: 2, TotalInodes: 9}, f.err
}

func TestNodeCallsTheStager(t *testing.T) {
	f := &fakeStager{}
	n := &Node{Stager: f, Name: "n1"}
	single := mount("xfs", "noatime,nodiratime", "sync")
	single.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	for want, call := range map[string]func() error{
		"stage v /s": func() error {
			_, err := n.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "v", StagingTargetPath: "/s", VolumeCapability: single})
			if d := gocmp.Diff(Use{Mode: Filesystem, FSType: "xfs", MountOptions: []string{"noatime", "nodiratime", "sync"}, SingleWriter: true}, f.use); d != "" {
				t.Error(d)
			}
			return err
		},
		"unstage v /s": func() error {
			_, err := n.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: "v", StagingTargetPath: "/s"})
			return err
		},
		"publish v /s /t": func() error {
			_, err := n.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: "v", StagingTargetPath: "/s", TargetPath: "/t", VolumeCapability: block(writer), Readonly: true})
			if d := gocmp.Diff(Use{Mode: Block, ReadOnly: true}, f.use); d != "" {
				t.Error(d)
			}
			return err
		},
		"unpublish v /t": func() error {
			_, err := n.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "v", TargetPath: "/t"})
			return err
		},
		"expand v /t": func() error {
			resp, err := n.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: "v", VolumePath: "/t"})
			if resp.GetCapacityBytes() != 5<<20 {
				t.Errorf("got %v", resp)
			}
			return err
		},
		"stats v /t": func() error {
			resp, err := n.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "v", VolumePath: "/t"})
			if len(resp.GetUsage()) != 2 || resp.Usage[0].Available != 2 || resp.Usage[1].Total != 9 {
				t.Errorf("got %v", resp)
			}
			return err
		},
	} {
		f.err = nil
		if err := call(); err != nil || f.call != want {
			t.Errorf("got call %q, error %v, want %q", f.call, err, want)
		}
	}
	f.err = fmt.Errorf("42 %% copied: %w", ErrBusy)
	_, err := n.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "v", StagingTargetPath: "/s", VolumeCapability: single})
	wantError(t, err, codes.Aborted, "42 %")
}

func TestNodeRefuses(t *testing.T) {
	f := &fakeStager{}
	n := &Node{Stager: f}
	ctx := t.Context()
	for what, err := range map[string]error{
		"stage without id":         second(n.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{StagingTargetPath: "/s", VolumeCapability: block(writer)})),
		"stage without path":       second(n.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: "v", VolumeCapability: block(writer)})),
		"stage without capability": second(n.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: "v", StagingTargetPath: "/s"})),
		"unstage without id":       second(n.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{StagingTargetPath: "/s"})),
		"unstage without path":     second(n.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: "v"})),
		"publish without target":   second(n.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: "v", StagingTargetPath: "/s", VolumeCapability: block(writer)})),
		"unpublish without target": second(n.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: "v"})),
		"expand without path":      second(n.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: "v"})),
		"stats without id":         second(n.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumePath: "/t"})),
	} {
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: got %v, want InvalidArgument", what, err)
		}
	}
	wantError(t, second(n.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: "v", TargetPath: "/t", VolumeCapability: block(writer)})), codes.FailedPrecondition, "staging")
	if f.call != "" {
		t.Errorf("the stager was called: %s", f.call)
	}
}

func second[T any](_ T, err error) error { return err }

func TestIdentity(t *testing.T) {
	ready := errors.New("not yet")
	i := &Identity{Version: "1", Ready: func(context.Context) error { return ready }}
	if p, err := i.Probe(t.Context(), nil); err != nil || p.Ready.Value {
		t.Errorf("got %v, %v, want not ready", p, err)
	}
	ready = nil
	if p, err := i.Probe(t.Context(), nil); err != nil || !p.Ready.Value {
		t.Errorf("got %v, %v, want ready", p, err)
	}
	if info, _ := i.GetPluginInfo(t.Context(), nil); info.Name != DriverName || info.VendorVersion != "1" {
		t.Errorf("got %v", info)
	}
}
