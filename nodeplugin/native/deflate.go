//go:build cgo

package native

// #cgo LDFLAGS: -ldeflate
// #include <libdeflate.h>
//
// // whole says whether in begins with data that decompress to just out_bytes.
// static int whole(struct libdeflate_decompressor *d, int zlib, const void *in, size_t in_bytes, void *out, size_t out_bytes) {
// 	size_t used, made;
// 	enum libdeflate_result r = zlib
// 		? libdeflate_zlib_decompress_ex(d, in, in_bytes, out, out_bytes, &used, &made)
// 		: libdeflate_deflate_decompress_ex(d, in, in_bytes, out, out_bytes, &used, &made);
// 	return r == LIBDEFLATE_SUCCESS && made == out_bytes;
// }
import "C"

import (
	"runtime"
	"sync"
	"unsafe"
)

// Libraries names the C libraries that are compiled in; "" is none.
const Libraries = "libdeflate, ISA-L, liblzma"

// inflater owns a decompressor of libdeflate, which one caller uses at a time.
type inflater struct {
	c *C.struct_libdeflate_decompressor
}

var inflaters = sync.Pool{New: func() any {
	i := &inflater{C.libdeflate_alloc_decompressor()}
	runtime.AddCleanup(i, func(c *C.struct_libdeflate_decompressor) { C.libdeflate_free_decompressor(c) }, i.c)
	return i
}}

// Inflate fills out with what the DEFLATE data (RFC 1951) at the beginning of in
// decompress to. false: they do not to exactly so many bytes; out holds anything
// then.
func Inflate(out, in []byte) bool { return whole(0, out, in) }

// InflateZlib is Inflate with the header and the checksum of RFC 1950.
func InflateZlib(out, in []byte) bool { return whole(1, out, in) }

func whole(zlib C.int, out, in []byte) bool {
	i := inflaters.Get().(*inflater)
	defer inflaters.Put(i)
	if i.c == nil { // no memory
		return false
	}
	return C.whole(i.c, zlib, unsafe.Pointer(unsafe.SliceData(in)), C.size_t(len(in)), unsafe.Pointer(unsafe.SliceData(out)), C.size_t(len(out))) != 0
}
