package image

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/test/images"
)

// FuzzForward reads an image as it passes and in ranges. What passes is the same disk in
// ranges; what ranges refuse does not pass; what else does not pass is refused for good, or
// for the spool. (A vmdk image may have grains that no table knows: in ranges nobody
// comes by them.)
func FuzzForward(f *testing.F) {
	content := make([]byte, 40*4096+512)
	rnd := rand.NewChaCha8([32]byte{4})
	rnd.Read(content[:3*4096])
	copy(content[510:], "\x55\xaa")
	copy(content[20*4096:], bytes.Repeat([]byte("longshore "), 3000))
	rnd.Read(content[40*4096:])
	for _, v := range []images.VMDK{
		{Compressed: true, Footer: true, Version: 3, Grain: 8}, {Compressed: true, Footer: true, Version: 3, Grain: 8, Zeroed: true}, {Compressed: true, Footer: true, Version: 3, Grain: 64},
		{Compressed: true, Grain: 8}, {Compressed: true, Redundant: true, Grain: 8}, {Compressed: true, Backwards: true, Grain: 8},
	} {
		f.Add(v.Bytes(content))
	}
	for _, corpus := range []map[string][]byte{images.HostileQcow2s(), images.StrangeQcow2s(), images.HostileVMDKs()} {
		for _, b := range corpus {
			if len(b) <= 256<<10 {
				f.Add(b)
			}
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := readForward(t.Context(), b)
		want, wantErr := readRanged(t.Context(), b)
		switch was := fault.Of(err); {
		case errors.Is(err, errFuzzed) || errors.Is(wantErr, errFuzzed):
		case err == nil && wantErr != nil:
			t.Errorf("it passes, and in ranges: %v", wantErr)
		case err == nil && !bytes.Equal(got, want):
			t.Error("in ranges it is another disk")
		case err != nil && !was.Terminal:
			t.Errorf("%v is not terminal", err)
		case err != nil && wantErr == nil && was.Reason != fault.NeedsSpool && !bytes.HasPrefix(b, []byte(vmdkMagic)):
			t.Errorf("%v, and in ranges it is a disk", err)
		}
	})
}

// errFuzzed is of a disk that takes too long to read.
var errFuzzed = errors.New("too long")

func readForward(ctx context.Context, b []byte) ([]byte, error) {
	tape := newTape(io.NopCloser(bytes.NewReader(b)), -1)
	if err := tape.pass(int64(min(len(b), 1000))); err != nil {
		return nil, err
	}
	open := func() (*Opened, error) { return openQcow2(ctx, tape) }
	if bytes.HasPrefix(b, []byte(vmdkMagic)) {
		open = func() (*Opened, error) { return openVMDKForward(ctx, tape) }
	}
	opened, err := open()
	if err != nil {
		return nil, err
	}
	disk, err := readWhole(ctx, opened.Disk)
	if err == nil {
		err = opened.Verify(ctx)
	}
	return disk, err
}

func readRanged(ctx context.Context, b []byte) ([]byte, error) {
	open := openQcow2
	if bytes.HasPrefix(b, []byte(vmdkMagic)) {
		open = openVMDK
	}
	opened, err := open(ctx, &blob{b: b})
	if err != nil {
		return nil, err
	}
	return readWhole(ctx, opened.Disk)
}

// readWhole reads a disk as a copy of one worker does.
func readWhole(ctx context.Context, d Disk) ([]byte, error) {
	if d.Size() > 8<<20 {
		return nil, errFuzzed
	}
	disk := make([]byte, d.Size())
	for off := int64(0); off < d.Size(); {
		n := min(256<<10, d.Size()-off)
		if _, err := d.Extents(ctx, off, n); err != nil {
			return nil, err
		}
		if _, err := d.ReadAtContext(ctx, disk[off:off+n], off); err != nil {
			return nil, err
		}
		off += n
	}
	return disk, nil
}
