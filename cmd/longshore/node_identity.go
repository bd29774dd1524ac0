package main

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
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcertificatesv1 "k8s.io/client-go/kubernetes/typed/certificates/v1"

	"github.com/longshore-io/longshore/controllers"
)

// controllerName is the subject of the only client that the agent serves.
const controllerName = "controller"

const (
	// askPause is between two looks at a request that is not signed yet.
	askPause = time.Second
	// askLimit is how long one request is waited for: the controller may be down.
	askLimit = 10 * time.Minute
	// firstAskRetry doubles up to lastAskRetry after requests that came to nothing.
	firstAskRetry, lastAskRetry = 2 * time.Second, time.Minute
	// checkPause is how often the certificate is held against the CA, which may
	// be replaced.
	checkPause = 15 * time.Second
)

// agentIdentity is by what the agent proves to be that of its node: a key that
// never leaves memory, and a certificate that the controller signs. The zero
// key is replaced with each renewal.
type agentIdentity struct {
	csrs   typedcertificatesv1.CertificateSigningRequestInterface
	node   string
	caFile string
	log    *slog.Logger

	mu   sync.Mutex
	cert *tls.Certificate
	ca   *x509.CertPool
	// caText is what ca was read from.
	caText []byte
}

// current returns the certificate and the CA; either is nil while there is none.
func (a *agentIdentity) current() (*tls.Certificate, *x509.CertPool) {
	text, err := os.ReadFile(a.caFile)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil && !bytes.Equal(text, a.caText) {
		ca := x509.NewCertPool()
		if ca.AppendCertsFromPEM(text) {
			a.ca, a.caText = ca, text
		} else {
			a.log.Error("no certificate in the CA's file; the last one is used on", "file", a.caFile)
		}
	}
	return a.cert, a.ca
}

func (a *agentIdentity) ready() error {
	cert, ca := a.current()
	switch {
	case ca == nil:
		return fmt.Errorf("%s is not there yet: the controller publishes it in ConfigMap longshore-ca", a.caFile)
	case cert == nil:
		return errors.New("the controller has not signed this node's certificate yet")
	}
	return nil
}

// serverTLS demands the controller's certificate of every client.
func (a *agentIdentity) serverTLS() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			if err := a.ready(); err != nil {
				return nil, err
			}
			cert, ca := a.current()
			return &tls.Config{
				MinVersion:   tls.VersionTLS13,
				NextProtos:   []string{"h2"},
				Certificates: []tls.Certificate{*cert},
				ClientAuth:   tls.RequireAndVerifyClientCert,
				ClientCAs:    ca,
				VerifyConnection: func(s tls.ConnectionState) error {
					if name := s.PeerCertificates[0].Subject.CommonName; name != controllerName {
						return fmt.Errorf("the agent serves %q, not %q", controllerName, name)
					}
					return nil
				},
				// A resumed session would outlive a CA that was taken away.
				SessionTicketsDisabled: true,
			}, nil
		},
	}
}

// keep gets a certificate and renews it after two thirds of its life, or at
// once when the CA no longer vouches for it. It returns when ctx ends.
func (a *agentIdentity) keep(ctx context.Context) error {
	wait := time.Duration(0)
	retry := firstAskRetry
	for {
		if !pause(ctx, wait) {
			return nil
		}
		if wait = checkPause; !a.wantsRenewal(time.Now()) {
			continue
		}
		cert, err := a.ask(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			a.log.Warn("no certificate yet", "error", err, "retry", retry)
			wait, retry = retry, min(2*retry, lastAskRetry)
			continue
		}
		retry = firstAskRetry
		a.mu.Lock()
		a.cert = cert
		a.mu.Unlock()
		a.log.Info("certificate received", "until", cert.Leaf.NotAfter)
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

func (a *agentIdentity) wantsRenewal(now time.Time) bool {
	cert, ca := a.current()
	if cert == nil {
		return true
	}
	life := cert.Leaf.NotAfter.Sub(cert.Leaf.NotBefore)
	if now.After(cert.Leaf.NotBefore.Add(life * 2 / 3)) {
		return true
	}
	if ca == nil {
		return false
	}
	_, err := cert.Leaf.Verify(x509.VerifyOptions{Roots: ca, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	return err != nil
}

// ask makes a key and has its certificate signed.
func (a *agentIdentity) ask(ctx context.Context) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "node:" + a.node},
		DNSNames: []string{controllers.NodeServerName(a.node)},
	}, key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate request: %w", err)
	}
	csr, err := a.csrs.Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "longshore-node-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: controllers.SignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth, certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("ask for a certificate: %w", err)
	}
	text, err := a.signed(ctx, csr.Name)
	if err != nil {
		return nil, fmt.Errorf("certificate request %s: %w", csr.Name, err)
	}
	return pairOf(text, key)
}

// pairOf puts a certificate and its key together.
func pairOf(text []byte, key *ecdsa.PrivateKey) (*tls.Certificate, error) {
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, errors.New("what was signed is no certificate")
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("parse the certificate: %w", err)
	}
	if !key.PublicKey.Equal(leaf.PublicKey) {
		return nil, errors.New("the certificate is of another key")
	}
	return &tls.Certificate{Certificate: [][]byte{block.Bytes}, PrivateKey: key, Leaf: leaf}, nil
}

// signed waits until a request is signed.
func (a *agentIdentity) signed(ctx context.Context, name string) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, askLimit, fmt.Errorf("nobody has signed it for %s: is the controller running?", askLimit))
	defer cancel()
	for {
		csr, err := a.csrs.Get(ctx, name, metav1.GetOptions{})
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			return nil, err
		}
		if len(csr.Status.Certificate) > 0 {
			return csr.Status.Certificate, nil
		}
		for _, c := range csr.Status.Conditions {
			if c.Type == certificatesv1.CertificateDenied || c.Type == certificatesv1.CertificateFailed {
				return nil, fmt.Errorf("%s: %s", c.Type, c.Message)
			}
		}
		if !pause(ctx, askPause) {
			return nil, context.Cause(ctx)
		}
	}
}
