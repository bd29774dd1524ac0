package mover

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/test/images"
)

// tried is what became of an image.
type tried struct {
	Image, Way string
	Reason     string // "": it was read
	Terminal   bool
	Error      string
	Took       time.Duration
	Peak       int64 // bytes of memory that the process had at most
	Written    int64 // bytes, zeros of a target that is known to be zeros not counted
	Began      bool
}

// Every hostile image there is, whichever way it comes, ends with a terminal fault (or is
// read, where it only is strange), within the memory of a mover, and with nothing written
// where the headers tell. A process of its own tries them, so that its memory can be measured.
func TestHostileImages(t *testing.T) {
	const folder = "LONGSHORE_HOSTILE_IMAGES"
	if dir := os.Getenv(folder); dir != "" {
		tryImages(t, dir)
		return
	}
	corpora := map[string]map[string][]byte{
		"qcow2": images.HostileQcow2s(), "strange qcow2": images.StrangeQcow2s(), "vmdk": images.HostileVMDKs(), "vhd": images.HostileVHDs(), "vdi": images.HostileVDIs(),
		"vhdx": {}, "tar": images.HostileTars(), "bomb": images.Bombs(t), "cut": {},
	}
	for name, b := range images.HostileVHDXs() {
		corpora["vhdx"][name] = b()
	}
	content := disk(5, 4*mib)
	whole := filepath.Join(t.TempDir(), "whole")
	if err := os.WriteFile(whole, content, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"qcow2", "vmdk", "vmdk -o subformat=streamOptimized", "vpc", "vhdx", "vdi"} {
		out := filepath.Join(t.TempDir(), "whole")
		if said, err := exec.Command("sh", "-c", "qemu-img convert -f raw -O "+format+` "$0" "$1"`, whole, out).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		b, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		corpora["cut"][format] = b[:len(b)/2]
	}
	for _, command := range []string{"gzip", "xz", "zstd -q", "bzip2"} {
		b, err := exec.Command("sh", "-c", command+` -c <"$0"`, whole).Output()
		if err != nil {
			t.Fatal(err)
		}
		corpora["cut"][command] = b[:len(b)/2]
	}

	dir := t.TempDir()
	for kind, corpus := range corpora {
		for name, b := range corpus {
			sub := filepath.Join(dir, kind)
			if err := os.MkdirAll(sub, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(sub, strings.ReplaceAll(name, "/", "∕")), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHostileImages$")
	child.Env = append(os.Environ(), folder+"="+dir)
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	child.Stderr = os.Stderr
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	var table bytes.Buffer
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "image\tway\ttime\tpeak MiB\twritten\tresult")
	n := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		text, ok := strings.CutPrefix(lines.Text(), "tried ")
		if !ok {
			continue
		}
		var r tried
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			t.Fatal(err)
		}
		n++
		fmt.Fprintf(w, "%s\t%s\t%v\t%.1f\t%d\t%s\n", r.Image, r.Way, r.Took.Round(time.Millisecond), float64(r.Peak)/mib, r.Written, r.Error[:min(len(r.Error), 160)])
		r.check(t)
	}
	if err := child.Wait(); err != nil {
		t.Errorf("the process that tried them: %v", err)
	}
	w.Flush() // to memory
	t.Logf("%d runs\n%s", n, table.Bytes())
	want := 0
	for _, corpus := range corpora {
		want += 2 * len(corpus)
	}
	if n != want {
		t.Errorf("%d runs, want %d", n, want)
	}
}

// check compares what became of an image with what has to.
func (r tried) check(t *testing.T) {
	t.Helper()
	strange := strings.HasPrefix(r.Image, "strange")
	if r.Peak >= 64*mib {
		t.Errorf("%s, %s: %d bytes of memory", r.Image, r.Way, r.Peak)
	}
	switch {
	case r.Reason == "" && !strange:
		t.Errorf("%s, %s: it was read", r.Image, r.Way)
	case r.Reason != "" && !r.Terminal:
		t.Errorf("%s, %s: %s, which is not terminal", r.Image, r.Way, r.Error)
	}
	kind, name, _ := strings.Cut(r.Image, ": ")
	late := strange || strings.HasPrefix(name, "table: ") || kind == "cut"
	// These two tell their length to nobody, the others at their end.
	late = late || kind == "bomb" && (r.Way == "one way" || name == "bzip2" || name == "zstd")
	// A footer that comes last is told when all before it is written.
	late = late || r.Way == "one way" && kind == "vhd" && strings.HasPrefix(r.Error, "copy: ")
	if !late && (r.Began || r.Written > 0) {
		t.Errorf("%s, %s: %d bytes were written: %s", r.Image, r.Way, r.Written, r.Error)
	}
}

// tryImages runs the engine over the images in dir, with the limits of a mover.
func tryImages(t *testing.T, dir string) {
	debug.SetMemoryLimit(heapBytes + image.WindowBytes)
	debug.SetGCPercent(25)
	files, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	for _, path := range files {
		for _, way := range []string{"in ranges", "one way"} {
			debug.FreeOSMemory()
			if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil { // proc(5): forget the peak
				t.Fatal(err)
			}
			r := try(t, path, way)
			if r.Peak, err = peak(); err != nil {
				t.Fatal(err)
			}
			b, err := json.Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Printf("\ntried %s\n", b)
		}
	}
}

// peak is the most memory that this process has had resident, in bytes.
func peak() (int64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	text, _, _ := strings.Cut(rest, "kB")
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	return n << 10, err
}

func try(t *testing.T, path, way string) tried {
	r := tried{Image: filepath.Base(filepath.Dir(path)) + ": " + filepath.Base(path), Way: way}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	l := &loose{File: f, size: info.Size()}
	kinds := source.Kinds{{Name: "loose", Open: func(context.Context, source.Dialer, json.RawMessage) (source.Blob, error) {
		if way == "one way" {
			return looseStream{l}, nil
		}
		return looseRanged{l}, nil
	}}}
	target, began := &counter{}, &book{}
	d := Deps{Kinds: kinds, Target: target, Ledger: began}
	j := Job{Source: source.Spec{Kind: "loose"}, TargetBytes: target.Size(), KnownZero: true}
	start := time.Now()
	_, err = Run(t.Context(), d, j)
	if f := fault.Of(err); f != nil && f.Reason == fault.NeedsSpool {
		spool, serr := os.CreateTemp(t.TempDir(), "spool")
		if serr != nil {
			t.Fatal(serr)
		}
		defer spool.Close()
		if err := spool.Truncate(target.Size()); err != nil {
			t.Fatal(err)
		}
		if d.Spool, serr = NewSpool([]*os.File{spool}, target.Size(), target.Size()); serr != nil {
			t.Fatal(serr)
		}
		began.facts = nil
		_, err = Run(t.Context(), d, j)
	}
	r.Took, r.Written, r.Began = time.Since(start), target.written.Load(), len(began.facts) > 0
	if f := fault.Of(err); f != nil {
		r.Reason, r.Terminal, r.Error = f.Reason, f.Terminal, err.Error()
	}
	return r
}

// loose is a file as a source.
type loose struct {
	*os.File
	size int64
}

func (l *loose) Size() int64                 { return l.size }
func (l *loose) Close() error                { return nil }
func (l *loose) Validator() source.Validator { return source.Validator{ETag: `"1"`, Size: l.size} }

type looseRanged struct{ *loose }

func (l looseRanged) ReadAtContext(_ context.Context, p []byte, off int64) (int, error) {
	return l.ReadAt(p, off)
}

type looseStream struct{ *loose }

func (l looseStream) Stream(context.Context) (io.ReadCloser, error) {
	return io.NopCloser(io.NewSectionReader(l, 0, l.size)), nil
}

// counter is a target of 64 MiB, known to be zeros, that counts what is written and keeps
// nothing.
type counter struct{ written atomic.Int64 }

func (c *counter) Size() int64 { return 64 * mib }
func (c *counter) Align() int  { return 4096 }

func (c *counter) WriteAt(p []byte, _ int64) (int, error) {
	c.written.Add(int64(len(p)))
	return len(p), nil
}

func (c *counter) ReadAt([]byte, int64) (int, error) { return 0, errors.New("nobody reads it") }
func (c *counter) Zero(int64, int64) error           { return nil }
