package httpsrc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// blob is the file as it was when it was opened.
type blob struct {
	*server
	validator source.Validator
	ranges    bool
	head      []byte // its first bytes
}

type (
	ranged struct{ *blob }
	oneWay struct{ *blob }
)

func (b *blob) Size() int64                 { return b.validator.Size }
func (b *blob) Validator() source.Validator { return b.validator }

func (b *blob) Close() error {
	b.end()
	b.transport.CloseIdleConnections()
	return nil
}

// begin asks for the first bytes and learns from the answer what the server has
// and can.
func (b *blob) begin(ctx context.Context) error {
	// Whoever waits for an answer here wants to be told soon what is wrong.
	return b.retry(ctx, openTries, func() (bool, error) {
		a, err := b.get(ctx, http.Header{"Range": {fmt.Sprintf("bytes=0-%d", headBytes-1)}})
		if err != nil {
			return false, err
		}
		defer a.Close()
		length := a.ContentLength
		switch a.StatusCode {
		case http.StatusPartialContent:
			r, err := contentRange(a.Header)
			if err != nil || r.start != 0 {
				return false, b.odd(a, "answers a request for the first bytes with the Content-Range %q", a.Header.Get("Content-Range"))
			}
			b.ranges = r.total >= 0
			b.validator = validatorOf(a.Header, r.total)
			length = r.end + 1
		case http.StatusOK:
			b.ranges = a.ContentLength == 0 // nothing is left to ask for
			b.validator = validatorOf(a.Header, a.ContentLength)
		case http.StatusRequestedRangeNotSatisfiable:
			// An empty file has no first bytes (RFC 9110 section 14.1.2).
			r, err := contentRange(a.Header)
			if err != nil || r.total != 0 {
				return false, b.odd(a, "refuses the range of the first bytes (status 416, Content-Range %q)", a.Header.Get("Content-Range"))
			}
			b.ranges = true
			b.validator = validatorOf(a.Header, 0)
			return false, nil
		default:
			return false, b.refused(a)
		}
		want := int64(headBytes)
		if length >= 0 {
			want = min(want, length)
		}
		head := make([]byte, want)
		n, err := io.ReadFull(a.body, head)
		if err != nil && (length >= 0 || !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF)) {
			return false, b.short(err, 0, int64(n), want)
		}
		b.head = head[:n]
		return false, b.page(a)
	})
}

// page refuses a web page where an image should be, whatever its status.
func (b *blob) page(a *answer) error {
	kind, _, _ := mime.ParseMediaType(a.Header.Get("Content-Type"))
	start := bytes.TrimLeft(bytes.TrimPrefix(b.head, []byte("\xef\xbb\xbf")), " \t\r\n")
	if kind != "text/html" && kind != "application/xhtml+xml" || !bytes.HasPrefix(start, []byte("<")) {
		return nil
	}
	return fault.Terminal(fault.NotADiskImage,
		fmt.Errorf("%s answers with a web page (%s), not with a disk image: open it in a browser and give the file's own address in spec.source.http.url", shown(a.body.where), kind))
}

// openTries is how often the first bytes are asked for.
const openTries = 2

// retry repeats try until it returns nil or an error that trying again does not
// mend, at most most times; after news (as many bytes that no earlier try brought
// as are the least acceptable) it counts anew.
func (b *blob) retry(ctx context.Context, most int, try func() (news bool, err error)) error {
	wait := b.limits.backoff
	for tries := 1; ; tries++ {
		news, err := try()
		if err == nil {
			return nil
		}
		f := fault.Of(err)
		if ctx.Err() != nil || b.life.Err() != nil || f.Terminal || f.Reason == fault.SourceChanged {
			return err
		}
		if news {
			tries, wait = 1, b.limits.backoff
		}
		if tries >= most {
			return fault.Transient(f.Reason, fmt.Errorf("%w (tried %d times)", err, tries))
		}
		// Idle connections to a server that died are dead too.
		b.transport.CloseIdleConnections()
		pause := wait/2 + rand.N(wait)
		var busy *busyError
		if errors.As(err, &busy) {
			pause = max(pause, min(busy.after, maxWait))
		}
		wait = min(wait*2, maxBackoff)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-b.life.Done():
			timer.Stop()
			return errClosed
		}
	}
}

// pin asks the server for nothing but the content that was opened.
func (b *blob) pin() http.Header {
	h := http.Header{}
	switch v := b.validator; {
	case v.Strong():
		h.Set("If-Match", v.ETag)
	case v.LastModified != "":
		h.Set("If-Unmodified-Since", v.LastModified)
	}
	return h
}

// ReadAtContext asks for the range, and after a break for what is missing of it.
func (b *ranged) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read %d bytes at %d: the offset is negative", len(p), off)
	}
	if b.life.Err() != nil {
		return 0, errClosed
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	var end error
	if left := b.Size() - off; left < int64(len(p)) {
		end = io.EOF
		p = p[:max(left, 0)]
	}
	n := 0
	if off < int64(len(b.head)) {
		n = copy(p, b.head[off:])
	}
	if n == len(p) {
		return n, end
	}
	var fresh int64 // since the last news: a byte at a time is none, it would go on for ever
	for n < len(p) {
		err := b.retry(ctx, b.limits.tries, func() (bool, error) {
			m, err := b.read(ctx, p[n:], off+int64(n))
			n += m
			if fresh += int64(m); fresh < b.limits.progress {
				return false, err
			}
			fresh = 0
			return true, err
		})
		if err != nil {
			return n, err
		}
	}
	return n, end
}

// read is one try at a range. It may return less than was asked for: a server
// may answer with a shorter range.
func (b *ranged) read(ctx context.Context, p []byte, off int64) (int, error) {
	header := b.pin()
	last := off + int64(len(p)) - 1
	header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, last))
	a, err := b.get(ctx, header)
	if err != nil {
		return 0, err
	}
	defer a.Close()
	switch a.StatusCode {
	case http.StatusPartialContent:
	case http.StatusOK:
		// Either the content is another, or this server of several has no ranges.
		if err := b.unchanged(a, a.ContentLength); err != nil {
			return 0, err
		}
		return 0, b.odd(a, "answered ranges before and now ignores them")
	case http.StatusRequestedRangeNotSatisfiable:
		return 0, b.changed(a, fmt.Sprintf("has no bytes at %d any more (%s)", off, a.Header.Get("Content-Range")))
	default:
		return 0, b.refused(a)
	}
	r, err := contentRange(a.Header)
	if err != nil {
		return 0, b.odd(a, "answers with the Content-Range %q", a.Header.Get("Content-Range"))
	}
	if err := b.unchanged(a, r.total); err != nil {
		return 0, err
	}
	if r.start != off || r.end > last {
		return 0, b.odd(a, "was asked for bytes %d-%d and answers with the Content-Range %q", off, last, a.Header.Get("Content-Range"))
	}
	p = p[:r.end-off+1]
	n, err := io.ReadFull(a.body, p)
	if err != nil {
		return n, b.short(err, off, int64(n), int64(len(p)))
	}
	if r.end < last && int64(n) < b.limits.progress {
		return n, b.odd(a, "was asked for %d bytes at %d and answers with %d only", last-off+1, off, n)
	}
	return n, nil
}

// Stream reads the whole file; a broken connection ends it.
func (b *oneWay) Stream(ctx context.Context) (io.ReadCloser, error) {
	if b.life.Err() != nil {
		return nil, errClosed
	}
	var body io.ReadCloser
	err := b.retry(ctx, b.limits.tries, func() (bool, error) {
		a, err := b.get(ctx, b.pin())
		if err != nil {
			return false, err
		}
		if a.StatusCode != http.StatusOK {
			defer a.Close()
			return false, b.refused(a)
		}
		if err := b.unchanged(a, a.ContentLength); err != nil {
			a.Close()
			return false, err
		}
		body = &stream{blob: b.blob, body: a.body}
		return false, nil
	})
	return body, err
}

// stream is a body whose end must be the file's.
type stream struct {
	*blob
	body *watched
	off  int64
}

func (s *stream) Read(p []byte) (int, error) {
	n, err := s.body.Read(p)
	s.off += int64(n)
	if errors.Is(err, io.EOF) && s.Size() >= 0 && s.off != s.Size() || errors.Is(err, io.ErrUnexpectedEOF) {
		return n, s.short(io.ErrUnexpectedEOF, 0, s.off, s.Size())
	}
	return n, err
}

func (s *stream) Close() error { return s.body.Close() }

// short words a body that ended before its length.
func (b *blob) short(err error, off, got, want int64) error {
	if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return err // a fault already
	}
	return fault.Transient(fault.ConnectionFailed,
		fmt.Errorf("%s: the connection ended after %d of %d bytes at %d: check the server's log: %w", shown(b.where()), got, want, off, io.ErrUnexpectedEOF))
}

// odd words an answer that breaks the protocol; another server behind the same
// name may do better.
func (b *blob) odd(a *answer, format string, args ...any) error {
	return fault.Transient(fault.ServerError, fmt.Errorf("%s "+format, append([]any{shown(a.body.where)}, args...)...))
}

// unchanged compares an answer with what was opened.
func (b *blob) unchanged(a *answer, total int64) error {
	now := validatorOf(a.Header, total)
	switch was := b.validator; {
	case total >= 0 && was.Size >= 0 && total != was.Size:
		return b.changed(a, fmt.Sprintf("had %d bytes and now has %d", was.Size, total))
	case was.ETag != "" && now.ETag != was.ETag:
		return b.changed(a, fmt.Sprintf("had the ETag %s and now has %q", was.ETag, now.ETag))
	case was.ETag == "" && was.LastModified != "" && now.LastModified != was.LastModified:
		return b.changed(a, fmt.Sprintf("was last modified at %s and now at %q", was.LastModified, now.LastModified))
	}
	return nil
}

func (b *blob) changed(a *answer, how string) error {
	return fault.Transient(fault.SourceChanged,
		fmt.Errorf("%s changed during the transfer: it %s: leave the file alone while it is imported, and give new versions a new name", shown(a.body.where), how))
}

// busyError is an answer that says when to come again.
type busyError struct {
	error
	after time.Duration
}

func (e *busyError) Unwrap() error { return e.error }

// refused words an answer that is none of what was asked for.
func (b *blob) refused(a *answer) error {
	at, status := shown(a.body.where), fmt.Sprintf("%d %s", a.StatusCode, http.StatusText(a.StatusCode))
	switch code := a.StatusCode; {
	case code == http.StatusPreconditionFailed:
		return b.changed(a, "no longer is what the transfer began with (status 412)")
	case code == http.StatusUnauthorized && b.secret.Get("Authorization") == "":
		return fault.Terminal(fault.Unauthorized, fmt.Errorf("%s wants credentials (%s): name a secret with the keys accessKeyId and secretKey in spec.source.http.secretRef", at, status))
	case code == http.StatusUnauthorized:
		return fault.Terminal(fault.Unauthorized, fmt.Errorf("%s does not accept the credentials (%s): correct the keys accessKeyId and secretKey of the secret in spec.source.http.secretRef", at, status))
	case code == http.StatusForbidden:
		return fault.Terminal(fault.Forbidden, fmt.Errorf("%s forbids to read it (%s): give access to the user of the secret in spec.source.http.secretRef, or correct spec.source.http.url", at, status))
	case code == http.StatusNotFound, code == http.StatusGone:
		return fault.Terminal(fault.NotFound, fmt.Errorf("%s does not exist (%s): correct spec.source.http.url", at, status))
	case code == http.StatusRequestTimeout, code == http.StatusTooEarly, code == http.StatusTooManyRequests, code >= 500:
		err := fault.Transient(fault.ServerError, fmt.Errorf("%s: the server can't answer now (%s): check the server", at, status))
		return &busyError{err, retryAfter(a.Header)}
	case code >= 400:
		return fault.Terminal(fault.InvalidSource, fmt.Errorf("%s refuses the request (%s): check spec.source.http.url and the headers that it is given", at, status))
	}
	return b.odd(a, "answers with the status %s", status)
}

// retryAfter is how long a server wants to be left alone, in seconds or until a date
// (RFC 9110 section 10.2.3); 0 or less where it does not say.
func retryAfter(h http.Header) time.Duration {
	said := h.Get("Retry-After")
	if s, err := strconv.ParseUint(said, 10, 31); err == nil {
		return time.Duration(s) * time.Second
	}
	at, err := http.ParseTime(said)
	if err != nil {
		return 0
	}
	return time.Until(at)
}

// validatorOf reads what the server says about the content.
func validatorOf(h http.Header, size int64) source.Validator {
	return source.Validator{Size: size, ETag: tag(h, "ETag"), LastModified: tag(h, "Last-Modified")}
}

// tag returns a header's value, or none where it could not be kept and compared
// as it is: too long for a record, or not plain text.
func tag(h http.Header, name string) string {
	v := h.Get(name)
	for _, c := range []byte(v) {
		if c < ' ' || c > '~' {
			return ""
		}
	}
	if len(v) > maxTag {
		return ""
	}
	return v
}

// contentBytes is a parsed Content-Range; total is -1 for "*", and start and
// end are for "*" too.
type contentBytes struct{ start, end, total int64 }

// contentRange parses the header of a 206 or 416 answer (RFC 9110 section 14.4).
func contentRange(h http.Header) (contentBytes, error) {
	bad := fmt.Errorf("no Content-Range of bytes: %q", h.Get("Content-Range"))
	unit, rest, ok := strings.Cut(textproto.TrimString(h.Get("Content-Range")), " ")
	span, total, ok2 := strings.Cut(strings.TrimSpace(rest), "/")
	if !ok || !ok2 || !strings.EqualFold(unit, "bytes") {
		return contentBytes{}, bad
	}
	r := contentBytes{-1, -1, -1}
	var err error
	if total != "*" {
		if r.total, err = strconv.ParseInt(total, 10, 64); err != nil || r.total < 0 {
			return contentBytes{}, bad
		}
	}
	if span == "*" {
		return r, nil
	}
	first, last, ok := strings.Cut(span, "-")
	if r.start, err = strconv.ParseInt(first, 10, 64); !ok || err != nil {
		return contentBytes{}, bad
	}
	if r.end, err = strconv.ParseInt(last, 10, 64); err != nil || r.start < 0 || r.end < r.start || r.total >= 0 && r.end >= r.total {
		return contentBytes{}, bad
	}
	return r, nil
}
