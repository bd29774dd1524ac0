// Command machine is process 1 of one machine of the test cluster: of the
// control plane's namespaces, or of a node's. It lays out the machine's own
// mounts, then starts and stops programs when told so over a socket.
//
// It knows nothing of Kubernetes: package cluster says which programs run. When
// it dies the kernel ends everything that it started, in nested machines too.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Spec says what a machine is; package cluster writes it as JSON into the first
// argument.
type Spec struct {
	Name   string
	Socket string // a name in the working directory: a path would be too long for a socket
	Binds  []Bind
	Dev    string // where to lay out a /dev of its own; empty: keep the starter's
	Loops  []Loop
}

// Bind puts From in the place of To.
type Bind struct{ From, To string }

// Loop is a loop device that the machine may see.
type Loop struct{ Number, Minor int }

// Program is something to start.
type Program struct {
	Name    string
	Argv    []string
	Env     []string
	Log     string
	Dir     string
	Machine bool // in new namespaces: a machine inside of this one
}

// Request is one JSON object; the answer to it is one Answer.
type Request struct {
	Op      string // start, stop, list
	Program Program
	Name    string // of the program to stop
	Signal  int
}

// Answer to a Request.
type Answer struct {
	Error    string
	Programs map[string]Status
}

// Status of a program that was started.
type Status struct {
	Pid  int
	Exit string // empty while it runs
}

const (
	lifeline = 3 // a pipe from the starter: one byte says go, its end may say die
	lock     = 4 // held open for as long as the cluster lives
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "machine:", err)
		os.Exit(1)
	}
}

func run() error {
	syscall.CloseOnExec(lifeline)
	syscall.CloseOnExec(lock)
	var spec Spec
	if err := json.Unmarshal([]byte(os.Args[1]), &spec); err != nil {
		return fmt.Errorf("read spec: %w", err)
	}
	starter := os.NewFile(lifeline, "lifeline")
	var word [1]byte
	if _, err := io.ReadFull(starter, word[:]); err != nil {
		return fmt.Errorf("the starter is gone: %w", err)
	}
	if word[0] == 'd' {
		go func() {
			io.Copy(io.Discard, starter)
			os.Exit(0)
		}()
	}
	// Before the mounts: one of them may hide the folder that we are in.
	l, err := net.Listen("unix", spec.Socket+".new")
	if err != nil {
		return err
	}
	if err := layOut(spec); err != nil {
		return err
	}
	m := &machine{programs: map[string]*Status{}, waits: map[int]chan struct{}{}}
	go m.reap()
	if err := os.Rename(spec.Socket+".new", spec.Socket); err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go m.serve(c)
	}
}

func layOut(spec Spec) error {
	if err := syscall.Sethostname([]byte(spec.Name)); err != nil {
		return fmt.Errorf("set hostname: %w", err)
	}
	// Nothing may come back to the starter's mounts; below us they are shared,
	// as kubelet and Bidirectional mounts want it.
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make / private: %w", err)
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_SHARED, ""); err != nil {
		return fmt.Errorf("make / shared: %w", err)
	}
	if err := syscall.Mount("proc", "/proc", "proc", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	for _, b := range spec.Binds {
		if err := syscall.Mount(b.From, b.To, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s on %s: %w", b.From, b.To, err)
		}
	}
	if err := syscall.Mount("tmpfs", "/run", "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "mode=755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	if err := os.Mkdir("/run/lock", 0o755); err != nil {
		return err
	}
	if spec.Dev == "" {
		return nil
	}
	if err := layOutDev(spec.Dev, spec.Loops); err != nil {
		return fmt.Errorf("lay out /dev: %w", err)
	}
	return nil
}

// layOutDev makes a /dev with the usual devices and only the given loops. There
// is no loop-control: it would hand out loops of other machines.
func layOutDev(dev string, loops []Loop) error {
	if err := syscall.Mount("tmpfs", dev, "tmpfs", syscall.MS_NOSUID, "mode=755"); err != nil {
		return err
	}
	for _, name := range []string{"null", "zero", "full", "random", "urandom", "tty", "fuse", "kmsg", "kvm"} {
		var st syscall.Stat_t
		if err := syscall.Stat("/dev/"+name, &st); err != nil {
			continue
		}
		if err := mknod(filepath.Join(dev, name), st.Mode, int(st.Rdev)); err != nil {
			return err
		}
	}
	for _, name := range []string{"pts", "shm", "net", "mapper"} {
		if err := os.Mkdir(filepath.Join(dev, name), 0o755); err != nil {
			return err
		}
	}
	if err := mknod(filepath.Join(dev, "net/tun"), syscall.S_IFCHR|0o666, 10<<8|200); err != nil {
		return err
	}
	for _, l := range loops {
		rdev := 7<<8 | l.Minor&0xff | (l.Minor&^0xff)<<12
		if err := mknod(filepath.Join(dev, fmt.Sprintf("loop%d", l.Number)), syscall.S_IFBLK|0o660, rdev); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"} {
		if err := os.Symlink(target, filepath.Join(dev, name)); err != nil {
			return err
		}
	}
	if err := syscall.Mount("devpts", filepath.Join(dev, "pts"), "devpts", syscall.MS_NOSUID|syscall.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620"); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", filepath.Join(dev, "shm"), "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, ""); err != nil {
		return err
	}
	return syscall.Mount(dev, "/dev", "", syscall.MS_BIND|syscall.MS_REC, "")
}

func mknod(path string, mode uint32, rdev int) error {
	if err := syscall.Mknod(path, mode, rdev); err != nil {
		return fmt.Errorf("mknod %s: %w", path, err)
	}
	return os.Chmod(path, os.FileMode(mode&0o777))
}

type machine struct {
	mu       sync.Mutex
	programs map[string]*Status
	waits    map[int]chan struct{} // closed when the process is gone
}

func (m *machine) serve(c net.Conn) {
	defer c.Close()
	var r Request
	if err := json.NewDecoder(c).Decode(&r); err != nil {
		return // someone only asked whether we live
	}
	var a Answer
	if err := m.do(r); err != nil {
		a.Error = err.Error()
	}
	m.mu.Lock()
	a.Programs = map[string]Status{}
	for name, s := range m.programs {
		a.Programs[name] = *s
	}
	m.mu.Unlock()
	json.NewEncoder(c).Encode(a)
}

func (m *machine) do(r Request) error {
	switch r.Op {
	case "list":
		return nil
	case "start":
		return m.start(r.Program)
	case "stop":
		return m.stop(r.Name, syscall.Signal(r.Signal))
	}
	return fmt.Errorf("no operation %q", r.Op)
}

func (m *machine) start(p Program) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.programs[p.Name]; s != nil && s.Exit == "" {
		return fmt.Errorf("%s already runs as process %d", p.Name, s.Pid)
	}
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	attr := &os.ProcAttr{Dir: p.Dir, Env: p.Env, Files: []*os.File{null, log, log}, Sys: &syscall.SysProcAttr{Setsid: true}}
	var word *os.File
	if p.Machine {
		attr.Sys.Cloneflags = syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS
		// Its starter is this machine, and the two die together anyway.
		theirs, ours, err := os.Pipe()
		if err != nil {
			return err
		}
		defer theirs.Close()
		defer ours.Close()
		attr.Files = append(attr.Files, theirs)
		word = ours
	}
	proc, err := os.StartProcess(p.Argv[0], p.Argv, attr)
	if err != nil {
		return err
	}
	m.programs[p.Name] = &Status{Pid: proc.Pid}
	m.waits[proc.Pid] = make(chan struct{})
	proc.Release()
	if word != nil {
		if _, err := word.Write([]byte("k")); err != nil {
			return err
		}
	}
	return nil
}

// stop returns when the program is gone; one that does not run is no error.
func (m *machine) stop(name string, sig syscall.Signal) error {
	m.mu.Lock()
	s := m.programs[name]
	if s == nil || s.Exit != "" {
		m.mu.Unlock()
		return nil
	}
	gone := m.waits[s.Pid]
	err := syscall.Kill(s.Pid, sig)
	m.mu.Unlock()
	if err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal %s: %w", name, err)
	}
	select {
	case <-gone:
		return nil
	case <-time.After(30 * time.Second):
		return fmt.Errorf("%s lives 30 s after signal %d", name, sig)
	}
}

// reap collects our children and the orphans that the kernel gives to process 1.
func (m *machine) reap() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGCHLD)
	for {
		for {
			var ws syscall.WaitStatus
			pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
			if pid <= 0 || err != nil {
				break
			}
			m.died(pid, ws)
		}
		<-signals
	}
}

func (m *machine) died(pid int, ws syscall.WaitStatus) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, s := range m.programs {
		if s.Pid != pid || s.Exit != "" {
			continue
		}
		s.Exit = fmt.Sprintf("exit status %d", ws.ExitStatus())
		if ws.Signaled() {
			s.Exit = "signal: " + strings.ToLower(ws.Signal().String())
		}
		fmt.Fprintf(os.Stderr, "%s %s: %s\n", time.Now().Format(time.RFC3339), name, s.Exit)
	}
	if c := m.waits[pid]; c != nil {
		close(c)
		delete(m.waits, pid)
	}
}
