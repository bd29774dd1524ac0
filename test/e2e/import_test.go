package e2e

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/longshore-io/longshore/test/e2e/lab"
)

const mib = 1 << 20

// A person applies a PVC that names an image and a pod that uses it; the pod reads the image's bytes.
func TestImport(t *testing.T) {
	t.Parallel()
	rows := []struct {
		name   string
		class  lab.Class
		block  bool
		format string
	}{
		{"waits for its consumer, Filesystem, bind, qcow2", lab.Class{Wait: true, Populate: "bind"}, false, "qcow2"},
		{"waits for its consumer, Block, bind, raw.gz", lab.Class{Wait: true, Populate: "bind"}, true, "raw.gz"},
		{"waits for its consumer, Filesystem, stage, raw", lab.Class{Wait: true, Populate: "stage"}, false, "raw"},
		{"waits for its consumer, Block, stage, qcow2", lab.Class{Wait: true, Populate: "stage"}, true, "qcow2"},
		{"immediate, Filesystem on xfs, bind, vdi.gz", lab.Class{Populate: "bind", FSType: "xfs"}, false, "vdi.gz"},
		{"immediate, Block, bind, raw", lab.Class{}, true, "raw"},
		{"immediate, Filesystem, stage, qcow2", lab.Class{Populate: "stage"}, false, "qcow2"},
		{"immediate, Block, stage, qcow2.xz", lab.Class{Populate: "stage"}, true, "qcow2.xz"},
	}
	img := lab.Serve(t, lab.Image{Bytes: 48*mib + 1536})
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			ns := world.NewNamespace(t)
			class := world.StorageClass(t, r.class)
			world.HTTPSource(t, ns, "image", img.URL(r.format))
			claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: size(r.class), Block: r.block, ImportSource: "image"})
			if !r.class.Wait {
				world.Bound(t, claim)
			}
			out := world.Output(t, world.Pod(t, claim, "consumer", read(img.Bytes, r.block)))
			checkRead(t, out, img, r.block)
		})
	}
}

// size of a claim that holds the 48 MiB image: mkfs.xfs makes nothing under 300 MiB.
func size(c lab.Class) int64 {
	if c.FSType == "xfs" {
		return 320 * mib
	}
	return 64 * mib
}

// read is a script that prints the digest of the disk's first n bytes and how much of the 32 MiB behind them is not zero;
// on a Filesystem volume also who owns the disk's file, its mode, size and what else is there.
func read(n int64, block bool) string {
	path := "/data/disk.img"
	more := `stat -c '%u:%g %a %s' $f; ls -A /data | grep -v -x -e disk.img -e lost+found`
	if block {
		path, more = "/dev/disk", ""
	}
	return fmt.Sprintf(`f=%s
head -c %d $f | sha256sum | cut -d' ' -f1
tail -c +%d $f | head -c 33554432 | tr -d '\0' | wc -c
%s
true`, path, n, n+1, more)
}

func checkRead(t *testing.T, out string, img *lab.Served, block bool) {
	t.Helper()
	lines := strings.Split(out, "\n")
	if len(lines) < 2 {
		t.Fatalf("the pod printed %q", out)
	}
	if lines[0] != img.SHA256 {
		t.Errorf("the pod reads sha256 %s, the image is %s", lines[0], img.SHA256)
	}
	if strings.TrimSpace(lines[1]) != "0" {
		t.Errorf("behind the image's end the pod reads %s bytes that are not zero", lines[1])
	}
	if block {
		return
	}
	if len(lines) != 3 {
		t.Fatalf("beside disk.img there is %q", lines[3:])
	}
	var owner, mode string
	var size int64
	if _, err := fmt.Sscanf(lines[2], "%s %s %d", &owner, &mode, &size); err != nil {
		t.Fatal(err)
	}
	if owner != "107:107" || mode != "660" {
		t.Errorf("disk.img is owned by %s, mode %s; want 107:107, 660", owner, mode)
	}
	if size < img.Bytes || size%mib != 0 {
		t.Errorf("disk.img has %d bytes; want whole MiB, at least %d", size, img.Bytes)
	}
}

// Two claims name one source at once: both are filled.
func TestTwoClaimsOneSource(t *testing.T) {
	t.Parallel()
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{})
	img := lab.Serve(t, lab.Image{Bytes: 32 * mib})
	world.HTTPSource(t, ns, "image", img.URL("qcow2"))
	var claims []*corev1.PersistentVolumeClaim
	for _, name := range []string{"one", "two"} {
		claims = append(claims, world.Claim(t, lab.Claim{Namespace: ns, Name: name, Class: class, Bytes: 32 * mib, Block: true, ImportSource: "image"}))
	}
	var pods []*corev1.Pod
	for _, c := range claims {
		pods = append(pods, world.Pod(t, c, "reads-"+c.Name, read(img.Bytes, true)))
	}
	for _, p := range pods {
		checkRead(t, world.Output(t, p), img, true)
	}
}

// Twenty claims at once: all are filled.
func TestTwentyClaims(t *testing.T) {
	t.Parallel()
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{})
	img := lab.Serve(t, lab.Image{Bytes: 16 * mib})
	world.HTTPSource(t, ns, "image", img.URL("qcow2"))
	var claims []*corev1.PersistentVolumeClaim
	for i := range 20 {
		claims = append(claims, world.Claim(t, lab.Claim{Namespace: ns, Name: fmt.Sprintf("disk-%d", i), Class: class, Bytes: 16 * mib, Block: true, ImportSource: "image"}))
	}
	for _, c := range claims {
		world.Bound(t, c)
	}
	for _, c := range []*corev1.PersistentVolumeClaim{claims[0], claims[19]} {
		checkRead(t, world.Output(t, world.Pod(t, c, "reads-"+c.Name, read(img.Bytes, true))), img, true)
	}
}
