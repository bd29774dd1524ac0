package image

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const (
	vmdkDescriptorMagic = "# Disk DescriptorFile"
	vmdkNoParent        = "ffffffff"
	vmdkUnclean         = "the vmdk image was not closed cleanly: its data are read as they are"
	// vmdkDescriptorVersion is the last that is known to mean nothing else for a
	// disk without a parent.
	vmdkDescriptorVersion = 4
	// vmdkMaxExtents are enough for a disk of 8 TiB in files of 2 GiB.
	vmdkMaxExtents = 4096
)

// vmdkDescriptor is the text that tells what a disk consists of ("The Descriptor
// File").
type vmdkDescriptor struct {
	createType string
	extents    []vmdkExtent
}

// vmdkExtent is a line of the extent description.
type vmdkExtent struct {
	access string // RW, RDONLY
	length int64  // bytes
	kind   string // SPARSE, FLAT, ...
	name   string // of its file; "" for kind ZERO
	offset int64  // bytes, in its file
}

// parseVMDKDescriptor reads a descriptor, behind which there may be zeros. A
// disk that is not whole without its parent, or encrypted, is refused.
func parseVMDKDescriptor(b []byte) (vmdkDescriptor, error) {
	var d vmdkDescriptor
	if len(b) < len(vmdkDescriptorMagic) || !strings.EqualFold(string(b[:len(vmdkDescriptorMagic)]), vmdkDescriptorMagic) {
		return d, corruptVMDK("the descriptor begins with %s, not with %q", quote(string(b[:min(len(b), 40)])), vmdkDescriptorMagic)
	}
	if end := bytes.IndexByte(b, 0); end >= 0 {
		b = b[:end]
	}
	values := map[string]string{} // of the keys that matter
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if word, _, _ := strings.Cut(line, " "); word == "RW" || word == "RDONLY" || word == "NOACCESS" {
			e, err := parseVMDKExtent(line)
			if err != nil {
				return d, err
			}
			if d.extents = append(d.extents, e); len(d.extents) > vmdkMaxExtents {
				return d, corruptVMDK("the descriptor has more than %d extents", vmdkMaxExtents)
			}
			continue
		}
		key, value, _ := strings.Cut(line, "=")
		key, value = strings.ToLower(strings.TrimSpace(key)), strings.Trim(strings.TrimSpace(value), `"`)
		switch {
		case strings.HasPrefix(key, "encryption."):
			return d, fault.Terminal(fault.EncryptedImage, errors.New("the vmdk image is encrypted: decrypt it before the import"))
		case key == "version", key == "parentcid", key == "createtype", key == "parentfilenamehint":
			if old, ok := values[key]; ok && old != value {
				return d, corruptVMDK("its descriptor has two values of %s, %s and %s", key, quote(old), quote(value))
			}
			values[key] = value
		}
	}
	if hint := values["parentfilenamehint"]; hint != "" || values["parentcid"] != "" && !strings.EqualFold(values["parentcid"], vmdkNoParent) {
		name := "another file"
		if hint != "" {
			name = quote(hint)
		}
		return d, fault.Terminal(fault.BackingFile,
			fmt.Errorf("the vmdk image is a delta link on %s (content id %s), without which it is not whole: consolidate the snapshots, or clone the disk (vmware-vdiskmanager -r, vmkfstools -i)", name, quote(values["parentcid"])))
	}
	if _, ok := values["parentcid"]; !ok {
		return d, corruptVMDK("its descriptor has no parentCID")
	}
	if v, err := strconv.ParseUint(values["version"], 10, 32); err != nil || v < 1 || v > vmdkDescriptorVersion {
		return d, fault.Terminal(fault.FormatNotSupported, fmt.Errorf("a vmdk descriptor of version %s is not supported (1 to %d are): convert the image with qemu-img convert -O qcow2", quote(values["version"]), vmdkDescriptorVersion))
	}
	d.createType = values["createtype"]
	if len(d.extents) == 0 {
		return d, corruptVMDK("its descriptor has no extent")
	}
	return d, nil
}

// parseVMDKExtent reads a line such as: RW 4192256 SPARSE "disk-s001.vmdk"
func parseVMDKExtent(line string) (vmdkExtent, error) {
	var e vmdkExtent
	wrong := func() (vmdkExtent, error) {
		return e, corruptVMDK("its descriptor has the extent %s", quote(line))
	}
	before, rest, named := strings.Cut(line, `"`)
	words := strings.Fields(before)
	if len(words) != 3 {
		return wrong()
	}
	var after []string
	if named {
		end := strings.LastIndexByte(rest, '"')
		if end < 0 {
			return wrong()
		}
		e.name, after = rest[:end], strings.Fields(rest[end+1:])
	}
	e.access, e.kind = words[0], words[2]
	sectors, err := strconv.ParseInt(words[1], 10, 64)
	if err != nil || sectors <= 0 || sectors > 1<<53 {
		return wrong()
	}
	e.length = sectors * vmdkSector
	if named == (e.kind == "ZERO") {
		return wrong()
	}
	if len(after) > 0 {
		sectors, err := strconv.ParseInt(after[0], 10, 64)
		if err != nil || sectors < 0 || sectors > 1<<53 {
			return wrong()
		}
		e.offset = sectors * vmdkSector
	}
	return e, nil
}

// plain says whether name is that of a file beside the descriptor.
func plain(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, `/\:`)
}

// inside checks that the disk is the one sparse extent that begins with h, and
// has the descriptor in it. A file's name in there is what it was called when it
// was made: only that it points nowhere else can be told.
func (d vmdkDescriptor) inside(h vmdkHeader) (warnings []string, err error) {
	for i, e := range d.extents {
		if i > 0 || e.kind != "SPARSE" || !plain(e.name) {
			return nil, fault.Terminal(fault.ExternalDataFile,
				fmt.Errorf("the vmdk image keeps data in the external file %s (%s): convert it to one file (qemu-img convert -O qcow2)", quote(e.name), quote(e.kind)))
		}
	}
	switch d.createType {
	case "monolithicSparse", "streamOptimized":
	default:
		return nil, fault.Terminal(fault.FormatNotSupported,
			fmt.Errorf("a vmdk image of type %s is not supported as one file (monolithicSparse and streamOptimized are): convert it with qemu-img convert -O qcow2", quote(d.createType)))
	}
	e := d.extents[0]
	switch {
	case e.access == "NOACCESS":
		return nil, corruptVMDK("its extent may not be read, by its descriptor")
	case e.length > h.size:
		return nil, corruptVMDK("its descriptor tells of %d bytes, its header of %d", e.length, h.size)
	case e.length < h.size:
		warnings = append(warnings, fmt.Sprintf("the vmdk image has a disk of %d bytes by its header, which is taken, and of %d by its descriptor", h.size, e.length))
	}
	if h.unclean {
		warnings = append(warnings, vmdkUnclean)
	}
	return warnings, nil
}
