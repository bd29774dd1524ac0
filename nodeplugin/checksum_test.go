package nodeplugin

import (
	"bytes"
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"fmt"
	"hash"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/journal"
)

// made converts a raw disk by a command that reads $0 and writes $1.
func made(t *testing.T, raw, command string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	if out, err := exec.Command("sh", "-c", command, raw, path).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return path
}

func sumsOf(t *testing.T, path string) []string {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	h := []hash.Hash{sha256.New(), md5.New(), sha1.New(), sha512.New()}
	_, err = io.Copy(io.MultiWriter(h[0], h[1], h[2], h[3]), f)
	must(t, err)
	return []string{
		fmt.Sprintf("sha256:%x", h[0].Sum(nil)), fmt.Sprintf("md5:%x", h[1].Sum(nil)),
		fmt.Sprintf("sha1:%x", h[2].Sum(nil)), fmt.Sprintf("sha512:%X", h[3].Sum(nil)),
	}
}

const toQcow2 = `qemu-img convert -f raw -O qcow2 "$0" "$1"`

// A source with the right checksum is imported, from whatever it is read; one with
// another is refused for good, and nothing of it stays.
func TestChecksum(t *testing.T) {
	const size = 40 * mib
	raw := noise(t, 31, size)
	for i, row := range []struct{ name, command string }{
		{"raw", `cp "$0" "$1"`}, {"qcow2", toQcow2}, {"compressed qcow2", `qemu-img convert -f raw -c -O qcow2 "$0" "$1"`},
		{"raw in gzip", `gzip -1 -c "$0" >"$1"`}, {"qcow2 in blocks of xz", toQcow2 + `.q && xz -0 --block-size=8MiB -c "$1.q" >"$1"`}, {"vdi", `qemu-img convert -f raw -O vdi "$0" "$1"`},
	} {
		for _, weak := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, weak validator %v", row.name, weak), func(t *testing.T) {
				path := made(t, raw, row.command)
				sums := sumsOf(t, path)
				serve := func() *web {
					w := serveFile(t, path)
					if weak {
						w.etag = ""
					}
					return w
				}
				w := serve()
				info, err := os.Stat(path)
				must(t, err)
				job := volume(t, t.TempDir(), size, w.url())
				job.Spool = spoolIn(t, size)
				job.Recipe.Checksum = sums[i%len(sums)]
				fill(t, newFiller(t), job).ok()
				equal(t, job.Target, raw)
				// Once for the format, which may look at both ends, once for the pass, and a second pass for what needs a spool.
				if sent := w.sent.Load(); !weak && row.name != "qcow2 in blocks of xz" && sent > info.Size()*102/100+4*mib {
					t.Errorf("%d bytes were sent of a file of %d", sent, info.Size())
				}

				job = volume(t, t.TempDir(), size, serve().url())
				job.Spool = spoolIn(t, size)
				wrong := []byte(sums[i%len(sums)])
				wrong[len(wrong)-1] = "01"[bytes.IndexByte([]byte("10"), wrong[len(wrong)-1])&1]
				job.Recipe.Checksum = string(wrong)
				r := fill(t, newFiller(t), job)
				<-r.done
				f := fault.Of(r.err)
				if f == nil || !f.Terminal || f.Reason != fault.ChecksumMismatch || !strings.Contains(strings.ToUpper(f.Error()), strings.ToUpper(string(wrong))) {
					t.Fatalf("a wrong checksum: %v", r.err)
				}
				empty := filepath.Join(t.TempDir(), "empty")
				must(t, os.WriteFile(empty, nil, 0o600))
				equal(t, job.Target, empty)
				j, err := journal.Load(job.Journal, job.Volume, job.Recipe.Digest, job.TargetBytes)
				must(t, err)
				if j.Done.Bytes() != 0 || j.HashAt != 0 || j.Complete {
					t.Errorf("the journal still believes in something: %+v", j)
				}
			})
		}
	}
}

func spoolIn(t *testing.T, bytes int64) func() (Spool, error) {
	return func() (Spool, error) {
		s := &tmpSpool{bytes: 2 * bytes}
		for range 2 {
			f, err := os.CreateTemp(t.TempDir(), "spool")
			if err != nil {
				return nil, err
			}
			t.Cleanup(func() { f.Close() })
			if err := f.Truncate(bytes); err != nil {
				return nil, err
			}
			s.files = append(s.files, f)
		}
		return s, nil
	}
}

// Movers that are killed while they sum up are followed by others that go on with
// the sum where it was.
func TestChecksumGoesOn(t *testing.T) {
	const size = 160 * mib
	raw := noise(t, 33, size)
	for _, row := range []struct{ name, command string }{{"raw", `cp "$0" "$1"`}, {"qcow2", toQcow2}} {
		t.Run(row.name, func(t *testing.T) {
			path := made(t, raw, row.command)
			w := serveFile(t, path)
			job := volume(t, t.TempDir(), size, w.url())
			job.Recipe.Checksum = sumsOf(t, path)[0]
			w.holdAt(70 * mib)
			r := fill(t, newFiller(t), job)
			for _, at := range []int64{40, 80} {
				r.until("a part is done", func(p Progress) bool { return p.BytesDone > at*mib })
				must(t, unix.Kill(sole(t, os.Getpid()), unix.SIGKILL))
				w.holdAt(50 * mib)
			}
			w.holdAt(-1)
			r.ok()
			equal(t, job.Target, raw)
			if sent := w.sent.Load(); sent > size*101/100+64*mib {
				t.Errorf("%d bytes were sent of %d: more than 64 MiB again for two kills", sent, int64(size))
			} else {
				t.Logf("%d MiB were sent of %d", sent/mib, size/mib)
			}
		})
	}
}
