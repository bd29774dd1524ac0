package images

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/binary"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TarMember is a member of a tar, as honest or not as its maker likes.
type TarMember struct {
	Name string
	Body []byte
	Type byte              // 0: a file
	Size string            // the field of the header, in octal digits; "": the body's length
	PAX  map[string]string // an extended header before it
	Bad  bool              // a wrong checksum
}

// Tar puts members together by POSIX's "ustar Interchange Format".
func Tar(members ...TarMember) []byte {
	var out []byte
	for _, m := range members {
		if m.PAX != nil {
			out = append(out, TarMember{Name: "pax", Type: 'x', Body: paxRecords(m.PAX)}.bytes()...)
		}
		out = append(out, m.bytes()...)
	}
	return append(out, make([]byte, 1024)...)
}

func (m TarMember) bytes() []byte {
	h := make([]byte, 512)
	copy(h, m.Name)
	copy(h[100:], "0000644\x000000000\x000000000\x00")
	if m.Size == "" {
		m.Size = fmt.Sprintf("%011o", len(m.Body))
	}
	copy(h[124:136], m.Size)
	copy(h[136:], "00000000000\x00        ")
	if h[156] = m.Type; m.Type == 0 {
		h[156] = '0'
	}
	copy(h[257:], "ustar\x0000")
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	if m.Bad {
		sum++
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	b := append(h, m.Body...)
	return append(b, make([]byte, (512-len(b)%512)%512)...)
}

func paxRecords(list map[string]string) []byte {
	var out []byte
	for _, key := range []string{"path", "size", "GNU.sparse.major", "GNU.sparse.minor", "GNU.sparse.name", "GNU.sparse.realsize", "GNU.sparse.map", "GNU.sparse.numblocks", "GNU.sparse.size", "SCHILY.realsize", "comment"} {
		value, ok := list[key]
		if !ok {
			continue
		}
		n := len(key) + len(value) + 3
		for len(strconv.Itoa(n))+len(key)+len(value)+3 != n {
			n++
		}
		out = fmt.Appendf(out, "%d %s=%s\n", n, key, value)
	}
	return out
}

// OVF is a description of a machine with disks in these files, of which the ids
// are file1, vmdisk1 and so on, as VMware writes it.
func OVF(files ...string) string {
	var refs, disks strings.Builder
	for i, f := range files {
		fmt.Fprintf(&refs, "    <File ovf:href=%q ovf:id=\"file%d\"/>\n", f, i+1)
		fmt.Fprintf(&disks, "    <Disk ovf:capacity=\"16\" ovf:capacityAllocationUnits=\"byte * 2^20\" ovf:diskId=\"vmdisk%d\" ovf:fileRef=\"file%d\" ovf:format=\"http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized\"/>\n", i+1, i+1)
	}
	return `<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" xmlns:vmw="http://www.vmware.com/schema/ovf">
  <References>
` + refs.String() + `  </References>
  <DiskSection>
    <Info>Virtual disks</Info>
` + disks.String() + `  </DiskSection>
  <VirtualSystem ovf:id="vm"><Info>A machine &amp; more</Info></VirtualSystem>
</Envelope>
`
}

// Manifest has the digests of the members, by SHA1, SHA256 or SHA512.
func Manifest(algorithm string, members ...TarMember) TarMember {
	var out []byte
	for _, m := range members {
		var sum any
		switch algorithm {
		case "SHA1":
			sum = sha1.Sum(m.Body)
		case "SHA256":
			sum = sha256.Sum256(m.Body)
		default:
			sum = sha512.Sum512(m.Body)
		}
		out = fmt.Appendf(out, "%s(%s)= %x\n", algorithm, m.Name, sum)
	}
	return TarMember{Name: "vm.mf", Body: out}
}

// PackTar packs files of a folder with GNU tar in one of its formats.
func PackTar(t testing.TB, format, folder string, names ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "packed.tar")
	run(t, "tar", append([]string{"--format=" + format, "-C", folder, "-cf", path}, names...)...)
	return path
}

// HostileTars are tars and what may be in them that must be refused, by what is
// wrong with them.
func HostileTars() map[string][]byte {
	content := make([]byte, 1<<20)
	for i := range content {
		content[i] = byte(i>>9) | 1
	}
	copy(content[510:], "\x55\xaa")
	vmdk := VMDK{Compressed: true, Footer: true, Version: 3}.Bytes(content)
	disk := TarMember{Name: "disk1.vmdk", Body: vmdk}
	file := func(name, body string) TarMember { return TarMember{Name: name, Body: []byte(body)} }
	ovf := func(text string) []byte { return Tar(file("vm.ovf", text), disk) }
	edit := func(old, by string) []byte {
		text := OVF("disk1.vmdk")
		if !strings.Contains(text, old) {
			panic("no " + old)
		}
		return ovf(strings.Replace(text, old, by, 1))
	}
	out := map[string][]byte{}

	whole := Tar(file("vm.ovf", OVF("disk1.vmdk")), disk)
	out["cut in the disk"] = whole[:len(whole)-10<<10]
	out["cut in the first header"] = whole[:300]
	out["cut in the second header"] = whole[:len(file("vm.ovf", OVF("disk1.vmdk")).bytes())+200]
	out["a wrong checksum"] = Tar(TarMember{Name: "disk1.vmdk", Body: vmdk, Bad: true})
	out["traversal"] = Tar(TarMember{Name: "../../etc/cron.d/disk1.vmdk", Body: vmdk})
	out["traversal in the middle"] = Tar(TarMember{Name: "a/../../disk1.vmdk", Body: vmdk})
	out["an absolute name"] = Tar(TarMember{Name: "/etc/disk1.vmdk", Body: vmdk})
	out["a Windows name"] = Tar(TarMember{Name: `..\disk1.vmdk`, Body: vmdk})
	out["a name that clears the screen"] = Tar(TarMember{Name: "\x1b[2Jdisk1.vmdk", Body: vmdk})
	out["a name that is no UTF-8"] = Tar(TarMember{Name: "\xff.vmdk", Body: vmdk})
	out["a folder outside"] = Tar(TarMember{Name: "../a/", Type: '5'}, disk)
	out["no name"] = Tar(TarMember{Body: vmdk})
	out["an extended name outside"] = Tar(TarMember{Name: "disk1.vmdk", Body: vmdk, PAX: map[string]string{"path": "../disk1.vmdk"}})
	out["a name twice"] = Tar(disk, TarMember{Name: "disk1.vmdk", Body: content})
	out["a name twice in two ways"] = Tar(disk, TarMember{Name: "./x/../disk1.vmdk", Body: content}, TarMember{Name: "disk1.vmdk", Body: content})
	out["a symlink"] = Tar(disk, TarMember{Name: "x", Type: '2'})
	out["a hard link"] = Tar(disk, TarMember{Name: "x", Type: '1'})
	out["a device"] = Tar(disk, TarMember{Name: "x", Type: '4'})
	out["a FIFO"] = Tar(disk, TarMember{Name: "x", Type: '6'})
	out["a member of an unknown type"] = Tar(disk, TarMember{Name: "x", Type: 'Q'})
	out["old GNU sparse"] = Tar(TarMember{Name: "disk1.vmdk", Body: vmdk, Type: 'S'})
	out["GNU sparse 0.1"] = Tar(TarMember{Name: "disk1.vmdk", Body: vmdk, PAX: map[string]string{"GNU.sparse.size": "8589934592", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0," + strconv.Itoa(len(vmdk))}})
	out["GNU sparse 1.0"] = Tar(TarMember{Name: "disk1.vmdk", Body: append(append([]byte("1\n0\n512\n"), make([]byte, 504)...), vmdk[:512]...),
		PAX: map[string]string{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "disk1.vmdk", "GNU.sparse.realsize": "1099511627776"}})
	out["star's sparse"] = Tar(TarMember{Name: "disk1.vmdk", Body: vmdk, PAX: map[string]string{"SCHILY.realsize": "1099511627776"}})
	out["a length in a global header"] = Tar(TarMember{Name: "g", Type: 'g', Body: paxRecords(map[string]string{"size": "512"})}, disk)
	size := func(n string) []byte {
		return Tar(TarMember{Name: "disk1.vmdk", Body: vmdk, PAX: map[string]string{"size": n}})
	}
	out["an extended length of less"] = size("512")
	out["an extended length of more"] = size(strconv.Itoa(len(vmdk) + 512))
	out["an extended length of 2^63-1"] = size("9223372036854775807")
	out["an extended length of 2^64"] = size("18446744073709551616")
	out["an extended length of -1"] = size("-1")
	for name, field := range map[string]string{"8 GiB": "77777777777", "a length of text": "many bytes", "a length of -512": "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe\x00", "a length of 2^62": "\x80\x00\x00\x00\x40\x00\x00\x00\x00\x00\x00\x00", "a length of 2^90": "\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"} {
		out[name] = Tar(TarMember{Name: "disk1.vmdk", Body: vmdk, Size: field})
	}
	var many []TarMember
	for i := range 4097 {
		many = append(many, TarMember{Name: strconv.Itoa(i)})
	}
	out["too many members"] = Tar(many...)
	out["many files and no description"] = Tar(many[:257]...)
	out["nothing"] = Tar(TarMember{Name: "empty/", Type: '5'})
	out["no disk"] = Tar(file("README", "hello\n"), file("x.cert", "-----BEGIN CERTIFICATE-----"))
	out["two disks"] = Tar(disk, TarMember{Name: "disk2.vmdk", Body: vmdk}, file("README", "hello\n"))
	out["a tar in a tar"] = Tar(TarMember{Name: "inner.ova", Body: whole})
	out["a tar in an OVA"] = Tar(file("vm.ovf", OVF("inner.tar")), TarMember{Name: "inner.tar", Body: whole})
	out["a qed disk"] = Tar(TarMember{Name: "disk.qed", Body: append([]byte("QED\x00"), make([]byte, 9000)...)})
	backing := append([]byte{}, vmdk...)
	copy(backing[512:], strings.Replace(string(backing[512:512*10]), "parentCID=ffffffff", "parentCID=12345678", 1))
	out["a disk with a parent"] = Tar(file("vm.ovf", OVF("disk1.vmdk")), TarMember{Name: "disk1.vmdk", Body: backing})

	out["two descriptions"] = Tar(file("a.ovf", OVF("disk1.vmdk")), file("b.OVF", OVF("disk1.vmdk")), disk)
	out["a description of 5 MiB"] = ovf(strings.Repeat(" ", 5<<20))
	out["a description of nothing"] = ovf("")
	out["a description that is no XML"] = ovf("hello")
	out["a description cut short"] = ovf(OVF("disk1.vmdk")[:500])
	out["a description of another kind"] = ovf("<html></html>")
	out["entities"] = edit("<Envelope", `<!DOCTYPE Envelope [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]><Envelope`)
	out["an external entity"] = edit("<Envelope", `<!DOCTYPE Envelope [<!ENTITY x SYSTEM "file:///etc/shadow">]><Envelope`)
	out["an undefined entity"] = edit("&amp;", "&secret;")
	out["a huge capacity"] = edit(`capacity="16"`, `capacity="99999999999999999999999"`)
	out["a negative capacity"] = edit(`capacity="16"`, `capacity="-16"`)
	out["a huge size"] = edit(`ovf:id="file1"`, `ovf:id="file1" ovf:size="18446744073709551616"`)
	out["a size twice"] = edit(`ovf:id="file1"`, `ovf:id="file1" ovf:size="1" size="2"`)
	out["deep elements"] = edit("<Info>Virtual", strings.Repeat("<a>", 1000)+strings.Repeat("</a>", 1000)+"<Info>Virtual")
	out["two files of one id"] = edit("  </References>", `<File ovf:id="file1" ovf:href="x"/></References>`)
	out["two disks of one id"] = edit("  </DiskSection>", `<Disk ovf:diskId="vmdisk1" ovf:fileRef="file1"/></DiskSection>`)
	out["many disks"] = edit("  </DiskSection>", func() string {
		var b strings.Builder
		for i := range 1025 {
			fmt.Fprintf(&b, `<Disk ovf:diskId="%d"/>`, i)
		}
		return b.String()
	}()+"</DiskSection>")
	out["a file that is not listed"] = edit(`fileRef="file1"`, `fileRef="file7"`)
	out["a file that is not there"] = edit(`href="disk1.vmdk"`, `href="disk7.vmdk"`)
	out["a file of the web"] = edit(`href="disk1.vmdk"`, `href="http://169.254.169.254/disk1.vmdk"`)
	out["a file of the host"] = edit(`href="disk1.vmdk"`, `href="file:///etc/shadow"`)
	out["a file with an absolute name"] = edit(`href="disk1.vmdk"`, `href="/disk1.vmdk"`)
	out["a file outside"] = edit(`href="disk1.vmdk"`, `href="x/../../disk1.vmdk"`)
	out["a file outside, encoded"] = edit(`href="disk1.vmdk"`, `href="%2e%2e/disk1.vmdk"`)
	out["a file in chunks"] = edit(`ovf:id="file1"`, `ovf:id="file1" ovf:chunkSize="7"`)
	out["a difference"] = edit(`fileRef="file1"`, `fileRef="file1" ovf:parentRef="vmdisk0"`)
	out["only an empty disk"] = edit(`ovf:fileRef="file1"`, "")
	out["two disks described"] = Tar(file("vm.ovf", OVF("disk1.vmdk", "disk2.vmdk")), disk, TarMember{Name: "disk2.vmdk", Body: vmdk})

	description := file("vm.ovf", OVF("disk1.vmdk"))
	good := Manifest("SHA256", description, disk)
	out["two manifests"] = Tar(description, disk, good, file("a.mf", ""))
	out["a manifest of 2 MiB"] = Tar(description, disk, file("vm.mf", strings.Repeat("\n", 2<<20)))
	out["a manifest of MD5"] = Tar(description, disk, file("vm.mf", "MD5(vm.ovf)= 0123456789abcdef0123456789abcdef\n"))
	out["a manifest with a short digest"] = Tar(description, disk, file("vm.mf", "SHA256(vm.ovf)= 01234567\n"))
	out["a manifest that contradicts itself"] = Tar(description, disk, TarMember{Name: "vm.mf", Body: append(append([]byte{}, good.Body...), Manifest("SHA1", disk).Body...)})
	other := file("vm.ovf", strings.Replace(OVF("disk1.vmdk"), "A machine", "Another", 1))
	out["a description that was changed"] = Tar(other, disk, good)

	flat := TarMember{Name: "disk-flat.vmdk", Body: content}
	part := TarMember{Name: "disk-s001.vmdk", Body: VMDK{Descriptor: "-"}.Bytes(content)}
	several := func(createType string, extents ...string) []byte { // with the files that they name
		members := []TarMember{file("disk.vmdk", Descriptor(createType, extents...))}
		for _, m := range []TarMember{flat, part} {
			if strings.Contains(extents[0], `"`+m.Name) {
				members = append(members, m)
			}
		}
		return Tar(members...)
	}
	out["a descriptor alone"] = []byte(Descriptor("monolithicFlat", `RW 2048 FLAT "disk-flat.vmdk" 0`))
	out["a descriptor alone of 5 MiB"] = append([]byte(Descriptor("monolithicFlat", `RW 2048 FLAT "disk-flat.vmdk" 0`)), bytes.Repeat([]byte{' '}, 5<<20)...)
	out["several: a file that is not there"] = several("monolithicFlat", `RW 2048 FLAT "other-flat.vmdk" 0`)
	out["several: an absolute path"] = several("monolithicFlat", `RW 2048 FLAT "/dev/sda" 0`)
	out["several: a relative path"] = several("monolithicFlat", `RW 2048 FLAT "../disk-flat.vmdk" 0`)
	out["several: a path to another folder of the tar"] = Tar(file("a/disk.vmdk", Descriptor("monolithicFlat", `RW 2048 FLAT "../disk-flat.vmdk" 0`)), TarMember{Name: "disk-flat.vmdk", Body: make([]byte, 1<<20)})
	out["several: more than the file"] = several("monolithicFlat", `RW 2049 FLAT "disk-flat.vmdk" 0`)
	out["several: more than the file, from an offset"] = several("monolithicFlat", `RW 2048 FLAT "disk-flat.vmdk" 1`)
	out["several: an offset of 2^53"] = several("monolithicFlat", `RW 2048 FLAT "disk-flat.vmdk" 9007199254740992`)
	out["several: more than all numbers"] = several("twoGbMaxExtentFlat", "RW 9007199254740992 ZERO", "RW 1 ZERO")
	out["several: more than the extent"] = several("twoGbMaxExtentSparse", `RW 2049 SPARSE "disk-s001.vmdk"`)
	out["several: flat called sparse"] = several("twoGbMaxExtentSparse", `RW 2048 SPARSE "disk-flat.vmdk"`)
	out["several: no access"] = several("monolithicFlat", `NOACCESS 2048 FLAT "disk-flat.vmdk" 0`)
	out["several: a device"] = several("fullDevice", `RW 2048 FLAT "disk-flat.vmdk" 0`)
	out["several: a delta"] = several("vmfs", `RW 2048 VMFSSPARSE "disk-flat.vmdk"`)
	out["several: itself"] = several("twoGbMaxExtentSparse", `RW 2048 SPARSE "disk.vmdk"`)
	out["several: a parent"] = Tar(file("disk.vmdk", strings.Replace(Descriptor("monolithicFlat", `RW 2048 FLAT "disk-flat.vmdk" 0`), "parentCID=ffffffff", "parentCID=1", 1)), flat)
	out["several: a part alone"] = Tar(part)
	spoiled, p := VMDK{Descriptor: "-"}.Build(content)
	binary.LittleEndian.PutUint32(spoiled[p.Tables[0]:], uint32(len(spoiled)/512)) // in the tar, but in no file
	out["table: a grain behind its file, in the tar"] = Tar(file("disk.vmdk", Descriptor("twoGbMaxExtentSparse", `RW 2048 SPARSE "disk-s001.vmdk"`)),
		TarMember{Name: "disk-s001.vmdk", Body: spoiled}, TarMember{Name: "secret", Body: make([]byte, 1<<20)})
	return out
}
