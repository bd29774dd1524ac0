package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// imageStore returns a containerd root that has all images unpacked. Nodes start
// from it, which saves each of them the seconds of an import.
func (b Bin) imageStore(ctx context.Context, log io.Writer) (string, error) {
	return cached(ctx, log, filepath.Base(b.dir)+"-images", func(out string) error {
		return b.fillStore(ctx, out)
	})
}

func (b Bin) fillStore(ctx context.Context, root string) error {
	state, err := os.MkdirTemp("/run", "longshore-images-") // a socket's name must be short
	if err != nil {
		return err
	}
	defer os.RemoveAll(state)
	config, socket := filepath.Join(state, "config.toml"), filepath.Join(state, "sock")
	text := strings.NewReplacer("@ROOT@", root, "@STATE@", state, "@SOCKET@", socket).Replace(`version = 3
root = '@ROOT@'
state = '@STATE@/state'
disabled_plugins = ['io.containerd.grpc.v1.cri', 'io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime', 'io.containerd.nri.v1.nri']
[grpc]
  address = '@SOCKET@'
[ttrpc]
  address = '@SOCKET@.ttrpc'
[plugins.'io.containerd.internal.v1.opt']
  path = '@STATE@/opt'
`)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var said strings.Builder
	containerd := exec.CommandContext(ctx, b.Path("containerd"), "--config="+config)
	containerd.Stdout, containerd.Stderr = &said, &said
	containerd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS} // it mounts layers
	containerd.Cancel = func() error { return containerd.Process.Signal(syscall.SIGTERM) }
	containerd.WaitDelay = time.Minute
	if err := containerd.Start(); err != nil {
		return err
	}
	err = func() error {
		images, err := b.Images()
		if err != nil {
			return err
		}
		ctr := []string{b.Path("ctr"), "--address=" + socket, "--namespace=k8s.io"}
		err = poll(ctx, time.Minute, func() error {
			_, err := output(ctx, "", append(ctr, "version")...)
			return err
		})
		for _, tar := range images {
			if err == nil {
				_, err = output(ctx, "", append(ctr, "images", "import", "--snapshotter=overlayfs", tar)...)
			}
		}
		return err
	}()
	cancel()
	containerd.Wait() // it was told to end
	if err != nil {
		return fmt.Errorf("unpack the images: %w\n%s", err, said.String())
	}
	return nil
}

// copyStore gives a node its own copy of an image store. What containerd only
// reads is linked where both folders are of one file system.
func copyStore(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		dst := filepath.Join(to, rel)
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			if err := os.MkdirAll(dst, 0o700); err != nil {
				return err
			}
			return os.Chmod(dst, info.Mode())
		case d.Type() == fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(target, dst)
		case !d.Type().IsRegular():
			return fmt.Errorf("%s is a %s", path, d.Type())
		}
		// Blobs and unpacked layers never change; databases do.
		if strings.Contains(rel, "/blobs/") || strings.Contains(rel, "/fs/") {
			if err := os.Link(path, dst); !errors.Is(err, syscall.EXDEV) {
				return err
			}
		}
		return copyFile(path, dst, info.Mode())
	})
}

func copyFile(from, to string, mode fs.FileMode) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer dst.Close()
	if _, err := io.Copy(dst, src); err != nil {
		return err
	}
	if err := dst.Chmod(mode); err != nil {
		return err
	}
	return dst.Close()
}
