package image

import (
	"bytes"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// hypervisor is a blob whose source knows that it is a disk.
type hypervisor struct{ *blob }

func (hypervisor) Format() string { return "raw" }

// A disk that bears no signature is taken for one when it is named raw. What is
// known to be something else never is, save where the source itself says raw. The
// name is that of the disk: compression around it is told by the bytes.
func TestFormatIsNamed(t *testing.T) {
	zeros := make([]byte, 1<<20)
	open := func(b Blob, format string) (*Opened, error) { return Open(t.Context(), b, Options{Format: format}) }
	for _, b := range []Blob{&blob{b: zeros}, oneWay{bytes.NewReader(zeros), -1}} {
		opened, err := open(b, "raw")
		if err != nil || opened.Info.Format != "raw" || opened.Info.VirtualSize != b.Size() {
			t.Errorf("%T: %+v, %v", b, opened, err)
		}
	}
	for _, b := range []Blob{&blob{b: zipped(zeros)}, oneWay{bytes.NewReader(zipped(zeros)), -1}} {
		opened, err := open(b, "raw")
		if err != nil || opened.Info.Format != "raw" || opened.Info.Compression != "gzip" {
			t.Errorf("%T, a disk in gzip named raw: %+v, %v", b, opened, err)
		}
	}
	boot := at(1<<20, 510, "\x55\xaa")
	for _, b := range []Blob{&blob{b: boot}, oneWay{bytes.NewReader(boot), -1}} {
		if _, err := open(b, "qcow2"); fault.Of(err).Reason != fault.NotADiskImage {
			t.Errorf("%T named qcow2 and being raw: %v", b, err)
		}
	}
	for name, content := range map[string][]byte{
		"qcow2": at(1<<20, 0, "QFI\xfb\x00\x00\x00\x03"), "gzip": zipped(zipped(boot)), "vmdk": at(1<<20, 0, "KDMV"), "lzip": at(1<<20, 0, "LZIP"),
		"tar": at(1<<20, 257, "ustar"), "vhd": at(1<<20, 510, "\x55\xaa", 1<<20-512, "conectix"), "empty": {},
	} {
		for _, b := range []Blob{&blob{b: content}, oneWay{bytes.NewReader(content), int64(len(content))}} {
			if _, ranged := b.(Ranged); name == "vhd" && !ranged {
				continue // told by its last bytes
			}
			_, err := open(b, "raw")
			if f := fault.Of(err); f == nil || !f.Terminal || f.Reason != fault.NotADiskImage && name != "gzip" || !strings.Contains(err.Error(), name) {
				t.Errorf("%T: %s named raw: %v", b, name, err)
			}
		}
		if opened, err := open(hypervisor{&blob{b: content}}, "raw"); err != nil || opened.Info.Format != "raw" {
			t.Errorf("a hypervisor's disk that looks like %s: %+v, %v", name, opened, err)
		}
	}
}
