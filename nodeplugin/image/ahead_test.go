package image_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// severed is a file that is out of reach from time to time.
type severed struct {
	counted
	away atomic.Bool
}

var errAway = errors.New("out of reach")

func (s *severed) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if s.away.Load() {
		return 0, errAway
	}
	return s.counted.ReadAtContext(ctx, p, off)
}

// packedDisk opens a qcow2 image of 48 MiB whose clusters are compressed to about 2/3.
func packedDisk(t *testing.T) (content []byte, file *severed, disk image.Disk) {
	t.Helper()
	raw := images.Raw(t, 6, 48<<20)
	rand.NewChaCha8([32]byte{6}).Read(raw.Content)
	for i := 0; i < len(raw.Content); i += 2 {
		raw.Content[i] = 'x'
	}
	if err := os.WriteFile(raw.Path, raw.Content, 0o600); err != nil {
		t.Fatal(err)
	}
	img := images.Convert(t, raw, "-c")
	file = &severed{counted: counted{Ranged: blobOf(t, img.Path).(image.Ranged)}}
	opened, err := image.Open(t.Context(), file, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return raw.Content, file, opened.Disk
}

// A reader that goes on from window to window finds the next ones in memory; whoever
// comes from elsewhere, or after a failure, gets them from the file.
func TestNextClustersAreFetchedAhead(t *testing.T) {
	content, file, disk := packedDisk(t)
	const window, chunk = 8 << 20, 1 << 20
	p := make([]byte, chunk)
	read := func(off, n int64) error {
		t.Helper()
		for end := off + n; off < end; off += chunk {
			if _, err := disk.ReadAtContext(t.Context(), p, off); err != nil {
				return err
			}
			if !bytes.Equal(p, content[off:off+chunk]) {
				t.Fatalf("the bytes at %d are not the disk's", off)
			}
		}
		return nil
	}
	if err := read(0, 2*window); err != nil {
		t.Fatal(err)
	}
	file.away.Store(true)
	if err := read(2*window, window); err != nil {
		t.Errorf("read what comes next: %v, want it in memory", err)
	}
	if err := read(5*window, window); !errors.Is(err, errAway) {
		t.Errorf("read what is far away: %v, want %v", err, errAway)
	}
	file.away.Store(false)
	if err := read(5*window, window); err != nil {
		t.Errorf("read what failed before: %v", err)
	}
}

// Readers may fall back behind the others: no byte of the file is fetched twice for that.
func TestAReaderMayFallBack(t *testing.T) {
	content, file, disk := packedDisk(t)
	const chunk = 1 << 20
	p := make([]byte, chunk)
	last := int64(len(content)/chunk - 1)
	for i := range last + 1 {
		off := (i + 1) % (last + 1) * chunk // the first one at the end
		if _, err := disk.ReadAtContext(t.Context(), p, off); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(p, content[off:off+chunk]) {
			t.Fatalf("the bytes at %d are not the disk's", off)
		}
	}
	if most := file.Size() + file.Size()/50 + 256<<10; file.bytes > most {
		t.Errorf("%d bytes read of a file of %d, want at most %d", file.bytes, file.Size(), most)
	}
}
