package peers

import (
	"bytes"
	"errors"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestDisk(t *testing.T) {
	d := NewDisk(t, 4*diskBlock)
	f, err := os.OpenFile(d.Path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := func(b byte) []byte { return bytes.Repeat([]byte{b}, diskBlock) }
	write := func(block int64, b byte) error {
		_, err := f.WriteAt(page(b), block*diskBlock)
		return err
	}
	holds := func(when string, blocks ...byte) {
		t.Helper()
		got := make([]byte, len(blocks)*diskBlock)
		if _, err := f.ReadAt(got, 0); err != nil {
			t.Fatal(err)
		}
		for i, b := range blocks {
			if !bytes.Equal(got[i*diskBlock:(i+1)*diskBlock], page(b)) {
				t.Errorf("%s: block %d has %d, want %d", when, i, got[i*diskBlock], b)
			}
		}
	}
	for block := range int64(4) {
		if err := write(block, 1); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	for block := range int64(3) {
		if err := write(block, 2); err != nil {
			t.Fatal(err)
		}
	}
	holds("before the power cut", 2, 2, 2, 1)
	d.CutPower(true)
	holds("after it", 2, 1, 2, 1)

	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 2*diskBlock); err != nil {
		t.Fatal(err)
	}
	d.Hook(DiskHooks{
		Write: func(off, n int64) error {
			if off == 3*diskBlock && n == diskBlock {
				return syscall.ENOSPC
			}
			return nil
		},
		Flush: func() error { return syscall.EIO },
	})
	if err := write(3, 3); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("write: got %v, want %v", err, syscall.ENOSPC)
	}
	if err := f.Sync(); !errors.Is(err, syscall.EIO) {
		t.Errorf("flush: got %v, want %v", err, syscall.EIO)
	}
	holds("after a flush that failed", 0, 1, 2, 1)
	d.Hook(DiskHooks{})
	if err := f.Sync(); err != nil {
		t.Errorf("the error of a flush is told once, got %v again", err)
	}
}
