package image

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strings"
	"unicode/utf8"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// opening is what Open does with a format.
type opening int

const (
	refuse       opening = iota // no reader for it
	asRaw                       // the bytes are the disk
	asQcow2                     // cluster tables
	asCompressed                // an image inside, see compressions
	asVHD                       // fixed, or blocks in a table
	asVDI                       // blocks in a table
	asVHDX                      // blocks in a table, and a log
	asVMDK                      // grain tables
	asVMDKText                  // tells which files a vmdk disk is in
	asTar                       // disks inside
	asFooted                    // the disk, and behind it a vhd's footer that is still to come
)

// format is how bytes are told to be of one kind.
type format struct {
	name  string
	at    int
	magic string
	opens opening
	// is looks closer where the magic number alone does not tell; nil: it does.
	is func(b []byte) bool
}

const (
	// shortHead is enough for every container format; headBytes also for the
	// signatures of raw disks, of which some lie behind a boot area.
	shortHead = 4 << 10
	headBytes = 1<<20 + 64<<10
	footBytes = 512
)

// containers are formats that wrap a disk; each is told from its first 4 KiB.
var containers = []format{
	{name: "qcow", magic: "QFI\xfb", is: version(1)},
	{name: "qcow2", magic: "QFI\xfb", opens: asQcow2},
	{name: "gzip", magic: "\x1f\x8b", opens: asCompressed},
	{name: "qed", magic: "QED\x00"},
	{name: "vmdk", magic: vmdkMagic, opens: asVMDK},
	{name: "vmdk (COWD, of ESX)", magic: "COWD"},
	{name: "vmdk (SESPARSE, of ESX)", magic: "\xbe\xba\xfe\xca\x00\x00\x00\x00"},
	{name: "vmdk descriptor", magic: vmdkDescriptorMagic, opens: asVMDKText},
	{name: "vhdx", magic: "vhdxfile", opens: asVHDX},
	{name: "vhd", magic: vhdCookie, opens: asVHD},
	{name: "vdi", at: 0x40, magic: "\x7f\x10\xda\xbe", opens: asVDI},
	{name: "parallels", magic: "WithoutFreeSpace"},
	{name: "parallels", magic: "WithouFreSpacExt"},
	{name: "bochs", magic: "Bochs Virtual HD Image"},
	{name: "cloop", magic: "#!/bin/sh\n#V2.0 Format\n"},
	{name: "luks", magic: "LUKS\xba\xbe"},
	{name: "android sparse", magic: "\x3a\xff\x26\xed"},
	{name: "wim", magic: "MSWIM\x00\x00\x00"},
	{name: "ewf", magic: "EVF\x09\x0d\x0a\xff\x00"},
	{name: "xz", magic: xzMagic, opens: asCompressed},
	{name: "zstd", magic: "\x28\xb5\x2f\xfd", opens: asCompressed},
	{name: "zstd", at: 1, magic: "\x2a\x4d\x18", opens: asCompressed, is: func(b []byte) bool { return b[0]&0xf0 == 0x50 }}, // a frame to be skipped comes first
	{name: "bzip2", magic: "BZh", opens: asCompressed, is: func(b []byte) bool { return len(b) > 3 && b[3] >= '1' && b[3] <= '9' }},
	{name: "lzma", magic: "\x5d\x00\x00", is: lzmaHeader},
	{name: "lz4", magic: "\x04\x22\x4d\x18"},
	{name: "lzip", magic: "LZIP"},
	{name: "lzop", magic: "\x89LZO\x00"},
	{name: "zip", magic: "PK\x03\x04"},
	{name: "7z", magic: "7z\xbc\xaf\x27\x1c"},
	{name: "rar", magic: "Rar!\x1a\x07"},
	{name: "cpio", magic: "07070"},
	{name: "tar", at: 257, magic: "ustar", opens: asTar},
}

// footers are formats that are told from the last 512 bytes: their first bytes
// are the disk's own.
var footers = []format{
	{name: "vhd", magic: vhdCookie, opens: asVHD},
	{name: "vhd", at: 1, magic: vhdCookie, opens: asVHD}, // a footer of 511 bytes
	{name: "dmg", magic: "koly"},
}

// disks are the signatures of what a guest may have on a disk, from the whole
// head.
var disks = []format{
	{name: "iso", at: 32769, magic: "CD001", opens: asRaw},
	// partition tables and boot sectors
	{name: "raw", at: 510, magic: "\x55\xaa", opens: asRaw},
	{name: "raw", at: 512, magic: "EFI PART", opens: asRaw},
	{name: "raw", at: 4096, magic: "EFI PART", opens: asRaw},
	{name: "raw", at: 512, magic: "PM\x00\x00", opens: asRaw},                                                // Apple
	{name: "raw", at: 512, magic: "\x57\x45\x56\x82", opens: asRaw},                                          // BSD label
	{name: "raw", at: 508, magic: "\xda\xbe", opens: asRaw, is: func(b []byte) bool { return b[0] >= 0x20 }}, // Sun label; its text comes first
	// volumes
	{name: "raw", at: 0, magic: "LABELONE", opens: asRaw}, // LVM: in one of the first four sectors
	{name: "raw", at: 512, magic: "LABELONE", opens: asRaw},
	{name: "raw", at: 1024, magic: "LABELONE", opens: asRaw},
	{name: "raw", at: 1536, magic: "LABELONE", opens: asRaw},
	{name: "raw", at: 0, magic: "\xfc\x4e\x2b\xa9", opens: asRaw}, // md, versions 1.1 and 1.2
	{name: "raw", at: 4096, magic: "\xfc\x4e\x2b\xa9", opens: asRaw},
	{name: "raw", at: 4086, magic: "SWAPSPACE2", opens: asRaw},
	{name: "raw", at: 128 << 10, magic: "\x0c\xb1\xba\x00\x00\x00\x00\x00", opens: asRaw}, // ZFS uberblock
	{name: "raw", at: 132 << 10, magic: "\x0c\xb1\xba\x00\x00\x00\x00\x00", opens: asRaw},
	// filesystems on a whole disk
	{name: "raw", at: 1024 + 56, magic: "\x53\xef", opens: asRaw}, // ext2, 3, 4
	{name: "raw", at: 0, magic: "XFSB", opens: asRaw},
	{name: "raw", at: 64<<10 + 64, magic: "_BHRfS_M", opens: asRaw},  // btrfs
	{name: "raw", at: 1024, magic: "\x10\x20\xf5\xf2", opens: asRaw}, // f2fs
	{name: "raw", at: 1024, magic: "\xe2\xe1\xf5\xe0", opens: asRaw}, // erofs
	{name: "raw", at: 1024, magic: "H+\x00\x04", opens: asRaw},       // HFS+
	{name: "raw", at: 1024, magic: "HX\x00\x05", opens: asRaw},
	{name: "raw", at: 32, magic: "NXSB", opens: asRaw},                                    // APFS
	{name: "raw", at: 64<<10 + 52, magic: "ReIsEr", opens: asRaw},                         // reiserfs
	{name: "raw", at: 32 << 10, magic: "JFS1", opens: asRaw},                              // JFS
	{name: "raw", at: 64 << 10, magic: "\x01\x16\x19\x70", opens: asRaw},                  // GFS2
	{name: "raw", at: 8192 + 1372, magic: "\x54\x19\x01\x00", opens: asRaw},               // UFS1
	{name: "raw", at: 64<<10 + 1372, magic: "\x19\x01\x54\x19", opens: asRaw},             // UFS2
	{name: "raw", at: 0, magic: "hsqs", opens: asRaw},                                     // squashfs
	{name: "raw", at: 32769, magic: "BEA01", opens: asRaw},                                // UDF
	{name: "raw", at: 4096 + 24, magic: "\xc6\x85\x73\xf6\x4e\x1a\x45\xca", opens: asRaw}, // bcachefs
}

func version(v uint32) func([]byte) bool {
	return func(b []byte) bool { return len(b) >= 8 && binary.BigEndian.Uint32(b[4:]) == v }
}

// lzmaHeader tells a file of the LZMA tools by its 13 bytes of header, that begin
// with the default properties and have a dictionary and a length, and by the first
// byte of a range coder (https://tukaani.org/xz/lzma-file-format.txt, section 1.1).
func lzmaHeader(b []byte) bool {
	if len(b) < 14 || b[13] != 0 {
		return false
	}
	dictionary, length := binary.LittleEndian.Uint32(b[1:]), binary.LittleEndian.Uint64(b[5:])
	return bits.OnesCount32(dictionary) <= 2 && (length == math.MaxUint64 || 0 < length && length < 1<<48)
}

func (f format) matches(b []byte) bool {
	return len(b) >= f.at+len(f.magic) && string(b[f.at:f.at+len(f.magic)]) == f.magic && (f.is == nil || f.is(b))
}

// head is the beginning and the end of an image.
type head struct {
	// first fills p with the first bytes, or as many as there are.
	first func(p []byte) (int, error)
	// last is the last footBytes bytes; nil where they can't be read.
	last func() ([]byte, error)
}

// wrapper tells the format that wraps a disk, if one does.
func wrapper(h head) (f format, found bool, err error) {
	b := make([]byte, shortHead)
	n, err := h.first(b)
	if err != nil {
		return format{}, false, fmt.Errorf("read the first bytes of the image: %w", err)
	}
	if b = b[:n]; n == 0 {
		return format{}, false, fault.Terminal(fault.NotADiskImage, fmt.Errorf("the source is empty (0 bytes), not a disk image: check the url"))
	}
	for _, f := range containers {
		if f.matches(b) {
			return f, true, nil
		}
	}
	if h.last == nil {
		return format{}, false, nil
	}
	last, err := h.last()
	if err != nil {
		return format{}, false, fmt.Errorf("read the last bytes of the image: %w", err)
	}
	for _, f := range footers {
		if f.matches(last) {
			return f, true, nil
		}
	}
	return format{}, false, nil
}

// recognise tells the format of an image by its bytes, or by its name where
// somebody gives one; the compression around it is told by its bytes only.
func (o Options) recognise(h head) (format, error) {
	if o.Format == Archive {
		return recogniseArchive(h)
	}
	if o.Format == "raw" {
		f, found, err := wrapper(h)
		switch {
		case err != nil:
			return format{}, err
		case found && f.opens == asCompressed:
			return f, nil
		case found:
			return format{}, notThe("raw", f.name)
		}
		return format{name: "raw", opens: asRaw}, nil
	}
	if o.Format == "vhd" && h.last == nil {
		if _, found, err := wrapper(h); err == nil && !found {
			return format{name: "vhd", opens: asFooted}, nil
		}
	}
	f, err := recognise(h)
	if err == nil && o.Format != "" && f.name != o.Format && f.opens != asTar && f.opens != asCompressed {
		return format{}, notThe(o.Format, f.name)
	}
	return f, err
}

// recogniseArchive tells a tar, or a compression around one, from images of disks. A tar
// begins with a name, which may be anything; the oldest ones have no signature and
// are left to their reader.
func recogniseArchive(h head) (format, error) {
	tar := format{name: Archive, opens: asRaw}
	b := make([]byte, shortHead)
	n, err := h.first(b)
	switch {
	case err != nil:
		return format{}, fmt.Errorf("read the first bytes of the archive: %w", err)
	case n == 0:
		return format{}, fault.Terminal(fault.NotAnArchive, errors.New("the source is empty (0 bytes), not a tar archive: check the url"))
	case n > 257 && bytes.HasPrefix(b[257:n], []byte("ustar")):
		return tar, nil
	}
	f, found, err := wrapper(h)
	if err != nil || found && f.opens == asCompressed {
		return f, err
	}
	if found {
		return format{}, fault.Terminal(fault.NotAnArchive, fmt.Errorf("the source is not a tar archive, its own bytes say %s: give a tar, or import it as a disk (contentType kubevirt)", f.name))
	}
	return tar, nil
}

// recognise tells the format of an image that has a reader here; everything
// else is a terminal fault that names what it is.
func recognise(h head) (format, error) {
	f, found, err := wrapper(h)
	switch {
	case err != nil:
		return format{}, err
	case found:
		return f, f.refusal()
	}
	b := make([]byte, headBytes)
	n, err := h.first(b)
	if err != nil {
		return format{}, fmt.Errorf("read the first bytes of the image: %w", err)
	}
	b = b[:n]
	for _, f := range disks {
		if f.matches(b) {
			return f, nil
		}
	}
	return format{}, fault.Terminal(fault.NotADiskImage,
		fmt.Errorf("the source is not a disk image: %s; check the url (accepted are qcow2, vmdk, vhd, vhdx, vdi, ISO and raw disks that begin with a partition table, boot sector, volume or filesystem, a tar or OVA with one of them inside, and one of these in gzip, xz, zstd or bzip2; a raw disk that begins with none of these is accepted when it is named so, by --format raw or the annotation longshore.dev/image-format: raw on the VolumeImportSource)", nature(b)))
}

func (f format) refusal() error {
	if f.opens != refuse {
		return nil
	}
	return fault.Terminal(fault.FormatNotSupported,
		fmt.Errorf("the image's format %s is not supported: convert it to qcow2 or raw (qemu-img convert -O qcow2), or give the disk inside", f.name))
}

// natures name what is often found where an image should be.
var natures = []struct {
	name   string
	prefix []string // compared without regard to case
}{
	{"an HTML page (a login or error page?)", []string{"<!doctype html", "<html", "<head", "<body"}},
	{"an XML document", []string{"<?xml"}},
	{"a PDF document", []string{"%pdf-"}},
	{"an ELF program", []string{"\x7felf"}},
	{"a Windows program", []string{"mz"}},
	{"a script", []string{"#!"}},
	{"a Debian package", []string{"!<arch>\ndebian"}},
	{"an RPM package", []string{"\xed\xab\xee\xdb"}},
	{"a PNG picture", []string{"\x89png"}},
	{"a JPEG picture", []string{"\xff\xd8\xff"}},
	{"a PGP signature or message", []string{"-----begin pgp"}},
	{"a PEM file", []string{"-----begin "}},
	{"a Git LFS pointer", []string{"version https://git-lfs"}},
}

// nature says what b, the first bytes of something that is no image, looks like.
func nature(b []byte) string {
	if len(bytes.Trim(b, "\x00")) == 0 {
		return fmt.Sprintf("its first %d bytes are zeros", len(b))
	}
	text := bytes.TrimLeft(bytes.TrimPrefix(b, []byte("\xef\xbb\xbf")), " \t\r\n")
	start := strings.ToLower(string(text[:min(len(text), 64)]))
	for _, n := range natures {
		for _, p := range n.prefix {
			if strings.HasPrefix(start, p) {
				return "it is " + n.name
			}
		}
	}
	some := text[:min(len(text), 512)]
	switch {
	case len(text) == 0:
		return fmt.Sprintf("its first %d bytes are white space", len(b))
	case printable(some) && (start[0] == '{' || start[0] == '['):
		return "it is JSON: " + quote(string(some[:min(len(some), 80)]))
	case printable(some):
		return "it is text: " + quote(string(some[:min(len(some), 80)]))
	}
	return fmt.Sprintf("its first bytes %x are those of no known format", b[:min(len(b), 16)])
}

// printable tells whether b is text, the last rune cut short or not.
func printable(b []byte) bool {
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n <= 1 && len(b) >= utf8.UTFMax || r < ' ' && r != '\t' && r != '\r' && r != '\n' {
			return false
		}
		b = b[n:]
	}
	return true
}
