package archive

import (
	"archive/tar"
	"cmp"
	"fmt"
	"hash/maphash"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const (
	maxEntries = 1 << 20  // files, folders and links; what is kept of each takes some 30 bytes of memory
	maxText    = 16 << 20 // bytes that are kept of names and targets of links and of names of folders
	maxPath    = 4095     // PATH_MAX of Linux without the zero behind
	maxName    = 255      // NAME_MAX of Linux
)

// kind is what an entry is.
type kind uint8

const (
	_ kind = iota
	file
	folder
	symlink
	hardLink
	nothing // a header that makes no entry
	refused
)

// kindOf tells what a header makes. Labels of volumes (GNU tar's V) and headers for
// all that follow make nothing.
func kindOf(h *tar.Header) kind {
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		return file
	case tar.TypeDir:
		return folder
	case tar.TypeSymlink:
		return symlink
	case tar.TypeLink:
		return hardLink
	case tar.TypeXGlobalHeader, 'V':
		return nothing
	}
	return refused
}

// sparse says that the content of a file has holes that are not in the tar.
func sparse(h *tar.Header) bool {
	if h.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// modeOf is a member's mode without set-user-ID and set-group-ID: the owner is another
// than the tar's, so that they would give away rights that nobody meant.
func modeOf(h *tar.Header) uint32 { return uint32(h.Mode) & 0o1777 }

// plan is what the headers have told so far, and what is to be done in the end. It refuses
// what is not to be unpacked.
type plan struct {
	capacity int64 // in bytes
	headers  int64 // bytes of the tar that may be no content
	longest  int64 // bytes that all files may have with their holes
	seed     maphash.Seed
	kinds    map[uint64]kind // of all entries, by the sums of their names
	data     int64           // bytes of content that the tar has
	files    int64           // and those of the files that come of it
	text     int
	parent   string // whose folders are known

	dirs []member // may be named more than once: the last one counts
	late []member // the links that are made in the end
}

// member is what is kept of one until the end.
type member struct {
	name string
	to   string // of a link; hard: a name
	hard bool
	mode uint32
	time time.Time
}

func newPlan(capacity int64) *plan {
	return &plan{capacity: capacity, headers: maxHeaders, longest: MaxFileBytes, seed: maphash.MakeSeed(), kinds: map[uint64]kind{}, parent: "."}
}

func (p *plan) sum(name string) uint64 { return maphash.String(p.seed, name) }

func (p *plan) summary(in *input) Summary {
	return Summary{Bytes: in.off, Data: p.data, Entries: int64(len(p.kinds))}
}

// inTar is how many bytes a member has behind its header; of a sparse one that is not known.
func inTar(h *tar.Header) int64 {
	if kindOf(h) == file && !sparse(h) || h.Typeflag == 'V' {
		return h.Size
	}
	return 0
}

func refuse(format string, args ...any) error {
	return fault.Terminal(fault.UnsafeArchive, fmt.Errorf("the archive is not unpacked: "+format, args...))
}

func unsupported(format string, args ...any) error {
	return fault.Terminal(fault.FormatNotSupported, fmt.Errorf("the archive is not supported: "+format, args...))
}

// add takes the next member in and returns its name in the folder, "" where it makes
// no entry.
func (p *plan) add(h *tar.Header) (string, error) {
	k := kindOf(h)
	switch {
	case h.Typeflag == tar.TypeXGlobalHeader:
		for key := range h.PAXRecords {
			if key == "path" || key == "linkpath" || key == "size" || key == "mtime" || strings.HasPrefix(key, "GNU.") {
				return "", unsupported("it has a header that tells %s of all members that follow: pack it without", quote(key))
			}
		}
		return "", nil
	case k == nothing:
		return "", nil
	case k == refused && (h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock):
		return "", refuse("its member %s is a device (%d:%d): pack it without", quote(h.Name), h.Devmajor, h.Devminor)
	case k == refused:
		return "", unsupported("its member %s is neither file nor folder nor link (type %q): pack it without", quote(h.Name), h.Typeflag)
	case k != file && k != hardLink && h.Size != 0:
		return "", fault.Terminal(fault.CorruptImage, fmt.Errorf("the archive's member %s, which has no content, says that it has %d bytes: it is damaged, upload it again", quote(h.Name), h.Size))
	case k == file && strings.HasSuffix(h.Name, "/"):
		return "", fault.Terminal(fault.CorruptImage, fmt.Errorf("the archive's member %s is a file with the name of a folder: it is damaged, upload it again", quote(h.Name)))
	}
	name, why := cleaned(h.Name)
	if why == "" && name == "." && k != folder {
		why = "is no name"
	}
	if why != "" {
		return "", refuse("the name of its member %s %s: pack the content of one folder by names in it (tar -C folder -c .)", quote(h.Name), why)
	}
	if err := p.fits(name, h); err != nil {
		return "", err
	}
	if err := p.enter(name, k); err != nil {
		return "", err
	}
	m := member{name: name, mode: modeOf(h), time: h.ModTime}
	switch k {
	case folder:
		p.dirs = append(p.dirs, m)
		p.text += len(m.name)
	case symlink:
		m.to = h.Linkname
		if why := leaves(name, m.to, func(string) bool { return false }); why != "" {
			return "", refuse("its symbolic link %s to %s %s: %s", quote(name), quote(m.to), why, otherTarget)
		}
		p.late = append(p.late, m)
		p.text += len(m.name) + len(m.to)
	case hardLink:
		if m.to, why = cleaned(h.Linkname); why != "" {
			return "", refuse("the target %s of its link %s %s: pack it without", quote(h.Linkname), quote(name), why)
		}
		switch p.kinds[p.sum(m.to)] {
		case file:
			p.kinds[p.sum(name)] = file
		case symlink: // made when that is
			m.hard = true
			p.kinds[p.sum(name)] = symlink
			p.late = append(p.late, m)
			p.text += len(m.name) + len(m.to)
		default:
			return "", refuse("its member %s is a link to %s, which is no file that comes before it: pack it anew", quote(name), quote(m.to))
		}
	}
	if p.text > maxText {
		return "", unsupported("the names of its folders and links have more than %d bytes: pack it in several", maxText)
	}
	return name, nil
}

// cleaned is a member's name in the folder that it is unpacked in, or why it has none.
func cleaned(name string) (clean, why string) {
	if strings.HasPrefix(name, "/") {
		return "", "is absolute"
	}
	if slices.Contains(strings.Split(name, "/"), "..") {
		return "", "leads out of its folder by \"..\""
	}
	if name == "" || strings.Contains(name, "\x00") {
		return "", "is no name"
	}
	return path.Clean(name), ""
}

// fits refuses what the volume or its filesystem can't have.
func (p *plan) fits(name string, h *tar.Header) error {
	if len(name) > maxPath || slices.ContainsFunc(strings.Split(name, "/"), func(s string) bool { return len(s) > maxName }) {
		return unsupported("the name of its member %s has %d bytes, and Linux takes %d, and %d between two slashes: shorten it", quote(name), len(name), maxPath, maxName)
	}
	if kindOf(h) != file {
		return nil
	}
	if h.Size > p.longest-p.files {
		return unsupported("its files up to %s (%d bytes) have more than %d bytes with their holes: pack it in several", quote(name), h.Size, p.longest)
	}
	p.files += h.Size
	if !sparse(h) {
		p.data += h.Size
	}
	if p.data > p.capacity {
		return fault.Terminal(fault.ImageTooLarge, fmt.Errorf("the archive's files up to %s hold %d bytes and the filesystem has %d: request more (spec.resources.requests.storage of the claim)", quote(name), p.data, p.capacity))
	}
	return nil
}

// enter notes that there is an entry of that name, and its folders.
func (p *plan) enter(name string, k kind) error {
	if parent := path.Dir(name); parent != p.parent && parent != "." {
		for i, c := range parent + "/" {
			if c != '/' {
				continue
			}
			switch sum := p.sum(parent[:i]); p.kinds[sum] {
			case folder:
			case 0:
				p.kinds[sum] = folder
			default:
				return refuse("its member %s would lie in %s, which is a file or a link in it: pack it anew", quote(name), quote(parent[:i]))
			}
		}
		p.parent = parent
	}
	sum := p.sum(name)
	if was := p.kinds[sum]; was != 0 && (was != folder || k != folder) {
		return refuse("it has the member %s twice: pack it anew", quote(name))
	}
	p.kinds[sum] = k
	if len(p.kinds) > maxEntries {
		return unsupported("it has more than %d files, folders and links: pack it in several", maxEntries)
	}
	return nil
}

// leaves says how a symbolic link leads out of the folder, "" where it does not. Its own
// folder is a real one, so that leading ".." go where they say; those behind a name
// do unless that is a link, which isLink tells.
func leaves(name, to string, isLink func(string) bool) string {
	switch {
	case to == "":
		return "has no target"
	case strings.HasPrefix(to, "/"):
		return "leads out of the archive: its target is absolute"
	case len(to) > maxPath:
		return fmt.Sprintf("has a target of %d bytes, and Linux takes %d", len(to), maxPath)
	}
	at, through := path.Dir(name), false
	for part := range strings.SplitSeq(to, "/") {
		switch {
		case part == "" || part == ".":
		case part != "..":
			at = path.Join(at, part)
			through = through || isLink(at)
		case at == ".":
			return "leads out of the archive by \"..\""
		case through:
			return "goes through another link and back by \"..\", which may lead out of the archive"
		default:
			at = path.Dir(at)
		}
	}
	return ""
}

// checkLinks looks at the symbolic links again when all of them are known. A hard link to
// one is a symbolic link in another place, from where its target may be elsewhere.
func (p *plan) checkLinks() error {
	isLink := func(name string) bool { return p.kinds[p.sum(name)] == symlink }
	targets := map[string]string{}
	for _, l := range p.late {
		to := l.to
		if l.hard {
			to = targets[l.to]
		}
		targets[l.name] = to
		if why := leaves(l.name, to, isLink); why != "" {
			return refuse("its symbolic link %s to %s %s: %s", quote(l.name), quote(to), why, otherTarget)
		}
	}
	return nil
}

const otherTarget = "pack it without, or with a target in the archive"

// folders are those that the tar tells of, by their names: what is in a folder
// comes behind it.
func (p *plan) folders() []member {
	slices.SortStableFunc(p.dirs, func(a, b member) int {
		if a.name == "." || b.name == "." {
			return cmp.Compare(len(a.name)-len(b.name), 0)
		}
		return cmp.Compare(a.name, b.name)
	})
	return p.dirs
}
