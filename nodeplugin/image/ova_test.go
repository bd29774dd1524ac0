package image

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

func TestHostileTar(t *testing.T) {
	c := func(says string) refusal { return refusal{fault.CorruptImage, says} }
	f := func(says string) refusal { return refusal{fault.FormatNotSupported, says} }
	e := func(says string) refusal { return refusal{fault.ExternalDataFile, says} }
	refuses(t, images.HostileTars(), map[string]refusal{
		"cut in the disk":                              c("cut short"),
		"cut in the first header":                      c("unexpected EOF"),
		"cut in the second header":                     c("unexpected EOF"),
		"a wrong checksum":                             c("invalid tar header"),
		"traversal":                                    c(`"../../etc/cron.d/disk1.vmdk"`),
		"traversal in the middle":                      c(`"a/../../disk1.vmdk"`),
		"an absolute name":                             c(`"/etc/disk1.vmdk"`),
		"a Windows name":                               c("points out"),
		"a name that clears the screen":                c("no text"),
		"a name that is no UTF-8":                      c("no text"),
		"many files and no description":                f("tar of 257 files"),
		"a folder outside":                             c(`"../a/"`),
		"no name":                                      c("points out"),
		"an extended name outside":                     c(`"../disk1.vmdk"`),
		"a name twice":                                 c(`"disk1.vmdk" twice`),
		"a name twice in two ways":                     c(`"disk1.vmdk" twice`),
		"a symlink":                                    f("neither a file"),
		"a hard link":                                  f("neither a file"),
		"a device":                                     f("neither a file"),
		"a FIFO":                                       f("neither a file"),
		"a member of an unknown type":                  f("neither a file"),
		"old GNU sparse":                               c("invalid tar header"), // its map is no map
		"GNU sparse 0.1":                               f("sparse"),
		"GNU sparse 1.0":                               f("sparse"),
		"star's sparse":                                f("sparse"),
		"a length in a global header":                  f(`"size"`),
		"an extended length of less":                   c("512 bytes by its extended header"),
		"an extended length of more":                   c("by its extended header"),
		"an extended length of 2^63-1":                 c("9223372036854775807 bytes"),
		"an extended length of 2^64":                   c("invalid tar header"),
		"an extended length of -1":                     c("invalid tar header"),
		"8 GiB":                                        c("8589934591 bytes"),
		"a length of text":                             c("invalid tar header"),
		"a length of -512":                             c("invalid tar header"),
		"a length of 2^62":                             c("4611686018427387904 bytes"),
		"a length of 2^90":                             c("invalid tar header"),
		"too many members":                             f("more than 4096 files"),
		"nothing":                                      {fault.NotADiskImage, "tar of 0 files"},
		"no disk":                                      {fault.NotADiskImage, "tar of 2 files"},
		"two disks":                                    {fault.InvalidSource, `1: "disk1.vmdk", 2: "disk2.vmdk"`},
		"a tar in a tar":                               f("tar inside a tar"),
		"a tar in an OVA":                              f("tar inside a tar"),
		"a qed disk":                                   f(`"disk.qed": the image's format qed`),
		"a disk with a parent":                         {fault.BackingFile, `disk "disk1.vmdk" of the ova: the vmdk image is a delta link`},
		"two descriptions":                             c("two descriptions"),
		"a description of 5 MiB":                       c("5242880 bytes"),
		"a description of nothing":                     {fault.NotADiskImage, "no disk"},
		"a description that is no XML":                 {fault.NotADiskImage, "no disk"},
		"a description cut short":                      c("unexpected EOF"),
		"a description of another kind":                c(`"html"`),
		"entities":                                     c("entities"),
		"an external entity":                           c("entities"),
		"an undefined entity":                          c("invalid character entity"),
		"a huge capacity":                              c(`capacity "99999999999999999999999"`),
		"a negative capacity":                          c(`capacity "-16"`),
		"a huge size":                                  c(`size "18446744073709551616"`),
		"a size twice":                                 c("twice"),
		"deep elements":                                c("more than 64"),
		"two files of one id":                          c("two files"),
		"two disks of one id":                          c("two disks"),
		"many disks":                                   c("more than 1024"),
		"a file that is not listed":                    c(`"file7"`),
		"a file that is not there":                     e(`"disk7.vmdk"`),
		"a file of the web":                            e(`"http://169.254.169.254/disk1.vmdk"`),
		"a file of the host":                           e(`"file:///etc/shadow"`),
		"a file with an absolute name":                 e(`"/disk1.vmdk"`),
		"a file outside":                               e(`"x/../../disk1.vmdk"`),
		"a file outside, encoded":                      e(`"%2e%2e/disk1.vmdk"`),
		"a file in chunks":                             f("chunks"),
		"a difference":                                 {fault.BackingFile, "vmdisk1"},
		"only an empty disk":                           {fault.NotADiskImage, "no disk with data"},
		"two disks described":                          {fault.InvalidSource, `1: "disk1.vmdk" ("vmdisk1"), 2: "disk2.vmdk" ("vmdisk2")`},
		"two manifests":                                c("two manifests"),
		"a manifest of 2 MiB":                          c("2097152 bytes"),
		"a manifest of MD5":                            c("MD5(vm.ovf)"),
		"a manifest with a short digest":               c("01234567"),
		"a manifest that contradicts itself":           c("two digests"),
		"a description that was changed":               {fault.ChecksumMismatch, "by the manifest"},
		"a descriptor alone":                           e(`"disk-flat.vmdk"`),
		"a descriptor alone of 5 MiB":                  c("descriptor has"),
		"several: a file that is not there":            e(`"other-flat.vmdk"`),
		"several: an absolute path":                    e(`"/dev/sda"`),
		"several: a relative path":                     e(`"../disk-flat.vmdk"`),
		"several: a path to another folder of the tar": e(`"../disk-flat.vmdk"`),
		"several: more than the file":                  c("1049088 bytes at 0 of a file of 1048576"),
		"several: more than the file, from an offset":  c("1048576 bytes at 512 of a file of 1048576"),
		"several: an offset of 2^53":                   c("1048576 bytes at 4611686018427387904"),
		"several: more than all numbers":               c("more than 4611686018427387904"),
		"several: more than the extent":                c("1049088 bytes at 0 by its descriptor, and 1048576"),
		"several: flat called sparse":                  c(`extent "disk-flat.vmdk"`),
		"several: no access":                           c("may not be read"),
		"several: a device":                            f("fullDevice"),
		"several: a delta":                             f("VMFSSPARSE"),
		"several: itself":                              {fault.NotADiskImage, "no disk image"},
		"several: a parent":                            {fault.BackingFile, "content id"},
		"several: a part alone":                        e("one part of a disk"),
		"table: a grain behind its file, in the tar":   c("cut short"),
	}, 4097*512+256<<10)
}

// Disks are chosen by the name of their file, the description's id or a number,
// and by nothing that means two of them.
func TestChoose(t *testing.T) {
	disks := []bundled{
		{id: "vmdisk1", file: member{name: "disks/a.vmdk"}}, {id: "vmdisk2", file: member{name: "disks/b.vmdk"}},
		{id: "1", file: member{name: "c.vmdk"}}, {id: "c.vmdk", file: member{name: "d.vmdk"}},
	}
	for want, file := range map[string]string{
		"vmdisk1": "disks/a.vmdk", "disks/b.vmdk": "disks/b.vmdk", "b.vmdk": "disks/b.vmdk", "2": "disks/b.vmdk", "4": "d.vmdk",
		"1":      "c.vmdk", // a name comes before a number
		"c.vmdk": "", "0": "", "5": "", "-1": "", "vmdisk": "", "": "",
	} {
		d, err := choose(disks, want)
		if file != "" && (err != nil || d.file.name != file) {
			t.Errorf("%q: %v, %v, want %s", want, d, err, file)
		}
		if f := fault.Of(err); file == "" && (f == nil || !f.Terminal || f.Reason != fault.InvalidSource || !strings.Contains(err.Error(), `4: "d.vmdk" ("c.vmdk")`)) {
			t.Errorf("%q: %v, %v, want a terminal %s with a list", want, d, err, fault.InvalidSource)
		}
	}
	if _, err := Open(t.Context(), &blob{b: at(1<<20, 510, "\x55\xaa")}, Options{Disk: "1"}); fault.Of(err) == nil || fault.Of(err).Reason != fault.InvalidSource {
		t.Errorf("a disk chosen of no bundle: %v", err)
	}
}

// A part of a blob has its own bytes and an end, whatever lies behind.
func TestSection(t *testing.T) {
	s := section{&blob{b: []byte("before-inside-behind")}, span{7, 6}}
	p := make([]byte, 20)
	if n, err := s.ReadAtContext(t.Context(), p, 2); string(p[:n]) != "side" || !errors.Is(err, io.EOF) {
		t.Errorf("read %q, %v, want %q and %v", p[:n], err, "side", io.EOF)
	}
	if n, err := s.ReadAtContext(t.Context(), p[:4], 2); string(p[:n]) != "side" || err != nil {
		t.Errorf("read %q, %v, want %q", p[:n], err, "side")
	}
	if n, err := s.ReadAtContext(t.Context(), p, 6); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("read %d bytes at the end, %v, want %v", n, err, io.EOF)
	}
	for _, off := range []int64{-1, 7} {
		if n, err := s.ReadAtContext(t.Context(), p, off); n != 0 || err == nil {
			t.Errorf("read %d bytes at %d, %v, want an error", n, off, err)
		}
	}
}

// flaky is a blob of which one read fails.
type flaky struct {
	blob
	fails int64
	reads atomic.Int64
}

func (f *flaky) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if f.reads.Add(1)-1 == f.fails {
		return 0, fault.Transient(fault.ConnectionFailed, errors.New("boom"))
	}
	return f.blob.ReadAtContext(ctx, p, off)
}

// Whichever read of a bundle fails, it is the connection that broke and not the
// bundle, and no file of it is taken for missing.
func TestBundleOverABrokenConnection(t *testing.T) {
	content := at(128<<10, 510, "\x55\xaa")
	disk := images.TarMember{Name: "disk1.vmdk", Body: images.VMDK{Compressed: true, Footer: true}.Bytes(content)}
	ovf := images.TarMember{Name: "vm.ovf", Body: []byte(images.OVF("disk1.vmdk"))}
	text := images.TarMember{Name: "disk.vmdk", Body: []byte(images.Descriptor("twoGbMaxExtentFlat", `RW 256 SPARSE "part.vmdk"`, `RW 256 FLAT "flat.vmdk" 0`))}
	part := images.TarMember{Name: "part.vmdk", Body: images.VMDK{Descriptor: "-"}.Bytes(content)}
	for name, b := range map[string][]byte{
		"OVA":           images.Tar(ovf, disk, images.Manifest("SHA256", ovf, disk)),
		"several files": images.Tar(part, text, images.TarMember{Name: "flat.vmdk", Body: content}),
	} {
		for fails := int64(0); ; fails++ {
			f := &flaky{blob: blob{b: b}, fails: fails}
			_, err := Open(t.Context(), f, Options{})
			if f.reads.Load() <= fails {
				if err != nil || fails < 5 {
					t.Errorf("%s: %v after %d reads", name, err, fails)
				}
				break
			}
			if was := fault.Of(err); was == nil || was.Terminal || was.Reason != fault.ConnectionFailed {
				t.Errorf("%s: read %d fails: got %v, want a transient %s", name, fails, err, fault.ConnectionFailed)
			}
		}
	}
}

// FuzzTar opens anything as a tar; of what opens it reads here and there.
func FuzzTar(f *testing.F) {
	for _, b := range images.HostileTars() {
		if len(b) < 64<<10 {
			f.Add(b)
		}
	}
	disk := images.TarMember{Name: "disk1.raw", Body: at(2048, 510, "\x55\xaa")}
	other := images.TarMember{Name: "disk2.raw", Body: at(2048, 510, "\x55\xaa")}
	ovf := images.TarMember{Name: "vm.ovf", Body: []byte(images.OVF("disk1.raw"))}
	text := images.TarMember{Name: "disk.vmdk", Body: []byte(images.Descriptor("twoGbMaxExtentFlat", `RW 1 FLAT "disk1.raw" 1`, "RW 7 ZERO", `RW 2 FLAT "disk2.raw" 0`))}
	f.Add(images.Tar(disk))
	f.Add(images.Tar(disk, other))
	f.Add(images.Tar(ovf, images.Manifest("SHA256", ovf, disk), disk))
	f.Add(images.Tar(text, disk, other))
	f.Add(images.Tar(images.TarMember{Name: "disk1.raw", Body: disk.Body, PAX: map[string]string{"path": "disk1.raw", "comment": "c"}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		opened, err := openTar(t.Context(), &blob{b: b}, Options{})
		if err == nil && opened.Disk == nil {
			opened.Close()
			return
		}
		probe(t, opened, err)
	})
}

// FuzzOVF reads any text as a description, and as a manifest.
func FuzzOVF(f *testing.F) {
	f.Add(images.OVF("disk1.vmdk", "disk2.vmdk"))
	f.Add(strings.ReplaceAll(images.OVF("disk1.vmdk"), "ovf:", ""))
	f.Add(string(images.Manifest("SHA1", images.TarMember{Name: "x"}).Body))
	f.Add(string(images.Manifest("SHA512", images.TarMember{Name: "a(b) = c"}).Body))
	f.Add("<!DOCTYPE a><Envelope/>")
	f.Fuzz(func(t *testing.T, text string) {
		if _, err := parseOVF([]byte(text)); err != nil && !fault.Of(err).Terminal {
			t.Errorf("as a description: %v, which is not terminal", err)
		}
		list, err := parseManifest([]byte(text), ".")
		if err != nil && !fault.Of(err).Terminal {
			t.Errorf("as a manifest: %v, which is not terminal", err)
		}
		for name, d := range list {
			if len(d.sum) != len(d.of(nil)) {
				t.Errorf("a %s of %q has %d bytes", d.algorithm, name, len(d.sum))
			}
		}
	})
}
