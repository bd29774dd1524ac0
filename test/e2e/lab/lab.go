// Package lab is a one-node Kubernetes with Longshore on it, and the verbs that
// the stories need: claims, pods, images on a web server, and a look at what
// the node still holds.
//
// It asserts nothing about Longshore itself.
package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/test/cluster"
)

// Namespace that Longshore is installed in.
const Namespace = "longshore"

// ShellImage is the image of the consumers' pods.
const ShellImage = "cluster.test/busybox:1"

// Node is the name of the cluster's node.
const Node = "node1"

// BindTimeout is how long the cluster's scheduler waits for a claim to bind before it thinks again.
const BindTimeout = 8 * time.Second

// Lab is a running cluster with Longshore.
type Lab struct {
	client.Client
	Cluster *cluster.Cluster
	pods    kubernetes.Interface // for what a client.Client has no verb for
	keep    bool
}

// Start brings the cluster up, or attaches to one that LONGSHORE_LAB=keep left,
// and installs Longshore with the given Helm values.
func Start(ctx context.Context, log io.Writer, values ...string) (*Lab, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	root, err := moduleRoot(ctx)
	if err != nil {
		return nil, err
	}
	ctrllog.SetLogger(logr.Discard())
	l := &Lab{keep: os.Getenv("LONGSHORE_LAB") == "keep"}
	built := make(chan error, 1)
	go func() { built <- buildImage(ctx, root, log) }()
	l.Cluster, err = cluster.Up(ctx, cluster.Options{
		Dir:           filepath.Join(cache, "longshore", "lab"),
		Reuse:         l.keep,
		DieWithParent: !l.keep,
		Wait:          true,
		BindTimeout:   BindTimeout,
		Log:           log,
	})
	if err := errors.Join(err, <-built); err != nil {
		if l.Cluster != nil {
			err = errors.Join(err, l.Close())
		}
		return nil, err
	}
	if err := l.install(ctx, root, log, values); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", l.Cluster.Kubeconfig())
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	cfg.QPS, cfg.Burst = 100, 200
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, cdiv1.AddToScheme, v1alpha1.AddToScheme, snapshotv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	if l.pods, err = kubernetes.NewForConfig(cfg); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	if l.Client, err = client.New(cfg, client.Options{Scheme: scheme}); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Close removes the cluster, unless it is to be kept.
func (l *Lab) Close() error {
	if l.keep {
		fmt.Printf("cluster left up: export KUBECONFIG=%s\n", l.Cluster.Kubeconfig())
		return nil
	}
	return l.Cluster.Down(true)
}

// Eventually waits until f returns nil; it fails the test with f's last error
// when four minutes (or the test's own deadline) are over: whoever waits shares
// two cores with a whole cluster.
func (l *Lab) Eventually(t testing.TB, what string, f func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			l.Explain(t)
			t.Fatalf("%s: %v", what, err)
		case <-tick.C:
		}
	}
}

// NewNamespace makes a namespace for t. At the end of t it is deleted, and the
// test fails if the node then still holds something of it.
func (l *Lab) NewNamespace(t testing.TB) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "story-"}}
	l.Must(t, l.Create(t.Context(), ns))
	t.Cleanup(func() { l.clean(t, ns.Name) })
	return ns.Name
}

// clean runs after the test's own context has ended.
func (l *Lab) clean(t testing.TB, ns string) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	if t.Failed() {
		l.Explain(t)
	}
	zero := client.GracePeriodSeconds(0)
	err := errors.Join(
		l.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(ns), zero),
		l.DeleteAllOf(ctx, &snapshotv1.VolumeSnapshot{}, client.InNamespace(ns)),
		l.DeleteAllOf(ctx, &corev1.PersistentVolumeClaim{}, client.InNamespace(ns)),
		client.IgnoreNotFound(l.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})),
	)
	if err != nil {
		t.Errorf("clean up namespace %s: %v", ns, err)
	}
	for {
		left := l.Left(ctx, ns)
		if left == "" {
			return
		}
		select {
		case <-ctx.Done():
			t.Errorf("after namespace %s was deleted there is still: %s", ns, left)
			return
		case <-time.After(300 * time.Millisecond):
		}
	}
}

// Left names what exists of a namespace's volumes: API objects and, once those are
// gone, what the node holds; "" when nothing does.
func (l *Lab) Left(ctx context.Context, ns string) string {
	var left []string
	var pvcs corev1.PersistentVolumeClaimList
	if err := l.List(ctx, &pvcs, client.InNamespace(ns)); err != nil {
		return err.Error()
	}
	for _, p := range pvcs.Items {
		left = append(left, "claim "+p.Name)
	}
	var nvs v1alpha1.NodeVolumeList
	if err := l.List(ctx, &nvs); err != nil {
		return err.Error()
	}
	known := map[string]bool{}
	for _, nv := range nvs.Items {
		known[nv.Name] = true
		if nv.Spec.Claim != nil && nv.Spec.Claim.Namespace == ns {
			left = append(left, "NodeVolume "+nv.Name)
		}
	}
	var pvs corev1.PersistentVolumeList
	if err := l.List(ctx, &pvs); err != nil {
		return err.Error()
	}
	for _, pv := range pvs.Items {
		if pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.Namespace == ns {
			left = append(left, "PersistentVolume "+pv.Name)
		}
	}
	if len(left) > 0 {
		return strings.Join(left, ", ")
	}
	for _, h := range l.Held(ctx) {
		if !known[h.Volume] {
			left = append(left, h.What)
		}
	}
	return strings.Join(left, ", ")
}

// Holding is something that the node keeps for a volume.
type Holding struct{ Volume, What string }

// Held lists the folders of volumes and snapshots in the node's pool, the loop
// devices on their files, mounts of them and movers that run.
func (l *Lab) Held(ctx context.Context) []Holding {
	// The plugin's own view: its mount namespace has the pool mounted.
	out, err := l.InPlugin(ctx, `
for d in /var/lib/longshore/*/mnt/volumes/* /var/lib/longshore/*/mnt/snapshots/* /var/lib/longshore/*/mnt/trash/*; do
  [ -e "$d" ] && echo "file ${d##*/} $d"
done
for l in /sys/block/loop*/loop/backing_file; do
  [ -e "$l" ] && f=$(cat $l) && case $f in */volumes/*|*/snapshots/*|*/trash/*) n=${f%/*}; echo "loop ${n##*/} $f";; esac
done
grep -E ' /var/lib/longshore/[^ ]*(fill|mnt/volumes)' /proc/self/mountinfo | while read -r a b c d m r; do echo "mount ${m##*/} $m"; done
for p in /proc/[0-9]*; do
  c=$(tr '\0' ' ' < $p/cmdline 2>/dev/null) && case "$c" in *longshore\ mover*) echo "process - $c";; esac
done
true`)
	if err != nil {
		return []Holding{{What: fmt.Sprintf("cannot look: %v: %s", err, out)}}
	}
	var held []Holding
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		f := strings.SplitN(line, " ", 3)
		if len(f) == 3 {
			held = append(held, Holding{Volume: f[1], What: f[0] + " " + f[2]})
		}
	}
	return held
}

// InPlugin runs a shell script in the mount and pid namespaces of the node plugin's container.
// It goes by way of the node: a kubectl for each look would cost more than all else.
func (l *Lab) InPlugin(ctx context.Context, script string) ([]byte, error) {
	return l.Cluster.Command(ctx, Node, "sh", "-ec",
		`exec nsenter -t "$(pgrep -o -f '^/usr/bin/longshore node ')" -m -p -- sh -c "$0"`, script).CombinedOutput()
}

// PluginPod is the node plugin's running pod.
func (l *Lab) PluginPod(ctx context.Context) (*corev1.Pod, error) { return l.component(ctx, "node") }

// ControllerPod is the controller's running pod.
func (l *Lab) ControllerPod(ctx context.Context) (*corev1.Pod, error) {
	return l.component(ctx, "controller")
}

func (l *Lab) component(ctx context.Context, name string) (*corev1.Pod, error) {
	var pods corev1.PodList
	if err := l.List(ctx, &pods, client.InNamespace(Namespace), client.MatchingLabels{"app.kubernetes.io/component": name}); err != nil {
		return nil, err
	}
	for i, p := range pods.Items {
		if p.DeletionTimestamp.IsZero() && ready(&p) {
			return &pods.Items[i], nil
		}
	}
	return nil, fmt.Errorf("no ready %s pod among %d", name, len(pods.Items))
}

func ready(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// Must fails the test on err.
func (l *Lab) Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Explain prints what a person would look at first.
func (l *Lab) Explain(t testing.TB) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for _, args := range [][]string{
		{"get", "nodevolumes,pv", "-o", "wide"},
		{"get", "pvc,pods", "-A", "-o", "wide"},
		{"get", "events", "-A", "--sort-by=.lastTimestamp"},
		{"-n", Namespace, "logs", "-l", "app.kubernetes.io/component=controller", "-c", "longshore", "--tail=60"},
		{"-n", Namespace, "logs", "-l", "app.kubernetes.io/component=node", "-c", "longshore", "--tail=60"},
	} {
		out, err := l.Cluster.Kubectl(ctx, args...)
		if n := len(out); n > 12000 {
			out = out[n-12000:]
		}
		t.Logf("kubectl %s (%v)\n%s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
}

// Class says what StorageClass a story needs.
type Class struct {
	Wait     bool   // WaitForFirstConsumer
	Pool     string // "" is the large one
	Populate string
	FSType   string
}

// Gone is nil once the object does not exist.
func (l *Lab) Gone(ctx context.Context, o client.Object) error {
	err := l.Get(ctx, client.ObjectKeyFromObject(o), o)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%T %s still exists", o, o.GetName())
}

// Size is a quantity of n bytes.
func Size(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.BinarySI) }
