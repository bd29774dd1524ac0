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

// What may be killed in mid-transfer. The transfer goes on, and the web server
// is asked for at most 64 MiB twice. Not parallel: these disturb everybody.
func TestKillInMidTransfer(t *testing.T) {
	rows := []struct {
		name  string
		block bool
		kill  func(t *testing.T, img *lab.Served)
	}{
		{"the mover, -9, Block", true, func(t *testing.T, _ *lab.Served) { killInPlugin(t, "longshore mover", 1) }},
		{"the mover, -9, Filesystem", false, func(t *testing.T, _ *lab.Served) { killInPlugin(t, "longshore mover", 1) }},
		{"the node plugin, -9, Block", true, func(t *testing.T, _ *lab.Served) { restartPlugin(t) }},
		{"the node plugin, -9, Filesystem", false, func(t *testing.T, _ *lab.Served) { restartPlugin(t) }},
		{"the node plugin's pod", true, func(t *testing.T, _ *lab.Served) { replace(t, world.PluginPod) }},
		{"the controller's pod", true, func(t *testing.T, _ *lab.Served) { replace(t, world.ControllerPod) }},
		{"the web server, -9", true, func(_ *testing.T, img *lab.Served) { img.Stop(); img.Start() }},
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			ns := world.NewNamespace(t)
			class := world.StorageClass(t, lab.Class{})
			img := lab.Serve(t, lab.Image{Bytes: 160 * mib, Slow: true})
			world.HTTPSource(t, ns, "image", img.URL("raw"))
			claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: 192 * mib, Block: r.block, ImportSource: "image"})
			// More than may be read again, so that beginning at zero would show.
			filling(t, claim, 80*mib)
			r.kill(t, img)
			world.Bound(t, claim)
			if again := img.Sent() - img.Bytes; again > 64*mib {
				t.Errorf("the server sent %d MiB of a %d MiB image again, want at most 64", again/mib, img.Bytes/mib)
			}
			checkRead(t, world.Output(t, world.Pod(t, claim, "consumer", read(img.Bytes, r.block))), img, r.block)
		})
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
