package lab

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/test/cluster"
	"github.com/longshore-io/longshore/test/peers"
)

// slowRate limits each answer of a slow image's server, in bytes per second.
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
	// Slow limits each answer until Hurry; all of the disk is data then, and it is served raw only.
	Slow bool
	// SlowFrom leaves ranges that begin before it at full speed, a power of ten in bytes.
	SlowFrom       int64
	User, Password string
}

// Served is a disk image on a web server of its own in the formats raw, qcow2,
// raw.gz, qcow2.xz and vdi.gz.
type Served struct {
	*peers.NginxServer
	Bytes  int64
	SHA256 string // of the disk's content

	image Image
	slow  string // a file: the server is slow while it exists
}

// URL of the image in a format.
func (s *Served) URL(format string) string { return s.NginxServer.URL("disk." + format) }

// Serve makes and serves a disk: a partition table's signature, data, and holes between it.
func Serve(t testing.TB, i Image) *Served {
	t.Helper()
	s := serve(t, Served{Bytes: i.Bytes, image: i}, t.TempDir())
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
	Tool(t, s.Root, "xz", "-0", "--keep", "disk.qcow2")
	Tool(t, s.Root, "qemu-img", "convert", "-f", "raw", "-O", "vdi", raw, "disk.vdi")
	Tool(t, s.Root, "gzip", "-1", "disk.vdi")
	return s
}

// Again serves the same disk by one more server.
func (s *Served) Again(t testing.TB) *Served {
	t.Helper()
	return serve(t, *s, s.Root)
}

func serve(t testing.TB, s Served, root string) *Served {
	t.Helper()
	o := peers.NginxOptions{Root: root, User: s.image.User, Password: s.image.Password}
	if s.image.Slow {
		s.slow = filepath.Join(t.TempDir(), "slow")
		if err := os.WriteFile(s.slow, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		o.Extra = fmt.Sprintf("set $rate %d;\nif (!-f %s) { set $rate 0; }\n", slowRate, s.slow)
		if from := strconv.FormatInt(s.image.SlowFrom, 10); s.image.SlowFrom > 0 {
			if strings.Trim(from[1:], "0") != "" || from[0] != '1' {
				t.Fatalf("SlowFrom is %s, want a power of ten", from)
			}
			o.Extra += fmt.Sprintf("if ($http_range ~ \"^bytes=[0-9]{1,%d}-\") { set $rate 0; }\n", len(from)-1)
		}
		o.Extra += "limit_rate $rate;"
	}
	s.NginxServer = Web(t, o)
	return &s
}

// Hurry ends the slowness of whatever is asked for from now on.
func (s *Served) Hurry(t testing.TB) {
	t.Helper()
	if err := os.Remove(s.slow); err != nil {
		t.Fatal(err)
	}
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
