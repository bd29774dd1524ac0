package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

const (
	volumeBytes  = 2 << 30
	filledBytes  = 800 << 20
	guestWrites  = 1_000_000
	guestBytes   = 4096
	guestWriters = 8
	clonesTimed  = 20
)

// BenchmarkClone times the data step of a clone on the node, which shares the blocks of a
// volume of 2 GiB: as an import leaves it, after a million random writes of a guest, and
// after a million more on top of a snapshot, each beside what a person would use. It needs
// root and 8 GB.
func BenchmarkClone(b *testing.B) {
	p, err := pool.Open(b.Context(), pool.Config{Name: "bench", Dir: filepath.Join(b.TempDir(), "pool"), Bytes: 14 << 30})
	must(b, err)
	b.Cleanup(func() { must(b, p.Close(context.Background())) })
	must(b, p.Make(b.Context()))
	v, err := p.Create(b.Context(), pool.Spec{ID: "disk", Bytes: volumeBytes, Mode: pool.Block})
	must(b, err)
	fillAsImport(b, v.Path)
	for _, state := range []struct {
		name  string
		reach func(b *testing.B)
	}{
		{"freshly populated", func(*testing.B) {}},
		{"after 10^6 random writes", func(b *testing.B) { writeAsGuest(b, v.Path, 1) }},
		{"after 10^6 more on a snapshot", func(b *testing.B) {
			_, err := p.Snapshot(b.Context(), "snap", "disk")
			must(b, err)
			writeAsGuest(b, v.Path, 2)
		}},
	} {
		b.Run(state.name, func(b *testing.B) {
			state.reach(b)
			var ours, reflinks []time.Duration
			for i := range clonesTimed {
				id := fmt.Sprint("clone", i)
				ours = append(ours, timed(b, func() error {
					_, err := p.Create(b.Context(), pool.Spec{ID: id, Bytes: volumeBytes, Mode: pool.Block, From: "disk"})
					return err
				}))
				must(b, p.Delete(b.Context(), id))
				other := v.Path + ".cp"
				reflinks = append(reflinks, timed(b, func() error { return exec.Command("cp", "--reflink=always", v.Path, other).Run() }))
				must(b, os.Remove(other))
			}
			whole := timed(b, func() error {
				return exec.Command("sh", "-c", `cp --reflink=never --sparse=always "$0" "$0.cp" && sync "$0.cp" && rm "$0.cp"`, v.Path).Run()
			})
			slices.Sort(ours)
			slices.Sort(reflinks)
			f, err := os.Open(v.Path)
			must(b, err)
			defer f.Close()
			extents := 0
			must(b, device.Extents(f, func(device.Mapped) error { extents++; return nil }))
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(ms(ours[len(ours)/2]), "clone-ms")
			b.ReportMetric(ms(ours[len(ours)-1]), "slowest-ms")
			b.ReportMetric(ms(reflinks[len(reflinks)/2]), "cp-reflink-ms")
			b.ReportMetric(ms(whole), "cp-ms")
			b.ReportMetric(float64(extents), "extents")
		})
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func timed(b *testing.B, do func() error) time.Duration {
	b.Helper()
	start := time.Now()
	must(b, do())
	return time.Since(start)
}

// fillAsImport writes data in runs of 1 MiB here and there, as an import does.
func fillAsImport(b *testing.B, path string) {
	b.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(b, err)
	defer f.Close()
	d, err := device.NewFile(f, volumeBytes)
	must(b, err)
	random := rand.New(rand.NewPCG(1, 1))
	buf := device.AlignedBuffer(1 << 20)
	noise := rand.NewChaCha8([32]byte{1})
	for _, at := range random.Perm(volumeBytes >> 20)[:filledBytes>>20] {
		_, _ = noise.Read(buf)
		_, err := d.WriteAt(buf, int64(at)<<20)
		must(b, err)
	}
	must(b, d.Sync())
}

// writeAsGuest writes pieces of 4 KiB at random through a loop device, past the page cache.
func writeAsGuest(b *testing.B, path string, seed uint64) {
	b.Helper()
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	must(b, err)
	defer file.Close()
	l, err := device.AttachLoop(file, device.LoopOptions{DirectIO: true})
	must(b, err)
	disk, err := os.OpenFile(l.Path(), os.O_RDWR|syscall.O_DIRECT, 0)
	must(b, err)
	var wg sync.WaitGroup
	failed := make(chan error, guestWriters)
	for w := range uint64(guestWriters) {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, w))
			buf := device.AlignedBuffer(guestBytes)
			for range guestWrites / guestWriters {
				buf[0]++
				if _, err := disk.WriteAt(buf, random.Int64N(volumeBytes/guestBytes)*guestBytes); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(failed)
	must(b, errors.Join(<-failed, disk.Sync(), disk.Close(), l.Detach(b.Context())))
}
