package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The first argument turns the test binary into one of these.
const (
	probe   = "sandbox-probe"   // looks around, writes what it sees to descriptor 3 and ends
	eater   = "sandbox-eater"   // allocates for ever
	cacher  = "sandbox-cacher"  // writes descriptor 3 through the page cache
	sleeper = "sandbox-sleeper" // closes descriptor 3 and sleeps
	packer  = "sandbox-packer"  // fills the folder that is descriptor 4, and tries to leave it
	holder  = "sandbox-holder"  // outside: starts a sleeper and waits
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case probe, eater, cacher, sleeper, packer:
			if err := Enter(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(inside(os.Args[1]))
		case holder:
			hold()
		}
	}
	os.Exit(m.Run())
}

// seen is what a probe tells.
type seen struct {
	UID, GID, PID                     int
	Groups                            []int
	Root                              []string
	Hostname                          string
	Environment                       []string
	Read                              string
	Opened, Allowed, Unexpected       []string
	FileLimit, OpenLimit, CoreLimit   uint64
	ReadRoots                         string
	SetDirect, TargetWrite, HoleError string
}

func inside(what string) int {
	switch what {
	case eater:
		var keep [][]byte
		for range 1 << 16 {
			b := make([]byte, 1<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			keep = append(keep, b)
		}
		runtime.KeepAlive(keep)
		return 0
	case cacher:
		b := make([]byte, 1<<20)
		for i := range int64(256) {
			if _, err := unix.Pwrite(3, b, i<<20); err != nil {
				fmt.Println(err)
				return 1
			}
		}
		return 0
	case sleeper:
		unix.Close(3)
		for {
			time.Sleep(time.Hour)
		}
	}
	s := look
	if what == packer {
		s = pack
	}
	data, err := json.Marshal(s())
	if err != nil {
		fmt.Println(err)
		return 1
	}
	if _, err := unix.Write(3, data); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// look tries everything that must not work.
func look() seen {
	s := seen{UID: os.Getuid(), GID: os.Getgid(), PID: os.Getpid(), Environment: os.Environ()}
	s.Groups, _ = os.Getgroups()
	s.Hostname = func() string {
		var u unix.Utsname
		unix.Uname(&u)
		return unix.ByteSliceToString(u.Nodename[:])
	}()
	root, _ := os.ReadDir("/")
	for _, e := range root {
		s.Root = append(s.Root, e.Name())
	}
	roots, _ := os.ReadFile("/roots.pem")
	s.ReadRoots = string(roots)
	for which, to := range map[int]*uint64{unix.RLIMIT_FSIZE: &s.FileLimit, unix.RLIMIT_NOFILE: &s.OpenLimit, unix.RLIMIT_CORE: &s.CoreLimit} {
		var l unix.Rlimit
		unix.Getrlimit(which, &l)
		*to = l.Max
	}
	for _, path := range []string{"/etc/passwd", "/etc", "/proc", "/proc/self/status", "/proc/1/root", "/dev/null", "/dev", "/sys", "/sys/kernel", "/tmp", "/var", "/root", "/run", "/home"} {
		if fd, err := unix.Open(path, unix.O_RDONLY, 0); err == nil {
			s.Opened = append(s.Opened, path)
			unix.Close(fd)
		}
	}

	// Each of these must answer EPERM (clone3: ENOSYS), whatever its arguments.
	try := func(name string, errno syscall.Errno) {
		if errno == 0 {
			s.Allowed = append(s.Allowed, name)
		} else if errno != unix.EPERM {
			s.Unexpected = append(s.Unexpected, fmt.Sprintf("%s: %v", name, errno))
		}
	}
	call := func(name string, nr uintptr, a ...uintptr) {
		a = append(a, 0, 0, 0, 0, 0, 0)
		_, _, errno := unix.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
		try(name, errno)
	}
	for name, domain := range map[string]uintptr{"AF_INET": unix.AF_INET, "AF_INET6": unix.AF_INET6, "AF_UNIX": unix.AF_UNIX, "AF_NETLINK": unix.AF_NETLINK, "AF_PACKET": unix.AF_PACKET, "AF_VSOCK": unix.AF_VSOCK, "AF_ALG": unix.AF_ALG} {
		call("socket "+name, unix.SYS_SOCKET, domain, unix.SOCK_STREAM)
	}
	call("socketpair", unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_STREAM)
	for name, nr := range map[string]uintptr{
		"connect": unix.SYS_CONNECT, "bind": unix.SYS_BIND, "listen": unix.SYS_LISTEN, "accept": unix.SYS_ACCEPT, "accept4": unix.SYS_ACCEPT4,
		"sendto": unix.SYS_SENDTO, "sendmsg": unix.SYS_SENDMSG, "sendmmsg": unix.SYS_SENDMMSG, "setsockopt": unix.SYS_SETSOCKOPT,
	} {
		call(name, nr, 4)
	}
	for name, request := range map[string]uintptr{"BLKGETSIZE64": unix.BLKGETSIZE64, "LOOP_CLR_FD": unix.LOOP_CLR_FD, "TIOCSTI": unix.TIOCSTI, "FS_IOC_SETFLAGS": unix.FS_IOC_SETFLAGS, "FICLONE": unix.FICLONE} {
		call("ioctl "+name, unix.SYS_IOCTL, 4, request)
	}
	for name, flag := range map[string]uintptr{"user": unix.CLONE_NEWUSER, "net": unix.CLONE_NEWNET, "mount": unix.CLONE_NEWNS, "pid": unix.CLONE_NEWPID, "cgroup": unix.CLONE_NEWCGROUP, "time": unix.CLONE_NEWTIME} {
		call("unshare "+name, unix.SYS_UNSHARE, flag)
		if flag != unix.CLONE_NEWTIME {
			call("clone "+name, unix.SYS_CLONE, flag|uintptr(unix.SIGCHLD))
		}
	}
	call("fork", unix.SYS_CLONE, uintptr(unix.SIGCHLD))
	if _, _, errno := unix.RawSyscall(unix.SYS_CLONE3, 0, 0, 0); errno != unix.ENOSYS {
		s.Unexpected = append(s.Unexpected, "clone3: "+errno.Error())
	}
	program := []byte("/program\x00")
	argv := []uintptr{uintptr(unsafe.Pointer(&program[0])), 0}
	call("execve", unix.SYS_EXECVE, uintptr(unsafe.Pointer(&program[0])), uintptr(unsafe.Pointer(&argv[0])))
	for name, nr := range map[string]uintptr{
		"execveat": unix.SYS_EXECVEAT, "setns": unix.SYS_SETNS, "mount": unix.SYS_MOUNT, "umount2": unix.SYS_UMOUNT2, "fsopen": unix.SYS_FSOPEN,
		"open_tree": unix.SYS_OPEN_TREE, "move_mount": unix.SYS_MOVE_MOUNT, "mount_setattr": unix.SYS_MOUNT_SETATTR, "pivot_root": unix.SYS_PIVOT_ROOT,
		"chroot": unix.SYS_CHROOT, "bpf": unix.SYS_BPF, "io_uring_setup": unix.SYS_IO_URING_SETUP, "ptrace": unix.SYS_PTRACE,
		"open_by_handle_at": unix.SYS_OPEN_BY_HANDLE_AT, "process_vm_readv": unix.SYS_PROCESS_VM_READV, "process_vm_writev": unix.SYS_PROCESS_VM_WRITEV,
		"keyctl": unix.SYS_KEYCTL, "add_key": unix.SYS_ADD_KEY, "perf_event_open": unix.SYS_PERF_EVENT_OPEN, "userfaultfd": unix.SYS_USERFAULTFD,
		"memfd_create": unix.SYS_MEMFD_CREATE, "ftruncate": unix.SYS_FTRUNCATE, "truncate": unix.SYS_TRUNCATE, "seccomp": unix.SYS_SECCOMP,
		"kexec_load": unix.SYS_KEXEC_LOAD, "setuid": unix.SYS_SETUID, "capset": unix.SYS_CAPSET, "pidfd_getfd": unix.SYS_PIDFD_GETFD,
		"shmget": unix.SYS_SHMGET, "landlock": unix.SYS_LANDLOCK_CREATE_RULESET, "mknodat": unix.SYS_MKNODAT, "fchmod": unix.SYS_FCHMOD, "fchown": unix.SYS_FCHOWN,
	} {
		call(name, nr)
	}
	call("prlimit of another", unix.SYS_PRLIMIT64, 2, unix.RLIMIT_NOFILE)
	call("prctl PR_SET_DUMPABLE", unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 1)
	call("fcntl F_SETOWN", unix.SYS_FCNTL, 4, unix.F_SETOWN, 1)
	call("fcntl F_SETLEASE", unix.SYS_FCNTL, 4, unix.F_SETLEASE, 1)
	call("fallocate collapse", unix.SYS_FALLOCATE, 4, unix.FALLOC_FL_COLLAPSE_RANGE, 0, 4096)
	call("fallocate insert", unix.SYS_FALLOCATE, 4, unix.FALLOC_FL_INSERT_RANGE, 0, 4096)
	call("mmap executable", unix.SYS_MMAP, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANON, ^uintptr(0))
	call("mprotect executable", unix.SYS_MPROTECT, 0, 4096, unix.PROT_EXEC)

	// What the engine does with its target.
	b := make([]byte, 16)
	n, _ := unix.Pread(4, b, 0)
	s.Read = string(b[:n])
	buf := unsafe.Slice((*byte)(unsafe.Pointer(&make([]uint64, 1024)[0])), 8192)
	if _, err := unix.Pwrite(4, append(buf[:0], "written inside"...), 4096); err != nil {
		s.TargetWrite = err.Error()
	}
	if err := unix.Fallocate(4, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 8192, 4096); err != nil {
		s.HoleError = err.Error()
	}
	if flags, err := unix.FcntlInt(4, unix.F_GETFL, 0); err != nil {
		s.SetDirect = err.Error()
	} else if _, err := unix.FcntlInt(4, unix.F_SETFL, flags|unix.O_DIRECT); err != nil && err != unix.EINVAL { // tmpfs of old kernels has none
		s.SetDirect = err.Error()
	} else if _, err := unix.FcntlInt(4, unix.F_SETFL, flags); err != nil { // the test reads by the same description
		s.SetDirect = err.Error()
	}
	return s
}

// target is a file of 1 MiB that starts with "from outside".
func target(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "target"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteAt([]byte("from outside"), 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestInside(t *testing.T) {
	file := target(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	t.Setenv("TOKEN_OF_THE_NODE", "secret")
	p, err := Start(t.Context(), Config{
		Args: []string{probe}, Env: []string{"A=b"}, Files: []*os.File{w, file},
		Text: map[string][]byte{"roots.pem": []byte("certificates")}, FileBytes: 1 << 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	var s seen
	derr := json.NewDecoder(r).Decode(&s)
	if err := p.Wait(); err != nil {
		t.Fatal(err)
	}
	if derr != nil {
		t.Fatal(derr)
	}
	if s.UID != NobodyID || s.GID != NobodyID || len(s.Groups) > 0 || s.PID != 1 {
		t.Errorf("user %d, group %d, groups %v, pid %d; want 107, 107, none, 1", s.UID, s.GID, s.Groups, s.PID)
	}
	if s.Hostname != "mover" {
		t.Errorf("host name %q", s.Hostname)
	}
	want := []string{"program", "roots.pem"}
	if libraries, _ := dynamic("/proc/self/exe"); libraries {
		want = []string{"lib", "lib64", "program", "roots.pem", "usr"}
	}
	if !slices.Equal(s.Root, want) {
		t.Errorf("root has %v, want %v", s.Root, want)
	}
	if s.ReadRoots != "certificates" {
		t.Errorf("roots.pem says %q", s.ReadRoots)
	}
	if len(s.Opened) > 0 {
		t.Errorf("opened %v", s.Opened)
	}
	if len(s.Allowed) > 0 {
		t.Errorf("allowed: %v", s.Allowed)
	}
	if len(s.Unexpected) > 0 {
		t.Errorf("refused, but not by the filter: %v", s.Unexpected)
	}
	if s.Read[:12] != "from outside" {
		t.Errorf("read %q", s.Read)
	}
	if s.TargetWrite+s.HoleError+s.SetDirect != "" {
		t.Errorf("write %q, punch %q, direct %q", s.TargetWrite, s.HoleError, s.SetDirect)
	}
	got := make([]byte, 14)
	if _, err := file.ReadAt(got, 4096); err != nil || string(got) != "written inside" {
		t.Errorf("outside reads %q, %v", got, err)
	}
	if s.FileLimit != 1<<20 || s.OpenLimit != maxFiles+2 || s.CoreLimit != 0 {
		t.Errorf("limits: file %d, open files %d, core %d", s.FileLimit, s.OpenLimit, s.CoreLimit)
	}
	if !slices.Equal(s.Environment, []string{variable + "=" + stageInside, "A=b"}) {
		t.Errorf("environment %v", s.Environment)
	}
}

// state is what the host sees of a process.
func state(t *testing.T, pid int) map[string]string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	s := map[string]string{}
	for line := range strings.Lines(string(data)) {
		k, v, _ := strings.Cut(line, ":")
		s[k] = strings.TrimSpace(v)
	}
	return s
}

// asleep starts a sleeper that is past its Enter.
func asleep(t *testing.T, ctx context.Context, c Config) *Process {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c.Args, c.Files = []string{sleeper}, []*os.File{w}
	p, err := Start(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Kill(); p.Wait() })
	w.Close()
	if _, err := r.Read(make([]byte, 1)); err == nil {
		t.Fatal("the sleeper wrote")
	}
	return p
}

func TestSeenFromOutside(t *testing.T) {
	p := asleep(t, t.Context(), Config{MemoryBytes: 256 << 20})
	s := state(t, p.Pid())
	for key, want := range map[string]string{
		"Uid": "107\t107\t107\t107", "Gid": "107\t107\t107\t107", "Groups": "", "NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "2",
		"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapBnd": "0000000000000000", "CapAmb": "0000000000000000",
	} {
		if s[key] != want {
			t.Errorf("%s is %q, want %q", key, s[key], want)
		}
	}
	// Every thread of it.
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		tid, _ := strconv.Atoi(task.Name())
		if s := state(t, tid); s["Seccomp_filters"] != "2" || s["CapBnd"] != "0000000000000000" || s["NoNewPrivs"] != "1" {
			t.Errorf("thread %d: %s filters, bounding set %s, NoNewPrivs %s", tid, s["Seccomp_filters"], s["CapBnd"], s["NoNewPrivs"])
		}
	}
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts"} {
		ours, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", p.Pid(), ns))
		if err != nil || ours == theirs {
			t.Errorf("namespace %s: ours %s, theirs %s, %v", ns, ours, theirs, err)
		}
	}
	// The network has a loopback that is down and nothing else.
	devices, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", p.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(devices)), "\n")[2:] {
		// The kernel may make fallback tunnels; none is up, and no route leads anywhere.
		if name, _, _ := strings.Cut(strings.TrimSpace(line), ":"); name == "eth0" {
			t.Errorf("there is a device %s", line)
		}
	}
	routes, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/route", p.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(strings.TrimSpace(string(routes)), "\n"); len(lines) > 1 {
		t.Errorf("routes: %v", lines)
	}
	// Not dumpable: its files in /proc belong to root.
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/mem", p.Pid()), &st); err != nil || st.Uid != 0 {
		t.Errorf("/proc/pid/mem belongs to %d, %v: the process is dumpable", st.Uid, err)
	}
}

func TestKilledWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	p := asleep(t, ctx, Config{MemoryBytes: 64 << 20})
	cancel()
	var died *Died
	if err := p.Wait(); !errors.As(err, &died) || died.OutOfMemory {
		t.Errorf("got %v, want a kill", err)
	}
	gone(t, p)
}

// gone checks that nothing of p is left.
func gone(t *testing.T, p *Process) {
	t.Helper()
	if err := unix.Kill(p.Pid(), 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("process %d is there: %v", p.Pid(), err)
	}
	if p.group != nil {
		if _, err := os.Stat(p.group.dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("cgroup %s is there: %v", p.group.dir, err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), " "+base+name+" ") {
		t.Error("the program's mount is there")
	}
}

func TestMemoryIsBounded(t *testing.T) {
	file := target(t)
	p, err := Start(t.Context(), Config{Args: []string{eater}, Files: []*os.File{file}, MemoryBytes: 64 << 20, FileBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	var died *Died
	if err := p.Wait(); !errors.As(err, &died) || !died.OutOfMemory {
		t.Fatalf("got %v, want out of memory", err)
	}
	if peak := p.PeakBytes(); p.Bound() != "rlimit" && (peak == 0 || peak > 64<<20) {
		t.Errorf("it had %d bytes", peak)
	}
	gone(t, p)
}

// Where this process may make no cgroups the data limit has to do.
func TestMemoryIsBoundedWithoutCgroup(t *testing.T) {
	file := target(t)
	before := parent
	parent = func() (*hierarchy, error) { return nil, nil }
	defer func() { parent = before }()
	p, err := Start(t.Context(), Config{Args: []string{eater}, Files: []*os.File{file}, MemoryBytes: 64 << 20, FileBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if p.Bound() != "rlimit" {
		t.Fatalf("bound by %s", p.Bound())
	}
	var died *Died
	if err := p.Wait(); !errors.As(err, &died) || !died.OutOfMemory {
		t.Fatalf("got %v, want out of memory", err)
	}
	gone(t, p)
}

func TestPageCacheCounts(t *testing.T) {
	file := target(t)
	p, err := Start(t.Context(), Config{Args: []string{cacher}, Files: []*os.File{file}, MemoryBytes: 48 << 20, FileBytes: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		t.Fatal(err)
	}
	if p.Bound() == "rlimit" {
		t.Skip("this process may make no cgroups")
	}
	if peak := p.PeakBytes(); peak < 24<<20 || peak > 48<<20 {
		t.Errorf("256 MiB written through the page cache: peak %d bytes, want between 24 and 48 MiB", peak)
	}
}

// A file does not grow beyond Config.FileBytes.
func TestTargetKeepsItsLength(t *testing.T) {
	file := target(t)
	p, err := Start(t.Context(), Config{Args: []string{cacher}, Files: []*os.File{file}, FileBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err == nil {
		t.Error("256 MiB were written to a file of 1 MiB")
	}
	if info, err := file.Stat(); err != nil || info.Size() != 1<<20 {
		t.Errorf("the file has %d bytes, %v", info.Size(), err)
	}
}

// hold is a parent that is killed: it starts a sleeper and says its pid.
func hold() {
	r, w, err := os.Pipe()
	if err != nil {
		os.Exit(1)
	}
	p, err := Start(context.Background(), Config{Args: []string{sleeper}, Files: []*os.File{w}, MemoryBytes: 64 << 20})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	w.Close()
	r.Read(make([]byte, 1))
	dir := ""
	if p.group != nil {
		dir = p.group.dir
	}
	fmt.Println(p.Pid(), dir)
	p.Wait()
}

func TestDiesWithItsParent(t *testing.T) {
	cmd := exec.Command("/proc/self/exe", holder)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	var dir string
	if _, err := fmt.Fscanln(out, &pid, &dir); err != nil && pid == 0 {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000); n != 1 {
		t.Fatalf("the orphan still runs after 10 s (%v)", err)
	}
	if dir == "" {
		return
	}
	// The next instance clears the cgroup away.
	h := &hierarchy{dir: filepath.Dir(dir)}
	for deadline := time.Now().Add(10 * time.Second); ; runtime.Gosched() {
		h.sweep()
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("cgroup %s stays", dir)
		}
	}
}

func TestEnterOutside(t *testing.T) {
	if err := Enter(); !errors.Is(err, ErrOutside) {
		t.Errorf("got %v", err)
	}
}

// Of a crash the line that says what it was is told, not the end of the dump.
func TestWhatADeadProcessSaid(t *testing.T) {
	for _, row := range []struct{ name, wrote, said string }{
		{"a panic", "goroutine dump follows\npanic: index out of range\n\ngoroutine 1 [running]:\nmain.main()\n" + strings.Repeat("x\n", tailBytes), "panic: index out of range"},
		{"a last word", "one\ntwo\n\n", "two"},
		{"nothing", "", ""},
		{"bytes meant for a terminal", "a\x1b[31mb\r\n", "a / [31mb"},
		{"a long line", strings.Repeat("y", 1000), strings.Repeat("y", 256)},
	} {
		t.Run(row.name, func(t *testing.T) {
			out := &tail{}
			for i := range len(row.wrote) {
				out.Write([]byte(row.wrote[i : i+1]))
			}
			if said, all := out.strings(); said != row.said || len(all) > 4*tailBytes {
				t.Errorf("got %q of %d bytes, want %q", said, len(all), row.said)
			}
		})
	}
}

// What goes wrong inside the walls' building is said.
func TestSetupErrorIsTold(t *testing.T) {
	_, err := Start(t.Context(), Config{Args: []string{probe}, Text: map[string][]byte{"../x": nil}, MemoryBytes: 64 << 20})
	if err == nil || !strings.Contains(err.Error(), "without folders") {
		t.Errorf("got %v", err)
	}
}

func TestWhereCgroupsAreMade(t *testing.T) {
	for _, row := range []struct {
		name          string
		mount         cgroupMount
		path, showsAt string
	}{
		{"on the host", cgroupMount{root: "/", at: "/sys/fs/cgroup/memory"}, "/system.slice/a", "/sys/fs/cgroup/memory/system.slice/a"},
		{"in a container without a cgroup namespace", cgroupMount{root: "/kubepods/p/c", at: "/sys/fs/cgroup/memory"}, "/kubepods/p/c", "/sys/fs/cgroup/memory"},
		{"below it", cgroupMount{root: "/kubepods/p/c", at: "/sys/fs/cgroup/memory"}, "/kubepods/p/c/d", "/sys/fs/cgroup/memory/d"},
		{"in a container with one", cgroupMount{root: "/", at: "/sys/fs/cgroup"}, "/", "/sys/fs/cgroup"},
		{"a path that only starts alike", cgroupMount{root: "/a", at: "/m"}, "/ab", "/m/ab"},
	} {
		t.Run(row.name, func(t *testing.T) {
			if got := row.mount.locate(row.path); got != row.showsAt {
				t.Errorf("got %s, want %s", got, row.showsAt)
			}
		})
	}
}

func TestMountsOfBothVersions(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mountinfo")
	if err := os.WriteFile(file, []byte(`24 29 0:22 / /proc rw - proc proc rw
30 28 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
31 28 0:27 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct
32 28 0:28 /kubepods/c /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory
`), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := cgroupMounts(file)
	want := []cgroupMount{{root: "/kubepods/c", at: "/sys/fs/cgroup/memory", legacy: true}, {root: "/", at: "/sys/fs/cgroup/unified"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		r, w, err := os.Pipe()
		if err != nil {
			b.Fatal(err)
		}
		p, err := Start(b.Context(), Config{Args: []string{sleeper}, Files: []*os.File{w}, MemoryBytes: 64 << 20})
		if err != nil {
			b.Fatal(err)
		}
		w.Close()
		r.Read(make([]byte, 1))
		r.Close()
		p.Kill()
		p.Wait()
	}
}
