package archive_test

import (
	"bytes"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/archive"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

// Whatever it reads, nothing comes of it outside of the folder, what is good is good for
// Check too, and what is not is a fault with a reason.
func FuzzUnpack(f *testing.F) {
	for _, h := range images.HostileArchives(f, "/canary", "canary") {
		if len(h.Tar) < 64<<10 {
			f.Add(h.Tar)
		}
	}
	f.Add(images.Archive(f, images.Folder("d"), images.File("d/f", "content"), images.Symlink("d/s", "../d/f"), images.Link("h", "d/f"), images.Link("hs", "d/s")))
	f.Fuzz(func(t *testing.T, b []byte) {
		root, canary := guarded(t)
		_, err := archive.UnpackWithin(t.Context(), oneWay{bytes.NewReader(b)}, root, 64<<20)
		unharmed(t, canary)
		_, cerr := archive.Check(t.Context(), bytes.NewReader(b))
		if f := fault.Of(err); f != nil && f.Reason == fault.Error {
			t.Errorf("an error without a reason: %v", err)
		}
		if err == nil && cerr != nil {
			t.Errorf("it was unpacked and the check says: %v", cerr)
		}
	})
}
