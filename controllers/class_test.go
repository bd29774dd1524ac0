package controllers

import (
	"context"
	"fmt"
	"strings"
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/longshore-io/longshore/csi"
)

// never is asked only when CreateVolume has found the parameters good.
type never struct{ csi.Volumes }

func (never) Create(context.Context, csi.Request) (csi.Volume, error) {
	return csi.Volume{}, csi.ErrUnavailable
}

// A class is good for claims that we fill when it is good for CreateVolume, and no other.
func TestClassRulesAreThoseOfCreateVolume(t *testing.T) {
	values := map[string][]string{
		csi.ParameterPool:           {"default", "fast-1", "a.b", "", "Fast", "a b", "-a", "a-", strings.Repeat("a", 63), strings.Repeat("a", 64), "../x"},
		csi.ParameterPopulate:       {"bind", "stage", "instant", "", "Bind"},
		csi.ParameterFSType:         {"ext4", "xfs", "btrfs", "", "EXT4"},
		"longshore.dev/misspelt":    {"x"},
		"csi.storage.k8s.io/fsType": {"ext4"},
	}
	driver := &csi.Controller{Volumes: never{}}
	for key, vs := range values {
		for _, value := range vs {
			parameters := map[string]string{key: value}
			_, err := driver.CreateVolume(t.Context(), &csispec.CreateVolumeRequest{
				Name: "x", Parameters: parameters,
				VolumeCapabilities: []*csispec.VolumeCapability{{
					AccessType: &csispec.VolumeCapability_Mount{Mount: &csispec.VolumeCapability_MountVolume{}},
					AccessMode: &csispec.VolumeCapability_AccessMode{Mode: csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
				}},
			})
			refused := status.Code(err) == codes.InvalidArgument
			c := classOf(&storagev1.StorageClass{Parameters: parameters})
			if refused != (c.Problem != "") {
				t.Errorf("%s=%q: CreateVolume says %v, the class %q", key, value, err, c.Problem)
			}
			if refused && (!strings.Contains(c.Problem, key) || !strings.Contains(c.Problem, fmt.Sprintf("%q", value))) {
				t.Errorf("%s=%q: the problem %q names parameter and value not", key, value, c.Problem)
			}
		}
	}
	if c := classOf(&storagev1.StorageClass{}); c.Problem != "" || c.Pool != "default" || c.FSType != "ext4" || c.Populate != "bind" || c.ReclaimPolicy != "Delete" || c.WaitsForConsumer {
		t.Errorf("without parameters: %+v", c)
	}
}
