package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// logTo gives a test's log what Up has to say.
type logTo struct{ t *testing.T }

func (l logTo) Write(p []byte) (int, error) {
	l.t.Log(strings.TrimRight(string(p), "\n"))
	return len(p), nil
}

const shellPod = `apiVersion: v1
kind: Pod
metadata: {name: shell}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: shell
    image: cluster.test/busybox:1
    imagePullPolicy: Never
    command: [sh, -c, "echo hello from $(hostname); exec sleep 3600"]
`

func TestCluster(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute) // the first time it builds
	defer cancel()
	dir := filepath.Join(t.TempDir(), "cluster")
	forward, err := os.ReadFile(forwardFile)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Up(ctx, Options{Dir: dir, Log: logTo{t}, Wait: true, DieWithParent: true})
	if err != nil {
		t.Fatal(err)
	}
	down := false
	t.Cleanup(func() {
		if !down {
			c.Down(true)
		}
	})
	if _, err := Up(ctx, Options{Dir: dir}); !errors.Is(err, ErrRunning) {
		t.Errorf("second Up in the same folder: got %v, want %v", err, ErrRunning)
	}
	var held *HeldError
	if _, err := Up(ctx, Options{Dir: t.TempDir()}); !errors.As(err, &held) || held.Holder != dir {
		t.Errorf("Up of a second cluster: got %v, want an error that names %s", err, dir)
	}
	if err := c.Apply(ctx, shellPod); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=180s", "pod/shell"); err != nil {
		t.Fatal(err)
	}

	t.Run("the pod's log is read", func(t *testing.T) {
		got, err := c.Kubectl(ctx, "logs", "shell")
		if want := "hello from shell\n"; err != nil || string(got) != want {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
	})
	t.Run("the pod resolves the API server's name", func(t *testing.T) {
		got := inPod(ctx, t, c, "nslookup", "kubernetes.default.svc.cluster.local")
		if want := "10.96.0.1"; !strings.Contains(got, want) {
			t.Errorf("got %q, want %s in it", got, want)
		}
	})
	t.Run("the pod reaches a server on the host", func(t *testing.T) {
		l, err := net.Listen("tcp", HostIP+":0")
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			from, _, _ := net.SplitHostPort(r.RemoteAddr)
			io.WriteString(w, "hello "+from)
		})}
		go s.Serve(l)
		defer s.Close()
		got := inPod(ctx, t, c, "wget", "-q", "-O", "-", "http://"+l.Addr().String()+"/")
		if want := "hello " + c.NodeIP(1); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	t.Run("the pod outlives its kubelet", func(t *testing.T) {
		if err := c.RestartKubelet(ctx, "node1"); err != nil {
			t.Fatal(err)
		}
		inPod(ctx, t, c, "true")
	})
	t.Run("another process may attach", func(t *testing.T) {
		other, err := Attach(dir)
		if err != nil {
			t.Fatal(err)
		}
		got, err := other.Command(ctx, "node1", "hostname").Output()
		if want := "node1\n"; err != nil || string(got) != want {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
	})
	t.Run("a node sees its loop devices alone", func(t *testing.T) {
		const image = "/var/lib/longshore/image"
		if out, err := c.Command(ctx, "node1", "truncate", "--size=1M", image).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		got, err := c.Command(ctx, "node1", "losetup", "--find", "--show", image).Output() // left for Down to find
		if want := fmt.Sprintf("/dev/loop%d\n", c.state.loops(1).first); err != nil || string(got) != want {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
	})

	was, family := c.state, descendants(t, c.state.Hub.Pid)
	if len(family) < 13 { // 2 machines, 5 servers of the hub, 3 of the node, and 3 pods' shims at least
		t.Errorf("a running cluster has %d processes", len(family))
	}
	if got := traces(t, dir, was, family); !strings.Contains(got, hostLink) || !strings.Contains(got, "process") || !strings.Contains(got, cgroupName) {
		t.Errorf("a running cluster leaves no traces but\n%s", got)
	}
	down = true
	for range 2 {
		if err := c.Down(true); err != nil {
			t.Fatal(err)
		}
	}
	if got := traces(t, dir, was, family); got != "" {
		t.Errorf("left after Down:\n%s", got)
	}
	if got, err := os.ReadFile(forwardFile); err != nil || string(got) != string(forward) {
		t.Errorf("ip_forward after Down: got %q, %v, want %q", got, err, forward)
	}
}

func inPod(ctx context.Context, t *testing.T, c *Cluster, argv ...string) string {
	t.Helper()
	out, err := c.Kubectl(ctx, append([]string{"exec", "shell", "--"}, argv...)...)
	if err != nil {
		t.Errorf("%s", err)
	}
	return string(out)
}

// descendants of a process, and itself.
func descendants(t *testing.T, pid int) []process {
	t.Helper()
	p, err := processOf(pid)
	if err != nil {
		return nil // it has just ended
	}
	all := []process{p}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range tasks {
		children, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		for _, c := range strings.Fields(string(children)) {
			child, err := strconv.Atoi(c)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, descendants(t, child)...)
		}
	}
	return all
}

// traces is what a cluster in dir could leave on the machine, one thing a line.
func traces(t *testing.T, dir string, s state, family []process) string {
	t.Helper()
	var all []string
	glob := func(pattern string) {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, found...)
	}
	glob(dir)
	glob("/sys/class/net/" + hostLink)
	glob("/sys/fs/cgroup/" + cgroupName)
	glob("/sys/fs/cgroup/*/" + cgroupName)
	for i := s.LoopBase; i < s.LoopBase+s.Nodes*loopsPerNode; i++ {
		glob(fmt.Sprintf("/dev/loop%d", i))
		glob(fmt.Sprintf("/sys/block/loop%d", i))
	}
	for _, d := range s.MadeDirs {
		glob(d)
	}
	mounts, err := os.ReadFile("/proc/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for m := range strings.Lines(string(mounts)) {
		if strings.Contains(m, dir) {
			all = append(all, "mount "+m)
		}
	}
	for _, p := range family {
		if p.alive() {
			all = append(all, fmt.Sprintf("process %d", p.Pid))
		}
	}
	for _, list := range map[string][][]string{
		"iptables": {{"iptables", "-w", "-t", "nat", "-S"}, {"iptables", "-w", "-S"}},
		"nft":      {{"nft", "list", "ruleset"}},
	}[firewall()] {
		rules, err := output(t.Context(), "", list...)
		if err != nil {
			t.Fatal(err)
		}
		for r := range strings.Lines(string(rules)) {
			if strings.Contains(r, machineNet) || strings.Contains(r, hostLink) || strings.Contains(r, "longshore") {
				all = append(all, "rule "+r)
			}
		}
	}
	return strings.Join(all, "\n")
}
