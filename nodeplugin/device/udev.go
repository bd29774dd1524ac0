package device

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// udevRules is the file's name. It comes before every rule that looks into a
// block device, the first of which are number 55.
const udevRules = "50-longshore.rules"

// IgnoreLoops tells this machine's udev to leave alone the loop devices on the
// files of these paths, in which * stands for anything: what is on them is a
// guest's business, and the host must not look for filesystems, volume groups or
// arrays on them, let alone start one.
//
// runtime is udev's runtime folder, /run/udev of the host; where no udev runs it
// does nothing. The rules are gone after the next boot, or with the file. Udev
// notices them by themselves: it compares the time of its folders of rules at an
// event, though not more often than every three seconds (event_queue_start in
// systemd's udevd.c). Devices that it has seen before are judged anew at their
// next event.
//
// A loop shows the path by which its file was opened. Once the mount that it was
// opened by is gone, for instance with its container, that is the path below
// the mount's root.
func IgnoreLoops(runtime string, paths ...string) error {
	if _, err := os.Stat(filepath.Join(runtime, "control")); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("look for udev: %w", err)
	}
	dir := filepath.Join(runtime, "rules.d")
	file := filepath.Join(dir, udevRules)
	text := []byte(rulesFor(paths))
	if old, err := os.ReadFile(file); err == nil && bytes.Equal(old, text) {
		return nil
	}
	// Only what ends in .rules is read.
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = os.WriteFile(file+".new", text, 0o644)
	}
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		return fmt.Errorf("write rules for udev: %w", err)
	}
	return nil
}

// rulesFor is the file's text; see udev(7).
func rulesFor(paths []string) string {
	var b strings.Builder
	b.WriteString(`# Written by the node plugin of Longshore when it starts. What is on these loop
# devices belongs to guests: the host looks for nothing on them and starts nothing.
ACTION=="remove", GOTO="longshore_end"
SUBSYSTEM!="block", GOTO="longshore_end"
KERNEL!="loop*", GOTO="longshore_end"
`)
	for _, p := range paths {
		fmt.Fprintf(&b, "ATTRS{loop/backing_file}==\"%s\", GOTO=\"longshore_ignore\"\n", udevPattern(p))
	}
	b.WriteString(`GOTO="longshore_end"

LABEL="longshore_ignore"
# No blkid, hence no ID_FS_TYPE, by which the rules of LVM, md, btrfs and others
# know their own, and no links in /dev/disk.
ENV{UDEV_DISABLE_PERSISTENT_STORAGE_RULES_FLAG}="1"
ENV{UDEV_DISABLE_PERSISTENT_STORAGE_BLKID_FLAG}="1"
# For those that look for themselves: LVM, bcache, multipath; then md and btrfs,
# and systemd's units; then desktops.
ENV{DM_UDEV_DISABLE_OTHER_RULES_FLAG}="1"
ENV{SYSTEMD_READY}="0"
ENV{UDISKS_IGNORE}="1", ENV{UDISKS_AUTO}="0"
# Udev would open the device and read it whenever a writer has closed it.
OPTIONS:="nowatch"

LABEL="longshore_end"
`)
	return b.String()
}

// udevPattern makes a pattern of a path. What means something in a pattern or in
// a rule can't all be quoted; ? matches it too.
func udevPattern(path string) string {
	b := []byte(path)
	for i, c := range b {
		plain := c == '*' || c == '/' || c == '.' || c == '-' || c == '_' || c == '+' || c == ':' || c == '@' || c == ',' || c == '=' ||
			'0' <= c && c <= '9' || 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z'
		if !plain {
			b[i] = '?'
		}
	}
	return string(b)
}
