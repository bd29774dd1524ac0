// Package images makes disk images whose every byte is known, with qemu-img and
// qemu-io.
//
// It knows nothing of the engine that reads them: the content is kept in memory
// beside the file, and QEMU's own reading of it is the oracle. The same seed
// makes the same image.
package images

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Image is a disk image in a file of the test's temporary folder.
type Image struct {
	Path string
	// Format is "qcow2" or "raw"; Compression around it "gzip" or "".
	Format      string
	Compression string
	// Variant says what is special about it, for messages.
	Variant string
	// Content is what a guest reads.
	Content []byte

	plain string // the file without the compression around it
}

// Random makes an image of 1 to 12 MiB. A third are raw, of any length in
// bytes, half of those in gzip; the others are qcow2 of all versions, cluster
// sizes, compressions and preallocations.
func Random(t testing.TB, seed uint64) Image {
	t.Helper()
	m := &maker{t: t, rnd: rand.New(rand.NewPCG(seed, 0x10e6)), dir: t.TempDir()}
	switch m.rnd.IntN(6) {
	case 0:
		return m.raw()
	case 1:
		return Gzip(t, m.raw(), m.rnd)
	}
	return m.qcow2()
}

// Raw makes a raw image of size bytes that begins with a boot sector.
func Raw(t testing.TB, seed uint64, size int64) Image {
	t.Helper()
	m := &maker{t: t, rnd: rand.New(rand.NewPCG(seed, 0x10e6)), dir: t.TempDir(), content: make([]byte, size)}
	return m.rawOf()
}

// Convert makes the image anew with "qemu-img convert -O qcow2" and its arguments.
func Convert(t testing.TB, img Image, args ...string) Image {
	t.Helper()
	out := Image{Path: filepath.Join(t.TempDir(), "disk.qcow2"), Format: "qcow2", Variant: strings.Join(args, " "), Content: img.Content}
	if rest := len(out.Content) % 512; rest > 0 {
		out.Content = append(bytes.Clone(out.Content), make([]byte, 512-rest)...)
	}
	out.plain = out.Path
	run(t, "qemu-img", append(append([]string{"convert", "-f", img.Format, "-O", "qcow2"}, args...), img.plain, out.Path)...)
	return out
}

// Gzip compresses the image's file, in one member or several.
func Gzip(t testing.TB, img Image, rnd *rand.Rand) Image {
	t.Helper()
	b, err := os.ReadFile(img.Path)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	members := 1 + rnd.IntN(3)
	for i := range members {
		w, err := gzip.NewWriterLevel(&out, 1+rnd.IntN(9))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(b[len(b)*i/members : len(b)*(i+1)/members]); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	img.Compression = "gzip"
	img.Variant += fmt.Sprintf(" in %d gzip members", members)
	img.Path += ".gz"
	if err := os.WriteFile(img.Path, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return img
}

// Oracle returns what "qemu-img convert -O raw" makes of the image; it fills
// the last 512 bytes up with zeros.
func (i Image) Oracle(t testing.TB) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "oracle.raw")
	run(t, "qemu-img", "convert", "-f", qemuName(i.Format), "-O", "raw", i.plain, out)
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// maker makes one image.
type maker struct {
	t       testing.TB
	rnd     *rand.Rand
	dir     string
	content []byte
	// touched are the clusters of a qcow2 image that were written.
	touched map[int64]bool
}

func (m *maker) raw() Image {
	m.content = make([]byte, 1<<20+m.rnd.Int64N(7<<20))
	return m.rawOf()
}

func (m *maker) rawOf() Image {
	for range 2 + m.rnd.IntN(20) {
		off, n := m.somewhere(1)
		m.fill(off, n)
	}
	// The end of a boot sector, or nobody could tell that this is a disk.
	copy(m.content[510:], "\x55\xaa")
	path := filepath.Join(m.dir, "disk.raw")
	if err := os.WriteFile(path, m.content, 0o600); err != nil {
		m.t.Fatal(err)
	}
	return Image{Path: path, Format: "raw", Variant: fmt.Sprintf("raw of %d bytes", len(m.content)), Content: m.content, plain: path}
}

// somewhere returns a part of the disk, aligned to align bytes.
func (m *maker) somewhere(align int64) (off, n int64) {
	size := int64(len(m.content)) / align
	off = m.rnd.Int64N(size)
	n = 1 + m.rnd.Int64N(min(size-off, max(1, 1<<20/align)))
	return off * align, n * align
}

// fill puts content there: one byte repeated, words that compress, or noise.
func (m *maker) fill(off, n int64) {
	p := m.content[off : off+n]
	switch kind := m.rnd.IntN(4); kind {
	case 0:
		b := byte(m.rnd.Uint32())
		for i := range p {
			p[i] = b
		}
	case 1:
		for i := range p {
			p[i] = "longshore "[m.rnd.IntN(10)]
		}
	case 2: // zeros written as data
		clear(p)
	default:
		for i := 0; i < len(p); i += 8 {
			var word [8]byte
			binary.LittleEndian.PutUint64(word[:], m.rnd.Uint64())
			copy(p[i:], word[:])
		}
	}
}

func (m *maker) pick(of ...string) string { return of[m.rnd.IntN(len(of))] }

// qcow2 makes an empty image and writes to it with qemu-io, or converts a raw one.
func (m *maker) qcow2() Image {
	bits := 9 + m.rnd.IntN(13)
	if m.rnd.IntN(3) == 0 {
		bits = 16 // what nearly all images have
	}
	cluster := int64(1) << bits
	options := []string{"cluster_size=" + strconv.FormatInt(cluster, 10)}
	compat := m.pick("0.10", "1.1", "1.1")
	options = append(options, "compat="+compat)
	if compat == "1.1" {
		options = append(options, "compression_type="+m.pick("zlib", "zstd"))
		if m.rnd.IntN(3) == 0 {
			options = append(options, "refcount_bits="+m.pick("1", "8", "64"))
		}
		if bits >= 14 && m.rnd.IntN(3) == 0 {
			options = append(options, "extended_l2=on")
		}
	}
	m.content = make([]byte, 512*(2048+m.rnd.Int64N(20<<10)))
	path := filepath.Join(m.dir, "disk.qcow2")
	img := Image{Path: path, Format: "qcow2", plain: path}

	if m.rnd.IntN(3) == 0 { // converted, as images are published
		img.Variant = strings.Join(options, ",")
		args := []string{"-o", img.Variant}
		if m.rnd.IntN(3) > 0 {
			args = append(args, "-c")
		}
		if m.rnd.IntN(2) == 0 {
			args = append(args, "-W", "-m", "4") // in any order
		}
		img.Variant += " converted " + strings.Join(args[2:], " ")
		run(m.t, "qemu-img", append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...), m.rawOf().Path, path)...)
		img.Content = m.content
		return img
	}

	m.touched = map[int64]bool{}
	if preallocation := m.pick("off", "off", "off", "metadata", "falloc", "full"); preallocation != "off" {
		options = append(options, "preallocation="+preallocation)
		for c := range int64(len(m.content))/cluster + 1 {
			m.touched[c] = true
		}
	}
	img.Variant = strings.Join(options, ",")
	run(m.t, "qemu-img", "create", "-q", "-f", "qcow2", "-o", img.Variant, path, strconv.Itoa(len(m.content)))
	m.write(path, cluster)
	if m.rnd.IntN(4) == 0 && !slices.Contains(options, "refcount_bits=1") {
		img.Variant += " with a snapshot"
		run(m.t, "qemu-img", "snapshot", "-c", "before", path)
		m.write(path, cluster)
	} else if m.rnd.IntN(4) == 0 {
		img.Variant += " resized"
		m.content = append(m.content, make([]byte, 512*(1+m.rnd.Int64N(4096)))...)
		run(m.t, "qemu-img", "resize", "-q", "-f", "qcow2", path, strconv.Itoa(len(m.content)))
		m.write(path, cluster)
	}
	img.Content = m.content
	return img
}

// write puts random content into the image at path: data, compressed clusters,
// zeros that are marked and zeros that are discarded.
func (m *maker) write(path string, cluster int64) {
	args := []string{"-f", "qcow2", "-d", "unmap"}
	add := func(format string, a ...any) { args = append(args, "-c", fmt.Sprintf(format, a...)) }
	data := func(off, n int64, how string) {
		add("write -q %s -s %s %d %d", how, m.file(fmt.Sprintf("%d-%d", len(args), off), m.content[off:off+n]), off, n)
	}
	touch := func(off, n int64) {
		for c := off / cluster; c*cluster < off+n; c++ {
			m.touched[c] = true
		}
	}
	whole := int64(len(m.content)) >= cluster
	for range 4 + m.rnd.IntN(24) {
		switch kind := m.rnd.IntN(6); {
		case kind == 0:
			off, n := m.somewhere(512)
			clear(m.content[off : off+n])
			add("write -q -z %d %d", off, n)
			touch(off, n)
		case kind == 1 && whole:
			off, n := m.somewhere(cluster)
			clear(m.content[off : off+n])
			add("write -q -z -u %d %d", off, n)
			touch(off, n)
		case kind <= 3 && whole:
			// QEMU compresses one cluster at a time, and none that was written before.
			off, n := m.somewhere(cluster)
			n = min(n, 24*cluster)
			m.fill(off, n)
			for at := off; at < off+n; at += cluster {
				how := "-c"
				if m.touched[at/cluster] {
					how = ""
				}
				data(at, cluster, how)
				touch(at, cluster)
			}
		default:
			off, n := m.somewhere(512)
			m.fill(off, n)
			data(off, n, "")
			touch(off, n)
		}
	}
	run(m.t, "qemu-io", append(args, path)...)
}

func (m *maker) file(name string, b []byte) string {
	path := filepath.Join(m.dir, name)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		m.t.Fatal(err)
	}
	return path
}

// run runs a tool; an error ends the test with what the tool said.
func run(t testing.TB, tool string, args ...string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), tool, args...).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("failed")) {
		t.Fatalf("%s %s: %v\n%s", tool, strings.Join(args, " "), err, out)
	}
}
