package peers

import (
	"bytes"
	"crypto/sha256"
	"fmt"
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
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

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
