package main

import (
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/test/images"
	"github.com/longshore-io/longshore/test/peers"
)

// sameTree compares a folder with what the oracle has made of the archive.
func sameTree(t *testing.T, folder, archive string) {
	t.Helper()
	oracle := filepath.Join(t.TempDir(), "oracle")
	images.Unpack(t, archive, oracle)
	got, want := images.Walk(t, folder), images.Walk(t, oracle)
	for name, w := range want {
		g := got[name]
		g.Blocks, w.Blocks = 0, 0
		if g != w {
			t.Errorf("%q is %+v, want %+v", name, g, w)
		}
	}
	if len(got) != len(want) {
		t.Errorf("got %d files, want %d", len(got), len(want))
	}
}

func TestImportArchive(t *testing.T) {
	web := peers.Nginx(t, peers.NginxOptions{})
	dir := t.TempDir()
	tree, tar := filepath.Join(dir, "tree"), filepath.Join(dir, "x.tar")
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	images.Tree(t, rand.New(rand.NewPCG(1, 1)), tree, false)
	images.Pack(t, tree, tar, "--format=pax", "-S")
	list := []string{tar}
	for tool, suffix := range map[string]string{"gzip": ".gz", "xz": ".xz", "zstd": ".zst", "bzip2": ".bz2"} {
		if out, err := exec.Command(tool, "-k", tar).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", tool, err, out)
		}
		list = append(list, tar+suffix)
	}
	for _, path := range list {
		t.Run(filepath.Ext(path), func(t *testing.T) {
			content, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, source := range []string{path, web.Put(filepath.Base(path), content)} {
				target := filepath.Join(t.TempDir(), "folder")
				r := longshore(t, "import", "--content", "archive", source, target).must(t, 0)
				sameTree(t, target, tar)
				if !strings.Contains(r.stdout, "unpacked a tar") {
					t.Errorf("stdout: %s", r.stdout)
				}
				if left, _ := filepath.Glob(target + ".*"); len(left) > 0 {
					t.Errorf("left beside the folder: %v", left)
				}
				again := longshore(t, "import", "--content", "archive", source, target).must(t, exitTerminal)
				if !strings.Contains(again.stderr, "is not empty") {
					t.Errorf("stderr: %s", again.stderr)
				}
				sameTree(t, target, tar)
			}
		})
	}
}

// Of an archive that is refused nothing is there, whether that is found before or under way.
func TestImportRefusesArchive(t *testing.T) {
	for _, name := range []string{"x.tar", "x.tar.gz"} {
		dir := t.TempDir()
		path := filepath.Join(dir, name)
		b := images.Archive(t, images.Folder("a"), images.File("a/good", strings.Repeat("good ", 1<<20)), images.File("../bad", "x"))
		if err := os.WriteFile(filepath.Join(dir, "x.tar"), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(name, ".gz") {
			if out, err := exec.Command("gzip", filepath.Join(dir, "x.tar")).CombinedOutput(); err != nil {
				t.Fatalf("gzip: %v: %s", err, out)
			}
		}
		r := longshore(t, "import", "--content", "archive", path, filepath.Join(dir, "target")).must(t, exitTerminal)
		if !strings.Contains(r.stderr, `"../bad"`) {
			t.Errorf("%s: stderr: %s", name, r.stderr)
		}
		left, err := os.ReadDir(dir)
		if err != nil || len(left) != 1 {
			t.Errorf("%s: the folder has %v, %v", name, left, err)
		}
	}
	for _, args := range [][]string{
		{"--content", "tar", "x", "y"}, {"--content", "archive", "--force", "x", "y"}, {"--content", "archive", "--size", "1Gi", "x", "y"},
		{"--content", "archive", "--format", "raw", "x", "y"}, {"--content", "archive", "--disk", "1", "x", "y"}, {"--content", "archive", "--preallocate", "x", "y"},
	} {
		longshore(t, append([]string{"import"}, args...)...).must(t, exitUsage)
	}
}

// A killed import of an archive goes on where it was.
func TestKilledImportOfArchiveGoesOn(t *testing.T) {
	const size = 64 << 20
	web := peers.Nginx(t, peers.NginxOptions{LimitRate: 4 << 20})
	noise := make([]byte, size)
	rand.NewChaCha8([32]byte{1}).Read(noise)
	b := images.Archive(t, images.Folder("."), images.Folder("d"), images.File("d/first", "first"), images.File("d/big", string(noise)), images.Symlink("s", "d/first"))
	tar := filepath.Join(t.TempDir(), "x.tar")
	if err := os.WriteFile(tar, b, 0o600); err != nil {
		t.Fatal(err)
	}
	url := web.Put("x.tar", b)
	target := filepath.Join(t.TempDir(), "folder")
	cmd := command(t, "import", "--content", "archive", url, target)
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// The first line comes in mid-transfer: see TestKilledImportGoesOn.
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Kill()
	_, _ = io.ReadAll(out)
	_ = cmd.Wait()
	web.Settle()
	before := web.Sent()
	if before >= size {
		t.Fatalf("the server had sent all %d bytes: the kill came too late", before)
	}
	r := longshore(t, "import", "--content", "archive", url, target).must(t, 0)
	if !strings.Contains(r.stderr, "going on") {
		t.Errorf("stderr: %s", r.stderr)
	}
	sameTree(t, target, tar)
}
