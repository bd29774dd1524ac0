// Package native decompresses with C libraries of the distribution where cgo is
// compiled in, and with nothing where it is not.
//
// It knows nothing of images: whoever asks has a decoder in Go as well, and uses
// that where this one says no. C code sees hostile bytes, so programs with cgo
// run it in a mover's sandbox only.
package native

// Source is buffered compressed bytes; *bufio.Reader is one.
type Source interface {
	Peek(n int) ([]byte, error)
	Discard(n int) (int, error)
	Buffered() int
}
