package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// Down ends the cluster and takes away all that it made on the machine; with wipe
// also its folder. Called again, or for half a cluster, it does what is left.
func (c *Cluster) Down(wipe bool) error {
	// Not the caller's context: it may be done because the caller gives up.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	unlock, err := lockFile(ctx, downLock, nil)
	if err != nil {
		return err
	}
	defer unlock()
	if c.alive != nil {
		c.alive.Close()
		c.alive = nil
	}
	s, err := lastStateOf(c.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := s.cleanUp(c.dir); err != nil {
		return fmt.Errorf("take down the cluster in %s: %w", c.dir, err)
	}
	if !wipe || !exists(c.dir) {
		return nil
	}
	if err := c.emptyDir(); err != nil {
		return err
	}
	return os.RemoveAll(c.dir)
}

// Down ends the cluster of a folder, whatever is left of it; see Cluster.Down.
func Down(dir string, wipe bool) error {
	c, err := newCluster(Options{Dir: dir})
	if err != nil {
		return err
	}
	return c.Down(wipe)
}

// cleanUp takes away what a state speaks of, and writes that it is gone.
func (s *state) cleanUp(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if s.Hub.alive() {
		// Process 1: the kernel ends all others of its namespace, and of those below.
		if err := syscall.Kill(s.Hub.Pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill the hub: %w", err)
		}
		err := poll(ctx, time.Minute, func() error {
			if s.Hub.alive() {
				return fmt.Errorf("the hub, process %d, lives on", s.Hub.Pid)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	var errs []error
	for _, d := range s.MadeDirs {
		// Someone else may have found a use for it.
		if err := os.Remove(d); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTEMPTY) {
			errs = append(errs, err)
		}
	}
	if s.LoopBase > 0 { // else what there is belongs to a cluster after this one
		errs = append(errs, s.closeHost(ctx), loopRange{s.LoopBase, s.Nodes * loopsPerNode}.free(ctx, dir), removeCgroup(ctx, ""))
		if err := errors.Join(errs...); err != nil {
			return err
		}
		if err := os.Remove(lastState); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := errors.Join(errs...); err != nil || !exists(dir) {
		return err
	}
	*s = state{Boot: s.Boot, Bin: s.Bin, Nodes: s.Nodes}
	return s.write(dir)
}
