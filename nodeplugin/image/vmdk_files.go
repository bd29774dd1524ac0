package image

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// vmdkFiles is the layout of a disk of several extents in files of their own,
// which lie in one blob.
type vmdkFiles []vmdkPart

// vmdkPart is an extent of the disk.
type vmdkPart struct {
	span
	layout layout // nil: zeros
}

func (p vmdkPart) end() int64 { return p.at + p.length }

// openVMDKFiles opens the disk that d describes, whose files lie in blob where
// find tells; it returns those as well.
func openVMDKFiles(ctx context.Context, blob Ranged, d vmdkDescriptor, find func(name string) (member, bool)) (*Opened, []member, error) {
	switch d.createType {
	case "monolithicFlat", "twoGbMaxExtentFlat", "twoGbMaxExtentSparse", "2GbMaxExtentFlat", "2GbMaxExtentSparse", "vmfs":
	default:
		return nil, nil, fault.Terminal(fault.FormatNotSupported,
			fmt.Errorf("a vmdk image of type %s is not supported as several files (monolithicFlat, twoGbMaxExtentFlat, twoGbMaxExtentSparse and vmfs are): convert it with qemu-img convert -O qcow2", quote(d.createType)))
	}
	var used []member
	files := make([]span, len(d.extents))
	for i, e := range d.extents { // what is not there comes first
		if e.kind == "ZERO" {
			continue
		}
		m, ok := member{}, false
		if plain(e.name) {
			m, ok = find(e.name)
		}
		if !ok {
			return nil, nil, fault.Terminal(fault.ExternalDataFile,
				fmt.Errorf("the vmdk image keeps data in the external file %s, which is not here: convert it to one file (qemu-img convert -O qcow2), or give all of its files in one tar", quote(e.name)))
		}
		files[i] = m.at
		if !slices.Contains(used, m) {
			used = append(used, m)
		}
	}
	var (
		l        vmdkFiles
		size     int64
		grain    int64 = 1
		unclean  bool
		pages    = newPageCache(blob)
		inflates = new(sync.Pool)
	)
	for i, e := range d.extents {
		if e.access == "NOACCESS" {
			return nil, nil, corruptVMDK("its extent %s may not be read, by its descriptor", quote(e.name))
		}
		if e.length > 1<<62-size {
			return nil, nil, corruptVMDK("its extents have more than %d bytes", int64(1<<62))
		}
		part := vmdkPart{span: span{size, e.length}}
		switch e.kind {
		case "ZERO":
		case "FLAT", "VMFS":
			if e.offset > files[i].length || e.length > files[i].length-e.offset {
				return nil, nil, corruptVMDK("its extent %s has %d bytes at %d of a file of %d bytes: the file is cut short, upload it again", quote(e.name), e.length, e.offset, files[i].length)
			}
			part.layout = vmdkFlat{start: size, host: files[i].at + e.offset}
		case "SPARSE":
			h, err := readVMDKHeader(ctx, blob, files[i])
			if err != nil {
				return nil, nil, fmt.Errorf("extent %s: %w", quote(e.name), err)
			}
			if e.offset != 0 || e.length > h.size {
				return nil, nil, corruptVMDK("its extent %s has %d bytes at %d by its descriptor, and %d by its header", quote(e.name), e.length, e.offset, h.size)
			}
			grain, unclean = max(grain, h.grain), unclean || h.unclean
			part.layout = &vmdk{vmdkHeader: h, file: files[i], start: size, pages: pages, inflates: inflates}
		default:
			return nil, nil, fault.Terminal(fault.FormatNotSupported,
				fmt.Errorf("the vmdk image's extent %s is of kind %s, which is not supported (SPARSE, FLAT, VMFS and ZERO are): convert it with qemu-img convert -O qcow2", quote(e.name), quote(e.kind)))
		}
		l = append(l, part)
		size += e.length
	}
	info := Info{Format: "vmdk", VirtualSize: size}
	if unclean {
		info.Warnings = append(info.Warnings, vmdkUnclean)
	}
	return openMapped(info, l, blob, grain), used, nil
}

// openVMDKText says which files a descriptor lacks that comes alone.
func openVMDKText(ctx context.Context, file Ranged) (*Opened, error) {
	if file.Size() > vmdkDescriptorBytes {
		return nil, corruptVMDK("the descriptor has %d bytes, %d are the most", file.Size(), vmdkDescriptorBytes)
	}
	b := make([]byte, file.Size())
	if _, err := readExactly(ctx, file, b, 0); err != nil {
		return nil, fmt.Errorf("read the vmdk descriptor: %w", err)
	}
	d, err := parseVMDKDescriptor(b)
	if err != nil {
		return nil, err
	}
	opened, _, err := openVMDKFiles(ctx, file, d, func(string) (member, bool) { return member{}, false })
	return opened, err
}

// from is the index of the extent with that byte of the disk.
func (l vmdkFiles) from(off int64) int {
	i, _ := slices.BinarySearchFunc(l, off, func(p vmdkPart, off int64) int {
		if p.end() <= off {
			return -1
		}
		return 1
	})
	return i
}

// walk is layout's.
func (l vmdkFiles) walk(ctx context.Context, off, n int64, each func(segment)) error {
	for i, end := l.from(off), off+n; off < end; i++ {
		next := min(l[i].end(), end)
		if l[i].layout == nil {
			each(segment{start: off, length: next - off, kind: extent.Zero})
		} else if err := l[i].layout.walk(ctx, off, next-off, each); err != nil {
			return err
		}
		off = next
	}
	return nil
}

func (l vmdkFiles) compression() string { return "zlib" }

// decode is packed's.
func (l vmdkFiles) decode(s segment, out, in []byte) error {
	v, ok := l[l.from(s.start)].layout.(*vmdk)
	if !ok {
		return fmt.Errorf("byte %d lies in no sparse extent", s.start)
	}
	return v.decode(s, out, in)
}

// honest is boastful's.
func (l vmdkFiles) honest(ctx context.Context) error {
	for _, p := range l {
		if b, ok := p.layout.(boastful); ok {
			if err := b.honest(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// vmdkFlat is the layout of an extent that lies in its file as it is.
type vmdkFlat struct {
	start int64 // in the disk
	host  int64 // in the blob
}

func (f vmdkFlat) walk(_ context.Context, off, n int64, each func(segment)) error {
	each(segment{start: off, length: n, kind: extent.Data, host: f.host + off - f.start, hostLen: n})
	return nil
}
