// Package httpsrc is the source that is a file on an HTTP or HTTPS server.
//
// It knows nothing of image formats, and makes no connection but through the
// Dialer it is given. All reads of one blob are pinned to one content: where the
// server can say which it serves (ETag, Last-Modified, length), a change is an
// error, never a mixture.
package httpsrc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// Kind is the HTTP source.
var Kind = source.Kind{Name: "http", Open: func(ctx context.Context, dial source.Dialer, params json.RawMessage) (source.Blob, error) {
	return open(ctx, dial, params, standard)
}}

// Params say where the file is and how to be let in. Its JSON hides what is
// secret; Reveal's does not.
type Params struct {
	// URL, http or https; a user and password in it count unless User is set.
	URL      string        `json:"url"`
	User     string        `json:"user,omitempty"`
	Password source.Secret `json:"password,omitempty"`
	// Headers and SecretHeaders are "Name: value" lines of every request.
	// SecretHeaders, credentials and cookies go to no other host than URL's.
	Headers       []string        `json:"headers,omitempty"`
	SecretHeaders []source.Secret `json:"secretHeaders,omitempty"`
	// CABundle is PEM certificates that are trusted beside the system's.
	CABundle string `json:"caBundle,omitempty"`
	// InsecureSkipVerify trusts any certificate.
	InsecureSkipVerify bool `json:"insecureSkipVerify,omitempty"`
}

// Reveal is the JSON of p with its secrets, as a source.Spec carries it.
func (p Params) Reveal() (json.RawMessage, error) {
	type plain Params
	open := struct {
		plain
		Password      string   `json:"password,omitempty"`
		SecretHeaders []string `json:"secretHeaders,omitempty"`
	}{plain: plain(p), Password: p.Password.Reveal()}
	for _, h := range p.SecretHeaders {
		open.SecretHeaders = append(open.SecretHeaders, h.Reveal())
	}
	return json.Marshal(open)
}

// LogValue shows where p leads and nothing that lets one in.
func (p Params) LogValue() slog.Value {
	u, err := url.Parse(p.URL)
	if err != nil {
		return slog.StringValue("[not a url]")
	}
	return slog.StringValue(shown(u))
}

// limits are how long the source waits and how often it tries again.
type limits struct {
	header   time.Duration // until the answer's header
	window   time.Duration // in each window of this length ...
	progress int64         // ... at least so many bytes of a body must come
	tries    int           // of one range, each of which brings less than progress
	backoff  time.Duration // before the second try; doubles up to 5 s
}

var standard = limits{header: 30 * time.Second, window: 30 * time.Second, progress: 64 << 10, tries: 6, backoff: 200 * time.Millisecond}

const (
	maxRedirects = 10
	maxBackoff   = 5 * time.Second
	// maxWait bounds what a server may ask for by Retry-After.
	maxWait = 30 * time.Second
	// headBytes are asked for to learn the size, and kept.
	headBytes = 64 << 10
	// maxHeader bounds the header of an answer; each connection may hold one.
	maxHeader = 64 << 10
	// maxTag is the longest validator that is believed.
	maxTag = 256
)

// open learns the size and the validator from a request for the first bytes: a
// HEAD request is refused by some servers and answered wrongly by others.
func open(ctx context.Context, dial source.Dialer, raw json.RawMessage, l limits) (source.Blob, error) {
	var p Params
	if err := json.Unmarshal(raw, &p); err != nil {
		return nil, fault.Terminal(fault.InvalidSource, errors.New("the parameters of the http source are not valid JSON"))
	}
	s, err := newServer(p, dial, l)
	if err != nil {
		return nil, err
	}
	b := &blob{server: s}
	if err := b.begin(ctx); err != nil {
		s.transport.CloseIdleConnections()
		return nil, err
	}
	if b.ranges {
		return &ranged{b}, nil
	}
	return &oneWay{b}, nil
}

// server is where the file is, and how to ask for it.
type server struct {
	origin    *url.URL
	header    http.Header // for every host
	secret    http.Header // for origin's host only
	transport *http.Transport
	limits    limits
	life      context.Context // ends with Close
	end       context.CancelFunc

	mu    sync.Mutex
	final *url.URL // where redirects led
}

func newServer(p Params, dial source.Dialer, l limits) (*server, error) {
	// The errors of url.Parse repeat the URL, with any password in it.
	u, err := url.Parse(strings.TrimSpace(p.URL))
	if err != nil || u.Host == "" || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fault.Terminal(fault.InvalidSource, errors.New("the url is not of the form http(s)://host/path: correct spec.source.http.url"))
	}
	if dial == nil {
		return nil, errors.New("the http source has no dialer")
	}
	user, password := p.User, p.Password.Reveal()
	if u.User != nil && user == "" {
		user = u.User.Username()
		password, _ = u.User.Password()
	}
	u.User, u.Fragment = nil, ""

	s := &server{origin: u, final: u, header: http.Header{}, secret: http.Header{}, limits: l}
	s.life, s.end = context.WithCancel(context.Background())
	add := func(line string, hidden bool) error {
		name, value, ok := strings.Cut(line, ":")
		name, value = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)), strings.TrimSpace(value)
		if !ok || name == "" || strings.ContainsAny(name, " \t\r\n") || strings.ContainsAny(value, "\r\n\x00") {
			return fault.Terminal(fault.InvalidSource, errors.New(`a header is not of the form "Name: value": correct spec.source.http.extraHeaders or the secrets in spec.source.http.secretExtraHeaders`))
		}
		switch name {
		case "Range", "If-Match", "If-None-Match", "If-Range", "If-Modified-Since", "If-Unmodified-Since", "Accept-Encoding", "Connection", "Content-Length", "Transfer-Encoding":
			return fault.Terminal(fault.InvalidSource, fmt.Errorf("the header %s is set by the transfer itself: remove it from spec.source.http.extraHeaders or spec.source.http.secretExtraHeaders", name))
		case "Authorization", "Cookie", "Proxy-Authorization":
			hidden = true
		}
		if hidden {
			s.secret.Add(name, value)
		} else {
			s.header.Add(name, value)
		}
		return nil
	}
	for _, line := range p.Headers {
		if err := add(line, false); err != nil {
			return nil, err
		}
	}
	for _, line := range p.SecretHeaders {
		if err := add(line.Reveal(), true); err != nil {
			return nil, err
		}
	}
	if user != "" || password != "" {
		r := http.Request{Header: http.Header{}}
		r.SetBasicAuth(user, password)
		s.secret.Set("Authorization", r.Header.Get("Authorization"))
	}
	if s.header.Get("User-Agent") == "" {
		s.header.Set("User-Agent", "longshore")
	}

	config := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: p.InsecureSkipVerify} //nolint:gosec // asked for by the user
	if p.CABundle != "" {
		if config.RootCAs, err = x509.SystemCertPool(); err != nil {
			config.RootCAs = x509.NewCertPool()
		}
		if !config.RootCAs.AppendCertsFromPEM([]byte(p.CABundle)) {
			return nil, fault.Terminal(fault.CertificateError, errors.New("the CA bundle has no PEM certificate: correct the config map named in spec.source.http.certConfigMap"))
		}
	}
	s.transport = &http.Transport{
		DialContext:         dial,
		TLSClientConfig:     config,
		TLSHandshakeTimeout: l.header,
		DisableCompression:  true,
		// HTTP/1.1 only: parallel ranges want connections of their own.
		TLSNextProto:           map[string]func(string, *tls.Conn) http.RoundTripper{},
		MaxIdleConnsPerHost:    32,
		MaxResponseHeaderBytes: maxHeader,
		IdleConnTimeout:        time.Minute,
	}
	return s, nil
}

// shown is u as messages may show it: the query often is a signature.
func shown(u *url.URL) string {
	v := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}
	return v.String()
}

func (s *server) where() *url.URL {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.final
}

// trusts tells whether credentials for origin may be sent to u: the same
// server, or the same host where it redirects from http to https.
func (s *server) trusts(u *url.URL) bool {
	if !strings.EqualFold(u.Hostname(), s.origin.Hostname()) {
		return false
	}
	if u.Scheme == s.origin.Scheme {
		return port(u) == port(s.origin)
	}
	return s.origin.Scheme == "http" && port(s.origin) == "80" && port(u) == "443"
}

func port(u *url.URL) string {
	if p := u.Port(); p != "" {
		return p
	}
	if u.Scheme == "https" {
		return "443"
	}
	return "80"
}

// answer is a response whose reads are watched.
type answer struct {
	*http.Response
	body *watched
}

func (a *answer) Close() { a.body.Close() }

// get asks for the file. Redirects are followed once, and from then on the URL
// where they ended is asked.
func (s *server) get(ctx context.Context, header http.Header) (*answer, error) {
	u, pinned := s.where(), true
	if u == s.origin {
		pinned = false
	}
	for range maxRedirects {
		a, err := s.ask(ctx, u, header)
		if err != nil {
			return nil, err
		}
		switch a.StatusCode {
		case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
			next, err := u.Parse(a.Header.Get("Location"))
			a.Close()
			if err != nil || next.Hostname() == "" || next.Scheme != "http" && next.Scheme != "https" {
				return nil, fault.Terminal(fault.InvalidSource, fmt.Errorf("%s redirects to a place that is not an http(s) url: correct spec.source.http.url", shown(u)))
			}
			if s.origin.Scheme == "https" && next.Scheme == "http" {
				return nil, fault.Terminal(fault.InvalidSource, fmt.Errorf("%s redirects from https to plain http at %s: name that url in spec.source.http.url if it is wanted", shown(u), next.Host))
			}
			next.User, next.Fragment = nil, ""
			u = next
			continue
		case http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusGone:
			// A redirect may lead to a signed URL that expires: ask the way again.
			if pinned {
				a.Close()
				u, pinned = s.origin, false
				continue
			}
		}
		s.mu.Lock()
		s.final = u
		s.mu.Unlock()
		return a, nil
	}
	return nil, fault.Terminal(fault.InvalidSource, fmt.Errorf("%s redirects more than %d times: correct spec.source.http.url", shown(s.origin), maxRedirects))
}

// ask sends one request.
func (s *server) ask(caller context.Context, u *url.URL, header http.Header) (*answer, error) {
	ctx, cancel := context.WithCancelCause(caller)
	// ours says why the request ended, where it was not the server's doing.
	ours := func(err error) error {
		if caller.Err() != nil {
			return caller.Err()
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	stop := context.AfterFunc(s.life, func() { cancel(errClosed) })
	done := func() { stop(); cancel(nil) }
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		done()
		return nil, fault.Terminal(fault.InvalidSource, errors.New("the url can't be asked for: correct spec.source.http.url"))
	}
	all := []http.Header{s.header, header, {"Accept-Encoding": {"identity"}}}
	if s.trusts(u) {
		all = append(all, s.secret)
	}
	for _, h := range all {
		for name, values := range h {
			req.Header[name] = append(req.Header[name], values...)
		}
	}
	if host := req.Header.Get("Host"); host != "" && s.trusts(u) {
		req.Host = host
	}
	req.Header.Del("Host")

	w := newWatch(s.limits, func(err error) { cancel(err) })
	resp, err := s.transport.RoundTrip(req)
	if err != nil {
		w.stop()
		err = connectionFault(u, ours(err))
		done()
		return nil, err
	}
	w.stop()
	return &answer{resp, &watched{body: resp.Body, watch: w, ours: ours, done: done, where: u}}, nil
}

// errClosed ends what still runs when the blob is closed.
var errClosed = fmt.Errorf("the source is closed: %w", net.ErrClosed)

// watch ends a request whose server is too slow: to answer, or to deliver. It
// runs only while somebody waits for the server.
type watch struct {
	limits limits
	end    func(error)

	mu    sync.Mutex
	timer *time.Timer
	since time.Time     // the wait began
	left  time.Duration // of the window
	bytes int64         // that came in the window
}

func newWatch(l limits, end func(error)) *watch {
	w := &watch{limits: l, end: end, left: l.window}
	w.timer = time.AfterFunc(l.header, func() { end(slow("no answer within %s", l.header)) })
	return w
}

func slow(format string, args ...any) error {
	return fault.Transient(fault.TooSlow, fmt.Errorf("the server is too slow: "+format+": check the network between node and server", args...))
}

// wait begins a wait for the body.
func (w *watch) wait() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer.Stop()
	w.since = time.Now()
	w.timer = time.AfterFunc(w.left, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.judge(w.limits.window)
	})
}

// got ends a wait that brought n bytes.
func (w *watch) got(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer.Stop()
	w.bytes += int64(n)
	if w.left -= time.Since(w.since); w.left <= 0 {
		w.judge(w.limits.window)
	}
}

// judge looks back at a window that is over and begins the next.
func (w *watch) judge(window time.Duration) {
	if w.bytes < w.limits.progress {
		w.end(slow("%d bytes came within %s, %d are the least", w.bytes, window, w.limits.progress))
	}
	w.bytes, w.left, w.since = 0, window, time.Now()
	w.timer.Reset(window)
}

func (w *watch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer.Stop()
}

// watched is a body under watch; its errors are faults.
type watched struct {
	body  io.ReadCloser
	watch *watch
	ours  func(error) error
	done  func()
	where *url.URL
	once  sync.Once
}

func (b *watched) Read(p []byte) (int, error) {
	b.watch.wait()
	n, err := b.body.Read(p)
	b.watch.got(n)
	if err != nil {
		b.watch.stop()
	}
	if err == nil || errors.Is(err, io.EOF) {
		return n, err
	}
	return n, connectionFault(b.where, b.ours(err))
}

func (b *watched) Close() error {
	b.once.Do(func() {
		b.watch.stop()
		b.done() // before Close, which would wait for the rest of the body
		b.body.Close()
	})
	return nil
}

// connectionFault classes an error of the connection to u.
func connectionFault(u *url.URL, err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) && !isTimeoutOfNet(err) {
		return err // the caller's own doing
	}
	if errors.Is(err, errClosed) {
		return fmt.Errorf("read %s: %w", shown(u), err)
	}
	var f *fault.Fault
	if errors.As(err, &f) { // the dialer's own class
		return &fault.Fault{Terminal: f.Terminal, Reason: f.Reason, Err: fmt.Errorf("%s: %w", shown(u), err)}
	}
	var dns *net.DNSError
	var record tls.RecordHeaderError
	var verify *tls.CertificateVerificationError
	var alert tls.AlertError
	switch {
	case errors.As(err, &dns):
		return fault.Transient(fault.UnknownHost, fmt.Errorf("%s: the host %q can't be resolved: check spec.source.http.url and the cluster's DNS: %w", shown(u), u.Hostname(), err))
	case errors.As(err, &record):
		return fault.Terminal(fault.InvalidSource, fmt.Errorf("%s: the server does not speak TLS on this port: write http:// or another port in spec.source.http.url: %w", shown(u), err))
	case errors.As(err, &verify):
		return fault.Terminal(fault.CertificateError, fmt.Errorf("%s: the server's certificate is not trusted: give the certificate's CA in spec.source.http.certConfigMap: %w", shown(u), err))
	case errors.As(err, &alert):
		return fault.Terminal(fault.CertificateError, fmt.Errorf("%s: the server ends the TLS handshake: check which TLS versions and client certificates it wants: %w", shown(u), err))
	}
	return fault.Transient(fault.ConnectionFailed, fmt.Errorf("%s: the connection failed: check that the server runs and can be reached from the node: %w", shown(u), err))
}

func isTimeoutOfNet(err error) bool {
	var op *net.OpError
	return errors.As(err, &op)
}
