package images

import (
	"encoding/binary"
	"hash/crc32"
	"os"
	"testing"
)

// Disks that a host which looks at them would make something of. They are
// written by the documents of their formats, since the tools that make them want
// the kernel's device-mapper and md.

// LVMMember writes a disk of size bytes that is a physical volume of LVM, with
// its data area at 1 MiB: the label of lib/format_text/layout.h of lvm2 in sector 1.
func LVMMember(t testing.TB, path string, size int64) {
	t.Helper()
	le := binary.LittleEndian
	label := make([]byte, 512)
	copy(label, "LABELONE")
	le.PutUint64(label[8:], 1)   // this sector
	le.PutUint32(label[20:], 32) // where in it what follows begins
	copy(label[24:], "LVM2 001")
	copy(label[32:], "LongshoreTestsGuestsPhysicalVolu") // the UUID, 32 characters
	le.PutUint64(label[64:], uint64(size))
	le.PutUint64(label[72:], 1<<20) // data areas: offset, size (0: the rest), an empty one at the end
	le.PutUint64(label[104:], 4096) // metadata areas: offset, size, an empty one at the end
	le.PutUint64(label[112:], 1<<20-4096)
	const first = 0xf597a6cf // LVM neither begins nor ends with inverted bits
	le.PutUint32(label[16:], ^crc32.Update(^uint32(first), crc32.IEEETable, label[20:]))
	writeAt(t, path, size, 512, label)
}

// RAIDMember writes a disk of size bytes that is the only member of a complete
// RAID 1: the superblock of drivers/md/md_p.h of Linux, version 1.2, at 4 KiB.
func RAIDMember(t testing.TB, path string, size int64) {
	t.Helper()
	le := binary.LittleEndian
	const dataSector = 2048
	sectors := uint64(size / 512)
	sb := make([]byte, 256+2)
	le.PutUint32(sb, 0xa92b4efc)
	le.PutUint32(sb[4:], 1) // major version
	copy(sb[16:], "Longshore array.")
	copy(sb[32:], "guest:0")
	le.PutUint64(sb[64:], 1<<30) // made at, in seconds
	le.PutUint32(sb[72:], 1)     // level
	le.PutUint64(sb[80:], sectors-dataSector)
	le.PutUint32(sb[92:], 1) // devices
	le.PutUint64(sb[128:], dataSector)
	le.PutUint64(sb[136:], sectors-dataSector)
	le.PutUint64(sb[144:], 8) // this sector
	copy(sb[168:], "Longshore member")
	le.PutUint64(sb[192:], 1<<30)      // changed at
	le.PutUint64(sb[200:], 1)          // events
	le.PutUint64(sb[208:], ^uint64(0)) // all of it is in sync
	le.PutUint32(sb[220:], 1)          // roles; the first is device 0
	sum := uint64(le.Uint16(sb[256:]))
	for i := 0; i < 256; i += 4 {
		sum += uint64(le.Uint32(sb[i:]))
	}
	le.PutUint32(sb[216:], uint32(sum)+uint32(sum>>32))
	writeAt(t, path, size, 4096, sb)
}

func writeAt(t testing.TB, path string, size, offset int64, b []byte) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(b, offset); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}
