package sandbox

import (
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// phase is when a filter holds.
type phase int

const (
	opening phase = iota // from before execve until the program calls Enter
	closed               // from then on
)

// rule allows a system call, where it has a condition only if the low 32 bits
// of the argument arg, under mask, are one of values.
type rule struct {
	nr     uintptr
	arg    int
	mask   uint32
	values []uint32
}

const (
	namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER |
		unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP | unix.CLONE_NEWTIME

	dataNr, dataArch, dataArgs = 0, 4, 16 // offsets in struct seccomp_data
)

// everywhere is what Go's runtime, its network poller and reading and writing
// descriptors need on every architecture.
//
// What is not there, and why not: socket, connect, bind, listen, accept, sendto
// and sendmsg, because a connection handed over belongs to the host's network
// and can be taken apart and connected elsewhere (connect to AF_UNSPEC,
// MSG_FASTOPEN); setsockopt, because it takes BPF programs; ioctl, because a
// loop device takes orders from whoever has it open; ftruncate, because a
// target keeps its length.
var everywhere = []uintptr{
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_READV, unix.SYS_WRITEV,
	unix.SYS_PREAD64, unix.SYS_PWRITE64, unix.SYS_PREADV, unix.SYS_PWRITEV, unix.SYS_PREADV2, unix.SYS_PWRITEV2,
	unix.SYS_LSEEK, unix.SYS_CLOSE, unix.SYS_CLOSE_RANGE, unix.SYS_DUP, unix.SYS_DUP3,
	unix.SYS_FSTAT, unix.SYS_STATX, unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_SYNC_FILE_RANGE, unix.SYS_FADVISE64,
	unix.SYS_OPENAT, unix.SYS_GETDENTS64, unix.SYS_READLINKAT, unix.SYS_FACCESSAT, unix.SYS_FACCESSAT2, unix.SYS_GETCWD,
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EPOLL_PWAIT2, unix.SYS_EVENTFD2, unix.SYS_PIPE2,
	unix.SYS_PPOLL, unix.SYS_PSELECT6,
	unix.SYS_RECVMSG, unix.SYS_RECVFROM, unix.SYS_SHUTDOWN, unix.SYS_GETSOCKOPT, unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME,
	unix.SYS_MUNMAP, unix.SYS_MREMAP, unix.SYS_MADVISE, unix.SYS_BRK, unix.SYS_MINCORE, unix.SYS_MEMBARRIER,
	unix.SYS_FUTEX, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_GETRES, unix.SYS_GETTIMEOFDAY,
	unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_GETCPU,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_TGKILL,
	unix.SYS_GETPID, unix.SYS_GETPPID, unix.SYS_GETTID, unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_GETGID, unix.SYS_GETEGID, unix.SYS_GETGROUPS,
	unix.SYS_SET_TID_ADDRESS, unix.SYS_SET_ROBUST_LIST, unix.SYS_RSEQ, unix.SYS_RESTART_SYSCALL,
	unix.SYS_GETRANDOM, unix.SYS_UNAME, unix.SYS_SYSINFO, unix.SYS_GETRUSAGE, unix.SYS_GETRLIMIT,
	unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
}

// inFolder is what who fills a folder needs beside that: to make, name, measure and mark
// what is in it. Nodes of devices are not among that, nor owners and attributes.
var inFolder = []uintptr{
	unix.SYS_OPENAT2, unix.SYS_MKDIRAT, unix.SYS_SYMLINKAT, unix.SYS_LINKAT, unix.SYS_UNLINKAT,
	unix.SYS_FTRUNCATE, unix.SYS_FCHMOD, unix.SYS_FCHMODAT, unix.SYS_UTIMENSAT, unix.SYS_FSTATFS,
}

// rules returns the list for a phase.
func rules(p phase, folder bool) []rule {
	var list []rule
	for _, nr := range slices.Concat(everywhere, here) {
		list = append(list, rule{nr: nr})
	}
	if folder {
		for _, nr := range inFolder {
			list = append(list, rule{nr: nr})
		}
	}
	only := func(nr uintptr, arg int, values ...uint32) rule {
		return rule{nr: nr, arg: arg, mask: ^uint32(0), values: values}
	}
	list = append(list,
		// Threads, not processes, and in no new namespace.
		rule{nr: unix.SYS_CLONE, arg: 0, mask: namespaces&^unix.CLONE_NEWTIME | unix.CLONE_THREAD, values: []uint32{unix.CLONE_THREAD}},
		only(unix.SYS_FCNTL, 1, unix.F_DUPFD, unix.F_DUPFD_CLOEXEC, unix.F_GETFD, unix.F_SETFD, unix.F_GETFL, unix.F_SETFL),
		// Nothing that moves what lies behind: RLIMIT_FSIZE bounds the length.
		only(unix.SYS_FALLOCATE, 1, 0, unix.FALLOC_FL_KEEP_SIZE,
			unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE,
			unix.FALLOC_FL_ZERO_RANGE, unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE),
		only(unix.SYS_PRLIMIT64, 0, 0), // of the process itself
	)
	if p == opening {
		return append(list,
			rule{nr: unix.SYS_EXECVE}, rule{nr: unix.SYS_SECCOMP},
			rule{nr: unix.SYS_MMAP}, rule{nr: unix.SYS_MPROTECT},
			only(unix.SYS_PRCTL, 0, unix.PR_SET_VMA, unix.PR_SET_NAME, unix.PR_SET_DUMPABLE))
	}
	return append(list,
		rule{nr: unix.SYS_MMAP, arg: 2, mask: unix.PROT_EXEC, values: []uint32{0}},
		rule{nr: unix.SYS_MPROTECT, arg: 2, mask: unix.PROT_EXEC, values: []uint32{0}},
		only(unix.SYS_PRCTL, 0, unix.PR_SET_VMA, unix.PR_SET_NAME))
}

// filter is the program for a phase: what is not allowed answers EPERM, a call
// of another architecture kills.
func filter(p phase, folder bool) []unix.SockFilter {
	load := func(off uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: off}
	}
	equal := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	answer := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k}
	}
	refuse := answer(unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM))
	f := []unix.SockFilter{
		load(dataArch), equal(architecture, 1, 0), answer(unix.SECCOMP_RET_KILL_PROCESS),
		load(dataNr),
		// The C library falls back to clone, whose flags can be looked at.
		equal(uint32(unix.SYS_CLONE3), 0, 1), answer(unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)),
	}
	for _, r := range rules(p, folder) {
		if r.values == nil {
			f = append(f, equal(uint32(r.nr), 0, 1), answer(unix.SECCOMP_RET_ALLOW))
			continue
		}
		n := len(r.values)
		f = append(f, equal(uint32(r.nr), 0, uint8(4+n)),
			load(dataArgs+uint32(r.arg)*8),
			unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: r.mask})
		for i, v := range r.values {
			f = append(f, equal(v, uint8(n-i), 0))
		}
		f = append(f, refuse, answer(unix.SECCOMP_RET_ALLOW))
	}
	return append(f, refuse)
}

// restrict puts a filter over this thread, with the flag TSYNC over all.
func restrict(f []unix.SockFilter, flags uintptr) error {
	p := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	r, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&p)))
	if errno != 0 {
		return fmt.Errorf("filter system calls with %d instructions: %w", len(f), errno)
	}
	if r != 0 {
		return fmt.Errorf("filter system calls: thread %d keeps another filter", r)
	}
	return nil
}
