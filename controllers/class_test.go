package controllers

import (
	"strings"
	"testing"

	storagev1 "k8s.io/api/storage/v1"

	"github.com/longshore-io/longshore/csi"
)

func TestClassOf(t *testing.T) {
	if c := classOf(&storagev1.StorageClass{}); c.Problem != "" || c.Pool != "default" || c.FSType != "ext4" || c.Populate != "bind" || c.ReclaimPolicy != "Delete" || c.WaitsForConsumer {
		t.Errorf("without parameters: %+v", c)
	}
	c := classOf(&storagev1.StorageClass{Parameters: map[string]string{csi.ParameterPool: "fast", csi.ParameterPopulate: "stage", csi.ParameterFSType: "xfs"}})
	if c.Problem != "" || c.Pool != "fast" || c.FSType != "xfs" || c.Populate != "stage" {
		t.Errorf("with parameters: %+v", c)
	}
	c = classOf(&storagev1.StorageClass{Parameters: map[string]string{csi.ParameterFSType: "btrfs"}})
	for _, words := range []string{csi.ParameterFSType, `"btrfs"`, "ext4, xfs"} {
		if !strings.Contains(c.Problem, words) {
			t.Errorf("the problem %q does not name %s", c.Problem, words)
		}
	}
}
