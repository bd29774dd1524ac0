package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/test/images"
	"github.com/longshore-io/longshore/test/peers"
)

// The tests of this file use the program as a person does: they run it.
var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "longshore-cli-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binary = filepath.Join(dir, "longshore")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build longshore: %v: %s\n", err, out)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

type ran struct {
	code           int
	stdout, stderr string
}

func longshore(t *testing.T, args ...string) ran {
	t.Helper()
	cmd := command(t, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return ran{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

func command(t *testing.T, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), binary, args...)
	cmd.Env = append(os.Environ(), "XDG_CACHE_HOME="+t.TempDir())
	return cmd
}

func (r ran) must(t *testing.T, code int) ran {
	t.Helper()
	if r.code != code {
		t.Fatalf("exit code %d, want %d\nstdout: %s\nstderr: %s", r.code, code, r.stdout, r.stderr)
	}
	return r
}

func equal(t *testing.T, path string, want []byte) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Fatalf("%s has %d bytes, want %d", path, len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("%s differs first at byte %d of %d", path, i, len(got))
		}
	}
}

func TestImportEveryFormatFromHTTPAndFile(t *testing.T) {
	web := peers.Nginx(t, peers.NginxOptions{})
	raw := images.Raw(t, 1, 5<<20+512)
	for name, img := range map[string]images.Image{
		"raw":         raw,
		"qcow2":       images.Convert(t, raw),
		"qcow2, zlib": images.Convert(t, raw, "-c"),
	} {
		t.Run(name, func(t *testing.T) {
			content, err := os.ReadFile(img.Path)
			if err != nil {
				t.Fatal(err)
			}
			for _, source := range []string{img.Path, web.Put(filepath.Base(img.Path), content)} {
				target := filepath.Join(t.TempDir(), "disk.raw")
				r := longshore(t, "import", source, target).must(t, 0)
				equal(t, target, raw.Content)
				if !strings.Contains(r.stdout, "disk of 5243392 bytes") {
					t.Errorf("stdout: %s", r.stdout)
				}
				sumsUp(t, r, source, target)
				if _, err := os.Stat(target + ".longshore-journal"); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("the journal of a finished import stays: %v", err)
				}
			}
		})
	}
	t.Run("raw.gz, whose size only its end tells", func(t *testing.T) {
		gz := filepath.Join(t.TempDir(), "d.raw.gz")
		if out, err := exec.Command("sh", "-c", `gzip -c "$0" > "$1"`, raw.Path, gz).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		target := filepath.Join(t.TempDir(), "disk.raw")
		r := longshore(t, "import", gz, target).must(t, 0)
		equal(t, target, raw.Content)
		sumsUp(t, r, gz, target)
	})
	t.Run("vdi.gz, which is unpacked beside the target", func(t *testing.T) {
		big := images.Raw(t, 2, 36<<20)
		rand.NewChaCha8([32]byte{2}).Read(big.Content[1<<20:])
		if err := os.WriteFile(big.Path, big.Content, 0o600); err != nil {
			t.Fatal(err)
		}
		vdi := filepath.Join(t.TempDir(), "d.vdi")
		if out, err := exec.Command("sh", "-c", `qemu-img convert -f raw -O vdi "$0" "$1" && gzip -1 "$1"`, big.Path, vdi).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		dir := t.TempDir()
		target := filepath.Join(dir, "disk.raw")
		r := longshore(t, "import", vdi+".gz", target).must(t, 0)
		equal(t, target, big.Content)
		sumsUp(t, r, vdi+".gz", target)
		if !strings.Contains(r.stderr, "unpacked to a temporary file") || !strings.Contains(r.stdout, "vdi.gzip") {
			t.Errorf("stderr: %s\nstdout: %s", r.stderr, r.stdout)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
			t.Errorf("left beside the target: %v, %v", left, err)
		}
	})
	t.Run("one of two disks in a tar", func(t *testing.T) {
		dir := t.TempDir()
		other := images.Raw(t, 4, 1<<20)
		for name, b := range map[string][]byte{"a.img": other.Content, "b.img": raw.Content} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		tar, target := images.PackTar(t, "ustar", dir, "a.img", "b.img"), filepath.Join(t.TempDir(), "disk.raw")
		r := longshore(t, "import", tar, target).must(t, 3)
		if !strings.Contains(r.stderr, `(--disk): 1: "a.img", 2: "b.img"`) {
			t.Errorf("stderr: %s", r.stderr)
		}
		longshore(t, "import", "--disk", "b.img", tar, target).must(t, 0)
		equal(t, target, raw.Content)
		if r := longshore(t, "inspect", "--disk", "1", tar).must(t, 0); !strings.Contains(r.stdout, "a.img") || !strings.Contains(r.stdout, "1048576 bytes") {
			t.Errorf("stdout: %s", r.stdout)
		}
	})
	t.Run("with a checksum", func(t *testing.T) {
		target := filepath.Join(t.TempDir(), "disk.raw")
		longshore(t, "import", "--checksum", "sha256:12", raw.Path, target).must(t, 2)
		right := fmt.Sprintf("sha256:%x", sha256.Sum256(raw.Content))
		wrong := strings.Repeat("0", 64)
		r := longshore(t, "import", "--checksum", "sha256:"+wrong, raw.Path, target).must(t, 3)
		if !strings.Contains(r.stderr, right) || !strings.Contains(r.stderr, wrong) {
			t.Errorf("stderr: %s", r.stderr)
		}
		if left, err := os.ReadDir(filepath.Dir(target)); err != nil || len(left) != 0 {
			t.Errorf("left of it: %v, %v", left, err)
		}
		longshore(t, "import", "--checksum", right, raw.Path, target).must(t, 0)
		equal(t, target, raw.Content)
		longshore(t, "import", "--force", "--checksum", "sha256:"+wrong, raw.Path, target).must(t, 3)
		if b, err := os.ReadFile(target); err != nil || len(bytes.Trim(b, "\x00")) > 0 {
			t.Errorf("the bytes of a wrong source stay: %v", err)
		}
		longshore(t, "import", web.Put("sum.raw", raw.Content), "--force", "--checksum", right, target).must(t, 0)
		equal(t, target, raw.Content)
	})
	t.Run("grown", func(t *testing.T) {
		target := filepath.Join(t.TempDir(), "disk.raw")
		longshore(t, "import", "--size", "8Mi", "--preallocate", raw.Path, target).must(t, 0)
		equal(t, target, append(bytes.Clone(raw.Content), make([]byte, 8<<20-len(raw.Content))...))
		var st syscall.Stat_t
		if err := syscall.Stat(target, &st); err != nil || st.Blocks*512 < 8<<20 {
			t.Errorf("%d bytes are allocated, want all 8 MiB (%v)", st.Blocks*512, err)
		}
	})
}

// sumsUp checks that an import said the digest that its source and its target have.
func sumsUp(t *testing.T, r ran, source, target string) {
	t.Helper()
	_, sum, found := strings.Cut(r.stdout, "\ndigest ")
	sum = strings.TrimSpace(sum)
	for _, of := range [][]string{{source}, {"--format", "raw", target}} {
		got := longshore(t, append([]string{"inspect", "--digest", "-o", "json"}, of...)...).must(t, 0)
		if !found || !strings.Contains(got.stdout, `"digest": "`+sum+`"`) {
			t.Errorf("the import says %s, of %s: %s", r.stdout, of, got.stdout)
		}
		longshore(t, append([]string{"inspect", "--verify", sum}, of...)...).must(t, 0)
	}
}

// A digest is compared with a disk, also with one on a larger device, and a difference is told.
func TestVerify(t *testing.T) {
	raw := images.Raw(t, 8, 5<<20+512)
	r := longshore(t, "inspect", "--digest", "--format", "raw", raw.Path).must(t, 0)
	_, rest, _ := strings.Cut(r.stdout, "digest:")
	right := strings.Fields(rest)[0]
	changed := func(change func(b []byte) []byte) string {
		path := filepath.Join(t.TempDir(), "changed.raw")
		if err := os.WriteFile(path, change(bytes.Clone(raw.Content)), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, row := range []struct {
		name, path, sum string
		code            int
		says            string
	}{
		{"the same", raw.Path, right, 0, ""},
		{"zeros follow", changed(func(b []byte) []byte { return append(b, make([]byte, 3<<20)...) }), right, 0, ""},
		{"something follows", changed(func(b []byte) []byte { return append(b, append(make([]byte, 3<<20), 1)...) }), right, 3, "behind the 5243392"},
		{"something follows in its last block", changed(func(b []byte) []byte { return append(b, 1) }), right, 3, "want " + right},
		{"a bit is another", changed(func(b []byte) []byte { b[4<<20] ^= 1; return b }), right, 3, "want " + right},
		{"it is shorter", changed(func(b []byte) []byte { return b[:4<<20] }), right, 3, "has 4194304 bytes"},
		{"no digest", raw.Path, "blake3-64k:12", 2, "hexadecimal digits"},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := longshore(t, "inspect", "--verify", row.sum, "--format", "raw", row.path).must(t, row.code)
			if !strings.Contains(r.stderr, row.says) {
				t.Errorf("stderr: %s", r.stderr)
			}
		})
	}
}

func TestImportToABlockDevice(t *testing.T) {
	raw := images.Raw(t, 2, 3<<20)
	backing, err := os.Create(filepath.Join(t.TempDir(), "backing"))
	if err != nil {
		t.Fatal(err)
	}
	defer backing.Close()
	if err := backing.Truncate(4 << 20); err != nil {
		t.Fatal(err)
	}
	loop, err := device.AttachLoop(backing, device.LoopOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := loop.Detach(context.Background()); err != nil {
			t.Error(err)
		}
	})
	longshore(t, "import", raw.Path, loop.Path()).must(t, 0)
	want := append(bytes.Clone(raw.Content), make([]byte, 1<<20)...)
	equal(t, loop.Path(), want)

	r := longshore(t, "import", raw.Path, loop.Path()).must(t, exitTerminal)
	if !strings.Contains(r.stderr, "--force") {
		t.Errorf("a device with data: stderr does not say --force: %s", r.stderr)
	}
	other := images.Raw(t, 3, 2<<20)
	longshore(t, "import", "--force", other.Path, loop.Path()).must(t, 0)
	equal(t, loop.Path(), append(bytes.Clone(other.Content), make([]byte, 2<<20)...))

	big := images.Raw(t, 4, 5<<20)
	r = longshore(t, "import", "--force", big.Path, loop.Path()).must(t, exitTerminal)
	if !strings.Contains(r.stderr, "5242880") || !strings.Contains(r.stderr, "4194304") {
		t.Errorf("the sizes are not told: %s", r.stderr)
	}
	equal(t, loop.Path(), append(bytes.Clone(other.Content), make([]byte, 2<<20)...))
}

func TestWrongInputsSayWhatToDo(t *testing.T) {
	dir := t.TempDir()
	raw := images.Raw(t, 5, 1<<20)
	web := peers.Nginx(t, peers.NginxOptions{})
	private := peers.Nginx(t, peers.NginxOptions{User: "me", Password: "secret"})
	tls := peers.Nginx(t, peers.NginxOptions{TLS: true})
	rawContent, err := os.ReadFile(raw.Path)
	if err != nil {
		t.Fatal(err)
	}
	good := web.Put("good.raw", rawContent)
	page := web.Put("page.raw", []byte("<!DOCTYPE html><html><body>Log in</body></html>"))
	locked := private.Put("a.raw", rawContent)
	safe := tls.Put("a.raw", rawContent)
	backed := filepath.Join(dir, "backed.qcow2")
	if out, err := exec.Command("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", raw.Path, backed).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	full := filepath.Join(dir, "full")
	if err := os.WriteFile(full, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	closed := peers.Nginx(t, peers.NginxOptions{Extra: "location / { return 403; }"})
	encrypted, cut, qed := filepath.Join(dir, "encrypted.qcow2"), filepath.Join(dir, "cut.qcow2"), filepath.Join(dir, "a.qed")
	whole, err := os.ReadFile(images.Convert(t, raw).Path)
	if err != nil {
		t.Fatal(err)
	}
	// qemu-img measures how fast this machine is when it makes one, and gives up on a busy one.
	luks := bytes.Clone(whole)
	luks[35] = 2 // crypt_method of the header (docs/interop/qcow2.rst)
	for path, content := range map[string][]byte{encrypted: luks, cut: whole[:len(whole)*2/3], qed: append([]byte("QED\x00"), make([]byte, 4092)...)} {
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	busy := filepath.Join(dir, "busy")
	other, err := os.Create(busy)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := lock(other); err != nil {
		t.Fatal(err)
	}
	faulty := peers.Faulty(t, rawContent, func(int, *http.Request) peers.Misdeed { return peers.Status(503) })

	for _, c := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"no arguments", []string{"import"}, exitUsage, "accepts 2 arg"},
		{"unknown flag", []string{"import", "--frob", "a", "b"}, exitUsage, "unknown flag"},
		{"unknown command", []string{"imprt"}, exitUsage, "unknown command"},
		{"unknown scheme", []string{"import", "ftp://h/x", dir + "/o"}, exitUsage, "http://"},
		{"unknown scheme and a password", []string{"import", "ftp://me:hush%@h/x", dir + "/o"}, exitUsage, "ftp://h/x"},
		{"no url, with a password", []string{"import", "http://me:hush%@h/x", dir + "/o"}, exitTerminal, "not of the form"},
		{"size of nonsense", []string{"import", "--size", "many", good, dir + "/o"}, exitUsage, "10Gi"},
		{"format of nonsense", []string{"import", "--format", "vhs", good, dir + "/o"}, exitUsage, "one of raw, iso, qcow2"},
		{"password without user", []string{"import", "--password-file", full, good, dir + "/o"}, exitUsage, "--user"},
		{"no such file", []string{"import", dir + "/nothing", dir + "/o"}, exitTerminal, "no such file"},
		{"404", []string{"import", web.URL("nothing"), dir + "/o"}, exitTerminal, "404"},
		{"401", []string{"import", locked, dir + "/o"}, exitTerminal, "401.*--user and --password-file"},
		{"401 with credentials", []string{"import", "--user", "you", locked, dir + "/o"}, exitTerminal, "401.*correct --user"},
		{"403", []string{"import", closed.URL("a.raw"), dir + "/o"}, exitTerminal, "403"},
		{"unknown host", []string{"import", "--retries", "0", "http://no-such-host.invalid/a.raw", dir + "/o"}, exitTransient, "no-such-host.invalid.*resolve here"},
		{"unknown CA", []string{"import", safe, dir + "/o"}, exitTerminal, "certificate.*--ca-file"},
		{"HTML page", []string{"import", page, dir + "/o"}, exitTerminal, "HTML"},
		{"backing file", []string{"import", backed, dir + "/o"}, exitTerminal, "backing"},
		{"encrypted", []string{"import", encrypted, dir + "/o"}, exitTerminal, "encrypted.*qemu-img convert"},
		{"cut short", []string{"import", cut, dir + "/o"}, exitTerminal, "cut short.*again|corrupt"},
		{"a format without a reader", []string{"import", qed, dir + "/o"}, exitTerminal, "format qed.*qemu-img convert"},
		{"source is a folder", []string{"import", dir, dir + "/o"}, exitTerminal, "folder"},
		{"larger than --size", []string{"import", "--size", "4096", good, dir + "/o"}, exitTerminal, "1048576"},
		{"target with content", []string{"import", good, full}, exitTerminal, "--force"},
		{"target is a folder", []string{"import", good, dir}, exitTerminal, "folder|directory|neither"},
		{"target of another import", []string{"import", "--force", good, busy}, exitTerminal, "another import.*busy"},
		{"target where nobody may write", []string{"import", good, "/sys/o"}, exitTerminal, "can be written"},
		{"target in no folder", []string{"import", good, dir + "/no/o"}, exitTerminal, "can be written"},
		{"target is the source", []string{"import", "--force", raw.Path, raw.Path}, exitTerminal, "source itself"},
		{"server in trouble", []string{"import", "--retries", "0", faulty.URL + "/a.raw", dir + "/o"}, exitTransient, "503.*run the same command again"},
		{"inspect: bad output", []string{"inspect", "-o", "yaml", good}, exitUsage, "json"},
		{"inspect: HTML page", []string{"inspect", page}, exitTerminal, "HTML"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := longshore(t, c.args...)
			if r.code != c.code {
				t.Errorf("exit code %d, want %d", r.code, c.code)
			}
			if !regexp.MustCompile("(?s)" + c.says).MatchString(r.stderr) {
				t.Errorf("stderr %q, want %q in it", r.stderr, c.says)
			}
			// It speaks to a person at a shell, who has no manifest.
			if word := regexp.MustCompile(`goroutine|spec\.|pod|Helm|context canceled|hush`).FindString(r.stderr); word != "" {
				t.Errorf("stderr says %q: %s", word, r.stderr)
			}
			for _, left := range []string{"o", "o.longshore-journal", "full.longshore-journal"} {
				if _, err := os.Stat(filepath.Join(dir, left)); err == nil {
					t.Errorf("%s is left behind", left)
				}
			}
		})
	}
	equal(t, full, []byte("precious"))
	equal(t, raw.Path, raw.Content)

	t.Run("the remedies work", func(t *testing.T) {
		ca, password := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "password")
		for path, content := range map[string]string{ca: tls.CA, password: "secret\n"} {
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for i, args := range [][]string{
			{"--ca-file", ca, safe},
			{"--insecure-skip-verify", safe},
			{"--user", "me", "--password-file", password, locked},
			{"--header", "Authorization: Basic bWU6c2VjcmV0", locked},
			{strings.Replace(locked, "://", "://me:secret@", 1)},
		} {
			target := filepath.Join(dir, fmt.Sprint("remedy", i))
			r := longshore(t, append([]string{"import", "--no-progress"}, append(args, target)...)...).must(t, 0)
			equal(t, target, raw.Content)
			if r.stderr != "" {
				t.Errorf("--no-progress says %q", r.stderr)
			}
			if strings.Contains(r.stdout, "secret") {
				t.Errorf("a password is printed: %s", r.stdout)
			}
		}
	})
}

func TestInspect(t *testing.T) {
	raw := images.Raw(t, 6, 3<<20)
	img := images.Convert(t, raw, "-c")
	r := longshore(t, "inspect", "-o", "json", img.Path).must(t, 0)
	var got inspection
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil {
		t.Fatalf("%v: %s", err, r.stdout)
	}
	if got.Format != "qcow2" || got.ClusterCompression != "zlib" || got.VirtualSizeBytes == nil || *got.VirtualSizeBytes != 3<<20 || got.AllocatedBytes == nil {
		t.Errorf("got %+v", got)
	}
	text := longshore(t, "inspect", img.Path).must(t, 0).stdout
	for _, want := range []string{"format:", "qcow2", "3145728 bytes (3.0 MiB)", "zlib"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %s", want, text)
		}
	}
}

// A killed import goes on: what it read again is what was in flight, and the
// disk is right.
func TestKilledImportGoesOn(t *testing.T) {
	const size = 96 << 20
	raw := images.Raw(t, 7, size)
	content, err := os.ReadFile(raw.Path)
	if err != nil {
		t.Fatal(err)
	}
	for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGINT} {
		t.Run(signal.String(), func(t *testing.T) {
			web := peers.Nginx(t, peers.NginxOptions{LimitRate: 4 << 20})
			url := web.Put("d.raw", content)
			dir := t.TempDir()
			target := filepath.Join(dir, "disk.raw")
			cmd := command(t, "import", url, target)
			out, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			// It says how far it is at most every two seconds: the first line comes
			// in mid-transfer, the server is slow enough for that.
			first := make([]byte, 1)
			if _, err := io.ReadFull(out, first); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			said, _ := io.ReadAll(out)
			_ = cmd.Wait()
			if signal == syscall.SIGINT && (cmd.ProcessState.ExitCode() != exitInterrupted || !strings.HasSuffix(string(said), "longshore: interrupted: run the same command again to go on\n")) {
				t.Errorf("exit code %d, want %d; stderr: %s", cmd.ProcessState.ExitCode(), exitInterrupted, said)
			}
			if _, err := os.Stat(target + ".longshore-journal"); err != nil {
				t.Fatalf("no journal after the kill: %v", err)
			}
			web.Settle()
			before := web.Sent()
			if before >= size {
				t.Fatalf("the server had sent all %d bytes: the kill came too late", before)
			}

			r := longshore(t, "import", url, target).must(t, 0)
			if !strings.Contains(r.stderr, "going on") {
				t.Errorf("stderr: %s", r.stderr)
			}
			equal(t, target, raw.Content)
			sumsUp(t, r, raw.Path, target)
			web.Settle()
			total := web.Sent()
			if again := total - size; again > 64<<20 {
				t.Errorf("%d bytes were sent twice, at most 64 MiB may be", again)
			}
			if total-before >= size {
				t.Errorf("the second run read %d bytes: it began at byte zero", total-before)
			}
			t.Logf("%d bytes sent before, %d after, %d of them again", before, total-before, total-size)
		})
	}
}

// On a full disk an import says so at once, and goes on when there is room.
func TestFullDisk(t *testing.T) {
	raw := images.Raw(t, 9, 24<<20)
	rand.NewChaCha8([32]byte{9}).Read(raw.Content[1<<20:])
	web := peers.Nginx(t, peers.NginxOptions{})
	url := web.Put("d.raw", raw.Content)
	if err := os.WriteFile(raw.Path, raw.Content, 0o600); err != nil {
		t.Fatal(err)
	}
	// In a mount namespace of its own, which takes the small disk along when it ends.
	out, err := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", `
		mount -t tmpfs -o size=8m none "$0" || exit 1
		"$1" import "$2" "$0/disk"; echo "first: $?"
		mount -o remount,size=64m "$0" || exit 1
		"$1" import --no-progress "$2" "$0/disk"; echo "second: $?"
		cmp "$0/disk" "$3" && echo equal; ls "$0"`, t.TempDir(), binary, url, raw.Path).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	want := fmt.Sprintf(`(?s)no space left.*free space.*run the same command again.*first: %d\n.*second: 0\nequal\ndisk\n$`, exitTransient)
	if !regexp.MustCompile(want).Match(out) || bytes.Contains(out, []byte("trying again")) {
		t.Errorf("got %s, want %s", out, want)
	}
}

// What another program wrote to the target since is not taken for ours.
func TestJournalOfAnotherFileIsNotBelieved(t *testing.T) {
	dir := t.TempDir()
	raw := images.Raw(t, 8, 8<<20)
	content, err := os.ReadFile(raw.Path)
	if err != nil {
		t.Fatal(err)
	}
	broken := peers.Faulty(t, content, func(n int, _ *http.Request) peers.Misdeed {
		if n > 4 {
			return peers.Status(503)
		}
		return nil
	})
	target := filepath.Join(dir, "disk.raw")
	longshore(t, "import", "--retries", "0", broken.URL+"/d.raw", target).must(t, exitTransient)
	if err := os.Remove(target); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if err := os.WriteFile(target, []byte("somebody else's"), 0o644); err != nil {
		t.Fatal(err)
	}
	r := longshore(t, "import", raw.Path, target).must(t, exitTerminal)
	if !strings.Contains(r.stderr, "--force") {
		t.Errorf("stderr: %s", r.stderr)
	}
	equal(t, target, []byte("somebody else's"))
	longshore(t, "import", "--force", raw.Path, target).must(t, 0)
	equal(t, target, raw.Content)
}

// The chart passes flags to the program: each must exist.
func TestChartPassesKnownFlags(t *testing.T) {
	flag := regexp.MustCompile(`(?m)^\s+- --([a-z-]+)`)
	for file, name := range map[string]string{"node.yaml": "node", "controller.yaml": "controller"} {
		cmd, _, err := rootCommand().Find([]string{name})
		if err != nil || cmd.Name() != name {
			t.Errorf("no subcommand %s", name)
			continue
		}
		text, err := os.ReadFile(filepath.Join("../../charts/longshore/templates", file))
		if err != nil {
			t.Fatal(err)
		}
		_, own, _ := strings.Cut(string(text), "- name: longshore\n")
		own, _, _ = strings.Cut(own, "volumeMounts:")
		flags := flag.FindAllStringSubmatch(own, -1)
		if len(flags) < 5 {
			t.Errorf("found only %d flags in %s", len(flags), file)
		}
		for _, f := range flags {
			if cmd.Flags().Lookup(f[1]) == nil {
				t.Errorf("%s passes --%s, which longshore %s does not have", file, f[1], name)
			}
		}
	}
}
