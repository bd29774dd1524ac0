package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// cgroupName is our folder at the top of each hierarchy; a node's is below.
const cgroupName = "longshore-cluster"

const cgroupRoot = "/sys/fs/cgroup"

// unified tells whether this machine has cgroup v2 alone.
func unified() bool { return exists(cgroupRoot + "/cgroup.controllers") }

// hierarchies are the folders that hold a cgroup tree.
func hierarchies() ([]string, error) {
	if unified() {
		return []string{cgroupRoot}, nil
	}
	entries, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, e := range entries {
		// Others are links, such as cpu to cpu,cpuacct.
		if e.IsDir() && exists(filepath.Join(cgroupRoot, e.Name(), "cgroup.procs")) {
			all = append(all, filepath.Join(cgroupRoot, e.Name()))
		}
	}
	return all, nil
}

// makeCgroup makes the cgroup that kubelet puts a node's pods below.
func makeCgroup(node string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return fmt.Errorf("no cgroup hierarchy in %s", cgroupRoot)
	}
	for _, h := range all {
		parent := h
		for _, name := range []string{cgroupName, node} {
			if unified() {
				delegate(parent)
			}
			dir := filepath.Join(parent, name)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			// In v1 a new cpuset is empty and takes no process.
			for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
				if unified() || !exists(filepath.Join(parent, f)) {
					continue
				}
				content, err := os.ReadFile(filepath.Join(parent, f))
				if err != nil {
					return err
				}
				if err := os.WriteFile(filepath.Join(dir, f), content, 0o644); err != nil {
					return err
				}
			}
			parent = dir
		}
	}
	return nil
}

// delegate gives the children of a v2 cgroup its controllers; kubelet says which
// of them it misses.
func delegate(dir string) {
	controllers, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return
	}
	for _, c := range strings.Fields(string(controllers)) {
		os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0o644)
	}
}

// removeCgroup removes a node's cgroups, or with "" all of ours. Their processes
// must be dead or dying.
func removeCgroup(ctx context.Context, node string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		top := filepath.Join(h, cgroupName, node)
		err := poll(ctx, time.Minute, func() error { return removeTree(top) })
		if err != nil {
			return fmt.Errorf("remove cgroup %s: %w", top, err)
		}
	}
	return nil
}

func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := syscall.Rmdir(dir); err != nil && !errors.Is(err, syscall.ENOENT) {
		return err
	}
	return nil
}
