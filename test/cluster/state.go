package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// state is what Down must know. It is written before the thing that it speaks
// of is done, so that half an Up can be undone as well.
type state struct {
	Boot       string // the boot of the machine that this happened in
	Bin        Bin    `json:"-"`
	BinDir     string
	MachineDir string
	Nodes      int
	NodeDirs   []string // that each node has to itself
	MadeDirs   []string // of them, what was not there before
	LoopBase   int      // first loop of node1
	Forward    string   // net.ipv4.ip_forward of before; empty: not touched
	Firewall   string   // iptables or nft; empty: not touched
	Hub        process
	Ready      bool
}

// process names a process for good: numbers are used again.
type process struct {
	Pid   int
	Start string // in clock ticks after boot, as /proc/PID/stat has it
}

func processOf(pid int) (process, error) {
	start, err := startOf(pid)
	return process{pid, start}, err
}

func (p process) alive() bool {
	if p.Pid == 0 {
		return false
	}
	start, err := startOf(p.Pid)
	return err == nil && start == p.Start
}

func startOf(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The name, the second field, may hold blanks and parentheses.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 20 {
		return "", fmt.Errorf("%d fields in /proc/%d/stat", len(fields), pid)
	}
	// A dead first thread means little while others of the process live on: in
	// process 1 of a namespace one of them waits for all that dies with it.
	if threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)); fields[0] == "Z" && (err != nil || len(threads) < 2) {
		return "", fmt.Errorf("process %d is dead", pid)
	}
	return fields[19], nil
}

func stateFile(dir string) string { return filepath.Join(dir, "state.json") }

func readState(dir string) (state, error) { return readStateFile(stateFile(dir)) }

func readStateFile(file string) (state, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return state{}, err
	}
	var s state
	if err := json.Unmarshal(content, &s); err != nil {
		return state{}, fmt.Errorf("read %s: %w", file, err)
	}
	s.Bin = Bin{dir: s.BinDir, machine: s.MachineDir}
	boot, err := bootID()
	if err != nil {
		return state{}, err
	}
	if s.Boot != boot {
		// What was only in the kernel is gone with it.
		s.Hub, s.Forward, s.Firewall, s.LoopBase, s.Ready = process{}, "", "", 0, false
	}
	return s, nil
}

// lastStateOf is readState, also of the cluster whose folder was removed under it.
func lastStateOf(dir string) (state, error) {
	s, err := readState(dir)
	if !errors.Is(err, fs.ErrNotExist) {
		return s, err
	}
	f, err := os.Open(runLock)
	if err != nil {
		return state{}, err
	}
	defer f.Close()
	if holderOf(f) != dir {
		return state{}, fs.ErrNotExist
	}
	return readStateFile(lastState)
}

func (s state) write(dir string) error {
	s.BinDir, s.MachineDir = s.Bin.dir, s.Bin.machine
	content, err := json.MarshalIndent(s, "", "\t")
	if err != nil {
		return err
	}
	if err := writeWhole(stateFile(dir), content, 0o600); err != nil || s.LoopBase == 0 {
		return err
	}
	// Should the folder be removed under the cluster.
	return writeWhole(lastState, content, 0o600)
}

func writeWhole(path string, content []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(content); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

func bootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id)), err
}

// The addresses, links and loops of a cluster are fixed, so that there is one
// for each machine. Its process 1 holds runLock and writes its folder into it; who
// takes one down or cleans up after one holds downLock.
const (
	runLock   = "/run/lock/longshore-cluster.lock"
	downLock  = "/run/lock/longshore-cluster.down.lock"
	lastState = "/run/lock/longshore-cluster.state" // of whoever had runLock last
)

// lockFile waits for a lock until ctx is done; waiting is told once of whoever
// holds it.
func lockFile(ctx context.Context, path string, waiting func(holder string)) (unlock func(), err error) {
	f, err := openLock(ctx, path, waiting)
	if err != nil {
		return nil, err
	}
	return func() { f.Close() }, nil
}

func openLock(ctx context.Context, path string, waiting func(holder string)) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	told := false
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if !told && waiting != nil {
			told = true
			waiting(holderOf(f))
		}
		select {
		case <-ctx.Done():
			defer f.Close()
			return nil, &HeldError{Lock: path, Holder: holderOf(f), cause: context.Cause(ctx)}
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func holderOf(f *os.File) string {
	content, err := io.ReadAll(io.NewSectionReader(f, 0, 4096))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(content))
}

func setHolder(f *os.File, dir string) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt([]byte(dir+"\n"), 0)
	return err
}

// HeldError says that another cluster runs on this machine.
type HeldError struct {
	Lock   string
	Holder string // its folder
	cause  error
}

func (e *HeldError) Error() string {
	if e.Holder == "" {
		return fmt.Sprintf("lock %s is held: %v", e.Lock, e.cause)
	}
	return fmt.Sprintf("a cluster runs in %s (lock %s): %v", e.Holder, e.Lock, e.cause)
}

func (e *HeldError) Unwrap() error { return e.cause }

func readInt(path string) (int, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(content)))
}
