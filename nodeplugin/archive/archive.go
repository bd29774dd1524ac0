// Package archive unpacks a tar into a folder, which it never leaves.
//
// It knows nothing of where the tar comes from, of compression, volumes or journals:
// it is told how much of the tar is unpacked already, and says what has become so.
// What it reads is taken for hostile: whatever a member's header tells is checked
// before a byte of that member is written.
//
// Formats: ustar and pax of POSIX.1 ("pax Interchange Format"), GNU tar's own with long
// names and sparse files of all its versions, and the one of Unix version 7.
package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const (
	// MaxFileBytes is as long as the files of an archive may become, all together
	// and with their holes: the longest file of an ext4 with blocks of 4096 bytes.
	// Beyond that, the reading of what is but holes takes too long.
	MaxFileBytes = 16 << 40
	// MaxBytes is as long as a tar may be, decompressed: more than any volume has.
	MaxBytes = 1 << 50

	chunkBytes = 1 << 20 // are read and written at once
	blockBytes = 4096    // of nothing but zeros become, or stay, a hole
	tellBytes  = 1 << 20 // are gathered before they are told to be done

	maxHeaders = 4 << 30  // bytes of a tar that are no content
	maxTail    = 64 << 20 // bytes of it behind its end; tar fills up a record, of 10 KiB if not told otherwise
)

// Options say what was unpacked before, and who wants to know what is.
type Options struct {
	// Done is how many bytes of the tar, from its beginning, an earlier run has
	// unpacked, in the sum of what it told Ledger.
	Done int64
	// Compare says whether n bytes that are Done already are compared with the
	// file that they should be in; nil: none are. What differs is the fault SourceChanged.
	Compare func(n int64) bool
	// Ledger is told that the bytes [off, off+n) of the tar are unpacked; not
	// that they are durable. nil: nobody wants to know.
	Ledger func(ctx context.Context, off, n int64) error
}

// Summary is what a tar holds.
type Summary struct {
	// Bytes of the tar itself, decompressed.
	Bytes int64
	// Data are the bytes of the content of its files, without the holes of sparse ones.
	Data int64
	// Entries are the files, folders and links that come of it, the folders that
	// are only in their names included.
	Entries int64
}

// Check reads the headers of a tar from its beginning to its end and returns the fault
// for which Unpack would stop, if there is one. A src that is an io.Seeker too is
// read at the headers only.
func Check(ctx context.Context, src io.Reader) (Summary, error) {
	return check(ctx, src, newPlan(MaxBytes))
}

func check(ctx context.Context, src io.Reader, p *plan) (Summary, error) {
	in := newInput(src)
	if err := walk(ctx, in, p, func(string, *tar.Header, *tar.Reader) error { return nil }); err != nil {
		return Summary{}, err
	}
	return p.summary(in), nil
}

// Fit returns the fault ImageTooLarge if the filesystem of root, on which
// nothing of the tar lies yet, has no room for s.
func Fit(root *os.File, s Summary) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &st); err != nil {
		return fault.Transient(fault.TargetError, fmt.Errorf("ask the filesystem for its room: %w", err))
	}
	free := int64(st.Bavail) * st.Bsize
	if s.Data <= free && (st.Files == 0 || uint64(s.Entries) <= st.Ffree) {
		return nil
	}
	return fault.Terminal(fault.ImageTooLarge, fmt.Errorf("the archive holds %d bytes in %d files and folders, and there is room for %d bytes in %d: request at least %d bytes (spec.resources.requests.storage of the claim)",
		s.Data, s.Entries, free, st.Ffree, (int64(st.Blocks)*st.Bsize-free+s.Data)/(1<<20)*(1<<20)+1<<20))
}

// Unpack makes in root, a folder of a filesystem of its own, what the tar holds: files
// with holes where these have zeros, folders, symbolic and hard links, with the modes
// (without set-user-ID and set-group-ID) and times of the tar and the owner that this process
// has. Symbolic links are made, and the modes and times of folders are set, when all the rest is
// there. A run with Done goes on with what an earlier one of the same tar left in root.
func Unpack(ctx context.Context, src io.Reader, root *os.File, o Options) (Summary, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &st); err != nil {
		return Summary{}, fault.Transient(fault.TargetError, fmt.Errorf("ask the filesystem for its size: %w", err))
	}
	return unpack(ctx, src, root, o, newPlan(int64(st.Blocks)*st.Bsize))
}

func unpack(ctx context.Context, src io.Reader, root *os.File, o Options, p *plan) (Summary, error) {
	u := &unpacker{in: newInput(src), plan: p, tree: newTree(root), o: o, told: o.Done, buf: make([]byte, chunkBytes)}
	defer u.tree.close()
	if err := walk(ctx, u.in, p, func(name string, h *tar.Header, r *tar.Reader) error { return u.member(ctx, name, h, r) }); err != nil {
		return Summary{}, err
	}
	if u.in.off < o.Done {
		return Summary{}, u.changed("it ends after %d bytes and %d were unpacked", u.in.off, o.Done)
	}
	if err := u.finish(o.Done > 0); err != nil {
		return Summary{}, err
	}
	if err := u.tell(ctx, u.in.off, true); err != nil {
		return Summary{}, err
	}
	return p.summary(u.in), nil
}

// walk calls visit for every member, checked, and returns nil at the tar's true end.
func walk(ctx context.Context, in *input, p *plan, visit func(name string, h *tar.Header, r *tar.Reader) error) error {
	r := tar.NewReader(in)
	from, end := int64(-1), int64(0) // where the content of a sparse member begins, and that of any other ends
	in.limit = p.headers
	for {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		h, err := r.Next()
		if errors.Is(err, io.EOF) && in.err == nil {
			break
		}
		if err != nil {
			return in.explain(err)
		}
		if from >= 0 { // only now is it known how long that is in the tar
			p.data, from = p.data+in.off-blockLength-from, -1
		}
		name, err := p.add(h)
		if err != nil {
			return err
		}
		in.limit, end = p.data+p.headers, in.off+inTar(h)
		if sparse(h) {
			from = in.off
			in.limit += h.Size // it is no longer than that
		}
		if name == "" {
			continue
		}
		if err := visit(name, h, r); err != nil {
			return err
		}
	}
	if in.off == 0 {
		return in.explain(io.EOF)
	}
	if !in.zeros || in.off <= end {
		return fault.Terminal(fault.CorruptImage, fmt.Errorf("the archive stops after %d bytes without its end, a block of zeros: it is cut short, upload it again", in.off))
	}
	if err := p.checkLinks(); err != nil {
		return err
	}
	in.limit = in.off + maxTail
	if _, err := io.Copy(io.Discard, in); err != nil {
		return in.explain(err)
	}
	return nil
}

// unpacker is one Unpack.
type unpacker struct {
	in   *input
	plan *plan
	tree *tree
	o    Options
	told int64 // bytes of the tar that are told to be done
	buf  []byte
}

// tell says that all of the tar up to a byte is unpacked, now or when that is worth it.
func (u *unpacker) tell(ctx context.Context, upTo int64, now bool) error {
	n := upTo - u.told
	if n <= 0 || n < tellBytes && !now {
		return nil
	}
	if u.o.Ledger != nil {
		if err := u.o.Ledger(ctx, u.told, n); err != nil {
			return err
		}
	}
	u.told = upTo
	return nil
}

func (u *unpacker) changed(format string, args ...any) error {
	return fault.Transient(fault.SourceChanged, fmt.Errorf("the archive is not the one of which a part was unpacked before: "+format, args...))
}

// member unpacks one, unless that is done. Links and what is to be known of folders stay in the plan.
func (u *unpacker) member(ctx context.Context, name string, h *tar.Header, r *tar.Reader) error {
	var err error
	done := u.in.off <= u.o.Done
	switch kindOf(h) {
	case file:
		err = u.file(ctx, name, h, r)
	case folder:
		if !done {
			_, err = u.tree.folder(name)
		}
	case hardLink:
		if to, _ := cleaned(h.Linkname); !done && u.plan.kinds[u.plan.sum(to)] == file {
			err = u.tree.hardLink(to, name)
		}
	}
	if err != nil {
		return err
	}
	return u.tell(ctx, u.in.off, false)
}

// file unpacks a file, or what is left of it. It is told in chunks, after each the byte of the
// tar where that ends. A chunk of a sparse file may have no byte there: of such a file the last
// byte that was read is told with the next one, so that only the whole file is told to its end.
func (u *unpacker) file(ctx context.Context, name string, h *tar.Header, r *tar.Reader) error {
	start, last := u.in.off, int64(0)
	if sparse(h) {
		last = 1
	}
	left := u.o.Done - start
	begun := left > 0 || left == 0 && (sparse(h) || h.Size == 0)
	switch {
	case begun && left >= h.Size && u.o.Compare == nil:
		return nil
	case begun && left < h.Size && !sparse(h) && left%chunkBytes != 0:
		return u.changed("its member %s has %d bytes at %d, of which %d were unpacked", quote(name), h.Size, start, left)
	}
	f := &handle{tree: u.tree, name: name, fd: -1}
	defer f.close()
	end := int64(0) // of what was written
	for at := int64(0); at < h.Size; {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		buf := u.buf[:min(chunkBytes, h.Size-at)]
		before, done := u.in.off, begun && u.in.off < u.o.Done
		compare := done && u.o.Compare != nil && u.o.Compare(int64(len(buf)))
		if u.in.hollow = 0; done && !compare {
			u.in.hollow = u.o.Done + last
		}
		if _, err := io.ReadFull(r, buf); err != nil {
			return u.in.explain(err)
		}
		done = begun && u.in.off <= u.o.Done+last
		switch {
		case done && compare:
			if same, err := f.holds(buf, at); err != nil {
				return err
			} else if !same {
				return u.changed("%d bytes at %d of its member %s differ from the file", len(buf), at, quote(name))
			}
		case done:
		case sparse(h) && u.in.off == before: // a part of a hole
		default:
			wrote, err := f.write(buf, at, begun)
			if err != nil {
				return err
			}
			if wrote > 0 {
				end = at + wrote
			}
		}
		if at += int64(len(buf)); !done && at < h.Size {
			if err := u.tell(ctx, u.in.off-last, false); err != nil {
				return err
			}
		}
	}
	u.in.hollow = 0
	if begun && u.in.off <= u.o.Done {
		return nil
	}
	return f.finish(h, end, begun)
}

// finish makes the links that had to wait and gives folders their modes and times.
func (u *unpacker) finish(again bool) error {
	if again {
		if err := u.tree.loosen(u.plan.folders()); err != nil {
			return err
		}
	}
	for _, l := range u.plan.late {
		if err := u.tree.late(l); err != nil {
			return err
		}
	}
	return u.tree.settle(u.plan.folders())
}

// quote shortens what came from an archive for a message.
func quote(s string) string {
	if len(s) > 200 {
		s = s[:200] + "..."
	}
	return fmt.Sprintf("%q", s)
}
