//go:build cgo

package native

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/ulikunitz/xz/lzma"
)

// The libraries must never make other bytes than the decoders in Go, nor take what
// is cut or fails its checksum. They may refuse more: a whole buffer is then decoded
// again in Go, and of LZMA2 Go leaves some to the checks of the container around it.

// sample is content that compresses: words, noise and zeros in turns.
func sample(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	var b []byte
	for len(b) < n {
		piece := make([]byte, 1+r.IntN(5000))
		switch r.IntN(3) {
		case 0:
			for i := range piece {
				piece[i] = byte(r.Uint32())
			}
		case 1:
			for i := range piece {
				piece[i] = "longshore "[i%10]
			}
		}
		b = append(b, piece...)
	}
	return b[:n]
}

type compressor func(w io.Writer, level int) (io.WriteCloser, error)

var (
	deflate compressor = func(w io.Writer, level int) (io.WriteCloser, error) { return flate.NewWriter(w, level) }
	deflatz compressor = func(w io.Writer, level int) (io.WriteCloser, error) { return zlib.NewWriterLevel(w, level) }
	gunzips compressor = func(w io.Writer, level int) (io.WriteCloser, error) { return gzip.NewWriterLevel(w, level) }
	chunks  compressor = func(w io.Writer, _ int) (io.WriteCloser, error) {
		return lzma.Writer2Config{DictCap: dictionary}.NewWriter2(w)
	}
)

const dictionary = 64 << 10

func compressed(t testing.TB, c compressor, content []byte, level int) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := c(&b, level)
	if err == nil {
		_, err = w.Write(content)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// way is a library, and the decoder in Go that judges it.
type way struct {
	name    string
	c       compressor
	library func(in []byte, n int) ([]byte, error)
	in      func(in []byte, n int) ([]byte, error)
	lenient bool // the library may refuse what Go takes
	// lax: the library takes codes that Go refuses, those that RFC 1951 section
	// 3.2.6 reserves and sets of codes that are not complete.
	lax bool
}

var errRefused = errors.New("refused")

func exactly(r io.Reader, err error, n int) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	b := make([]byte, n)
	_, err = io.ReadFull(r, b)
	return b, err
}

// all reads to the end, and no more than four megabytes.
func all(r io.Reader, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(r, 4<<20))
}

// awkward gives a few bytes at a time, so that everything is cut somewhere.
func awkward(in []byte) *bufio.Reader { return bufio.NewReaderSize(&few{in: in}, 16) }

type few struct {
	in []byte
	n  int
}

func (f *few) Read(p []byte) (int, error) {
	if len(f.in) == 0 {
		return 0, io.EOF
	}
	f.n++
	n := copy(p[:min(len(p), 1+f.n%37)], f.in)
	f.in = f.in[n:]
	return n, nil
}

// closing reads r and closes it.
func closing(r io.ReadCloser) ([]byte, error) {
	defer r.Close()
	return all(r, nil)
}

var ways = []way{
	{name: "deflate", c: deflate, lenient: true, lax: true, library: func(in []byte, n int) ([]byte, error) {
		if b := make([]byte, n); Inflate(b, in) {
			return b, nil
		}
		return nil, errRefused
	}, in: func(in []byte, n int) ([]byte, error) {
		return exactly(flate.NewReader(bytes.NewReader(in)), nil, n)
	}},
	{name: "zlib", c: deflatz, lenient: true, lax: true, library: func(in []byte, n int) ([]byte, error) {
		if b := make([]byte, n); InflateZlib(b, in) {
			return b, nil
		}
		return nil, errRefused
	}, in: func(in []byte, n int) ([]byte, error) {
		r, err := zlib.NewReader(bytes.NewReader(in))
		b, err := exactly(r, err, n)
		if err == nil {
			var rest []byte
			if rest, err = io.ReadAll(r); len(rest) > 0 {
				err = errRefused
			}
		}
		return b, err
	}},
	{name: "gzip", c: gunzips, lax: true, library: func(in []byte, _ int) ([]byte, error) {
		return closing(Gzip(awkward(in)))
	}, in: func(in []byte, _ int) ([]byte, error) {
		return all(gzip.NewReader(bytes.NewReader(in)))
	}},
	{name: "lzma2", c: chunks, lenient: true, library: func(in []byte, _ int) ([]byte, error) {
		return closing(LZMA2(awkward(in), dictionary))
	}, in: func(in []byte, _ int) ([]byte, error) {
		return all(lzma.Reader2Config{DictCap: dictionary}.NewReader2(bytes.NewReader(in)))
	}},
}

// check compares the verdicts of in, which should decompress to n bytes.
func (w way) check(t *testing.T, in []byte, n int) {
	t.Helper()
	got, err := w.library(in, n)
	want, werr := w.in(in, n)
	corrupt := flate.CorruptInputError(0)
	switch {
	case err != nil && werr != nil:
	case err == nil && w.lax && errors.As(werr, &corrupt):
	case err == nil && werr != nil:
		t.Errorf("%s takes %d bytes that Go refuses: %v: %x", w.name, len(in), werr, in)
	case err != nil && !w.lenient:
		t.Errorf("%s refuses %d bytes that Go takes: %v: %x", w.name, len(in), err, in)
	case err == nil && !bytes.Equal(got, want):
		t.Errorf("%s makes other bytes than Go of %x", w.name, in)
	}
}

func TestSoundDataDecompress(t *testing.T) {
	for _, w := range ways {
		for seed := range uint64(40) {
			n := 1 + int(seed*seed*131)
			content := sample(seed, n)
			in := compressed(t, w.c, content, int(seed%9)+1)
			if got, err := w.library(append(in, "behind"[:min(6*int(seed%2), len(in))]...), n); w.name != "gzip" && (err != nil || !bytes.Equal(got, content)) {
				t.Errorf("%s, %d bytes: other content (%v)", w.name, n, err)
			}
			if got, err := w.library(in, n); err != nil || !bytes.Equal(got, content) {
				t.Errorf("%s, %d bytes: other content (%v)", w.name, n, err)
			}
			w.check(t, in[:len(in)-1], n)
			w.check(t, in, n+1)
		}
	}
}

func TestMembersFollowEachOther(t *testing.T) {
	a, b := sample(1, 70_000), sample(2, 3)
	in := append(compressed(t, gunzips, a, 6), compressed(t, gunzips, b, 1)...)
	if got, err := closing(Gzip(awkward(in))); err != nil || !bytes.Equal(got, append(a, b...)) {
		t.Errorf("%d bytes of two members (%v), want %d", len(got), err, len(a)+len(b))
	}
	for _, c := range []struct {
		name string
		in   []byte
		want error
	}{
		{"nothing", nil, io.ErrUnexpectedEOF},
		{"something else", []byte("something else"), gzip.ErrHeader},
		{"something else behind the end", append(in[:len(in):len(in)], "something else"...), gzip.ErrHeader},
		{"a wrong checksum", append(in[:len(in)-8:len(in)-8], make([]byte, 8)...), gzip.ErrChecksum},
		{"cut in the checksum", in[:len(in)-2], io.ErrUnexpectedEOF},
		{"cut in the data", in[:1000], io.ErrUnexpectedEOF},
		{"cut in the header", in[:5], io.ErrUnexpectedEOF},
	} {
		if _, err := closing(Gzip(awkward(c.in))); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
	}
}

func TestNothingBehindTheEndIsTaken(t *testing.T) {
	content := sample(3, 100_000)
	src := bufio.NewReader(bytes.NewReader(append(compressed(t, chunks, content, 0), "behind"...)))
	r := LZMA2(src, dictionary)
	defer r.Close()
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes (%v), want %d", len(got), err, len(content))
	}
	if rest, err := io.ReadAll(src); string(rest) != "behind" {
		t.Errorf("%q is left (%v)", rest, err)
	}
}

// FuzzVerdicts flips and cuts sound data.
func FuzzVerdicts(f *testing.F) {
	for kind := range ways {
		f.Add(byte(kind), uint64(kind), uint16(3000), uint32(100), byte(1), []byte{})
		f.Add(byte(kind), uint64(kind), uint16(3000), uint32(3), byte(0x80), []byte{3, 0})
	}
	f.Fuzz(func(t *testing.T, kind byte, seed uint64, n uint16, at uint32, flip byte, tail []byte) {
		w := ways[int(kind)%len(ways)]
		in := compressed(t, w.c, sample(seed, int(n)), int(seed%9)+1)
		in[int(at)%len(in)] ^= flip
		w.check(t, in, int(n))
		w.check(t, append(in[:int(at)%len(in)], tail...), int(n))
		w.check(t, tail, int(n))
	})
}
