package image

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

func TestHostileVMDK(t *testing.T) {
	c := func(says string) refusal { return refusal{fault.CorruptImage, says} }
	f := func(says string) refusal { return refusal{fault.FormatNotSupported, says} }
	e := func(says string) refusal { return refusal{fault.ExternalDataFile, says} }
	refuses(t, images.HostileVMDKs(), map[string]refusal{
		"COWD":                                         f("COWD"),
		"SESPARSE":                                     f("SESPARSE"),
		"cut in the header":                            c("header has 511 bytes"),
		"cut in the descriptor":                        c("descriptor has 10240 bytes"),
		"version 0":                                    f("version 0"),
		"version 4":                                    f("version 4"),
		"unknown flags":                                f("0x40000"),
		"line ends of text":                            c("as binary"),
		"compression 2":                                f("method 2"),
		"compression without the flag":                 c("contradicts"),
		"the flag without compression":                 c("contradicts"),
		"no markers":                                   f("no markers"),
		"a disk of 0 sectors":                          c("size is 0 sectors"),
		"a disk of 9223372036854775807 sectors":        c("size is 9223372036854775807"),
		"a disk of 18446744073709551615 sectors":       c("size is 18446744073709551615"),
		"a disk of 18014398509481984 sectors":          c("size is 18014398509481984"),
		"a disk of 2^53 sectors":                       c("grain directory has 549755813888 bytes"),
		"a disk larger than its directory's room":      c("grain directory has 524288 bytes"),
		"a disk smaller than its extent":               c("1048576 bytes, its header of 512"),
		"a grain of 0 sectors":                         c("grain has 0"),
		"a grain of 1 sectors":                         c("grain has 1 "),
		"a grain of 4 sectors":                         c("grain has 4 "),
		"a grain of 96 sectors":                        c("grain has 96"),
		"a grain of 8192 sectors":                      c("grain has 8192"),
		"a grain of 9223372036854775808 sectors":       c("grain has 9223372036854775808"),
		"a grain of 18446744073709551615 sectors":      c("grain has 18446744073709551615"),
		"0 entries in a table":                         c("0 entries"),
		"1 entries in a table":                         c("1 entries"),
		"511 entries in a table":                       c("511 entries"),
		"1024 entries in a table":                      c("1024 entries"),
		"4294967295 entries in a table":                c("4294967295 entries"),
		"no descriptor":                                e("one part of a disk"),
		"a descriptor behind the file":                 c("descriptor has 10240 bytes at sector 1099511627776"),
		"a descriptor at 2^64-1":                       c("descriptor has 10240 bytes at sector 18446744073709551615"),
		"a descriptor of no sectors":                   c("descriptor has 0 sectors"),
		"a descriptor of 2^32 sectors":                 c("descriptor has 4294967296 sectors"),
		"a descriptor of 2^64-1 sectors":               c("descriptor has 18446744073709551615 sectors"),
		"a descriptor that is the data":                c("descriptor begins with"),
		"a directory nowhere":                          c("grain directory has 4 bytes at sector 0"),
		"a directory behind the file":                  c("grain directory has 4 bytes at sector 1099511627776"),
		"a directory at 2^64-2":                        c("grain directory has 4 bytes at sector 18446744073709551614"),
		"a directory at 2^55":                          c("grain directory has 4 bytes at sector 36028797018963968"),
		"a directory over the descriptor":              c("overlap"),
		"two directories in one place":                 c("overlap"),
		"a copy of the directory behind the file":      c("redundant grain directory has 4 bytes"),
		"a directory at the end without a footer":      c("no footer"),
		"cut in the end-of-stream marker":              c("cut short"),
		"cut before the footer":                        c("cut short"),
		"cut in the middle":                            c("cut short"),
		"a footer without its marker":                  c("no footer"),
		"a footer without the magic number":            c("the footer"),
		"a footer that points to a footer":             c("does not tell"),
		"a footer of another size":                     c("disagree"),
		"a footer of another version":                  c("disagree"),
		"a footer of other grains":                     c("disagree"),
		"a footer whose directory is behind the file":  c("the footer"),
		"a footer whose directory is the descriptor":   c("overlap"),
		"a parent":                                     {fault.BackingFile, `"/vmfs/base.vmdk"`},
		"a parent without a name":                      {fault.BackingFile, "12345678"},
		"a parent's name only":                         {fault.BackingFile, `"../base.vmdk"`},
		"no parentCID":                                 c("no parentCID"),
		"two parentCIDs":                               c("two values of parentcid"),
		"two types":                                    c("two values of createtype"),
		"descriptor version 9":                         f(`version "9"`),
		"no descriptor version":                        f(`version ""`),
		"encrypted":                                    {fault.EncryptedImage, "encrypted"},
		"an absolute path":                             e(`"/etc/shadow"`),
		"a relative path":                              e(`"../../etc/shadow"`),
		"a Windows path":                               e(`C:\\secrets.vmdk`),
		"a protocol":                                   e(`"nbd:127.0.0.1"`),
		"no name":                                      e(`""`),
		"a flat extent":                                e(`"/dev/sda"`),
		"a second extent":                              e(`"other.vmdk"`),
		"a type of several files":                      f("twoGbMaxExtentSparse"),
		"a type of a device":                           f("fullDevice"),
		"no type":                                      f(`type ""`),
		"no extent":                                    c("no extent"),
		"no access":                                    c("may not be read"),
		"an extent of no sectors":                      c("RW 0"),
		"an extent of -1 sectors":                      c("RW -1"),
		"an extent of 2^64 sectors":                    c("RW 18446744073709551616"),
		"an extent without a kind":                     c("RW 2048"),
		"an extent without an end":                     c("disk.vmdk"),
		"an extent larger than the header's disk":      c("tells of 2097152 bytes, its header of 1048576"),
		"a descriptor of noise":                        c("descriptor begins with"),
		"an empty descriptor":                          c("no parentCID"),
		"table: a table behind the file":               c("grain table for byte 0 has 2048 bytes at 2199023255040"),
		"table: a table over the descriptor":           c("overlaps"),
		"table: a table that is its directory":         c("overlaps"),
		"table: a copy of a table behind the file":     c("has 2048 bytes at 1099511627776"),
		"table: a copy of a table that says otherwise": c("disagree"),
		"table: a table that its copy does not know":   c("disagree"),
		"table: a grain behind the file":               c("grain for byte 131072 has 65536 bytes at 2199023255040"),
		"table: a grain of the header":                 c("overlaps"),
		"table: a grain of the directory":              c("overlaps"),
		"table: a grain of its table":                  c("overlaps its grain table"),
		"table: a compressed grain behind the file":    c("at 2199023255040"),
		"table: a compressed grain of the descriptor":  c("overlaps"),
		"table: a compressed grain that is another's":  c("for sector 640, not 256"),
		"table: a marker of another sector":            c("for sector 255, not 256"),
		"table: a marker of 2^64-1":                    c("for sector 18446744073709551615"),
		"table: a marker of no bytes":                  c("has 0 bytes"),
		"table: a marker of 2^32-1 bytes":              c("has 4294967295 bytes"),
		"table: a marker of few bytes":                 c("unexpected EOF"),
		"table: no zlib":                               c("do not decompress"),
		"table: a wrong checksum":                      c("checksum"),
		"table: a grain that inflates to 64 MiB":       c("more than the 65536 bytes"),
		"table: a grain that inflates to a byte more":  c("more than the 65536 bytes"),
		"table: a grain that inflates to a byte less":  c("unexpected EOF"),
		"table: cut in the last grain":                 c("cut short"),
		"table: cut in the last compressed grain":      c("do not decompress"),
	}, shortHead+vmdkHeaderBytes+vmdkFooterBytes+20*vmdkSector)
}

// A file has room for the tables that its directory claims, or nobody counts them.
func TestMeasureOfSharedVMDKTables(t *testing.T) {
	b, parts := images.VMDK{Grain: 8}.Build(make([]byte, 64<<20))
	for i := range parts.Tables {
		copy(b[parts.Directory+4*i:][:4], b[parts.Directory:])
	}
	opened, err := Open(t.Context(), &blob{b: b}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	small, err := Open(t.Context(), &blob{b: b[:parts.Tables[1]]}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := opened.Measure(t.Context()); err != nil {
		t.Errorf("a file with room for its tables: %v", err)
	}
	_, err = small.Measure(t.Context())
	if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.CorruptImage {
		t.Errorf("got %v, want a terminal %s", err, fault.CorruptImage)
	}
}

// FuzzVMDK opens a spoiled image as vmdk, of each kind of extent.
func FuzzVMDK(f *testing.F) {
	content := make([]byte, 200<<10)
	rand.NewChaCha8([32]byte{4}).Read(content[:100<<10])
	kinds := []images.VMDK{{Redundant: true}, {Version: 2, Zeroed: true, Grain: 8}, {Compressed: true}, {Compressed: true, Footer: true, Version: 3, Grain: 16}}
	var wholes [][]byte
	for i, k := range kinds {
		whole, parts := k.Build(content)
		wholes = append(wholes, whole)
		f.Add(uint8(i), []byte{})
		f.Add(uint8(i), word(parts.Tables[0], 0x0100000002000000))
		f.Add(uint8(i), words(word(parts.Directory, 0xffffffff_15000000), word(16, 0), word(8, 0x0700030000100000)))
		for _, g := range parts.Grains {
			if g%8 == 0 && g > 0 {
				f.Add(uint8(i), word(g, 0xff00000000000000))
				f.Add(uint8(i), word(g+8, 0x20000000_789c0000))
				break
			}
		}
	}
	for _, b := range images.HostileVMDKs() {
		var seed []byte
		for at := 0; at < 12<<10 && at+8 <= min(len(b), len(wholes[0])); at += 8 {
			if v := binary.BigEndian.Uint64(b[at:]); v != binary.BigEndian.Uint64(wholes[0][at:]) {
				seed = append(seed, word(at, v)...)
			}
		}
		f.Add(uint8(0), seed)
	}
	f.Fuzz(func(t *testing.T, kind uint8, patches []byte) {
		b := patched(append([]byte{}, wholes[int(kind)%len(wholes)]...), patches)
		opened, err := openVMDK(t.Context(), &blob{b: b})
		probe(t, opened, err)
	})
}

// FuzzVMDKDescriptor reads any text as a descriptor: no crash, and nothing but
// faults that no retry cures.
func FuzzVMDKDescriptor(f *testing.F) {
	for _, createType := range []string{"monolithicSparse", "monolithicFlat", "custom"} {
		f.Add(images.Descriptor(createType, `RW 2048 SPARSE "disk.vmdk"`, `RW 1 FLAT "a" 7`, "RW 99 ZERO", `RDONLY 5 VMFS "x"`))
	}
	for _, b := range images.HostileVMDKs() {
		if len(b) > 21*512 {
			f.Add(string(b[512 : 21*512]))
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := parseVMDKDescriptor([]byte(text))
		if err == nil {
			_, err = d.inside(vmdkHeader{size: 1 << 20})
		}
		if err != nil && !fault.Of(err).Terminal {
			t.Errorf("%v, which is not terminal", err)
		}
	})
}
