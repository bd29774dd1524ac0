// Package source says what a place is from which an image comes: a Kind opens a
// Blob, bytes that are read in ranges or one way.
//
// It knows nothing of image formats, targets or Kubernetes. How a connection is
// made is the business of the Dialer that the caller hands in.
package source

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// hidden is what a Secret shows of itself.
const hidden = "[hidden]"

// Secret is a string that no log, error or JSON shows; Reveal does.
type Secret string

// Reveal returns the secret itself.
func (s Secret) Reveal() string { return string(s) }

func (s Secret) String() string               { return hidden }
func (s Secret) GoString() string             { return hidden }
func (s Secret) LogValue() slog.Value         { return slog.StringValue(hidden) }
func (s Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// Spec names a source: the kind and its parameters as JSON, credentials
// included. It is handed on from the controller to the mover; printed or
// logged it shows the kind only.
type Spec struct {
	Kind   string          `json:"kind"`
	Params json.RawMessage `json:"params"`
}

func (s Spec) String() string       { return s.Kind }
func (s Spec) GoString() string     { return fmt.Sprintf("source.Spec{Kind: %q}", s.Kind) }
func (s Spec) LogValue() slog.Value { return slog.StringValue(s.Kind) }

// Dialer connects to address, "host:port" with the host's name or IP address;
// it resolves names itself. It is the only way in which a source may reach a
// network, is called from several goroutines at once, and its errors keep their
// fault class where they have one.
type Dialer func(ctx context.Context, network, address string) (net.Conn, error)

// Kind is one kind of source.
type Kind struct {
	Name string
	// Open reaches the source and learns its size and validator; errors have a
	// fault class. params is JSON of the kind's own Params type.
	Open func(ctx context.Context, dial Dialer, params json.RawMessage) (Blob, error)
}

// Kinds is the list of what can be opened.
type Kinds []Kind

// Open opens the source that spec names. The Blob is Ranged or OneWay.
func (k Kinds) Open(ctx context.Context, dial Dialer, spec Spec) (Blob, error) {
	var names []string
	for _, kind := range k {
		if kind.Name == spec.Kind {
			return kind.Open(ctx, dial, spec.Params)
		}
		names = append(names, kind.Name)
	}
	return nil, fault.Terminal(fault.SourceNotSupported,
		fmt.Errorf("source kind %q is not supported: use one of %s in spec.source", spec.Kind, strings.Join(names, ", ")))
}

// Validator tells one content of a source from another. Two equal Validators
// that are Strong mean the same bytes; weak ones only make it likely.
type Validator struct {
	// Size in bytes, -1 unknown.
	Size         int64  `json:"size"`
	ETag         string `json:"etag,omitempty"`
	LastModified string `json:"lastModified,omitempty"`
	// Digest is "algorithm:hex" of the whole content.
	Digest string `json:"digest,omitempty"`
}

// Strong tells whether equal validators mean equal bytes (RFC 9110 section 8.8.1).
func (v Validator) Strong() bool {
	return v.Digest != "" || v.ETag != "" && !strings.HasPrefix(v.ETag, "W/")
}

// Blob is an open source; it is also Ranged or OneWay.
type Blob interface {
	// Size in bytes, -1 unknown.
	Size() int64
	Validator() Validator
	// Close lets go of connections and files; reads that still run end with an
	// error. Called again it does nothing.
	Close() error
}

// Ranged is a Blob that is read anywhere.
type Ranged interface {
	Blob
	// ReadAtContext fills p from the byte at off, or returns an error: io.EOF
	// where the blob ends before p is full, else one with a fault class. It
	// repeats what can be repeated itself, within limits, and is called from
	// several goroutines at once.
	ReadAtContext(ctx context.Context, p []byte, off int64) (int, error)
}

// OneWay is a Blob that is read from its first byte to its last.
type OneWay interface {
	Blob
	// Stream starts at byte 0 each time it is called. The reader ends when ctx
	// does; it returns io.EOF only at the true end of the content.
	Stream(ctx context.Context) (io.ReadCloser, error)
}

// Formatted is a Blob whose source knows the image's format, so that it is not
// guessed from the bytes: "raw", "qcow2".
type Formatted interface {
	Format() string
}
