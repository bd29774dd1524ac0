package image_test

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

func convert(t *testing.T, raw, path, format, options string) {
	t.Helper()
	args := []string{"convert", "-f", "raw", "-O", format}
	if options != "" {
		args = append(args, "-o", options)
	}
	if out, err := exec.CommandContext(t.Context(), "qemu-img", append(args, raw, path)...).CombinedOutput(); err != nil {
		t.Fatalf("qemu-img convert to %s: %v\n%s", format, err, out)
	}
}

func write(t *testing.T, folder, name string, b []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(folder, name), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A disk in a tar is what it is alone, whatever its format and the tar's.
func TestDisksInTars(t *testing.T) {
	folder := t.TempDir()
	content := patchwork(3<<20 + 512)
	write(t, folder, "disk.raw", content)
	raw := filepath.Join(folder, "disk.raw")
	long := strings.Repeat("a disk of a long name ", 6) + ".vmdk" // in a header of its own
	for _, to := range []struct{ name, format, options string }{
		{"stream.vmdk", "vmdk", "subformat=streamOptimized"}, {"sparse.vmdk", "vmdk", ""}, {long, "vmdk", ""},
		{"disk.qcow2", "qcow2", ""}, {"disk.vhd", "vpc", "force_size=on"}, {"disk.vhdx", "vhdx", ""}, {"disk.vdi", "vdi", ""},
		{"flat.vmdk", "vmdk", "subformat=monolithicFlat"}, {"two.vmdk", "vmdk", "subformat=twoGbMaxExtentFlat"}, {"split.vmdk", "vmdk", "subformat=twoGbMaxExtentSparse"},
	} {
		convert(t, raw, filepath.Join(folder, to.name), to.format, to.options)
	}
	for _, row := range []struct {
		names  []string // the disk first
		format string
	}{
		{[]string{"disk.raw"}, "raw"}, {[]string{"stream.vmdk"}, "vmdk"}, {[]string{"sparse.vmdk"}, "vmdk"}, {[]string{long}, "vmdk"},
		{[]string{"disk.qcow2"}, "qcow2"}, {[]string{"disk.vhd"}, "vhd"}, {[]string{"disk.vhdx"}, "vhdx"}, {[]string{"disk.vdi"}, "vdi"},
		{[]string{"flat.vmdk", "flat-flat.vmdk"}, "vmdk"}, {[]string{"two.vmdk", "two-f001.vmdk"}, "vmdk"}, {[]string{"split.vmdk", "split-s001.vmdk"}, "vmdk"},
	} {
		for i, kind := range []string{"ustar", "gnu", "pax"} {
			if row.names[0] == long && kind == "ustar" {
				continue // it has no room for the name
			}
			t.Run(row.names[0]+" in "+kind, func(t *testing.T) {
				names := slices.Clone(row.names)
				if i > 0 { // the parts come first
					slices.Reverse(names)
				}
				path := images.PackTar(t, kind, folder, names...)
				img := images.Image{Path: path, Format: row.format, Variant: "in a tar", Content: content}
				opened := holds(t, img, uint64(i))
				if opened.Info.Bundle != "tar" || opened.Info.Disk != row.names[0] {
					t.Errorf("opened as %+v", opened.Info)
				}
			})
		}
	}
}

// The disks of an OVA are chosen, and come with the digests of its manifest.
func TestDisksInOVAs(t *testing.T) {
	first, second := patchwork(2<<20), patchwork(5<<19)
	stream := images.VMDK{Compressed: true, Footer: true, Version: 3}
	disks := []images.TarMember{{Name: "vm-disk1.vmdk", Body: stream.Bytes(first)}, {Name: "a disk.vmdk", Body: stream.Bytes(second)}}
	iso := images.TarMember{Name: "cd.iso", Body: first}
	ovf := images.TarMember{Name: "vm.ovf", Body: []byte(images.OVF("vm-disk1.vmdk", "a%20disk.vmdk"))}
	for _, algorithm := range []string{"SHA1", "SHA256", "SHA512"} {
		mf := images.Manifest(algorithm, ovf, iso, disks[0], disks[1])
		b := images.Tar(ovf, mf, iso, disks[0], disks[1])
		path := images.Made(t, "ova", "", b, nil).Path
		for want, content := range map[string][]byte{"1": first, "vmdisk1": first, "vm-disk1.vmdk": first, "2": second, "vmdisk2": second, "a disk.vmdk": second} {
			opened, err := image.Open(t.Context(), blobOf(t, path), image.Options{Disk: want, Format: "vmdk"})
			if err != nil {
				t.Fatalf("%s: %v", want, err)
			}
			got := make([]byte, opened.Disk.Size())
			if _, err := opened.Disk.ReadAtContext(t.Context(), got, 0); err != nil {
				t.Fatal(err)
			}
			same(t, want, got, content)
			if opened.Info.Bundle != "ova" || opened.Info.Format != "vmdk" || len(opened.Digests) != 1 {
				t.Fatalf("%s: opened as %+v with %d digests", want, opened.Info, len(opened.Digests))
			}
			d := opened.Digests[0]
			part := b[d.Offset : d.Offset+d.Length]
			sums := map[string][]byte{}
			s1, s256, s512 := sha1.Sum(part), sha256.Sum256(part), sha512.Sum512(part)
			sums["sha1"], sums["sha256"], sums["sha512"] = s1[:], s256[:], s512[:]
			if d.Name != opened.Info.Disk || !strings.EqualFold(d.Algorithm, algorithm) || !bytes.Equal(d.Sum, sums[d.Algorithm]) {
				t.Errorf("%s: digest %+v is not that of its bytes", want, d)
			}
			if w := strings.Join(opened.Info.Warnings, "\n"); w != "" {
				t.Errorf("%s: warnings are %q", want, w)
			}
		}
		if _, err := image.Open(t.Context(), blobOf(t, path), image.Options{Disk: "1", Format: "qcow2"}); fault.Of(err) == nil || fault.Of(err).Reason != fault.NotADiskImage {
			t.Errorf("a vmdk disk named qcow2: %v", err)
		}
	}
}

// Whatever an OVA's maker does a little otherwise is understood.
func TestOVAsOfOthers(t *testing.T) {
	content := patchwork(1 << 20)
	disk := images.TarMember{Name: "disk1.vmdk", Body: images.VMDK{Compressed: true}.Bytes(content)}
	text := images.OVF("disk1.vmdk")
	ovf := images.TarMember{Name: "vm.ovf", Body: []byte(text)}
	edited := func(old ...string) images.TarMember {
		return images.TarMember{Name: "vm.ovf", Body: []byte(strings.NewReplacer(old...).Replace(text))}
	}
	moved := func(m images.TarMember, to string) images.TarMember { m.Name = to; return m }
	for name, row := range map[string]struct {
		members []images.TarMember
		warns   string
	}{
		"the disk first":              {[]images.TarMember{disk, ovf}, ""},
		"names with ./":               {[]images.TarMember{{Name: "./", Type: '5'}, moved(ovf, "./vm.ovf"), moved(disk, "./disk1.vmdk")}, ""},
		"in a folder":                 {[]images.TarMember{{Name: "vm/", Type: '5'}, moved(ovf, "vm/vm.ovf"), moved(disk, "vm/disk1.vmdk")}, ""},
		"packed on macOS":             {[]images.TarMember{moved(ovf, "._vm.ovf"), ovf, moved(ovf, "._disk1.vmdk"), disk}, ""},
		"an upper-case name":          {[]images.TarMember{moved(ovf, "VM.OVF"), disk}, ""},
		"attributes without a prefix": {[]images.TarMember{edited("ovf:", ""), disk}, ""},
		"elements with a prefix":      {[]images.TarMember{edited("</", "</ovf:", "<?", "<?", "<", "<ovf:"), disk}, ""},
		"no namespace":                {[]images.TarMember{edited(` xmlns="http://schemas.dmtf.org/ovf/envelope/1"`, ""), disk}, ""},
		"further attributes":          {[]images.TarMember{edited("<Disk ", `<Disk xmlns:v="urn:v" v:diskId="other" v:uuid="1" `), disk}, ""},
		"an empty disk too":           {[]images.TarMember{edited("  </DiskSection>", `<Disk ovf:diskId="e" ovf:capacity="${size}"/></DiskSection>`), disk}, ""},
		"the length right":            {[]images.TarMember{edited(`ovf:id="file1"`, fmt.Sprintf(`ovf:id="file1" ovf:size="%d"`, len(disk.Body))), disk}, ""},
		"the length wrong":            {[]images.TarMember{edited(`ovf:id="file1"`, `ovf:id="file1" ovf:size="17"`), disk}, "and 17 by its description"},
		"a manifest without the disk": {[]images.TarMember{ovf, disk, images.Manifest("SHA256", ovf)}, `no digest of "disk1.vmdk"`},
		"a comment in the header":     {[]images.TarMember{{Name: "g", Type: 'g'}, ovf, moved(disk, "disk1.vmdk")}, ""},
		"an extended length":          {[]images.TarMember{ovf, {Name: "disk1.vmdk", Body: disk.Body, PAX: map[string]string{"size": fmt.Sprint(len(disk.Body))}}}, ""},
		"an extended name":            {[]images.TarMember{ovf, {Name: "x", Body: disk.Body, PAX: map[string]string{"path": "disk1.vmdk"}}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			img := images.Made(t, "vmdk", name, images.Tar(row.members...), content)
			opened := holds(t, img, 1)
			if w := strings.Join(opened.Info.Warnings, "\n"); opened.Info.Bundle != "ova" || !strings.Contains(w, row.warns) || row.warns == "" && w != "" {
				t.Errorf("opened as %+v", opened.Info)
			}
		})
	}
}

// A raw disk in gzip in a tar streams.
func TestGzipInTar(t *testing.T) {
	content := patchwork(1 << 20)
	img := images.Gzip(t, images.Made(t, "raw", "", content, content), rand.New(rand.NewPCG(1, 1)))
	opened := open(t, images.PackTar(t, "gnu", filepath.Dir(img.Path), filepath.Base(img.Path)))
	got, err := io.ReadAll(opened.Stream)
	if err != nil || opened.Info.Compression != "gzip" || opened.Info.Bundle != "tar" {
		t.Fatalf("opened as %+v: %v", opened.Info, err)
	}
	same(t, "the stream", got, content)
}

// A disk of many extents of all kinds is what QEMU sees beside its descriptor.
func TestVMDKOfManyFiles(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(seed, 0xf1))
			folder := t.TempDir()
			// QEMU leaves out extents of zeros, and reads zeros behind a sparse one
			// that is no multiple of its grains.
			oracle := seed%2 == 1
			var content []byte
			var extents, names []string
			for i := range 2 + rnd.IntN(6) {
				part := patchwork((64 << 10) * (1 + rnd.IntN(30)))
				if !oracle {
					part = part[:len(part)-512*rnd.IntN(127)]
				}
				sectors := len(part) / 512
				name := fmt.Sprintf("disk-%03d.vmdk", i)
				switch kind := rnd.IntN(5); {
				case kind == 0 && !oracle:
					clear(part)
					extents = append(extents, fmt.Sprintf("RW %d ZERO", sectors))
				case kind == 1:
					before := 512 * rnd.IntN(9)
					write(t, folder, name, append(bytes.Repeat([]byte("not me"), before/6+1)[:before], append(part, "nor me"...)...))
					extents = append(extents, fmt.Sprintf("RW %d FLAT \"%s\" %d", sectors, name, before/512))
					names = append(names, name)
				case kind == 2:
					write(t, folder, name, part)
					extents = append(extents, fmt.Sprintf("RW %d VMFS \"%s\"", sectors, name))
					names = append(names, name)
				default:
					write(t, folder, name, images.VMDK{Descriptor: "-", Redundant: kind == 3, Compressed: kind == 4}.Bytes(part))
					extents = append(extents, fmt.Sprintf("RW %d SPARSE \"%s\"", sectors, name))
					names = append(names, name)
				}
				content = append(content, part...)
			}
			write(t, folder, "disk.vmdk", []byte(images.Descriptor("twoGbMaxExtentSparse", extents...)))
			tar := images.PackTar(t, []string{"ustar", "gnu", "pax"}[rnd.IntN(3)], folder, append(names, "disk.vmdk")...)
			opened := holds(t, images.Image{Path: tar, Format: "vmdk", Variant: strings.Join(extents, "; "), Content: content}, seed)
			if opened.Info.Disk != "disk.vmdk" {
				t.Errorf("opened as %+v", opened.Info)
			}
			if !oracle {
				return
			}
			out := filepath.Join(t.TempDir(), "oracle.raw")
			if o, err := exec.CommandContext(t.Context(), "qemu-img", "convert", "-f", "vmdk", "-O", "raw", filepath.Join(folder, "disk.vmdk"), out).CombinedOutput(); err != nil {
				t.Fatalf("qemu-img: %v\n%s", err, o)
			}
			want, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			same(t, "QEMU", want, content)
		})
	}
}

// The headers of a tar cost a request or two for each of its files, whatever
// their length.
func TestTarRequestsAreFew(t *testing.T) {
	content := make([]byte, 30<<20)
	rand.NewChaCha8([32]byte{20}).Read(content)
	copy(content[510:], "\x55\xaa")
	disk := images.TarMember{Name: "disk1.vmdk", Body: images.VMDK{}.Bytes(content)}
	ovf := images.TarMember{Name: "vm.ovf", Body: []byte(images.OVF("disk1.vmdk"))}
	path := images.Made(t, "ova", "", images.Tar(ovf, images.TarMember{Name: "cd.iso", Body: content}, disk, images.TarMember{Name: "nvram", Body: content[:100]}), nil).Path
	file := &counted{Ranged: blobOf(t, path).(image.Ranged)}
	if _, err := image.Open(t.Context(), file, image.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d requests, %d bytes, %d the longest", file.requests, file.bytes, file.longest)
	if file.requests > 20 || file.bytes > 1<<20 {
		t.Errorf("%d requests for %d bytes before the disk is read", file.requests, file.bytes)
	}
}
