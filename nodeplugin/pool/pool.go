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
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

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
	// CachePercent of the pool may hold images, as long as nobody else needs the
	// room; 0 keeps none.
	CachePercent int
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
	images  map[string]Image // by ImageKey.id
	counts  CacheStats       // its counters
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
	imagesName    = "images"
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

var loopOptions = device.LoopOptions{DirectIO: true}

// Discard gives deleted volumes' blocks back to the filesystem below. Only: two
// loops on one pool file must never both be mounted, and XFS knows its twin.
var mountOptions = device.MountOptions{Options: []string{"noexec", "noatime", "discard"}, Only: true}

// load reads the pool at root and repairs it.
func (p *Pool) load(root, image string) error {
	var r record
	if err := readJSON(filepath.Join(root, recordName), &r); err != nil {
		return err
	}
	if r.Version != 1 || r.UUID == "" {
		return fmt.Errorf("%s: version %d, UUID %q: not a pool of this version", filepath.Join(root, recordName), r.Version, r.UUID)
	}
	s := &scan{root: root, volumes: map[string]Volume{}, lost: map[string]int64{}, images: map[string]Image{}, repaired: p.repaired}
	if err := s.run(); err != nil {
		return err
	}
	p.root, p.image, p.uuid, p.usable = root, image, r.UUID, r.UsableBytes
	p.volumes, p.lost, p.images = s.volumes, s.lost, s.images
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
	p.root, p.image, p.uuid, p.usable, p.volumes, p.lost, p.images = "", "", "", 0, nil, nil, nil
	if p.lock != nil {
		p.lock.Close()
		p.lock = nil
	}
}

// reservePercent of a pool is for the filesystem's own records, and for the
// blocks that a change of shared ones takes before the old are free.
const reservePercent = 5
