package archive

import (
	"context"
	"io"
	"os"
)

// CheckWithin is Check with so many bytes for headers.
func CheckWithin(ctx context.Context, src io.Reader, headers int64) (Summary, error) {
	p := newPlan(MaxBytes)
	p.headers = headers
	return check(ctx, src, p)
}

// UnpackWithin is Unpack of files of so many bytes at most, on a filesystem of as many.
func UnpackWithin(ctx context.Context, src io.Reader, root *os.File, bytes int64) (Summary, error) {
	p := newPlan(bytes)
	p.longest = bytes
	return unpack(ctx, src, root, Options{}, p)
}
