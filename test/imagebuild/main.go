// Command imagebuild puts the container image together without a container
// engine: one layer of Debian packages, one of the longshore binaries.
//
// It knows nothing of what the binaries do. It needs Debian's apt and dpkg-deb
// and no privilege; the packages come, verified, by apt from wherever this
// machine's sources point.
//
//	imagebuild -binaries bin/longshore,bin/longshore-mover -version 0.1.0 -o out/longshore-image.tar
//
// The layer of packages is the same bytes for the same packages. It is kept in
// the user's cache folder (longshore/image) under a hash of their versions.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

//go:embed packages.txt
var wanted string

// layout changes whenever the same packages make another layer.
const layout = "1"

// leftOut are dependencies that nothing we start needs; TestToolsStart holds the
// image to it. Interpreters above all have no place in a privileged container.
var leftOut = []struct{ pattern, why string }{
	{"debconf*", "asks questions at installation only"},
	{"debianutils", "used by installation scripts only"},
	{"dpkg", "the image has no packages to come"},
	{"init-system-helpers", "no init in a container"},
	{"libfile-find-rule-perl", "usrmerge only"},
	{"libgdbm*", "perl only"},
	{"libicu*", "xfs_scrub and nbdkit's nbd plugin only"},
	{"libnbd0", "nbdkit's nbd plugin only"},
	{"libnsl2", "python only"},
	{"libnumber-compare-perl", "usrmerge only"},
	{"libperl5*", "usrmerge only"},
	{"libpython3*", "xfs_scrub_all only"},
	{"libreadline8*", "python only"},
	{"libsqlite3-0", "python only"},
	{"libtext-glob-perl", "usrmerge only"},
	{"libtirpc*", "python only"},
	{"libtorrent-rasterbar*", "nbdkit's torrent plugin only"},
	{"libxml2*", "nbdkit's nbd plugin only"},
	{"media-types", "python only"},
	{"openssl", "used by ca-certificates at installation only"},
	{"perl*", "usrmerge only"},
	{"python3*", "xfs_scrub_all only"},
	{"readline-common", "python only"},
	{"tar", "used by dpkg only"},
	{"usrmerge", "the layer is merged from the start"},
	{"util-linux-extra", "clocks and terminals only"},
}

// unwanted says why a package that others depend on stays out; "" when it does not.
func unwanted(pkg string) string {
	for _, l := range leftOut {
		if ok, err := path.Match(l.pattern, pkg); err != nil || ok {
			return l.why
		}
	}
	return ""
}

// withoutTheirLibraries are files of wanted packages that need what is left out.
var withoutTheirLibraries = []string{
	"usr/lib/*/nbdkit/plugins/nbdkit-nbd-plugin.so",
	"usr/lib/*/nbdkit/plugins/nbdkit-torrent-plugin.so",
	"usr/sbin/xfs_scrub",
	"usr/sbin/xfs_scrub_all",
}

// epoch is the time of every file: an image must not differ by when it was made.
var epoch = time.Unix(0, 0).UTC()

func main() {
	log.SetFlags(0)
	log.SetPrefix("imagebuild: ")
	binaries := flag.String("binaries", "bin/longshore,bin/longshore-mover", "files for /usr/bin; the first is what the container runs")
	version := flag.String("version", "dev", "version, the tag of the image")
	repository := flag.String("repository", "ghcr.io/longshore-io/longshore", "repository in the image's reference")
	out := flag.String("o", "out/longshore-image.tar", "tarball to write, for ctr images import or docker load")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, strings.Split(*binaries, ","), *repository+":"+*version, *version, *out); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, binaries []string, reference, version, out string) error {
	ref, err := name.NewTag(reference, name.StrictValidation)
	if err != nil {
		return err
	}
	base, err := baseLayer(ctx)
	if err != nil {
		return fmt.Errorf("layer of packages: %w", err)
	}
	own, err := binaryLayer(binaries)
	if err != nil {
		return fmt.Errorf("layer of %v: %w", binaries, err)
	}
	img, err := assemble(filepath.Base(binaries[0]), version, base, own)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	tmp := out + ".tmp"
	defer os.Remove(tmp)
	if err := tarball.WriteToFile(tmp, ref, img); err != nil {
		return err
	}
	if err := os.Rename(tmp, out); err != nil {
		return err
	}
	digest, err := img.Digest()
	if err != nil {
		return err
	}
	info, err := os.Stat(out)
	if err != nil {
		return err
	}
	fmt.Printf("%s: %s, %d bytes, %s\n", out, ref, info.Size(), digest)
	return nil
}

func assemble(entry, version string, base, own v1.Layer) (v1.Image, error) {
	img := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	img = mutate.ConfigMediaType(img, types.OCIConfigJSON)
	img, err := mutate.Append(img,
		mutate.Addendum{Layer: base, History: v1.History{CreatedBy: "Debian packages: " + strings.Join(packageNames(), " ")}},
		mutate.Addendum{Layer: own, History: v1.History{CreatedBy: "longshore " + version}},
	)
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Created = v1.Time{Time: epoch}
	config.Config = v1.Config{
		Entrypoint: []string{"/usr/bin/" + entry},
		Env:        []string{"PATH=/usr/sbin:/usr/bin", "LC_ALL=C"},
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":    "longshore",
			"org.opencontainers.image.version":  version,
			"org.opencontainers.image.source":   "https://github.com/longshore-io/longshore",
			"org.opencontainers.image.licenses": "Apache-2.0",
		},
	}
	return mutate.ConfigFile(img, config)
}

func packageNames() []string {
	var names []string
	for _, line := range strings.Split(wanted, "\n") {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			names = append(names, line)
		}
	}
	return names
}

// baseLayer finds the layer of packages in the cache, or makes it.
func baseLayer(ctx context.Context) (v1.Layer, error) {
	debs, err := closure(ctx)
	if err != nil {
		return nil, err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(layout + "\n" + strings.Join(debs, "\n")))
	cache = filepath.Join(cache, "longshore", "image")
	file := filepath.Join(cache, hex.EncodeToString(sum[:8])+".tar.gz")
	if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(cache, 0o755); err != nil {
			return nil, err
		}
		start := time.Now()
		if err := makeBase(ctx, debs, file); err != nil {
			return nil, err
		}
		fmt.Printf("%s: %d Debian packages in %s\n", file, len(debs), time.Since(start).Round(100*time.Millisecond))
	} else if err != nil {
		return nil, err
	}
	return tarball.LayerFromFile(file, tarball.WithMediaType(types.OCILayer))
}

// fromNothing makes apt look at a machine without any package.
var fromNothing = []string{"-o", "Dir::State::status=/dev/null", "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root", "-o", "APT::Install-Recommends=0", "-o", "APT::Install-Suggests=0"}

// closure lists the file names (NAME_VERSION_ARCH.deb) of the wanted packages
// and of all that they depend on, but for what is left out.
func closure(ctx context.Context) ([]string, error) {
	args := append(append([]string{}, fromNothing...), "--print-uris", "-qq", "-y", "install")
	out, err := tool(ctx, "", "apt-get", append(args, packageNames()...)...)
	if err != nil {
		return nil, fmt.Errorf("%w: run apt-get update, this machine may know no packages", err)
	}
	var debs []string
	for _, line := range strings.Split(string(out), "\n") {
		f := strings.Fields(line) // 'URI' FILE SIZE HASH
		if len(f) < 3 || !strings.HasSuffix(f[1], ".deb") {
			continue
		}
		if pkg, _, _ := strings.Cut(f[1], "_"); unwanted(pkg) == "" {
			debs = append(debs, f[1])
		}
	}
	if len(debs) == 0 {
		return nil, errors.New("apt-get names no package to fetch")
	}
	sort.Strings(debs)
	return debs, nil
}

// makeBase fetches the packages and writes them as one layer to file.
func makeBase(ctx context.Context, debs []string, file string) error {
	tmp, err := os.MkdirTemp(filepath.Dir(file), "tmp-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := os.MkdirAll(filepath.Join(tmp, "partial"), 0o755); err != nil {
		return err
	}
	var exact []string
	for _, deb := range debs {
		pkg, version, err := split(deb)
		if err != nil {
			return err
		}
		exact = append(exact, pkg+"="+version)
	}
	args := append(append([]string{}, fromNothing...), "-qq", "download")
	if _, err := tool(ctx, tmp, "apt-get", append(args, exact...)...); err != nil {
		return err
	}
	t := tree{}
	for _, deb := range debs {
		if err := t.add(ctx, filepath.Join(tmp, deb)); err != nil {
			return fmt.Errorf("%s: %w", deb, err)
		}
	}
	if err := t.finish(); err != nil {
		return err
	}
	layer := filepath.Join(tmp, "layer.tar.gz")
	f, err := os.Create(layer)
	if err != nil {
		return err
	}
	defer f.Close()
	z := gzip.NewWriter(f)
	if err := t.write(z); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return os.Rename(layer, file)
}

// split tells name and version of a .deb file as apt names it: an epoch's colon
// is written %3a.
func split(deb string) (pkg, version string, err error) {
	f := strings.Split(strings.TrimSuffix(deb, ".deb"), "_")
	if len(f) != 3 {
		return "", "", fmt.Errorf("%q is not NAME_VERSION_ARCH.deb", deb)
	}
	return f[0], strings.ReplaceAll(f[1], "%3a", ":"), nil
}

// tree is the root filesystem: by path without a leading slash.
type tree map[string]entry

type entry struct {
	header  tar.Header
	content []byte
}

// add unpacks a package. Programs and libraries of Debian may still live in
// /bin or /lib; they go where those folders point since /usr was merged.
func (t tree) add(ctx context.Context, deb string) error {
	control, err := tool(ctx, "", "dpkg-deb", "-f", deb)
	if err != nil {
		return err
	}
	t.record(control)
	files, err := tool(ctx, "", "dpkg-deb", "--fsys-tarfile", deb)
	if err != nil {
		return err
	}
	r := tar.NewReader(bytes.NewReader(files))
	for {
		h, err := r.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		p := merged(h.Name)
		if p == "" || !needed(p) {
			continue
		}
		content, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		e := entry{header: tar.Header{Typeflag: h.Typeflag, Mode: h.Mode & 0o1777, Linkname: h.Linkname}, content: content}
		switch h.Typeflag {
		case tar.TypeDir:
			if _, there := t[p]; there {
				continue
			}
		case tar.TypeLink:
			e.header.Linkname = merged(h.Linkname)
		case tar.TypeReg, tar.TypeSymlink:
		default:
			return fmt.Errorf("%s: a file of type %q", h.Name, h.Typeflag)
		}
		t[p] = e
	}
}

// record keeps the package where scanners of images look for it.
func (t tree) record(control []byte) {
	const status = "var/lib/dpkg/status"
	e := t[status]
	e.header = tar.Header{Typeflag: tar.TypeReg, Mode: 0o644}
	paragraph := strings.Replace(strings.TrimSpace(string(control)), "\n", "\nStatus: install ok installed\n", 1)
	e.content = append(e.content, paragraph+"\n\n"...)
	t[status] = e
}

var mergedFolders = []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"}

func merged(p string) string {
	p = strings.Trim(path.Clean("/"+p), "/")
	first, _, _ := strings.Cut(p, "/")
	if slices.Contains(mergedFolders, first) {
		return "usr/" + p
	}
	return p
}

// needed leaves out what a container has no reader for; licences stay.
func needed(p string) bool {
	for _, dir := range []string{"usr/share/doc/", "usr/share/man/", "usr/share/info/", "usr/share/locale/", "usr/share/lintian/", "usr/share/bash-completion/", "usr/share/bug/", "lib/systemd/", "usr/lib/systemd/", "etc/cron.d/", "etc/init.d/"} {
		if strings.HasPrefix(p+"/", dir) {
			return strings.HasPrefix(p, "usr/share/doc/") && path.Base(p) == "copyright"
		}
	}
	for _, pattern := range withoutTheirLibraries {
		if ok, err := path.Match(pattern, p); err != nil || ok {
			return false
		}
	}
	return true
}

// finish adds what the packages' installation scripts would have made.
func (t tree) finish() error {
	for _, dir := range mergedFolders {
		if _, there := t["usr/"+dir]; there {
			t[dir] = entry{header: tar.Header{Typeflag: tar.TypeSymlink, Linkname: "usr/" + dir, Mode: 0o777}}
		}
	}
	if _, there := t["usr/bin/dash"]; !there {
		return errors.New("no dash among the packages")
	}
	t["usr/bin/sh"] = entry{header: tar.Header{Typeflag: tar.TypeSymlink, Linkname: "dash", Mode: 0o777}}
	for _, dir := range []string{"dev", "proc", "run", "sys", "var", "var/lib", "root"} {
		t[dir] = entry{header: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755}}
	}
	t["tmp"] = entry{header: tar.Header{Typeflag: tar.TypeDir, Mode: 0o1777}}
	text := func(p, content string) {
		t[p] = entry{header: tar.Header{Typeflag: tar.TypeReg, Mode: 0o644}, content: []byte(content)}
	}
	// 107 is the user of movers and of KubeVirt's disk images.
	text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nqemu:x:107:107:movers:/nonexistent:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n")
	text("etc/group", "root:x:0:\ntty:x:5:\ndisk:x:6:\nqemu:x:107:\nnogroup:x:65534:\n")
	text("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")

	var roots []string
	for p := range t {
		if strings.HasPrefix(p, "usr/share/ca-certificates/") && strings.HasSuffix(p, ".crt") {
			roots = append(roots, p)
		}
	}
	if len(roots) == 0 {
		return errors.New("no certificates among the packages")
	}
	sort.Strings(roots)
	var bundle bytes.Buffer
	for _, p := range roots {
		bundle.Write(bytes.TrimSpace(t[p].content))
		bundle.WriteByte('\n')
	}
	text("etc/ssl/certs/ca-certificates.crt", bundle.String())
	return nil
}

// write writes the tree in order of path, each folder before what is in it and
// each file before a hard link to it.
func (t tree) write(w io.Writer) error {
	for p := range t {
		for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
			if _, there := t[dir]; !there {
				t[dir] = entry{header: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755}}
			}
		}
	}
	var first, links []string
	for p, e := range t {
		if e.header.Typeflag == tar.TypeLink {
			if _, there := t[e.header.Linkname]; !there {
				return fmt.Errorf("%s is a link to %s, which is not there", p, e.header.Linkname)
			}
			links = append(links, p)
		} else {
			first = append(first, p)
		}
	}
	sort.Strings(first)
	sort.Strings(links)
	tw := tar.NewWriter(w)
	for _, p := range append(first, links...) {
		e := t[p]
		h := e.header
		h.Name, h.ModTime, h.Format = p, epoch, tar.FormatPAX
		if h.Typeflag == tar.TypeDir {
			h.Name += "/"
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(e.content))
		}
		if err := tw.WriteHeader(&h); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := tw.Write(e.content); err != nil {
				return fmt.Errorf("%s: %w", p, err)
			}
		}
	}
	return tw.Close()
}

func binaryLayer(binaries []string) (v1.Layer, error) {
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, dir := range []string{"usr/", "usr/bin/"} {
		if err := tw.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755, ModTime: epoch}); err != nil {
			return nil, err
		}
	}
	for _, file := range binaries {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if err := tw.WriteHeader(&tar.Header{Name: "usr/bin/" + filepath.Base(file), Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(content)), ModTime: epoch}); err != nil {
			return nil, err
		}
		if _, err := tw.Write(content); err != nil {
			return nil, err
		}
	}
	if err := tw.Close(); err != nil {
		return nil, err
	}
	opener := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil }
	// The binary changes at each build: compressing it well would cost more than it saves.
	return tarball.LayerFromOpener(opener, tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(gzip.BestSpeed))
}

// toolError is what a tool that failed said last.
type toolError struct {
	name, last string
	err        error
}

func (e *toolError) Error() string { return fmt.Sprintf("%s: %v: %s", e.name, e.err, e.last) }
func (e *toolError) Unwrap() error { return e.err }

func tool(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &errs
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(errs.String()), "\n")
		return nil, &toolError{name, lines[len(lines)-1], err}
	}
	return out.Bytes(), nil
}
