package image

import (
	"io"

	"github.com/ulikunitz/xz/lzma"
)

// newLZMA2 decompresses the LZMA2 chunks of r up to their end marker, and reads
// nothing behind that. Looking back is bounded by dictionary, in bytes, which are
// allocated.
func newLZMA2(r io.Reader, dictionary int) (io.Reader, error) {
	return lzma.Reader2Config{DictCap: max(dictionary, lzma.MinDictCap)}.NewReader2(r)
}
