// Package udev asks a host's udev, with the rules of Debian's packages, what it
// does about a block device.
//
// It knows nothing of Longshore's own rules: it is given their text. No udev
// daemon runs for it: udevadm evaluates the rules in a mount namespace with a /dev
// and a /run of its own.
package udev

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// packages whose rules look into block devices, besides udev's own.
var packages = []string{"lvm2", "mdadm", "bcache-tools"}

// OnChange is what udevadm says of a change of the device /dev/NAME: the programs that
// it starts, the links that it makes, and at the end the device's properties. more
// is the text of further rules, in a file of that name.
func OnChange(t testing.TB, dev, name, more string) string {
	t.Helper()
	runDir := t.TempDir()
	dir := filepath.Join(runDir, "udev", "rules.d")
	if err := os.CopyFS(dir, os.DirFS(debianRules(t))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(more), 0o644); err != nil {
		t.Fatal(err)
	}
	// The tools that the rules call are not to be let loose on this machine.
	out := run(t, "", "unshare", "-m", "sh", "-ec", `
mount --bind "$0" /run
number=$(cat /sys/block/$1/dev)
mount -t tmpfs tmpfs /dev
mknod /dev/null c 1 3
mknod /dev/$1 b ${number%:*} ${number#*:}
for tool in /sbin/lvm /sbin/mdadm /lib/udev/probe-bcache; do
  [ ! -e $tool ] || mount --bind /bin/false $tool
done
udevadm test --action=change /sys/block/$1 2>&1
`, runDir, filepath.Base(dev))
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "/run/udev/rules.d/"+name+":") {
			t.Errorf("udev complains: %s", line)
		}
	}
	return out
}

// debianRules is a folder with the rules of the packages, which are not installed
// for it. It is kept in the user's cache folder.
func debianRules(t testing.TB) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(strings.Join(packages, " ")))
	cache = filepath.Join(cache, "longshore", "udev")
	rules := filepath.Join(cache, hex.EncodeToString(sum[:8]))
	if _, err := os.Stat(rules); err == nil {
		return rules
	}
	tmp := t.TempDir()
	run(t, tmp, "apt-get", append([]string{"-o", "APT::Sandbox::User=root", "-qq", "download"}, packages...)...)
	run(t, tmp, "sh", "-ec", `mkdir rules; for p in *.deb; do dpkg-deb -x $p tree; done; find tree -path '*/udev/rules.d/*.rules' -exec cp {} rules/ \;`)
	mine := fmt.Sprintf("%s.%d", rules, os.Getpid())
	if err := os.CopyFS(mine, os.DirFS(filepath.Join(tmp, "rules"))); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(mine)
	// Another process may have been faster.
	if err := os.Rename(mine, rules); err != nil && !os.IsExist(err) {
		t.Fatal(err)
	}
	return rules
}

func run(t testing.TB, dir, name string, args ...string) string {
	t.Helper()
	var out, complaint bytes.Buffer
	c := exec.Command(name, args...)
	c.Dir, c.Stdout, c.Stderr = dir, &out, &complaint
	c.Env = append(os.Environ(), "LC_ALL=C", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	if err := c.Run(); err != nil {
		t.Fatal(fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, complaint.Bytes()))
	}
	return out.String()
}
