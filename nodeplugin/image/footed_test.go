package image_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// long is a stream of known length, in reads that are short and end with the end.
type long struct{ b []byte }

func (l long) Size() int64 { return int64(len(l.b)) }
func (l long) Stream(ctx context.Context) (io.ReadCloser, error) {
	s, err := stream(l).Stream(ctx)
	return io.NopCloser(iotest.DataErrReader(iotest.HalfReader(s))), err
}

// The footer of a fixed vhd is never data of the disk, also where it comes last: what comes
// before it is the disk, or it is told how to name the format. Named it is read as in
// ranges.
func TestFixedVHDForward(t *testing.T) {
	const size = 6<<20 + 512
	content := patchwork(size)
	geometry := [3]int{90, 4, 17}
	const small = 512 * 90 * 4 * 17
	for _, row := range []struct {
		vhd   images.VHD
		size  int
		exact bool // the disk is all that comes before the footer
	}{
		{images.VHD{Creator: "win ", Fixed: true}, size, true},
		{images.VHD{Creator: "win ", Fixed: true, Short: true}, size, true},
		{images.VHD{Creator: "qemu", Geometry: geometry, Fixed: true}, small, false},
		{images.VHD{Creator: "win ", Size: 5 << 20, Fixed: true}, 5 << 20, false},
	} {
		b := row.vhd.Bytes(content)
		path := filepath.Join(t.TempDir(), "disk")
		write(t, filepath.Dir(path), "disk", b)
		for name, blob := range map[string]image.Blob{
			"": stream{b}, "of known length": long{b}, "in gzip": stream{packed(t, "gzip -1 -c", path)}, "in xz, ranged": &memory{b: packed(t, "xz -0 -c", path)},
		} {
			name = fmt.Sprintf("%+v %s", row.vhd, name)
			for _, format := range []string{"", "vhd", "raw"} {
				opened, err := image.Open(t.Context(), blob, image.Options{Format: format})
				var got []byte
				if err == nil {
					if known := opened.Info.VirtualSize; format == "vhd" && row.exact && known >= 0 && known != size {
						t.Errorf("%s: a disk of %d bytes is told before it comes, want %d", name, known, size)
					}
					got, err = readAll(t, opened, len(b))
					opened.Close()
				}
				switch {
				case format == "raw" && reason(err) == fault.NotADiskImage:
				case format == "" && !row.exact && reason(err) == fault.NotADiskImage && strings.Contains(err.Error(), "--format vhd"):
				case format == "vhd" && !row.exact && reason(err) == fault.NeedsSpool:
					opened, err := image.Open(t.Context(), blob, image.Options{Format: format, Spool: newSpool(t, 1<<30)})
					if err != nil {
						t.Fatalf("%s: %v", name, err)
					}
					if got, err = readAll(t, opened, len(b)); err != nil {
						t.Fatalf("%s: %v", name, err)
					}
					same(t, name, got, content[:row.size])
				case err == nil && row.exact && format != "raw":
					same(t, name, got, content)
				default:
					t.Errorf("%s named %q: %d bytes, %v", name, format, len(got), err)
				}
			}
		}
		changed := bytes.Clone(b)
		changed[len(b)-450]++
		for what, damaged := range map[string][]byte{"cut off": b[:len(b)-600], "changed": changed} {
			_, err := importOnce(t, damaged, len(b), newSpool(t, 1<<30), "vhd")
			if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.CorruptImage {
				t.Errorf("%+v, its footer %s: %v", row.vhd, what, err)
			}
		}
	}
	// What no footer ends is a disk to the last byte, however short.
	for _, n := range []int{512, 513, 1024, 5000} {
		for _, blob := range []image.Blob{stream{content[:n]}, long{content[:n]}} {
			opened, err := image.Open(t.Context(), blob, image.Options{})
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(iotest.OneByteReader(opened.Stream))
			if err != nil {
				t.Fatal(err)
			}
			same(t, fmt.Sprint(n), got, content[:n])
		}
	}
	dmg := append([]byte{}, content...)
	copy(dmg[len(dmg)-512:], "koly")
	if _, err := importOnce(t, dmg, len(dmg), newSpool(t, 1<<30)); reason(err) != fault.FormatNotSupported {
		t.Errorf("a dmg: %v", err)
	}
}
