package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// TestToolsStart builds the image, unpacks it and runs in it what the node
// plugin runs.
func TestToolsStart(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("chroot needs root: run the tests as root")
	}
	root := unpack(t)
	for _, c := range []struct{ command, says string }{
		{"mkfs.ext4 -V", "mke2fs"},
		{"mkfs.xfs -V", "mkfs.xfs version"},
		{"e2fsck -V", "e2fsck"},
		{"resize2fs -h", "Usage: resize2fs"},
		{"xfs_growfs -V", "xfs_growfs version"},
		{"xfs_repair -V", "xfs_repair version"},
		{"blkid --version", "blkid from util-linux"},
		{"mount --version", "mount from util-linux"},
		{"umount --version", "umount from util-linux"},
		{"losetup --version", "losetup from util-linux"},
		{"nbdkit --version", "nbdkit"},
		{"sh -c id", "uid=0(root)"},
		{"longshore", "hello"},
		{"longshore-mover", "is started by the node plugin"},
	} {
		t.Run(c.command, func(t *testing.T) {
			out, err := inRoot(root, strings.Fields(c.command)...)
			if !strings.Contains(string(out), c.says) {
				t.Errorf("%s says %q (%v), want %q", c.command, out, err, c.says)
			}
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				t.Error(err)
			}
		})
	}
	t.Run("every program finds its libraries", func(t *testing.T) {
		programs := 0
		err := filepath.WalkDir(filepath.Join(root, "usr"), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			f, err := elf.Open(path)
			if err != nil {
				return nil
			}
			libraries, _ := f.ImportedLibraries()
			f.Close()
			if len(libraries) == 0 {
				return nil
			}
			programs++
			inside := strings.TrimPrefix(path, root)
			out, _ := inRoot(root, "/lib64/ld-linux-x86-64.so.2", "--list", inside)
			for _, line := range strings.Split(string(out), "\n") {
				if strings.Contains(line, "not found") || strings.Contains(line, "cannot open") {
					t.Errorf("%s: %s", inside, strings.TrimSpace(line))
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if programs < 100 {
			t.Errorf("looked at %d programs and libraries, expected some hundred", programs)
		}
	})
	t.Run("no interpreter but the shell", func(t *testing.T) {
		for _, pattern := range []string{"usr/bin/perl*", "usr/bin/python*", "usr/bin/apt*", "usr/bin/dpkg*", "usr/bin/bash"} {
			if found, err := filepath.Glob(filepath.Join(root, pattern)); err != nil || found != nil {
				t.Errorf("%v in the image (%v)", found, err)
			}
		}
	})
	t.Run("public certificates are there", func(t *testing.T) {
		bundle, err := os.ReadFile(filepath.Join(root, "etc/ssl/certs/ca-certificates.crt"))
		if err != nil {
			t.Fatal(err)
		}
		if n := bytes.Count(bundle, []byte("BEGIN CERTIFICATE")); n < 100 {
			t.Errorf("%d certificates, expected more than 100", n)
		}
	})
}

func unpack(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	binary := filepath.Join(dir, "longshore")
	build := exec.Command("go", "build", "-o", binary, "./testdata/hello")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	mover := filepath.Join(dir, "longshore-mover")
	build = exec.Command("go", "build", "-tags", "netgo,osusergo", "-o", mover, "../../cmd/longshore-mover")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	file := filepath.Join(dir, "image.tar")
	if err := run(t.Context(), []string{binary, mover}, "example.test/longshore:1", "1", file); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("example.test/longshore:1")
	if err != nil {
		t.Fatal(err)
	}
	img, err := tarball.ImageFromPath(file, &tag)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/usr/bin/longshore"}, config.Config.Entrypoint); diff != "" {
		t.Error(diff)
	}
	root := filepath.Join(dir, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	flat := mutate.Extract(img)
	defer flat.Close()
	untar := exec.Command("tar", "-x", "-p", "-C", root)
	untar.Stdin = flat
	if out, err := untar.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return root
}

func inRoot(root string, args ...string) ([]byte, error) {
	program := args[0]
	for _, dir := range []string{"/usr/sbin", "/usr/bin"} {
		if _, err := os.Stat(filepath.Join(root, dir, program)); err == nil {
			program = filepath.Join(dir, program)
		}
	}
	cmd := &exec.Cmd{Path: program, Args: args, Dir: "/", Env: []string{"PATH=/usr/sbin:/usr/bin", "LC_ALL=C"}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	return cmd.CombinedOutput()
}

func TestTreeIsMergedAndOrdered(t *testing.T) {
	regular := tar.Header{Typeflag: tar.TypeReg, Mode: 0o755}
	tr := tree{
		"usr/bin/dash": {header: regular, content: []byte("shell")},
		"usr/sbin/b":   {header: tar.Header{Typeflag: tar.TypeLink, Linkname: "usr/sbin/z", Mode: 0o755}},
		"usr/sbin/z":   {header: regular, content: []byte("z")},
		"usr/bin":      {header: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755}},
		"usr/lib64/ld": {header: regular},
		"usr/lib64":    {header: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755}},
		"usr/share/ca-certificates/mozilla/a.crt": {header: regular, content: []byte("A\n\n")},
		"usr/share/ca-certificates/mozilla/b.crt": {header: regular, content: []byte("B\n")},
	}
	if err := tr.finish(); err != nil {
		t.Fatal(err)
	}
	var one, two bytes.Buffer
	if err := tr.write(&one); err != nil {
		t.Fatal(err)
	}
	if err := tr.write(&two); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(one.Bytes(), two.Bytes()) {
		t.Error("the same tree was written differently")
	}
	seen := map[string]string{}
	r := tar.NewReader(&one)
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if parent := filepath.Dir(strings.TrimSuffix(h.Name, "/")); parent != "." {
			if _, there := seen[parent]; !there {
				t.Errorf("%s comes before its folder", h.Name)
			}
		}
		if h.Typeflag == tar.TypeLink {
			if _, there := seen[h.Linkname]; !there {
				t.Errorf("hard link %s comes before %s", h.Name, h.Linkname)
			}
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		seen[strings.TrimSuffix(h.Name, "/")] = h.Linkname + string(content)
	}
	for path, want := range map[string]string{
		"bin":                               "usr/bin",
		"lib64":                             "usr/lib64",
		"usr/bin/sh":                        "dash",
		"etc/ssl/certs/ca-certificates.crt": "A\nB\n",
	} {
		if got, ok := seen[path]; !ok || got != want {
			t.Errorf("%s is %q (there: %v), want %q", path, got, ok, want)
		}
	}
}

func TestNames(t *testing.T) {
	for in, want := range map[string]string{
		"./bin/true":    "usr/bin/true",
		"./sbin":        "usr/sbin",
		"./usr/bin/x":   "usr/bin/x",
		"./":            "",
		"./lib64/ld.so": "usr/lib64/ld.so",
		"./etc/fstab":   "etc/fstab",
		"./../etc/x":    "etc/x",
	} {
		if got := merged(in); got != want {
			t.Errorf("merged(%q) = %q, want %q", in, got, want)
		}
	}
	pkg, version, err := split("libcap2_1%3a2.66-4+deb12u3+b1_amd64.deb")
	if pkg != "libcap2" || version != "1:2.66-4+deb12u3+b1" || err != nil {
		t.Errorf("split: %s %s %v", pkg, version, err)
	}
	if _, _, err := split("x.deb"); err == nil {
		t.Error("split took x.deb")
	}
	for in, want := range map[string]bool{
		"usr/share/doc/dash/copyright": true,
		"usr/share/doc/dash/changelog": false,
		"usr/share/man/man1/x.1":       false,
		"usr/sbin/xfs_scrub":           false,
		"usr/sbin/mkfs.xfs":            true,
	} {
		if got := needed(in); got != want {
			t.Errorf("needed(%q) = %v, want %v", in, got, want)
		}
	}
}
