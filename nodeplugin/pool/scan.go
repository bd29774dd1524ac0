package pool

import (
	"fmt"
	"os"
	"path/filepath"
)

// scan reads a pool's folders, and finishes or removes what a crash left.
type scan struct {
	root     string
	volumes  map[string]Volume
	lost     map[string]int64
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
	return s.read(snapshotsName, true)
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
