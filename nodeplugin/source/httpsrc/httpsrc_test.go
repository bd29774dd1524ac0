package httpsrc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/sourcetest"
	"github.com/longshore-io/longshore/test/peers"
)

// hasty is soon back after an error. Tests of what takes long have a clock of
// their own, so that a busy machine is not taken for a slow server.
var hasty = limits{header: 30 * time.Second, window: 30 * time.Second, progress: 64 << 10, tries: 4, backoff: time.Millisecond}

func params(t *testing.T, p Params) json.RawMessage {
	t.Helper()
	b, err := p.Reveal()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestNginx(t *testing.T) {
	for _, row := range []struct {
		name   string
		nginx  peers.NginxOptions
		params Params
		seen   bool // a change that keeps the length is seen
	}{
		{"plain", peers.NginxOptions{}, Params{}, true},
		{"tls and a password", peers.NginxOptions{TLS: true, User: "me", Password: "pass word"}, Params{User: "me", Password: "pass word"}, true},
		{"no etag", peers.NginxOptions{Extra: "etag off;"}, Params{}, true},
		{"no validator", peers.NginxOptions{NoValidators: true}, Params{}, false},
		{"no ranges", peers.NginxOptions{NoRanges: true}, Params{}, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			s := peers.Nginx(t, row.nginx)
			var name string
			var files, edits atomic.Int64
			put := func(t *testing.T, content []byte) {
				s.Put(name, content)
				// Last-Modified counts in seconds.
				s.Touch(name, time.Unix(1_700_000_000+edits.Add(1), 0))
			}
			with := func(url string) json.RawMessage {
				p := row.params
				p.URL, p.CABundle = url, s.CA
				return params(t, p)
			}
			refused := map[string]func(*testing.T) json.RawMessage{
				fault.NotFound:      func(*testing.T) json.RawMessage { return with(s.URL("none")) },
				fault.InvalidSource: func(*testing.T) json.RawMessage { return with("ftp://host/file") },
			}
			if row.nginx.User != "" {
				refused[fault.Unauthorized] = func(t *testing.T) json.RawMessage {
					return params(t, Params{URL: s.Put("secret", []byte("x")), CABundle: s.CA, User: "me", Password: "wrong"})
				}
				refused[fault.CertificateError] = func(t *testing.T) json.RawMessage {
					return params(t, Params{URL: s.URL("secret"), User: "me", Password: "pass word"})
				}
			}
			sourcetest.Run(t, sourcetest.Peer{
				Kind: Kind,
				Dial: sourcetest.Dial,
				Serve: func(t *testing.T, content []byte) json.RawMessage {
					name = fmt.Sprintf("image%d", files.Add(1))
					put(t, content)
					return with(s.URL(name))
				},
				Change:       put,
				ChangeIsSeen: row.seen,
				OneWay:       row.nginx.NoRanges,
				Refused:      refused,
			})
		})
	}
}

func openURL(t *testing.T, l limits, p Params) (source.Blob, error) {
	t.Helper()
	blob, err := open(t.Context(), sourcetest.Dial, params(t, p), l)
	if err == nil {
		t.Cleanup(func() { blob.Close() })
	}
	return blob, err
}

// Whatever a server does wrong in the middle, the bytes come right or an error
// of the right class does.
func TestMisdeedsInTheMiddle(t *testing.T) {
	content := sourcetest.Content(1, 1<<20)
	page := peers.Misdeed(peers.HTML)
	for _, row := range []struct {
		name     string
		misdeeds []peers.Misdeed // of the second request and those that follow; then all goes well
		reason   string          // "": the read goes well
		terminal bool
	}{
		{"cut once", []peers.Misdeed{peers.Cut(100_000)}, "", false},
		{"cut often, with news each time", []peers.Misdeed{peers.Cut(100_000), peers.Cut(100_000), peers.Cut(100_000), peers.Cut(100_000), peers.Cut(50_000), peers.Cut(50_000), peers.Cut(1000)}, "", false},
		{"cut for ever, a byte each time", repeat(peers.Cut(1), 4), fault.ConnectionFailed, false},
		{"shorter ranges", repeat(peers.Shorter(100_000), 7), "", false},
		{"a byte of each range", repeat(peers.Shorter(1), 4), fault.ServerError, false},
		{"cut for ever at nothing", repeat(peers.Cut(0), 4), fault.ConnectionFailed, false},
		{"stall", []peers.Misdeed{peers.Stall(50_000)}, "", false},
		{"stall for ever", repeat(peers.Stall(0), 4), fault.TooSlow, false},
		{"no answer", []peers.Misdeed{peers.Silent}, "", false},
		{"no answer for ever", repeat(peers.Silent, 4), fault.TooSlow, false},
		{"503, then well", []peers.Misdeed{peers.Status(503), peers.Status(502)}, "", false},
		{"503 for ever", repeat(peers.Status(503), 4), fault.ServerError, false},
		{"429 for ever", repeat(peers.Status(429), 4), fault.ServerError, false},
		{"401", []peers.Misdeed{peers.Status(401)}, fault.Unauthorized, true},
		{"403", []peers.Misdeed{peers.Status(403)}, fault.Forbidden, true},
		{"404", []peers.Misdeed{peers.Status(404)}, fault.NotFound, true},
		{"410", []peers.Misdeed{peers.Status(410)}, fault.NotFound, true},
		{"418", []peers.Misdeed{peers.Status(418)}, fault.InvalidSource, true},
		{"412", []peers.Misdeed{peers.Status(412)}, fault.SourceChanged, false},
		{"416", []peers.Misdeed{peers.Status(416)}, fault.SourceChanged, false},
		{"a page", []peers.Misdeed{page}, fault.SourceChanged, false},
		{"another range", []peers.Misdeed{peers.Header("Content-Range", "bytes 0-99/1048576")}, "", false},
		{"another range for ever", repeat(peers.Header("Content-Range", "bytes 0-99/1048576"), 4), fault.ServerError, false},
		{"no Content-Range for ever", repeat(peers.Header("Content-Range", ""), 4), fault.ServerError, false},
		{"nonsense for ever", repeat(peers.Header("Content-Range", "bytes 9-2/1"), 4), fault.ServerError, false},
		{"another total", []peers.Misdeed{peers.Header("Content-Range", "bytes 200000-899999/1048577")}, fault.SourceChanged, false},
		{"another etag", []peers.Misdeed{peers.Header("ETag", `"other"`)}, fault.SourceChanged, false},
		{"no etag", []peers.Misdeed{peers.Header("ETag", "")}, fault.SourceChanged, false},
		{"the whole file, then well", []peers.Misdeed{peers.Whole}, "", false},
		{"the whole file for ever", repeat(peers.Whole, 4), fault.ServerError, false},
	} {
		bubble(t, row.name, func(t *testing.T) {
			blob := openFaulty(t, content, func(n int) peers.Misdeed {
				if n -= 2; n >= 0 && n < len(row.misdeeds) {
					return row.misdeeds[n]
				}
				return nil
			})
			p := make([]byte, 700_000)
			n, err := blob.(source.Ranged).ReadAtContext(t.Context(), p, 200_000)
			if row.reason == "" {
				if err != nil || !bytes.Equal(p, content[200_000:900_000]) {
					t.Errorf("read %d bytes, right: %v: %v", n, bytes.Equal(p, content[200_000:900_000]), err)
				}
				return
			}
			f := fault.Of(err)
			if f == nil || f.Reason != row.reason || f.Terminal != row.terminal {
				t.Errorf("got %v, want a fault %s (terminal %v)", err, row.reason, row.terminal)
			}
			if !bytes.Equal(p[:n], content[200_000:200_000+n]) {
				t.Errorf("the %d bytes before the error are wrong", n)
			}
		})
	}
}

// A server that says when it can answer again is left alone until then, but not for
// as long as it likes.
func TestRetryAfter(t *testing.T) {
	content := sourcetest.Content(8, 1<<20)
	for _, row := range []struct {
		says        string // a date where it begins with +
		least, most time.Duration
	}{
		{"", 0, 200 * time.Millisecond},
		{"20", 20 * time.Second, 21 * time.Second},
		{"+20s", 19 * time.Second, 21 * time.Second},
		{"+-20s", 0, 200 * time.Millisecond},
		{"3600", maxWait, maxWait + time.Second},
		{"99999999999999999999", 0, 200 * time.Millisecond},
		{"soon", 0, 200 * time.Millisecond},
	} {
		bubble(t, row.says, func(t *testing.T) {
			says := row.says
			if after, err := time.ParseDuration(strings.TrimPrefix(says, "+")); err == nil && says[0] == '+' {
				says = time.Now().Add(after).UTC().Format(http.TimeFormat)
			}
			blob := openFaulty(t, content, func(n int) peers.Misdeed {
				if n == 2 {
					return peers.Status(503, "Retry-After: "+says)
				}
				return nil
			})
			start := time.Now()
			if _, err := blob.(source.Ranged).ReadAtContext(t.Context(), make([]byte, 1000), 200_000); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took < row.least || took > row.most {
				t.Errorf("asked again after %v, want %v to %v", took, row.least, row.most)
			}
		})
	}
}

// bubble runs a test with a clock of its own.
func bubble(t *testing.T, name string, f func(*testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

// openFaulty opens what a server in memory serves.
func openFaulty(t *testing.T, content []byte, plan func(n int) peers.Misdeed) source.Blob {
	t.Helper()
	s, dial := peers.FaultyInMemory(t, content, func(n int, _ *http.Request) peers.Misdeed { return plan(n) })
	blob, err := open(t.Context(), dial, params(t, Params{URL: s.URL + "/image"}), hasty)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { blob.Close() })
	return blob
}

func repeat(m peers.Misdeed, n int) []peers.Misdeed {
	var out []peers.Misdeed
	for range n {
		out = append(out, m)
	}
	return out
}

// What is wrong at the beginning is told with its remedy, and at once.
func TestFaultsOfOpening(t *testing.T) {
	now := time.Now()
	expired := peers.NewCertificate(t, now.Add(-2*time.Hour), now.Add(-time.Hour), "127.0.0.1")
	foreign := peers.NewCertificate(t, now.Add(-time.Hour), now.Add(time.Hour), "elsewhere.example")
	nginx := func(o peers.NginxOptions) *peers.NginxServer {
		s := peers.Nginx(t, o)
		s.Put("image", []byte("content"))
		return s
	}
	plain := nginx(peers.NginxOptions{Extra: `
		location /loop { return 302 /loop; }
		location /down { return 503; }
		location /odd { return 302 ftp://example.com/; }
		location /forbidden { return 403; }
		location /gone { return 410; }
		location /short { return 206 "abc"; }`})
	tls := nginx(peers.NginxOptions{TLS: true, Extra: fmt.Sprintf("location /down { return 302 %s; }", plain.URL("image"))})
	old := nginx(peers.NginxOptions{TLS: true, Certificate: expired})
	other := nginx(peers.NginxOptions{TLS: true, Certificate: foreign})
	page := peers.Faulty(t, nil, func(int, *http.Request) peers.Misdeed { return peers.HTML })
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()

	for _, row := range []struct {
		name     string
		params   Params
		reason   string
		terminal bool
		says     string
	}{
		{"not a url", Params{URL: "http://user:hush@[::1"}, fault.InvalidSource, true, "spec.source.http.url"},
		{"no scheme", Params{URL: "host/path"}, fault.InvalidSource, true, "spec.source.http.url"},
		{"no host", Params{URL: "http:///path"}, fault.InvalidSource, true, "spec.source.http.url"},
		{"a bad header", Params{URL: plain.URL("image"), SecretHeaders: []source.Secret{"hush"}}, fault.InvalidSource, true, "secretExtraHeaders"},
		{"two lines in a header", Params{URL: plain.URL("image"), Headers: []string{"A: b\r\nX-Hush: hush"}}, fault.InvalidSource, true, "extraHeaders"},
		{"a header of ours", Params{URL: plain.URL("image"), Headers: []string{"range: bytes=0-1"}}, fault.InvalidSource, true, "Range"},
		{"404", Params{URL: plain.URL("none?hush")}, fault.NotFound, true, "spec.source.http.url"},
		{"410", Params{URL: plain.URL("gone")}, fault.NotFound, true, "spec.source.http.url"},
		{"403", Params{URL: plain.URL("forbidden")}, fault.Forbidden, true, "spec.source.http.secretRef"},
		{"503", Params{URL: plain.URL("down")}, fault.ServerError, false, "503"},
		{"a loop", Params{URL: plain.URL("loop")}, fault.InvalidSource, true, "redirects more than"},
		{"a redirect to elsewhere", Params{URL: plain.URL("odd")}, fault.InvalidSource, true, "redirects"},
		{"a redirect to plain http", Params{URL: tls.URL("down"), CABundle: tls.CA}, fault.InvalidSource, true, "plain http"},
		{"206 without a range", Params{URL: plain.URL("short")}, fault.ServerError, false, "Content-Range"},
		{"a page", Params{URL: page.URL}, fault.NotADiskImage, true, "web page"},
		{"no such host", Params{URL: "http://no-such-host.invalid/"}, fault.UnknownHost, false, "no-such-host.invalid"},
		{"nobody listens", Params{URL: "http://" + closed.Addr().String()}, fault.ConnectionFailed, false, "server runs"},
		{"unknown CA", Params{URL: tls.URL("image")}, fault.CertificateError, true, "spec.source.http.certConfigMap"},
		{"expired", Params{URL: old.URL("image"), CABundle: old.CA}, fault.CertificateError, true, "expired"},
		{"another host's certificate", Params{URL: other.URL("image"), CABundle: other.CA}, fault.CertificateError, true, "127.0.0.1"},
		{"no certificate in the bundle", Params{URL: tls.URL("image"), CABundle: "hello"}, fault.CertificateError, true, "spec.source.http.certConfigMap"},
		{"https of a plain port", Params{URL: strings.Replace(plain.URL("image"), "http:", "https:", 1)}, fault.InvalidSource, true, "TLS"},
		{"http of a TLS port", Params{URL: strings.Replace(tls.URL("image"), "https:", "http:", 1)}, fault.InvalidSource, true, "spec.source.http.url"},
		{"any certificate", Params{URL: old.URL("image"), InsecureSkipVerify: true}, "", false, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			_, err := openURL(t, hasty, row.params)
			f := fault.Of(err)
			switch {
			case row.reason == "" && err == nil:
			case row.reason == "" || f == nil || f.Reason != row.reason || f.Terminal != row.terminal:
				t.Errorf("got %v, want a fault %q (terminal %v)", err, row.reason, row.terminal)
			case !strings.Contains(err.Error(), row.says) || strings.Contains(err.Error(), "hush"):
				t.Errorf("%q should speak of %q and not of secrets", err, row.says)
			}
		})
	}
}

// The dialer is the only way out, is told names as they are, and its faults stay.
func TestDialer(t *testing.T) {
	var asked []string
	refuse := fault.Terminal(fault.AddressNotAllowed, errors.New("not there"))
	_, err := Kind.Open(t.Context(), func(_ context.Context, network, address string) (net.Conn, error) {
		asked = append(asked, network+" "+address)
		return nil, refuse
	}, params(t, Params{URL: "https://example.com/image"}))
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.AddressNotAllowed {
		t.Errorf("got %v, want the dialer's own fault", err)
	}
	if len(asked) != 1 || asked[0] != "tcp example.com:443" {
		t.Errorf("the dialer was asked for %q", asked)
	}
	if _, err := Kind.Open(t.Context(), nil, params(t, Params{URL: "http://127.0.0.1:1/"})); err == nil {
		t.Error("connects without a dialer")
	}
}

// Credentials go to the host they are for, and the others are asked without.
func TestCredentialsStayWithTheirHost(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]http.Header{}
	note := func(name string, next http.HandlerFunc) *httptest.Server {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			seen[name+r.URL.Path] = r.Header.Clone()
			mu.Unlock()
			next(w, r)
		}))
		t.Cleanup(s.Close)
		return s
	}
	serve := func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(make([]byte, 100_000)))
	}
	mirror := note("mirror", serve)
	var origin *httptest.Server
	origin = note("origin", func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/first":
			http.Redirect(w, r, "/second", http.StatusFound)
		case "/second":
			http.Redirect(w, r, mirror.URL+"/image", http.StatusTemporaryRedirect)
		}
	})
	blob, err := openURL(t, standard, Params{
		URL:           strings.Replace(origin.URL, "//", "//me:hush@", 1) + "/first",
		Headers:       []string{"X-Plain: yes", "Cookie: hush"},
		SecretHeaders: []source.Secret{"X-Token: hush"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"origin/first", "origin/second"} {
		if h := seen[path]; h.Get("Authorization") != "Basic bWU6aHVzaA==" || h.Get("X-Token") != "hush" || h.Get("Cookie") != "hush" {
			t.Errorf("%s was asked with %v", path, h)
		}
	}
	h := seen["mirror/image"]
	if h.Get("X-Plain") != "yes" || h.Get("Accept-Encoding") != "identity" {
		t.Errorf("the mirror was asked with %v", h)
	}
	for name, values := range h {
		if strings.Contains(fmt.Sprint(values), "hush") || name == "Authorization" {
			t.Errorf("the mirror got %s: %v", name, values)
		}
	}
	// The place is pinned: the way there is not asked again.
	clear(seen)
	if _, err := blob.(source.Ranged).ReadAtContext(t.Context(), make([]byte, 100), 90_000); err != nil {
		t.Fatal(err)
	}
	if len(seen) != 1 {
		t.Errorf("a range asked %d places, want the mirror only", len(seen))
	}
}

// A signed URL that a redirect led to expires; the way is asked again.
func TestRedirectIsAskedAgainWhenItExpires(t *testing.T) {
	content := sourcetest.Content(2, 400_000)
	var generation atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		now := fmt.Sprintf("/signed%d", generation.Load())
		switch r.URL.Path {
		case "/image":
			http.Redirect(w, r, now, http.StatusFound)
		case now:
			http.ServeContent(w, r, "", time.Unix(1_700_000_000, 0), bytes.NewReader(content))
		default:
			w.WriteHeader(http.StatusForbidden)
		}
	}))
	t.Cleanup(s.Close)
	blob, err := openURL(t, standard, Params{URL: s.URL + "/image"})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		generation.Add(1)
		p := make([]byte, 100_000)
		if _, err := blob.(source.Ranged).ReadAtContext(t.Context(), p, 200_000); err != nil || !bytes.Equal(p, content[200_000:300_000]) {
			t.Fatalf("after the signature expired: %v", err)
		}
	}
}

// A server that is killed and comes back loses its connections, not the transfer.
func TestServerThatRestarts(t *testing.T) {
	content := sourcetest.Content(3, 4<<20)
	s := peers.Nginx(t, peers.NginxOptions{})
	blob, err := openURL(t, standard, Params{URL: s.Put("image", content)})
	if err != nil {
		t.Fatal(err)
	}
	read := func(off int64) error {
		p := make([]byte, 1<<20)
		_, err := blob.(source.Ranged).ReadAtContext(t.Context(), p, off)
		if err == nil && !bytes.Equal(p, content[off:off+1<<20]) {
			err = errors.New("the bytes are wrong")
		}
		return err
	}
	if err := read(1 << 20); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	end := make(chan error, 1)
	go func() { end <- read(2 << 20) }()
	s.Start()
	if err := <-end; err != nil {
		t.Error(err)
	}
	if err := read(3 << 20); err != nil {
		t.Error(err)
	}
}

// Ranges that follow each other use one connection, and bytes are fetched once.
func TestConnectionsAreUsedAgain(t *testing.T) {
	s := peers.Nginx(t, peers.NginxOptions{TLS: true})
	blob, err := openURL(t, standard, Params{URL: s.Put("image", sourcetest.Content(4, 4<<20)), CABundle: s.CA})
	if err != nil {
		t.Fatal(err)
	}
	for off := int64(0); off < 4<<20; off += 256 << 10 {
		if _, err := blob.(source.Ranged).ReadAtContext(t.Context(), make([]byte, 256<<10), off); err != nil {
			t.Fatal(err)
		}
	}
	if err := blob.Close(); err != nil {
		t.Fatal(err)
	}
	s.Settle() // a request is logged a moment after its answer is there
	connections := map[string]bool{}
	for _, r := range s.Requests() {
		connections[r.Connection] = true
	}
	if len(connections) != 1 {
		t.Errorf("17 requests used %d connections, want 1", len(connections))
	}
	if sent := s.Sent(); sent != 4<<20 {
		t.Errorf("%d bytes were sent for a file of %d", sent, 4<<20)
	}
}

// A body that is cut short is no end of a stream.
func TestStreamCutShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		blob := openFaulty(t, sourcetest.Content(5, 1<<20), func(n int) peers.Misdeed {
			if n == 1 {
				return peers.Whole
			}
			return peers.Cut(300_000)
		})
		r, err := blob.(source.OneWay).Stream(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		n, err := io.Copy(io.Discard, r)
		if f := fault.Of(err); f == nil || f.Terminal || f.Reason != fault.ConnectionFailed {
			t.Errorf("read %d bytes and got %v, want a transient %s", n, err, fault.ConnectionFailed)
		}
	})
}

// While the reader of a stream is busy elsewhere, the server is not blamed.
func TestReaderMayPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		blob := openFaulty(t, sourcetest.Content(6, 4<<20), func(int) peers.Misdeed { return peers.Whole })
		r, err := blob.(source.OneWay).Stream(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if _, err := io.ReadFull(r, make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour) // the pause is what is tested; the clock is the bubble's
		if n, err := io.Copy(io.Discard, r); err != nil || n != 4<<20-1000 {
			t.Errorf("after a pause: %d bytes, %v", n, err)
		}
	})
}

func TestReadsEndWithTheBlob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		blob := openFaulty(t, sourcetest.Content(7, 1<<20), func(n int) peers.Misdeed {
			if n > 1 {
				return peers.Silent
			}
			return nil
		})
		end := make(chan error, 1)
		go func() {
			_, err := blob.(source.Ranged).ReadAtContext(t.Context(), make([]byte, 1000), 500_000)
			end <- err
		}()
		synctest.Wait() // until the read waits for the server
		blob.Close()
		if err := <-end; !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v, want %v", err, net.ErrClosed)
		}
	})
}

// What a server says of its content is kept, compared and sent back: only plain
// text of a sound length is taken for that.
func TestValidators(t *testing.T) {
	for tag, want := range map[string]string{
		`"abc-1"`: `"abc-1"`, `W/"1"`: `W/"1"`, "unquoted": "unquoted", "": "",
		"\"caf\xe9\"": "", "\"caf\u00e9\"": "", "\"a\tb\"": "", `"` + strings.Repeat("a", maxTag) + `"`: "",
	} {
		h := http.Header{"Etag": {tag}, "Last-Modified": {tag}}
		if got := validatorOf(h, 7); got != (source.Validator{Size: 7, ETag: want, LastModified: want}) {
			t.Errorf("%.20q: got %+v", tag, got)
		}
	}
}

// A server that sends headers without end costs no memory.
func TestHeadersWithoutEnd(t *testing.T) {
	s := peers.Faulty(t, nil, func(int, *http.Request) peers.Misdeed {
		return peers.Status(200, "X-Long: "+strings.Repeat("x", 2*maxHeader))
	})
	_, err := openURL(t, hasty, Params{URL: s.URL})
	if f := fault.Of(err); f == nil || f.Reason != fault.ConnectionFailed || !strings.Contains(f.Error(), "headers") {
		t.Errorf("got %v, want %s", err, fault.ConnectionFailed)
	}
}

func TestParamsHideSecrets(t *testing.T) {
	p := Params{URL: "https://me:hush@host/path?sig=hush", Password: "hush", SecretHeaders: []source.Secret{"A: hush"}}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("open", "source", p, "header", p.SecretHeaders[0])
	shown := log.String() + fmt.Sprintf("%v %s %#v", p.Password, p.SecretHeaders, p.Password)
	if b, err := json.Marshal(p.SecretHeaders); err != nil {
		t.Fatal(err)
	} else if shown += string(b); strings.Contains(shown, "hush") {
		t.Errorf("shows a secret: %s", shown)
	}
	var back Params
	if err := json.Unmarshal(params(t, p), &back); err != nil || back.Password.Reveal() != "hush" || back.SecretHeaders[0].Reveal() != "A: hush" {
		t.Errorf("revealed parameters come back as %q, %q: %v", back.Password.Reveal(), back.SecretHeaders, err)
	}
}
