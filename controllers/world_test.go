package controllers

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
	"github.com/longshore-io/longshore/test/cluster"
)

// The tests of this package run the reconcilers against a real API server, with
// the real binder of claims beside it. The nodes' agents are played by the type
// node; they get their certificates as real ones do.
const (
	system = "longshore-system"
	mib    = 1 << 20
)

var world struct {
	client.Client
	config  *rest.Config
	ca      *CA
	volumes *Volumes
	port    int
	nodes   atomic.Int32
}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	bin, err := cluster.Build(ctx, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "build Kubernetes:", err)
		return 1
	}
	env := &envtest.Environment{
		BinaryAssetsDirectory: filepath.Dir(bin.Path("etcd")),
		CRDDirectoryPaths:     []string{"../charts/longshore/crds"}, ErrorIfCRDPathMissing: true,
		ControlPlaneStartTimeout: 2 * time.Minute, ControlPlaneStopTimeout: time.Minute,
	}
	if world.config, err = env.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "start the API server:", err)
		return 1
	}
	defer func() {
		if err := env.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, "stop the API server:", err)
		}
	}()
	world.config.QPS, world.config.Burst = 500, 1000
	binder, err := startBinder(ctx, bin.Path("kube-controller-manager"), env.KubeConfig)
	if err != nil {
		fmt.Fprintln(os.Stderr, "start the binder:", err)
		return 1
	}
	defer binder()
	stop, err := startControllers(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "start the controllers:", err)
		return 1
	}
	defer stop()
	code := m.Run()
	if err := undisturbed(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// undisturbed tells whether Kubernetes could write on all claims of all tests: its
// complaint would end clients that read events (R5).
func undisturbed(ctx context.Context) error {
	var events corev1.EventList
	if err := world.List(ctx, &events); err != nil {
		return err
	}
	for _, e := range events.Items {
		if e.Reason == "ProvisioningFailed" && strings.Contains(e.Message, "has been modified") {
			return fmt.Errorf("claim %s/%s was written to while Kubernetes did: %s", e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Message)
		}
	}
	return nil
}

// startBinder runs the controllers of Kubernetes that bind claims and protect them.
func startBinder(ctx context.Context, path string, kubeconfig []byte) (stop func(), err error) {
	dir, err := os.MkdirTemp("", "longshore-binder-")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(file, kubeconfig, 0o600); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, path, "--kubeconfig="+file, "--leader-elect=false", "--secure-port=0", "--cert-dir="+dir,
		"--controllers=persistentvolume-binder-controller,persistentvolumeclaim-protection-controller,persistentvolume-protection-controller")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		cancel()
		return nil, err
	}
	return func() {
		early := cmd.ProcessState
		cancel()
		if err := cmd.Wait(); early != nil {
			fmt.Fprintf(os.Stderr, "the binder ended early: %v\n%s", err, out.String())
		}
		os.RemoveAll(dir)
	}, nil
}

func startControllers(ctx context.Context) (stop func(), err error) {
	if os.Getenv("LONGSHORE_TEST_LOG") != "" {
		ctrl.SetLogger(testLogger())
	} else {
		ctrl.SetLogger(logr.Discard())
	}
	options, err := ManagerOptions(system)
	if err != nil {
		return nil, err
	}
	if world.Client, err = client.New(world.config, client.Options{Scheme: options.Scheme}); err != nil {
		return nil, err
	}
	if err := asAdmin(ctx); err != nil {
		return nil, err
	}
	if world.ca, err = EnsureCA(ctx, world.Client, system); err != nil {
		return nil, err
	}
	// The manager is no administrator: it has the rights that the markers ask for.
	restricted := rest.CopyConfig(world.config)
	restricted.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + system + ":longshore-controller", Groups: []string{"system:serviceaccounts", "system:authenticated"}}
	mgr, err := ctrl.NewManager(restricted, options)
	if err != nil {
		return nil, err
	}
	if world.port, err = freePort(); err != nil {
		return nil, err
	}
	clientset, err := kubernetes.NewForConfig(restricted)
	if err != nil {
		return nil, err
	}
	events := record.NewBroadcaster(record.WithContext(ctx))
	events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: clientset.CoreV1().Events("")})
	world.volumes, _, err = Setup(ctx, mgr, Config{
		Namespace: system, NodeServiceAccount: "longshore-node", AgentPort: world.port, CA: world.ca,
		Events: events.NewRecorder(mgr.GetScheme(), corev1.EventSource{Component: "longshore-controller"}),
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	return func() {
		cancel()
		if err := <-ended; err != nil {
			fmt.Fprintln(os.Stderr, "the manager ended:", err)
		}
		events.Shutdown()
	}, nil
}

// asAdmin makes what the chart makes: namespace, service accounts, roles.
func asAdmin(ctx context.Context) error {
	role, err := controllerRole()
	if err != nil {
		return err
	}
	for _, o := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: system}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "longshore-node"}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "somebody"}},
		role,
		binding("longshore-controller", "longshore-controller"),
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "longshore-node"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"certificates.k8s.io"}, Resources: []string{"certificatesigningrequests"}, Verbs: []string{"create", "get", "watch"}}}},
		binding("longshore-node", "longshore-node"),
		binding("longshore-node", "somebody"),
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "pods"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}}}},
		&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "pods"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "pods"},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: system, Name: "longshore-controller"}}},
	} {
		if err := world.Create(ctx, o); err != nil {
			return fmt.Errorf("create %T %s: %w", o, o.GetName(), err)
		}
	}
	return nil
}

func binding(role, account string) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: role + "-" + account}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: system, Name: account}}}
}

// controllerRole is made of the rbac markers of this package.
func controllerRole() (*rbacv1.ClusterRole, error) {
	text, err := os.ReadFile("doc.go")
	if err != nil {
		return nil, err
	}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "longshore-controller"}}
	for line := range strings.Lines(string(text)) {
		marker, ok := strings.CutPrefix(strings.TrimSpace(line), "// +kubebuilder:rbac:")
		if !ok {
			continue
		}
		var r rbacv1.PolicyRule
		for field := range strings.SplitSeq(marker, ",") {
			key, value, _ := strings.Cut(field, "=")
			values := strings.Split(strings.Trim(value, `"`), ";")
			switch key {
			case "groups":
				r.APIGroups = values
			case "resources":
				r.Resources = values
			case "resourceNames":
				r.ResourceNames = values
			case "verbs":
				r.Verbs = values
			default:
				return nil, fmt.Errorf("marker %q: unknown field %s", marker, key)
			}
		}
		role.Rules = append(role.Rules, r)
	}
	return role, nil
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// eventually waits until f returns nil.
func eventually(t *testing.T, what string, f func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		err := f(ctx)
		if err == nil {
			return
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, last)
		case <-tick.C:
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tokenOn is a service-account token as the kubelet of a node mounts it in a pod there.
func tokenOn(t *testing.T, account, node string) (token string, pod *corev1.Pod) {
	t.Helper()
	pod = &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: system, GenerateName: account + "-", Labels: map[string]string{componentLabel: "node"}},
		Spec:       corev1.PodSpec{NodeName: node, ServiceAccountName: account, Containers: []corev1.Container{{Name: "longshore", Image: "longshore"}}},
	}
	must(t, world.Create(t.Context(), pod))
	t.Cleanup(func() {
		must(t, client.IgnoreNotFound(world.Delete(context.Background(), pod, client.GracePeriodSeconds(0))))
	})
	r := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}}}
	must(t, world.SubResource("token").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: account}}, r))
	return r.Status.Token, pod
}

// asker is a client with a token and no other right.
func asker(t *testing.T, token string) client.Client {
	t.Helper()
	config := rest.AnonymousClientConfig(world.config)
	config.BearerToken = token
	c, err := client.New(config, client.Options{Scheme: world.Scheme()})
	must(t, err)
	return c
}

// requestOf is a certificate request as a node plugin writes it, before somebody tampers with it.
func requestOf(t *testing.T, node string, key *ecdsa.PrivateKey, tamper func(*x509.CertificateRequest)) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: "node:" + node}, DNSNames: []string{NodeServerName(node)}}
	if tamper != nil {
		tamper(template)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	must(t, err)
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "node-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: SignerName, Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth, certificatesv1.UsageClientAuth},
		},
	}
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	return key
}

// answered waits for the answer to a certificate request.
func answered(t *testing.T, csr *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	eventually(t, "certificate request "+csr.Name+" is answered", func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(csr), csr); err != nil {
			return err
		}
		if _, closed := stateOf(csr); !closed {
			return fmt.Errorf("status is %+v", csr.Status)
		}
		return nil
	})
}

func serverCertificate(t *testing.T, token, node string) tls.Certificate {
	t.Helper()
	key := newKey(t)
	csr := requestOf(t, node, key, nil)
	must(t, asker(t, token).Create(t.Context(), csr))
	answered(t, csr)
	if len(csr.Status.Certificate) == 0 {
		t.Fatalf("node %s gets no certificate: %+v", node, csr.Status.Conditions)
	}
	block, _ := pem.Decode(csr.Status.Certificate)
	return tls.Certificate{Certificate: [][]byte{block.Bytes}, PrivateKey: key}
}

// Objects of a test, in a namespace of its own.

func namespace(t *testing.T) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "tenant-"}}
	must(t, world.Create(t.Context(), ns))
	return ns.Name
}

// class makes a StorageClass whose pool is the test's own.
func class(t *testing.T, pool string, change func(*storagev1.StorageClass)) *storagev1.StorageClass {
	t.Helper()
	reclaim := corev1.PersistentVolumeReclaimDelete
	mode := storagev1.VolumeBindingImmediate
	sc := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "class-"}, Provisioner: csi.DriverName, ReclaimPolicy: &reclaim, VolumeBindingMode: &mode,
		Parameters: map[string]string{csi.ParameterPool: pool}, MountOptions: []string{"noatime"},
	}
	if change != nil {
		change(sc)
	}
	must(t, world.Create(t.Context(), sc))
	return sc
}

func waitsForConsumer(sc *storagev1.StorageClass) {
	mode := storagev1.VolumeBindingWaitForFirstConsumer
	sc.VolumeBindingMode = &mode
}

func staged(sc *storagev1.StorageClass) { sc.Parameters[csi.ParameterPopulate] = "stage" }

func retained(sc *storagev1.StorageClass) {
	reclaim := corev1.PersistentVolumeReclaimRetain
	sc.ReclaimPolicy = &reclaim
}

func importSource(t *testing.T, ns string, change func(*cdiv1.DataVolumeSourceHTTP)) *cdiv1.VolumeImportSource {
	t.Helper()
	return imageSource(t, ns, func(s *cdiv1.VolumeImportSource) {
		if change != nil {
			change(s.Spec.Source.HTTP)
		}
	})
}

func imageSource(t *testing.T, ns string, change func(*cdiv1.VolumeImportSource)) *cdiv1.VolumeImportSource {
	t.Helper()
	h := &cdiv1.DataVolumeSourceHTTP{URL: "https://example.com/disk.qcow2"}
	s := &cdiv1.VolumeImportSource{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "image"}, Spec: cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{HTTP: h}}}
	if change != nil {
		change(s)
	}
	must(t, world.Create(t.Context(), s))
	return s
}

func claimOf(t *testing.T, ns, name string, sc *storagev1.StorageClass, bytes int64, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	t.Helper()
	group, mode := cdiv1.SchemeGroupVersion.Group, corev1.PersistentVolumeBlock
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Annotations: map[string]string{}},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &sc.Name, VolumeMode: &mode, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:     corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(bytes, resource.BinarySI)}},
			DataSourceRef: &corev1.TypedObjectReference{APIGroup: &group, Kind: cdiv1.VolumeImportSourceRef, Name: "image"},
		},
	}
	if change != nil {
		change(c)
	}
	must(t, world.Create(t.Context(), c))
	return c
}

func annotate(t *testing.T, o client.Object, key, value string) {
	t.Helper()
	old := o.DeepCopyObject().(client.Object)
	a := o.GetAnnotations()
	if a == nil {
		a = map[string]string{}
	}
	a[key] = value
	o.SetAnnotations(a)
	must(t, world.Patch(t.Context(), o, client.MergeFrom(old)))
}

// says waits for the claim's Populated condition to have the reason, and words in its message.
func says(t *testing.T, claim *corev1.PersistentVolumeClaim, reason string, words ...string) {
	t.Helper()
	eventually(t, "claim says "+reason, func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
			return err
		}
		for _, c := range claim.Status.Conditions {
			if c.Type != v1alpha1.ConditionPopulated {
				continue
			}
			if c.Reason != reason || (c.Status == corev1.ConditionTrue) != (reason == populator.ReasonSucceeded) {
				return fmt.Errorf("it says %s %s: %s", c.Status, c.Reason, c.Message)
			}
			for _, w := range words {
				if !strings.Contains(c.Message, w) {
					return fmt.Errorf("%q does not name %q", c.Message, w)
				}
			}
			return nil
		}
		return fmt.Errorf("it says nothing")
	})
}

func bound(t *testing.T, claim *corev1.PersistentVolumeClaim) *corev1.PersistentVolume {
	t.Helper()
	pv := &corev1.PersistentVolume{}
	eventually(t, "claim is bound", func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
			return err
		}
		if claim.Status.Phase != corev1.ClaimBound {
			return fmt.Errorf("claim is %s, %+v", claim.Status.Phase, claim.Status.Conditions)
		}
		return world.Get(ctx, client.ObjectKey{Name: claim.Spec.VolumeName}, pv)
	})
	return pv
}

// recorded waits until the record of a claim is as f wants it.
func recorded(t *testing.T, claim *corev1.PersistentVolumeClaim, f func(*v1alpha1.NodeVolume) error) *v1alpha1.NodeVolume {
	t.Helper()
	nv := &v1alpha1.NodeVolume{}
	eventually(t, "record of claim "+claim.Name, func(ctx context.Context) error {
		if err := world.Get(ctx, client.ObjectKey{Name: populator.VolumeName(claim)}, nv); err != nil {
			return err
		}
		return f(nv)
	})
	return nv
}

func inPhase(phase v1alpha1.NodeVolumePhase) func(*v1alpha1.NodeVolume) error {
	return func(nv *v1alpha1.NodeVolume) error {
		if nv.Status.Phase != phase {
			return fmt.Errorf("phase is %q, want %s: %+v", nv.Status.Phase, phase, nv.Status.Conditions)
		}
		return nil
	}
}

func gone(t *testing.T, o client.Object) {
	t.Helper()
	eventually(t, fmt.Sprintf("%T %s is gone", o, o.GetName()), func(ctx context.Context) error {
		err := world.Get(ctx, client.ObjectKeyFromObject(o), o)
		if err == nil {
			return fmt.Errorf("it is there: %+v", o)
		}
		return client.IgnoreNotFound(err)
	})
}

// told waits for an event about an object that has all the words.
func told(t *testing.T, o client.Object, words ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("event %q", words), func(ctx context.Context) error {
		var list corev1.EventList
		if err := world.List(ctx, &list, client.InNamespace(o.GetNamespace())); err != nil {
			return err
		}
		var all []string
	events:
		for _, e := range list.Items {
			if e.InvolvedObject.UID != o.GetUID() {
				continue
			}
			text := e.Type + " " + e.Reason + ": " + e.Message
			all = append(all, text)
			for _, w := range words {
				if !strings.Contains(text, w) {
					continue events
				}
			}
			return nil
		}
		return fmt.Errorf("there are %q", all)
	})
}
