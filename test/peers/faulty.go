package peers

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// FaultyServer serves one file at every path, rightly until it is told otherwise.
type FaultyServer struct {
	*httptest.Server

	mu       sync.Mutex
	content  []byte
	requests int
	plan     func(n int, r *http.Request) Misdeed
}

// Misdeed answers a request wrongly; well answers it as it should be.
type Misdeed func(w http.ResponseWriter, r *http.Request, well http.Handler)

// Faulty starts a server that serves content with ranges, a strong ETag and
// conditional requests. plan says what to do of the n-th request, counted from
// 1; where it is or returns nil, the answer is right.
func Faulty(t testing.TB, content []byte, plan func(n int, r *http.Request) Misdeed) *FaultyServer {
	t.Helper()
	s := &FaultyServer{content: content, plan: plan}
	s.start(t, httptest.NewServer(s))
	return s
}

// FaultyInMemory is Faulty without a network, for tests with synctest's clock:
// dial connects to it, whatever the address.
func FaultyInMemory(t testing.TB, content []byte, plan func(n int, r *http.Request) Misdeed) (_ *FaultyServer, dial func(context.Context, string, string) (net.Conn, error)) {
	t.Helper()
	s, l := &FaultyServer{content: content, plan: plan}, &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: s}}
	server.Start()
	s.start(t, server)
	return s, l.dial
}

func (s *FaultyServer) start(t testing.TB, server *httptest.Server) {
	s.Server = server
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
}

// pipes is a listener whose connections are pipes in memory.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case l.conns <- theirs:
		return ours, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipes) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80} }

// Set changes what is served.
func (s *FaultyServer) Set(content []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.content = content
}

// Requests is how many requests came.
func (s *FaultyServer) Requests() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests
}

func (s *FaultyServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.requests++
	n, content := s.requests, s.content
	s.mu.Unlock()
	well := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", fmt.Sprintf(`"%x"`, sha256.Sum256(content)))
		w.Header().Set("Content-Type", "application/octet-stream")
		http.ServeContent(w, r, "", time.Unix(1_700_000_000, 0), bytes.NewReader(content))
	})
	if s.plan != nil {
		if do := s.plan(n, r); do != nil {
			do(w, r, well)
			return
		}
	}
	well.ServeHTTP(w, r)
}

// Cut ends the connection after n bytes of the body.
func Cut(n int) Misdeed {
	return func(w http.ResponseWriter, r *http.Request, well http.Handler) {
		defer panic(http.ErrAbortHandler)
		well.ServeHTTP(&cutter{ResponseWriter: w, left: n}, r)
	}
}

type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	p = p[:min(len(p), c.left)]
	n, err := c.ResponseWriter.Write(p)
	if c.left -= n; c.left == 0 {
		c.ResponseWriter.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	return n, err
}

// Stall sends n bytes of the body, and then nothing until the client goes.
func Stall(n int) Misdeed {
	return func(w http.ResponseWriter, r *http.Request, well http.Handler) {
		well.ServeHTTP(&staller{ResponseWriter: w, left: n, until: r.Context().Done()}, r)
	}
}

type staller struct {
	http.ResponseWriter
	left  int
	until <-chan struct{}
}

func (c *staller) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p[:min(len(p), c.left)])
	if c.left -= n; c.left == 0 {
		c.ResponseWriter.(http.Flusher).Flush()
		<-c.until
		panic(http.ErrAbortHandler)
	}
	return n, err
}

// Silent never answers.
func Silent(w http.ResponseWriter, r *http.Request, _ http.Handler) {
	<-r.Context().Done()
	panic(http.ErrAbortHandler)
}

// Status answers with a status and headers "Name: value".
func Status(code int, headers ...string) Misdeed {
	return func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
		for _, h := range headers {
			name, value, _ := strings.Cut(h, ": ")
			w.Header().Set(name, value)
		}
		w.WriteHeader(code)
	}
}

// HTML answers with a page and status 200.
func HTML(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	fmt.Fprint(w, "\n<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>\n")
}

// Header answers rightly but for a header of the answer; "" leaves it out.
func Header(name, value string) Misdeed {
	return func(w http.ResponseWriter, r *http.Request, well http.Handler) {
		well.ServeHTTP(&header{ResponseWriter: w, name: name, value: value}, r)
	}
}

type header struct {
	http.ResponseWriter
	name, value string
}

func (h *header) WriteHeader(code int) {
	if h.value == "" {
		h.Header().Del(h.name)
	} else {
		h.Header().Set(h.name, h.value)
	}
	h.ResponseWriter.WriteHeader(code)
}

// Whole ignores the Range of the request.
func Whole(w http.ResponseWriter, r *http.Request, well http.Handler) {
	r.Header.Del("Range")
	well.ServeHTTP(w, r)
}

// Shorter answers with the first n bytes of the range that is asked for, which
// a server may do.
func Shorter(n int64) Misdeed {
	return func(w http.ResponseWriter, r *http.Request, well http.Handler) {
		var first, last int64
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last); err == nil {
			r.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", first, min(last, first+n-1)))
		}
		well.ServeHTTP(w, r)
	}
}
