package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/longshore-io/longshore/nodeplugin"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

func TestPoolFlag(t *testing.T) {
	got, err := parsePool("name=default,dir=/var/lib/longshore/default,bytes=107374182400")
	if want := (pool.Config{Name: "default", Dir: "/var/lib/longshore/default", Bytes: 100 << 30}); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	if got, err := parsePool("name=a,dir=/a,bytes=1000000000,cache=20"); err != nil || got.CachePercent != 20 {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, bad := range []string{"", "default", "name=a,dir=/a,bytes=1000000000,cache=91", "name=a,dir=/a,bytes=1000000000,cache=x", "name=a,dir=/a", "name=a,dir=a,bytes=1000000000", "name=a,dir=/a,bytes=1Gi", "name=a,dir=/a,bytes=5", "dir=/a,bytes=1000000000", "name=a,dir=/a,bytes=1000000000,size=4"} {
		if got, err := parsePool(bad); err == nil {
			t.Errorf("%q: got %+v, want an error", bad, got)
		}
	}
}

func TestMemoryMustHoldTheMovers(t *testing.T) {
	c := nodeConfig{slots: 4, moverMemoryBytes: 128 << 20}
	for limit, ok := range map[int64]bool{0: true, 768 << 20: true, 768<<20 - 1: false} {
		if err := c.checkMemory(limit); (err == nil) != ok {
			t.Errorf("limit %d: got %v", limit, err)
		} else if err != nil && !strings.Contains(err.Error(), "node.resources.limits.memory") {
			t.Errorf("%q does not say what to change", err)
		}
	}
	for name, c := range map[string]struct {
		file, text string
		want       int64
	}{
		"cgroup v2":           {"sys/fs/cgroup/memory.max", "1073741824\n", 1 << 30},
		"cgroup v2, no limit": {"sys/fs/cgroup/memory.max", "max\n", 0},
		"cgroup v1":           {"sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n", 1 << 30},
		"cgroup v1, no limit": {"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n", 0},
		"no cgroup":           {"x", "", 0},
	} {
		root := t.TempDir()
		path := filepath.Join(root, c.file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(c.text), 0o644)); err != nil {
			t.Fatal(err)
		}
		if got, err := memoryLimit(root); got != c.want || err != nil {
			t.Errorf("%s: got %d, %v, want %d", name, got, err, c.want)
		}
	}
}

func TestKubeletDirMustBeShared(t *testing.T) {
	if err := checkKubeletDir(t.TempDir()); err != nil {
		t.Errorf("a plain folder: got %v", err)
	}
	if err := checkKubeletDir("/proc"); err == nil {
		// /proc is a mount; whether it is shared is the machine's business.
		t.Log("/proc is shared here")
	} else if !strings.Contains(err.Error(), "Bidirectional") {
		t.Errorf("%q does not say what to change", err)
	}
}

// authority is a CA of the test.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *authority) publish(file string) {
	a.t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}), 0o644); err != nil {
		a.t.Fatal(err)
	}
}

func (a *authority) sign(key any, name string, dns []string, life time.Duration) []byte {
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, DNSNames: dns, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(life),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, key, a.key)
	if err != nil {
		a.t.Error(err)
	}
	return der
}

// client is the TLS configuration of a client that shows a certificate of that name; "" shows none.
func (a *authority) client(name string, trust *authority) *tls.Config {
	a.t.Helper()
	roots := x509.NewCertPool()
	roots.AddCert(trust.cert)
	c := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: "n1.node.longshore.dev"}
	if name != "" {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			a.t.Fatal(err)
		}
		c.Certificates = []tls.Certificate{{Certificate: [][]byte{a.sign(key.Public(), name, nil, time.Hour)}, PrivateKey: key}}
	}
	return c
}

// talk connects to an echo server and has one byte echoed: with TLS 1.3 a
// client learns of its refusal only when it reads.
func talk(address string, c *tls.Config) error {
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 5 * time.Second}, "tcp", address, c)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("x")); err != nil {
		return err
	}
	_, err = io.ReadFull(conn, make([]byte, 1))
	return err
}

func TestAgentServesTheControllerAlone(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	signer := ca
	clientset := fake.NewClientset()
	// The API server: it gives each object a name of its own.
	clientset.PrependReactor("create", "certificatesigningrequests", func(action clienttesting.Action) (bool, runtime.Object, error) {
		csr := action.(clienttesting.CreateAction).GetObject().(*certificatesv1.CertificateSigningRequest)
		csr.Name = csr.GenerateName + rand.Text()
		return false, nil, nil
	})
	// The controller: it signs what is asked for, and sees what that is.
	var asked []*x509.CertificateRequest
	clientset.PrependReactor("get", "certificatesigningrequests", func(action clienttesting.Action) (bool, runtime.Object, error) {
		o, err := clientset.Tracker().Get(action.GetResource(), "", action.(clienttesting.GetAction).GetName())
		if err != nil {
			return true, nil, err
		}
		csr := o.(*certificatesv1.CertificateSigningRequest).DeepCopy()
		block, _ := pem.Decode(csr.Spec.Request)
		r, err := x509.ParseCertificateRequest(block.Bytes)
		if err != nil {
			return true, nil, err
		}
		if asked = append(asked, r); len(asked) == 1 {
			csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied, Message: "not today"}}
			return true, csr, nil
		}
		csr.Status.Certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signer.sign(r.PublicKey, r.Subject.CommonName, r.DNSNames, time.Hour)})
		return true, csr, nil
	})
	file := filepath.Join(t.TempDir(), "ca.crt")
	id := &agentIdentity{csrs: clientset.CertificatesV1().CertificateSigningRequests(), node: "n1", caFile: file, log: slog.New(slog.NewTextHandler(t.Output(), nil))}

	if _, err := id.ask(t.Context()); err == nil || !strings.Contains(err.Error(), "not today") {
		t.Errorf("a denied request: got %v", err)
	}
	if !id.wantsRenewal(time.Now()) {
		t.Error("without a certificate none is wanted")
	}
	get := func() {
		t.Helper()
		cert, err := id.ask(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		id.mu.Lock()
		id.cert = cert
		id.mu.Unlock()
	}
	get()
	if r := asked[1]; r.Subject.String() != "CN=node:n1" || len(r.DNSNames) != 1 || r.DNSNames[0] != "n1.node.longshore.dev" {
		t.Errorf("asked for %s, %q", r.Subject, r.DNSNames)
	}

	l, err := tls.Listen("tcp", "127.0.0.1:0", id.serverTLS())
	if err != nil {
		t.Fatal(err)
	}
	var g errgroup.Group
	g.Go(func() error {
		for {
			conn, err := l.Accept()
			if err != nil {
				return nil
			}
			g.Go(func() error {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
				return nil
			})
		}
	})
	defer func() { l.Close(); g.Wait() }()
	address := l.Addr().String()
	controller := ca.client("controller", ca)
	if err := id.ready(); err == nil || talk(address, controller) == nil {
		t.Error("clients are served before the CA is known")
	}
	ca.publish(file)
	if err := id.ready(); err != nil {
		t.Error(err)
	}
	if err := talk(address, controller); err != nil {
		t.Errorf("the controller is refused: %v", err)
	}
	for what, c := range map[string]*tls.Config{
		"another node":               ca.client("node:n2", ca),
		"this node":                  ca.client("node:n1", ca),
		"nobody":                     ca.client("", ca),
		"a controller of another CA": other.client("controller", ca),
	} {
		if talk(address, c) == nil {
			t.Errorf("%s is served", what)
		}
	}
	old := ca.client("controller", ca)
	old.MaxVersion = tls.VersionTLS12
	if talk(address, old) == nil {
		t.Error("TLS 1.2 is served")
	}

	if id.wantsRenewal(time.Now()) || !id.wantsRenewal(time.Now().Add(42*time.Minute)) {
		t.Error("an hour's certificate is to be renewed after 40 minutes")
	}
	// The CA is replaced: its file changes, and the certificate with it.
	other.publish(file)
	if !id.wantsRenewal(time.Now()) {
		t.Error("a certificate of a CA that is gone is kept")
	}
	signer = other
	get()
	if err := talk(address, other.client("controller", other)); err != nil {
		t.Errorf("the controller of the new CA is refused: %v", err)
	}
	if talk(address, ca.client("controller", other)) == nil {
		t.Error("the controller of the old CA is served")
	}
}

func TestKeepStopsWithItsContext(t *testing.T) {
	clientset := fake.NewClientset()
	id := &agentIdentity{csrs: clientset.CertificatesV1().CertificateSigningRequests(), node: "n1", caFile: "/none", log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan struct{}, 1)
	clientset.PrependReactor("get", "certificatesigningrequests", func(clienttesting.Action) (bool, runtime.Object, error) {
		select {
		case asked <- struct{}{}:
		default:
		}
		return false, nil, nil
	})
	done := make(chan error)
	go func() { done <- id.keep(ctx) }()
	<-asked
	cancel()
	if err := <-done; err != nil {
		t.Errorf("got %v", err)
	}
}

func TestRegistration(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "reg.sock")
	if err := os.WriteFile(socket, nil, 0o600); err != nil { // of a killed predecessor
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	g, gctx := errgroup.WithContext(ctx)
	r := &kubeletRegistration{endpoint: "/k/csi.sock", log: slog.New(slog.DiscardHandler)}
	s := grpc.NewServer()
	registration.RegisterRegistrationServer(s, r)
	if err := serveSocket(gctx, g, s, socket); err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	kubelet := registration.NewRegistrationClient(conn)
	info, err := kubelet.GetInfo(ctx, &registration.InfoRequest{})
	if err != nil || info.Type != "CSIPlugin" || info.Name != "csi.longshore.dev" || info.Endpoint != "/k/csi.sock" || len(info.SupportedVersions) != 1 {
		t.Errorf("got %v, %v", info, err)
	}
	for _, c := range []struct {
		status *registration.RegistrationStatus
		ready  bool
	}{
		{&registration.RegistrationStatus{Error: "no"}, false},
		{&registration.RegistrationStatus{PluginRegistered: true}, true},
	} {
		if r.ready(true) == nil {
			t.Error("ready before the kubelet has taken the plugin")
		}
		if _, err := kubelet.NotifyRegistrationStatus(ctx, c.status); err != nil {
			t.Fatal(err)
		}
		if err := r.ready(true); (err == nil) != c.ready {
			t.Errorf("after %v: got %v", c.status, err)
		}
	}
	cancel()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestNodeMetrics(t *testing.T) {
	m := newNodeMetrics()
	stager, _, err := nodeplugin.New(t.Context(), nodeplugin.Config{Pools: []pool.Config{{Name: "default", Dir: filepath.Join(t.TempDir(), "pool"), Bytes: 1 << 30}}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer stager.Close()
	m.stager = stager
	notReady := errors.New("not yet")
	s := httptest.NewServer(m.handler(func(context.Context) error { return notReady }))
	defer s.Close()
	get := func(path string) (int, string) {
		t.Helper()
		resp, err := http.Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	code, text := get("/metrics")
	for _, want := range []string{`longshore_pool_up{pool="default"} 1`, `longshore_pool_bytes{pool="default"} `, `longshore_volumes{pool="default",state="filling"} 0`, "longshore_loop_devices 0", "longshore_movers_ended_total 0"} {
		if code != 200 || !strings.Contains(text, want) {
			t.Errorf("code %d, no %q in\n%s", code, want, text)
		}
	}
	if code, _ := get("/healthz"); code != 200 {
		t.Errorf("/healthz: got %d", code)
	}
	if code, text := get("/readyz"); code != 503 || !strings.Contains(text, "not yet") {
		t.Errorf("/readyz: got %d, %s", code, text)
	}
	notReady = nil
	if code, _ := get("/readyz"); code != 200 {
		t.Errorf("/readyz: got %d", code)
	}
}
