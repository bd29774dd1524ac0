package csi

import (
	"cmp"
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Controller is the CSI Controller service over Volumes.
type Controller struct {
	csi.UnimplementedControllerServer
	Volumes Volumes
}

func (c *Controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	var caps []*csi.ControllerServiceCapability
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		caps = append(caps, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: caps}, nil
}

func (c *Controller) CreateVolume(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	request, err := request(r)
	if err != nil {
		return nil, Answer(err)
	}
	v, err := c.Volumes.Create(ctx, request)
	if err != nil {
		return nil, Answer(err)
	}
	resp := &csi.CreateVolumeResponse{Volume: volume(v)}
	// The sidecar compares what it asked for with what it gets.
	resp.Volume.ContentSource = r.GetVolumeContentSource()
	return resp, nil
}

// request checks everything that can be told from the request alone.
func request(r *csi.CreateVolumeRequest) (Request, error) {
	var q Request
	var err error
	if q.Name, err = idOf(r.GetName()); err != nil {
		return q, err
	}
	u, err := useOf(r.GetVolumeCapabilities())
	if err != nil {
		return q, err
	}
	p, err := ParseClass(r.GetParameters())
	if err != nil {
		return q, err
	}
	for key := range r.GetMutableParameters() {
		return q, fmt.Errorf("mutable parameter %s: this driver knows none: %w", key, ErrInvalid)
	}
	q.Mode, q.Pool = u.Mode, p.Pool
	if u.Mode == Filesystem {
		q.FSType = cmp.Or(p.FSType, u.FSType, "ext4")
	}
	q.ClaimNamespace, q.ClaimName = p.claimNamespace, p.claimName
	var minimum int64
	if q.FSType == "xfs" {
		minimum = MinimumXFSBytes
	}
	if q.RequiredBytes, err = bytesOf(r.GetCapacityRange(), minimum); err != nil {
		return q, err
	}
	q.LimitBytes = r.GetCapacityRange().GetLimitBytes()
	if q.Nodes, err = nodesOf(r.GetAccessibilityRequirements()); err != nil {
		return q, err
	}
	if source := r.GetVolumeContentSource(); source != nil {
		q.FromVolume, q.FromSnapshot = source.GetVolume().GetVolumeId(), source.GetSnapshot().GetSnapshotId()
		if q.FromVolume == "" && q.FromSnapshot == "" {
			return q, fmt.Errorf("volume content source names neither a volume nor a snapshot: %w", ErrInvalid)
		}
	}
	return q, nil
}

func volume(v Volume) *csi.Volume {
	out := &csi.Volume{
		VolumeId:           v.ID,
		CapacityBytes:      v.CapacityBytes,
		AccessibleTopology: []*csi.Topology{{Segments: map[string]string{TopologyKey: v.Node}}},
	}
	switch {
	case v.FromVolume != "":
		out.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.FromVolume}}}
	case v.FromSnapshot != "":
		out.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: v.FromSnapshot}}}
	}
	return out
}

func (c *Controller) DeleteVolume(ctx context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := given("volume id", r.GetVolumeId()); err != nil {
		return nil, Answer(err)
	}
	if err := c.Volumes.Delete(ctx, r.GetVolumeId()); err != nil {
		return nil, Answer(err)
	}
	return &csi.DeleteVolumeResponse{}, nil
}

func (c *Controller) ValidateVolumeCapabilities(ctx context.Context, r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if err := given("volume id", r.GetVolumeId()); err != nil {
		return nil, Answer(err)
	}
	if len(r.GetVolumeCapabilities()) == 0 {
		return nil, Answer(fmt.Errorf("no volume capabilities given: %w", ErrInvalid))
	}
	v, err := c.Volumes.Get(ctx, r.GetVolumeId())
	if err != nil {
		return nil, Answer(err)
	}
	u, err := useOf(r.GetVolumeCapabilities())
	if err == nil {
		_, err = ParseClass(r.GetParameters())
	}
	if err == nil && u.Mode != v.Mode {
		err = fmt.Errorf("the volume's mode is %s, not %s", v.Mode, u.Mode)
	}
	if err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      r.GetVolumeContext(),
		VolumeCapabilities: r.GetVolumeCapabilities(),
		Parameters:         r.GetParameters(),
	}}, nil
}

func (c *Controller) ListVolumes(ctx context.Context, r *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	start, err := page(r.GetStartingToken(), r.GetMaxEntries())
	if err != nil {
		return nil, Answer(err)
	}
	vs, next, err := c.Volumes.List(ctx, start, int(r.GetMaxEntries()))
	if err != nil {
		return nil, Answer(err)
	}
	resp := &csi.ListVolumesResponse{NextToken: token(next)}
	for _, v := range vs {
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: volume(v)})
	}
	return resp, nil
}

func (c *Controller) GetCapacity(ctx context.Context, r *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	p, err := ParseClass(r.GetParameters())
	if err != nil {
		return nil, Answer(err)
	}
	if len(r.GetVolumeCapabilities()) > 0 {
		if _, err := useOf(r.GetVolumeCapabilities()); err != nil {
			// Spec: the capacity for volumes that we do not offer is none.
			return &csi.GetCapacityResponse{}, nil
		}
	}
	node := ""
	if t := r.GetAccessibleTopology(); len(t.GetSegments()) > 0 {
		var ok bool
		if node, ok = t.GetSegments()[TopologyKey]; !ok {
			return &csi.GetCapacityResponse{}, nil
		}
	}
	available, maximum, err := c.Volumes.Capacity(ctx, node, p.Pool)
	if err != nil {
		return nil, Answer(err)
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: max(available, 0),
		MaximumVolumeSize: wrapperspb.Int64(max(maximum, 0)),
		MinimumVolumeSize: wrapperspb.Int64(mib),
	}, nil
}

func (c *Controller) ControllerExpandVolume(ctx context.Context, r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	if err := given("volume id", r.GetVolumeId()); err != nil {
		return nil, Answer(err)
	}
	if r.GetCapacityRange().GetRequiredBytes() == 0 && r.GetCapacityRange().GetLimitBytes() == 0 {
		return nil, Answer(fmt.Errorf("no capacity range given: %w", ErrInvalid))
	}
	bytes, err := bytesOf(r.GetCapacityRange(), 0)
	if err != nil {
		return nil, Answer(err)
	}
	if r.GetVolumeCapability() != nil {
		if _, err := use(r.GetVolumeCapability()); err != nil {
			return nil, Answer(err)
		}
	}
	capacity, onNode, err := c.Volumes.Expand(ctx, r.GetVolumeId(), bytes, r.GetCapacityRange().GetLimitBytes())
	if err != nil {
		return nil, Answer(err)
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: capacity, NodeExpansionRequired: onNode}, nil
}

func (c *Controller) CreateSnapshot(ctx context.Context, r *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	id, err := idOf(r.GetName())
	if err == nil {
		err = given("source volume id", r.GetSourceVolumeId())
	}
	if err == nil {
		err = checkSnapshotParameters(r.GetParameters())
	}
	if err != nil {
		return nil, Answer(err)
	}
	s, err := c.Volumes.CreateSnapshot(ctx, id, r.GetSourceVolumeId())
	if err != nil {
		return nil, Answer(err)
	}
	return &csi.CreateSnapshotResponse{Snapshot: snapshot(s)}, nil
}

func snapshot(s Snapshot) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId:     s.ID,
		SourceVolumeId: s.SourceVolume,
		SizeBytes:      s.SizeBytes,
		CreationTime:   timestamppb.New(s.CreatedAt),
		ReadyToUse:     s.Ready,
	}
}

func (c *Controller) DeleteSnapshot(ctx context.Context, r *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if err := given("snapshot id", r.GetSnapshotId()); err != nil {
		return nil, Answer(err)
	}
	if err := c.Volumes.DeleteSnapshot(ctx, r.GetSnapshotId()); err != nil {
		return nil, Answer(err)
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

func (c *Controller) GetSnapshot(ctx context.Context, r *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if err := given("snapshot id", r.GetSnapshotId()); err != nil {
		return nil, Answer(err)
	}
	ss, _, err := c.Volumes.ListSnapshots(ctx, r.GetSnapshotId(), "", "", 1)
	if err != nil {
		return nil, Answer(err)
	}
	if len(ss) == 0 {
		return nil, Answer(fmt.Errorf("snapshot %s: %w", r.GetSnapshotId(), ErrNotFound))
	}
	return &csi.GetSnapshotResponse{Snapshot: snapshot(ss[0])}, nil
}

func (c *Controller) ListSnapshots(ctx context.Context, r *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	start, err := page(r.GetStartingToken(), r.GetMaxEntries())
	if err != nil {
		return nil, Answer(err)
	}
	ss, next, err := c.Volumes.ListSnapshots(ctx, r.GetSnapshotId(), r.GetSourceVolumeId(), start, int(r.GetMaxEntries()))
	if err != nil {
		return nil, Answer(err)
	}
	resp := &csi.ListSnapshotsResponse{NextToken: token(next)}
	for _, s := range ss {
		resp.Entries = append(resp.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: snapshot(s)})
	}
	return resp, nil
}

func page(token string, max int32) (start string, err error) {
	if max < 0 {
		return "", fmt.Errorf("max_entries of %d is negative: %w", max, ErrInvalid)
	}
	return startOf(token)
}

func given(what, value string) error {
	if value == "" {
		return fmt.Errorf("no %s given: %w", what, ErrInvalid)
	}
	if len(value) > 4096 { // a path; ids are refused at maxNameBytes when they are made
		return fmt.Errorf("%s of %d bytes, at most 4096 are allowed: %w", what, len(value), ErrInvalid)
	}
	return nil
}
