// Package bench compares the engine with the tools that people use today, in
// one run on one machine: what counts is the ratio.
//
// It knows nothing of Kubernetes. Run it with
//
//	go test -bench . -benchtime 3x ./test/bench
package bench

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/blockcopy"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/file"
	"github.com/longshore-io/longshore/test/images"
)

// BenchmarkImport writes a qcow2 image of 128 MiB, of which 96 hold data that
// compress by half, into a new file and flushes it: by our engine and by
// "qemu-img convert" with the options that make it fastest.
func BenchmarkImport(b *testing.B) {
	const size, filled = 128 << 20, 96 << 20
	raw := images.Raw(b, 1, size)
	rand.NewChaCha8([32]byte{1}).Read(raw.Content[1<<20 : filled])
	for i := 1 << 20; i < filled; i += 2 {
		raw.Content[i] = 'x'
	}
	if err := os.WriteFile(raw.Path, raw.Content, 0o600); err != nil {
		b.Fatal(err)
	}
	for _, options := range [][]string{
		{"-o", "cluster_size=64k"},
		{"-c", "-o", "compression_type=zlib"},
		{"-c", "-o", "compression_type=zstd"},
	} {
		img := images.Convert(b, raw, append([]string{"-W", "-m", "4"}, options...)...)
		b.Run(fmt.Sprint(options), func(b *testing.B) {
			dir := b.TempDir()
			var ours, theirs time.Duration
			for i := range b.N {
				// In turns, so that a busy machine is busy for both.
				start := time.Now()
				importFile(b, img.Path, filepath.Join(dir, fmt.Sprint("ours", i)), size)
				ours += time.Since(start)
				start = time.Now()
				out, err := exec.CommandContext(b.Context(), "qemu-img", "convert", "-f", "qcow2", "-O", "raw", "-m", "8", "-W", "-t", "none",
					img.Path, filepath.Join(dir, fmt.Sprint("theirs", i))).CombinedOutput()
				if err != nil {
					b.Fatalf("qemu-img: %v: %s", err, out)
				}
				theirs += time.Since(start)
			}
			b.ReportMetric(ours.Seconds()/float64(b.N), "ours-s/op")
			b.ReportMetric(theirs.Seconds()/float64(b.N), "qemu-s/op")
			b.ReportMetric(ours.Seconds()/theirs.Seconds(), "ours/qemu")
		})
	}
}

func importFile(b *testing.B, from, to string, size int64) {
	b.Helper()
	params, err := json.Marshal(file.Params{Path: from})
	if err != nil {
		b.Fatal(err)
	}
	blob, err := file.Kind.Open(b.Context(), nil, params)
	if err != nil {
		b.Fatal(err)
	}
	defer blob.Close()
	opened, err := image.Open(b.Context(), blob.(source.Ranged), image.Options{})
	if err != nil {
		b.Fatal(err)
	}
	f, err := os.OpenFile(to, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		b.Fatal(err)
	}
	dst, err := device.NewFile(f, size)
	if err != nil {
		b.Fatal(err)
	}
	if err := blockcopy.Copy(b.Context(), dst, opened.Disk, blockcopy.Options{KnownZero: true}); err != nil {
		b.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		b.Fatal(err)
	}
}
