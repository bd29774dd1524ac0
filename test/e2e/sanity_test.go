package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/sanity"
	"github.com/longshore-io/longshore/test/e2e/lab"
)

// The CSI project's conformance suite, against the driver as it is deployed: the
// controller's socket in its pod, the node plugin's where the kubelet finds it.
// Not parallel: it counts volumes.
func TestCSISanity(t *testing.T) {
	pod, err := world.ControllerPod(t.Context())
	world.Must(t, err)
	// A volume that binds says that controller and node plugin have found each other.
	world.Bound(t, world.Claim(t, lab.Claim{Namespace: world.NewNamespace(t), Name: "first", Class: world.StorageClass(t, lab.Class{}), Bytes: mib, Block: true}))
	rows := map[string]sanity.Options{
		"block": {AccessType: "block", VolumeBytes: 64 * mib, ExpandBytes: 96 * mib},
		// xfs: ext4 grows online only with CAP_SYS_RESOURCE, which not every test machine gives.
		"xfs": {AccessType: "mount", VolumeBytes: 320 * mib, ExpandBytes: 400 * mib, Parameters: map[string]string{csi.ParameterFSType: "xfs"}},
	}
	for name, o := range rows {
		t.Run(name, func(t *testing.T) {
			o.Binary = world.Cluster.Bin("csi-sanity")
			o.NodeEndpoint = "unix:///var/lib/kubelet/plugins/" + csi.DriverName + "/csi.sock"
			o.ControllerEndpoint = fmt.Sprintf("unix:///var/lib/kubelet/pods/%s/volumes/kubernetes.io~empty-dir/csi/csi.sock", pod.UID)
			// The plugin sees what is under the kubelet's folder, and only that.
			o.Dir = "/var/lib/kubelet/csi-sanity"
			o.Seen, err = world.Cluster.NodeFolder(lab.Node, o.Dir)
			world.Must(t, err)
			world.Must(t, os.MkdirAll(o.Seen, 0o755))
			t.Cleanup(func() { _ = os.RemoveAll(o.Seen) })
			o.Command = func(ctx context.Context, name string, args ...string) *exec.Cmd {
				// csi-sanity wants to know the folder that it is in.
				return world.Cluster.Command(ctx, lab.Node, "sh", append([]string{"-c", `cd / && exec "$@"`, "sh", name}, args...)...)
			}
			r, err := sanity.Run(t.Context(), o)
			world.Must(t, err)
			t.Log(r.Line())
			sanity.Check(t, r)
		})
	}
}
