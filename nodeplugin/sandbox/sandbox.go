// Package sandbox runs a program, or this one once more, where it can see and reach
// nothing but the descriptors that it is handed: an empty read-only root, an
// empty network, a user without capabilities, a short list of system calls and
// a bound on memory.
//
// It knows nothing of what the program does there.
//
// Start makes the process. The program calls Enter before it does anything that it
// does only there: the first time Enter builds the walls and executes the program again inside them,
// the second time it closes the last door (no execve any more) and returns.
package sandbox

import (
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// NobodyID is the user and group of a sandbox unless its Config names
	// others: qemu's, whom disk images belong to in KubeVirt.
	NobodyID = 107

	maxConfig = 2 << 20
	tailBytes = 4 << 10
	// setupTime is the most that building the walls may take.
	setupTime = 30 * time.Second
)

// Config says what the process gets.
type Config struct {
	// Program is the path of the program; "" is this very one.
	Program string
	// Args follow the program's name. They show in the host's process list: no
	// secrets.
	Args []string
	// Env is the whole environment, but for one variable of this package; no secrets either.
	Env []string
	// Files become the descriptors 3, 4, ... They stay the caller's to close.
	Files []*os.File
	// Folder: one of Files is a folder that the process fills.
	Folder bool
	// Text are small files by name, without folders, that the process finds in
	// its root and can only read.
	Text map[string][]byte
	// MemoryBytes bounds the process with the page cache that it causes; 0 does not.
	MemoryBytes int64
	// FileBytes is how long a file may become by what the process writes.
	FileBytes int64
	// UID and GID, of the host; 0 means NobodyID. Root cannot be had.
	UID, GID int
}

// Process is a program in its sandbox.
type Process struct {
	pid    int
	cancel context.CancelFunc
	group  *group // nil where no cgroup bounds the process
	done   chan struct{}

	// Valid once done is closed.
	err  error
	peak int64
}

// Died says how a process ended that did not exit with status 0.
type Died struct {
	// OutOfMemory: it wanted more than Config.MemoryBytes.
	OutOfMemory bool
	// Status is what the kernel says: "exit status 2", "signal: killed".
	Status string
	// Said is the line that tells most of what the process wrote to its standard
	// outputs: a panic's first, else the last one. Output is the beginning and
	// the end of it all. Both are printable and cut.
	Said, Output string
}

func (d *Died) Error() string {
	text := d.Status
	if d.OutOfMemory {
		text = "out of memory"
	}
	if d.Said == "" {
		return text
	}
	return text + ": " + d.Said
}

// setup is what the first instance is told by Start.
type setup struct {
	Args, Env   []string
	Text        map[string][]byte
	UID, GID    int
	FileBytes   uint64
	DataBytes   uint64
	Libraries   bool
	Folder      bool
	Descriptors int
}

// Start returns once the program runs inside its walls. It is killed when ctx
// ends, and when this process dies; whichever way it ends, nothing of it stays.
// The caller must Wait.
func Start(ctx context.Context, c Config) (*Process, error) {
	p, err := start(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("start sandbox: %w", err)
	}
	return p, nil
}

func start(ctx context.Context, c Config) (*Process, error) {
	s := setup{
		Args: c.Args, Env: c.Env, Text: c.Text, Folder: c.Folder, UID: c.UID, GID: c.GID,
		FileBytes: uint64(c.FileBytes), DataBytes: dataLimit(c.MemoryBytes), Descriptors: len(c.Files),
	}
	if s.UID == 0 {
		s.UID = NobodyID
	}
	if s.GID == 0 {
		s.GID = NobodyID
	}
	path := "/proc/self/exe"
	if c.Program != "" {
		path = c.Program
	}
	var err error
	if s.Libraries, err = dynamic(path); err != nil {
		return nil, err
	}
	told, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	if len(told) > maxConfig {
		return nil, fmt.Errorf("configuration of %d bytes, at most %d", len(told), maxConfig)
	}

	// The program itself as a mount that belongs to no tree yet: the same file
	// also when somebody has replaced it at its path.
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("clone the mount of %s (needs CAP_SYS_ADMIN): %w", path, err)
	}
	program := os.NewFile(uintptr(fd), "program")
	defer program.Close()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "setup"), os.NewFile(uintptr(pair[1]), "setup")
	defer ours.Close()
	defer theirs.Close()

	ctx, cancel := context.WithCancel(ctx)
	p := &Process{cancel: cancel, done: make(chan struct{})}
	if c.MemoryBytes > 0 {
		if p.group, err = newGroup(c.MemoryBytes); err != nil {
			cancel()
			return nil, err
		}
	}
	said := &tail{}
	cmd := exec.CommandContext(ctx, path, c.Args...)
	cmd.Env = append([]string{fmt.Sprintf("%s=%s%d", variable, stageSetup, 3+len(c.Files))}, "GOMAXPROCS=1")
	cmd.Stdout, cmd.Stderr = said, said
	cmd.WaitDelay = time.Second
	cmd.ExtraFiles = append(append([]*os.File{}, c.Files...), theirs, program)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL,
		Setsid:     true,
	}
	started := make(chan error, 1)
	go func() {
		// The kernel counts the thread, not the process, as the parent whose
		// death Pdeathsig tells: keep it until the child is gone.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.finish(cmd.Wait(), said)
		}
	}()
	if err := <-started; err != nil {
		cancel()
		if p.group != nil {
			err = errors.Join(err, p.group.remove())
		}
		return nil, err
	}
	theirs.Close()
	p.pid = cmd.Process.Pid
	if err := p.tell(ours, told); err != nil {
		p.Kill()
		var died *Died
		if werr := p.Wait(); errors.As(werr, &died) && died.Said != "" {
			err = fmt.Errorf("%w (%w)", err, werr)
		}
		return nil, err
	}
	return p, nil
}

// tell puts the first instance into its cgroup, hands it its orders and waits
// until it has carried them out.
func (p *Process) tell(conn *os.File, orders []byte) error {
	if p.group != nil {
		if err := p.group.add(p.pid); err != nil {
			return err
		}
	}
	stop := time.AfterFunc(setupTime, p.Kill)
	defer stop.Stop()
	if _, err := conn.Write(orders); err != nil {
		return fmt.Errorf("hand over the configuration: %w", err)
	}
	if err := unix.Shutdown(int(conn.Fd()), unix.SHUT_WR); err != nil {
		return fmt.Errorf("hand over the configuration: %w", err)
	}
	answer, err := io.ReadAll(io.LimitReader(conn, tailBytes))
	if err != nil {
		return fmt.Errorf("wait for the walls: %w", err)
	}
	// The execve closes the socket after the last word; so does a death.
	if got, ok := strings.CutPrefix(string(answer), ready); !ok || got != "" {
		return fmt.Errorf("build the walls: %s", printable(got))
	}
	return nil
}

// finish runs once the process is reaped.
func (p *Process) finish(err error, said *tail) {
	defer close(p.done)
	defer p.cancel()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		died := &Died{Status: exit.Error()}
		died.Said, died.Output = said.strings()
		// Where no cgroup counts, Go's runtime says it.
		died.OutOfMemory = strings.Contains(died.Output, "out of memory") || strings.Contains(died.Output, "cannot allocate memory")
		if p.group != nil && p.group.oomKills() > 0 {
			died.OutOfMemory = true
		}
		err = died
	}
	p.err = err
	if p.group != nil {
		p.peak = p.group.peak()
		if rerr := p.group.remove(); p.err == nil {
			p.err = rerr
		}
	}
}

// Wait waits for the end and returns nil for exit status 0, else *Died, or what
// else went wrong. It may be called by many and again.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Done is closed when Wait no longer blocks.
func (p *Process) Done() <-chan struct{} { return p.done }

// Kill ends the process; Wait tells when it is gone.
func (p *Process) Kill() { p.cancel() }

// Pid is the process id as this process sees it.
func (p *Process) Pid() int { return p.pid }

// PeakBytes is the most memory that the process had, page cache included, 0 where
// no cgroup counted it. It is valid after Wait.
func (p *Process) PeakBytes() int64 {
	<-p.done
	return p.peak
}

// Bound says what keeps the process in its memory bound: "cgroup v1",
// "cgroup v2", or "rlimit" where this process may not make cgroups.
func (p *Process) Bound() string {
	if p.group == nil {
		return "rlimit"
	}
	return p.group.kind()
}

// dataLimit is RLIMIT_DATA for a process of so many bytes. It is the second
// line behind the cgroup and coarse: Go maps its heap in pieces of 64 MiB, and
// mapped counts here whether it is used or not.
func dataLimit(memory int64) uint64 {
	if memory <= 0 {
		return unix.RLIM_INFINITY
	}
	return uint64(memory) + 256<<20
}

// dynamic tells whether a program needs the system's libraries to start.
func dynamic(path string) (bool, error) {
	f, err := elf.Open(path)
	if err != nil {
		return false, fmt.Errorf("read the program: %w", err)
	}
	defer f.Close()
	return slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }), nil
}

// tail keeps the first and the last bytes written to it.
type tail struct {
	mu         sync.Mutex
	head, rest []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := min(len(p), tailBytes/2-len(t.head))
	t.head = append(t.head, p[:n]...)
	t.rest = append(t.rest, p[n:]...)
	if extra := len(t.rest) - tailBytes/2; extra > 0 {
		t.rest = append(t.rest[:0], t.rest[extra:]...)
	}
	return len(p), nil
}

// strings returns the line that says most, and everything.
func (t *tail) strings() (line, all string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	all = string(t.head) + string(t.rest)
	for l := range strings.Lines(all) {
		if l = strings.TrimSpace(l); l == "" {
			continue
		}
		line = l
		if strings.HasPrefix(l, "panic: ") || strings.HasPrefix(l, "fatal error: ") || strings.HasPrefix(l, "runtime: ") {
			break
		}
	}
	return printable(line[:min(len(line), 256)]), printable(all)
}

// printable makes one line of text of what a process that is not trusted wrote.
func printable(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }), " / ")
}
