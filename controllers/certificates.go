package controllers

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
)

// SignerName is the signer that node plugins ask for their certificates.
const SignerName = "longshore.dev/agent"

const (
	caName    = "longshore-ca" // Secret and ConfigMap
	caBundle  = "ca.crt"       // key of the ConfigMap
	caYears   = 10
	nodeDays  = 30
	clockSkew = 5 * time.Minute
	// controllerName is the subject that agents take orders from.
	controllerName = "controller"
	// nodeClaim is where the API server puts the node of a bound service-account token.
	nodeClaim = "authentication.kubernetes.io/node-name"
)

// NodeServerName is the name that the certificate of a node's agent proves.
func NodeServerName(node string) string { return node + ".node.longshore.dev" }

// CA is the project's own certificate authority.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte

	mu  sync.Mutex
	own *tls.Certificate
}

// EnsureCA reads the CA from Secret longshore-ca, makes it when there is none, and
// publishes its certificate in ConfigMap longshore-ca. Of two controllers that
// start at once, one makes it.
func EnsureCA(ctx context.Context, c client.Client, namespace string) (*CA, error) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: caName}, Type: corev1.SecretTypeTLS}
	err := c.Get(ctx, client.ObjectKeyFromObject(secret), secret)
	if apierrors.IsNotFound(err) {
		if secret.Data, err = newCA(time.Now()); err != nil {
			return nil, fmt.Errorf("make the CA: %w", err)
		}
		if err = c.Create(ctx, secret); apierrors.IsAlreadyExists(err) {
			err = c.Get(ctx, client.ObjectKeyFromObject(secret), secret)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("secret %s/%s with the CA: %w", namespace, caName, err)
	}
	ca, err := parseCA(secret.Data)
	if err != nil {
		return nil, fmt.Errorf("secret %s/%s with the CA: %w: delete it to have another made, and restart all node plugins", namespace, caName, err)
	}
	if err := publishCA(ctx, c, namespace, ca.pem); err != nil {
		return nil, fmt.Errorf("configmap %s/%s with the CA's certificate: %w", namespace, caName, err)
	}
	return ca, nil
}

func publishCA(ctx context.Context, c client.Client, namespace string, bundle []byte) error {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: caName}}
	data := map[string]string{caBundle: string(bundle)}
	err := c.Get(ctx, client.ObjectKeyFromObject(cm), cm)
	if apierrors.IsNotFound(err) {
		cm.Data = data
		if err = c.Create(ctx, cm); !apierrors.IsAlreadyExists(err) {
			return err
		}
		err = c.Get(ctx, client.ObjectKeyFromObject(cm), cm)
	}
	if err != nil || cm.Data[caBundle] == data[caBundle] {
		return err
	}
	cm.Data = data
	return c.Update(ctx, cm)
}

func newCA(now time.Time) (map[string][]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "longshore"},
		NotBefore: now.Add(-clockSkew), NotAfter: now.AddDate(caYears, 0, 0),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{
		corev1.TLSCertKey:       pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}),
	}, nil
}

func parseCA(data map[string][]byte) (*CA, error) {
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil, err
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("the key is a %T, want ECDSA", pair.PrivateKey)
	}
	return &CA{cert: pair.Leaf, key: key, pem: data[corev1.TLSCertKey]}, nil
}

func serial() *big.Int {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		panic(err) // crypto/rand does not fail
	}
	return n.Add(n, big.NewInt(1))
}

// issue signs a certificate of one name, for so long.
func (ca *CA) issue(key crypto.PublicKey, name string, dns []string, usages []x509.ExtKeyUsage, now time.Time, life time.Duration) ([]byte, error) {
	t := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: name}, DNSNames: dns,
		NotBefore: now.Add(-clockSkew), NotAfter: now.Add(life),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: usages, BasicConstraintsValid: true,
	}
	return x509.CreateCertificate(rand.Reader, t, ca.cert, key, ca.key)
}

// DigestKey is a secret that stays the same while the CA does, for digests that
// shall tell nothing of what they are digests of.
func (ca *CA) DigestKey() ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(ca.key)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(append([]byte("longshore recipe digests\x00"), der...))
	return sum[:], nil
}

// ClientTLS is how the controller speaks to a node.
func (ca *CA) ClientTLS(node string) *tls.Config {
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: roots, ServerName: NodeServerName(node),
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return ca.certificate(time.Now()) },
	}
}

// certificate is the controller's own: kept in memory, made anew each half day.
func (ca *CA) certificate(now time.Time) (*tls.Certificate, error) {
	const life = 24 * time.Hour
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if ca.own != nil && now.Before(ca.own.Leaf.NotAfter.Add(-life/2)) {
		return ca.own, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := ca.issue(key.Public(), controllerName, nil, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, now, life)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	ca.own = &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
	return ca.own, nil
}

// NodeCertificates answers the certificate requests of node plugins. A node gets
// a certificate of its own name and nothing else: which node asks is told by the
// API server, from the token that is bound to the plugin's pod (R17).
type NodeCertificates struct {
	Client client.Client
	CA     *CA
	// User is the node plugins' service account: system:serviceaccount:<namespace>:<name>.
	User string
}

// Reconcile answers one request.
func (n *NodeCertificates) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	return quietly(ctrl.Result{}, n.answer(ctx, req))
}

// answer approves, denies and signs. A request that somebody else has approved is
// checked all the same.
func (n *NodeCertificates) answer(ctx context.Context, req ctrl.Request) error {
	csr := &certificatesv1.CertificateSigningRequest{}
	if err := n.Client.Get(ctx, req.NamespacedName, csr); err != nil {
		return client.IgnoreNotFound(err)
	}
	approved, closed := stateOf(csr)
	if closed || csr.Spec.SignerName != SignerName {
		return nil
	}
	node, key, err := n.check(csr)
	log := ctrl.LoggerFrom(ctx).WithValues("node", node, "user", csr.Spec.Username)
	switch {
	case err != nil && approved:
		log.Info("certificate request failed", "why", err.Error())
		mark(csr, certificatesv1.CertificateFailed, "RequestRefused", err.Error())
		return n.Client.SubResource("status").Update(ctx, csr)
	case err != nil:
		log.Info("certificate request denied", "why", err.Error())
		mark(csr, certificatesv1.CertificateDenied, "RequestRefused", err.Error())
		return n.Client.SubResource("approval").Update(ctx, csr)
	case !approved:
		mark(csr, certificatesv1.CertificateApproved, "NodeProven", "asked for by the plugin's pod on node "+node)
		if err := n.Client.SubResource("approval").Update(ctx, csr); err != nil {
			return err
		}
	}
	der, err := n.CA.issue(key, "node:"+node, []string{NodeServerName(node)}, extUsages(csr.Spec.Usages), time.Now(), lifeOf(csr))
	if err != nil {
		return fmt.Errorf("sign the certificate of node %s: %w", node, err)
	}
	csr.Status.Certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	log.Info("certificate signed")
	return n.Client.SubResource("status").Update(ctx, csr)
}

// stateOf tells whether a request is approved, and whether nothing is left to do for it.
func stateOf(csr *certificatesv1.CertificateSigningRequest) (approved, closed bool) {
	closed = len(csr.Status.Certificate) > 0
	for _, c := range csr.Status.Conditions {
		approved = approved || c.Type == certificatesv1.CertificateApproved
		closed = closed || c.Type == certificatesv1.CertificateDenied || c.Type == certificatesv1.CertificateFailed
	}
	return approved, closed
}

func mark(csr *certificatesv1.CertificateSigningRequest, t certificatesv1.RequestConditionType, reason, message string) {
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: t, Status: corev1.ConditionTrue, Reason: reason, Message: message, LastUpdateTime: metav1.Now(),
	})
}

// check returns the node that asks and its key, or why it gets nothing.
func (n *NodeCertificates) check(csr *certificatesv1.CertificateSigningRequest) (node string, key crypto.PublicKey, err error) {
	if csr.Spec.Username != n.User {
		return "", nil, fmt.Errorf("user %q may not ask for a node's certificate, only %q may", csr.Spec.Username, n.User)
	}
	claims := csr.Spec.Extra[nodeClaim]
	if len(claims) != 1 || claims[0] == "" {
		return "", nil, fmt.Errorf("the token of %q is not bound to a pod on a node: ask with the token that is mounted in the pod", csr.Spec.Username)
	}
	node = claims[0]
	for _, u := range csr.Spec.Usages {
		if !slices.Contains([]certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth, certificatesv1.UsageClientAuth}, u) {
			return node, nil, fmt.Errorf("usage %q is not allowed: ask for digital signature, server auth, client auth", u)
		}
	}
	if !slices.Contains(csr.Spec.Usages, certificatesv1.UsageServerAuth) {
		return node, nil, fmt.Errorf("usage %q is missing", certificatesv1.UsageServerAuth)
	}
	block, rest := pem.Decode(csr.Spec.Request)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(bytes.TrimSpace(rest)) > 0 {
		return node, nil, fmt.Errorf("spec.request is not one PEM block CERTIFICATE REQUEST")
	}
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return node, nil, fmt.Errorf("spec.request: %w", err)
	}
	if err := r.CheckSignature(); err != nil {
		return node, nil, fmt.Errorf("spec.request: %w", err)
	}
	return node, r.PublicKey, checkNames(r, node)
}

var oidSubjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}

// checkNames refuses whatever else than the node's own name a request may carry.
func checkNames(r *x509.CertificateRequest, node string) error {
	name, dns := "node:"+node, NodeServerName(node)
	switch {
	case len(r.Subject.Names) != 1 || r.Subject.CommonName != name:
		return fmt.Errorf("the subject is %q: on node %s it must be CN=%s and nothing else", r.Subject, node, name)
	case len(r.DNSNames) != 1 || !strings.EqualFold(r.DNSNames[0], dns):
		return fmt.Errorf("the DNS names are %q: on node %s they must be %s and nothing else", r.DNSNames, node, dns)
	case len(r.EmailAddresses)+len(r.IPAddresses)+len(r.URIs) > 0:
		return fmt.Errorf("e-mail addresses, IP addresses and URIs are not allowed")
	}
	for _, e := range r.Extensions {
		if !e.Id.Equal(oidSubjectAltName) {
			return fmt.Errorf("the extension %v is not allowed", e.Id)
		}
	}
	switch k := r.PublicKey.(type) {
	case *ecdsa.PublicKey, ed25519.PublicKey:
		return nil
	case *rsa.PublicKey:
		if k.N.BitLen() >= 2048 {
			return nil
		}
		return fmt.Errorf("an RSA key of %d bits is too weak: use ECDSA P-256", k.N.BitLen())
	}
	return fmt.Errorf("a key of type %T is not allowed: use ECDSA P-256", r.PublicKey)
}

func extUsages(usages []certificatesv1.KeyUsage) []x509.ExtKeyUsage {
	var e []x509.ExtKeyUsage
	if slices.Contains(usages, certificatesv1.UsageServerAuth) {
		e = append(e, x509.ExtKeyUsageServerAuth)
	}
	if slices.Contains(usages, certificatesv1.UsageClientAuth) {
		e = append(e, x509.ExtKeyUsageClientAuth)
	}
	return e
}

// lifeOf is 30 days, or less where the request wants less.
func lifeOf(csr *certificatesv1.CertificateSigningRequest) time.Duration {
	life := nodeDays * 24 * time.Hour
	if s := csr.Spec.ExpirationSeconds; s != nil {
		life = min(life, time.Duration(*s)*time.Second)
	}
	return life
}

// SetupWithManager starts the reconciler.
func (n *NodeCertificates) SetupWithManager(mgr ctrl.Manager) error {
	ours := predicate.NewPredicateFuncs(func(o client.Object) bool {
		csr, ok := o.(*certificatesv1.CertificateSigningRequest)
		return ok && csr.Spec.SignerName == SignerName
	})
	return ctrl.NewControllerManagedBy(mgr).Named("nodecertificates").For(&certificatesv1.CertificateSigningRequest{}).WithEventFilter(ours).Complete(n)
}
