package image

import (
	"bytes"
	"context"
	"crypto/sha1" //nolint:gosec // what the manifests of OVF 1.0 have
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/url"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// A bundle is a tar with disks in it: an OVA, which has a description of them
// ("Open Virtualization Format Specification", DMTF DSP0243; section names below
// are its), or any other.

const (
	// ovfBytes and manifestBytes are read at most: one with all licences of a
	// large product has some 100 KiB.
	ovfBytes      = 4 << 20
	manifestBytes = 1 << 20
	ovfDepth      = 64 // elements in each other; 10 are usual
	ovfMaxDisks   = 1024
	// bundleLooked files of a tar without a description are looked at, each as far
	// as a raw disk's signatures may lie.
	bundleLooked = 256
	// bundleListed disks are named in a message.
	bundleListed = 20
)

// Digest is what somebody else than the server says of a part of the blob.
type Digest struct {
	// Name of the file that the part is, in a Bundle as Info has it.
	Name, Bundle string
	// Algorithm is "sha1", "sha256" or "sha512", Sum its result.
	Algorithm string
	Sum       []byte
	// Offset and Length of the part in bytes.
	Offset, Length int64
}

// bundle is an open tar.
type bundle struct {
	blob     Ranged
	kind     string // "ova", "tar"
	files    map[string]member
	order    []member
	manifest map[string]digest // by the names of members; nil: there is none
}

type digest struct {
	algorithm string
	sum       []byte
}

// bundled is a disk in a bundle.
type bundled struct {
	id   string // of the description; "": none
	file member
	size int64 // of the file in bytes by the description, -1 unknown
	err  error // why it can't be read
}

func (d bundled) String() string {
	s := quote(d.file.name)
	if d.id != "" {
		s += " (" + quote(d.id) + ")"
	}
	return s
}

// openTar opens the disk o.Disk of a bundle, or its only one.
func openTar(ctx context.Context, blob Ranged, o Options) (*Opened, error) {
	members, err := readTar(ctx, blob)
	if err != nil {
		return nil, err
	}
	b := &bundle{blob: blob, kind: "tar", files: map[string]member{}}
	for _, m := range members {
		if foreign(m) {
			continue
		}
		b.files[m.name] = m
		b.order = append(b.order, m)
	}
	if err := b.readManifest(ctx); err != nil {
		return nil, err
	}
	disks, err := b.disks(ctx)
	if err != nil {
		return nil, err
	}
	d, err := choose(disks, o.Disk)
	if err != nil {
		return nil, err
	}
	opened, used, err := b.open(ctx, d, o)
	if err != nil {
		return nil, fmt.Errorf("disk %s of the %s: %w", quote(d.file.name), b.kind, err)
	}
	opened.Info.Bundle, opened.Info.Disk = b.kind, d.file.name
	if d.size >= 0 && d.size != d.file.at.length {
		opened.Info.Warnings = append(opened.Info.Warnings, otherSize(d.file, d.size))
	}
	b.digests(opened, used)
	return opened, nil
}

// foreign says that a file of a bundle is what macOS knows of another.
func foreign(m member) bool { return strings.HasPrefix(path.Base(m.name), "._") }

func otherSize(m member, size int64) string {
	return fmt.Sprintf("the file %s has %d bytes, and %d by its description", quote(m.name), m.at.length, size)
}

// disks are those that the description has, or without one all files that are
// disk images by their own bytes.
func (b *bundle) disks(ctx context.Context) ([]bundled, error) {
	var descriptions []member
	for _, m := range b.order {
		if strings.EqualFold(path.Ext(m.name), ".ovf") {
			descriptions = append(descriptions, m)
		}
	}
	switch len(descriptions) {
	case 0:
		return b.look(ctx)
	case 1:
		b.kind = "ova"
		return b.described(ctx, descriptions[0])
	}
	return nil, twoDescriptions(descriptions[0], descriptions[1])
}

func twoDescriptions(a, b member) error {
	return corruptTar("it has two descriptions, %s and %s", quote(a.name), quote(b.name))
}

func twoManifests(a, b member) error {
	return corruptTar("it has two manifests, %s and %s", quote(a.name), quote(b.name))
}

// described are the disks of the description in m.
func (b *bundle) described(ctx context.Context, m member) ([]bundled, error) {
	text, err := b.text(ctx, m, ovfBytes)
	if err != nil {
		return nil, err
	}
	return disksOf(text, func(href string) (member, error) { return b.beside(m, href) })
}

// disksOf are the disks that the description text has, of which find finds the files.
func disksOf(text []byte, find func(href string) (member, error)) ([]bundled, error) {
	o, err := parseOVF(text)
	if err != nil {
		return nil, err
	}
	var disks []bundled
	for _, d := range o.disks {
		if d.file == "" {
			continue // an empty one
		}
		one := bundled{id: d.id, file: member{name: d.file}, size: -1}
		f, ok := o.files[d.file]
		switch {
		case !ok:
			one.err = corruptOVF("disk %s refers to the file %s, which it does not list", quote(d.id), quote(d.file))
		case d.parent:
			one.err = fault.Terminal(fault.BackingFile, fmt.Errorf("disk %s is the difference from another, without which it is not whole: export the machine without snapshots", quote(d.id)))
		case f.chunked:
			one.err = fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the file %s is split into chunks, which is not supported: export the machine without them", quote(f.href)))
		default:
			one.file, one.err = find(f.href)
			one.size = f.size
		}
		if one.err != nil && one.file.name == "" {
			one.file.name = f.href
		}
		disks = append(disks, one)
	}
	if len(disks) == 0 {
		return nil, fault.Terminal(fault.NotADiskImage, errors.New("the ova's description has no disk with data"))
	}
	return disks, nil
}

// besides are the names that the file may have which the member m means by href: the
// first that there is.
func besides(m member, href string) []string {
	var names []string
	written := []string{href}
	if name, err := url.PathUnescape(href); err == nil && name != href {
		written = append(written, name)
	}
	for _, name := range written {
		if full := path.Join(path.Dir(m.name), name); local(name) && local(full) {
			names = append(names, full)
		}
	}
	return names
}

// beside finds the file that the member m means by href.
func (b *bundle) beside(m member, href string) (member, error) {
	for _, name := range besides(m, href) {
		if f, ok := b.files[name]; ok {
			return f, nil
		}
	}
	return member{}, b.missing(href)
}

func (b *bundle) missing(href string) error {
	return fault.Terminal(fault.ExternalDataFile,
		fmt.Errorf("the disk's data are in the file %s, which the %s does not have: export the machine as one file", quote(href), b.kind))
}

// look finds the disks of a tar without a description. What belongs to a disk of
// several files is none itself.
func (b *bundle) look(ctx context.Context) ([]bundled, error) {
	parts := map[string]bool{}
	for _, m := range b.order {
		f, found, err := wrapper(headOf(ctx, section{b.blob, m.at}))
		if err != nil && !fault.Of(err).Terminal {
			return nil, fmt.Errorf("look at %s: %w", quote(m.name), err)
		}
		if err != nil || !found || f.opens != asVMDKText {
			continue
		}
		d, err := b.descriptor(ctx, m)
		if err != nil && !fault.Of(err).Terminal {
			return nil, err
		}
		for _, e := range d.extents { // none if it is refused, which its opening says
			if plain(e.name) {
				parts[path.Join(path.Dir(m.name), e.name)] = true
			}
		}
	}
	if looked := len(b.order) - len(parts); looked > bundleLooked {
		return nil, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("a tar of %d files without a description (.ovf) is not supported: give the disk alone", looked))
	}
	var disks []bundled
	for _, m := range b.order {
		if parts[m.name] {
			continue
		}
		_, err := recognise(headOf(ctx, section{b.blob, m.at}))
		switch was := fault.Of(err); {
		case err == nil:
		case !was.Terminal:
			return nil, fmt.Errorf("look at %s: %w", quote(m.name), err)
		case was.Reason == fault.NotADiskImage:
			continue
		default:
			err = fmt.Errorf("%s: %w", quote(m.name), err)
		}
		disks = append(disks, bundled{file: m, err: err})
	}
	if len(disks) == 0 {
		return nil, fault.Terminal(fault.NotADiskImage, fmt.Errorf("the tar of %d files has no disk image in it: check the url", len(b.order)))
	}
	return disks, nil
}

// choose returns the disk that is called want: by its file's name, the
// description's id or its number, of which the first is 1.
func choose(disks []bundled, want string) (bundled, error) {
	if want == "" && len(disks) == 1 {
		return disks[0], disks[0].err
	}
	var found []bundled
	for _, d := range disks {
		if want != "" && (d.file.name == want || path.Base(d.file.name) == want || d.id == want) {
			found = append(found, d)
		}
	}
	if n, err := strconv.Atoi(want); err == nil && len(found) == 0 && n >= 1 && n <= len(disks) {
		found = disks[n-1 : n]
	}
	matches := "none of them is "
	for _, d := range found {
		if d.file != found[0].file {
			matches, found = "several of them are ", nil
			break
		}
	}
	if len(found) > 0 {
		return found[0], found[0].err
	}
	var list []string
	for i, d := range disks[:min(len(disks), bundleListed)] {
		list = append(list, fmt.Sprintf("%d: %s", i+1, d))
	}
	if more := len(disks) - len(list); more > 0 {
		list = append(list, fmt.Sprintf("and %d more", more))
	}
	has := fmt.Sprintf("the image is a bundle of %d disks", len(disks))
	if len(disks) == 1 {
		has = "the image is a bundle of one disk"
	}
	which := "none is chosen"
	if want != "" {
		which = matches + quote(want)
	}
	return bundled{}, fault.Terminal(fault.InvalidSource, fmt.Errorf("%s, and %s: choose one by name or number (the annotation longshore.dev/image-disk on the VolumeImportSource, or --disk): %s", has, which, strings.Join(list, ", ")))
}

// open opens a disk, and tells which files it is in.
func (b *bundle) open(ctx context.Context, d bundled, o Options) (*Opened, []member, error) {
	file := section{b.blob, d.file.at}
	f, found, err := wrapper(headOf(ctx, file))
	switch {
	case err != nil:
		return nil, nil, err
	case found && f.opens == asTar:
		return nil, nil, tarInTar()
	case found && f.opens == asVMDKText:
		if o.Format != "" && o.Format != "vmdk" {
			return nil, nil, notThe(o.Format, f.name)
		}
		text, err := b.descriptor(ctx, d.file)
		if err != nil {
			return nil, nil, err
		}
		opened, used, err := openVMDKFiles(ctx, b.blob, text, func(name string) (member, bool) {
			m, ok := b.files[path.Join(path.Dir(d.file.name), name)]
			return m, ok
		})
		return opened, used, err
	}
	opened, err := openRanged(ctx, file, Options{Format: o.Format})
	return opened, []member{d.file}, err
}

func tarInTar() error {
	return fault.Terminal(fault.FormatNotSupported, errors.New("a tar inside a tar is not supported: give the inner one"))
}

// descriptor reads the one of a vmdk disk of several files.
func (b *bundle) descriptor(ctx context.Context, m member) (vmdkDescriptor, error) {
	text, err := b.text(ctx, m, vmdkDescriptorBytes)
	if err != nil {
		return vmdkDescriptor{}, err
	}
	return parseVMDKDescriptor(text)
}

// text reads a file of at most that many bytes, and compares it with the manifest.
func (b *bundle) text(ctx context.Context, m member, most int64) ([]byte, error) {
	if m.at.length > most {
		return nil, tooMuchText(m, most)
	}
	text := make([]byte, m.at.length)
	if _, err := readExactly(ctx, b.blob, text, m.at.at); err != nil {
		return nil, fmt.Errorf("read %s: %w", quote(m.name), err)
	}
	if d, ok := b.manifest[m.name]; ok {
		return text, d.compare(b.kind, m.name, d.of(text))
	}
	return text, nil
}

func tooMuchText(m member, most int64) error {
	return corruptTar("its file %s has %d bytes, and %d are the most of its kind", quote(m.name), m.at.length, most)
}

// sums are the algorithms of manifests.
var sums = map[string]func() hash.Hash{"sha1": sha1.New, "sha256": sha256.New, "sha512": sha512.New}

func (d digest) of(b []byte) []byte {
	h := sums[d.algorithm]()
	h.Write(b) // it returns no error
	return h.Sum(nil)
}

// compare returns the fault ChecksumMismatch where the file's digest is another.
func (d digest) compare(kind, name string, got []byte) error {
	return Digest{Name: name, Algorithm: d.algorithm, Sum: d.sum, Bundle: kind}.Compare(got)
}

// Hash is a new one of the digest's algorithm.
func (d Digest) Hash() hash.Hash { return sums[d.Algorithm]() }

// Compare returns the fault ChecksumMismatch where the part's digest is another.
func (d Digest) Compare(got []byte) error {
	if bytes.Equal(got, d.Sum) {
		return nil
	}
	return fault.Terminal(fault.ChecksumMismatch,
		fmt.Errorf("the file %s of the %s has the %s digest %x, and %x by the manifest (.mf): it was damaged or replaced, export the machine again", quote(d.Name), d.Bundle, d.Algorithm, got, d.Sum))
}

// digests hands on what the manifest says of the files that the disk is in. Who
// reads a disk in parts does not come by all of their bytes.
func (b *bundle) digests(opened *Opened, used []member) {
	if b.manifest == nil {
		return
	}
	var unknown []member
	for _, m := range used {
		d, ok := b.manifest[m.name]
		if !ok {
			unknown = append(unknown, m)
			continue
		}
		opened.Digests = append(opened.Digests, Digest{Name: m.name, Bundle: b.kind, Algorithm: d.algorithm, Sum: d.sum, Offset: m.at.at, Length: m.at.length})
	}
	if len(unknown) > 0 {
		opened.Info.Warnings = append(opened.Info.Warnings, b.undigested(unknown...))
	}
}

// undigested is the warning that the manifest does not know files of the disk.
func (b *bundle) undigested(files ...member) string {
	var names []string
	for _, m := range files[:min(len(files), bundleListed)] {
		names = append(names, quote(m.name))
	}
	return fmt.Sprintf("the %s's manifest has no digest of %s, which is not compared with anything", b.kind, strings.Join(names, ", "))
}

// compare reads the files that the disk is in, which lie in b, and compares them with the
// manifest: where b is at hand.
func (o *Opened) compare(ctx context.Context, b Ranged) error {
	buf := make([]byte, mappedSpan)
	for _, d := range o.Digests {
		h := d.Hash()
		for off := int64(0); off < d.Length; {
			p := buf[:min(int64(len(buf)), d.Length-off)]
			if _, err := readExactly(ctx, b, p, d.Offset+off); err != nil {
				return fmt.Errorf("read %s: %w", quote(d.Name), err)
			}
			h.Write(p) // it returns no error
			off += int64(len(p))
		}
		if err := d.Compare(h.Sum(nil)); err != nil {
			return err
		}
	}
	o.Digests = nil
	return nil
}

// readManifest reads the bundle's manifest ("Distribution"), if it has one.
func (b *bundle) readManifest(ctx context.Context) error {
	var found *member
	for i, m := range b.order {
		if !strings.EqualFold(path.Ext(m.name), ".mf") {
			continue
		}
		if found != nil {
			return twoManifests(*found, m)
		}
		found = &b.order[i]
	}
	if found == nil {
		return nil
	}
	text, err := b.text(ctx, *found, manifestBytes)
	if err != nil {
		return err
	}
	b.manifest, err = parseManifest(text, path.Dir(found.name))
	return err
}

// manifestLine is such as: SHA256(disk1.vmdk)= 0123...
var manifestLine = regexp.MustCompile(`^SHA-?(1|256|512) ?\((.+)\) ?= ?([0-9a-fA-F]+)$`)

// parseManifest reads a manifest whose names are those of files in folder.
func parseManifest(text []byte, folder string) (map[string]digest, error) {
	lengths := map[string]int{"1": sha1.Size, "256": sha256.Size, "512": sha512.Size}
	list := map[string]digest{}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		part := manifestLine.FindStringSubmatch(line)
		if part == nil || len(part[3]) != 2*lengths[part[1]] {
			return nil, corruptTar("its manifest has the line %s: SHA1, SHA256 or SHA512, a file's name and its digest are known", quote(line))
		}
		name := path.Join(folder, part[2])
		d := digest{algorithm: "sha" + part[1]}
		d.sum, _ = hex.DecodeString(part[3]) // it has nothing else in it
		if old, ok := list[name]; ok && (old.algorithm != d.algorithm || !bytes.Equal(old.sum, d.sum)) {
			return nil, corruptTar("its manifest has two digests of %s", quote(part[2]))
		}
		list[name] = d
	}
	return list, nil
}

// ovf is what is needed of a description.
type ovf struct {
	files map[string]ovfFile // by id
	disks []ovfDisk
}

type ovfFile struct {
	href    string
	size    int64 // bytes, -1 unknown
	chunked bool
}

type ovfDisk struct {
	id, file string // file "": an empty disk
	parent   bool
}

// parseOVF reads the references and the disks of a description. Elements go by
// their local names, since every version of the format has its own namespace.
func parseOVF(text []byte) (ovf, error) {
	o := ovf{files: map[string]ovfFile{}}
	d := xml.NewDecoder(bytes.NewReader(text))
	var open []string
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return o, corruptOVF("%w", err)
		}
		switch t := token.(type) {
		case xml.Directive:
			return o, corruptOVF("it has a document type declaration, which may define entities")
		case xml.EndElement:
			open = open[:len(open)-1]
		case xml.StartElement:
			if len(open) == 0 && t.Name.Local != "Envelope" {
				return o, corruptOVF("it begins with the element %s, not Envelope", quote(t.Name.Local))
			}
			if open = append(open, t.Name.Local); len(open) > ovfDepth {
				return o, corruptOVF("it has more than %d elements in each other", ovfDepth)
			}
			if err := o.element(open, t); err != nil {
				return o, err
			}
		}
	}
	return o, nil
}

// element takes in the last of the open elements.
func (o *ovf) element(open []string, e xml.StartElement) error {
	if len(open) < 2 {
		return nil
	}
	switch within := open[len(open)-2]; {
	case e.Name.Local == "File" && within == "References":
		a, err := attributes(e, "id", "href", "size", "chunkSize")
		if err != nil {
			return err
		}
		f := ovfFile{href: a["href"], size: -1, chunked: a["chunkSize"] != ""}
		if a["size"] != "" {
			if f.size, err = ovfNumber("size", a["size"]); err != nil {
				return err
			}
		}
		if _, ok := o.files[a["id"]]; ok {
			return corruptOVF("it has two files of the id %s", quote(a["id"]))
		}
		if o.files[a["id"]] = f; len(o.files) > tarMaxMembers {
			return corruptOVF("it has more than %d files", tarMaxMembers)
		}
	case e.Name.Local == "Disk" && (within == "DiskSection" || within == "Section"):
		a, err := attributes(e, "diskId", "fileRef", "parentRef", "capacity")
		if err != nil {
			return err
		}
		// A capacity may be the name of a property.
		if c := a["capacity"]; c != "" && !strings.HasPrefix(c, "${") {
			if _, err := ovfNumber("capacity", c); err != nil {
				return err
			}
		}
		for _, d := range o.disks {
			if d.id == a["diskId"] {
				return corruptOVF("it has two disks of the id %s", quote(d.id))
			}
		}
		if o.disks = append(o.disks, ovfDisk{id: a["diskId"], file: a["fileRef"], parent: a["parentRef"] != ""}); len(o.disks) > ovfMaxDisks {
			return corruptOVF("it has more than %d disks", ovfMaxDisks)
		}
	}
	return nil
}

// attributes are those of e with these names that are the format's own: of no
// namespace, its element's or another one of the format.
func attributes(e xml.StartElement, names ...string) (map[string]string, error) {
	got := map[string]string{}
	for _, a := range e.Attr {
		if s := a.Name.Space; s != "" && s != e.Name.Space && !strings.Contains(s, "ovf") {
			continue
		}
		for _, name := range names {
			if a.Name.Local != name {
				continue
			}
			if _, ok := got[name]; ok {
				return nil, corruptOVF("an element %s has the attribute %s twice", quote(e.Name.Local), name)
			}
			got[name] = a.Value
		}
	}
	return got, nil
}

func ovfNumber(what, text string) (int64, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || n < 0 {
		return 0, corruptOVF("it has the %s %s, want a number of at most %d", what, quote(text), int64(1<<63-1))
	}
	return n, nil
}

func corruptOVF(format string, args ...any) error { return corrupt("ovf", format, args...) }
