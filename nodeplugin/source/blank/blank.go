// Package blank is the source of an empty disk: no bytes, format raw.
//
// It knows nothing of how large the disk will be: that is the target's size.
package blank

import (
	"context"
	"encoding/json"
	"io"

	"github.com/longshore-io/longshore/nodeplugin/source"
)

// Kind is the blank source; its Params are an empty object.
var Kind = source.Kind{Name: "blank", Open: open}

func open(context.Context, source.Dialer, json.RawMessage) (source.Blob, error) {
	return disk{}, nil
}

type disk struct{}

func (disk) Size() int64                 { return 0 }
func (disk) Format() string              { return "raw" }
func (disk) Validator() source.Validator { return source.Validator{Digest: "blank:0"} }
func (disk) Close() error                { return nil }

func (disk) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if len(p) == 0 {
		return 0, nil
	}
	return 0, io.EOF
}
