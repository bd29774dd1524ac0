package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const cniBin = "/usr/lib/cni" // where Debian has the plugins

// standardDirs are what each node has to itself, at the usual places.
var standardDirs = []string{
	"/var/lib/kubelet",
	"/var/lib/containerd",
	"/var/lib/cni",
	"/var/lib/longshore",
	"/var/log/pods",
	"/var/log/containers",
	"/etc/cni/net.d",
}

func (c *Cluster) nodeDir(n int) string { return filepath.Join(c.dir, "nodes", nodeName(n)) }

// nodeFolder is where a folder of the node is kept.
func (c *Cluster) nodeFolder(n int, path string) string {
	return filepath.Join(c.nodeDir(n), "root", path)
}

// NodeFolder is where the host sees one of the folders that a node has to itself,
// or what is below it.
func (c *Cluster) NodeFolder(node, path string) (string, error) {
	n, err := c.nodeNumber(node)
	if err != nil {
		return "", err
	}
	return c.nodeFolder(n, path), nil
}

// startContainers starts node n's machine with containerd.
func (c *Cluster) startContainers(ctx context.Context, n int) error {
	node := nodeName(n)
	if err := makeCgroup(node); err != nil {
		return fmt.Errorf("make cgroups of %s: %w", node, err)
	}
	if err := c.startMachine(ctx, n); err != nil {
		return fmt.Errorf("start %s: %w", node, err)
	}
	if err := c.layNodeNetwork(ctx, n); err != nil {
		return fmt.Errorf("lay the network of %s: %w", node, err)
	}
	if err := c.start(ctx, node, "containerd", "--config="+c.confFile("containerd.toml")); err != nil {
		return err
	}
	return c.waitFor(ctx, node+" has containerd", time.Minute, node, []string{"containerd"}, func() error {
		return c.ctr(ctx, node, "version")
	})
}

func (c *Cluster) startMachine(ctx context.Context, n int) error {
	node := nodeName(n)
	spec := machineSpec{Name: node, Socket: node + ".sock", Dev: filepath.Join(c.nodeDir(n), "dev")}
	for _, d := range c.state.NodeDirs {
		spec.Binds = append(spec.Binds, bind{c.nodeFolder(n, d), d})
		if err := os.MkdirAll(c.nodeFolder(n, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(spec.Dev, 0o755); err != nil {
		return err
	}
	loops := c.state.loops(n)
	for i := loops.first; i < loops.first+loops.count; i++ {
		minor, err := loopMinor(i)
		if err != nil {
			return err
		}
		spec.Loops = append(spec.Loops, machineLoop{i, minor})
	}
	if err := os.WriteFile(filepath.Join(c.nodeFolder(n, "/etc/cni/net.d"), "10-bridge.conflist"), conflist(n), 0o644); err != nil {
		return err
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	os.Remove(filepath.Join(c.sockets(), spec.Socket)) // of the machine before a restart
	path := c.state.Bin.machinePath()
	if _, err := c.ask(ctx, "", request{Op: "start", Program: program{
		Name:    node,
		Argv:    []string{path, string(text)},
		Env:     c.env(),
		Log:     c.logFile(node, "machine"),
		Dir:     c.sockets(),
		Machine: true,
	}}); err != nil {
		return err
	}
	return c.waitMachine(ctx, node)
}

// startKubelet makes a node of a machine that can run containers.
func (c *Cluster) startKubelet(ctx context.Context, n int) error {
	node := nodeName(n)
	if err := c.start(ctx, node, "kubelet", c.kubeletArgs(n)...); err != nil {
		return err
	}
	return c.start(ctx, node, "kube-proxy", "--config="+c.confFile("proxy-"+node+".yaml"))
}

func (c *Cluster) kubeletArgs(n int) []string {
	node := nodeName(n)
	return []string{
		"--config=" + c.confFile("kubelet-"+node+".yaml"),
		"--kubeconfig=" + c.pkiFile(node+".kubeconfig"),
		"--hostname-override=" + node,
		"--node-ip=" + nodeIP(n),
		"--v=2",
	}
}

func (c *Cluster) ctr(ctx context.Context, node string, args ...string) error {
	cmd := c.Command(ctx, node, "ctr", append([]string{"--namespace=k8s.io"}, args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ctr %s on %s: %s: %w", strings.Join(args, " "), node, bytes.TrimSpace(out), err)
	}
	return nil
}

func (c *Cluster) loadImage(ctx context.Context, node, tar string) error {
	return c.ctr(ctx, node, "images", "import", tar)
}

func (c *Cluster) waitNode(ctx context.Context, a *api, n int) error {
	node := nodeName(n)
	return c.waitFor(ctx, node+" is ready", 2*time.Minute, node, []string{"containerd", "kubelet"}, func() error {
		return nodeReady(ctx, a, node)
	})
}

func nodeReady(ctx context.Context, a *api, node string) error {
	var o struct {
		Spec   struct{ Taints []struct{ Key string } }
		Status struct {
			Conditions []struct{ Type, Status, Message string }
		}
	}
	if err := a.get(ctx, "/api/v1/nodes/"+node, &o); err != nil {
		return err
	}
	for _, t := range o.Spec.Taints {
		return fmt.Errorf("%s has the taint %s", node, t.Key)
	}
	for _, s := range o.Status.Conditions {
		if s.Type == "Ready" && s.Status != "True" {
			return fmt.Errorf("%s is not ready: %s", node, s.Message)
		}
		if s.Type == "Ready" {
			return nil
		}
	}
	return fmt.Errorf("%s says nothing of itself", node)
}

// RestartKubelet kills a node's kubelet, without a word of warning to it, and
// starts it again. It returns when the new one answers.
func (c *Cluster) RestartKubelet(ctx context.Context, node string) error {
	if err := c.StopKubelet(ctx, node); err != nil {
		return err
	}
	return c.StartKubelet(ctx, node)
}

// StopKubelet kills a node's kubelet; pods live on.
func (c *Cluster) StopKubelet(ctx context.Context, node string) error {
	return c.stop(ctx, node, "kubelet", syscall.SIGKILL)
}

// StartKubelet starts a node's kubelet after StopKubelet.
func (c *Cluster) StartKubelet(ctx context.Context, node string) error {
	n, err := c.nodeNumber(node)
	if err != nil {
		return err
	}
	if err := c.start(ctx, node, "kubelet", c.kubeletArgs(n)...); err != nil {
		return err
	}
	a, err := c.newAPI()
	if err != nil {
		return err
	}
	return c.waitFor(ctx, node+" has its kubelet", time.Minute, node, []string{"kubelet"}, func() error {
		return kubeletKnowsPods(ctx, a, node)
	})
}

// kubeletKnowsPods returns nil when the kubelet has heard of all pods of its node:
// until then it refuses their logs and commands in them.
func kubeletKnowsPods(ctx context.Context, a *api, node string) error {
	var want, got struct {
		Items []struct {
			Metadata struct{ Name, UID string }
		}
	}
	if err := a.get(ctx, "/api/v1/pods?fieldSelector=spec.nodeName="+node+",status.phase=Running", &want); err != nil {
		return err
	}
	if err := a.get(ctx, "/api/v1/nodes/"+node+"/proxy/pods", &got); err != nil {
		return err
	}
	known := map[string]bool{}
	for _, p := range got.Items {
		known[p.Metadata.UID] = true
	}
	for _, p := range want.Items {
		if !known[p.Metadata.UID] {
			return fmt.Errorf("the kubelet of %s does not know pod %s", node, p.Metadata.Name)
		}
	}
	return nil
}

func (c *Cluster) nodeNumber(node string) (int, error) {
	for n := 1; n <= c.state.Nodes; n++ {
		if nodeName(n) == node {
			return n, nil
		}
	}
	return 0, fmt.Errorf("no node %q", node)
}

// KillNode cuts a node's power: its processes, its loop devices and its cgroups
// are gone, its disks stay.
func (c *Cluster) KillNode(ctx context.Context, node string) error {
	n, err := c.nodeNumber(node)
	if err != nil {
		return err
	}
	if err := c.stop(ctx, "", node, syscall.SIGKILL); err != nil {
		return err
	}
	return errors.Join(c.state.loops(n).free(ctx, c.dir), removeCgroup(ctx, node))
}

// StartNode boots a node after KillNode and returns when it is ready.
func (c *Cluster) StartNode(ctx context.Context, node string) error {
	n, err := c.nodeNumber(node)
	if err != nil {
		return err
	}
	if err := c.startContainers(ctx, n); err != nil {
		return err
	}
	if err := c.startKubelet(ctx, n); err != nil {
		return err
	}
	a, err := c.newAPI()
	if err != nil {
		return err
	}
	return c.waitNode(ctx, a, n)
}

// CutNode pulls a node's network cable.
func (c *Cluster) CutNode(ctx context.Context, node string) error {
	return c.setLink(ctx, node, "down")
}

// HealNode plugs it in again.
func (c *Cluster) HealNode(ctx context.Context, node string) error { return c.setLink(ctx, node, "up") }

func (c *Cluster) setLink(ctx context.Context, node, state string) error {
	n, err := c.nodeNumber(node)
	if err != nil {
		return err
	}
	// At the hub's end: the node would forget its routes.
	return ip(ctx, inNet(c.state.Hub.Pid), "link set "+linkOf(n)+" "+state)
}
