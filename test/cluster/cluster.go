// Package cluster runs a real Kubernetes on this machine: etcd, the control
// plane, kubelets, containerd, kube-proxy, CoreDNS and the snapshot controller,
// built from their Go modules, each node in namespaces of its own.
//
// It knows nothing of Longshore: tests load its image and install its chart. It
// needs root and the Debian packages of packages.txt. A machine has room for one
// cluster, since its addresses and loop devices are fixed.
//
//	c, err := cluster.Up(ctx, cluster.Options{Dir: dir, Wait: true, DieWithParent: true})
//	...
//	defer c.Down(true)
//	out, err := c.Kubectl(ctx, "get", "nodes")
//
// By hand:
//
//	go run ./test/cluster/run up
//	go run ./test/cluster/run kubectl get pods -A
//	go run ./test/cluster/run down
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Options of a cluster.
type Options struct {
	Dir string    // for everything that the cluster keeps; made if missing
	Log io.Writer // what goes on and how long it takes; nil: nobody wants to know

	Nodes         int           // 0 means 1
	BindTimeout   time.Duration // the scheduler's patience with a volume; 0: its default
	NodeDirs      []string      // folders that each node has to itself, besides those of kubelet and containerd and /var/lib/longshore
	Wait          bool          // wait for another cluster of this machine to end, for as long as ctx allows
	Reuse         bool          // return the cluster that already runs in Dir
	DieWithParent bool          // its processes end with ours, however ours ends
}

// Cluster is a running cluster.
type Cluster struct {
	dir   string
	log   io.Writer
	state state
	began time.Time
	alive *os.File // the end of the pipe that says that we live
}

// ErrRunning says that a cluster runs in the folder that Up was given.
var ErrRunning = errors.New("a cluster already runs there")

// Up starts a cluster and returns when its nodes, its names and its snapshot
// controller are ready. After an error nothing runs; the logs stay in Dir.
func Up(ctx context.Context, o Options) (*Cluster, error) {
	if o.Nodes == 0 {
		o.Nodes = 1
	}
	if o.Nodes < 0 || o.Nodes > maxNodes {
		return nil, fmt.Errorf("%d nodes, and there is room for %d", o.Nodes, maxNodes)
	}
	c, err := newCluster(o)
	if err != nil {
		return nil, err
	}
	if err := checkMachine(); err != nil {
		return nil, err
	}
	if old, err := readState(c.dir); err == nil && old.Hub.alive() && old.Ready {
		if !o.Reuse {
			return nil, fmt.Errorf("%s: %w", c.dir, ErrRunning)
		}
		c.state = old
		return c, nil
	}
	bin, err := Build(ctx, c.log)
	if err != nil {
		return nil, err
	}
	store, err := bin.imageStore(ctx, c.log)
	if err != nil {
		return nil, err
	}
	lock, err := c.claimMachine(ctx, o.Wait)
	if err != nil {
		return nil, err
	}
	defer lock.Close() // the hub has it too
	c.began = time.Now()
	if err := c.prepare(o, bin, store); err != nil {
		return nil, fmt.Errorf("prepare %s: %w", c.dir, err)
	}
	if err := c.run(ctx, o, lock); err != nil {
		err = fmt.Errorf("start a cluster in %s: %w", c.dir, c.withTails(err))
		return nil, errors.Join(err, c.Down(false))
	}
	c.say("ready: kubectl --kubeconfig %s", c.Kubeconfig())
	return c, nil
}

// Attach returns the cluster that runs in dir.
func Attach(dir string) (*Cluster, error) {
	c, err := newCluster(Options{Dir: dir})
	if err != nil {
		return nil, err
	}
	c.state, err = readState(c.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("no cluster in %s", c.dir)
	}
	if err != nil {
		return nil, err
	}
	if !c.state.Hub.alive() {
		return nil, fmt.Errorf("the cluster in %s does not run", c.dir)
	}
	return c, nil
}

func newCluster(o Options) (*Cluster, error) {
	if o.Dir == "" {
		return nil, errors.New("no folder for the cluster")
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, err
	}
	// Nodes have a /run, /dev and /proc of their own.
	for _, hidden := range []string{"/run/", "/var/run/", "/dev/", "/proc/", "/sys/"} {
		if strings.HasPrefix(dir+"/", hidden) {
			return nil, fmt.Errorf("%s: a cluster cannot live below %s", dir, hidden)
		}
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	return &Cluster{dir: dir, log: o.Log, began: time.Now()}, nil
}

// checkMachine says what is missing to run a cluster.
func checkMachine() error {
	if os.Geteuid() != 0 {
		return errors.New("a cluster needs root")
	}
	var missing []string
	for _, t := range []string{"runc", "ip", "nsenter", "mount", "nice"} {
		if _, err := exec.LookPath(t); err != nil {
			missing = append(missing, t)
		}
	}
	if _, err := exec.LookPath("iptables"); err != nil {
		if _, err := exec.LookPath("nft"); err != nil {
			missing = append(missing, "iptables or nft")
		}
	}
	for _, f := range []string{"/bin/busybox", cniBin + "/bridge", cniBin + "/portmap"} {
		if !exists(f) {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("a cluster misses %s: install the Debian packages %s", strings.Join(missing, ", "), strings.Join(strings.Fields(packages), " "))
	}
	if err := checkNetwork(); err != nil {
		return err
	}
	// On a machine that never ran containers; where they are built in or cannot be
	// loaded, what needs them says so.
	for _, m := range []string{"overlay", "br_netfilter", "loop"} {
		if _, err := exec.LookPath("modprobe"); err == nil {
			exec.Command("modprobe", "-q", m).Run()
		}
	}
	return nil
}

// claimMachine takes the machine's lock and cleans up after a cluster that died
// with it.
func (c *Cluster) claimMachine(ctx context.Context, wait bool) (*os.File, error) {
	limit := ctx
	if !wait {
		var cancel context.CancelFunc
		limit, cancel = context.WithTimeoutCause(ctx, 3*time.Second, errors.New("not waiting for it"))
		defer cancel()
	}
	lock, err := openLock(limit, runLock, func(holder string) { c.say("waiting for the cluster in %s to end", holder) })
	if err != nil {
		return nil, err
	}
	// Whoever takes the last one down may still be at it.
	unlock, err := lockFile(ctx, downLock, nil)
	if err != nil {
		lock.Close()
		return nil, err
	}
	defer unlock()
	for _, dir := range []string{holderOf(lock), c.dir} {
		if dir == "" {
			continue
		}
		old, err := lastStateOf(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = old.cleanUp(dir)
		}
		if err != nil {
			lock.Close()
			return nil, fmt.Errorf("clean up after the cluster in %s: %w", dir, err)
		}
	}
	if err := setHolder(lock, c.dir); err != nil {
		lock.Close()
		return nil, err
	}
	return lock, nil
}

// prepare writes everything that can be written before something runs.
func (c *Cluster) prepare(o Options, bin Bin, store string) error {
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	if err := c.emptyDir(); err != nil {
		return err
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	base, err := freeLoopBase(o.Nodes)
	if err != nil {
		return err
	}
	c.state = state{
		Boot:     boot,
		Bin:      bin,
		Nodes:    o.Nodes,
		NodeDirs: append(append([]string{}, standardDirs...), o.NodeDirs...),
		LoopBase: base,
	}
	for _, d := range c.state.NodeDirs {
		for ; !exists(d); d = filepath.Dir(d) {
			c.state.MadeDirs = append(c.state.MadeDirs, d)
		}
	}
	if err := c.state.write(c.dir); err != nil {
		return err
	}
	for _, d := range append([]string{c.Logs(), c.conf(), c.pki(), c.sockets(), filepath.Join(c.dir, "etcd")}, c.state.NodeDirs...) {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(c.pki(), 0o700); err != nil {
		return err
	}
	if err := writePKI(c.pki(), o.Nodes); err != nil {
		return err
	}
	if err := os.Link(c.pkiFile("admin.kubeconfig"), c.Kubeconfig()); err != nil {
		return err
	}
	for n := 1; n <= o.Nodes; n++ {
		if err := copyStore(store, c.nodeFolder(n, "/var/lib/containerd")); err != nil {
			return err
		}
	}
	return c.writeConfigs(o)
}

// emptyDir removes what an earlier cluster left in the folder, and nothing of
// anyone else's.
func (c *Cluster) emptyDir() error {
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return err
	}
	if len(entries) > 0 && !exists(stateFile(c.dir)) {
		return errors.New("there are files that are not a cluster's")
	}
	for _, e := range entries {
		if e.Name() == filepath.Base(stateFile(c.dir)) {
			continue // it marks the folder as ours: last, or never
		}
		if err := os.RemoveAll(filepath.Join(c.dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// Kubeconfig is the path of the administrator's configuration. It works on the
// host, in the hub and on the nodes.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.dir, "kubeconfig") }

// Bin is the path of a program, see Bin.Path.
func (c *Cluster) Bin(name string) string { return c.state.Bin.Path(name) }

// Image is the path of a container image's tar file, see Bin.Image.
func (c *Cluster) Image(name string) string { return c.state.Bin.Image(name) }

// Logs is the folder of the components' logs: WHERE-NAME.log.
func (c *Cluster) Logs() string { return filepath.Join(c.dir, "logs") }

// Dir is the folder that the cluster was given.
func (c *Cluster) Dir() string { return c.dir }

// NodeIP is the address of node n, which counts from 1.
func (c *Cluster) NodeIP(n int) string { return nodeIP(n) }

func (c *Cluster) conf() string                { return filepath.Join(c.dir, "conf") }
func (c *Cluster) confFile(name string) string { return filepath.Join(c.conf(), name) }
func (c *Cluster) pki() string                 { return filepath.Join(c.dir, "pki") }
func (c *Cluster) pkiFile(name string) string  { return filepath.Join(c.pki(), name) }

// Command runs a program in the hub's namespaces, where is "", or in a node's,
// where is its name. It has the cluster's programs in its PATH and nothing else of
// the caller's environment; its folder is the caller's.
func (c *Cluster) Command(ctx context.Context, where, name string, args ...string) *exec.Cmd {
	pid := c.state.Hub.Pid
	var err error
	if where != "" {
		pid, err = c.initPid(ctx, where)
	}
	enter := []string{"-t", fmt.Sprint(pid), "-m", "-n", "-p", "-u", "--wd=" + c.workDir(), "--", name}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
	cmd.Env = c.env()
	if err != nil {
		cmd.Err = err
	}
	return cmd
}

func (c *Cluster) workDir() string {
	dir, err := os.Getwd()
	if err != nil {
		return "/"
	}
	return dir
}

// Kubectl runs kubectl on the host as the administrator and returns what it
// prints; what it complains of is in the error.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) ([]byte, error) {
	return c.kubectl(ctx, "", args...)
}

// Apply gives the cluster the objects of a manifest.
func (c *Cluster) Apply(ctx context.Context, manifest string) error {
	_, err := c.kubectl(ctx, manifest, "apply", "--server-side", "--force-conflicts", "-f", "-")
	return err
}

func (c *Cluster) kubectl(ctx context.Context, stdin string, args ...string) ([]byte, error) {
	cmd := c.HostCommand(ctx, "kubectl", args...)
	cmd.Stdin = strings.NewReader(stdin)
	var complaint strings.Builder
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		return out, fmt.Errorf("kubectl %s: %s: %w", strings.Join(args, " "), strings.TrimSpace(complaint.String()), err)
	}
	return out, nil
}

// HostCommand runs one of the cluster's programs, such as kubectl or helm, on the
// host and as the administrator.
func (c *Cluster) HostCommand(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.Bin(name), args...)
	cmd.Env = c.env()
	return cmd
}

// LoadImage gives every node the images of a tar file, as `docker save` or `ko`
// write it.
func (c *Cluster) LoadImage(ctx context.Context, tar string) error {
	tar, err := filepath.Abs(tar)
	if err != nil {
		return err
	}
	for n := 1; n <= c.state.Nodes; n++ {
		if err := c.loadImage(ctx, nodeName(n), tar); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) say(format string, args ...any) {
	fmt.Fprintf(c.log, "cluster: %5.1f s: %s\n", time.Since(c.began).Seconds(), fmt.Sprintf(format, args...))
}

func (c *Cluster) warn(format string, args ...any) { c.say("warning: "+format, args...) }

// withTails adds to an error the last lines of every component that ended.
func (c *Cluster) withTails(err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	wheres := []string{""}
	for n := 1; n <= c.state.Nodes; n++ {
		wheres = append(wheres, nodeName(n))
	}
	for _, where := range wheres {
		a, askErr := c.ask(ctx, where, request{Op: "list"})
		if log := c.logFile(where, "machine"); askErr != nil && exists(log) {
			err = fmt.Errorf("%w\n%s", err, tail(log))
		}
		for name, s := range a.Programs {
			if s.Exit != "" {
				err = fmt.Errorf("%w\n%s on %s: %s\n%s", err, name, orHub(where), s.Exit, tail(c.logFile(where, name)))
			}
		}
	}
	return err
}

// tail is the end of a log, with its name.
func tail(file string) string {
	content, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(content), "\n"), "\n")
	const most = 15
	if len(lines) > most {
		lines = lines[len(lines)-most:]
	}
	return "--- " + file + "\n" + strings.Join(lines, "\n")
}
