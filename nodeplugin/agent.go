package nodeplugin

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/broker"
	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/pool"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// reportPause is the least time between two reports of one stream: what changes
// meanwhile is told once.
const reportPause = 500 * time.Millisecond

// Agent is the agent service over a Stager.
type Agent struct {
	agentv1.UnimplementedAgentServer
	Stager *Stager
}

func (a *Agent) CreateVolume(ctx context.Context, r *agentv1.CreateVolumeRequest) (*agentv1.Volume, error) {
	spec := pool.Spec{
		ID: r.GetId(), Bytes: r.GetCapacityBytes(), FSType: r.GetFsType(), From: r.GetFrom(),
		AwaitsData: r.GetAwaitsData(), Preallocate: r.GetPreallocate(),
	}
	switch r.GetMode() {
	case agentv1.Mode_MODE_BLOCK:
		spec.Mode = pool.Block
	case agentv1.Mode_MODE_FILESYSTEM:
		spec.Mode = pool.Filesystem
	default:
		return nil, status.Errorf(codes.InvalidArgument, "create volume %s: mode %s", r.GetId(), r.GetMode())
	}
	if spec.From != "" && spec.AwaitsData {
		return nil, status.Errorf(codes.InvalidArgument, "create volume %s: a volume that shares the blocks of %s awaits no data", r.GetId(), spec.From)
	}
	if err := a.Stager.Create(ctx, r.GetPool(), r.GetPoolUuid(), spec); err != nil {
		return nil, csi.Answer(err)
	}
	return a.volume(r.GetId())
}

// volume is the answer of a call that went well.
func (a *Agent) volume(id string) (*agentv1.Volume, error) {
	p, v, err := a.Stager.pools.find(id)
	if err != nil {
		return nil, csi.Answer(err)
	}
	return a.Stager.tell(p, v), nil
}

func (a *Agent) DeleteVolume(ctx context.Context, r *agentv1.DeleteVolumeRequest) (*agentv1.DeleteVolumeResponse, error) {
	if err := a.Stager.Delete(ctx, r.GetId(), r.GetPool(), r.GetPoolUuid()); err != nil {
		return nil, csi.Answer(err)
	}
	return &agentv1.DeleteVolumeResponse{}, nil
}

func (a *Agent) ExpandVolume(ctx context.Context, r *agentv1.ExpandVolumeRequest) (*agentv1.Volume, error) {
	if err := a.Stager.ExpandStorage(ctx, r.GetId(), r.GetCapacityBytes()); err != nil {
		return nil, csi.Answer(err)
	}
	return a.volume(r.GetId())
}

func (a *Agent) VerifyVolume(ctx context.Context, r *agentv1.VerifyVolumeRequest) (*agentv1.VerifyVolumeResponse, error) {
	recorded, difference, err := a.Stager.Verify(ctx, r.GetId())
	if err != nil {
		return nil, csi.Answer(err)
	}
	out := &agentv1.VerifyVolumeResponse{Digest: recorded}
	if difference != (digest.Difference{}) {
		out.Difference = difference.String()
	}
	return out, nil
}

func (a *Agent) CreateSnapshot(ctx context.Context, r *agentv1.CreateSnapshotRequest) (*agentv1.Volume, error) {
	if err := a.Stager.Snapshot(ctx, r.GetId(), r.GetVolumeId()); err != nil {
		return nil, csi.Answer(err)
	}
	return a.volume(r.GetId())
}

func (a *Agent) DeleteSnapshot(ctx context.Context, r *agentv1.DeleteSnapshotRequest) (*agentv1.DeleteSnapshotResponse, error) {
	if err := a.Stager.Delete(ctx, r.GetId(), r.GetPool(), r.GetPoolUuid()); err != nil {
		return nil, csi.Answer(err)
	}
	return &agentv1.DeleteSnapshotResponse{}, nil
}

func (a *Agent) Populate(ctx context.Context, r *agentv1.PopulateRequest) (*agentv1.Volume, error) {
	if r.GetRecipe() == "" || r.GetSourceKind() == "" {
		return nil, status.Errorf(codes.InvalidArgument, "populate volume %s: source kind %q, recipe %q: both are needed", r.GetId(), r.GetSourceKind(), r.GetRecipe())
	}
	content := r.GetContent()
	if content == "" {
		content = r.GetRecipe()
	}
	cluster, cerr := broker.ParsePrefixes(r.GetClusterNetworks()...)
	services, serr := broker.ParsePrefixes(r.GetOwnServices()...)
	if err := errors.Join(cerr, serr); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "populate volume %s: the cluster's network: %v", r.GetId(), err)
	}
	err := a.Stager.Populate(ctx, r.GetId(), Order{
		Recipe: Recipe{
			Source:      source.Spec{Kind: r.GetSourceKind(), Params: r.GetSourceParams()},
			Format:      r.GetFormat(),
			Disk:        r.GetDisk(),
			Checksum:    r.GetChecksum(),
			Archive:     r.GetArchive(),
			Preallocate: r.GetPreallocate(),
			Digest:      content,
			Cluster:     cluster,
			Services:    services,
		},
		Attempt: r.GetRecipe(),
		Owner:   r.GetOwner(),
	})
	if err != nil {
		return nil, csi.Answer(err)
	}
	return a.volume(r.GetId())
}

// Watch sends everything, and then what changes, until the caller or the plugin ends.
func (a *Agent) Watch(_ *agentv1.WatchRequest, stream agentv1.Agent_WatchServer) error {
	w := a.Stager.changes.subscribe()
	defer w.stop()
	// Subscribed before the first look: nothing falls between.
	report := a.Stager.Report()
	sent := map[string]*agentv1.Pool{}
	for _, p := range report.Pools {
		sent[p.GetName()] = p
	}
	pause := time.NewTimer(reportPause)
	defer pause.Stop()
	for {
		if err := stream.Send(report); err != nil {
			return err
		}
		pause.Reset(reportPause)
		if err := await(a.Stager.life, stream, pause.C); err != nil {
			return err
		}
		if err := await(a.Stager.life, stream, w.ready); err != nil {
			return err
		}
		report = a.Stager.changed(w.take(), sent)
	}
}

// await waits for c, unless the stream or the plugin ends before.
func await[T any](life context.Context, stream agentv1.Agent_WatchServer, c <-chan T) error {
	select {
	case <-c:
		return nil
	case <-stream.Context().Done():
		return status.FromContextError(stream.Context().Err()).Err()
	case <-life.Done():
		return status.Error(codes.Unavailable, "the node plugin is ending")
	}
}

// changed reports the volumes named, and the pools that differ from what was sent.
func (s *Stager) changed(ids map[string]struct{}, sent map[string]*agentv1.Pool) *agentv1.Report {
	report := &agentv1.Report{}
	for id := range ids {
		if id == "" {
			continue
		}
		p, v, err := s.pools.find(id)
		switch {
		case err == nil:
			report.Volumes = append(report.Volumes, s.tell(p, v))
		case status.Code(csi.Answer(err)) == codes.NotFound:
			report.RemovedVolumes = append(report.RemovedVolumes, id)
		}
	}
	for _, p := range s.pools {
		now := tellPool(p)
		if !proto.Equal(now, sent[now.GetName()]) {
			sent[now.GetName()] = now
			report.Pools = append(report.Pools, now)
		}
	}
	return report
}

// Report tells all pools and volumes as they are now.
func (s *Stager) Report() *agentv1.Report {
	report := &agentv1.Report{}
	for _, p := range s.pools {
		report.Pools = append(report.Pools, tellPool(p))
		for _, v := range p.List() {
			report.Volumes = append(report.Volumes, s.tell(p, v))
		}
	}
	return report
}

func tellPool(p *pool.Pool) *agentv1.Pool {
	out := &agentv1.Pool{Name: p.Name(), Uuid: p.UUID(), Problem: p.Problem()}
	if out.Problem != "" {
		return out
	}
	st, err := p.Stats()
	if err != nil {
		out.Problem = err.Error()
		return out
	}
	out.TotalBytes, out.ProvisionedBytes, out.AvailableBytes = st.TotalBytes, st.ProvisionedBytes, st.AvailableBytes
	return out
}

// tell is a volume in the words of the agent service. Its state follows from
// three facts: populated, failed with this recipe, a transfer runs.
func (s *Stager) tell(p *pool.Pool, v pool.Volume) *agentv1.Volume {
	f := factsOf(v)
	out := &agentv1.Volume{
		Id: v.ID, Pool: p.Name(), PoolUuid: p.UUID(), CapacityBytes: v.Bytes, FsType: v.FSType,
		Snapshot: v.Snapshot, SourceId: v.SourceID, CreatedAt: v.CreatedAt.Unix(), Recipe: v.Recipe, Preallocated: v.Preallocate,
		State: agentv1.State_STATE_EMPTY, Mode: agentv1.Mode_MODE_BLOCK,
	}
	if v.Mode == pool.Filesystem {
		out.Mode = agentv1.Mode_MODE_FILESYSTEM
	}
	s.mu.Lock()
	j := s.jobs[v.ID]
	out.Wanted, out.Staged = s.wanted[v.ID], s.loops[v.ID] != nil
	s.mu.Unlock()
	switch {
	case v.State == pool.Populated:
		out.State = agentv1.State_STATE_POPULATED
		if v.AwaitsData {
			out.Progress = &agentv1.Progress{
				BytesDone: f.VirtualBytes, BytesTotal: f.VirtualBytes, VirtualSizeBytes: diskBytes(f.Format, f.VirtualBytes), Format: f.Format, Warnings: f.Warnings,
				Digest: f.Digest, FromCache: f.Cached,
			}
		}
	case j != nil:
		out.State = agentv1.State_STATE_FILLING
		progress, failure := j.seen()
		out.Progress = &agentv1.Progress{
			BytesDone: progress.BytesDone, BytesTotal: max(progress.BytesTotal, 0), BytesPerSecond: progress.BytesPerSecond,
			Retries: int32(progress.Retries), Format: progress.Format, VirtualSizeBytes: diskBytes(progress.Format, progress.VirtualSize),
		}
		if failure != nil {
			out.Failure = &agentv1.Failure{Reason: failure.Reason, Message: failure.Error()}
		} else if progress.Message != "" {
			out.Failure = &agentv1.Failure{Reason: progress.Reason, Message: progress.Message}
		}
	case v.Failure != nil:
		out.Failure = &agentv1.Failure{Terminal: v.Failure.Terminal, Reason: v.Failure.Reason, Message: v.Failure.Message}
		if v.Failure.Terminal {
			out.State = agentv1.State_STATE_FAILED
		}
	}
	return out
}

// diskBytes is the size of the disk that came of an image; an archive is none.
func diskBytes(format string, bytes int64) int64 {
	if format == image.Archive {
		return 0
	}
	return max(bytes, 0)
}
