package lab

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/longshore-io/longshore/test/cluster"
)

// What the node's pools have, each allocated whole: the one that a class has by
// default, and two for stories that leave no room in one.
const (
	poolBytes  int64 = 6 << 30
	SmallBytes int64 = 768 << 20
)

// CachePool is a pool that keeps images; the others keep none.
const CachePool = "cached"

// The pools of SmallBytes bytes.
var smallPools = []string{"full", "slow", CachePool}

// buildImage puts the container image together.
func buildImage(ctx context.Context, root string, log io.Writer) error {
	make := exec.CommandContext(ctx, "make", "--no-print-directory", "image")
	make.Dir = root
	return run(make, log)
}

// install loads the image and installs the chart, waiting until both workloads are ready.
func (l *Lab) install(ctx context.Context, root string, log io.Writer, values []string) error {
	// All that the node plugin sees of a host's udev; whoever wants to know what a
	// udev makes of the rules asks package udev.
	if out, err := l.Cluster.Command(ctx, Node, "sh", "-c", "mkdir -p /run/udev && : > /run/udev/control").CombinedOutput(); err != nil {
		return fmt.Errorf("give %s a udev: %w: %s", Node, err, out)
	}
	if err := l.Cluster.LoadImage(ctx, filepath.Join(root, "out", "longshore-image.tar")); err != nil {
		return fmt.Errorf("load the image: %w", err)
	}
	args := []string{"upgrade", "--install", "longshore", filepath.Join(root, "charts", "longshore"),
		"--namespace", Namespace, "--create-namespace", "--wait", "--timeout", "5m",
		"--set", "image.pullPolicy=Never",
		"--set", "sidecars.pullPolicy=Never",
		"--set", pool(0, "default", poolBytes),
		"--set", "fetchPolicy.allow={" + cluster.HostIP + "/32}",
		// stories wait for no other story's slow transfer
		"--set", "slots=8,node.resources.limits.memory=2560Mi",
	}
	for i, name := range smallPools {
		args = append(args, "--set", pool(i+1, name, SmallBytes))
		if name == CachePool {
			args = append(args, "--set", fmt.Sprintf("pools[%d].cachePercent=50", i+1))
		}
	}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	if l.keep { // Helm leaves definitions as they are
		if out, err := l.Cluster.Kubectl(ctx, "apply", "--server-side", "--force-conflicts", "-f", filepath.Join(root, "charts", "longshore", "crds")); err != nil {
			return fmt.Errorf("bring the definitions up to date: %w: %s", err, out)
		}
	}
	helm := exec.CommandContext(ctx, l.Cluster.Bin("helm"), args...)
	helm.Env = append(os.Environ(), "KUBECONFIG="+l.Cluster.Kubeconfig())
	if err := run(helm, log); err != nil {
		out, _ := l.Cluster.Kubectl(ctx, "-n", Namespace, "get", "pods,events")
		said, _ := l.Cluster.Kubectl(ctx, "-n", Namespace, "logs", "--all-containers", "--prefix", "--tail=40", "-l", "app.kubernetes.io/name=longshore")
		return fmt.Errorf("%w\n%s\n%s", err, out, said)
	}
	if !l.keep {
		return nil
	}
	// A cluster that was kept runs an earlier image of the same name.
	for _, w := range []string{"deployment/longshore-controller", "daemonset/longshore-node"} {
		for _, verb := range []string{"restart", "status"} {
			if out, err := l.Cluster.Kubectl(ctx, "-n", Namespace, "rollout", verb, w); err != nil {
				return fmt.Errorf("rollout %s %s: %w: %s", verb, w, err, out)
			}
		}
	}
	return nil
}

func pool(i int, name string, bytes int64) string {
	return fmt.Sprintf("pools[%[1]d].name=%[2]s,pools[%[1]d].dir=/var/lib/longshore/%[2]s,pools[%[1]d].bytes=%[3]d", i, name, bytes)
}

func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// run runs a command; what it says goes to log, and its end into the error.
func run(c *exec.Cmd, log io.Writer) error {
	var said bytes.Buffer
	c.Stdout = io.MultiWriter(log, &said)
	c.Stderr = c.Stdout
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, said.Bytes()[max(0, said.Len()-2000):])
	}
	return nil
}
