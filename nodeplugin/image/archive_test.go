package image_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// An archive is opened as the bytes of its tar, whatever its members' names look like.
func TestArchive(t *testing.T) {
	packed := func(b []byte) []byte {
		var out bytes.Buffer
		w := gzip.NewWriter(&out)
		_, err := w.Write(b)
		if err != nil || w.Close() != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	tar := images.Archive(t, images.File("BZh9", strings.Repeat("x", 5000)), images.File("disk.qcow2", "QFI\xfb"))
	for _, row := range []struct {
		name    string
		b, want []byte
		reason  string
	}{
		{"tar", tar, tar, ""},
		{"tar.gz", packed(tar), tar, ""},
		{"tar without a signature", bytes.ReplaceAll(tar, []byte("ustar\x0000"), make([]byte, 8)), bytes.ReplaceAll(tar, []byte("ustar\x0000"), make([]byte, 8)), ""},
		{"tar twice compressed", packed(packed(tar)), nil, fault.FormatNotSupported},
		{"qcow2", append([]byte("QFI\xfb\x00\x00\x00\x03"), make([]byte, 1000)...), nil, fault.NotAnArchive},
		{"empty", nil, nil, fault.NotAnArchive},
	} {
		if row.name == "tar without a signature" {
			row.b = bytes.Replace(row.b, []byte("BZh9"), []byte("name"), 1)
			row.want = row.b
		}
		for how, b := range map[string]image.Blob{"in ranges": &memory{b: row.b}, "one way": stream{row.b}} {
			opened, err := image.Open(t.Context(), b, image.Options{Format: image.Archive})
			if row.reason != "" {
				if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != row.reason {
					t.Errorf("%s, %s: got %v", row.name, how, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s, %s: %v", row.name, how, err)
				continue
			}
			var got []byte
			if opened.Stream != nil {
				got, err = io.ReadAll(opened.Stream)
			} else {
				got = make([]byte, opened.Disk.Size())
				_, err = opened.Disk.ReadAtContext(context.Background(), got, 0)
			}
			if err != nil || !bytes.Equal(got, row.want) {
				t.Errorf("%s, %s: %d bytes, %v", row.name, how, len(got), err)
			}
			opened.Close()
		}
	}
}
