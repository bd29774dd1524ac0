package images

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
)

// Qcow2 is a valid image of version 3 that a test then spoils: a disk of 1 MiB,
// clusters of 64 KiB, L1 table in cluster 1, all of it a hole.
func Qcow2() []byte {
	b := make([]byte, 256<<10)
	copy(b, "QFI\xfb")
	put32(b, 4, 3)
	put32(b, 20, 16)
	put64(b, 24, 1<<20)
	put32(b, 36, 1)
	put64(b, 40, 64<<10)
	put64(b, 48, 128<<10)
	put32(b, 56, 1)
	put32(b, 96, 4)
	put32(b, 100, 112)
	return b
}

func put32(b []byte, at int, v uint32) { binary.BigEndian.PutUint32(b[at:], v) }
func put64(b []byte, at int, v uint64) { binary.BigEndian.PutUint64(b[at:], v) }

// HostileQcow2s are qcow2 images that must be refused, by what is wrong with them. A name
// that begins with "table: " is wrong in what only its tables tell.
func HostileQcow2s() map[string][]byte {
	out := map[string][]byte{}
	for name, spoil := range map[string]func(b []byte) []byte{
		"cut in the header":              func(b []byte) []byte { return b[:71] },
		"cut in the header of version 3": func(b []byte) []byte { return b[:103] },
		"version 4":                      func(b []byte) []byte { put32(b, 4, 4); return b },
		"clusters of 256 bytes":          func(b []byte) []byte { put32(b, 20, 8); return b },
		"clusters of 4 MiB":              func(b []byte) []byte { put32(b, 20, 22); return b },
		"cluster bits of 2^32-1":         func(b []byte) []byte { put32(b, 20, 1<<32-1); return b },
		"backing file":                   func(b []byte) []byte { put64(b, 8, 512); put32(b, 16, 11); copy(b[512:], "/etc/shadow"); return b },
		"backing file, name outside":     func(b []byte) []byte { put64(b, 8, 1<<63); put32(b, 16, 1023); return b },
		"backing file, long name":        func(b []byte) []byte { put64(b, 8, 512); put32(b, 16, 1<<32-1); return b },
		"external data file": func(b []byte) []byte {
			put64(b, 72, 4)
			put32(b, 112, 0x44415441)
			put32(b, 116, 9)
			copy(b[120:], "/dev/sda1")
			return b
		},
		"external data file without the bit": func(b []byte) []byte {
			put32(b, 112, 0x44415441)
			put32(b, 116, 4)
			copy(b[120:], "/x/y")
			return b
		},
		"external data file without a name": func(b []byte) []byte { put64(b, 72, 4); return b },
		"AES":                               func(b []byte) []byte { put32(b, 32, 1); return b },
		"LUKS":                              func(b []byte) []byte { put32(b, 32, 2); return b },
		"encryption of another kind":        func(b []byte) []byte { put32(b, 32, 77); return b },
		"unknown features, one with a name": func(b []byte) []byte {
			put64(b, 72, 1<<17|1<<63)
			put32(b, 112, 0x6803f857)
			put32(b, 116, 48)
			copy(b[120:], "\x00\x11teleport")
			return b
		},
		"marked corrupt":                   func(b []byte) []byte { put64(b, 72, 2); return b },
		"header length 0":                  func(b []byte) []byte { put32(b, 100, 0); return b },
		"header length of 2^32-1":          func(b []byte) []byte { put32(b, 100, 1<<32-1); return b },
		"refcount order 7":                 func(b []byte) []byte { put32(b, 96, 7); return b },
		"compression type without the bit": func(b []byte) []byte { b[104] = 1; return b },
		"compression bit without the type": func(b []byte) []byte { put64(b, 72, 8); return b },
		"compression type 9":               func(b []byte) []byte { put64(b, 72, 8); b[104] = 9; return b },
		"extended entries with small clusters": func(b []byte) []byte {
			put64(b, 72, 16)
			put32(b, 20, 13)
			return b
		},
		"a disk of 2^64-1 bytes":             func(b []byte) []byte { put64(b, 24, 1<<64-1); return b },
		"a disk of 2^62 bytes":               func(b []byte) []byte { put64(b, 24, 1<<62); return b },
		"an L1 table too small for the disk": func(b []byte) []byte { put64(b, 24, 513<<20); return b },
		"an L1 table of 2^32-1 entries":      func(b []byte) []byte { put32(b, 36, 1<<32-1); return b },
		"an L1 table behind the file":        func(b []byte) []byte { put64(b, 40, 1<<40); return b },
		"an L1 table at 2^64-65536":          func(b []byte) []byte { put64(b, 40, 1<<64-65536); return b },
		"an L1 table across the end":         func(b []byte) []byte { put32(b, 36, 32<<10); return b },
		"an L1 table off the clusters":       func(b []byte) []byte { put64(b, 40, 64<<10+8); return b },
		"an L1 table at 0":                   func(b []byte) []byte { put64(b, 40, 0); return b },
		"a refcount table behind the file":   func(b []byte) []byte { put32(b, 56, 1<<32-1); return b },
		"a disk of 2^63-1 bytes":             func(b []byte) []byte { put64(b, 24, 1<<63-1); return b },
		"a disk of 2^50 bytes":               func(b []byte) []byte { put64(b, 24, 1<<50); put32(b, 36, 1<<21); return b },
		"a refcount table in the header":     func(b []byte) []byte { put64(b, 48, 0); return b },
	} {
		out[name] = spoil(Qcow2())
	}
	for _, name := range []string{`json:{"driver":"file","filename":"/etc/shadow"}`, "nbd:127.0.0.1:10809", "../../base.qcow2"} {
		b := Qcow2()
		put64(b, 8, 512)
		put32(b, 16, uint32(len(name)))
		copy(b[512:], name)
		out["backing file "+name] = b
	}
	table := func(version, bits uint32, entries ...uint64) []byte {
		b := Qcow2()
		put32(b, 4, version)
		put32(b, 20, bits)
		if bits != 16 {
			put64(b, 24, 1<<13)
		}
		put64(b, 64<<10, 192<<10)
		for i, e := range entries {
			put64(b, 192<<10+8*i, e)
		}
		return b
	}
	l1 := func(entry uint64) []byte {
		b := Qcow2()
		put64(b, 64<<10, entry)
		return b
	}
	extended := func(entry, bitmap uint64) []byte {
		b := table(3, 16, entry, bitmap)
		put64(b, 72, 1<<4)
		return b
	}
	out["table: an L2 table behind the file"] = l1(1 << 40)
	out["table: an L2 table across the end"] = l1(256 << 10)
	out["table: an L2 table off the clusters"] = l1(64<<10 + 512)
	out["table: a cluster behind the file"] = table(3, 16, 1<<40)
	out["table: a cluster at the end"] = table(3, 16, 256<<10)
	out["table: a cluster off the clusters"] = table(3, 16, 64<<10+512)
	out["table: zeros in version 2"] = table(2, 16, 1)
	out["table: a compressed cluster behind the file"] = table(3, 16, 1<<62|256<<10)
	out["table: a compressed cluster of noise"] = table(3, 16, 1<<62|1)
	out["table: a compressed cluster of nothing"] = table(3, 16, 1<<62|128<<10)
	out["table: an L2 table that is its own cluster, compressed"] = table(3, 16, 1<<62|192<<10)
	out["table: a subcluster that is data and zero"] = extended(128<<10, 1<<32|1)
	out["table: a subcluster of data nowhere"] = extended(0, 1)
	return out
}

// StrangeQcow2s are qcow2 images of which every byte comes from themselves, though no
// writer makes such: QEMU reads them too.
func StrangeQcow2s() map[string][]byte {
	out := map[string][]byte{}
	for name, spoil := range map[string]func(b []byte){
		"a disk of 0 bytes":                      func(b []byte) { put64(b, 24, 0) },
		"a disk of 1 bytes":                      func(b []byte) { put64(b, 24, 1) },
		"a disk of 511 bytes":                    func(b []byte) { put64(b, 24, 511) },
		"an L1 table that is the refcount table": func(b []byte) { put64(b, 40, 128<<10) },
		"an L2 table that is its L1 table":       func(b []byte) { put64(b, 64<<10, 64<<10) },
		"an L2 table that is the refcount table": func(b []byte) { put64(b, 64<<10, 128<<10) },
		"a cluster that is its L2 table":         func(b []byte) { put64(b, 64<<10, 192<<10); put64(b, 192<<10, 192<<10) },
		"two clusters in one place":              func(b []byte) { put64(b, 64<<10, 192<<10); put64(b, 192<<10, 128<<10); put64(b, 192<<10+8, 128<<10) },
		"a disk of 4 TiB that has one L2 table": func(b []byte) {
			put64(b, 24, 4<<40)
			put32(b, 36, 8<<10)
			for i := range 8 << 10 {
				put64(b, 64<<10+8*i, 192<<10)
			}
		},
	} {
		b := Qcow2()
		spoil(b)
		out[name] = b
	}
	return out
}

// Bombs are a few bytes that decompress to much: 96 MiB that begin as a disk does.
func Bombs(t testing.TB) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	for name, command := range map[string]string{"gzip": "gzip -1", "xz": "xz -0 -T1", "xz in blocks": "xz -0 --block-size=8MiB", "zstd": "zstd -q -1", "bzip2": "bzip2 -1"} {
		disk := filepath.Join(t.TempDir(), "disk")
		run(t, "sh", "-c", `{ head -c 510 /dev/zero; printf '\125\252'; head -c 96M /dev/zero; } | `+command+` -c >"$0"`, disk)
		b, err := os.ReadFile(disk)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = b
	}
	return out
}
