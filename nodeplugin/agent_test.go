package nodeplugin

import (
	"context"
	"errors"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// dial serves the agent of f and returns a client of it.
func (f *fixture) dial(t *testing.T) agentv1.AgentClient {
	t.Helper()
	l := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	agentv1.RegisterAgentServer(server, &Agent{Stager: f.Stager})
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	conn, err := grpc.NewClient("passthrough:agent", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return l.Dial() }))
	must(t, err)
	t.Cleanup(func() {
		conn.Close()
		server.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	})
	return agentv1.NewAgentClient(conn)
}

func code(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestAgentTellsALife(t *testing.T) {
	gate := make(chan error)
	f := start(t, 400*testMiB, nil)
	f.fill.do = func(ctx context.Context, job Job, report func(Progress)) (Result, error) {
		report(Progress{BytesDone: 1, BytesTotal: int64(len(content)), Retries: 3, Format: "qcow2"})
		select {
		case err := <-gate:
			if err != nil {
				return Result{}, err
			}
			return complete(ctx, job, report)
		case <-ctx.Done():
			return Result{}, context.Cause(ctx)
		}
	}
	c := f.dial(t)
	ctx := t.Context()
	stream, err := c.Watch(ctx, &agentv1.WatchRequest{})
	must(t, err)
	first, err := stream.Recv()
	must(t, err)
	if len(first.Pools) != 1 || first.Pools[0].Uuid != "" || first.Pools[0].AvailableBytes <= 0 || len(first.Volumes) != 0 {
		t.Fatalf("first report: got %v, want one pool that is not made and no volumes", first)
	}
	// until reads reports until ok says of one that it is the one.
	until := func(what string, ok func(*agentv1.Report) bool) {
		t.Helper()
		for range 20 {
			r, err := stream.Recv()
			must(t, err)
			if ok(r) {
				return
			}
		}
		t.Fatalf("20 reports and none that %s", what)
	}
	volume := func(ok func(*agentv1.Volume) bool) func(*agentv1.Report) bool {
		return func(r *agentv1.Report) bool {
			for _, v := range r.Volumes {
				if v.Id == "v" && ok(v) {
					return true
				}
			}
			return false
		}
	}

	create := &agentv1.CreateVolumeRequest{Id: "v", Pool: "default", CapacityBytes: 32 * testMiB, Mode: agentv1.Mode_MODE_FILESYSTEM, FsType: "ext4", AwaitsData: true}
	v, err := c.CreateVolume(ctx, create)
	must(t, err)
	if v.State != agentv1.State_STATE_EMPTY || v.PoolUuid == "" || v.CapacityBytes != 32*testMiB || v.CreatedAt == 0 {
		t.Errorf("got %v", v)
	}
	var pool, made bool // in one report or two
	until("shows pool and volume", func(r *agentv1.Report) bool {
		pool = pool || len(r.Pools) == 1 && r.Pools[0].Uuid == v.PoolUuid
		made = made || len(r.Volumes) == 1
		return pool && made
	})
	create.CapacityBytes *= 2
	_, err = c.CreateVolume(ctx, create)
	code(t, err, codes.AlreadyExists)
	_, err = c.CreateVolume(ctx, &agentv1.CreateVolumeRequest{Id: "w", Pool: "default", CapacityBytes: 1 << 40, Mode: agentv1.Mode_MODE_BLOCK})
	code(t, err, codes.ResourceExhausted)
	_, err = c.CreateVolume(ctx, &agentv1.CreateVolumeRequest{Id: "w", Pool: "default", CapacityBytes: testMiB})
	code(t, err, codes.InvalidArgument)
	_, err = c.CreateSnapshot(ctx, &agentv1.CreateSnapshotRequest{Id: "s", VolumeId: "v"})
	code(t, err, codes.FailedPrecondition)
	_, err = c.CreateSnapshot(ctx, &agentv1.CreateSnapshotRequest{Id: "s", VolumeId: "none"})
	code(t, err, codes.NotFound)
	_, err = c.Populate(ctx, &agentv1.PopulateRequest{Id: "v", SourceKind: "http"})
	code(t, err, codes.InvalidArgument)

	r1 := &agentv1.PopulateRequest{Id: "v", SourceKind: "http", Recipe: "r1"}
	v, err = c.Populate(ctx, r1)
	must(t, err)
	if v.State != agentv1.State_STATE_FILLING {
		t.Errorf("after Populate got %v", v)
	}
	until("shows progress", volume(func(v *agentv1.Volume) bool {
		return v.State == agentv1.State_STATE_FILLING && v.Progress.BytesDone == 1 && v.Progress.Retries == 3 && v.Progress.Format == "qcow2"
	}))
	want(t, f.Stage(ctx, "v", f.path("s"), csi.Use{Mode: csi.Filesystem}), csi.ErrBusy)
	until("shows that the kubelet waits", volume(func(v *agentv1.Volume) bool { return v.Wanted }))
	gate <- fault.Terminal(fault.Unauthorized, errors.New("401: check the secret"))
	until("shows the failure", volume(func(v *agentv1.Volume) bool {
		return v.State == agentv1.State_STATE_FAILED && v.Failure.Terminal && v.Failure.Reason == "Unauthorized" && v.Recipe == "r1"
	}))
	v, err = c.Populate(ctx, r1)
	must(t, err)
	if v.State != agentv1.State_STATE_FAILED {
		t.Errorf("the same recipe again: got %v", v)
	}
	r1.Recipe = "r2"
	_, err = c.Populate(ctx, r1)
	must(t, err)
	gate <- nil
	until("shows it populated", volume(func(v *agentv1.Volume) bool {
		return v.State == agentv1.State_STATE_POPULATED && v.Failure == nil && v.Progress.BytesDone == int64(len(content))
	}))
	must(t, f.Stage(ctx, "v", f.path("s"), csi.Use{Mode: csi.Filesystem}))
	until("shows it staged", volume(func(v *agentv1.Volume) bool { return v.Staged && !v.Wanted }))
	s, err := c.CreateSnapshot(ctx, &agentv1.CreateSnapshotRequest{Id: "s", VolumeId: "v"})
	must(t, err)
	if !s.Snapshot || s.SourceId != "v" || s.State != agentv1.State_STATE_POPULATED {
		t.Errorf("got snapshot %v", s)
	}
	v, err = c.ExpandVolume(ctx, &agentv1.ExpandVolumeRequest{Id: "v", CapacityBytes: 40 * testMiB})
	must(t, err)
	if v.CapacityBytes != 40*testMiB {
		t.Errorf("got %v", v)
	}
	_, err = c.DeleteVolume(ctx, &agentv1.DeleteVolumeRequest{Id: "v"})
	code(t, err, codes.FailedPrecondition)
	must(t, f.Unstage(ctx, "v", f.path("s")))
	_, err = c.DeleteVolume(ctx, &agentv1.DeleteVolumeRequest{Id: "v", Pool: "default", PoolUuid: v.PoolUuid})
	must(t, err)
	until("shows it removed", func(r *agentv1.Report) bool { return len(r.RemovedVolumes) == 1 && r.RemovedVolumes[0] == "v" })
	_, err = c.DeleteSnapshot(ctx, &agentv1.DeleteSnapshotRequest{Id: "s"})
	must(t, err)
	f.Close()
	for {
		if _, err = stream.Recv(); err != nil {
			break
		}
	}
	code(t, err, codes.Unavailable)
}
