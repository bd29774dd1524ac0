package cluster

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// users of the API, each with a token and a kubeconfig; the nodes' come on top.
var users = map[string]string{ // file name to name[,"group"]
	"admin":              `admin,%s,"system:masters"`,
	"controller-manager": `system:kube-controller-manager,%s`,
	"scheduler":          `system:kube-scheduler,%s`,
	"proxy":              `system:kube-proxy,%s`,
}

// writePKI writes the certificates, keys, tokens and kubeconfigs of a cluster of
// that many nodes into dir.
func writePKI(dir string, nodes int) error {
	a, err := newAuthority()
	if err != nil {
		return err
	}
	if err := a.writeCA(dir); err != nil {
		return err
	}
	certificates := []struct {
		file, name, group string
		dns               []string
		ips               []string
	}{
		{"apiserver", "kube-apiserver", "", []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}, []string{"127.0.0.1", "10.96.0.1", hubIP}},
		{"kubelet-client", "kube-apiserver-kubelet-client", "system:masters", nil, nil},
		{"front-proxy", "front-proxy-client", "", nil, nil},
	}
	who := map[string]string{}
	for file, user := range users {
		who[file] = user
	}
	for n := 1; n <= nodes; n++ {
		node := nodeName(n)
		c := certificates[0]
		c.file, c.name, c.group, c.dns, c.ips = "kubelet-"+node, "system:node:"+node, "system:nodes", []string{node}, []string{nodeIP(n), "127.0.0.1"}
		certificates = append(certificates, c)
		who[node] = `system:node:` + node + `,%s,"system:nodes"`
	}
	for _, c := range certificates {
		if err := a.issue(dir, c.file, pkix.Name{CommonName: c.name, Organization: groups(c.group)}, c.dns, c.ips); err != nil {
			return fmt.Errorf("issue %s: %w", c.file, err)
		}
	}
	if err := writeServiceAccountKey(dir); err != nil {
		return err
	}
	var tokens bytes.Buffer
	for file, user := range who {
		token := randomToken()
		fmt.Fprintf(&tokens, "%s,"+user+"\n", token, file)
		if err := writeSecret(filepath.Join(dir, file+".kubeconfig"), kubeconfig(a.pem, token)); err != nil {
			return err
		}
	}
	return writeSecret(filepath.Join(dir, "tokens.csv"), tokens.Bytes())
}

func groups(g string) []string {
	if g == "" {
		return nil
	}
	return []string{g}
}

func randomToken() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func kubeconfig(ca []byte, token string) []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters:
- name: longshore
  cluster:
    server: https://%s:6443
    certificate-authority-data: %s
users:
- name: longshore
  user: {token: %s}
contexts:
- name: longshore
  context: {cluster: longshore, user: longshore}
current-context: longshore
`, hubIP, base64.StdEncoding.EncodeToString(ca), token)
}

type authority struct {
	key  crypto.Signer
	cert *x509.Certificate
	pem  []byte
}

const validity = 10 * 365 * 24 * time.Hour

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "longshore-cluster"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(validity),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &authority{key, cert, pemOf("CERTIFICATE", der)}, nil
}

func (a *authority) writeCA(dir string) error {
	if err := writeKey(filepath.Join(dir, "ca.key"), a.key); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "ca.crt"), a.pem, 0o644)
}

func (a *authority) issue(dir, file string, subject pkix.Name, dns, ips []string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100))
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      subject,
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(validity),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:     dns,
	}
	for _, ip := range ips {
		template.IPAddresses = append(template.IPAddresses, net.ParseIP(ip))
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return err
	}
	if err := writeKey(filepath.Join(dir, file+".key"), key); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, file+".crt"), pemOf("CERTIFICATE", der), 0o644)
}

func writeServiceAccountKey(dir string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	if err := writeKey(filepath.Join(dir, "sa.key"), key); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "sa.pub"), pemOf("PUBLIC KEY", public), 0o644)
}

func writeKey(file string, key crypto.Signer) error {
	if k, ok := key.(*rsa.PrivateKey); ok { // the service account key is read in this form only
		return writeSecret(file, pemOf("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(k)))
	}
	der, err := x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey))
	if err != nil {
		return err
	}
	return writeSecret(file, pemOf("EC PRIVATE KEY", der))
}

func writeSecret(file string, content []byte) error { return os.WriteFile(file, content, 0o600) }

func pemOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
