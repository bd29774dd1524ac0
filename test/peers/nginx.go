package peers

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// NginxOptions are how the server is to behave; the zero value is a plain one
// on a free port of 127.0.0.1.
type NginxOptions struct {
	// Root is the folder that is served; "" makes one.
	Root string
	// Address to listen at, an IP address (default 127.0.0.1), and Port (0: a free one).
	Address string
	Port    int
	// TLS serves https, with Certificate or, where that is empty, one made for
	// Address and localhost.
	TLS         bool
	Certificate Certificate
	// User and Password are wanted of clients; "" for none.
	User, Password string
	// LimitRate is the most bytes per second of one response, 0 for any.
	LimitRate int64
	// NoRanges ignores Range requests; NoValidators leaves out ETag and Last-Modified.
	NoRanges, NoValidators bool
	// Extra is put into the server block as it is.
	Extra string
}

// NginxServer is a running nginx.
type NginxServer struct {
	// Root is the folder that is served.
	Root string
	// CA is the PEM of the CA behind the server's certificate, with TLS.
	CA string

	t       testing.TB
	base    string
	address string
	dir     string
	cmd     *exec.Cmd
	exited  chan struct{}
}

// NginxRequest is a line of the access log. Requests that were under way when
// the server was killed are not in it.
type NginxRequest struct {
	Method, URI, Range string
	Status             int
	// Bytes of the body that were sent, also of a request that was broken off.
	Bytes int64
	// Connection is a number that the requests of one connection share.
	Connection string
}

// Nginx starts a real nginx. It ends with t, or with the process of the test.
func Nginx(t testing.TB, o NginxOptions) *NginxServer {
	t.Helper()
	s := &NginxServer{Root: o.Root, t: t, dir: t.TempDir()}
	if s.Root == "" {
		s.Root = t.TempDir()
	}
	if o.Address == "" {
		o.Address = "127.0.0.1"
	}
	if o.Port == 0 {
		o.Port = freePort(t, o.Address)
	}
	s.address = net.JoinHostPort(o.Address, strconv.Itoa(o.Port))
	s.base = "http://" + s.address + "/"

	var b strings.Builder
	line := func(format string, a ...any) { fmt.Fprintf(&b, format+"\n", a...) }
	write := func(name string, content []byte) string {
		path := filepath.Join(s.dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	// One process, so that killing it ends everything at once.
	line("daemon off; master_process off;")
	if os.Getuid() == 0 {
		line("user root;") // the folders of tests are their user's own
	}
	line("pid %s/pid; error_log %s/error.log info;", s.dir, s.dir)
	line("events { worker_connections 1024; }")
	line("http {")
	for _, kind := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		line("%s_temp_path %s/%s;", kind, s.dir, kind)
	}
	line(`log_format plain "$request_method\t$status\t$body_bytes_sent\t$connection\t$http_range\t$request_uri";`)
	line("access_log %s plain; keepalive_requests 1000000;", s.log())
	line("server { root %s; default_type application/octet-stream;", s.Root)
	if o.TLS {
		if o.Certificate.Cert == nil {
			now := time.Now()
			o.Certificate = NewCertificate(t, now.Add(-time.Hour), now.Add(24*time.Hour), o.Address, "localhost")
		}
		s.CA = string(o.Certificate.CA)
		s.base = "https://" + s.address + "/"
		line("listen %s ssl; ssl_certificate %s; ssl_certificate_key %s;", s.address,
			write("cert.pem", o.Certificate.Cert), write("key.pem", o.Certificate.Key))
	} else {
		line("listen %s;", s.address)
	}
	if o.User != "" {
		line(`auth_basic "test"; auth_basic_user_file %s;`, write("users", []byte(o.User+":{PLAIN}"+o.Password+"\n")))
	}
	if o.LimitRate > 0 {
		line("limit_rate %d;", o.LimitRate)
	}
	if o.NoRanges {
		line("max_ranges 0;")
	}
	if o.NoValidators {
		line("etag off; add_header Last-Modified ''; if_modified_since off;")
	}
	line("location = /.status { stub_status; access_log off; auth_basic off; }")
	line("%s", o.Extra)
	line("}\n}")
	write("nginx.conf", []byte(b.String()))

	t.Cleanup(s.Stop)
	s.Start()
	return s
}

func (s *NginxServer) log() string { return filepath.Join(s.dir, "access.log") }

// URL is the address of a file under Root.
func (s *NginxServer) URL(name string) string { return s.base + name }

// Put writes a file under Root and returns its URL.
func (s *NginxServer) Put(name string, content []byte) string {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.Root, name), content, 0o644); err != nil {
		s.t.Fatal(err)
	}
	return s.URL(name)
}

// Touch sets the time of a file under Root, which is its Last-Modified.
func (s *NginxServer) Touch(name string, at time.Time) {
	s.t.Helper()
	if err := os.Chtimes(filepath.Join(s.Root, name), at, at); err != nil {
		s.t.Fatal(err)
	}
}

// Start starts a server that was stopped, on the port it had.
func (s *NginxServer) Start() {
	s.t.Helper()
	if s.cmd != nil {
		s.t.Fatal("nginx runs already")
	}
	bin, err := exec.LookPath("nginx")
	if err != nil {
		if bin, err = exec.LookPath("/usr/sbin/nginx"); err != nil {
			s.t.Fatalf("nginx is needed (package nginx-light): %v", err)
		}
	}
	var said bytes.Buffer
	cmd := exec.Command(bin, "-p", s.dir, "-e", filepath.Join(s.dir, "error.log"), "-c", filepath.Join(s.dir, "nginx.conf"))
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		s.t.Fatalf("start nginx: %v", err)
	}
	exited := make(chan struct{})
	go func() {
		cmd.Wait()
		close(exited)
	}()
	s.cmd, s.exited = cmd, exited
	within(s.t, "nginx does not accept connections at "+s.address, func() bool {
		select {
		case <-exited:
			log, _ := os.ReadFile(filepath.Join(s.dir, "error.log"))
			s.t.Fatalf("nginx ended at once: %s\n%s", said.String(), log)
		default:
		}
		c, err := net.DialTimeout("tcp", s.address, time.Second)
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
}

// Stop kills the server, as a power cut would; it may be started again.
func (s *NginxServer) Stop() {
	if s.cmd == nil {
		return
	}
	s.cmd.Process.Kill()
	<-s.exited
	s.cmd = nil
}

// Requests are the requests that are answered, or were broken off by the client.
func (s *NginxServer) Requests() []NginxRequest {
	s.t.Helper()
	b, err := os.ReadFile(s.log())
	if err != nil {
		s.t.Fatal(err)
	}
	var out []NginxRequest
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		f := strings.SplitN(lines.Text(), "\t", 6)
		if len(f) != 6 {
			s.t.Fatalf("access log has the line %q", lines.Text())
		}
		status, err1 := strconv.Atoi(f[1])
		n, err2 := strconv.ParseInt(f[2], 10, 64)
		if err1 != nil || err2 != nil {
			s.t.Fatalf("access log has the line %q", lines.Text())
		}
		out = append(out, NginxRequest{Method: f[0], Status: status, Bytes: n, Connection: f[3], Range: f[4], URI: f[5]})
	}
	return out
}

// Sent is how many bytes of bodies were sent in all.
func (s *NginxServer) Sent() int64 {
	s.t.Helper()
	var n int64
	for _, r := range s.Requests() {
		n += r.Bytes
	}
	return n
}

// Settle waits until nobody is connected: the log then has every request, and
// all that was sent of those that were broken off.
func (s *NginxServer) Settle() {
	s.t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // our own server
	within(s.t, "others are connected to nginx still", func() bool {
		resp, err := c.Get(s.URL(".status"))
		if err != nil {
			s.t.Fatal(err)
		}
		defer resp.Body.Close()
		var active int
		if _, err := fmt.Fscanf(resp.Body, "Active connections: %d", &active); err != nil {
			s.t.Fatalf("nginx's status: %v", err)
		}
		return active == 1 // this one
	})
}

// Forget begins the access log anew.
func (s *NginxServer) Forget() {
	s.t.Helper()
	if err := os.Truncate(s.log(), 0); err != nil {
		s.t.Fatal(err)
	}
}

func freePort(t testing.TB, address string) int {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}
