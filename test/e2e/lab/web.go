package lab

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/test/cluster"
	"github.com/longshore-io/longshore/test/peers"
)

// slowRate limits each connection to a slow image's server, in bytes per second.
const slowRate = 1 << 20

// Web starts a real nginx where the cluster can reach it; it ends with t.
func Web(t testing.TB, o peers.NginxOptions) *peers.NginxServer {
	t.Helper()
	o.Address = cluster.HostIP
	return peers.Nginx(t, o)
}

// Image says what disk image is to be served.
type Image struct {
	Bytes int64
	// Slow limits each connection; all of the disk is data then, and it is served raw only.
	Slow           bool
	User, Password string
}

// Served is a disk image on a web server of its own in the formats raw, qcow2 and raw.gz.
type Served struct {
	*peers.NginxServer
	Bytes  int64
	SHA256 string // of the disk's content
}

// URL of the image in a format.
func (s *Served) URL(format string) string { return s.NginxServer.URL("disk." + format) }

// Serve makes and serves a disk: a partition table's signature, data, and holes between it.
func Serve(t testing.TB, i Image) *Served {
	t.Helper()
	o := peers.NginxOptions{User: i.User, Password: i.Password}
	if i.Slow {
		o.LimitRate = slowRate
	}
	s := &Served{NginxServer: Web(t, o), Bytes: i.Bytes}
	raw := filepath.Join(s.Root, "disk.raw")
	if err := writeDisk(raw, i); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.SHA256, err = digest(raw); err != nil {
		t.Fatal(err)
	}
	if i.Slow {
		return s
	}
	Tool(t, s.Root, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-c", raw, "disk.qcow2")
	if err := compress(raw, filepath.Join(s.Root, "disk.raw.gz")); err != nil {
		t.Fatal(err)
	}
	return s
}

// Tool runs a program in a folder and fails the test where the program fails.
func Tool(t testing.TB, dir, name string, args ...string) {
	t.Helper()
	c := exec.Command(name, args...)
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}

func writeDisk(path string, i Image) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(i.Bytes); err != nil {
		return err
	}
	const piece = 1 << 20
	random := rand.NewChaCha8([32]byte{1})
	buf := make([]byte, piece)
	for off := int64(0); off < i.Bytes; off += piece {
		n := min(piece, i.Bytes-off)
		if hole := off/piece%3 == 1; hole && !i.Slow && off+n < i.Bytes {
			continue
		}
		_, _ = random.Read(buf[:n])
		if off == 0 {
			clear(buf[440:510]) // an MBR without partitions
			copy(buf[510:], "\x55\xaa")
		}
		if _, err := f.WriteAt(buf[:n], off); err != nil {
			return err
		}
	}
	return f.Close()
}

func digest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func compress(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	z := gzip.NewWriter(out)
	if _, err := io.Copy(z, in); err != nil {
		return err
	}
	return errors.Join(z.Close(), out.Close())
}
