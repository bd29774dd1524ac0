package pool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// scan reads a pool's folders, and finishes or removes what a crash left.
type scan struct {
	root     string
	volumes  map[string]Volume
	lost     map[string]int64
	images   map[string]Image
	repaired func(format string, args ...any)
}

func (s *scan) run() error {
	if err := s.empty(tmpName, "its making was cut short"); err != nil {
		return err
	}
	if err := s.empty(trashName, "its deletion was cut short"); err != nil {
		return err
	}
	if err := s.removeNew(s.root, recordName); err != nil {
		return err
	}
	if err := s.read(volumesName, false); err != nil {
		return err
	}
	if err := s.read(snapshotsName, true); err != nil {
		return err
	}
	return s.readImages()
}

// empty removes all that lies in a folder for what is not, or no longer, a volume.
func (s *scan) empty(folder, why string) error {
	entries, err := os.ReadDir(filepath.Join(s.root, folder))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(s.root, folder, e.Name())); err != nil {
			return err
		}
		s.repaired("removed %s from %s: %s", e.Name(), folder, why)
	}
	return nil
}

func (s *scan) removeNew(folder, name string) error {
	path := filepath.Join(folder, name+newSuffix)
	if ok, err := exists(path); err != nil || !ok {
		return err
	}
	if err := os.Remove(path); err != nil {
		return err
	}
	s.repaired("removed %s: a change of %s was cut short", path, name)
	return nil
}

func (s *scan) read(folder string, snapshots bool) error {
	entries, err := os.ReadDir(filepath.Join(s.root, folder))
	if err != nil {
		return err
	}
	for _, e := range entries {
		place := filepath.Join(s.root, folder, e.Name())
		if err := s.removeNew(place, metaName); err != nil {
			return err
		}
		v, err := s.volume(place, e.Name(), snapshots)
		if err != nil {
			// Never removed: a person may still want the data.
			s.lost[e.Name()] = allocated(filepath.Join(place, dataName))
			s.repaired("left %s alone and unused: %v", place, err)
			continue
		}
		s.volumes[v.ID] = v
	}
	return nil
}

func (s *scan) volume(place, id string, snapshot bool) (Volume, error) {
	var m meta
	if err := readJSON(filepath.Join(place, metaName), &m); err != nil {
		return Volume{}, err
	}
	if m.Version != 1 || m.ID != id || m.Snapshot != snapshot {
		return Volume{}, fmt.Errorf("record of version %d, id %q, snapshot %t", m.Version, m.ID, m.Snapshot)
	}
	v := m.placed(place)
	st, err := os.Stat(v.Path)
	if err != nil {
		return Volume{}, err
	}
	if st.Size() >= v.Bytes {
		return v, nil
	}
	// An expansion is written down first and carried out then.
	f, err := os.OpenFile(v.Path, os.O_RDWR, 0)
	if err != nil {
		return Volume{}, err
	}
	defer f.Close()
	if err := resize(f, v); err != nil {
		return Volume{}, err
	}
	if err := f.Sync(); err != nil {
		return Volume{}, err
	}
	s.repaired("finished the expansion of %s from %d to %d bytes", id, st.Size(), v.Bytes)
	return v, nil
}

// readImages reads the cache. What is wrong with an image costs a download, no more:
// it is removed.
func (s *scan) readImages() error {
	entries, err := os.ReadDir(filepath.Join(s.root, imagesName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		folder := filepath.Join(s.root, imagesName, e.Name())
		i, err := readImage(folder)
		if err == nil {
			s.images[e.Name()] = i
			continue
		}
		if err := os.RemoveAll(folder); err != nil {
			return err
		}
		s.repaired("removed %s from the cache of images: %v", e.Name(), err)
	}
	return nil
}

func readImage(folder string) (Image, error) {
	var m imageMeta
	if err := readJSON(filepath.Join(folder, metaName), &m); err != nil {
		return Image{}, err
	}
	if m.Version != 1 || m.id() != filepath.Base(folder) {
		return Image{}, fmt.Errorf("record of version %d of another image", m.Version)
	}
	record, err := os.Stat(filepath.Join(folder, metaName))
	if err != nil {
		return Image{}, err
	}
	data, err := os.Stat(filepath.Join(folder, dataName))
	if err != nil {
		return Image{}, err
	}
	if data.Size() != roundUp(m.VirtualBytes) {
		return Image{}, fmt.Errorf("a disk of %d bytes in a file of %d", m.VirtualBytes, data.Size())
	}
	m.UsedAt, m.AllocatedBytes = record.ModTime(), allocated(filepath.Join(folder, dataName))
	return m.Image, nil
}
