// Package pool keeps volumes and snapshots as files on a filesystem with
// reflinks: a copy shares the blocks of its source and takes next to no time.
//
// It knows nothing of Kubernetes, of transfers or of how a volume is used: it
// makes, copies, grows and removes raw files, writes down what its caller tells
// it of each, and never promises more bytes than there are.
//
// Every change is prepared under a temporary name and then renamed, so that
// after a crash at any moment Open finds each volume either as before the change
// or as after it.
package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/device"
)

var (
	// ErrNoPool: the pool was not made yet, or its disk is not there.
	ErrNoPool = errors.New("there is no pool")
	// ErrUnavailable: the pool exists but can't be used; see Pool.Problem.
	ErrUnavailable = errors.New("pool is unavailable")
	// ErrNotFound: no volume or snapshot has this id.
	ErrNotFound = errors.New("no such volume")
	// ErrExists: the id is taken by something else.
	ErrExists = errors.New("exists with other properties")
	// ErrFull: the pool has no room; always wrapped by a *FullError.
	ErrFull = errors.New("pool is full")
	// ErrNotPopulated: the volume is not filled yet, and so can't be copied.
	ErrNotPopulated = errors.New("volume is not populated")
	// ErrBusy: another call is changing this volume, or another process uses the pool.
	ErrBusy = errors.New("busy")
	// ErrInUse: a loop device shows the volume.
	ErrInUse = errors.New("volume is in use")
	// ErrInvalid: the request can't be carried out in any pool.
	ErrInvalid = errors.New("invalid request")
)

// FullError says how much was asked of a pool that has less. It is ErrFull.
type FullError struct {
	Pool string
	// Need and Free are bytes; Free is what a new volume may have at most.
	Need, Free int64
}

func (e *FullError) Error() string {
	return fmt.Sprintf("pool %s: %d bytes needed, %d free: delete volumes or snapshots, or make the pool larger", e.Pool, e.Need, e.Free)
}

// Is makes the error an ErrFull.
func (e *FullError) Is(target error) bool { return target == ErrFull }

// MinBytes is the least that an embedded pool can have: XFS demands 300 MiB.
const MinBytes = 300 << 20

// Config says where a pool is.
type Config struct {
	Name string
	// Dir is an absolute path. When its filesystem has reflinks the pool uses it
	// directly; otherwise it holds the pool as one file.
	Dir string
	// Bytes is the size of that file; at least MinBytes.
	Bytes int64
}

// Pool is one pool. Its methods may be called at once from several goroutines.
type Pool struct {
	cfg  Config
	lock *os.File // Dir, flocked; nil while there is no Dir
	// step is called between the steps of a change; tests end the process there.
	step func(name string)

	mu      sync.Mutex
	root    string // the folder with the reflinks; "" while there is no pool
	image   string // pool.img; "" when Dir is used directly
	uuid    string
	usable  int64 // record.UsableBytes
	problem string
	repairs []string
	volumes map[string]Volume
	lost    map[string]int64 // bytes of volumes whose record can't be read
	busy    map[string]bool  // ids under change
	pending int64            // bytes reserved by changes under way
}

// Names in Dir and in the pool's root.
const (
	imageName     = "pool.img"
	newImageName  = "pool.img.new"
	mountName     = "mnt"
	recordName    = "pool.json"
	volumesName   = "volumes"
	snapshotsName = "snapshots"
	tmpName       = "tmp"
	trashName     = "trash"
	dataName      = "data.raw"
	metaName      = "meta.json"
	journalName   = "journal"
	newSuffix     = ".new"
)

// detachPatience is how long the kernel may take to let go of a loop device.
const detachPatience = 30 * time.Second

// record is pool.json.
type record struct {
	Version int       `json:"version"`
	UUID    string    `json:"uuid"`
	MadeAt  time.Time `json:"madeAt"`
	// UsableBytes is what was free in a pool file when it was new: XFS counts its
	// own tables among its blocks. 0 when Dir is used directly.
	UsableBytes int64 `json:"usableBytes,omitempty"`
}

// Open looks for the pool in c.Dir, mounts it if need be, and finishes or
// removes what a crash left behind. It makes no pool: when there is none, the
// pool has no UUID. A pool that is there but can't be used has a Problem. An
// error means that the configuration can't be right or that another process has
// the pool (ErrBusy).
func Open(ctx context.Context, c Config) (*Pool, error) {
	if !filepath.IsAbs(c.Dir) {
		return nil, fmt.Errorf("pool %s: folder %q must be an absolute path", c.Name, c.Dir)
	}
	p := &Pool{cfg: c, step: func(string) {}, busy: map[string]bool{}}
	if err := p.acquire(); err != nil {
		return nil, err
	}
	if err := p.look(ctx); err != nil {
		p.problem = err.Error()
	}
	return p, nil
}

// Look looks again for a pool that was not there, or had a problem; its disk may
// have come since. The error is the pool's problem.
func (p *Pool) Look(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.again(ctx)
}

func (p *Pool) again(ctx context.Context) error {
	if p.uuid != "" {
		return nil
	}
	p.forget() // Dir may be another folder now, if a disk was mounted there
	if err := p.acquire(); err != nil {
		return err
	}
	p.problem = ""
	if err := p.look(ctx); err != nil {
		p.problem = err.Error()
		return fmt.Errorf("pool %s: %w: %w", p.cfg.Name, err, ErrUnavailable)
	}
	return nil
}

// acquire keeps other processes away from Dir, if there is one.
func (p *Pool) acquire() error {
	if p.lock != nil {
		return nil
	}
	dir, err := os.Open(p.cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("pool %s: %w", p.cfg.Name, err)
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		dir.Close()
		return fmt.Errorf("pool %s: another process uses %s: %w: %w", p.cfg.Name, p.cfg.Dir, err, ErrBusy)
	}
	p.lock = dir
	return nil
}

// look finds the pool. An error becomes the pool's problem.
func (p *Pool) look(ctx context.Context) error {
	in := func(name string) string { return filepath.Join(p.cfg.Dir, name) }
	if err := p.removeUnfinished(ctx, in(newImageName)); err != nil {
		return err
	}
	direct, err := exists(in(recordName))
	if err != nil {
		return err
	}
	embedded, err := exists(in(imageName))
	if err != nil {
		return err
	}
	switch {
	case direct:
		return p.load(p.cfg.Dir, "")
	case embedded:
		if err := p.mount(ctx, in(imageName)); err != nil {
			return err
		}
		return p.load(in(mountName), in(imageName))
	}
	return nil
}

// removeUnfinished removes a pool file whose making a crash cut short: it gets
// its final name last.
func (p *Pool) removeUnfinished(ctx context.Context, image string) error {
	if ok, err := exists(image); err != nil || !ok {
		return err
	}
	if err := p.unmount(ctx, image); err != nil {
		return fmt.Errorf("remove the unfinished %s: %w", image, err)
	}
	if err := os.Remove(image); err != nil {
		return fmt.Errorf("remove the unfinished %s: %w", image, err)
	}
	p.repaired("removed %s: the making of the pool was cut short", image)
	return nil
}

// mount has the pool file mounted, through the loop device that already shows
// it if there is one: the mount may be left from a process before, or the loop
// from a mount namespace that is gone.
func (p *Pool) mount(ctx context.Context, image string) error {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	mnt := filepath.Join(p.cfg.Dir, mountName)
	mounted, err := device.IsMounted(mnt)
	if err != nil {
		return err
	}
	loops, err := device.FindLoopsOf(f)
	if err != nil {
		return err
	}
	var good []*device.Loop
	defer func() {
		for _, l := range good {
			l.Close()
		}
	}()
	for _, l := range loops {
		if err := l.Verify(f, loopOptions); err != nil {
			p.repaired("left %s alone: %v", l.Path(), err)
			l.Close()
			continue
		}
		good = append(good, l)
	}
	if mounted {
		on, err := device.MountedDevice(mnt)
		if err != nil {
			return err
		}
		for _, l := range good {
			if dev, err := l.Device(); err == nil && dev == on {
				return nil
			}
		}
		return fmt.Errorf("%s is mounted, but not from %s: unmount it", mnt, image)
	}
	if len(good) == 0 {
		l, err := device.AttachLoop(f, loopOptions)
		if err != nil {
			return err
		}
		good = append(good, l)
	}
	var failed error
	for _, l := range good {
		err := device.Mount(l.Path(), mnt, device.XFS, mountOptions)
		if err == nil {
			if len(loops) > 0 {
				p.repaired("mounted %s again from %s", mnt, l.Path())
			}
			return nil
		}
		failed = errors.Join(failed, err)
	}
	if len(loops) == 0 {
		// Ours alone: nobody else is served by leaving it.
		dctx, cancel := context.WithTimeout(ctx, detachPatience)
		defer cancel()
		failed = errors.Join(failed, good[0].Detach(dctx))
	}
	return failed
}

var loopOptions = device.LoopOptions{DirectIO: true}

// Discard gives deleted volumes' blocks back to the filesystem below. Only: two
// loops on one pool file must never both be mounted, and XFS knows its twin.
var mountOptions = device.MountOptions{Options: []string{"noexec", "noatime", "discard"}, Only: true}

// unmount takes away the mount and all loop devices of the pool file.
func (p *Pool) unmount(ctx context.Context, image string) error {
	f, err := os.Open(image)
	if err != nil {
		return err
	}
	defer f.Close()
	loops, err := device.FindLoopsOf(f)
	if err != nil {
		return err
	}
	mnt := filepath.Join(p.cfg.Dir, mountName)
	for _, l := range loops {
		// Only what is ours: something else may be mounted there.
		dev, err := l.Device()
		if err != nil {
			return err
		}
		if on, err := device.MountedDevice(mnt); err == nil && on == dev {
			if err := device.Unmount(mnt); err != nil {
				return err
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, detachPatience)
	defer cancel()
	for _, l := range loops {
		err = errors.Join(err, l.Detach(ctx))
	}
	return err
}

// Make makes the pool where there is none; once it is made, Make does nothing.
// A caller that has ever known a pool here must not call it: its disk may only
// be absent.
func (p *Pool) Make(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.problem != "":
		return fmt.Errorf("pool %s: %s: %w", p.cfg.Name, p.problem, ErrUnavailable)
	case p.uuid != "":
		return nil
	}
	if err := os.MkdirAll(p.cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("make pool %s: %w", p.cfg.Name, err)
	}
	// The disk may have been mounted since Open.
	if err := p.again(ctx); err != nil {
		return err
	}
	if p.uuid != "" {
		return nil
	}
	reflinks, err := hasReflinks(p.cfg.Dir)
	if err != nil {
		return fmt.Errorf("make pool %s: %w", p.cfg.Name, err)
	}
	root, image := p.cfg.Dir, ""
	if reflinks {
		err = p.makeRoot(root, 0)
	} else {
		root, image = filepath.Join(p.cfg.Dir, mountName), filepath.Join(p.cfg.Dir, imageName)
		err = p.makeEmbedded(ctx)
	}
	if err == nil {
		err = p.load(root, image)
	}
	if err != nil {
		return fmt.Errorf("make pool %s: %w", p.cfg.Name, err)
	}
	return nil
}

// makeEmbedded makes the pool file. It has its final name only when all in it is
// complete, and is removed when anything fails.
func (p *Pool) makeEmbedded(ctx context.Context) (err error) {
	image := filepath.Join(p.cfg.Dir, newImageName)
	if p.cfg.Bytes < MinBytes {
		return fmt.Errorf("%s has no reflinks and a pool file of %d bytes is too small: give it %d bytes at least", p.cfg.Dir, p.cfg.Bytes, MinBytes)
	}
	below, err := freeBytes(p.cfg.Dir)
	if err != nil {
		return err
	}
	if p.cfg.Bytes > below {
		return fmt.Errorf("a pool file of %d bytes does not fit in %s, which has %d bytes free: %w", p.cfg.Bytes, p.cfg.Dir, below,
			&FullError{Pool: p.cfg.Name, Need: p.cfg.Bytes, Free: below})
	}
	f, err := os.OpenFile(image, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	defer func() {
		if err != nil {
			undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), detachPatience)
			defer cancel()
			err = errors.Join(err, p.unmount(undo, image), os.Remove(image))
		}
	}()
	p.step("make: file")
	if err := fallocate(f, 0, p.cfg.Bytes/sizeUnit*sizeUnit); err != nil {
		return fmt.Errorf("reserve %d bytes for the pool file: %w", p.cfg.Bytes, err)
	}
	p.step("make: reserved")
	l, err := device.AttachLoop(f, loopOptions)
	if err != nil {
		return err
	}
	defer l.Close()
	p.step("make: attached")
	if err := device.Mkfs(ctx, l.Path(), device.XFS, device.MkfsOptions{Zeroed: true}); err != nil {
		return err
	}
	p.step("make: formatted")
	mnt := filepath.Join(p.cfg.Dir, mountName)
	if mounted, err := device.IsMounted(mnt); err != nil || mounted {
		return errors.Join(err, fmt.Errorf("%s is mounted already: unmount it", mnt))
	}
	if err := device.Mount(l.Path(), mnt, device.XFS, mountOptions); err != nil {
		return err
	}
	p.step("make: mounted")
	usable, err := freeBytes(mnt)
	if err != nil {
		return err
	}
	if err := p.makeRoot(mnt, usable); err != nil {
		return err
	}
	p.step("make: filled")
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(image, filepath.Join(p.cfg.Dir, imageName)); err != nil {
		return err
	}
	p.step("make: renamed")
	return syncDir(p.cfg.Dir)
}

// makeRoot makes the folders and, last, the record that says they are a pool.
func (p *Pool) makeRoot(root string, usable int64) error {
	if ok, err := hasReflinks(root); err != nil || !ok {
		return errors.Join(err, fmt.Errorf("%s has no reflinks", root))
	}
	for _, name := range []string{volumesName, snapshotsName, tmpName, trashName} {
		if err := os.Mkdir(filepath.Join(root, name), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	p.step("make: folders")
	return p.writeJSON(filepath.Join(root, recordName), record{Version: 1, UUID: uuid.NewString(), MadeAt: time.Now().UTC(), UsableBytes: usable})
}

// load reads the pool at root and repairs it.
func (p *Pool) load(root, image string) error {
	var r record
	if err := readJSON(filepath.Join(root, recordName), &r); err != nil {
		return err
	}
	if r.Version != 1 || r.UUID == "" {
		return fmt.Errorf("%s: version %d, UUID %q: not a pool of this version", filepath.Join(root, recordName), r.Version, r.UUID)
	}
	s := &scan{root: root, volumes: map[string]Volume{}, lost: map[string]int64{}, repaired: p.repaired}
	if err := s.run(); err != nil {
		return err
	}
	p.root, p.image, p.uuid, p.usable, p.volumes, p.lost = root, image, r.UUID, r.UsableBytes, s.volumes, s.lost
	return nil
}

func (p *Pool) repaired(format string, args ...any) {
	p.repairs = append(p.repairs, fmt.Sprintf(format, args...))
}

// Repairs tells, a sentence each, what Open and Look found out of order and what it did.
func (p *Pool) Repairs() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.repairs)
}

// Name is the pool's name in the configuration.
func (p *Pool) Name() string { return p.cfg.Name }

// UUID tells pools apart, whatever their name; "" means that there is none yet.
func (p *Pool) UUID() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.uuid
}

// Problem tells why the pool can't be used; "" when it can, or was never made.
func (p *Pool) Problem() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.problem
}

// Close unmounts the pool and detaches its loop device, which a plugin that only
// restarts must not do; afterwards there is no pool until Open.
func (p *Pool) Close(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.image != "" {
		if err := p.unmount(ctx, p.image); err != nil {
			return fmt.Errorf("close pool %s: %w", p.cfg.Name, err)
		}
	}
	p.forget()
	return nil
}

// forget lets go of the pool and leaves everything in place, as the end of the
// process does.
func (p *Pool) forget() {
	p.root, p.image, p.uuid, p.usable, p.volumes, p.lost = "", "", "", 0, nil, nil
	if p.lock != nil {
		p.lock.Close()
		p.lock = nil
	}
}

// Stats are a pool's figures in bytes.
type Stats struct {
	TotalBytes int64
	// ProvisionedBytes is what volumes may grow to and snapshots hold, in sum.
	ProvisionedBytes int64
	// AvailableBytes is what one new volume may have at most, after the reserve.
	AvailableBytes int64
	// BackingFree is what is free on the filesystem below.
	BackingFree int64
}

// Stats tells the pool's figures; those of a pool that is not made yet are what
// it would have.
func (p *Pool) Stats() (Stats, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.problem != "" {
		return Stats{}, fmt.Errorf("pool %s: %s: %w", p.cfg.Name, p.problem, ErrUnavailable)
	}
	return p.stats()
}

// reservePercent of a pool is for the filesystem's own records, and for the
// blocks that a change of shared ones takes before the old are free.
const reservePercent = 5

// stats is called with mu held.
func (p *Pool) stats() (Stats, error) {
	if p.uuid == "" {
		return p.expected()
	}
	var st unix.Statfs_t
	if err := unix.Statfs(p.root, &st); err != nil {
		return Stats{}, fmt.Errorf("pool %s: free space of %s: %w", p.cfg.Name, p.root, err)
	}
	s := Stats{TotalBytes: int64(st.Blocks) * st.Bsize, BackingFree: int64(st.Bavail) * st.Bsize}
	if p.usable != 0 {
		s.TotalBytes = p.usable
	}
	unwritten := int64(0)
	for _, v := range p.volumes {
		if v.Snapshot {
			s.ProvisionedBytes += v.AllocatedBytes
			continue
		}
		s.ProvisionedBytes += charge(v.Bytes)
		if p.image == "" {
			unwritten += max(0, v.Bytes-allocated(v.Path))
		}
	}
	for _, bytes := range p.lost {
		s.ProvisionedBytes += bytes
	}
	s.ProvisionedBytes += p.pending
	reserve := s.TotalBytes / 100 * reservePercent
	s.AvailableBytes = s.TotalBytes - reserve - s.ProvisionedBytes
	if p.image == "" {
		// Others write to this filesystem too.
		s.AvailableBytes = min(s.AvailableBytes, s.BackingFree-unwritten-p.pending-reserve)
	} else {
		free, err := freeBytes(p.cfg.Dir)
		if err != nil {
			return Stats{}, err
		}
		s.BackingFree = free
		// Discarded blocks of the pool file went back to the filesystem below,
		// and others may have taken them.
		if size, err := os.Stat(p.image); err == nil {
			s.AvailableBytes -= max(0, size.Size()-allocated(p.image)-free)
		}
	}
	s.AvailableBytes = max(0, s.AvailableBytes) / extentBytes * extentBytes
	return s, nil
}

// charge is what a volume of that many bytes may come to take: whole extents.
func charge(bytes int64) int64 { return (bytes + extentBytes - 1) / extentBytes * extentBytes }

// expected is what Make would give.
func (p *Pool) expected() (Stats, error) {
	dir := p.cfg.Dir
	for {
		ok, err := exists(dir)
		if err != nil {
			return Stats{}, err
		}
		if ok {
			break
		}
		dir = filepath.Dir(dir)
	}
	free, err := freeBytes(dir)
	if err != nil {
		return Stats{}, err
	}
	reflinks, err := hasReflinks(dir)
	if err != nil {
		return Stats{}, err
	}
	total := p.cfg.Bytes
	if reflinks {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return Stats{}, err
		}
		total = int64(st.Blocks) * st.Bsize
	} else if free < total {
		return Stats{TotalBytes: total, BackingFree: free}, nil
	}
	if !reflinks {
		// XFS takes a log of 64 MiB at least, and some for its tables.
		total -= max(64<<20, total/100) + total/10
	}
	available := min(total, free) - total/100*reservePercent
	return Stats{TotalBytes: total, BackingFree: free, AvailableBytes: max(0, available) / extentBytes * extentBytes}, nil
}

func exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// allocated is what a file holds in bytes, its shared blocks included; 0 when it is gone.
func allocated(path string) int64 {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}

// hasReflinks tries whether files in dir can share blocks. The files have no name,
// so that nothing is left of them.
func hasReflinks(dir string) (bool, error) {
	open := func() (*os.File, error) { return os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600) }
	a, err := open()
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("try reflinks: %w", err)
	}
	defer a.Close()
	b, err := open()
	if err != nil {
		return false, fmt.Errorf("try reflinks: %w", err)
	}
	defer b.Close()
	if _, err := a.WriteAt(make([]byte, sizeUnit), 0); err != nil {
		return false, fmt.Errorf("try reflinks: %w", err)
	}
	err = unix.IoctlFileClone(int(b.Fd()), int(a.Fd()))
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ENOSYS) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("try reflinks: %w", err)
	}
	return true, nil
}

func fallocate(f *os.File, off, n int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), 0, off, n)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func readJSON(path string, v any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// writeJSON replaces path as a whole or not at all.
func (p *Pool) writeJSON(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path+newSuffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	p.step("record: opened")
	_, err = f.Write(append(text, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(path+newSuffix))
	}
	p.step("record: written")
	if err := os.Rename(path+newSuffix, path); err != nil {
		return err
	}
	p.step("record: renamed")
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync folder %s: %w", dir, err)
	}
	return nil
}
