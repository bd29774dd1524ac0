package csi

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// Node is the CSI Node service over a Stager.
type Node struct {
	csi.UnimplementedNodeServer
	Stager Stager
	// Name of the node: its id and the value of its topology.
	Name string
}

func (n *Node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	var caps []*csi.NodeServiceCapability
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		caps = append(caps, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: caps}, nil
}

func (n *Node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{
		NodeId:             n.Name,
		AccessibleTopology: &csi.Topology{Segments: map[string]string{TopologyKey: n.Name}},
	}, nil
}

func (n *Node) NodeStageVolume(ctx context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	u, err := checkNode(r.GetVolumeId(), "staging target path", r.GetStagingTargetPath(), r.GetVolumeCapability())
	if err == nil {
		err = n.Stager.Stage(ctx, r.GetVolumeId(), r.GetStagingTargetPath(), u)
	}
	if err != nil {
		return nil, Answer(err)
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

func checkNode(id, what, path string, c *csi.VolumeCapability) (Use, error) {
	if err := errors.Join(given("volume id", id), given(what, path)); err != nil {
		return Use{}, err
	}
	if c == nil {
		return Use{}, fmt.Errorf("no volume capability given: %w", ErrInvalid)
	}
	return use(c)
}

func (n *Node) NodeUnstageVolume(ctx context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	err := errors.Join(given("volume id", r.GetVolumeId()), given("staging target path", r.GetStagingTargetPath()))
	if err == nil {
		err = n.Stager.Unstage(ctx, r.GetVolumeId(), r.GetStagingTargetPath())
	}
	if err != nil {
		return nil, Answer(err)
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (n *Node) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	u, err := checkNode(r.GetVolumeId(), "target path", r.GetTargetPath(), r.GetVolumeCapability())
	if err == nil && r.GetStagingTargetPath() == "" {
		// CSI spec: what is staged is never published without its staging path.
		err = fmt.Errorf("no staging target path given: %w", ErrPrecondition)
	}
	if err == nil {
		u.ReadOnly = u.ReadOnly || r.GetReadonly()
		err = n.Stager.Publish(ctx, r.GetVolumeId(), r.GetStagingTargetPath(), r.GetTargetPath(), u)
	}
	if err != nil {
		return nil, Answer(err)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func (n *Node) NodeUnpublishVolume(ctx context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	err := errors.Join(given("volume id", r.GetVolumeId()), given("target path", r.GetTargetPath()))
	if err == nil {
		err = n.Stager.Unpublish(ctx, r.GetVolumeId(), r.GetTargetPath())
	}
	if err != nil {
		return nil, Answer(err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (n *Node) NodeExpandVolume(ctx context.Context, r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	err := errors.Join(given("volume id", r.GetVolumeId()), given("volume path", r.GetVolumePath()))
	if err != nil {
		return nil, Answer(err)
	}
	bytes, err := n.Stager.Expand(ctx, r.GetVolumeId(), r.GetVolumePath())
	if err != nil {
		return nil, Answer(err)
	}
	if limit := r.GetCapacityRange().GetLimitBytes(); limit > 0 && bytes > limit {
		return nil, Answer(fmt.Errorf("the volume has %d bytes, which exceed the limit of %d: %w", bytes, limit, ErrOutOfRange))
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: bytes}, nil
}

func (n *Node) NodeGetVolumeStats(ctx context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	err := errors.Join(given("volume id", r.GetVolumeId()), given("volume path", r.GetVolumePath()))
	if err != nil {
		return nil, Answer(err)
	}
	s, err := n.Stager.Stats(ctx, r.GetVolumeId(), r.GetVolumePath())
	if err != nil {
		return nil, Answer(err)
	}
	resp := &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: s.TotalBytes, Used: s.UsedBytes, Available: s.AvailableBytes},
	}}
	if s.TotalInodes > 0 {
		resp.Usage = append(resp.Usage, &csi.VolumeUsage{Unit: csi.VolumeUsage_INODES, Total: s.TotalInodes, Used: s.UsedInodes, Available: s.AvailableInodes})
	}
	return resp, nil
}
