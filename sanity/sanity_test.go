package sanity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin"
	"github.com/longshore-io/longshore/nodeplugin/pool"
	"github.com/longshore-io/longshore/test/cluster"
)

// node is the name of the test's only node.
const node = "n1"

// oneNode is csi.Volumes for a single node without Kubernetes: it asks the
// node's agent and keeps no record of its own.
type oneNode struct {
	mu     sync.Mutex
	agent  *nodeplugin.Agent
	stager *nodeplugin.Stager
}

var kinds = []error{csi.ErrNotFound, csi.ErrExists, csi.ErrFull, csi.ErrBusy, csi.ErrPrecondition, csi.ErrUnavailable, csi.ErrInvalid, csi.ErrOutOfRange}

// kindOf gives an answer of the agent its kind again.
func kindOf(err error) error {
	for _, k := range kinds {
		if err != nil && strings.HasSuffix(err.Error(), k.Error()) {
			return fmt.Errorf("%w: %w", err, k)
		}
	}
	return err
}

func volumeOf(v *agentv1.Volume) csi.Volume {
	out := csi.Volume{ID: v.Id, CapacityBytes: v.CapacityBytes, Node: node, Mode: csi.Block}
	if v.Mode == agentv1.Mode_MODE_FILESYSTEM {
		out.Mode = csi.Filesystem
	}
	return out
}

func snapshotOf(v *agentv1.Volume) csi.Snapshot {
	return csi.Snapshot{ID: v.Id, SourceVolume: v.SourceId, SizeBytes: v.CapacityBytes, CreatedAt: time.Unix(v.CreatedAt, 0), Ready: true}
}

func (o *oneNode) Create(ctx context.Context, r csi.Request) (csi.Volume, error) {
	mode := agentv1.Mode_MODE_BLOCK
	if r.Mode == csi.Filesystem {
		mode = agentv1.Mode_MODE_FILESYSTEM
	}
	v, err := o.agent.CreateVolume(ctx, &agentv1.CreateVolumeRequest{
		Id: r.Name, Pool: r.Pool, CapacityBytes: r.RequiredBytes, Mode: mode, FsType: r.FSType, From: r.FromVolume + r.FromSnapshot,
	})
	if err != nil {
		return csi.Volume{}, kindOf(err)
	}
	out := volumeOf(v)
	out.FromVolume, out.FromSnapshot = r.FromVolume, r.FromSnapshot
	return out, nil
}

func (o *oneNode) Delete(ctx context.Context, id string) error {
	_, err := o.agent.DeleteVolume(ctx, &agentv1.DeleteVolumeRequest{Id: id})
	return kindOf(err)
}

// list returns volumes, or snapshots, with ids after start.
func (o *oneNode) list(snapshots bool, start string, most int, keep func(*agentv1.Volume) bool) (found []*agentv1.Volume, next string) {
	all := map[string]*agentv1.Volume{}
	for _, v := range o.stager.Report().Volumes {
		if v.Snapshot == snapshots && v.Id > start && keep(v) {
			all[v.Id] = v
		}
	}
	for _, id := range slices.Sorted(maps.Keys(all)) {
		if most > 0 && len(found) == most {
			return found, found[most-1].Id
		}
		found = append(found, all[id])
	}
	return found, ""
}

func (o *oneNode) Get(_ context.Context, id string) (csi.Volume, error) {
	found, _ := o.list(false, "", 0, func(v *agentv1.Volume) bool { return v.Id == id })
	if len(found) == 0 {
		return csi.Volume{}, fmt.Errorf("volume %s: %w", id, csi.ErrNotFound)
	}
	return volumeOf(found[0]), nil
}

func (o *oneNode) List(_ context.Context, start string, most int) ([]csi.Volume, string, error) {
	found, next := o.list(false, start, most, func(*agentv1.Volume) bool { return true })
	var out []csi.Volume
	for _, v := range found {
		out = append(out, volumeOf(v))
	}
	return out, next, nil
}

func (o *oneNode) Expand(ctx context.Context, id string, required, _ int64) (int64, bool, error) {
	v, err := o.agent.ExpandVolume(ctx, &agentv1.ExpandVolumeRequest{Id: id, CapacityBytes: required})
	return v.GetCapacityBytes(), true, kindOf(err)
}

func (o *oneNode) Capacity(context.Context, string, string) (int64, int64, error) {
	p := o.stager.Report().Pools[0]
	return p.AvailableBytes, p.AvailableBytes, nil
}

func (o *oneNode) CreateSnapshot(ctx context.Context, id, volume string) (csi.Snapshot, error) {
	v, err := o.agent.CreateSnapshot(ctx, &agentv1.CreateSnapshotRequest{Id: id, VolumeId: volume})
	if err != nil {
		return csi.Snapshot{}, kindOf(err)
	}
	return snapshotOf(v), nil
}

func (o *oneNode) DeleteSnapshot(ctx context.Context, id string) error {
	_, err := o.agent.DeleteSnapshot(ctx, &agentv1.DeleteSnapshotRequest{Id: id})
	return kindOf(err)
}

func (o *oneNode) ListSnapshots(_ context.Context, id, volume, start string, most int) ([]csi.Snapshot, string, error) {
	found, next := o.list(true, start, most, func(v *agentv1.Volume) bool {
		return cmp.Or(id, v.Id) == v.Id && cmp.Or(volume, v.SourceId) == v.SourceId
	})
	var out []csi.Snapshot
	for _, v := range found {
		out = append(out, snapshotOf(v))
	}
	return out, next, nil
}

// noFiller: nothing is filled here.
type noFiller struct{}

func (noFiller) Fill(context.Context, nodeplugin.Job, func(nodeplugin.Progress)) (nodeplugin.Result, error) {
	return nodeplugin.Result{}, errors.New("no volume of this test awaits data")
}

// serve serves on a socket in dir until the test ends and returns its address.
func serve(t *testing.T, path string, register func(*grpc.Server)) string {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	csispec.RegisterIdentityServer(s, &csi.Identity{Version: "test"})
	register(s)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "unix://" + path
}

// TestDriverOnRealDevices runs the suite against the CSI services over one real
// pool with real loop devices and filesystems. The controller of a cluster is
// held against it in test/e2e.
func TestDriverOnRealDevices(t *testing.T) {
	bin, err := cluster.Build(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]Options{
		"block": {AccessType: "block", VolumeBytes: 64 << 20, ExpandBytes: 96 << 20},
		"ext4":  {AccessType: "mount", VolumeBytes: 64 << 20, ExpandBytes: 96 << 20, Parameters: map[string]string{csi.ParameterFSType: "ext4"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			stager, _, err := nodeplugin.New(t.Context(), nodeplugin.Config{
				Pools: []pool.Config{{Name: "default", Dir: filepath.Join(dir, "pool"), Bytes: 3 << 30}},
				Fill:  noFiller{}, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if left := stager.Report().Volumes; len(left) != 0 {
					t.Errorf("csi-sanity has left volumes: %v", left)
				}
				if err := stager.Shut(context.Background()); err != nil {
					t.Error(err)
				}
			})
			o.Dir = filepath.Join(dir, "work")
			if err := os.Mkdir(o.Dir, 0o755); err != nil {
				t.Fatal(err)
			}
			volumes := &oneNode{agent: &nodeplugin.Agent{Stager: stager}, stager: stager}
			o.Binary = bin.Path("csi-sanity")
			o.NodeEndpoint = serve(t, filepath.Join(dir, "node.sock"), func(s *grpc.Server) {
				csispec.RegisterNodeServer(s, &csi.Node{Stager: stager, Name: node})
			})
			o.ControllerEndpoint = serve(t, filepath.Join(dir, "controller.sock"), func(s *grpc.Server) {
				csispec.RegisterControllerServer(s, &csi.Controller{Volumes: volumes})
			})
			r, err := Run(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			t.Log(r.Line())
			Check(t, r)
		})
	}
}

func TestReportOfFailures(t *testing.T) {
	r, err := parse([]byte(`<testsuites><testsuite>
		<testcase name="[BeforeSuite]" status="passed"/>
		<testcase name="[It] a works" status="passed"/>
		<testcase name="[It] b fails" status="failed"><failure message="x"/></testcase>
		<testcase name="[It] c is skipped" status="skipped"><skipped/></testcase>
		<testcase name="[It] d hangs" status="interrupted"/>
		<testcase name="[AfterSuite]" status="panicked"><error/></testcase>
	</testsuite></testsuites>`))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(r.Passed, r.Failed, r.Skipped), "[a works] [b fails d hangs (interrupted) [AfterSuite]] [c is skipped]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if _, err := parse([]byte("<testsuites/>")); err == nil {
		t.Error("a report of nothing is taken for a success")
	}
}
