package sandbox

import "golang.org/x/sys/unix"

// architecture is the only one whose calls are taken. Calls of the x32 ABI have
// numbers of their own, which no rule has.
const architecture = unix.AUDIT_ARCH_X86_64

// here is what this architecture has beside everywhere.
var here = []uintptr{
	unix.SYS_NEWFSTATAT, unix.SYS_OPEN, unix.SYS_STAT, unix.SYS_LSTAT, unix.SYS_ACCESS, unix.SYS_READLINK, unix.SYS_DUP2,
	unix.SYS_EPOLL_WAIT, unix.SYS_PIPE, unix.SYS_POLL, unix.SYS_SELECT, unix.SYS_TIME, unix.SYS_ARCH_PRCTL,
}
