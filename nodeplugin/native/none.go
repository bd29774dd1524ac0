//go:build !cgo

package native

import "io"

// Libraries names the C libraries that are compiled in; "" is none.
const Libraries = ""

// Inflate fills out with what the DEFLATE data (RFC 1951) at the beginning of in
// decompress to. false: they do not to exactly so many bytes, or there is no
// library; out holds anything then.
func Inflate(out, in []byte) bool { return false }

// InflateZlib is Inflate with the header and the checksum of RFC 1950.
func InflateZlib(out, in []byte) bool { return false }

// Gzip decompresses the members (RFC 1952) that src has; nil: there is no library.
// Its errors are those of package gzip.
func Gzip(src Source) io.ReadCloser { return nil }

// LZMA2 decompresses the LZMA2 chunks of src up to their end marker and takes
// nothing behind it. Looking back is bounded by dictionary, in bytes, which are
// allocated. nil: there is no library.
func LZMA2(src Source, dictionary int) io.ReadCloser { return nil }
