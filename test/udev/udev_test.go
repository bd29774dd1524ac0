package udev

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/test/images"
)

const mib = 1 << 20

// disks and what a host does about them when it is not told to leave them alone.
var disks = []struct {
	name string
	make func(t testing.TB, path string, size int64)
	does []string
}{
	{"a physical volume of LVM", images.LVMMember, []string{"ID_FS_TYPE=LVM2_member", "'/sbin/lvm pvscan --cache", "/dev/disk/by-id/lvm-pv-uuid"}},
	{"a member of an md array", images.RAIDMember, []string{"ID_FS_TYPE=linux_raid_member", "'/sbin/mdadm --incremental"}},
	{"a filesystem", func(t testing.TB, path string, size int64) {
		zeros(t, path, size)
		run(t, "", "mkfs.ext4", "-q", "-F", path)
	}, []string{"ID_FS_TYPE=ext4", "/dev/disk/by-uuid"}},
	{"nothing known", zeros, []string{"'probe-bcache"}},
}

// places of a disk's file below a loop device, and the files that the rules then name.
var places = []struct {
	name string
	// attach returns the loop device; dir is the test's own.
	attach func(t *testing.T, dir, disk string) string
	files  func(dir string) string
}{
	{"in a pool", func(t *testing.T, dir, disk string) string {
		return loop(t, place(t, disk, filepath.Join(dir, "a pool/volumes/x/data.raw")))
	}, func(dir string) string { return filepath.Join(dir, "a pool/*") }},
	{"by a mount that is gone", func(t *testing.T, dir, disk string) string {
		place(t, disk, filepath.Join(dir, "pool/volumes/x/data.raw"))
		return attached(t, "unshare", "-m", "sh", "-ec", `mount --bind "$0/pool" /mnt; losetup --find --show /mnt/volumes/x/data.raw`, dir)
	}, func(string) string { return "/volumes/*/data.raw" }},
	{"on a loop, as the kubelet has it", func(t *testing.T, dir, disk string) string {
		node := filepath.Join(dir, "volumeDevices/pvc-1/dev/pod")
		if err := os.MkdirAll(filepath.Dir(node), 0o755); err != nil {
			t.Fatal(err)
		}
		var st syscall.Stat_t
		if err := syscall.Stat(loop(t, disk), &st); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mknod(node, syscall.S_IFBLK|0o600, int(st.Rdev)); err != nil {
			t.Fatal(err)
		}
		return loop(t, node)
	}, func(dir string) string { return filepath.Join(dir, "volumeDevices/*") }},
}

func TestHostLeavesGuestsDisksAlone(t *testing.T) {
	for _, d := range disks {
		for _, p := range places {
			t.Run(d.name+" "+p.name, func(t *testing.T) {
				dir := t.TempDir()
				disk := filepath.Join(dir, "disk")
				d.make(t, disk, 8*mib)
				dev := p.attach(t, dir, disk)

				without := OnChange(t, dev, "50-none.rules", "")
				for _, deed := range d.does {
					if !strings.Contains(without, deed) {
						t.Errorf("a host that is told nothing does not do %q:\n%s", deed, without)
					}
				}
				with := OnChange(t, dev, "50-longshore.rules", rulesFor(t, p.files(dir)))
				for _, deed := range append([]string{"ID_FS_", "/dev/disk", "sbin/lvm", "sbin/mdadm", "'probe-bcache", "SYSTEMD_READY=1"}, d.does...) {
					if strings.Contains(with, deed) {
						t.Errorf("a host that is told to leave it alone does %q:\n%s", deed, with)
					}
				}
				for _, property := range []string{"SYSTEMD_READY=0", "UDISKS_IGNORE=1"} {
					if !strings.Contains(with, "\n"+property+"\n") {
						t.Errorf("no %s:\n%s", property, with)
					}
				}
			})
		}
	}
}

func TestHostKeepsItsOwnLoops(t *testing.T) {
	dir := t.TempDir()
	disk := filepath.Join(dir, "pools/disk")
	if err := os.Mkdir(filepath.Dir(disk), 0o755); err != nil {
		t.Fatal(err)
	}
	images.LVMMember(t, disk, 8*mib)
	if got := OnChange(t, loop(t, disk), "50-longshore.rules", rulesFor(t, filepath.Join(dir, "pool/*"), "/volumes/*/data.raw")); !strings.Contains(got, "'/sbin/lvm pvscan") {
		t.Errorf("the host does not look for the volume group on a disk of its own:\n%s", got)
	}
}

// rulesFor are the node plugin's rules for loops on these files.
func rulesFor(t *testing.T, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "control"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := device.IgnoreLoops(dir, files...); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "rules.d", "50-longshore.rules"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func zeros(t testing.TB, path string, size int64) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
}

func place(t *testing.T, from, to string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
	return to
}

func loop(t *testing.T, file string) string {
	t.Helper()
	return attached(t, "losetup", "--find", "--show", file)
}

// attached runs what attaches a loop device and prints its name.
func attached(t *testing.T, name string, args ...string) string {
	t.Helper()
	dev := strings.TrimSpace(run(t, "", name, args...))
	t.Cleanup(func() { run(t, "", "losetup", "-d", dev) })
	return dev
}
