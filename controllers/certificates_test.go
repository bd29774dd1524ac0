package controllers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// A node's plugin gets a certificate of its own node's name, for 30 days at most.
func TestCertificate(t *testing.T) {
	t.Parallel()
	must(t, world.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "honest.example.com"}}))
	token, _ := tokenOn(t, "longshore-node", "honest.example.com")
	csr := requestOf(t, "honest.example.com", newKey(t), nil)
	must(t, asker(t, token).Create(t.Context(), csr))
	answered(t, csr)
	block, _ := pem.Decode(csr.Status.Certificate)
	if block == nil {
		t.Fatalf("no certificate: %+v", csr.Status)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	must(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(world.ca.cert)
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, DNSName: "honest.example.com.node.longshore.dev"}); err != nil {
		t.Error(err)
	}
	if cert.Subject.String() != "CN=node:honest.example.com" || cert.IsCA || len(cert.DNSNames) != 1 {
		t.Errorf("certificate is of %s, names %v, CA %v", cert.Subject, cert.DNSNames, cert.IsCA)
	}
	if life := time.Until(cert.NotAfter); life > 30*24*time.Hour || life < 29*24*time.Hour {
		t.Errorf("it lives %s", life)
	}
}

// The hostile node: whatever its plugin's token is used for, it gets no certificate
// but its own, and nobody else gets one at all (R17).
func TestHostileCertificateRequests(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"hostile", "victim"} {
		must(t, world.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	}
	hostile, _ := tokenOn(t, "longshore-node", "hostile")
	somebody, _ := tokenOn(t, "somebody", "victim")
	weak := newKey(t)
	rows := []struct {
		name   string
		token  string
		node   string
		tamper func(*x509.CertificateRequest)
		change func(*certificatesv1.CertificateSigningRequest)
		words  string
	}{
		{"it asks for another node's certificate", hostile, "victim", nil, nil, "on node hostile it must be CN=node:hostile"},
		{"its own name, another node's host name", hostile, "hostile", func(r *x509.CertificateRequest) { r.DNSNames = []string{NodeServerName("victim")} }, nil, "DNS names"},
		{"another node's host name beside its own", hostile, "hostile", func(r *x509.CertificateRequest) { r.DNSNames = append(r.DNSNames, NodeServerName("victim")) }, nil, "DNS names"},
		{"the controller's name", hostile, "hostile", func(r *x509.CertificateRequest) { r.Subject.CommonName = "controller" }, nil, "subject"},
		{"an organisation, as kube-apiserver would take for a group", hostile, "hostile", func(r *x509.CertificateRequest) { r.Subject.Organization = []string{"system:masters"} }, nil, "subject"},
		{"a second common name", hostile, "hostile", func(r *x509.CertificateRequest) {
			r.Subject.ExtraNames = []pkix.AttributeTypeAndValue{{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "controller"}}
			r.Subject.CommonName = ""
		}, nil, "subject"},
		{"an IP address", hostile, "hostile", func(r *x509.CertificateRequest) { r.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} }, nil, "IP addresses"},
		{"a URI", hostile, "hostile", func(r *x509.CertificateRequest) { r.URIs = []*url.URL{{Scheme: "spiffe", Host: "victim"}} }, nil, "URIs"},
		{"an extension that makes a CA", hostile, "hostile", func(r *x509.CertificateRequest) {
			r.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Value: []byte{0x30, 0x03, 0x01, 0x01, 0xff}}}
		}, nil, "extension"},
		{"the usage of a CA", hostile, "hostile", nil, func(c *certificatesv1.CertificateSigningRequest) {
			c.Spec.Usages = append(c.Spec.Usages, certificatesv1.UsageCertSign)
		}, "usage"},
		{"another service account on the victim's node", somebody, "victim", nil, nil, "may not ask"},
		{"an administrator", "", "victim", nil, nil, "may not ask"},
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			csr := requestOf(t, r.node, weak, r.tamper)
			if r.change != nil {
				r.change(csr)
			}
			c := world.Client
			if r.token != "" {
				c = asker(t, r.token)
			}
			must(t, c.Create(t.Context(), csr))
			answered(t, csr)
			if len(csr.Status.Certificate) > 0 {
				t.Fatal("it got a certificate")
			}
			i := slices.IndexFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
				return c.Type == certificatesv1.CertificateDenied || c.Type == certificatesv1.CertificateFailed
			})
			if i < 0 || !strings.Contains(csr.Status.Conditions[i].Message, r.words) {
				t.Errorf("conditions are %+v, want words %q", csr.Status.Conditions, r.words)
			}
		})
	}
}

// A token that is bound to no pod says nothing of a node.
func TestTokenWithoutNode(t *testing.T) {
	n := &NodeCertificates{User: "system:serviceaccount:longshore-system:longshore-node"}
	csr := requestOf(t, "victim", newKey(t), nil)
	csr.Spec.Username = n.User
	if _, _, err := n.check(csr); err == nil || !strings.Contains(err.Error(), "not bound") {
		t.Errorf("got %v", err)
	}
	csr.Spec.Extra = map[string]certificatesv1.ExtraValue{nodeClaim: {"hostile", "victim"}}
	if _, _, err := n.check(csr); err == nil || !strings.Contains(err.Error(), "not bound") {
		t.Errorf("with two nodes: got %v", err)
	}
}

// What somebody else has approved is checked all the same. (On the API server the
// running reconciler would be first: hence the stand-in.)
func TestApprovedByAnother(t *testing.T) {
	t.Parallel()
	csr := requestOf(t, "victim", newKey(t), nil)
	csr.Name, csr.Spec.Username = "approved", "somebody"
	mark(csr, certificatesv1.CertificateApproved, "Friend", "of the hostile node")
	c := fake.NewClientBuilder().WithScheme(world.Scheme()).WithObjects(csr).WithStatusSubresource(csr).Build()
	n := &NodeCertificates{Client: c, CA: world.ca, User: "system:serviceaccount:longshore-system:longshore-node"}
	_, err := n.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(csr)})
	must(t, err)
	must(t, c.Get(t.Context(), client.ObjectKeyFromObject(csr), csr))
	if _, closed := stateOf(csr); !closed || len(csr.Status.Certificate) > 0 {
		t.Errorf("status is %+v, want it failed and without a certificate", csr.Status)
	}
}

// Of controllers that start at once one makes the CA; all use it, also after a restart.
func TestEnsureCA(t *testing.T) {
	t.Parallel()
	ns := namespace(t)
	var wg sync.WaitGroup
	cas := make([]*CA, 8)
	for i := range cas {
		wg.Go(func() {
			ca, err := EnsureCA(context.Background(), world.Client, ns)
			if err != nil {
				t.Error(err)
			}
			cas[i] = ca
		})
	}
	wg.Wait()
	for _, ca := range cas {
		if ca == nil || !ca.cert.Equal(cas[0].cert) {
			t.Fatal("two controllers have two CAs")
		}
	}
	cm := &corev1.ConfigMap{}
	must(t, world.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "longshore-ca"}, cm))
	if cm.Data["ca.crt"] != string(cas[0].pem) || strings.Contains(cm.Data["ca.crt"], "PRIVATE") {
		t.Errorf("the ConfigMap holds %q", cm.Data)
	}
}

// Behind a node's address there is another node: the controller does not speak to it.
func TestServerMustBeTheNode(t *testing.T) {
	t.Parallel()
	pool := poolName(t)
	hostile := newNode(t, pool, mib)
	config := world.ca.ClientTLS("victim")
	conn, err := tls.Dial("tcp", net.JoinHostPort(hostile.addr, portText()), config)
	if err == nil {
		conn.Close()
		t.Fatal("node hostile passes for node victim")
	}
	if !strings.Contains(err.Error(), "victim.node.longshore.dev") {
		t.Errorf("got %v", err)
	}
}
