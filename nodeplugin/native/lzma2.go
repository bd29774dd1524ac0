//go:build cgo

package native

// #cgo LDFLAGS: -llzma
// #include <stdlib.h>
// #include <lzma.h>
//
// static int lzma2_start(lzma_stream *s, uint32_t dictionary) {
// 	lzma_options_lzma options = { .dict_size = dictionary };
// 	lzma_filter filters[] = { { LZMA_FILTER_LZMA2, &options }, { LZMA_VLI_UNKNOWN, NULL } };
// 	return lzma_raw_decoder(s, filters);
// }
//
// // lzma2_next keeps no pointer to in and out.
// static int lzma2_next(lzma_stream *s, const uint8_t *in, size_t in_bytes, uint8_t *out, size_t out_bytes, size_t *used, size_t *made) {
// 	s->next_in = in; s->avail_in = in_bytes;
// 	s->next_out = out; s->avail_out = out_bytes;
// 	int status = lzma_code(s, LZMA_RUN);
// 	*used = in_bytes - s->avail_in;
// 	*made = out_bytes - s->avail_out;
// 	s->next_in = NULL; s->next_out = NULL;
// 	s->avail_in = 0; s->avail_out = 0;
// 	return status;
// }
import "C"

import (
	"errors"
	"fmt"
	"io"
	"unsafe"
)

// LZMA2 decompresses the LZMA2 chunks of src up to their end marker and takes
// nothing behind it. Looking back is bounded by dictionary, in bytes, which are
// allocated.
func LZMA2(src Source, dictionary int) io.ReadCloser {
	// All zeros is what liblzma wants a stream to be before it is first used.
	l := &lzma2{src: src, c: (*C.lzma_stream)(C.calloc(1, C.sizeof_lzma_stream))}
	if l.c == nil {
		l.err = errMemory
	} else if status := C.lzma2_start(l.c, C.uint32_t(max(dictionary, C.LZMA_DICT_SIZE_MIN))); status != C.LZMA_OK {
		l.err = lzmaError(status)
	}
	return l
}

type lzma2 struct {
	src Source
	c   *C.lzma_stream
	err error
}

func (l *lzma2) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for l.err == nil {
		n, err := l.next(p[:min(len(p), callBytes)])
		l.err = err
		if n > 0 {
			return n, nil
		}
	}
	return 0, l.err
}

func (l *lzma2) next(p []byte) (int, error) {
	if _, err := l.src.Peek(1); err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	in, _ := l.src.Peek(min(l.src.Buffered(), callBytes))
	var used, made C.size_t
	status := C.lzma2_next(l.c, (*C.uint8_t)(unsafe.SliceData(in)), C.size_t(len(in)), (*C.uint8_t)(unsafe.SliceData(p)), C.size_t(len(p)), &used, &made)
	if _, err := l.src.Discard(int(used)); err != nil {
		return 0, err
	}
	switch {
	case status == C.LZMA_STREAM_END:
		return int(made), io.EOF
	case status != C.LZMA_OK && status != C.LZMA_BUF_ERROR:
		return int(made), lzmaError(status)
	case made == 0 && len(in) == 0:
		return 0, io.ErrUnexpectedEOF
	}
	return int(made), nil
}

// Close gives the library's memory back.
func (l *lzma2) Close() error {
	if l.c != nil {
		C.lzma_end(l.c)
		C.free(unsafe.Pointer(l.c))
	}
	l.c, l.err = nil, errClosed
	return nil
}

var errMemory = errors.New("no memory for the decompressor")

func lzmaError(status C.int) error {
	switch status {
	case C.LZMA_MEM_ERROR:
		return errMemory
	case C.LZMA_DATA_ERROR:
		return errors.New("the LZMA2 data are corrupt")
	}
	return fmt.Errorf("liblzma answers with %d", int(status))
}
