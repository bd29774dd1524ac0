package sandbox

import "golang.org/x/sys/unix"

// architecture is the only one whose calls are taken.
const architecture = unix.AUDIT_ARCH_AARCH64

// here is what this architecture has beside everywhere.
var here = []uintptr{unix.SYS_FSTATAT}
