package image

import (
	"bytes"
	"errors"
	"io"
	"os/exec"
	"testing"

	"github.com/ulikunitz/xz/lzma"
)

// FuzzLZMA2: what decompresses is what another decoder makes of it.
func FuzzLZMA2(f *testing.F) {
	const dictionary = 4 << 10
	content := make([]byte, 20_000)
	for i := range content {
		content[i] = byte(i * i >> 5)
	}
	for _, options := range []string{"preset=0", "preset=6,lc=0,lp=4,pb=0", "preset=3,lc=4,lp=0,pb=4", "preset=9,nice=8,mf=hc3"} {
		cmd := exec.Command("xz", "-c", "--format=raw", "--lzma2="+options+",dict=4KiB")
		cmd.Stdin = bytes.NewReader(content)
		b, err := cmd.Output()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, uint16(1), byte(0), uint16(1), byte(0))
		f.Add(b, uint16(100), byte(1), uint16(300), byte(7))
	}
	f.Add([]byte("\x01\x00\x05hello \x02\x00\x04world\x00"), uint16(1), byte(0), uint16(1), byte(0))
	// Two bytes are changed besides, because few changes make good chunks of bad ones.
	f.Fuzz(func(t *testing.T, b []byte, at uint16, change byte, at2 uint16, change2 byte) {
		if b = bytes.Clone(b); len(b) == 0 {
			return
		}
		b[int(at)%len(b)] ^= change
		b[int(at2)%len(b)] ^= change2
		const most = 8 << 20
		src := bytes.NewReader(b)
		got, err := io.ReadAll(io.LimitReader(newLZMA2(src, dictionary), most))
		var want []byte
		other, err2 := lzma.Reader2Config{DictCap: dictionary}.NewReader2(bytes.NewReader(b))
		if err2 == nil {
			want, err2 = io.ReadAll(io.LimitReader(other, most))
		}
		if errors.Is(err2, io.EOF) {
			err2 = nil // nothing but the end
		}
		switch {
		case err == nil && err2 != nil:
			t.Errorf("%d bytes, and the other says: %v", len(got), err2)
		case err == nil && !bytes.Equal(got, want):
			t.Errorf("%d bytes, and the other has %d different ones", len(got), len(want))
		}
	})
}
