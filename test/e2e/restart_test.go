package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/test/e2e/lab"
)

// What may be killed in mid-transfer. The transfers go on, and the web servers
// are asked for at most 64 MiB twice. Not parallel: these disturb everybody.
func TestKillInMidTransfer(t *testing.T) {
	img := lab.Serve(t, longTransfer)
	rows := []struct {
		name string
		kill func(t *testing.T)
	}{
		{"the movers, -9", func(t *testing.T) { killInPlugin(t, "longshore mover", 2) }},
		{"the node plugin, -9", restartPlugin},
		{"the node plugin's pod", func(t *testing.T) { replace(t, world.PluginPod) }},
		{"the controller's pod", func(t *testing.T) { replace(t, world.ControllerPod) }},
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) { goesOn(t, img, func([]*lab.Served) { r.kill(t) }) })
	}
}

func TestWebServerDiesInMidTransfer(t *testing.T) {
	t.Parallel()
	goesOn(t, lab.Serve(t, longTransfer), func(servers []*lab.Served) {
		for _, s := range servers {
			s.Stop()
			s.Start()
		}
	})
}

// longTransfer leaves time to interfere once more has come than may be read again:
// beginning at zero would show.
var longTransfer = lab.Image{Bytes: 160 * mib, Slow: true, SlowFrom: 1e8}

// goesOn imports an image into a Block and a Filesystem volume, each from a server of its own, and has one kill in mid-transfer.
func goesOn(t *testing.T, img *lab.Served, kill func([]*lab.Served)) {
	t.Helper()
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{})
	var servers []*lab.Served
	var claims []*corev1.PersistentVolumeClaim
	for _, name := range []string{"block", "filesystem"} {
		s := img.Again(t)
		world.HTTPSource(t, ns, name, s.URL("raw"))
		servers = append(servers, s)
		claims = append(claims, world.Claim(t, lab.Claim{Namespace: ns, Name: name, Class: class, Bytes: 224 * mib, Block: name == "block", ImportSource: name}))
	}
	for _, c := range append(claims, claims[0]) { // the first must not have ended meanwhile
		filling(t, c, 80*mib)
	}
	kill(servers)
	for i, c := range claims {
		servers[i].Hurry(t)
		world.Bound(t, c)
		if again := servers[i].Sent() - img.Bytes; again > 64*mib {
			t.Errorf("%s: the server sent %d MiB of a %d MiB image again, want at most 64", c.Name, again/mib, img.Bytes/mib)
		}
	}
	var pods []*corev1.Pod
	for i, c := range claims {
		pods = append(pods, world.Pod(t, c, "reads-"+c.Name, read(img.Bytes, i == 0)))
	}
	for i, p := range pods {
		checkRead(t, world.Output(t, p), img, i == 0)
	}
}

// killInPlugin kills -9 the processes of the node plugin's container whose command line has the words.
func killInPlugin(t *testing.T, words string, atLeast int) {
	t.Helper()
	out, err := world.InPlugin(t.Context(), fmt.Sprintf(`
for p in /proc/[0-9]*; do
  c=$(tr '\0' ' ' < $p/cmdline 2>/dev/null)
  case "$c" in sh\ *) ;; *'%s'*) kill -9 ${p#/proc/} && echo killed;; esac
done
true`, words))
	world.Must(t, err)
	if n := strings.Count(string(out), "killed"); n < atLeast {
		t.Fatalf("killed %d processes %q, want %d: %s", n, words, atLeast, out)
	}
}

// restartPlugin kills -9 the plugin itself, pid 1 of its container, from the node's own namespaces, and waits
// until the kubelet has started it again.
func restartPlugin(t *testing.T) {
	t.Helper()
	before, err := world.PluginPod(t.Context())
	world.Must(t, err)
	out, err := world.Cluster.Command(t.Context(), lab.Node, "sh", "-c", `
for p in /proc/[0-9]*; do
  c=$(tr '\0' ' ' < $p/cmdline 2>/dev/null)
  case "$c" in sh\ *) ;; *'longshore node'*) kill -9 ${p#/proc/} && echo killed;; esac
done
true`).CombinedOutput()
	world.Must(t, err)
	if !strings.Contains(string(out), "killed") {
		t.Fatalf("no plugin was killed: %s", out)
	}
	restarts := before.Status.ContainerStatuses[0].RestartCount
	world.Eventually(t, "the node plugin is back", func(ctx context.Context) error {
		pod, err := world.PluginPod(ctx)
		if err != nil {
			return err
		}
		if pod.Name != before.Name || pod.Status.ContainerStatuses[0].RestartCount <= restarts {
			return fmt.Errorf("restart count is %d", pod.Status.ContainerStatuses[0].RestartCount)
		}
		return nil
	})
}

// replace deletes a pod of Longshore and waits for its successor.
func replace(t *testing.T, find func(context.Context) (*corev1.Pod, error)) {
	t.Helper()
	before, err := find(t.Context())
	world.Must(t, err)
	world.Must(t, world.Delete(t.Context(), before, client.GracePeriodSeconds(1)))
	world.Eventually(t, before.Name+" has a successor", func(ctx context.Context) error {
		after, err := find(ctx)
		if err != nil {
			return err
		}
		if after.UID == before.UID {
			return fmt.Errorf("%s is still there", after.Name)
		}
		return nil
	})
}
