package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"github.com/longshore-io/longshore/test/cluster"
)

// The web server is a process of its own, so that it is still there when the
// demo is over and the cluster is looked around in.

const burst = 64 << 10

func pidFile() string { return filepath.Join(dir, "server.json") }

type server struct {
	Pid int
	URL string
}

// startServer serves the folder of image at the address that pods reach, slowly
// enough for the import to take watchFor.
func startServer(ctx context.Context, image string) (url string, err error) {
	if err := stopServer(); err != nil {
		return "", err
	}
	info, err := os.Stat(image)
	if err != nil {
		return "", err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(cluster.HostIP, "0"))
	if err != nil {
		return "", fmt.Errorf("listen at the host's address in the cluster's network: %w", err)
	}
	defer l.Close()
	socket, err := l.(*net.TCPListener).File()
	if err != nil {
		return "", err
	}
	defer socket.Close()
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	log, err := os.Create(filepath.Join(dir, "server.log"))
	if err != nil {
		return "", err
	}
	defer log.Close()
	perSecond := max(int64(1<<20), info.Size()*int64(time.Second)/int64(watchFor))
	cmd := exec.Command(self, "serve", "-root", filepath.Dir(image), "-rate", fmt.Sprint(perSecond))
	cmd.ExtraFiles = []*os.File{socket}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return "", fmt.Errorf("start the web server: %w", err)
	}
	url = fmt.Sprintf("http://%s/%s", l.Addr(), filepath.Base(image))
	content, err := json.Marshal(server{Pid: cmd.Process.Pid, URL: url})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(pidFile(), content, 0o644); err != nil {
		return "", errors.Join(err, cmd.Process.Kill())
	}
	fmt.Printf("   served at %d KiB/s, so that there is time to watch\n", perSecond>>10)
	return url, cmd.Process.Release()
}

// stopServer ends the web server; none is success. A process that has taken its
// number since is left alone.
func stopServer() error {
	content, err := os.ReadFile(pidFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var s server
	if err := json.Unmarshal(content, &s); err != nil {
		return fmt.Errorf("read %s: %w", pidFile(), err)
	}
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", s.Pid))
	if err == nil && strings.Contains(string(args), "serve\x00-root\x00"+dir) {
		if err := syscall.Kill(s.Pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("end the web server, process %d: %w", s.Pid, err)
		}
	}
	return os.Remove(pidFile())
}

// serve is the web server's process; descriptor 3 is where it listens.
func serve(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("serve", flag.ContinueOnError)
	root := flags.String("root", "", "folder")
	perSecond := flags.Int64("rate", 0, "bytes per second of all answers together")
	if err := flags.Parse(args); err != nil {
		return err
	}
	l, err := net.FileListener(os.NewFile(3, "socket"))
	if err != nil {
		return err
	}
	limit := rate.NewLimiter(rate.Limit(*perSecond), burst)
	files := http.FileServer(http.Dir(*root))
	s := &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Println(r.Method, r.URL.Path, r.Header.Get("Range"))
		files.ServeHTTP(&slow{w, r.Context(), limit}, r)
	})}
	go func() {
		<-ctx.Done()
		s.Close()
	}()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// slow writes no faster than limit allows.
type slow struct {
	http.ResponseWriter
	ctx   context.Context
	limit *rate.Limiter
}

func (s *slow) Write(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		piece := p[n:min(n+burst, len(p))]
		if err := s.limit.WaitN(s.ctx, len(piece)); err != nil {
			return n, err
		}
		m, err := s.ResponseWriter.Write(piece)
		n += m
		if err != nil {
			return n, err
		}
	}
	return n, nil
}
