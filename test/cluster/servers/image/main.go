// Command image writes the container images of the test cluster, one tar file
// each, from static programs and the machine's busybox.
//
// An image has one layer: the program under its own name, and for busybox the
// links of its applets.
package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// images are named as upstream names them, so that the manifests of others find
// them.
var images = []struct {
	file    string
	program string
	refs    []string
}{
	{"pause.tar", "pause", []string{"cluster.test/pause:1", "registry.k8s.io/pause:3.10.2"}},
	{"coredns.tar", "coredns", []string{"registry.k8s.io/coredns/coredns:v1.15.0"}},
	{"csi-provisioner.tar", "csi-provisioner", []string{"registry.k8s.io/sig-storage/csi-provisioner:v6.4.0"}},
	{"csi-snapshotter.tar", "csi-snapshotter", []string{"registry.k8s.io/sig-storage/csi-snapshotter:v8.7.0"}},
	{"csi-resizer.tar", "csi-resizer", []string{"registry.k8s.io/sig-storage/csi-resizer:v2.3.0"}},
	{"snapshot-controller.tar", "snapshot-controller", []string{"registry.k8s.io/sig-storage/snapshot-controller:v8.7.0"}},
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: image PROGRAMS IMAGES")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(programs, out string) error {
	for _, i := range images {
		var l layer
		l.add("/"+i.program, filepath.Join(programs, i.program))
		if err := l.write(filepath.Join(out, i.file), []string{"/" + i.program}, i.refs); err != nil {
			return fmt.Errorf("write %s: %w", i.file, err)
		}
	}
	if err := busybox(filepath.Join(out, "busybox.tar")); err != nil {
		return fmt.Errorf("write busybox.tar: %w", err)
	}
	return nil
}

func busybox(out string) error {
	const program = "/bin/busybox"
	applets, err := exec.Command(program, "--list").Output()
	if err != nil {
		return fmt.Errorf("list the applets of %s: %w", program, err)
	}
	var l layer
	l.add(program, program)
	for _, applet := range strings.Fields(string(applets)) {
		if applet != "busybox" {
			l.link("/bin/"+applet, program)
		}
	}
	l.text("/etc/passwd", "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
	l.text("/etc/group", "root:x:0:\nnogroup:x:65534:\n")
	l.text("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
	return l.write(out, nil, []string{"cluster.test/busybox:1"})
}

// layer gathers the files of an image; the first error stays until write.
type layer struct {
	buf  bytes.Buffer
	tar  *tar.Writer
	dirs map[string]bool
	err  error
}

func (l *layer) entry(h tar.Header, content []byte) {
	if l.tar == nil {
		l.tar = tar.NewWriter(&l.buf)
		l.dirs = map[string]bool{"/": true}
	}
	if dir := path.Dir(h.Name); !l.dirs[dir] {
		l.dirs[dir] = true
		l.entry(tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	if l.err != nil {
		return
	}
	h.Name = strings.TrimPrefix(h.Name, "/")
	h.Size = int64(len(content))
	if l.err = l.tar.WriteHeader(&h); l.err == nil {
		_, l.err = l.tar.Write(content)
	}
}

func (l *layer) add(name, file string) {
	content, err := os.ReadFile(file)
	if err != nil && l.err == nil {
		l.err = err
	}
	l.entry(tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755}, content)
}

func (l *layer) text(name, content string) {
	l.entry(tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, []byte(content))
}

func (l *layer) link(name, target string) {
	l.entry(tar.Header{Name: name, Typeflag: tar.TypeSymlink, Mode: 0o777, Linkname: target}, nil)
}

func (l *layer) write(out string, entrypoint, refs []string) error {
	l.entry(tar.Header{Name: "/tmp", Typeflag: tar.TypeDir, Mode: 0o1777}, nil)
	if l.err != nil {
		return l.err
	}
	if err := l.tar.Close(); err != nil {
		return err
	}
	blob, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(l.buf.Bytes())), nil
	})
	if err != nil {
		return err
	}
	image, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		OS:           "linux",
		Architecture: runtime.GOARCH,
		RootFS:       v1.RootFS{Type: "layers"},
		Config: v1.Config{
			Env:        []string{"PATH=/bin:/sbin:/usr/bin:/usr/sbin"},
			Entrypoint: entrypoint,
			WorkingDir: "/",
		},
	})
	if err != nil {
		return err
	}
	if image, err = mutate.AppendLayers(image, blob); err != nil {
		return err
	}
	named := map[name.Reference]v1.Image{}
	for _, r := range refs {
		ref, err := name.ParseReference(r)
		if err != nil {
			return err
		}
		named[ref] = image
	}
	return tarball.MultiRefWriteToFile(out, named)
}
