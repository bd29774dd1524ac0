package image

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

func TestHostileVDI(t *testing.T) {
	c := func(says string) refusal { return refusal{fault.CorruptImage, says} }
	refuses(t, images.HostileVDIs(), map[string]refusal{
		"a disk of 0 bytes":                    c("size is 0 "),
		"a disk of 1 bytes":                    c("size is 1 "),
		"a disk of 511 bytes":                  c("size is 511 "),
		"a disk of 1048577 bytes":              c("16 blocks of 65536"),
		"a disk of 9223372036854775807 bytes":  c("size is 9223372036854775807 "),
		"a disk of 18446744073709551615 bytes": c("size is 18446744073709551615 "),
		"a disk of 1125899906842624 bytes":     c("size is 1125899906842624 "),
		"version 0.1":                          {fault.FormatNotSupported, "version 0.1"},
		"version 2.0":                          {fault.FormatNotSupported, "version 2.0"},
		"a header of 383 bytes":                c("length is 383"),
		"a header of 2^32-1 bytes":             c("block map"),
		"type 0":                               {fault.FormatNotSupported, "type 0"},
		"type 5":                               {fault.FormatNotSupported, "type 5"},
		"undo":                                 {fault.BackingFile, "type 3"},
		"differencing":                         {fault.BackingFile, "12345678-0102-0304-0506-0708090a0b0c"},
		"dynamic with a parent":                {fault.BackingFile, "type 1"},
		"dynamic with a parent's change":       {fault.BackingFile, "type 1"},
		"sectors of 4096 bytes":                c("sector has 4096"),
		"blocks of 0 bytes":                    c("block has 0"),
		"blocks of 256 bytes":                  c("block has 256"),
		"blocks of 3 MiB":                      c("block has 3145728"),
		"no blocks":                            c("0 blocks"),
		"2^32-1 blocks":                        c("block map has 17179869180 bytes"),
		"petabytes in blocks of 1 GiB":         c("block map has 8589934592 bytes"),
		"more allocated than there are":        c("17 of 16"),
		"a map behind the file":                c("at 1073741824"),
		"a map over the header":                c("at 0"),
		"a map off the sectors":                c("at 513"),
		"blocks over the map":                  c("begin at 512"),
		"blocks off the sectors":               c("begin at 1025"),
		"cut in the header":                    c("455 bytes"),
		"cut in the map":                       c("block map has 64 bytes"),
		"table: a block behind the file":       c("in block 16"),
		"table: a block far behind":            c("in block 4294967293"),
		"table: blocks behind the file":        c("cut short"),
		"table: an extra of 2^32-1 bytes":      c("cut short"),
		"table: cut in the last block":         c("cut short"),
	}, shortHead+vdiHeaderBytes)
}

// FuzzVDI opens a spoiled image as vdi.
func FuzzVDI(f *testing.F) {
	content := make([]byte, 256<<10)
	rand.NewChaCha8([32]byte{4}).Read(content[:100<<10])
	whole := images.VDI{Block: 64 << 10}.Bytes(content)
	f.Add([]byte{})
	for _, b := range images.HostileVDIs() {
		var seed []byte
		for at := 0; at < 1024 && at+8 <= len(b); at += 8 {
			if v := binary.BigEndian.Uint64(b[at:]); v != binary.BigEndian.Uint64(whole[at:]) {
				seed = append(seed, word(at, v)...)
			}
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, patches []byte) {
		opened, err := openVDI(t.Context(), &blob{b: patched(append([]byte{}, whole...), patches)})
		probe(t, opened, err)
	})
}
