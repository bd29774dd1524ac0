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

// PoolBytes is the size of the node's pool; it is allocated whole.
const PoolBytes int64 = 6 << 30

// install builds the container image and installs the chart, waiting until both workloads are ready.
func (l *Lab) install(ctx context.Context, log io.Writer, values []string) error {
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	make := exec.CommandContext(ctx, "make", "--no-print-directory", "image")
	make.Dir = root
	if err := run(make, log); err != nil {
		return err
	}
	image := filepath.Join(root, "out", "longshore-image.tar")
	if err := l.Cluster.LoadImage(ctx, image); err != nil {
		return fmt.Errorf("load the image: %w", err)
	}
	args := []string{"upgrade", "--install", "longshore", filepath.Join(root, "charts", "longshore"),
		"--namespace", Namespace, "--create-namespace", "--wait", "--timeout", "3m",
		"--set", "image.pullPolicy=Never",
		"--set", "sidecars.pullPolicy=Never",
		"--set", fmt.Sprintf("pools[0].name=default,pools[0].dir=/var/lib/longshore/default,pools[0].bytes=%d", PoolBytes),
		"--set", "fetchPolicy.allow={" + cluster.HostIP + "/32}",
	}
	for _, v := range values {
		args = append(args, "--set", v)
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
