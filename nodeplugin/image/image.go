// Package image recognises what kind of disk image some bytes are, and opens
// it as the disk that a guest would see.
//
// It knows nothing of where the bytes come from or go to, and never guesses
// from a name: magic numbers and headers decide. What it reads is taken for
// hostile: every length and offset is checked before it is used.
package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// Blob is the bytes of an image; it is also Ranged or OneWay.
type Blob interface {
	// Size in bytes, -1 unknown.
	Size() int64
}

// Ranged is a Blob that is read anywhere.
type Ranged interface {
	Blob
	// ReadAtContext fills p or returns an error, io.EOF where the blob ends
	// first. It is called from several goroutines at once.
	ReadAtContext(ctx context.Context, p []byte, off int64) (int, error)
}

// OneWay is a Blob that is read from its first byte to its last.
type OneWay interface {
	Blob
	// Stream starts at byte 0; reads end when ctx does.
	Stream(ctx context.Context) (io.ReadCloser, error)
}

// Options are what the caller knows about the image.
type Options struct {
	// Format is the name of one, as "raw" or "qcow2", where somebody knows it; "" recognises it from the
	// bytes. Bytes that say otherwise are refused, unless the blob itself says raw.
	// Archive opens the bytes of a tar as if they were those of a raw disk, without the
	// compression around them.
	Format string
	// Disk of a bundle (tar, OVA) by its file's name, its id in the OVA's
	// description or its number from 1; "" for the only one.
	Disk string
	// Spool, where there is one, takes the image if it has to be read again and comes
	// only once. Without one such an image is the fault NeedsSpool.
	Spool Spool
	// Pass, where there is one, has every byte of the blob go by, see Verify.
	Pass *Pass
}

// Archive is a format of no disk: that of a tar which is to be unpacked.
const Archive = "tar"

// knowing is a Blob whose source knows what it serves: the disk of a hypervisor,
// say, on which a guest may have written what looks like an image.
type knowing interface{ Format() string }

func saysRaw(b Blob) bool {
	k, ok := b.(knowing)
	return ok && k.Format() == "raw"
}

// Info describes an image.
type Info struct {
	// Format of the disk: "raw", "iso", "qcow2", "vmdk", "vhd", "vhdx", "vdi".
	Format string `json:"format"`
	// Compression around the image: "gzip", "xz", "zstd", "bzip2", "" for none.
	Compression string `json:"compression,omitempty"`
	// Bundle that the image is in: "ova", "tar", "" for none; Disk is its file's name there.
	Bundle string `json:"bundle,omitempty"`
	Disk   string `json:"disk,omitempty"`
	// ClusterCompression of the clusters or grains that are compressed, "zlib" or
	// "zstd", "" for none; see Measure.
	ClusterCompression string `json:"clusterCompression,omitempty"`
	// VirtualSize is the disk's size in bytes, -1 unknown until it is read.
	VirtualSize int64 `json:"virtualSize"`
	// AtLeast is a lower bound of the disk's size in bytes, also where
	// VirtualSize is unknown.
	AtLeast int64 `json:"atLeast"`
	// AllocatedBytes of the disk hold data, -1 unknown; see Measure.
	AllocatedBytes int64 `json:"allocatedBytes"`
	// Warnings are for the person who imports the image.
	Warnings []string `json:"warnings,omitempty"`
}

// Disk is what a guest would see.
type Disk interface {
	Size() int64
	// Extents returns the parts of [off, off+n), which must lie in the disk, in
	// order and without gaps.
	Extents(ctx context.Context, off, n int64) ([]extent.Extent, error)
	// ReadAtContext fills p or returns an error; what is not data reads as
	// zeros. It is called from several goroutines at once.
	ReadAtContext(ctx context.Context, p []byte, off int64) (int, error)
	// Grain is the length in bytes of the pieces that are read best.
	Grain() int64
}

// Opened is an open image: Disk or Stream is set, never both.
type Opened struct {
	Info Info
	// Disk is read anywhere.
	Disk Disk
	// Stream is the disk's bytes from the first to the last, where the image
	// can only be read one way. Its reads end with the context of Open.
	Stream io.ReadCloser
	blocks *blocked // what Disk reads from, where it is one of these
	tape   *tape
	passed *passed
	end    func(context.Context) error // checks what comes behind the disk's data; nil: nothing does
	below  io.Closer                   // what Disk reads from in the end
	// Digests are what a bundle's manifest says of the files that the disk is in, and
	// what Verify does not compare: whoever has all bytes of a ranged blob go by (see
	// Pass) can do it.
	Digests []Digest
}

// Close ends the stream, if there is one; the blob stays the caller's.
func (o *Opened) Close() error {
	var err error
	for _, c := range []io.Closer{o.below, o.Stream} {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	return err
}

// Verify compares what is left of the checks that are in the image, once the disk
// has been read as far as it is needed, and has what is left of the blob go by where
// there is a Pass. A stream that has come to its end, and a raw disk that was read to
// its end, have no check left.
func (o *Opened) Verify(ctx context.Context) error {
	if o.blocks != nil && o.blocks.keepRecent {
		return o.blocks.verify(ctx)
	}
	if o.end != nil {
		if err := o.end(ctx); err != nil {
			return err
		}
	}
	if o.tape != nil && (o.Info.Compression != "" || o.passed != nil) {
		to := int64(math.MaxInt64)
		if o.passed != nil && o.passed.pass.To > 0 {
			to = o.passed.pass.To
		}
		if err := o.tape.rest(ctx, to); err != nil {
			return err
		}
	}
	if o.passed != nil {
		return o.passed.rest(ctx)
	}
	return nil
}

// Measure returns Info with AllocatedBytes and ClusterCompression found out
// where that is possible: the metadata of the whole image is read.
func (o *Opened) Measure(ctx context.Context) (Info, error) {
	info := o.Info
	if o.Disk == nil || info.AllocatedBytes >= 0 {
		return info, nil
	}
	disk := o.Disk
	if d, ok := disk.(inParts); ok {
		disk = d.Disk
	}
	m, ok := disk.(*mapped)
	if !ok {
		return info, nil
	}
	data, compressed, err := m.measure(ctx)
	if f := (*fault.Fault)(nil); errors.As(err, &f) && f.Reason == fault.NeedsSpool {
		return info, nil
	}
	if err != nil {
		return info, fmt.Errorf("count the allocated bytes: %w", err)
	}
	info.AllocatedBytes = data
	if compressed > 0 {
		info.ClusterCompression = m.packed.compression()
	}
	return info, nil
}

// Open recognises the image in blob and opens it. Errors are faults.
//
// Everything that can be refused is refused here, from headers: nothing of the
// disk has been read yet, save the first bytes of a stream.
func Open(ctx context.Context, blob Blob, o Options) (opened *Opened, err error) {
	switch b := blob.(type) {
	case Ranged:
		opened, err = openRanged(ctx, b, o)
	case OneWay:
		opened, err = openOneWay(ctx, b, o)
	default:
		err = fault.Terminal(fault.SourceNotSupported, fmt.Errorf("a source of type %T can be read neither in ranges nor one way", blob))
	}
	if err == nil && o.Disk != "" && opened.Info.Bundle == "" {
		opened.Close()
		return nil, fault.Terminal(fault.InvalidSource, fmt.Errorf("disk %s is chosen, and the image is one disk and no bundle of several: leave the choice out", quote(o.Disk)))
	}
	return opened, err
}

// headOf reads the beginning and the end of b when they are asked for.
func headOf(ctx context.Context, b Ranged) head {
	return head{
		first: func(p []byte) (int, error) { return readUpTo(ctx, b, p, 0) },
		last: func() ([]byte, error) {
			p := make([]byte, min(b.Size(), footBytes))
			_, err := readUpTo(ctx, b, p, b.Size()-int64(len(p)))
			return p, err
		},
	}
}

// openRanged opens a blob that can be read anywhere.
func openRanged(ctx context.Context, b Ranged, o Options) (*Opened, error) {
	if b.Size() < 0 {
		return nil, fault.Terminal(fault.SourceNotSupported, errors.New("the source can be read in ranges but does not tell its size"))
	}
	h, f := headOf(ctx, b), format{name: "raw", opens: asRaw}
	if !saysRaw(b) {
		var err error
		if f, err = o.recognise(h); err != nil {
			return nil, err
		}
	}
	switch {
	case f.opens == asCompressed:
		return openCompressed(ctx, b, compressionOf(f), h, o)
	case o.Pass != nil && o.Pass.Pinned:
		return openPassing(ctx, b, f, o)
	case o.Pass != nil:
		src := o.Pass.stream(newReadAhead(ctx, b, 0, passDepth), 0)
		opened, err := openOnce(ctx, src, b.Size(), f, o)
		if err != nil {
			src.Close()
			return nil, err
		}
		opened.passed = src
		return opened, nil
	}
	return openAs(ctx, b, f, o)
}

// openAs opens an image of format f, which is no compression.
func openAs(ctx context.Context, b Ranged, f format, o Options) (*Opened, error) {
	switch f.opens {
	case asQcow2:
		return openQcow2(ctx, b)
	case asVHD, asFooted:
		return openVHD(ctx, b)
	case asVDI:
		return openVDI(ctx, b)
	case asVHDX:
		return openVHDX(ctx, b)
	case asVMDK:
		return openVMDK(ctx, b)
	case asVMDKText:
		return openVMDKText(ctx, b)
	case asTar:
		return openTar(ctx, b, o)
	}
	return openRaw(b, f.name), nil
}

// openOneWay opens a blob that is read from its beginning.
func openOneWay(ctx context.Context, b OneWay, o Options) (*Opened, error) {
	stream, err := b.Stream(ctx)
	if err != nil {
		return nil, err
	}
	var tapped *passed
	if o.Pass != nil {
		tapped = o.Pass.stream(stream, 0)
		stream = tapped
	}
	opened, err := openStream(ctx, b.Size(), stream, o, saysRaw(b))
	if err != nil {
		stream.Close()
		return nil, err
	}
	opened.passed = tapped
	return opened, nil
}

func openStream(ctx context.Context, size int64, stream io.ReadCloser, o Options, sure bool) (*Opened, error) {
	if sure {
		return &Opened{Info: Info{Format: "raw", VirtualSize: size, AtLeast: max(size, 0), AllocatedBytes: -1}, Stream: stream}, nil
	}
	r := &peeker{r: stream}
	f, err := o.recognise(head{first: r.peek})
	if err != nil {
		return nil, err
	}
	first := make([]byte, shortHead)
	n, err := r.peek(first)
	if err != nil {
		return nil, err
	}
	opened, err := openOnce(ctx, both{r, stream}, size, f, o)
	if err == nil && opened.Stream != nil && f.opens == asCompressed {
		if c := compressionOf(f); c.atLeast != nil {
			opened.bytes(c.atLeast(first[:n], nil))
		}
	}
	return opened, err
}

// openOnce opens an image of format f that comes once. It takes stream over when it
// returns no error.
func openOnce(ctx context.Context, stream io.ReadCloser, size int64, f format, o Options) (*Opened, error) {
	switch f.opens {
	case asCompressed:
		return openPacked(ctx, stream, compressionOf(f), o)
	case asFooted:
		if o.Spool != nil {
			return openSpooled(ctx, stream, f, "", o)
		}
		fallthrough
	case asRaw:
		return openFooted(stream, size, f, o), nil
	}
	return openForward(ctx, stream, size, f, "", o)
}

func notThe(want, got string) error {
	return fault.Terminal(fault.NotADiskImage, fmt.Errorf("the image is named %s (by --format, or the annotation longshore.dev/image-format), and its own bytes say %s: correct the format or leave it out", want, got))
}

// both reads from one and closes the other.
type both struct {
	io.Reader
	io.Closer
}

// readUpTo reads p, or as much of it as there is.
func readUpTo(ctx context.Context, b Ranged, p []byte, off int64) (int, error) {
	n := int(max(0, min(int64(len(p)), b.Size()-off)))
	if n == 0 {
		return 0, nil
	}
	return readExactly(ctx, b, p[:n], off)
}

// readExactly fills p; bytes that the blob does not have are a corrupt image.
func readExactly(ctx context.Context, b Ranged, p []byte, off int64) (int, error) {
	n, err := b.ReadAtContext(ctx, p, off)
	if n == len(p) {
		return n, nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return n, fault.Terminal(fault.CorruptImage, fmt.Errorf("read %d bytes of the image at %d, got %d: the image is cut short, upload it again", len(p), off, n))
	}
	return n, err
}

// peeker reads the first bytes of a stream so that they can be read again.
type peeker struct {
	r      io.Reader
	peeked []byte
	err    error
}

// peek fills p with the first bytes of the stream, or as many as it has.
func (p *peeker) peek(out []byte) (int, error) {
	if more := len(out) - len(p.peeked); more > 0 && p.err == nil {
		buf := make([]byte, more)
		var n int
		for n < len(buf) && p.err == nil {
			var m int
			m, p.err = p.r.Read(buf[n:])
			n += m
		}
		p.peeked = append(p.peeked, buf[:n]...)
	}
	n := copy(out, p.peeked)
	if n < len(out) && p.err != nil && !errors.Is(p.err, io.EOF) {
		return n, p.err
	}
	return n, nil
}

func (p *peeker) Read(out []byte) (int, error) {
	if len(p.peeked) > 0 {
		n := copy(out, p.peeked)
		if p.peeked = p.peeked[n:]; len(p.peeked) == 0 {
			p.peeked = nil
		}
		return n, nil
	}
	if p.err != nil {
		return 0, p.err
	}
	return p.r.Read(out)
}

// raw is an image that is the disk itself.
type raw struct{ Ranged }

func openRaw(b Ranged, format string) *Opened {
	return &Opened{
		Info: Info{Format: format, VirtualSize: b.Size(), AtLeast: b.Size(), AllocatedBytes: b.Size()},
		Disk: raw{b},
	}
}

func (r raw) Extents(_ context.Context, off, n int64) ([]extent.Extent, error) {
	if off < 0 || n < 0 || n > r.Size()-off {
		return nil, fmt.Errorf("extents of %d bytes at %d of a disk of %d", n, off, r.Size())
	}
	return extent.Append(nil, extent.Extent{Start: off, Length: n, Kind: extent.Data}), nil
}

func (r raw) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	return readExactly(ctx, r.Ranged, p, off)
}

func (raw) Grain() int64 { return 1 }

// quote shortens what came from an image for a message.
func quote(s string) string {
	if len(s) > 200 {
		s = s[:200] + "..."
	}
	return fmt.Sprintf("%q", strings.ToValidUTF8(s, "?"))
}
