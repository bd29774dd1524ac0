// Command demo shows Longshore at work: it starts a real Kubernetes on this
// machine, installs the chart, imports a disk image over HTTP while one watches,
// and proves that the pod reads the image's very bytes.
//
// It knows of Longshore only what a user knows: the chart and kubectl. It needs
// root and the Debian packages that .ci/deps installs.
//
//	demo [-image out/longshore-image.tar] [-url URL] up
//	demo down
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/term"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/test/cluster"
)

const (
	dir       = "/var/lib/longshore-demo"
	namespace = "longshore"
	manifest  = "docs/examples/demo.yaml"
	// exampleURL is what the manifest has in place of a real URL, exampleSize the
	// size that its claim asks for.
	exampleURL  = "https://images.example/disk.qcow2"
	exampleSize = "2Gi"

	poolBytes  int64 = 8 << 30
	spaceBytes       = poolBytes + 6<<30

	// watchFor is how long the import is made to take, so that there is
	// something to see.
	watchFor = 12 * time.Second
)

func main() {
	image := flag.String("image", "out/longshore-image.tar", "tarball of the container image")
	url := flag.String("url", "", "image to import instead of one that the demo makes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch flag.Arg(0) {
	case "up":
		err = up(ctx, *image, *url)
	case "down":
		err = down()
	case "serve":
		err = serve(ctx, flag.Args()[1:])
	default:
		fmt.Fprintln(os.Stderr, "usage: demo [-image FILE] [-url URL] up | demo down")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
}

// step says what comes now, and how long it took in the end.
func step(what string) func() {
	start := time.Now()
	fmt.Printf("\n== %s\n", what)
	return func() { fmt.Printf("   %.1f s\n", time.Since(start).Seconds()) }
}

func up(ctx context.Context, image, address string) error {
	if err := check(); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var d disk
	var err error
	if address != "" {
		// First: whatever is wrong with it shows at once.
		if d, err = fetched(ctx, address); err != nil {
			return err
		}
	}
	c, err := start(ctx)
	if err != nil {
		return err
	}
	if err := install(ctx, c, image); err != nil {
		return err
	}
	if address == "" {
		if d, err = made(ctx); err != nil {
			return err
		}
	}
	if err := importDisk(ctx, c, d); err != nil {
		return fmt.Errorf("%w\n\nThe cluster is still up: KUBECONFIG=%s. Run the demo again, with another URL, or make demo-down", err, c.Kubeconfig())
	}
	fmt.Printf(`
The cluster is yours until "make demo-down":

  export KUBECONFIG=%s PATH=%s:$PATH
  kubectl get nodevolumes,pvc,pods -o wide
  kubectl describe pvc disk                        # the events of the import
  kubectl exec -it reader -- sh                    # the disk is /dev/disk
  kubectl get csistoragecapacities -A              # what the scheduler knows of the pool
  bin/longshore inspect %s

Other images: make demo URL=..., or edit the URL in %s, change the names, kubectl apply.
`, c.Kubeconfig(), filepath.Dir(c.Bin("kubectl")), d.url, manifest)
	return nil
}

// check says early what would fail late.
func check() error {
	if os.Geteuid() != 0 {
		return errors.New("the demo starts containers and mounts volumes: run it as root")
	}
	if _, err := os.Stat(manifest); err != nil {
		return fmt.Errorf("%w: run the demo in the top folder of the checkout", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "cluster")); err == nil {
		return nil // it has its room already
	}
	parent := filepath.Dir(dir)
	var st syscall.Statfs_t
	if err := syscall.Statfs(parent, &st); err != nil {
		return fmt.Errorf("look for space in %s: %w", parent, err)
	}
	if free := int64(st.Bavail) * st.Bsize; free < spaceBytes {
		return fmt.Errorf("%s has %d bytes free, the demo needs %d: make room", parent, free, spaceBytes)
	}
	return nil
}

func start(ctx context.Context) (*cluster.Cluster, error) {
	defer step("A Kubernetes of one node (the first time it is compiled, which takes ten to twenty minutes on two cores)")()
	c, err := cluster.Up(ctx, cluster.Options{Dir: filepath.Join(dir, "cluster"), Log: indented(os.Stdout), Reuse: true})
	if held := (*cluster.HeldError)(nil); errors.As(err, &held) {
		return nil, fmt.Errorf("this machine has room for one cluster and another is up (%w): end it first", err)
	}
	return c, err
}

func install(ctx context.Context, c *cluster.Cluster, image string) error {
	defer step("Longshore: its image into the node, its chart into the cluster")()
	if err := c.LoadImage(ctx, image); err != nil {
		return err
	}
	args := []string{"upgrade", "--install", "longshore", "charts/longshore", "--namespace", namespace, "--create-namespace",
		"--wait", "--timeout", "5m",
		"--set", "image.pullPolicy=Never", "--set", "sidecars.pullPolicy=Never",
		"--set", fmt.Sprintf("pools[0].name=default,pools[0].dir=/var/lib/longshore/default,pools[0].bytes=%d", poolBytes),
		// the demo's web server stands where a node would not fetch from by itself
		"--set", "fetchPolicy.allow={" + cluster.HostIP + "}",
	}
	fmt.Println("   helm", strings.Join(args, " "))
	out, err := c.HostCommand(ctx, "helm", args...).CombinedOutput()
	if err != nil {
		pods, _ := c.Kubectl(context.WithoutCancel(ctx), "-n", namespace, "get", "pods,events")
		said, _ := c.Kubectl(context.WithoutCancel(ctx), "-n", namespace, "logs", "--all-containers", "--prefix", "--tail=30", "-l", "app.kubernetes.io/name=longshore")
		return fmt.Errorf("helm: %w: %s\n%s\n%s", err, out, pods, said)
	}
	pods, err := c.Kubectl(ctx, "-n", namespace, "get", "pods")
	fmt.Fprint(indented(os.Stdout), string(pods))
	return err
}

// disk is the image to import, and what a guest must read of it.
type disk struct {
	url    string
	bytes  int64
	sha256 string
}

// made makes an image and serves it.
func made(ctx context.Context) (disk, error) {
	defer step("A disk image of real files, on a web server")()
	web := filepath.Join(dir, "web")
	if err := os.MkdirAll(web, 0o755); err != nil {
		return disk{}, err
	}
	image := filepath.Join(web, "disk.qcow2")
	if err := makeImage(ctx, image); err != nil {
		return disk{}, err
	}
	url, err := startServer(ctx, image)
	if err != nil {
		return disk{}, err
	}
	return known(ctx, url, image)
}

// fetched fetches the image at url to know its content.
func fetched(ctx context.Context, url string) (disk, error) {
	defer step("Your image, fetched once to know what the pod must read")()
	if err := reachable(ctx, url); err != nil {
		return disk{}, err
	}
	image := filepath.Join(dir, "fetched")
	defer os.Remove(image)
	if err := fetch(ctx, url, image); err != nil {
		return disk{}, err
	}
	d, err := known(ctx, url, image)
	if err == nil && d.bytes > poolBytes/10*9 {
		err = fmt.Errorf("a disk of %d bytes does not fit into the demo's pool of %d: take a smaller one", d.bytes, poolBytes)
	}
	return d, err
}

// reachable refuses addresses that mean another machine to a node than to us.
func reachable(ctx context.Context, text string) error {
	u, err := url.Parse(text)
	if err != nil {
		return err
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return fmt.Errorf("URL=%s: want http://HOST/... or https://HOST/...", text)
	}
	addresses, err := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname())
	if err != nil {
		return err
	}
	for _, a := range addresses {
		if a = a.Unmap(); a.IsLoopback() || a.IsUnspecified() || a.IsLinkLocalUnicast() {
			return fmt.Errorf("URL=%s: the nodes have a network of their own, in which %s is not this machine: let the web server listen at an address of this machine's network and name that; while the demo's cluster is up, %s is one", text, a, cluster.HostIP)
		}
	}
	if p, err := http.ProxyFromEnvironment(&http.Request{URL: u}); err == nil && p != nil {
		fmt.Printf("   note: this machine goes to %s by the proxy %s, the nodes go straight\n", u.Hostname(), p.Redacted())
	}
	return nil
}

// known tells what a guest must read of an image.
func known(ctx context.Context, url, image string) (disk, error) {
	d := disk{url: url}
	raw := filepath.Join(dir, "want.raw")
	defer os.Remove(raw)
	if err := qemuConvert(ctx, image, raw); err != nil {
		return d, err
	}
	f, err := os.Open(raw)
	if err != nil {
		return d, err
	}
	defer f.Close()
	h := sha256.New()
	if d.bytes, err = io.Copy(h, f); err != nil {
		return d, err
	}
	d.sha256 = hex.EncodeToString(h.Sum(nil))
	fmt.Printf("   %s\n   a disk of %d bytes, sha256 %s (by qemu-img convert)\n", d.url, d.bytes, d.sha256)
	return d, nil
}

// makeImage makes a compressed qcow2 of a filesystem with Go's own tree in it:
// some thousand real files that every machine with Go has.
func makeImage(ctx context.Context, image string) error {
	raw := image + ".raw"
	defer os.Remove(raw)
	out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("go env GOROOT: %w", err)
	}
	root := strings.TrimSpace(string(out))
	size, err := roomFor(root)
	if err != nil {
		return err
	}
	f, err := os.Create(raw)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		return err
	}
	fmt.Printf("   ext4 of %d MiB with the files of %s\n", size>>20, root)
	if err := tool(ctx, "mkfs.ext4", "-q", "-F", "-L", "longshore", "-d", root, raw); err != nil {
		return err
	}
	return tool(ctx, "qemu-img", "convert", "-q", "-f", "raw", "-O", "qcow2", "-c", raw, image)
}

// roomFor is the size in bytes of an ext4 that the files under root nearly fill:
// whole blocks, inodes and tables, a journal.
func roomFor(root string) (int64, error) {
	const block = 4096
	var bytes, files int64
	err := filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		files++
		bytes += (info.Size() + block - 1) / block * block
		return nil
	})
	return (bytes + bytes/16 + files*512 + 64<<20) >> 20 << 20, err
}

// qemuConvert makes a raw disk of an image. The format is qemu's guess: this is
// the image that whoever runs the demo has chosen.
func qemuConvert(ctx context.Context, image, raw string) error {
	head := make([]byte, 2)
	f, err := os.Open(image)
	if err != nil {
		return err
	}
	_, err = io.ReadFull(f, head)
	f.Close()
	if err != nil {
		return fmt.Errorf("read %s: %w", image, err)
	}
	if head[0] == 0x1f && head[1] == 0x8b {
		return tool(ctx, "sh", "-c", `gzip -dc "$0" > "$1"`, image, raw)
	}
	return tool(ctx, "qemu-img", "convert", "-q", "-O", "raw", image, raw)
}

func fetch(ctx context.Context, url, file string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: %s", url, resp.Status)
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, resp.Body)
	return errors.Join(err, f.Close())
}

func importDisk(ctx context.Context, c *cluster.Cluster, d disk) error {
	text, err := os.ReadFile(manifest)
	if err != nil {
		return err
	}
	objects, err := fill(string(text), d)
	if err != nil {
		return err
	}
	// Of an earlier run.
	if _, err := c.Kubectl(ctx, "delete", "--ignore-not-found", "--wait", "pod/reader", "pvc/disk", "volumeimportsource/image"); err != nil {
		return err
	}
	done := step("The import: kubectl apply of " + manifest)
	fmt.Fprint(indented(os.Stdout), objects)
	if err := c.Apply(ctx, objects); err != nil {
		return err
	}
	fmt.Println()
	if err := watch(ctx, c); err != nil {
		return err
	}
	done()

	defer step("The proof: what the pod reads is what the image holds")()
	out, err := c.Kubectl(ctx, "exec", "reader", "--", "sh", "-c", fmt.Sprintf("head -c %d /dev/disk | sha256sum", d.bytes))
	if err != nil {
		return err
	}
	got, _, _ := strings.Cut(string(out), " ")
	fmt.Printf("   pod        %s\n   qemu-img   %s\n", got, d.sha256)
	if got != d.sha256 {
		return errors.New("the pod reads other bytes: this is a bug of Longshore, please report it")
	}
	fmt.Println("   equal")
	return nil
}

// fill puts the disk's URL and size into the manifest.
func fill(text string, d disk) (string, error) {
	if !strings.Contains(text, exampleURL) || !strings.Contains(text, exampleSize) {
		return "", fmt.Errorf("%s has no %s and %s to fill in", manifest, exampleURL, exampleSize)
	}
	// A volume must hold the disk; whole MiB are what people ask for.
	size := fmt.Sprintf("%dMi", (d.bytes+1<<20-1)>>20)
	return strings.NewReplacer(exampleURL, d.url, exampleSize, size).Replace(text), nil
}

// watch shows progress and events until the pod runs.
func watch(ctx context.Context, c *cluster.Cluster) error {
	api, err := connect(c)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Minute, errors.New("after half an hour the pod does not run"))
	defer cancel()
	show := &screen{tty: term.IsTerminal(int(os.Stdout.Fd()))}
	told := map[string]bool{}
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		running, err := look(ctx, api, show, told)
		if ctx.Err() != nil {
			said, _ := c.Kubectl(context.WithoutCancel(ctx), "describe", "pvc,pod,nodevolume")
			return fmt.Errorf("%w\n%s", context.Cause(ctx), said)
		}
		if err != nil || running {
			show.end()
			return err
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

func connect(c *cluster.Cluster) (client.Client, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, err
	}
	log.SetLogger(logr.Discard()) // what a person must know comes back as an error
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: scheme})
}

// look shows what is new and tells whether the pod runs.
func look(ctx context.Context, api client.Client, show *screen, told map[string]bool) (running bool, err error) {
	var claim corev1.PersistentVolumeClaim
	if err := api.Get(ctx, client.ObjectKey{Namespace: "default", Name: "disk"}, &claim); err != nil {
		return false, err
	}
	var events corev1.EventList
	if err := api.List(ctx, &events, client.InNamespace("default")); err != nil {
		return false, err
	}
	for _, e := range events.Items {
		// Of the source the same is told; the sidecar only says that it is not meant.
		line := fmt.Sprintf("event: %s: %s", e.Reason, e.Message)
		if told[line] || e.InvolvedObject.UID != claim.UID || e.Reason == "Provisioning" || e.Reason == "ExternalProvisioning" {
			continue
		}
		told[line] = true
		show.keep(line)
		if e.Reason == "importFailed" {
			return false, fmt.Errorf("the import failed for good: %s", e.Message)
		}
	}
	var volumes v1alpha1.NodeVolumeList
	if err := api.List(ctx, &volumes); err != nil {
		return false, err
	}
	for _, nv := range volumes.Items {
		if nv.Spec.Claim == nil || nv.Spec.Claim.Namespace != "default" || nv.Spec.Claim.Name != "disk" {
			continue
		}
		show.update(progress(nv))
	}
	var pod corev1.Pod
	if err := api.Get(ctx, client.ObjectKey{Namespace: "default", Name: "reader"}, &pod); err != nil {
		return false, err
	}
	return pod.Status.Phase == corev1.PodRunning, nil
}

// progress is what a NodeVolume says, in a line.
func progress(nv v1alpha1.NodeVolume) string {
	line := fmt.Sprintf("%-10s", nv.Status.Phase)
	p := nv.Status.Progress
	if p == nil || p.BytesTotal == 0 {
		return line
	}
	line += fmt.Sprintf(" %3d %%  %4d of %d MiB", p.BytesDone*100/p.BytesTotal, p.BytesDone>>20, p.BytesTotal>>20)
	if nv.Status.Phase == v1alpha1.PhaseFilling {
		line += fmt.Sprintf("  %3d MiB/s", p.BytesPerSecond>>20)
		if p.ETASeconds > 0 {
			line += fmt.Sprintf("  %d s left", p.ETASeconds)
		}
	}
	return line
}

// screen has lines that stay and, at its end, one that changes; where it is no
// terminal, each change is a line.
type screen struct {
	tty  bool
	last string
}

func (s *screen) keep(line string) {
	if s.tty {
		fmt.Printf("\r\033[K   %s\n   %s", line, s.last)
		return
	}
	fmt.Printf("   %s\n", line)
}

func (s *screen) update(line string) {
	switch {
	case line == s.last:
	case s.tty:
		fmt.Printf("\r\033[K   %s", line)
	default:
		fmt.Printf("   %s\n", line)
	}
	s.last = line
}

func (s *screen) end() {
	if s.tty {
		fmt.Println()
	}
}

// down removes all but caches.
func down() error {
	if os.Geteuid() != 0 {
		return errors.New("run it as root, as the demo was")
	}
	if err := stopServer(); err != nil {
		return err
	}
	if err := cluster.Down(filepath.Join(dir, "cluster"), true); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	fmt.Println("nothing is left of the demo but caches of what was compiled and fetched (folder longshore in the user's cache folder)")
	return nil
}

func tool(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// indented is a writer that puts three blanks before each line.
func indented(w io.Writer) io.Writer { return &indenter{w: w, fresh: true} }

type indenter struct {
	w     io.Writer
	fresh bool
}

func (i *indenter) Write(p []byte) (int, error) {
	var b strings.Builder
	for _, c := range p {
		if i.fresh {
			b.WriteString("   ")
		}
		b.WriteByte(c)
		i.fresh = c == '\n'
	}
	if _, err := io.WriteString(i.w, b.String()); err != nil {
		return 0, err
	}
	return len(p), nil
}
