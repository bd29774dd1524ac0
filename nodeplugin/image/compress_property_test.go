package image_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"

	"github.com/longshore-io/longshore/nodeplugin/blockcopy"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// packers are commands as people use them; a file's parts are found where parts
// is true.
var packers = []struct {
	name, command string
	parts         bool
}{
	{"gzip", "gzip -1 -c", false},
	{"gzip of several members", "head -c 700001 $0 | gzip -c; tail -c +700002 $0 | gzip -9 -c", false},
	{"xz", "xz -0 -c", false},
	{"xz -9", "xz -9 -c", false},
	{"xz -e with a check of 32 bits", "xz -1e --check=crc32 -c", false},
	{"xz with SHA-256", "xz -0 --check=sha256 -c", false},
	{"xz without a check", "xz -0 --check=none -c", false},
	{"xz with other literals", "xz -c --lzma2=preset=1,lc=0,lp=4,pb=0", false},
	{"xz with other positions", "xz -c --lzma2=preset=2,lc=4,lp=0,pb=4", false},
	{"xz with a short dictionary", "xz -c --lzma2=preset=6,dict=4KiB,lc=1,lp=1", false},
	{"xz with an odd dictionary", "xz -c --lzma2=preset=0,dict=98304", false},
	{"xz in blocks", "xz -0 -T2 --block-size=1MiB -c", true},
	{"xz in longer and longer blocks", "xz -0 --block-list=4KiB,100KiB,2MiB -c $0", true},
	{"xz in odd blocks", "xz -0 --block-size=300001 -c", true},
	{"xz in blocks without their lengths", "xz -0 -T1 --block-size=1MiB -c", true},
	{"xz in blocks with SHA-256", "xz -0 -T2 --block-size=2MiB --check=sha256 -c", true},
	{"xz in several streams", "head -c 700001 $0 | xz -0 -c; head -c 8 /dev/zero; tail -c +700002 $0 | xz -1 --check=crc32 --block-size=1MiB -c; head -c 4096 /dev/zero", true},
	{"zstd", "zstd -q -1 -c", false},
	{"zstd -19", "zstd -q -12 -c", false},
	{"zstd --long", "zstd -q -1 --long=27 -c", false},
	{"zstd without a checksum", "zstd -q -1 --no-check -c", false},
	{"zstd of several frames", "head -c 700001 $0 | zstd -q -c; tail -c +700002 $0 | zstd -q -c", false},
	{"pzstd", "pzstd -q -1 -p 2 -c", false},
	{"bzip2", "bzip2 -1 -c", false},
	{"bzip2 of several streams", "head -c 700001 $0 | bzip2 -c; tail -c +700002 $0 | bzip2 -9 -c", false},
}

func packed(t testing.TB, command, path string) []byte {
	t.Helper()
	if !strings.Contains(command, "$0") {
		command += ` < "$0"`
	}
	cmd := exec.Command("bash", "-e", "-o", "pipefail", "-c", command, path)
	cmd.Stderr = t.Output()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return out
}

// seekable is content in the zstd seekable format.
func seekable(t testing.TB, content []byte, frame int, summed bool) []byte {
	t.Helper()
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		t.Fatal(err)
	}
	return framed(content, frame, summed, func(part []byte) []byte { return e.EncodeAll(part, nil) })
}

// framed is that with frames that pack makes.
func framed(content []byte, frame int, summed bool, pack func(part []byte) []byte) []byte {
	var out, table []byte
	for len(content) > 0 {
		part := content[:min(frame, len(content))]
		content = content[len(part):]
		b := pack(part)
		out = append(out, b...)
		table = binary.LittleEndian.AppendUint32(table, uint32(len(b)))
		table = binary.LittleEndian.AppendUint32(table, uint32(len(part)))
		if summed {
			table = binary.LittleEndian.AppendUint32(table, uint32(xxhash.Sum64(part)))
		}
	}
	entry, flags := 8, byte(0)
	if summed {
		entry, flags = 12, 0x80
	}
	out = binary.LittleEndian.AppendUint32(out, 0x184d2a5e)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(table)+9))
	out = append(out, table...)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(table)/entry))
	return binary.LittleEndian.AppendUint32(append(out, flags), 0x8f92eab1)
}

// memory is a blob that counts what is read of it.
type memory struct {
	b    []byte
	read atomic.Int64
}

func (m *memory) Size() int64 { return int64(len(m.b)) }

func (m *memory) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	m.read.Add(int64(len(p)))
	return bytes.NewReader(m.b).ReadAt(p, off)
}

// stream is the same, that can only be read one way.
type stream struct{ b []byte }

func (s stream) Size() int64 { return -1 }
func (s stream) Stream(context.Context) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(s.b)), nil
}

// contentOf is all that an image has, read in order by one reader.
func contentOf(t *testing.T, opened *image.Opened) ([]byte, error) {
	t.Helper()
	if opened.Stream != nil {
		b, err := io.ReadAll(opened.Stream)
		return b, errors.Join(err, opened.Verify(t.Context()))
	}
	b := make([]byte, opened.Disk.Size())
	for off := 0; off < len(b); off += 256 << 10 {
		if _, err := opened.Disk.ReadAtContext(t.Context(), b[off:min(len(b), off+256<<10)], int64(off)); err != nil {
			return nil, err
		}
	}
	return b, opened.Verify(t.Context())
}

// readAll is all that an image has, copied as an import does it.
func readAll(t *testing.T, opened *image.Opened, size int) ([]byte, error) {
	t.Helper()
	dst := newTarget(t, int64(size), true)
	o := blockcopy.Options{KnownZero: true}
	var n int64
	var err error
	if opened.Disk != nil {
		n = opened.Disk.Size()
		err = blockcopy.Copy(t.Context(), dst, opened.Disk, o)
	} else {
		n, err = blockcopy.CopyStream(t.Context(), dst, opened.Stream, o)
	}
	if err == nil {
		err = opened.Verify(t.Context())
	}
	if err != nil {
		return nil, err
	}
	got, err := os.ReadFile(dst.f.Name())
	return got[:n], err
}

// What people compress with the tools that there are comes out as it was, in
// ranges and one way; in parts where the file has them.
func TestCompressions(t *testing.T) {
	img := images.Raw(t, 7, 5<<20+123*512)
	for _, row := range packers {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			checkCompressed(t, packed(t, row.command, img.Path), img, row.parts)
		})
	}
	t.Run("seekable zstd", func(t *testing.T) { checkCompressed(t, seekable(t, img.Content, 1<<20, false), img, true) })
	t.Run("seekable zstd with checksums", func(t *testing.T) {
		checkCompressed(t, seekable(t, img.Content, 123_457, true), img, true)
	})
}

func checkCompressed(t *testing.T, b []byte, img images.Image, parts bool) {
	t.Helper()
	m := &memory{b: b}
	for _, blob := range []image.Blob{m, stream{b}} {
		opened, err := image.Open(t.Context(), blob, image.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer opened.Close()
		_, ranged := blob.(image.Ranged)
		if got := opened.Disk != nil; got != (parts && ranged) {
			t.Errorf("%T is read in parts: %v", blob, got)
		}
		if opened.Info.Format != "raw" || opened.Info.Compression == "" {
			t.Errorf("recognised as %+v", opened.Info)
		}
		if ranged && opened.Info.AtLeast > int64(len(img.Content)) {
			t.Errorf("at least %d bytes of %d", opened.Info.AtLeast, len(img.Content))
		}
		m.read.Store(0)
		got, err := readAll(t, opened, len(img.Content))
		if err != nil {
			t.Fatal(err)
		}
		same(t, fmt.Sprintf("%T", blob), got, img.Content)
		if read := m.read.Load(); read > int64(len(b))*102/100 {
			t.Errorf("%d bytes were read of a file of %d", read, len(b))
		}
		if opened.Disk != nil {
			readsHold(t, opened.Disk, img, 3)
			resumed(t, opened.Disk, img)
		}
	}
}

// resumed copies what an earlier copy left out.
func resumed(t *testing.T, d image.Disk, img images.Image) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(1, 2))
	dst := newTarget(t, int64(len(img.Content)), true)
	var skip extent.Set
	for range 5 {
		off := rnd.Int64N(int64(len(img.Content))>>16) << 16
		skip.Add(off, min(1<<20, int64(len(img.Content))-off))
	}
	for _, r := range skip.Ranges() {
		if _, err := dst.f.WriteAt(img.Content[r.Start:r.End()], r.Start); err != nil {
			t.Fatal(err)
		}
	}
	if err := blockcopy.Copy(t.Context(), dst, d, blockcopy.Options{KnownZero: true, Skip: skip}); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(dst.f.Name())
	if err != nil {
		t.Fatal(err)
	}
	same(t, "resumed", got, img.Content)
}

// A structured image inside parts is read as it would be without them, and what
// nobody has read is checked at the end.
func TestStructuredInParts(t *testing.T) {
	raw := images.Raw(t, 11, 6<<20)
	for _, row := range []struct{ format, command string }{
		{"qcow2", "xz -0 --block-size=512KiB -c"}, {"vmdk", "xz -0 -T2 --block-size=1MiB -c"}, {"vhdx", "xz -0 --block-size=700001 -c"},
		{"vdi", "seekable"}, {"qcow2", "seekable"},
	} {
		t.Run(row.format+" in "+row.command, func(t *testing.T) {
			img := images.Convert(t, raw, "-O", row.format)
			var b []byte
			if row.command == "seekable" {
				content, err := os.ReadFile(img.Path)
				if err != nil {
					t.Fatal(err)
				}
				b = seekable(t, content, 500_000, true)
			} else {
				b = packed(t, row.command, img.Path)
			}
			opened, err := image.Open(t.Context(), &memory{b: b}, image.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer opened.Close()
			if opened.Info.Format != row.format || opened.Info.Compression == "" || opened.Info.VirtualSize != int64(len(raw.Content)) {
				t.Errorf("recognised as %+v", opened.Info)
			}
			got, err := readAll(t, opened, len(raw.Content))
			if err != nil {
				t.Fatal(err)
			}
			same(t, row.format, got, raw.Content)
		})
	}
}

// noise is a disk that does not compress.
func noise(t *testing.T, size int) images.Image {
	t.Helper()
	img := images.Image{Path: filepath.Join(t.TempDir(), "noise.raw"), Format: "raw", Content: make([]byte, size)}
	rand.NewChaCha8([32]byte{4}).Read(img.Content)
	copy(img.Content[510:], "\x55\xaa")
	if err := os.WriteFile(img.Path, img.Content, 0o600); err != nil {
		t.Fatal(err)
	}
	return img
}

// Several readers of a structured image do not make each other begin its parts
// again.
func TestStructuredIsReadOnce(t *testing.T) {
	raw := noise(t, 24<<20)
	for _, command := range []string{
		"qemu-img convert -f raw -O qcow2 $0 $0.qcow2; cat $0.qcow2",
		"qemu-img convert -f raw -O qcow2 -c $0 $0.qcow2; cat $0.qcow2",
		`cd "${0%/*}"; tail -c 9000000 $0 > readme; tar -c readme noise.raw`,
	} {
		content := packed(t, command, raw.Path)
		b := seekable(t, content, 12<<20, false)
		m := &memory{b: b}
		opened, err := image.Open(t.Context(), m, image.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer opened.Close()
		got, err := readAll(t, opened, len(raw.Content))
		if err != nil {
			t.Fatal(err)
		}
		same(t, command, got, raw.Content)
		if read := m.read.Load(); read > int64(len(b))*7/4 {
			t.Errorf("%s: %d bytes were read of a file of %d", command, read, len(b))
		}
	}
}

// A structured image that is read all over the place is unpacked once instead of
// being decompressed without end.
func TestDisorderInParts(t *testing.T) {
	const part, parts = 5 << 20, 14 // more than there are decoders
	raw := images.Image{Path: filepath.Join(t.TempDir(), "even.raw"), Format: "raw", Content: bytes.Repeat([]byte("longshore"), part*parts/9/512*512)}
	if err := os.WriteFile(raw.Path, raw.Content, 0o600); err != nil {
		t.Fatal(err)
	}
	content := packed(t, "qemu-img convert -f raw -O qcow2 $0 $0.qcow2; cat $0.qcow2", raw.Path)
	b := seekable(t, content, part, false)
	opened, err := image.Open(t.Context(), &memory{b: b}, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	for i := 0; err == nil; i++ {
		if i > 20*parts {
			t.Fatal("it is decompressed for ever")
		}
		at := i % parts * part * 9 / 10
		p := make([]byte, 512)
		if _, err = opened.Disk.ReadAtContext(t.Context(), p, int64(at)); err == nil {
			same(t, "a sector", p, raw.Content[at:at+len(p)])
		}
	}
	if reason(err) != fault.NeedsSpool {
		t.Fatal(err)
	}
	s := newSpool(t, 1<<30)
	if opened, err = image.Open(t.Context(), &memory{b: b}, image.Options{Spool: s}); err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	got, err := readAll(t, opened, len(raw.Content))
	if err != nil {
		t.Fatal(err)
	}
	same(t, "spooled", got, raw.Content)
	if s.written != int64(len(content)) {
		t.Errorf("%d bytes of %d went to the spool", s.written, len(content))
	}
}

// The file of a disk may be longer than the disk.
func TestSizeInsideCompression(t *testing.T) {
	raw := noise(t, 3<<20)
	for _, command := range []string{"gzip -1", "xz -0", "xz -0 --block-size=1MiB", "zstd -1"} {
		b := packed(t, "qemu-img convert -f raw -O qcow2 $0 $0.qcow2; "+command+" -c $0.qcow2", raw.Path)
		for _, blob := range []image.Blob{&memory{b: b}, stream{b}} {
			opened, err := image.Open(t.Context(), blob, image.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer opened.Close()
			if got := opened.Info; got.VirtualSize != 3<<20 || got.AtLeast != 3<<20 {
				t.Errorf("%s, %T: %+v", command, blob, got)
			}
		}
	}
}

// The check of a part that nobody reads to its end is compared all the same.
func TestPartsAreChecked(t *testing.T) {
	raw := noise(t, 3<<20)
	path := filepath.Join(t.TempDir(), "disk.qcow2")
	if out, err := exec.Command("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw.Path, path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b := packed(t, "cat $0 <(head -c 200000 /dev/zero) | xz -0 --block-size=1200KiB -c", path)
	for at := len(b) - 500_000; at < len(b)-100_000; at += 100_000 {
		bad := bytes.Clone(b)
		bad[at] ^= 1
		opened, err := image.Open(t.Context(), &memory{b: bad}, image.Options{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = readAll(t, opened, len(raw.Content))
		if f := (*fault.Fault)(nil); !errors.As(err, &f) || !f.Terminal || !strings.Contains(err.Error(), "checksum") {
			t.Errorf("a bit flipped at %d of %d: %v", at, len(b), err)
		}
		opened.Close()
	}
}

// Whatever is done to a compressed image, nobody gets other bytes than were in
// it: where the format has a check, a changed one is refused at the latest when
// it has been read.
func TestDamagedCompressions(t *testing.T) {
	img := images.Raw(t, 9, 1<<20+512)
	for _, row := range packers {
		if strings.Contains(row.name, "without a check") {
			continue
		}
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			damage(t, packed(t, row.command, img.Path), img, row.parts)
		})
	}
	t.Run("seekable zstd with checksums", func(t *testing.T) { damage(t, seekable(t, img.Content, 300_000, true), img, true) })
}

// damage reads what comes of b, which img is compressed in. What has no parts to be read
// on their own is decompressed in one way only, and each damage comes in ranges or as a
// stream by turns.
func damage(t *testing.T, b []byte, img images.Image, parts bool) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(5, uint64(len(b))))
	spots := []int{0, 1, 5, 6, 7, 8, 12, 13, 14, 24, len(b) - 1, len(b) - 2, len(b) - 4, len(b) - 8, len(b) - 12, len(b) - 16, len(b) - 20, len(b) - 24}
	for range 6 {
		spots = append(spots, rnd.IntN(len(b)))
	}
	for i, at := range spots {
		flipped := bytes.Clone(b)
		flipped[at] ^= 1 << rnd.IntN(8)
		for what, bad := range map[string][]byte{"bit flipped at": flipped, "cut at": b[:at], "garbage inserted at": append(append(bytes.Clone(b[:at]), "garbage"...), b[at:]...)} {
			blobs := []image.Blob{&memory{b: bad}, stream{bad}}
			if !parts {
				blobs = blobs[i%2:][:1]
			}
			for _, blob := range blobs {
				opened, err := image.Open(t.Context(), blob, image.Options{Format: "raw"})
				if err == nil && opened.Info.Compression == "" {
					opened.Close()
					continue // it does not look like a compressed file any more
				}
				var got []byte
				if err == nil {
					got, err = contentOf(t, opened)
					opened.Close()
				}
				if err == nil {
					if !bytes.Equal(got, img.Content) {
						t.Errorf("%T, %s %d of %d: %d bytes that are not the image's", blob, what, at, len(b), len(got))
					}
					continue
				}
				if f := (*fault.Fault)(nil); !errors.As(err, &f) || !f.Terminal {
					t.Errorf("%T, %s %d of %d: %v is no terminal fault", blob, what, at, len(b), err)
				}
			}
		}
	}
}

// What a header claims is refused before memory is given for it.
func TestHungryCompressions(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "zeros")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct{ command, says string }{
		{"xz -c --lzma2=preset=0,dict=512MiB", "536870912 bytes"},
		{"xz -c --x86 --lzma2=preset=0", "filters"},
		{"zstd -q -c --ultra -1 --long=30", "--long=27"},
	} {
		b := packed(t, "cat $0 | "+row.command, path)
		for _, blob := range []image.Blob{&memory{b: b}, stream{b}} {
			opened, err := image.Open(t.Context(), blob, image.Options{Format: "raw"})
			if err == nil {
				_, err = readAll(t, opened, 2<<20)
				opened.Close()
			}
			if f := (*fault.Fault)(nil); !errors.As(err, &f) || !f.Terminal || f.Reason != fault.FormatNotSupported || !strings.Contains(err.Error(), row.says) {
				t.Errorf("%s, %T: %v", row.command, blob, err)
			}
		}
	}
}

// windowed is a frame that claims a window of so many bytes and not its length.
func windowed(t *testing.T, part []byte, window int) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, zstd.WithWindowSize(window), zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	for _, some := range [][]byte{part[:len(part)/2], part[len(part)/2:]} {
		if _, err := w.Write(some); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// The windows of frames that are decompressed at once are bounded together: short
// frames with long ones are read by one decoder, and such as come as a surprise are
// refused.
func TestHungryFrames(t *testing.T) {
	img := images.Raw(t, 21, 1<<20)
	claims := func(first, rest int) []byte {
		window := first
		return framed(img.Content, 400_000, false, func(part []byte) []byte {
			defer func() { window = rest }()
			return windowed(t, part, window)
		})
	}
	opened, err := image.Open(t.Context(), &memory{b: claims(image.WindowBytes, image.WindowBytes)}, image.Options{Format: "raw"})
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	if opened.Disk != nil {
		t.Error("several decoders get a long window each")
	}
	got, err := readAll(t, opened, len(img.Content))
	if err != nil {
		t.Fatal(err)
	}
	same(t, "long windows", got, img.Content)

	opened, err = image.Open(t.Context(), &memory{b: claims(1<<20, image.WindowBytes)}, image.Options{Format: "raw"})
	if err == nil {
		defer opened.Close()
		_, err = readAll(t, opened, len(img.Content))
	}
	if reason(err) != fault.FormatNotSupported || !strings.Contains(err.Error(), "8388608 bytes") {
		t.Errorf("a long window behind a short one: %v", err)
	}
}

// A list of more blocks than there is memory for is not read.
func TestManyBlocks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "zeros")
	if err := os.WriteFile(path, make([]byte, 16*(1<<17+1)), 0o600); err != nil {
		t.Fatal(err)
	}
	opened, err := image.Open(t.Context(), &memory{b: packed(t, "xz -0 -T1 --block-size=16 -c", path)}, image.Options{Format: "raw"})
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	if opened.Disk != nil {
		t.Error("a list of 131073 blocks was kept")
	}
}

// A part that is said to be empty is not believed to be.
func TestEmptyParts(t *testing.T) {
	img := images.Raw(t, 29, 1<<20)
	b := seekable(t, img.Content, 256<<10, false)
	for i := range 4 {
		bad := bytes.Clone(b)
		binary.LittleEndian.PutUint32(bad[len(bad)-9-8*(4-i)+4:], 0) // one bit less
		opened, err := image.Open(t.Context(), &memory{b: bad}, image.Options{Format: "raw"})
		if err != nil {
			t.Fatal(err)
		}
		defer opened.Close()
		got, err := readAll(t, opened, len(img.Content))
		if err != nil {
			t.Fatal(err)
		}
		same(t, fmt.Sprintf("without part %d", i), got, img.Content)
	}
}

// Memory is given as there is something to keep, not as a header claims it.
func TestModestDictionaries(t *testing.T) {
	img := images.Raw(t, 27, 1<<20)
	b := packed(t, "xz -T1 --block-size=4KiB --lzma2=preset=0,dict=64MiB -c", img.Path)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	opened, err := image.Open(t.Context(), stream{b}, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	got, err := readAll(t, opened, len(img.Content))
	if err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	same(t, "small blocks", got, img.Content)
	if n := after.TotalAlloc - before.TotalAlloc; n > 256<<20 {
		t.Errorf("256 blocks of 4 KiB took %d bytes", n)
	}
}

// Both ends of an xz stream say which check it has.
func TestContradictingXZ(t *testing.T) {
	img := images.Raw(t, 23, 1<<20)
	b := packed(t, "xz -0 --block-size=300001 -c", img.Path)
	b[7] = 1
	binary.LittleEndian.PutUint32(b[8:], crc32.ChecksumIEEE(b[6:8]))
	for _, blob := range []image.Blob{&memory{b: b}, stream{b}} {
		opened, err := image.Open(t.Context(), blob, image.Options{Format: "raw"})
		if err == nil {
			_, err = readAll(t, opened, len(img.Content))
			opened.Close()
		}
		if reason(err) != fault.CorruptImage {
			t.Errorf("%T: %v", blob, err)
		}
	}
}

// What the first bytes of a stream say of its length is known before it is read.
func TestStreamTellsItsLength(t *testing.T) {
	img := images.Raw(t, 25, 1<<20)
	opened, err := image.Open(t.Context(), stream{packed(t, "zstd -q -1 -c $0", img.Path)}, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	if opened.Info.AtLeast != 1<<20 || opened.Info.VirtualSize != -1 {
		t.Errorf("%+v", opened.Info)
	}
}

// FuzzCompression: whatever the bytes are, what is read in parts is what is read
// one way.
func FuzzCompression(f *testing.F) {
	content := make([]byte, 3000)
	for i := range content {
		content[i] = byte(i * i >> 5)
	}
	path := filepath.Join(f.TempDir(), "content")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		f.Fatal(err)
	}
	for _, row := range packers {
		f.Add(packed(f, strings.NewReplacer("700001", "1001", "700002", "1002", "1MiB", "1KiB", "2MiB", "2KiB", "300001", "301", "MiB", "KiB").Replace(row.command), path))
	}
	f.Add(seekable(f, content, 700, false))
	f.Add(seekable(f, content, 700, true))
	f.Fuzz(func(t *testing.T, b []byte) {
		const most = 1 << 20
		read := func(blob image.Blob) ([]byte, error) {
			opened, err := image.Open(t.Context(), blob, image.Options{Format: "raw"})
			if err != nil {
				return nil, err
			}
			defer opened.Close()
			if opened.Stream != nil {
				return io.ReadAll(io.LimitReader(opened.Stream, most))
			}
			p := make([]byte, min(opened.Disk.Size(), most))
			n, err := opened.Disk.ReadAtContext(t.Context(), p, 0)
			return p[:n], err
		}
		inParts, err := read(&memory{b: b})
		oneWay, err2 := read(stream{b})
		if err == nil && err2 == nil && !bytes.Equal(inParts, oneWay) {
			t.Errorf("%d bytes in parts and %d one way differ", len(inParts), len(oneWay))
		}
	})
}
