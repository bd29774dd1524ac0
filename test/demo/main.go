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
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"
	corev1 "k8s.io/api/core/v1"

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

func up(ctx context.Context, image, url string) error {
	if err := check(); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	c, err := start(ctx)
	if err != nil {
		return err
	}
	if err := install(ctx, c, image); err != nil {
		return err
	}
	disk, err := prepare(ctx, url)
	if err != nil {
		return err
	}
	if err := importDisk(ctx, c, disk); err != nil {
		return err
	}
	fmt.Printf(`
The cluster is yours until "make demo-down":

  export KUBECONFIG=%s PATH=%s:$PATH
  kubectl get nodevolumes,pvc,pods -o wide
  kubectl describe pvc disk                        # the events of the import
  kubectl exec -it reader -- sh                    # the disk is /dev/disk
  kubectl get csistoragecapacities -A              # what the scheduler knows of the pool
  bin/longshore inspect %s

Other images: edit the URL in %s, change the names, kubectl apply.
`, c.Kubeconfig(), filepath.Dir(c.Bin("kubectl")), disk.url, manifest)
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
	defer step("A Kubernetes of one node (the first time it is compiled, which takes ten to twenty minutes)")()
	c, err := cluster.Up(ctx, cluster.Options{Dir: filepath.Join(dir, "cluster"), Log: indented(os.Stdout)})
	var held *cluster.HeldError
	switch {
	case errors.Is(err, cluster.ErrRunning):
		return nil, errors.New("the demo's cluster is up already: make demo-down removes it")
	case errors.As(err, &held):
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

// prepare makes an image and serves it, or fetches the one at url to know its
// content.
func prepare(ctx context.Context, url string) (d disk, err error) {
	web := filepath.Join(dir, "web")
	if err := os.MkdirAll(web, 0o755); err != nil {
		return d, err
	}
	raw := filepath.Join(dir, "want.raw")
	defer os.Remove(raw)
	d.url = url
	if url == "" {
		defer step("A disk image of real files, on a web server")()
		image := filepath.Join(web, "disk.qcow2")
		if err := makeImage(ctx, image); err != nil {
			return d, err
		}
		if d.url, err = startServer(ctx, image); err != nil {
			return d, err
		}
	} else {
		defer step("Your image, fetched once to know what the pod must read")()
		image := filepath.Join(dir, "fetched")
		defer os.Remove(image)
		if err := fetch(ctx, url, image); err != nil {
			return d, err
		}
		if err := qemuConvert(ctx, image, raw); err != nil {
			return d, err
		}
	}
	if url == "" {
		if err := qemuConvert(ctx, filepath.Join(web, "disk.qcow2"), raw); err != nil {
			return d, err
		}
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
	f, err := os.Create(raw)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(1<<30), f.Close()); err != nil {
		return err
	}
	root := runtime.GOROOT()
	if root == "" {
		out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
		if err != nil {
			return fmt.Errorf("go env GOROOT: %w", err)
		}
		root = strings.TrimSpace(string(out))
	}
	fmt.Printf("   ext4 with the files of %s\n", root)
	if err := tool(ctx, "mkfs.ext4", "-q", "-F", "-L", "longshore", "-d", root, raw); err != nil {
		return err
	}
	return tool(ctx, "qemu-img", "convert", "-q", "-f", "raw", "-O", "qcow2", "-c", raw, image)
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
	tty := term.IsTerminal(int(os.Stdout.Fd()))
	told := map[string]bool{}
	last := ""
	deadline := time.Now().Add(30 * time.Minute)
	for time.Now().Before(deadline) {
		if err := events(ctx, c, told); err != nil {
			return err
		}
		line, failed, err := progress(ctx, c)
		if err != nil {
			return err
		}
		if failed != "" {
			return fmt.Errorf("the import failed for good: %s", failed)
		}
		switch {
		case line == last || line == "":
		case tty:
			fmt.Printf("\r\033[K   %s", line)
		default:
			fmt.Printf("   %s\n", line)
		}
		last = line
		phase, err := c.Kubectl(ctx, "get", "pod", "reader", "-o", "jsonpath={.status.phase}")
		if err != nil {
			return err
		}
		if string(phase) == string(corev1.PodRunning) {
			if tty {
				fmt.Println()
			}
			return events(ctx, c, told)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(400 * time.Millisecond):
		}
	}
	said, _ := c.Kubectl(ctx, "describe", "pvc,pod,nodevolume")
	return fmt.Errorf("after half an hour the pod does not run:\n%s", said)
}

// progress is what the claim's NodeVolume says.
func progress(ctx context.Context, c *cluster.Cluster) (line, failed string, err error) {
	out, err := c.Kubectl(ctx, "get", "nodevolumes.longshore.dev", "-o", "json")
	if err != nil {
		return "", "", err
	}
	var list v1alpha1.NodeVolumeList
	if err := json.Unmarshal(out, &list); err != nil {
		return "", "", fmt.Errorf("read NodeVolumes: %w", err)
	}
	for _, nv := range list.Items {
		if nv.Spec.Claim == nil || nv.Spec.Claim.Namespace != "default" || nv.Spec.Claim.Name != "disk" {
			continue
		}
		if nv.Status.Phase == v1alpha1.PhaseFailed {
			for _, condition := range nv.Status.Conditions {
				if condition.Type == v1alpha1.ConditionPopulated {
					failed = condition.Reason + ": " + condition.Message
				}
			}
			return "", failed, nil
		}
		line = fmt.Sprintf("%-10s", nv.Status.Phase)
		if p := nv.Status.Progress; p != nil && p.BytesTotal > 0 {
			line += fmt.Sprintf(" %3d %%  %4d of %d MiB  %3d MiB/s", p.BytesDone*100/p.BytesTotal, p.BytesDone>>20, p.BytesTotal>>20, p.BytesPerSecond>>20)
			if p.ETASeconds > 0 {
				line += fmt.Sprintf("  %d s left", p.ETASeconds)
			}
			if p.Format != "" {
				line += "  (" + p.Format + ")"
			}
		}
		return line, "", nil
	}
	return "", "", nil
}

// events prints what is new of the claim and the source.
func events(ctx context.Context, c *cluster.Cluster, told map[string]bool) error {
	out, err := c.Kubectl(ctx, "get", "events", "-o", "json")
	if err != nil {
		return err
	}
	var list corev1.EventList
	if err := json.Unmarshal(out, &list); err != nil {
		return fmt.Errorf("read events: %w", err)
	}
	for _, e := range list.Items {
		key := string(e.UID) + e.Message
		if told[key] || e.InvolvedObject.Kind != "PersistentVolumeClaim" && e.InvolvedObject.Kind != "VolumeImportSource" {
			continue
		}
		told[key] = true
		fmt.Printf("\r\033[K   event: %s %s: %s: %s\n", e.InvolvedObject.Kind, e.Type, e.Reason, e.Message)
	}
	return nil
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
