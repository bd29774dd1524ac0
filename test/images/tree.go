package images

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Tree makes a folder of up to some hundred random files: names of any bytes, short
// and longer than any tar header has room for unless short is set, empty files and folders, files
// with holes, links of both kinds, modes and times.
func Tree(t testing.TB, rnd *rand.Rand, root string, short bool) {
	t.Helper()
	folders, files := []string{root}, []string{}
	name := func() string {
		dir := folders[rnd.IntN(len(folders))]
		b := make([]byte, 1+rnd.IntN(12))
		if !short && rnd.IntN(6) == 0 {
			b = make([]byte, 100+rnd.IntN(156))
		}
		for i := range b {
			if b[i] = byte(1 + rnd.IntN(255)); b[i] == '/' || short || rnd.IntN(3) > 0 {
				b[i] = "abcdefghijklmnopqrstuvwxyz"[rnd.IntN(26)]
			}
		}
		if string(b) == "." || string(b) == ".." {
			b = []byte("dots")
		}
		path := filepath.Join(dir, string(b))
		if _, err := os.Lstat(path); err == nil || len(path)-len(root) > 3000 || short && len(path)-len(root) > 90 {
			return filepath.Join(root, fmt.Sprintf("n%d", rnd.Uint32()))
		}
		return path
	}
	for range 5 + rnd.IntN(60) {
		path := name()
		var err error
		switch kind := rnd.IntN(10); {
		case kind < 3:
			if err = os.Mkdir(path, 0o755); err == nil {
				folders = append(folders, path)
			}
		case kind == 3 && len(files) > 0:
			err = os.Link(files[rnd.IntN(len(files))], path)
		case kind == 4:
			// Any target in the tree, there or not, that does not go through a link and back.
			to, rerr := filepath.Rel(filepath.Dir(path), name())
			if err = rerr; err == nil {
				err = os.Symlink(to, path)
			}
		default:
			if err = randomFile(rnd, path); err == nil {
				files = append(files, path)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Type() != fs.ModeSymlink {
			mode := uint32(rnd.IntN(0o1000))
			if d.IsDir() && rnd.IntN(2) == 0 {
				mode |= unix.S_ISVTX
			}
			defer func() { err = unix.Chmod(path, mode) }()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	must(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		all = append(all, path)
		return err
	}))
	for _, path := range slices.Backward(all) {
		at := time.Unix(rnd.Int64N(4e9), rnd.Int64N(1e9))
		if !short && rnd.IntN(4) == 0 {
			at = at.AddDate(-100, 0, 0)
		}
		ts := []unix.Timespec{unix.NsecToTimespec(at.UnixNano()), unix.NsecToTimespec(at.UnixNano())}
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, unix.AT_SYMLINK_NOFOLLOW))
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// randomFile is empty, small, or of some MiB with holes, zeros and data of any alignment.
func randomFile(rnd *rand.Rand, path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	size := []int64{0, rnd.Int64N(2000), 512 * rnd.Int64N(20), rnd.Int64N(64 << 10), rnd.Int64N(5 << 20)}[rnd.IntN(5)]
	for range rnd.IntN(6) {
		if size == 0 {
			break
		}
		at := rnd.Int64N(size)
		if rnd.IntN(2) == 0 {
			at = at / 4096 * 4096
		}
		b := make([]byte, 1+rnd.Int64N(min(size-at, 300<<10)))
		if rnd.IntN(4) > 0 { // else zeros that are written
			seed := [32]byte{}
			binary.LittleEndian.PutUint64(seed[:], rnd.Uint64())
			rand.NewChaCha8(seed).Read(b)
		}
		if _, err := f.WriteAt(b, at); err != nil {
			return err
		}
	}
	return f.Truncate(size)
}

// Found is what Walk tells of a file.
type Found struct {
	Mode   uint32
	Time   time.Time
	Size   int64
	Blocks int64 // of 512 bytes
	// Content is a digest, or the target of a link.
	Content string
	// First is the least of the names of the same file.
	First string
}

// Walk tells what is in a folder, by name.
func Walk(t testing.TB, root string) map[string]Found {
	t.Helper()
	all, first := map[string]Found{}, map[uint64]string{}
	must(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		f := Found{Mode: st.Mode, Time: info.ModTime()}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			f.Content, err = os.Readlink(path)
		case unix.S_IFREG:
			f.Size, f.Blocks = st.Size, st.Blocks
			var b []byte
			b, err = os.ReadFile(path)
			f.Content = fmt.Sprintf("%x", sha256.Sum256(b))
			if _, ok := first[st.Ino]; !ok {
				first[st.Ino] = name
			}
			f.First = first[st.Ino]
		}
		all[name] = f
		return err
	}))
	return all
}

// Pack packs a folder's content with GNU tar and further arguments.
func Pack(t testing.TB, folder, path string, args ...string) {
	t.Helper()
	run(t, "tar", append([]string{"-C", folder, "-cf", path}, append(args, ".")...)...)
}

// Unpack unpacks with GNU tar, which is the oracle.
func Unpack(t testing.TB, path, folder string) {
	t.Helper()
	must(t, os.MkdirAll(folder, 0o755))
	out, err := exec.CommandContext(t.Context(), "tar", "-C", folder, "-xpf", path, "--no-same-owner").CombinedOutput()
	if err != nil && !strings.Contains(string(out), "implausibly old") {
		t.Fatalf("tar -x: %v\n%s", err, out)
	}
}
