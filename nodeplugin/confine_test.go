package nodeplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/source"
)

// spy is a source that was taken over: it tries what a mover must not be able to,
// and tells what went well. Its params are paths of the host and a process there.
var spy = source.Kind{Name: "spy", Open: func(_ context.Context, _ source.Dialer, params json.RawMessage) (source.Blob, error) {
	var p spyParams
	if err := json.Unmarshal(params, &p); err != nil {
		return nil, err
	}
	var did []string
	try := func(deed string, err error) {
		if err == nil {
			did = append(did, deed)
		}
	}
	for _, path := range p.Paths {
		_, err := os.Stat(path)
		try("see "+path, err)
	}
	if seen, err := os.ReadDir("/"); err != nil || len(seen) != 2 {
		did = append(did, fmt.Sprintf("see %v in its root (%v)", seen, err))
	}
	try("make a file", os.WriteFile("/file", nil, 0o600))
	for _, pid := range []int{p.Process, os.Getppid(), 2, -1} {
		try(fmt.Sprintf("signal process %d", pid), unix.Kill(pid, 0))
	}
	if os.Getpid() != 1 || os.Getppid() != 0 {
		did = append(did, fmt.Sprintf("see that it is process %d of %d", os.Getpid(), os.Getppid()))
	}
	capabilities := [2]unix.CapUserData{{Effective: 1}}
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &capabilities[0]); err == nil && capabilities != [2]unix.CapUserData{} {
		did = append(did, fmt.Sprintf("have the capabilities %+v", capabilities))
	}
	try("become root", unix.Setuid(0))
	try("mount", unix.Mount("tmpfs", "/", "tmpfs", 0, ""))
	try("make namespaces", unix.Unshare(unix.CLONE_NEWUSER|unix.CLONE_NEWNS))
	for _, network := range []string{"tcp", "udp"} {
		conn, err := net.Dial(network, "127.0.0.1:53")
		try("connect by "+network, err)
		if conn != nil {
			conn.Close()
		}
	}
	return nil, fault.Terminal(fault.NotADiskImage, fmt.Errorf("the spy could %q", did))
}}

type spyParams struct {
	Paths   []string
	Process int
}

// hog is a source that wants all memory there is.
var hog = source.Kind{Name: "hog", Open: func(context.Context, source.Dialer, json.RawMessage) (source.Blob, error) {
	var all [][]byte
	for len(all) < 1<<20 {
		piece := make([]byte, mib)
		for i := 0; i < len(piece); i += os.Getpagesize() {
			piece[i] = 1
		}
		all = append(all, piece)
	}
	return nil, fmt.Errorf("the hog has %d MiB", len(all))
}}

// From inside a mover there is nothing to see of the node.
func TestMoverSeesNothing(t *testing.T) {
	job := volume(t, t.TempDir(), 8*mib, "")
	program, err := os.Executable()
	must(t, err)
	params, err := json.Marshal(spyParams{
		Paths: []string{
			job.Target.Name(), job.Journal, filepath.Dir(job.Journal), program,
			"/etc", "/etc/passwd", "/proc", "/proc/self", "/proc/1", "/sys", "/dev", "/dev/null", "/tmp", "/var/lib", "/root", "/run",
		},
		Process: os.Getpid(),
	})
	must(t, err)
	job.Recipe.Source = source.Spec{Kind: spy.Name, Params: params}
	if f := fill(t, newFiller(t), job).fails(fault.NotADiskImage); !strings.HasSuffix(f.Error(), "the spy could []") {
		t.Error(f)
	}
}

// A mover that wants too much memory dies, each time it is tried, and nobody else
// notices.
func TestHogDiesAlone(t *testing.T) {
	const size = 48 * mib
	path := noise(t, 18, size)
	w := serveFile(t, path)
	f := newFiller(t)
	w.holdAt(16 * mib)
	other := fill(t, f, volume(t, t.TempDir(), size, w.url()))
	other.until("copied bytes", copying)
	pid := sole(t, os.Getpid())

	job := volume(t, t.TempDir(), 8*mib, "")
	job.Volume, job.Recipe.Source.Kind = "pvc-2", hog.Name
	fill(t, f, job).fails(fault.MoverMemory)

	if now := sole(t, os.Getpid()); now != pid {
		t.Errorf("the other import's mover was %d and is %d", pid, now)
	}
	w.holdAt(-1)
	other.ok()
	for len(other.reports) > 0 {
		if p := <-other.reports; p.Retries > 0 {
			t.Fatalf("the other import was tried again: %s", p.Message)
		}
	}
	if sent := w.sent.Load(); sent > size+inSockets {
		t.Errorf("%d bytes were sent for an image of %d", sent, int64(size))
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("mover %d is there: %v", pid, err)
	}
}
