package cluster

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"time"
)

// Bin is a set of built programs and container images.
type Bin struct {
	dir     string // what comes from the servers' module
	machine string // the folder of the machine program
}

// Path of a program: etcd, kube-apiserver, kube-controller-manager,
// kube-scheduler, kubelet, kube-proxy, kubectl, containerd,
// containerd-shim-runc-v2, ctr, coredns, pause, csi-provisioner,
// csi-snapshotter, csi-resizer, snapshot-controller, csi-sanity, helm.
func (b Bin) Path(name string) string { return filepath.Join(b.dir, "bin", name) }

// Image is the path of an image as a tar file: pause, busybox, coredns,
// csi-provisioner, csi-snapshotter, csi-resizer, snapshot-controller.
func (b Bin) Image(name string) string { return filepath.Join(b.dir, "images", name+".tar") }

// Images lists the paths of all images.
func (b Bin) Images() ([]string, error) { return filepath.Glob(b.Image("*")) }

// crds is the folder of the snapshot API's definitions.
func (b Bin) crds() string { return filepath.Join(b.dir, "crds") }

//go:embed packages.txt
var packages string

// kubernetesVersion must be the one in servers/go.mod.
const kubernetesVersion = "v1.37.2"

// programs of the servers' module, with the variables that tell each its
// version: the sidecars refuse a driver's name without one.
var programs = []struct {
	pkg    string
	values string
}{
	{"./kubeall", "k8s.io/component-base/version.gitVersion=" + kubernetesVersion + " k8s.io/component-base/version.gitMajor=1 k8s.io/component-base/version.gitMinor=37 k8s.io/component-base/version.gitTreeState=clean k8s.io/component-base/version.gitCommit=module k8s.io/client-go/pkg/version.gitVersion=" + kubernetesVersion},
	{"./coredns", ""},
	{"./pause", ""},
	{"./image", ""},
	{"github.com/containerd/containerd/v2/cmd/containerd", "github.com/containerd/containerd/v2/version.Version=2.4.2"},
	{"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", "github.com/containerd/containerd/v2/version.Version=2.4.2"},
	{"github.com/containerd/containerd/v2/cmd/ctr", "github.com/containerd/containerd/v2/version.Version=2.4.2"},
	{"github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity", ""},
	{"github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner", "main.version=v6.4.0"},
	{"github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer", "main.version=v2.3.0"},
	{"github.com/kubernetes-csi/external-snapshotter/v8/cmd/csi-snapshotter", "main.version=v8.7.0"},
	{"github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller", "main.version=v8.7.0"},
	{"helm.sh/helm/v4/cmd/helm", "helm.sh/helm/v4/internal/version.version=v4.3.2"},
}

// kubeallNames are the programs in kubeall.
var kubeallNames = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"}

const crdModule = "github.com/kubernetes-csi/external-snapshotter/client/v8"

// Build builds everything that a cluster runs, or finds it built: the result
// stays in the user's cache folder under a hash of its sources. Calls of several
// processes wait for each other. log gets what the Go command says.
func Build(ctx context.Context, log io.Writer) (Bin, error) {
	_, file, _, ok := runtime.Caller(0)
	if !ok {
		return Bin{}, errors.New("find the sources of package cluster")
	}
	here := filepath.Dir(file)
	servers, machine := filepath.Join(here, "servers"), filepath.Join(here, "machine")
	key, err := hashSources(servers, fmt.Sprint(programs, kubeallNames))
	if err != nil {
		return Bin{}, err
	}
	var b Bin
	b.dir, err = cached(ctx, log, key, func(out string) error { return buildServers(ctx, log, servers, out) })
	if err != nil {
		return Bin{}, fmt.Errorf("build the servers: %w", err)
	}
	if key, err = hashSources(machine, ""); err != nil {
		return Bin{}, err
	}
	b.machine, err = cached(ctx, log, "machine-"+key, func(out string) error { return buildMachine(ctx, log, machine, out) })
	if err != nil {
		return Bin{}, fmt.Errorf("build machine: %w", err)
	}
	return b, nil
}

// cached returns the folder of that name in the cache, and has make fill it the
// first time.
func cached(ctx context.Context, log io.Writer, name string, make func(out string) error) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	cache = filepath.Join(cache, "longshore", "cluster")
	dir := filepath.Join(cache, name)
	if exists(dir) {
		return dir, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	// Not one lock for each name: two builds at once would also share no work.
	unlock, err := lockFile(ctx, filepath.Join(cache, "lock"), func(string) {
		fmt.Fprintln(log, "cluster: waiting for another build")
	})
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(dir) {
		return dir, nil
	}
	// Of builds that were killed.
	stale, err := filepath.Glob(filepath.Join(cache, "*.tmp-*"))
	if err != nil {
		return "", err
	}
	for _, d := range stale {
		if err := os.RemoveAll(d); err != nil {
			return "", err
		}
	}
	tmp, err := os.MkdirTemp(cache, name+".tmp-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", err
	}
	start := time.Now()
	fmt.Fprintf(log, "cluster: building %s\n", dir)
	if err := make(tmp); err != nil {
		return "", err
	}
	if err := syncTree(tmp); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return "", err
	}
	fmt.Fprintf(log, "cluster: built in %s\n", time.Since(start).Round(time.Second))
	return dir, nil
}

func hashSources(src, extra string) (string, error) {
	var files []string
	err := filepath.WalkDir(src, func(path string, d fs.DirEntry, err error) error {
		name := filepath.Base(path)
		if err == nil && !d.IsDir() && (name == "go.mod" || name == "go.sum" || strings.HasSuffix(name, ".go")) {
			files = append(files, path)
		}
		return err
	})
	if err != nil {
		return "", err
	}
	sort.Strings(files)
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version(), runtime.GOARCH, extra)
	for _, f := range files {
		content, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		rel, err := filepath.Rel(src, f)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %d\n%s", rel, len(content), content)
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

func buildServers(ctx context.Context, log io.Writer, src, out string) error {
	bin, images := filepath.Join(out, "bin"), filepath.Join(out, "images")
	for _, d := range []string{bin, images, filepath.Join(out, "crds")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	// One call of the Go command: what two programs share is compiled once.
	args := []string{"build", "-mod=readonly", "-buildvcs=false", "-trimpath", "-o", bin + "/"}
	var pkgs []string
	for _, p := range programs {
		flags := p.pkg + "=-s -w"
		for _, v := range strings.Fields(p.values) {
			flags += " -X " + v
		}
		args = append(args, "-ldflags="+flags)
		pkgs = append(pkgs, p.pkg)
	}
	if err := goCommand(ctx, log, src, append(args, pkgs...)...); err != nil {
		return err
	}
	for _, name := range kubeallNames {
		if err := os.Symlink("kubeall", filepath.Join(bin, name)); err != nil {
			return err
		}
	}
	image := exec.CommandContext(ctx, filepath.Join(bin, "image"), bin, images)
	if message, err := image.CombinedOutput(); err != nil {
		return fmt.Errorf("write the images (Debian packages needed: %s): %s: %w", strings.Join(strings.Fields(packages), " "), message, err)
	}
	return copyCRDs(ctx, log, src, filepath.Join(out, "crds"))
}

func copyCRDs(ctx context.Context, log io.Writer, src, out string) error {
	var dir strings.Builder
	if err := goCommand(ctx, &dir, src, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", crdModule); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(dir.String()), "config/crd", "*snapshot*.yaml"))
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("no definitions in %s", crdModule)
	}
	for _, f := range files {
		content, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(out, filepath.Base(f)), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func buildMachine(ctx context.Context, log io.Writer, src, out string) error {
	return goCommand(ctx, log, src, "build", "-buildvcs=false", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(out, "machine"), "main.go")
}

func goCommand(ctx context.Context, log io.Writer, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "nice", append([]string{"go"}, args...)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOOS=linux")
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s: %w", args[0], err)
	}
	return nil
}

// syncTree makes the files under dir durable, so that the rename that follows
// never shows half of one.
func syncTree(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() && !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		return f.Sync()
	})
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
