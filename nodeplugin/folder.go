package nodeplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/pool"
	"github.com/longshore-io/longshore/nodeplugin/sandbox"
)

// fillFolder unpacks an archive into the filesystem of a volume, which nobody can see
// until it is populated. Of what is given up for good nothing stays.
func (s *Stager) fillFolder(ctx context.Context, p *pool.Pool, v pool.Volume, file *os.File, work Job, report func(Progress)) (Result, error) {
	result, err := s.unpackInto(ctx, p, v, file, work, report)
	if f := fault.Of(err); f == nil || !f.Terminal || ctx.Err() != nil {
		return result, err
	}
	return result, errors.Join(err, s.discardFolder(p, v, file, work.Journal))
}

func (s *Stager) unpackInto(ctx context.Context, p *pool.Pool, v pool.Volume, file *os.File, work Job, report func(Progress)) (result Result, err error) {
	l, err := soleLoop(ctx, file)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, detach(ctx, l)) }()
	var open []*os.File // of the filesystem, which is there as long as they are
	let := func() {
		for _, f := range open {
			f.Close()
		}
		open = nil
	}
	defer let()
	use := func(mount *os.File, err error) (*os.File, error) {
		if err != nil {
			return nil, err
		}
		open = append(open, mount)
		root, err := rootToFill(mount)
		if err == nil {
			open = append(open, root)
		}
		return root, err
	}
	work.Anew = func() (*os.File, error) {
		let()
		return use(s.mountAnew(ctx, p, v.ID, l))
	}
	if work.Target, err = use(s.mountToFill(ctx, p, v, l, work.Journal)); err != nil {
		return result, err
	}
	return s.cfg.Fill.Fill(ctx, work, report)
}

// rootToFill opens the root of a new filesystem and gives it, and the folder that mkfs
// makes in an ext4, to the movers' user, who fills it and owns what is there in the end.
func rootToFill(mount *os.File) (*os.File, error) {
	root, err := os.Open(within(mount))
	if err != nil {
		return nil, err
	}
	give := func(name string) error {
		fd, err := unix.Openat2(int(root.Fd()), name, &unix.OpenHow{
			Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Fchown(fd, sandbox.NobodyID, sandbox.NobodyID)
	}
	err = give(".")
	if err == nil {
		if err = give("lost+found"); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			err = nil // an XFS has none, and what else is there came from the archive
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("give the volume's root to user %d: %w", sandbox.NobodyID, err), root.Close())
	}
	return root, nil
}

// discardFolder takes away what came of an archive that is not wanted.
func (s *Stager) discardFolder(p *pool.Pool, v pool.Volume, file *os.File, journalPath string) error {
	// In this order: whoever finds a part of it done makes the filesystem anew.
	err := setFacts(p, v.ID, func(f *facts) { f.Filesystem = fsMaking })
	if err == nil {
		err = journal.Remove(journalPath)
	}
	if err != nil {
		return err
	}
	d, err := device.NewFile(file, v.Bytes)
	if err != nil {
		return err
	}
	d.KeepAllocated = v.Preallocate
	return errors.Join(d.Zero(0, v.Bytes), d.Sync())
}
