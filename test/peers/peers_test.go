package peers

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
	"strings"
	"testing"
)

func get(t *testing.T, c *http.Client, url string, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
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

func TestNginx(t *testing.T) {
	s := Nginx(t, NginxOptions{TLS: true, User: "me", Password: "secret"})
	url := s.Put("a file", []byte("0123456789"))
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(s.CA))
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true}}
	if code, _ := get(t, c, url); code != http.StatusUnauthorized {
		t.Errorf("without a password: %d", code)
	}
	url = strings.Replace(url, "//", "//me:secret@", 1)
	for range 2 {
		if code, body := get(t, c, url, "Range", "bytes=2-4"); code != http.StatusPartialContent || body != "234" {
			t.Errorf("got %d %q, want 206 and bytes 2 to 4", code, body)
		}
		s.Stop()
		if _, err := c.Get(url); err == nil {
			t.Error("a stopped server answers")
		}
		s.Start()
	}
	s.Forget()
	if code, body := get(t, c, url); code != http.StatusOK || body != "0123456789" {
		t.Errorf("got %d %q", code, body)
	}
	s.Settle()
	if r := s.Requests(); len(r) != 1 || r[0].URI != "/a%20file" || r[0].Status != http.StatusOK || r[0].Range != "-" {
		t.Errorf("log has %+v", r)
	}
}

func TestNginxWithoutRanges(t *testing.T) {
	s := Nginx(t, NginxOptions{NoRanges: true, NoValidators: true})
	resp, err := http.Get(s.Put("file", []byte("0123456789")))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if h := resp.Header; h.Get("ETag") != "" || h.Get("Last-Modified") != "" || h.Get("Accept-Ranges") != "" {
		t.Errorf("headers are %v", h)
	}
	if code, body := get(t, http.DefaultClient, s.URL("file"), "Range", "bytes=2-4"); code != http.StatusOK || len(body) != 10 {
		t.Errorf("got %d and %d bytes, want the whole file", code, len(body))
	}
}
