// Package file is the source that is a regular file or a block device of this
// machine, for the command line.
//
// It knows nothing of image formats. No node plugin lists it: a path in a
// cluster would be a path on the node.
package file

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// Params name the file.
type Params struct {
	Path string `json:"path"`
}

// Kind is the file source.
var Kind = source.Kind{Name: "file", Open: open}

func open(_ context.Context, _ source.Dialer, params json.RawMessage) (source.Blob, error) {
	var p Params
	if err := json.Unmarshal(params, &p); err != nil || p.Path == "" {
		return nil, fault.Terminal(fault.InvalidSource, errors.New("a file source needs the path of a file or block device"))
	}
	// Without O_NONBLOCK the open of a named pipe waits for a writer.
	f, err := os.OpenFile(p.Path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, classify(err)
	}
	b := &blob{f: f}
	if err := b.look(); err != nil {
		f.Close()
		return nil, err
	}
	return b, nil
}

// blob is an open file. A regular file is checked for change at each read.
type blob struct {
	f       *os.File
	v       source.Validator
	regular bool
}

func (b *blob) look() error {
	info, err := b.f.Stat()
	if err != nil {
		return classify(err)
	}
	switch mode := info.Mode(); {
	case mode.IsDir():
		return fault.Terminal(fault.InvalidSource, fmt.Errorf("%s is a folder: give the path of an image file or a block device", b.f.Name()))
	case mode.IsRegular():
		b.regular = true
		b.v = validator(info)
	case mode&fs.ModeDevice != 0 && mode&fs.ModeCharDevice == 0:
		size, err := b.f.Seek(0, io.SeekEnd)
		if err != nil {
			return fault.Terminal(fault.InvalidSource, fmt.Errorf("ask the size of %s: %w", b.f.Name(), err))
		}
		b.v = source.Validator{Size: size}
	default:
		return fault.Terminal(fault.InvalidSource,
			fmt.Errorf("%s is neither a file nor a block device (%s): give the path of an image file or a block device", b.f.Name(), mode.Type()))
	}
	return nil
}

// validator is strong as far as the filesystem's clock goes: device, inode,
// length and time of the last write.
func validator(info fs.FileInfo) source.Validator {
	v := source.Validator{Size: info.Size(), LastModified: info.ModTime().UTC().Format(time.RFC3339Nano)}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		v.ETag = fmt.Sprintf(`"%x-%x-%x-%x"`, st.Dev, st.Ino, st.Size, info.ModTime().UnixNano())
	}
	return v
}

func (b *blob) Size() int64                 { return b.v.Size }
func (b *blob) Validator() source.Validator { return b.v }

func (b *blob) Close() error {
	if err := b.f.Close(); err != nil && !errors.Is(err, fs.ErrClosed) {
		return err
	}
	return nil
}

func (b *blob) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	n, err := b.f.ReadAt(p, off)
	if b.regular {
		info, serr := b.f.Stat()
		if serr != nil {
			return 0, classify(serr)
		}
		if now := validator(info); now != b.v {
			return 0, fault.Transient(fault.SourceChanged,
				fmt.Errorf("%s was %d bytes of %s and is now %d bytes of %s: leave the file alone while it is read",
					b.f.Name(), b.v.Size, b.v.LastModified, now.Size, now.LastModified))
		}
	}
	if err == nil || errors.Is(err, io.EOF) {
		return n, err
	}
	return n, classify(err)
}

// classify words an error of the system as a fault.
func classify(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return fault.Terminal(fault.NotFound, fmt.Errorf("%w: check the path", err))
	case errors.Is(err, fs.ErrPermission):
		return fault.Terminal(fault.Forbidden, fmt.Errorf("%w: run as a user who may read it", err))
	}
	return fault.Transient(fault.ConnectionFailed, err)
}
