package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/httpsrc"
	"github.com/longshore-io/longshore/test/images"
)

// desk lets a mover do as it likes.
type desk struct{}

func (desk) Began(context.Context, mover.Facts) error                   { return nil }
func (desk) Commit(context.Context, []extent.Range, *digest.Tree) error { return nil }
func (desk) Hashed(mover.HashState)                                     {}
func (desk) Moved(int64, int64)                                         {}
func (desk) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, address)
}

// The program decompresses everything in its sandbox, within its memory, built
// with the C libraries and without.
func TestProgram(t *testing.T) {
	raw := images.Raw(t, 3, 24<<20)
	rnd := rand.NewChaCha8([32]byte{3})
	_, _ = rnd.Read(raw.Content[1<<20 : 5<<20])
	for i := 5 << 20; i < 20<<20; i++ {
		raw.Content[i] = "longshore "[i/1000%10] + byte(i/70_000)
	}
	if err := os.WriteFile(raw.Path, raw.Content, 0o600); err != nil {
		t.Fatal(err)
	}
	web := t.TempDir()
	server := httptest.NewServer(http.FileServer(http.Dir(web)))
	defer server.Close()
	var gz bytes.Buffer
	w := gzip.NewWriter(&gz)
	if _, err := w.Write(raw.Content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(web, "disk.gz"), gz.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, command := range map[string][]string{
		"disk.qcow2": {"qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-c"},
		"disk.vmdk":  {"qemu-img", "convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized"},
	} {
		if out, err := exec.Command(command[0], append(command[1:], raw.Path, filepath.Join(web, name))...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", command, err, out)
		}
	}
	for name, options := range map[string][]string{"one.xz": {"-T1"}, "many.xz": {"-T2", "--block-size=4MiB"}} {
		out, err := exec.Command("xz", append(options, "-6", "-c", raw.Path)...).Output()
		if err == nil {
			err = os.WriteFile(filepath.Join(web, name), out, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, cgo := range []string{"1", "0"} {
		program := filepath.Join(t.TempDir(), "longshore-mover")
		build := exec.Command("go", "build", "-tags", "netgo,osusergo", "-ldflags", "-s -w", "-o", program, ".")
		build.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for _, name := range []string{"disk.qcow2", "disk.vmdk", "disk.gz", "one.xz", "many.xz"} {
			t.Run("CGO_ENABLED="+cgo+" "+name, func(t *testing.T) {
				params, err := httpsrc.Params{URL: server.URL + "/" + name}.Reveal()
				if err != nil {
					t.Fatal(err)
				}
				target, err := os.Create(filepath.Join(t.TempDir(), "target"))
				if err == nil {
					err = target.Truncate(int64(len(raw.Content)))
				}
				if err != nil {
					t.Fatal(err)
				}
				defer target.Close()
				job := mover.Job{Source: source.Spec{Kind: "http", Params: params}, TargetBytes: int64(len(raw.Content)), KnownZero: true}
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
				defer cancel()
				if _, err := (mover.Launcher{Program: program}).Move(ctx, target, job, desk{}); err != nil {
					t.Fatal(err)
				}
				got, err := os.ReadFile(target.Name())
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, raw.Content) {
					t.Error("the target has other bytes than the image")
				}
			})
		}
	}
}
