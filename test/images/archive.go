package images

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
)

// Hostile is an archive that must not be unpacked.
type Hostile struct {
	Name string
	Tar  []byte
	// Reason of the fault, and what its message says.
	Reason, Says string
	// Wrote are the names that may have been made of what came before, where it was
	// read but once.
	Wrote []string
}

// Member is a header with its content.
type Member struct {
	tar.Header
	Content string
}

// File, Folder, Symlink and Link are members.
func File(name, content string) Member {
	return Member{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)), ModTime: time.Unix(1e9, 0)}, content}
}

func Folder(name string) Member {
	return Member{Header: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: time.Unix(1e9, 0)}}
}

func Symlink(name, to string) Member {
	return Member{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to, Mode: 0o777, ModTime: time.Unix(1e9, 0)}}
}

func Link(name, to string) Member {
	return Member{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to, Mode: 0o644, ModTime: time.Unix(1e9, 0)}}
}

// Archive packs members as they are, however little sense they make.
func Archive(t testing.TB, members ...Member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		must(t, w.WriteHeader(&m.Header))
		_, err := io.WriteString(w, m.Content)
		must(t, err)
	}
	must(t, w.Close())
	return b.Bytes()
}

// patched is a tar whose header at off is changed and summed up anew.
func patched(b []byte, off int, change func(header []byte)) []byte {
	h := b[off : off+512]
	change(h)
	copy(h[148:156], "        ")
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// HostileArchives try to get at canary, an absolute path outside of the folder that they
// are unpacked in, two levels above which it lies at "../../" + base, or are otherwise no good.
func HostileArchives(t testing.TB, canary, base string) []Hostile {
	t.Helper()
	good, up := File("good", "good"), "../../"+base
	wrote := []string{"good"}
	unsafe := func(name, says string, members ...Member) Hostile {
		return Hostile{name, Archive(t, append([]Member{good}, members...)...), "UnsafeArchive", says, wrote}
	}
	special := func(name string, kind byte) Member {
		return Member{Header: tar.Header{Typeflag: kind, Name: name, Mode: 0o666, Devmajor: 1, Devminor: 3}}
	}
	long := strings.Repeat("/.", 60) // wants an extended header
	list := []Hostile{
		unsafe("absolute name", "is absolute", File(canary, "x")),
		unsafe("name up", `".."`, File(up, "x")),
		unsafe("name down and up", `".."`, File("a/../../../"+base, "x")),
		unsafe("name that ends up", `".."`, Folder("a/..")),
		unsafe("name that is up", `".."`, Folder("..")),
		unsafe("absolute name in an extended header", "is absolute", File(canary+long+"/x", "x")),
		unsafe("long name up", `".."`, File(strings.Repeat("long/", 60)+"../"+base, "x")),
		unsafe("file without a name", "no name", File(".", "x")),
		unsafe("absolute link", "is absolute", Symlink("a", canary)),
		unsafe("absolute link in an extended header", "is absolute", Symlink("a", canary+long)),
		unsafe("link up", `".."`, Symlink("a", up)),
		unsafe("link down and up", `".."`, Symlink("a/b", "c/../../"+up)),
		unsafe("link through a link and up", "through another link", Folder("d"), Symlink("d/s", ".."), Folder("e"), Symlink("e/x", "../d/s/../"+base)),
		unsafe("link through a later link and up", "through another link", Symlink("e/x", "../d/s/../"+base), Symlink("d/s", "..")),
		unsafe("link without a target", "no target", Symlink("a", "b"), Symlink("c", "")),
		unsafe("file below a link", "a file or a link", Symlink("a", "b"), File("a/x", "x")),
		unsafe("file below a link out", "is absolute", Symlink("a", canary), File("a", "x")),
		unsafe("folder over a link", "twice", Symlink("a", "b"), Folder("a"), File("a/x", "x")),
		unsafe("hard link out", "is absolute", Link("a", canary)),
		unsafe("hard link up", `".."`, Link("a", up)),
		unsafe("hard link to nothing", "no file that comes before", Link("a", "b")),
		unsafe("hard link to what follows", "no file that comes before", Link("a", "b"), File("b", "x")),
		unsafe("hard link to itself", "no file that comes before", Link("a", "a")),
		unsafe("hard link to a link that leads out from there", `".."`, Symlink("d/e/s", "../../good"), Link("t", "d/e/s")),
		unsafe("device", "is a device (1:3)", special("null", tar.TypeChar)),
		unsafe("block device", "is a device (1:3)", special("disk", tar.TypeBlock)),
		{"fifo", Archive(t, good, special("fifo", tar.TypeFifo)), "FormatNotSupported", "neither file nor folder nor link", wrote},
		{"continuation of another volume", Archive(t, good, func() Member { m := File("a", "x"); m.Typeflag = 'M'; return m }()), "FormatNotSupported", "neither file", wrote},
		unsafe("file twice", `"good" twice`, File("good", "again")),
		unsafe("file twice by another name", `"good" twice`, File("././good", "again")),
		unsafe("folder over a file", "twice", Folder("good")),
		unsafe("file over a folder", "twice", Folder("a"), File("a", "x")),
		unsafe("file over the folder of another", "twice", File("a/b", "x"), File("a", "x")),
		unsafe("file below a file", "a file or a link", File("good/x", "x")),
		unsafe("link twice", "twice", Symlink("a", "b"), Symlink("a", "c")),
		{"long name", Archive(t, good, File(strings.Repeat("n", 256), "x")), "FormatNotSupported", "256 bytes", wrote},
		{"long path", Archive(t, good, File(strings.Repeat("n/", 2048)+"n", "x")), "FormatNotSupported", "4097 bytes", wrote},
		{"header for all that follow", Archive(t, good, Member{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"path": canary}}}), "FormatNotSupported", "all members that follow", wrote},
	}
	// Lies about lengths.
	whole := Archive(t, good, File("a", strings.Repeat("content ", 200)))
	at := func(n int) []byte { return bytes.Clone(whole[:n]) }
	list = append(list,
		Hostile{"cut in a header", at(1024 + 100), "CorruptImage", "cut short", wrote},
		Hostile{"cut in the content", at(1024 + 512 + 700), "CorruptImage", "cut short", append(wrote, "a")},
		Hostile{"cut behind the content", at(1024 + 512 + 1600), "CorruptImage", "cut short", append(wrote, "a")},
		Hostile{"cut before the end", at(1024 + 512 + 2048), "CorruptImage", "cut short", append(wrote, "a")},
		Hostile{"empty", nil, "NotAnArchive", "is empty", nil},
		Hostile{"no archive", []byte("<!DOCTYPE html>" + strings.Repeat(" ", 600)), "NotAnArchive", "<!DOCTYPE html>", nil},
		Hostile{"a short text", []byte("404 page not found"), "NotAnArchive", "404 page not found", nil},
		Hostile{"damaged header", func() []byte { b := bytes.Clone(whole); b[1024+3] ^= 1; return b }(), "CorruptImage", "no valid header", wrote},
		Hostile{"size below zero", patched(bytes.Clone(whole), 1024, func(h []byte) { copy(h[124:], strings.Repeat("\xff", 12)) }), "CorruptImage", "damaged", wrote},
		Hostile{"size of exbibytes", patched(bytes.Clone(whole), 1024, func(h []byte) { copy(h[124:], "\x80\x00\x00\x00\x40\x00\x00\x00\x00\x00\x00\x00") }), "FormatNotSupported", "more than", wrote},
		Hostile{"more than the volume", patched(bytes.Clone(whole), 1024, func(h []byte) { copy(h[124:], "\x80\x00\x00\x00\x00\x00\x0e\x00\x00\x00\x00\x00") }), "ImageTooLarge", "request more", wrote},
		Hostile{"folder with content", patched(bytes.Clone(whole), 1024, func(h []byte) { h[156] = tar.TypeDir }), "CorruptImage", "has no content", wrote},
		Hostile{"file with the name of a folder", patched(bytes.Clone(whole), 1024, func(h []byte) { copy(h, "a/") }), "CorruptImage", "name of a folder", wrote},
		Hostile{"much behind the end", append(bytes.Clone(whole), make([]byte, 65<<20)...), "CorruptImage", "no content", append(wrote, "a")},
		Hostile{"sparse file of exbibytes", oldSparse(t, 1<<62, 0, 512), "FormatNotSupported", "more than", nil},
		Hostile{"sparse file that overlaps", oldSparse(t, 4096, 512, 1024, 512, 1024), "CorruptImage", "damaged", nil},
		Hostile{"sparse file beyond its end", oldSparse(t, 600, 512, 512), "CorruptImage", "damaged", nil},
	)
	return list
}

// oldSparse is a file of GNU tar's old format for holes, with data at offsets and
// of lengths in turns.
func oldSparse(t testing.TB, size int64, data ...int64) []byte {
	t.Helper()
	n := int64(0)
	for i := 1; i < len(data); i += 2 {
		n += data[i]
	}
	b := Archive(t, File("sparse", strings.Repeat("s", int(n))))
	number := func(p []byte, n int64) {
		clear(p)
		p[0] = 0x80
		for i := range 8 {
			p[len(p)-1-i] = byte(n >> (8 * i))
		}
	}
	return patched(b, 0, func(h []byte) {
		copy(h[257:265], "ustar  \x00")
		h[156] = tar.TypeGNUSparse
		clear(h[329:512])
		for i, v := range data {
			number(h[386+12*i:398+12*i], v)
		}
		number(h[483:495], size)
	})
}

// Bomb is a tar that is read for ever: members without end, or extended headers before the first.
type Bomb struct{ again, rest []byte }

// Headers is a Bomb of extended headers that describe no member.
func Headers(t testing.TB) *Bomb {
	t.Helper()
	m := File("a", "")
	m.PAXRecords = map[string]string{"comment": strings.Repeat("c", 1<<19)}
	b := Archive(t, m)
	return &Bomb{again: b[:len(b)-1024-512]}
}

// Read is io.Reader's.
func (b *Bomb) Read(p []byte) (int, error) {
	if len(b.rest) == 0 {
		b.rest = b.again
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}
