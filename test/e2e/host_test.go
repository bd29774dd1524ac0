package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/longshore-io/longshore/test/e2e/lab"
	"github.com/longshore-io/longshore/test/images"
	"github.com/longshore-io/longshore/test/peers"
	"github.com/longshore-io/longshore/test/udev"
)

// A guest's disk is a physical volume of LVM, or a member of an array: the guest
// gets it as it is, and the host makes nothing of it, not even where the node
// plugin that attached it is gone. Not parallel: it replaces the plugin.
func TestHostLeavesGuestsDisksAlone(t *testing.T) {
	rows := []struct {
		name string
		make func(t testing.TB, path string, size int64)
	}{
		{"lvm", images.LVMMember},
		{"raid", images.RAIDMember},
	}
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{})
	web := lab.Web(t, peers.NginxOptions{})
	before := assembled(t)
	var pods []*corev1.Pod
	for _, r := range rows {
		disk := filepath.Join(web.Root, r.name)
		r.make(t, disk, 16*mib)
		content, err := os.ReadFile(disk)
		world.Must(t, err)
		world.HTTPSource(t, ns, r.name, web.URL(r.name))
		claim := world.Claim(t, lab.Claim{Namespace: ns, Name: r.name, Class: class, Bytes: 16 * mib, Block: true, ImportSource: r.name})
		pod := world.Pod(t, claim, "guest-"+r.name, "sha256sum < /dev/disk; exec sleep 1000000")
		world.Eventually(t, "the guest has read its disk "+r.name, func(ctx context.Context) error {
			got, err := world.Logs(ctx, pod)
			if err != nil {
				return err
			}
			if got == "" {
				return fmt.Errorf("it has said nothing yet")
			}
			if want := fmt.Sprintf("%x", sha256.Sum256(content)); !strings.HasPrefix(got, want) {
				t.Fatalf("the guest reads %s, the image is %s", got, want)
			}
			return nil
		})
		pods = append(pods, pod)
		untouched(t, claim)
	}
	replace(t, world.PluginPod)
	for _, pod := range pods {
		claim := &corev1.PersistentVolumeClaim{}
		claim.Namespace, claim.Name = ns, pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName
		world.Must(t, world.Get(t.Context(), keyOf(claim), claim))
		untouched(t, claim)
	}
	if after := assembled(t); !slices.Equal(before, after) {
		t.Errorf("the host had the devices %q, now it has %q", before, after)
	}
}

// assembled are the machine's mapped devices and arrays.
func assembled(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"/sys/block/dm-*", "/sys/block/md*"} {
		found, err := filepath.Glob(pattern)
		world.Must(t, err)
		all = append(all, found...)
	}
	return all
}

// untouched fails the test where the loop devices of a claim's volume have partitions, are mounted,
// or are such as the node's udev, by the rules that the plugin has given it, would look into.
func untouched(t *testing.T, claim *corev1.PersistentVolumeClaim) {
	t.Helper()
	rules, err := world.Cluster.Command(t.Context(), lab.Node, "cat", "/run/udev/rules.d/50-longshore.rules").Output()
	world.Must(t, err)
	mounts, err := world.Cluster.Command(t.Context(), lab.Node, "cat", "/proc/1/mountinfo").Output()
	world.Must(t, err)
	loops, err := filepath.Glob("/sys/block/loop*")
	world.Must(t, err)
	n := 0
	for _, l := range loops {
		file, err := os.ReadFile(filepath.Join(l, "loop/backing_file"))
		if err != nil || !strings.Contains(string(file), string(claim.UID)) {
			continue
		}
		n++
		name := filepath.Base(l)
		parts, err := filepath.Glob(filepath.Join(l, name+"p*"))
		world.Must(t, err)
		if len(parts) > 0 {
			t.Errorf("%s on %s was looked into for partitions: %q", name, file, parts)
		}
		number, err := os.ReadFile(filepath.Join(l, "dev"))
		world.Must(t, err)
		if bytes.Contains(mounts, []byte(" "+strings.TrimSpace(string(number))+" ")) {
			t.Errorf("%s on %s is mounted:\n%s", name, file, mounts)
		}
		said := udev.OnChange(t, name, "50-longshore.rules", string(rules))
		for _, deed := range []string{"ID_FS_", "sbin/lvm", "sbin/mdadm", "/dev/disk"} {
			if strings.Contains(said, deed) {
				t.Errorf("about %s on %s the host's udev would do %q:\n%s", name, file, deed, said)
			}
		}
	}
	if n != 2 { // ours and the kubelet's
		t.Errorf("%d loop devices for claim %s, want 2", n, claim.Name)
	}
}
