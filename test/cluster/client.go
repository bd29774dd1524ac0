package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// What follows is what machine/main.go reads and answers.

type machineSpec struct {
	Name   string
	Socket string
	Binds  []bind
	Dev    string
	Loops  []machineLoop
}

type bind struct{ From, To string }

type machineLoop struct{ Number, Minor int }

type program struct {
	Name    string
	Argv    []string
	Env     []string
	Log     string
	Dir     string
	Machine bool
}

type request struct {
	Op      string
	Program program
	Name    string
	Signal  int
}

type answer struct {
	Error    string
	Programs map[string]status
}

type status struct {
	Pid  int
	Exit string
}

func (c *Cluster) sockets() string { return filepath.Join(c.dir, "sock") }

// dial reaches process 1 of the hub or of a node.
func (c *Cluster) dial(ctx context.Context, where string) (*net.UnixConn, error) {
	// A socket's name has room for 108 bytes: go by way of the folder's descriptor.
	dir, err := os.Open(c.sockets())
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s.sock", dir.Fd(), orHub(where)))
	if err != nil {
		return nil, fmt.Errorf("reach process 1 of %s: %w", orHub(where), errors.Unwrap(err))
	}
	return conn.(*net.UnixConn), nil
}

func orHub(where string) string {
	if where == "" {
		return "hub"
	}
	return where
}

func (c *Cluster) ask(ctx context.Context, where string, r request) (answer, error) {
	conn, err := c.dial(ctx, where)
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	if t, ok := ctx.Deadline(); ok {
		conn.SetDeadline(t)
	}
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return answer{}, err
	}
	var a answer
	if err := json.NewDecoder(conn).Decode(&a); err != nil {
		return answer{}, fmt.Errorf("ask %s to %s: %w", orHub(where), r.Op, err)
	}
	if a.Error != "" {
		return a, fmt.Errorf("%s: %s", orHub(where), a.Error)
	}
	return a, nil
}

// initPid is the process number, as we see it, of process 1 of a machine.
func (c *Cluster) initPid(ctx context.Context, where string) (int, error) {
	conn, err := c.dial(ctx, where)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *syscall.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return int(cred.Pid), nil
}

// start starts a component in the hub or on a node; its log is logs/WHERE-NAME.log.
func (c *Cluster) start(ctx context.Context, where, name string, args ...string) error {
	p := program{
		Name: name,
		Argv: append([]string{c.Bin(name)}, args...),
		Env:  c.env(),
		Log:  c.logFile(where, name),
		Dir:  "/",
	}
	_, err := c.ask(ctx, where, request{Op: "start", Program: p})
	return err
}

func (c *Cluster) stop(ctx context.Context, where, name string, sig syscall.Signal) error {
	_, err := c.ask(ctx, where, request{Op: "stop", Name: name, Signal: int(sig)})
	return err
}

// env of the components and of what Command runs: nothing of the caller's, whose
// proxies would catch the cluster's own traffic.
func (c *Cluster) env() []string {
	return []string{
		"PATH=" + filepath.Dir(c.Bin("kubectl")) + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root",
		"LANG=C.UTF-8",
		"KUBECONFIG=" + c.Kubeconfig(),
		"KUBECACHEDIR=" + filepath.Join(c.dir, "kubectl-cache"),
		"HELM_CACHE_HOME=" + filepath.Join(c.dir, "helm"),
		"HELM_CONFIG_HOME=" + filepath.Join(c.dir, "helm"),
		"HELM_DATA_HOME=" + filepath.Join(c.dir, "helm"),
	}
}

func (c *Cluster) logFile(where, name string) string {
	return filepath.Join(c.Logs(), orHub(where)+"-"+name+".log")
}
