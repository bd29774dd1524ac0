package mover

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
)

// rootsName is the file in a mover's root with the certificates.
const rootsName = "roots.pem"

// systemRoots reads the system's trusted certificates, PEM, once: a mover has no
// file to read them from. Without any, only servers whose certificate the source
// itself names are trusted.
var systemRoots = sync.OnceValues(func() ([]byte, error) {
	files := []string{
		"/etc/ssl/certs/ca-certificates.crt", // Debian, Alpine
		"/etc/pki/tls/certs/ca-bundle.crt",   // Fedora
		"/etc/ssl/ca-bundle.pem",             // SUSE
	}
	if own := os.Getenv("SSL_CERT_FILE"); own != "" {
		files = []string{own}
	}
	for _, file := range files {
		pem, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the trusted certificates: %w", err)
		}
		return pem, nil
	}
	return nil, nil
})
