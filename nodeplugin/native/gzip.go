//go:build cgo

package native

// #cgo LDFLAGS: -lisal
// #include <stdlib.h>
// #include <isa-l/igzip_lib.h>
//
// struct gunzip {
// 	struct inflate_state state;
// 	uint32_t used, made;
// 	int member_ended;
// };
//
// static void gunzip_start(struct gunzip *g) {
// 	isal_inflate_init(&g->state);
// 	g->state.crc_flag = ISAL_GZIP;
// }
//
// // gunzip_next keeps no pointer to in and out.
// static int gunzip_next(struct gunzip *g, uint8_t *in, uint32_t in_bytes, uint8_t *out, uint32_t out_bytes) {
// 	struct inflate_state *s = &g->state;
// 	s->next_in = in; s->avail_in = in_bytes;
// 	s->next_out = out; s->avail_out = out_bytes;
// 	int status = isal_inflate(s);
// 	g->used = in_bytes - s->avail_in;
// 	g->made = out_bytes - s->avail_out;
// 	g->member_ended = s->block_state == ISAL_BLOCK_FINISH;
// 	s->next_in = NULL; s->next_out = NULL;
// 	s->avail_in = 0; s->avail_out = 0;
// 	return status;
// }
import "C"

import (
	"errors"
	"io"
	"unsafe"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
)

// callBytes are the most that one call of a library is given and gives.
const callBytes = 1 << 20

// Gzip decompresses the members (RFC 1952) that src has. Its errors are those of
// package gzip.
func Gzip(src Source) io.ReadCloser {
	g := (*C.struct_gunzip)(C.malloc(C.sizeof_struct_gunzip))
	C.gunzip_start(g) // C.malloc does not return without memory
	return &gunzip{src: src, c: g}
}

type gunzip struct {
	src    Source
	c      *C.struct_gunzip
	inside bool // a member whose first byte is taken
	read   int64
	err    error
}

func (g *gunzip) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	p = p[:min(len(p), callBytes)]
	for g.err == nil {
		n, err := g.next(p)
		g.err = err
		if n > 0 {
			return n, nil
		}
	}
	return 0, g.err
}

func (g *gunzip) next(p []byte) (int, error) {
	if _, err := g.src.Peek(1); err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	// At the end of src the library may still have bytes to give.
	in, _ := g.src.Peek(min(g.src.Buffered(), callBytes))
	if len(in) == 0 && !g.inside {
		if g.read == 0 {
			return 0, io.ErrUnexpectedEOF
		}
		return 0, io.EOF
	}
	if !g.inside {
		// RFC 1952 section 2.3.1.2: an error, which the library does not make.
		if head, _ := g.src.Peek(4); len(head) == 4 && head[3]&0xe0 != 0 {
			return 0, gzip.ErrHeader
		}
		in, _ = g.src.Peek(min(g.src.Buffered(), callBytes))
	}
	g.inside = true
	status := C.gunzip_next(g.c, (*C.uint8_t)(unsafe.SliceData(in)), C.uint32_t(len(in)), (*C.uint8_t)(unsafe.SliceData(p)), C.uint32_t(len(p)))
	used, made := int(g.c.used), int(g.c.made)
	if _, err := g.src.Discard(used); err != nil {
		return 0, err
	}
	g.read += int64(used)
	switch status {
	case C.ISAL_DECOMP_OK, C.ISAL_END_INPUT, C.ISAL_OUT_OVERFLOW:
	case C.ISAL_INVALID_WRAPPER, C.ISAL_UNSUPPORTED_METHOD:
		return made, gzip.ErrHeader
	case C.ISAL_INCORRECT_CHECKSUM:
		return made, gzip.ErrChecksum
	default:
		return made, flate.CorruptInputError(g.read)
	}
	if g.c.member_ended != 0 {
		C.gunzip_start(g.c)
		g.inside = false
	} else if used == 0 && made == 0 && len(in) == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	return made, nil
}

// Close gives the library's memory back.
func (g *gunzip) Close() error {
	C.free(unsafe.Pointer(g.c))
	g.c, g.err = nil, errClosed
	return nil
}

var errClosed = errors.New("read a closed decompressor")
