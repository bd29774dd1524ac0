package image

import (
	"fmt"
	"io"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// openForward opens an image of format f that comes once, from its first byte to
// its last. It takes stream over when it returns no error.
func openForward(_ io.ReadCloser, f format, compression string) (*Opened, error) {
	if compression != "" {
		return nil, fault.Terminal(fault.FormatNotSupported,
			fmt.Errorf("a %s image inside %s is not supported: decompress it first, or give a raw disk in %s", f.name, compression, compression))
	}
	return nil, fault.Terminal(fault.SourceNotSupported,
		fmt.Errorf("a %s image is read in ranges, and this source can only be read from beginning to end: serve it from a server that answers Range requests, or give a raw or raw.gz image", f.name))
}
