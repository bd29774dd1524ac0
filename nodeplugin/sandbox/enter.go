package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// variable tells an instance of the program how far its sandbox is.
	variable    = "LONGSHORE_SANDBOX"
	stageSetup  = "setup:" // + the descriptor of the setup socket; the program's mount follows it
	stageInside = "inside"
	stageFolder = "inside, with a folder" // the filter that came before decides

	ready = "ready"

	// base is where the new root is put together: a folder that is there in
	// every container and that nobody needs once we are here. Only this
	// process's mount namespace sees what is mounted on it.
	base = "/proc"
	name = "/program"

	maxFiles = 256
)

// ErrOutside says that Enter was called in a process that Start did not make.
var ErrOutside = errors.New("this process was not started by sandbox.Start")

// Enter completes the sandbox that Start began; package doc says how. It must be
// called while no file is open but those of the program's start. Every error is
// final: whoever gets one exits.
func Enter() error {
	stage := os.Getenv(variable)
	if fd, ok := strings.CutPrefix(stage, stageSetup); ok {
		n, err := strconv.Atoi(fd)
		if err != nil {
			return fmt.Errorf("%s=%s: %w", variable, stage, err)
		}
		conn := os.NewFile(uintptr(n), "setup")
		// What goes wrong is told to Start. Success does not return.
		berr := build(conn, n+1)
		if _, err := conn.WriteString(berr.Error()); err != nil {
			fmt.Fprintln(os.Stderr, berr)
		}
		os.Exit(125)
	}
	if stage != stageInside && stage != stageFolder {
		return ErrOutside
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("forbid to look into the process: %w", err)
	}
	// All threads, those that the runtime has started included.
	if err := restrict(filter(closed, stage == stageFolder), unix.SECCOMP_FILTER_FLAG_TSYNC); err != nil {
		return fmt.Errorf("close the sandbox: %w", err)
	}
	return nil
}

// build makes the walls and executes the program inside; it returns only errors.
func build(conn *os.File, program int) error {
	// Rights and filters are a thread's own until execve makes it the only one.
	runtime.LockOSThread()
	unix.CloseOnExec(int(conn.Fd()))
	unix.CloseOnExec(program)
	orders, err := io.ReadAll(io.LimitReader(conn, maxConfig+1))
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	var s setup
	if err := json.Unmarshal(orders, &s); err != nil {
		return fmt.Errorf("read the configuration of %d bytes: %w", len(orders), err)
	}
	if err := buildRoot(s, program); err != nil {
		return err
	}
	if err := limit(s); err != nil {
		return err
	}
	if err := dropRights(s.UID, s.GID); err != nil {
		return err
	}
	stage := stageInside
	if s.Folder {
		stage = stageFolder
	}
	env := append([]string{variable + "=" + stage}, s.Env...)
	argv := append([]string{"longshore"}, s.Args...)
	if err := restrict(filter(opening, s.Folder), 0); err != nil {
		return err
	}
	if _, err := conn.WriteString(ready); err != nil {
		return err
	}
	err = syscall.Exec(name, argv, env)
	return fmt.Errorf("execute the program as user %d (it must be executable for others): %w", s.UID, err)
}

// buildRoot makes a root of its own: the program, the libraries where it needs
// them, the texts, nothing else; all of it read-only.
func buildRoot(s setup, program int) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("part from the host's mounts: %w", err)
	}
	bytes := 64 << 10
	for _, text := range s.Text {
		bytes += len(text) + os.Getpagesize()
	}
	if err := unix.Mount("tmpfs", base, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, fmt.Sprintf("mode=755,size=%d,nr_inodes=%d", bytes, 16+len(s.Text))); err != nil {
		return fmt.Errorf("mount the new root: %w", err)
	}
	if err := os.WriteFile(base+name, nil, 0o500); err != nil {
		return err
	}
	if err := unix.MoveMount(program, "", unix.AT_FDCWD, base+name, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount the program: %w", err)
	}
	if err := readOnly(base + name); err != nil {
		return err
	}
	if s.Libraries {
		for _, dir := range []string{"/usr", "/lib", "/lib64"} {
			if err := bindLibraries(dir); err != nil {
				return err
			}
		}
	}
	for _, file := range slices.Sorted(maps.Keys(s.Text)) {
		if file != filepath.Base(file) || "/"+file == name {
			return fmt.Errorf("text %q: give a name without folders", file)
		}
		if err := os.WriteFile(filepath.Join(base, file), s.Text[file], 0o444); err != nil {
			return err
		}
	}
	if err := unix.Chdir(base); err != nil {
		return fmt.Errorf("enter the new root: %w", err)
	}
	// The old root ends up under the new one and is taken away from there
	// (pivot_root(2), "pivot_root(".", ".")").
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("let go of the old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("make the root read-only: %w", err)
	}
	if err := unix.Sethostname([]byte("mover")); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	return nil
}

// bindLibraries shows the host's dir at the same place of the new root.
func bindLibraries(dir string) error {
	info, err := os.Lstat(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode()&os.ModeSymlink != 0 { // /lib -> usr/lib
		to, err := os.Readlink(dir)
		if err != nil {
			return err
		}
		return os.Symlink(to, base+dir)
	}
	if err := os.Mkdir(base+dir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(dir, base+dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s: %w", dir, err)
	}
	return readOnly(base + dir)
}

func readOnly(path string) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if err := unix.MountSetattr(unix.AT_FDCWD, path, unix.AT_RECURSIVE, &attr); err != nil {
		return fmt.Errorf("make %s read-only: %w", path, err)
	}
	return nil
}

// limit sets the resource limits. There is none on processes: the kernel counts
// them per user of the whole host, where qemu has the same one, and the filter
// allows threads only, which the memory bound counts.
func limit(s setup) error {
	for _, l := range []struct {
		what  string
		which int
		value uint64
	}{
		{"RLIMIT_CORE", unix.RLIMIT_CORE, 0},
		{"RLIMIT_NOFILE", unix.RLIMIT_NOFILE, maxFiles + uint64(s.Descriptors)},
		{"RLIMIT_FSIZE", unix.RLIMIT_FSIZE, s.FileBytes},
		{"RLIMIT_DATA", unix.RLIMIT_DATA, s.DataBytes},
		// Of each thread that a C library's runtime makes, and counted as data.
		{"RLIMIT_STACK", unix.RLIMIT_STACK, 1 << 20},
		{"RLIMIT_MEMLOCK", unix.RLIMIT_MEMLOCK, 0},
		{"RLIMIT_MSGQUEUE", unix.RLIMIT_MSGQUEUE, 0},
	} {
		if err := unix.Prlimit(0, l.which, &unix.Rlimit{Cur: l.value, Max: l.value}, nil); err != nil {
			return fmt.Errorf("set %s to %d: %w", l.what, l.value, err)
		}
	}
	return nil
}

// dropRights makes this thread the given user without any capability, for good.
func dropRights(uid, gid int) error {
	for c := uintptr(0); ; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // behind the last capability that this kernel knows
		}
		if err != nil {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
	}
	// Of the thread only, hence not by the functions of package syscall.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return fmt.Errorf("drop all groups: %w", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)); errno != 0 {
		return fmt.Errorf("become group %d: %w", gid, errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
		return fmt.Errorf("become user %d: %w", uid, errno)
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&head, &none[0]); err != nil {
		return fmt.Errorf("drop all capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("forbid new rights: %w", err)
	}
	// A change of the user clears it. Had the parent died before, its end of
	// the setup socket would be closed and the last word to it an error.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("tie the process to its parent: %w", err)
	}
	return nil
}
