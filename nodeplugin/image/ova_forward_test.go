package image_test

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/test/images"
)

// An OVA that comes once gives its disk while it passes, if its description comes first
// and the disk can pass; it is compared with the manifest wherever that is.
func TestOVAForward(t *testing.T) {
	content := exported()
	body := images.VMDK{Compressed: true, Footer: true, Version: 3}.Bytes(content)
	disk := images.TarMember{Name: "disk1.vmdk", Body: body}
	other := images.TarMember{Name: "disk2.vmdk", Body: patchwork(6 << 20)}
	ovf := images.TarMember{Name: "vm.ovf", Body: []byte(images.OVF("disk1.vmdk"))}
	two := images.TarMember{Name: "vm.ovf", Body: []byte(images.OVF("disk2.vmdk", "disk1.vmdk"))}
	path := filepath.Join(t.TempDir(), "disk")
	write(t, filepath.Dir(path), "disk", body)
	zipped := images.TarMember{Name: "disk1.vmdk", Body: packed(t, "gzip -1 -c", path)}
	cert := images.TarMember{Name: "vm.cert", Body: []byte("SHA256(vm.mf)= 00\n")}
	moved := func(m images.TarMember, to string) images.TarMember { m.Name = to; return m }
	spaced := images.TarMember{Name: "vm.ovf", Body: []byte(images.OVF("a%20disk.vmdk"))}
	raw := images.TarMember{Name: "disk1.vmdk", Body: content[:7<<20]}
	damaged := images.TarMember{Name: "disk1.vmdk", Body: bytes.Clone(body)}
	damaged.Body[bytes.Index(body, []byte("ddb.geometry"))] ^= 1
	for name, row := range map[string]struct {
		members []images.TarMember
		disk    string
		want    []byte // nil: refused
		reason  string
		streams bool
		warns   string
	}{
		"the manifest first":          {[]images.TarMember{ovf, images.Manifest("SHA256", ovf, disk), cert, disk}, "", content, "", true, ""},
		"the manifest last":           {[]images.TarMember{ovf, disk, images.Manifest("SHA1", ovf, disk)}, "", content, "", true, ""},
		"no manifest":                 {[]images.TarMember{ovf, disk}, "", content, "", true, ""},
		"a manifest without the disk": {[]images.TarMember{ovf, images.Manifest("SHA512", ovf), disk}, "", content, "", true, `no digest of "disk1.vmdk"`},
		"the second of two":           {[]images.TarMember{two, images.Manifest("SHA512", two, other, disk), other, disk}, "2", content, "", true, ""},
		"the second of two, in front": {[]images.TarMember{two, disk, other}, "disk1.vmdk", content, "", true, ""},
		"a disk in gzip":              {[]images.TarMember{ovf, images.Manifest("SHA256", ovf, zipped), zipped}, "", content, "", true, ""},
		"a raw disk":                  {[]images.TarMember{ovf, images.Manifest("SHA256", ovf, raw), raw}, "", raw.Body, "", true, ""},
		"a name with a space":         {[]images.TarMember{spaced, moved(disk, "a disk.vmdk")}, "", content, "", true, ""},
		"a name with a percent sign":  {[]images.TarMember{spaced, moved(disk, "a%20disk.vmdk")}, "", content, "", false, ""},
		"the disk first":              {[]images.TarMember{disk, ovf}, "", content, "", false, ""},
		"another disk in front":       {[]images.TarMember{other, two, disk}, "2", content, "", false, ""},

		"none of two":                      {[]images.TarMember{two, disk, other}, "", nil, fault.InvalidSource, true, ""},
		"no such file":                     {[]images.TarMember{ovf, other}, "", nil, fault.ExternalDataFile, true, ""},
		"a damaged disk":                   {[]images.TarMember{ovf, images.Manifest("SHA256", ovf, disk), damaged}, "", nil, fault.ChecksumMismatch, true, ""},
		"a damaged disk, manifest last":    {[]images.TarMember{ovf, damaged, images.Manifest("SHA512", ovf, disk)}, "", nil, fault.ChecksumMismatch, true, ""},
		"another description":              {[]images.TarMember{two, images.Manifest("SHA256", ovf, disk), disk}, "2", nil, fault.ChecksumMismatch, true, ""},
		"another description, last":        {[]images.TarMember{two, disk, images.Manifest("SHA256", ovf, disk)}, "2", nil, fault.ChecksumMismatch, true, ""},
		"a damaged raw disk":               {[]images.TarMember{ovf, moved(raw, "disk1.vmdk"), images.Manifest("SHA256", disk)}, "", nil, fault.ChecksumMismatch, true, ""},
		"a damaged disk in the spool":      {[]images.TarMember{damaged, ovf, images.Manifest("SHA512", ovf, disk)}, "", nil, fault.ChecksumMismatch, false, ""},
		"two manifests":                    {[]images.TarMember{ovf, disk, images.Manifest("SHA1", ovf), moved(images.Manifest("SHA1", ovf), "b.mf")}, "", nil, fault.CorruptImage, true, ""},
		"two descriptions":                 {[]images.TarMember{ovf, disk, moved(ovf, "b.ovf")}, "", nil, fault.CorruptImage, true, ""},
		"the disk twice":                   {[]images.TarMember{ovf, disk, disk}, "", nil, fault.CorruptImage, true, ""},
		"traversal behind the disk":        {[]images.TarMember{ovf, disk, moved(ovf, "../x")}, "", nil, fault.CorruptImage, true, ""},
		"a length that is another in pax":  {[]images.TarMember{ovf, {Name: "disk1.vmdk", Body: body, PAX: map[string]string{"size": "512"}}}, "", nil, fault.CorruptImage, true, ""},
		"a length of 8 GiB":                {[]images.TarMember{ovf, {Name: "disk1.vmdk", Body: body, Size: "77777777777"}}, "", nil, fault.CorruptImage, true, ""},
		"a wrong checksum behind the disk": {[]images.TarMember{ovf, disk, {Name: "x", Bad: true}}, "", nil, fault.CorruptImage, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := images.Tar(row.members...)
			opened, err := image.Open(t.Context(), stream{b}, image.Options{Disk: row.disk})
			var got []byte
			if err == nil {
				if w := strings.Join(opened.Info.Warnings, "\n"); !strings.Contains(w, row.warns) || row.warns == "" && w != "" || opened.Info.Bundle != "ova" {
					t.Errorf("opened as %+v", opened.Info)
				}
				got, err = readAll(t, opened, len(content))
				opened.Close()
			}
			if streams := reason(err) != fault.NeedsSpool; streams != row.streams {
				t.Fatalf("it was read while it passed: %v (%v), want %v", streams, err, row.streams)
			}
			if !row.streams {
				opened, err = image.Open(t.Context(), stream{b}, image.Options{Disk: row.disk, Spool: newSpool(t, 1<<30)})
				if err == nil {
					got, err = readAll(t, opened, len(content))
					opened.Close()
				}
			}
			if reason(err) != row.reason || err != nil && !fault.Of(err).Terminal {
				t.Fatalf("got %v, want %q", err, row.reason)
			}
			if row.want != nil {
				same(t, name, got, row.want)
			}
		})
	}
	whole := images.Tar(ovf, disk)
	path = filepath.Join(t.TempDir(), "vm.ova")
	write(t, filepath.Dir(path), "vm.ova", whole)
	opened, err := image.Open(t.Context(), stream{packed(t, "xz -0 -c", path)}, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := readAll(t, opened, len(content))
	if err != nil || opened.Info.Compression != "xz" || opened.Info.Bundle != "ova" {
		t.Fatalf("an OVA in xz: %+v, %v", opened.Info, err)
	}
	same(t, "an OVA in xz", got, content)
	for _, n := range []int{len(whole) - 2000, len(whole) / 2, 5 << 20} {
		got, err := importOnce(t, whole[:n], len(content), newSpool(t, 1<<30))
		if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.CorruptImage {
			t.Errorf("cut at %d of %d: %d bytes, %v", n, len(whole), len(got), err)
		}
	}
}
