package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// A pool's loop, a volume's on a file in the pool, the kubelet's on the volume's:
// what a node leaves that dies with volumes in use.
func TestLoopsThatLieOnOneAnotherAreFreed(t *testing.T) {
	const base = 4096 // out of the way of whatever cluster runs
	r := loopRange{base, 3}
	if !r.unused() {
		t.Fatalf("%d loops from loop%d are in use", r.count, base)
	}
	dir := t.TempDir()
	node := func(i int) string { return fmt.Sprintf("/dev/loop%d", base+i) }
	must := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, out)
		}
	}
	pool, mount := filepath.Join(dir, "pool.img"), filepath.Join(dir, "mnt")
	if err := os.Mkdir(mount, 0o755); err != nil {
		t.Fatal(err)
	}
	must("truncate", "-s", "64M", pool)
	must("mkfs.ext4", "-q", "-F", pool)
	for i := range 3 {
		if !exists(node(i)) {
			must("mknod", node(i), "b", fmt.Sprint(loopMajor), fmt.Sprint(base+i))
			t.Cleanup(func() { os.Remove(node(i)) })
		}
	}
	must("losetup", node(0), pool)
	must("mount", node(0), mount)
	must("truncate", "-s", "8M", filepath.Join(mount, "data.raw"))
	must("losetup", node(1), filepath.Join(mount, "data.raw"))
	// Under a name in the cluster's folder: of others it is taken for the host's.
	volume := filepath.Join(dir, "volume")
	must("mknod", volume, "b", fmt.Sprint(loopMajor), fmt.Sprint(base+1))
	must("losetup", node(2), volume)
	// As when the node's mount namespace has ended: nothing is mounted, the
	// filesystem is still in use.
	must("umount", "-l", mount)

	if err := r.free(t.Context(), dir); err != nil {
		t.Error(err)
	}
	for i := 2; i >= 0; i-- {
		if bound(base + i) {
			t.Errorf("loop%d is still bound", base+i)
			must("losetup", "-d", node(i))
		}
	}
}
