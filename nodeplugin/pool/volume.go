package pool

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/device"
)

// sizeUnit is what every volume's size is a multiple of, in bytes: one block of
// the pool, so that no I/O to a volume needs its last block twice.
const sizeUnit = 4096

// Mode is how a volume shows in a pod.
type Mode string

// Modes of a volume.
const (
	Block      Mode = "Block"
	Filesystem Mode = "Filesystem"
)

// State is how far a volume is.
type State string

// States of a volume.
const (
	Empty     State = "Empty" // awaits data, and no transfer was begun
	Filling   State = "Filling"
	Populated State = "Populated" // the data is complete, or none was awaited
)

// Spec is what a volume is made from.
type Spec struct {
	// ID is a file name: letters, digits, dot, dash, underscore; 200 bytes at most.
	ID string `json:"id"`
	// Bytes is rounded up to a multiple of 4096.
	Bytes int64 `json:"bytes"`
	Mode  Mode  `json:"mode"`
	// FSType is ext4 or xfs, or "" for Block.
	FSType string `json:"fsType,omitempty"`
	// From is the volume or snapshot whose blocks are shared; "" for an empty volume.
	From string `json:"from,omitempty"`
	// AwaitsData: the volume is Empty at first instead of Populated.
	AwaitsData bool `json:"awaitsData,omitempty"`
	// Preallocate reserves all blocks at once.
	Preallocate bool `json:"preallocate,omitempty"`
}

// Failure is how the last try to fill a volume ended.
type Failure struct {
	Reason   string `json:"reason"`
	Message  string `json:"message"`
	Terminal bool   `json:"terminal"`
}

// Volume is a volume or a snapshot.
type Volume struct {
	Spec
	// Path is the raw file.
	Path string `json:"-"`
	// AllocatedBytes is what a snapshot holds; 0 for a volume, which changes all the time.
	AllocatedBytes int64 `json:"-"`

	State State `json:"state"`
	// Recipe is the digest of what fills the volume.
	Recipe  string   `json:"recipe,omitempty"`
	Failure *Failure `json:"failure,omitempty"`
	// Source is where the data came from (validator, format), without secrets.
	Source    json.RawMessage `json:"source,omitempty"`
	CreatedAt time.Time       `json:"createdAt"`
	Snapshot  bool            `json:"snapshot,omitempty"`
	// SourceID is the volume or snapshot this one was copied from.
	SourceID string `json:"sourceID,omitempty"`
}

// meta is meta.json.
type meta struct {
	Version int `json:"version"`
	Volume
}

var idPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$`)

func checkID(id string) error {
	if !idPattern.MatchString(id) {
		return fmt.Errorf("volume id %q: use at most 200 letters, digits, '.', '-' and '_', the first a letter or digit: %w", id, ErrInvalid)
	}
	return nil
}

// check returns the spec with its size rounded up.
func (s Spec) check() (Spec, error) {
	if err := checkID(s.ID); err != nil {
		return s, err
	}
	switch {
	case s.Bytes <= 0 || s.Bytes > 1<<62:
		return s, fmt.Errorf("volume %s of %d bytes: %w", s.ID, s.Bytes, ErrInvalid)
	case s.Mode == Block && s.FSType != "":
		return s, fmt.Errorf("volume %s: a Block volume has no filesystem %q: %w", s.ID, s.FSType, ErrInvalid)
	case s.Mode == Filesystem && s.FSType != device.Ext4 && s.FSType != device.XFS:
		return s, fmt.Errorf("volume %s: filesystem %q is not one of %s, %s: %w", s.ID, s.FSType, device.Ext4, device.XFS, ErrInvalid)
	case s.Mode != Block && s.Mode != Filesystem:
		return s, fmt.Errorf("volume %s: mode %q is not one of %s, %s: %w", s.ID, s.Mode, Block, Filesystem, ErrInvalid)
	}
	s.Bytes = roundUp(s.Bytes)
	return s, nil
}

func roundUp(bytes int64) int64 { return (bytes + sizeUnit - 1) / sizeUnit * sizeUnit }

func (v *Volume) folder(root string) string {
	if v.Snapshot {
		return filepath.Join(root, snapshotsName, v.ID)
	}
	return filepath.Join(root, volumesName, v.ID)
}

// ready is called with mu held.
func (p *Pool) ready() error {
	switch {
	case p.problem != "":
		return fmt.Errorf("pool %s: %s: %w", p.cfg.Name, p.problem, ErrUnavailable)
	case p.uuid == "":
		return fmt.Errorf("pool %s in %s: %w", p.cfg.Name, p.cfg.Dir, ErrNoPool)
	}
	return nil
}

// writable is ready, and a look at the filesystem: one that meets an error of its
// disk shuts itself down or becomes read-only. It is called with mu held.
func (p *Pool) writable() error {
	if err := p.ready(); err != nil {
		return err
	}
	f, err := os.Open(filepath.Join(p.root, recordName))
	if err != nil {
		return p.sick(err)
	}
	defer f.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return p.sick(err)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return p.sick(unix.EROFS)
	}
	return nil
}

func (p *Pool) sick(err error) error {
	return fmt.Errorf("pool %s: the filesystem at %s has failed, the kernel's log says why: mend its disk, end the pods that use its volumes, and restart the plugin on this node: %w: %w", p.cfg.Name, p.root, err, ErrUnavailable)
}

// begin takes the id for one change; end gives it back.
func (p *Pool) begin(id string) (end func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.writable(); err != nil {
		return nil, err
	}
	if _, ok := p.lost[id]; ok {
		return nil, fmt.Errorf("the record of volume %s in pool %s can't be read: repair or remove its folder in %s by hand: %w", id, p.cfg.Name, p.root, ErrUnavailable)
	}
	if p.busy[id] {
		return nil, fmt.Errorf("volume %s is being changed: %w", id, ErrBusy)
	}
	p.busy[id] = true
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.busy, id)
	}, nil
}

// reserve takes bytes of what is available, until they are counted otherwise
// (done) or given back (undo).
func (p *Pool) reserve(bytes int64) (*reservation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, err := p.stats()
	if err != nil {
		return nil, err
	}
	if bytes > s.AvailableBytes {
		return nil, &FullError{Pool: p.cfg.Name, Need: bytes, Free: s.AvailableBytes}
	}
	if err := p.giveBack(bytes - s.spare); err != nil {
		return nil, err
	}
	p.pending += bytes
	return &reservation{p, bytes}, nil
}

type reservation struct {
	p     *Pool
	bytes int64
}

func (r *reservation) undo() {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	r.done()
}

// done is called with mu held, when what was reserved is counted otherwise.
func (r *reservation) done() {
	r.p.pending -= r.bytes
	r.bytes = 0
}

// Get returns the volume or snapshot with this id.
func (p *Pool) Get(id string) (Volume, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.ready(); err != nil {
		return Volume{}, err
	}
	v, ok := p.volumes[id]
	if !ok {
		return Volume{}, fmt.Errorf("%s in pool %s: %w", id, p.cfg.Name, ErrNotFound)
	}
	return v, nil
}

// List returns all volumes and snapshots in order of id.
func (p *Pool) List() []Volume {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := make([]Volume, 0, len(p.volumes))
	for _, v := range p.volumes {
		list = append(list, v)
	}
	slices.SortFunc(list, func(a, b Volume) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// JournalPath is where the journal of the transfer that fills the volume lies; it
// goes with the volume.
func (p *Pool) JournalPath(id string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return filepath.Join(p.root, volumesName, id, journalName)
}

// Create makes a volume, or returns the one that was made from an equal spec.
func (p *Pool) Create(ctx context.Context, s Spec) (Volume, error) {
	s, err := s.check()
	if err != nil {
		return Volume{}, err
	}
	end, err := p.begin(s.ID)
	if err != nil {
		return Volume{}, err
	}
	defer end()
	if v, err := p.Get(s.ID); err == nil {
		if v.Snapshot || v.Spec != s {
			return Volume{}, fmt.Errorf("volume %s is there with %+v, not %+v: %w", s.ID, v.Spec, s, ErrExists)
		}
		return v, nil
	} else if !errors.Is(err, ErrNotFound) {
		return Volume{}, err
	}
	v := Volume{Spec: s, State: Populated, CreatedAt: time.Now().UTC(), SourceID: s.From}
	if s.AwaitsData {
		v.State = Empty
	}
	var source Volume
	if s.From != "" {
		if source, err = p.source(s.From); err != nil {
			return Volume{}, fmt.Errorf("volume %s: %w", s.ID, err)
		}
		if source.Mode != s.Mode || source.FSType != s.FSType || source.Bytes > s.Bytes {
			return Volume{}, fmt.Errorf("volume %s (%s %s, %d bytes) from %s (%s %s, %d bytes): mode and filesystem must be the same and the size no smaller: %w",
				s.ID, s.Mode, s.FSType, s.Bytes, source.ID, source.Mode, source.FSType, source.Bytes, ErrInvalid)
		}
		v.Source = source.Source
	}
	room, err := p.reserve(charge(s.Bytes))
	if err != nil {
		return Volume{}, fmt.Errorf("volume %s: %w", s.ID, err)
	}
	defer room.undo()
	return p.add(ctx, v, source, room)
}

// Snapshot makes a copy of a populated volume that nothing writes to, or returns
// the one that was made of it under this id. It holds what the volume's file
// holds at one moment; a filesystem that is mounted from it should be frozen.
func (p *Pool) Snapshot(ctx context.Context, id, volumeID string) (Volume, error) {
	if err := checkID(id); err != nil {
		return Volume{}, err
	}
	end, err := p.begin(id)
	if err != nil {
		return Volume{}, err
	}
	defer end()
	if v, err := p.Get(id); err == nil {
		if !v.Snapshot || v.SourceID != volumeID {
			return Volume{}, fmt.Errorf("%s is there, and not a snapshot of %s: %w", id, volumeID, ErrExists)
		}
		return v, nil
	} else if !errors.Is(err, ErrNotFound) {
		return Volume{}, err
	}
	source, err := p.source(volumeID)
	if err != nil {
		return Volume{}, fmt.Errorf("snapshot %s: %w", id, err)
	}
	if source.Snapshot {
		return Volume{}, fmt.Errorf("snapshot %s of %s, which is a snapshot itself: %w", id, volumeID, ErrInvalid)
	}
	// What the volume holds now is what the snapshot will keep of it.
	room, err := p.reserve(min(allocated(source.Path), source.Bytes))
	if err != nil {
		return Volume{}, fmt.Errorf("snapshot %s: %w", id, err)
	}
	defer room.undo()
	v := Volume{Spec: source.Spec, State: Populated, CreatedAt: time.Now().UTC(), Snapshot: true, SourceID: volumeID, Source: source.Source}
	v.ID, v.From, v.AwaitsData, v.Preallocate = id, volumeID, false, false
	return p.add(ctx, v, source, room)
}

// source is a volume whose blocks may be shared.
func (p *Pool) source(id string) (Volume, error) {
	v, err := p.Get(id)
	if err != nil {
		return Volume{}, fmt.Errorf("source %w", err)
	}
	if v.State != Populated {
		return Volume{}, fmt.Errorf("source %s is %s: wait until it is filled: %w", id, v.State, ErrNotPopulated)
	}
	return v, nil
}

// add makes the volume's folder under tmp and moves it to its place.
func (p *Pool) add(ctx context.Context, v, source Volume, room *reservation) (_ Volume, err error) {
	tmp := filepath.Join(p.root, tmpName, v.ID)
	defer func() {
		if err != nil {
			err = fmt.Errorf("make %s: %w", v.ID, p.full(err, v.Bytes))
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return Volume{}, err
	}
	p.step("add: folder")
	if err := p.makeData(filepath.Join(tmp, dataName), v, source); err != nil {
		return Volume{}, err
	}
	p.step("add: data")
	if err := p.writeJSON(filepath.Join(tmp, metaName), meta{1, v}); err != nil {
		return Volume{}, err
	}
	p.step("add: record")
	if err := ctx.Err(); err != nil {
		return Volume{}, context.Cause(ctx)
	}
	place := v.folder(p.root)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := os.Rename(tmp, place); err != nil {
		return Volume{}, err
	}
	p.step("add: renamed")
	v = v.placed(place)
	p.volumes[v.ID] = v
	room.done()
	// From here on the volume is there; should this fail, a crash may undo it.
	if err := errors.Join(syncDir(filepath.Dir(place)), syncDir(filepath.Dir(tmp))); err != nil {
		return Volume{}, err
	}
	p.step("add: synced")
	return v, nil
}

// placed fills in what the record does not hold.
func (v Volume) placed(folder string) Volume {
	v.Path = filepath.Join(folder, dataName)
	if v.Snapshot {
		v.AllocatedBytes = min(allocated(v.Path), v.Bytes)
	}
	return v
}

// extentBytes is in what pieces a volume's blocks are allocated: a file of few
// extents is copied in less time, and takes less of the pool's own records.
const extentBytes = 1 << 20

func (p *Pool) makeData(path string, v, source Volume) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := setExtentSize(f, extentBytes); err != nil {
		return err
	}
	p.step("data: opened")
	if source.ID != "" {
		from, err := os.Open(source.Path)
		if err != nil {
			return err
		}
		defer from.Close()
		// What the loop device has completed must be what is shared.
		if err := from.Sync(); err != nil {
			return fmt.Errorf("sync %s: %w", source.ID, err)
		}
		if err := unix.IoctlFileClone(int(f.Fd()), int(from.Fd())); err != nil {
			return fmt.Errorf("share the blocks of %s: %w", source.ID, err)
		}
		p.step("data: shared")
	}
	if err := resize(f, v); err != nil {
		return err
	}
	p.step("data: sized")
	return f.Sync()
}

// resize makes the file as large as the volume, and allocates it where asked.
func resize(f *os.File, v Volume) error {
	if err := f.Truncate(v.Bytes); err != nil {
		return fmt.Errorf("size %d bytes: %w", v.Bytes, err)
	}
	if v.Preallocate {
		if err := fallocate(f, 0, v.Bytes); err != nil {
			return fmt.Errorf("preallocate %d bytes: %w", v.Bytes, err)
		}
	}
	return nil
}

// full words an error of the filesystem for want of space as one of the pool.
func (p *Pool) full(err error, need int64) error {
	if !errors.Is(err, unix.ENOSPC) {
		return err
	}
	free, _ := freeBytes(p.root)
	return errors.Join(&FullError{Pool: p.cfg.Name, Need: need, Free: free}, err)
}

// Expand makes a volume larger; bytes that it has already change nothing.
func (p *Pool) Expand(ctx context.Context, id string, bytes int64) (Volume, error) {
	end, err := p.begin(id)
	if err != nil {
		return Volume{}, err
	}
	defer end()
	old, err := p.Get(id)
	if err != nil {
		return Volume{}, err
	}
	if old.Snapshot || bytes <= 0 || bytes > 1<<62 {
		return Volume{}, fmt.Errorf("expand %s to %d bytes (snapshot: %t): %w", id, bytes, old.Snapshot, ErrInvalid)
	}
	bytes = roundUp(bytes)
	if bytes <= old.Bytes {
		return old, nil
	}
	room, err := p.reserve(charge(bytes) - charge(old.Bytes))
	if err != nil {
		return Volume{}, fmt.Errorf("expand %s: %w", id, err)
	}
	defer room.undo()
	// The record comes first: a crash after it is finished by Open, and no crash
	// leaves bytes that no record speaks of.
	v, err := p.change(id, func(v *Volume) { v.Bytes = bytes }, room)
	if err != nil {
		return Volume{}, fmt.Errorf("expand %s: %w", id, err)
	}
	f, err := os.OpenFile(v.Path, os.O_RDWR, 0)
	if err != nil {
		return Volume{}, fmt.Errorf("expand %s: %w", id, err)
	}
	defer f.Close()
	err = resize(f, v)
	if err == nil {
		p.step("expand: sized")
		err = f.Sync()
	}
	if err != nil {
		err = p.full(err, bytes-old.Bytes)
		if undo := f.Truncate(old.Bytes); undo != nil {
			return Volume{}, fmt.Errorf("expand %s to %d bytes: %w", id, bytes, errors.Join(err, undo))
		}
		_, undo := p.change(id, func(v *Volume) { v.Bytes = old.Bytes }, nil)
		return Volume{}, fmt.Errorf("expand %s to %d bytes: %w", id, bytes, errors.Join(err, undo))
	}
	p.step("expand: done")
	return v, nil
}

// Update changes what the pool's caller keeps of a volume: its State, Recipe,
// Failure and Source. Changes of anything else are ignored.
func (p *Pool) Update(id string, fn func(*Volume)) (Volume, error) {
	v, err := p.change(id, func(v *Volume) {
		c := *v
		fn(&c)
		v.State, v.Recipe, v.Failure, v.Source = c.State, c.Recipe, c.Failure, c.Source
	}, nil)
	if err != nil {
		return Volume{}, fmt.Errorf("update %s: %w", id, err)
	}
	return v, nil
}

// change rewrites a volume's record.
func (p *Pool) change(id string, fn func(*Volume), room *reservation) (Volume, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.writable(); err != nil {
		return Volume{}, err
	}
	v, ok := p.volumes[id]
	if !ok {
		return Volume{}, fmt.Errorf("%s in pool %s: %w", id, p.cfg.Name, ErrNotFound)
	}
	fn(&v)
	if err := p.writeJSON(filepath.Join(v.folder(p.root), metaName), meta{1, v}); err != nil {
		return Volume{}, err
	}
	p.volumes[id] = v
	if room != nil {
		room.done()
	}
	return v, nil
}

// Delete removes a volume or snapshot; one that is not there is success. While a
// loop device shows it the error is ErrInUse.
func (p *Pool) Delete(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	end, err := p.begin(id)
	if err != nil {
		return err
	}
	defer end()
	v, err := p.Get(id)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	if err == nil {
		if err := inUse(v); err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
		if err := p.discard(v); err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
	}
	// Also what an earlier Delete could not remove.
	if err := os.RemoveAll(filepath.Join(p.root, trashName, id)); err != nil {
		return fmt.Errorf("delete %s: %w", id, err)
	}
	p.step("delete: removed")
	return nil
}

func inUse(v Volume) error {
	var st unix.Stat_t
	if err := unix.Stat(v.Path, &st); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return fmt.Errorf("stat %s: %w", v.Path, err)
	}
	loops, err := device.FindLoops(st.Dev, st.Ino)
	if err != nil {
		return err
	}
	path := ""
	for _, l := range loops {
		path = l.Path()
		l.Close()
	}
	if path != "" {
		return fmt.Errorf("%s shows it: detach it first: %w", path, ErrInUse)
	}
	return nil
}

// discard moves the volume to the trash: from then on it is gone.
func (p *Pool) discard(v Volume) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	trash := filepath.Join(p.root, trashName)
	// A namesake that could not be removed.
	if err := os.RemoveAll(filepath.Join(trash, v.ID)); err != nil {
		return err
	}
	place := v.folder(p.root)
	if err := os.Rename(place, filepath.Join(trash, v.ID)); err != nil {
		return err
	}
	p.step("delete: renamed")
	delete(p.volumes, v.ID)
	if err := errors.Join(syncDir(filepath.Dir(place)), syncDir(trash)); err != nil {
		return err
	}
	p.step("delete: synced")
	return nil
}

// fsxattr is struct fsxattr of linux/fs.h.
type fsxattr struct {
	XFlags, ExtSize, NExtents, ProjID, CowExtSize uint32
	_                                             [8]byte
}

// From linux/fs.h.
const (
	fsGetXattr     = 0x801c581f // FS_IOC_FSGETXATTR
	fsSetXattr     = 0x401c5820 // FS_IOC_FSSETXATTR
	fsXflagExtSize = 0x800      // FS_XFLAG_EXTSIZE
)

// setExtentSize asks the filesystem to allocate the (empty) file in pieces of
// that many bytes. Filesystems without such a wish do as they like.
func setExtentSize(f *os.File, bytes uint32) error {
	var x fsxattr
	ioctl := func(request uintptr) error {
		_, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(&x)))
		if e != 0 && e != unix.ENOTTY && e != unix.EOPNOTSUPP {
			return fmt.Errorf("extent size of %s: %w", f.Name(), e)
		}
		return nil
	}
	if err := ioctl(fsGetXattr); err != nil {
		return err
	}
	x.XFlags |= fsXflagExtSize
	x.ExtSize = bytes
	if err := ioctl(fsSetXattr); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}
