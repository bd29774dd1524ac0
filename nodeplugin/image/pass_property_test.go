package image_test

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// Every byte of the file goes by once and in order, whatever is in the file and in
// what order the disk needs it; and the disk is the same.
func TestPass(t *testing.T) {
	big := bigRaw(t, 70<<20)
	kinds := map[string]func(seed uint64) ([]byte, []byte){}
	for name, random := range map[string]func(testing.TB, uint64) images.Image{
		"any": images.Random, "vhd": images.RandomVHD, "vhdx": images.RandomVHDX, "vdi": images.RandomVDI, "vmdk": images.RandomVMDK,
	} {
		kinds[name] = func(seed uint64) ([]byte, []byte) {
			img := random(t, seed)
			b, err := os.ReadFile(img.Path)
			if err != nil {
				t.Fatal(err)
			}
			return b, img.Content
		}
	}
	for name, args := range map[string][]string{
		"large qcow2": {"-O", "qcow2"}, "large compressed qcow2": {"-c", "-O", "qcow2"}, "large vdi": {"-O", "vdi"}, "large vmdk": {"-O", "vmdk", "-o", "subformat=streamOptimized"}, "large raw": {"-O", "raw"},
	} {
		kinds[name] = func(uint64) ([]byte, []byte) {
			return converted(t, append([]string{"-f", "raw", big.Path}, args...)...), big.Content
		}
	}
	kinds["qcow2 in gzip"] = func(seed uint64) ([]byte, []byte) {
		img := images.Convert(t, images.Raw(t, seed, 3<<20))
		b, err := os.ReadFile(img.Path)
		if err != nil {
			t.Fatal(err)
		}
		return gzipped(t, b), img.Content
	}
	kinds["raw in blocks of xz"] = func(seed uint64) ([]byte, []byte) {
		img := images.Raw(t, seed, 3<<20)
		return packed(t, "xz -0 --block-size=1MiB -c", img.Path), img.Content
	}
	for name, kind := range kinds {
		seeds := uint64(4)
		if strings.HasPrefix(name, "large") {
			seeds = 1
		}
		for seed := range seeds {
			b, content := kind(seed)
			for _, row := range []struct {
				name string
				blob image.Blob
				pass image.Pass
			}{
				{"pinned", &memory{b: b}, image.Pass{Pinned: true}},
				{"pinned, from the middle", &memory{b: b}, image.Pass{Pinned: true, From: int64(len(b)/2 + 77)}},
				{"pinned, from the end", &memory{b: b}, image.Pass{Pinned: true, From: int64(len(b))}},
				{"not pinned", &memory{b: b}, image.Pass{}},
				{"one way", stream{b}, image.Pass{}},
			} {
				if _, ranged := row.blob.(image.Ranged); !ranged && bytes.Contains(b[max(0, len(b)-512):], []byte("conectix")) && !bytes.HasPrefix(b, []byte("conectix")) {
					continue // told by its end, which is not seen in time
				}
				what := fmt.Sprintf("%s, seed %d, %s", name, seed, row.name)
				got := make([]byte, 0, len(b))
				begin := int64(-1)
				row.pass.Tap = func(off int64, p []byte) {
					if begin < 0 {
						begin = off
					}
					if off != begin+int64(len(got)) {
						t.Errorf("%s: byte %d goes by where %d is next", what, off, begin+int64(len(got)))
					}
					got = append(got, p...)
				}
				opened, err := image.Open(t.Context(), row.blob, image.Options{Pass: &row.pass, Spool: newSpool(t, 1<<30)})
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				disk, err := readAll(t, opened, len(content)+1<<20)
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if err := opened.Close(); err != nil {
					t.Errorf("%s: %v", what, err)
				}
				if begin != 0 && (begin != row.pass.From || !opened.Resumable()) && row.pass.From != int64(len(b)) {
					t.Errorf("%s: the pass began at %d", what, begin)
				}
				if !bytes.Equal(got, b[len(b)-len(got):]) || begin == 0 && len(got) != len(b) {
					t.Errorf("%s: %d bytes went by of a file of %d", what, len(got), len(b))
				}
				same(t, what, disk, content)
			}
		}
	}
}
