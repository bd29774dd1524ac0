package file

import (
	"encoding/json"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source/sourcetest"
)

func params(t *testing.T, path string) json.RawMessage {
	t.Helper()
	b, err := json.Marshal(Params{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestFile(t *testing.T) {
	var path string
	clock := time.Unix(1_700_000_000, 0)
	put := func(t *testing.T, content []byte) {
		t.Helper()
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		// The kernel's clock may not have moved on between two writes.
		clock = clock.Add(time.Second)
		if err := os.Chtimes(path, clock, clock); err != nil {
			t.Fatal(err)
		}
	}
	sourcetest.Run(t, sourcetest.Peer{
		Kind: Kind,
		Serve: func(t *testing.T, content []byte) json.RawMessage {
			path = filepath.Join(t.TempDir(), "image")
			put(t, content)
			return params(t, path)
		},
		Change:       put,
		ChangeIsSeen: true,
		Refused: map[string]func(*testing.T) json.RawMessage{
			fault.NotFound: func(t *testing.T) json.RawMessage { return params(t, filepath.Join(t.TempDir(), "none")) },
			fault.InvalidSource: func(t *testing.T) json.RawMessage {
				fifo := filepath.Join(t.TempDir(), "fifo")
				if err := syscall.Mkfifo(fifo, 0o600); err != nil {
					t.Fatal(err)
				}
				return params(t, fifo)
			},
		},
	})
}

func TestDirectoryIsRefused(t *testing.T) {
	_, err := Kind.Open(t.Context(), nil, params(t, t.TempDir()))
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.InvalidSource {
		t.Errorf("got %v, want a terminal %s", err, fault.InvalidSource)
	}
}
