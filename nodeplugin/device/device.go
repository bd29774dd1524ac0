// Package device handles what a volume's bytes are reached through on this
// machine: files opened for direct I/O, loop devices, filesystems and mounts.
//
// It knows nothing of pools, transfers or Kubernetes: it is told which file,
// which device and which folder, and does one thing to them.
package device

import "errors"

var (
	// ErrNoLoop: every loop node in /dev is taken and no further one can be made.
	ErrNoLoop = errors.New("no free loop device")
	// ErrChanged: a loop device is not, or no longer, what was attached.
	ErrChanged = errors.New("loop device was changed")
	// ErrBusy: the kernel still uses the device, file or mount.
	ErrBusy = errors.New("in use")
	// ErrMounted: the filesystem can't be grown while it is mounted.
	ErrMounted = errors.New("only an unmounted filesystem can be grown")
	// ErrOption: a mount option that is not allowed.
	ErrOption = errors.New("mount option not allowed")
	// ErrNotADiskFile: what lies at the place of a disk image is not a plain file of its own.
	ErrNotADiskFile = errors.New("not a plain file with one link")
)

// mib is 1 MiB in bytes.
const mib = 1 << 20

// UsableBytes is how large an image may be on a filesystem that has available
// bytes free: a twentieth and a bit (6 %) is left to the filesystem, as users of
// the cdi.kubevirt.io API expect, and the rest is rounded down to whole MiB.
func UsableBytes(available int64) int64 {
	if available <= 0 {
		return 0
	}
	// ceil(available / 1.06) without floating point and without overflow.
	usable := available/53*50 + (available%53*50+52)/53
	return usable / mib * mib
}
