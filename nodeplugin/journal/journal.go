// Package journal keeps what is durable of a transfer: which bytes of a target
// hold their final content, and of which content of the source that is true.
//
// It knows nothing of sources, images or the process that copies. Whoever saves
// a journal has synced the target before; whoever loads one may skip what it
// lists.
package journal

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/extent"
)

const (
	// MaxRanges bounds a journal. Of a more scattered transfer the smallest
	// ranges are forgotten: they are copied again after a restart, nothing worse.
	MaxRanges = 32768
	// MaxBytes is the most that a journal's file may have.
	MaxBytes = headBytes + maxFacts + MaxRanges*2*binary.MaxVarintLen64 + digest.MaxNodes*(2*binary.MaxVarintLen64+digest.HashBytes)

	maxFacts = 64 << 10

	// The file: magic, version, length of the facts, length of the ranges and
	// CRC32C of everything else (little endian, 4 bytes each), then the facts as
	// JSON, the ranges as varints and, up to the end, the sums.
	magic     = 0x4e4a534c // "LSJN" in the file
	version   = 2
	headBytes = 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Journal is the record of one transfer.
type Journal struct {
	// Target names the target, Recipe what fills it: a journal of another pair
	// says nothing about this one.
	Target string `json:"target"`
	Recipe string `json:"recipe,omitempty"`
	// Bytes is the size of the target.
	Bytes int64 `json:"bytes"`
	// Validator is what the source said of its content, in words of its own.
	Validator json.RawMessage `json:"validator,omitempty"`
	// Format of the image and size of the disk in it in bytes, -1 unknown.
	Format       string `json:"format,omitempty"`
	VirtualBytes int64  `json:"virtualBytes"`
	// Restarts counts how often the source was found changed and the transfer
	// begun again.
	Restarts int `json:"restarts,omitempty"`
	// Read counts the bytes that were read from the source for this target.
	Read int64 `json:"read,omitempty"`
	// Soiled: the target may hold bytes that Done does not list and that are of
	// another content than Validator's. It must be zeroed before it is filled.
	Soiled bool `json:"soiled,omitempty"`
	// Zeroed: the target was zeros before anything of this content was written.
	Zeroed bool `json:"zeroed,omitempty"`
	// Complete: the target holds the whole disk, and zeros behind it.
	Complete bool `json:"complete,omitempty"`
	// HashAt bytes of the source are summed up in HashState.
	HashAt    int64  `json:"hashAt,omitempty"`
	HashState []byte `json:"hashState,omitempty"`
	// Cached: the disk was copied from the node's cache of images.
	Cached bool `json:"cached,omitempty"`
	// Digest of the disk, once it is Complete.
	Digest string `json:"digest,omitempty"`
	// Done lists the bytes of the target that are final and durable.
	Done extent.Set `json:"-"`
	// Sums are of what the target holds, perhaps not of all that is Done.
	Sums digest.Tree `json:"-"`
}

// Discarded says why a journal's file was not used.
type Discarded struct{ Reason string }

func (d *Discarded) Error() string { return "discard journal: " + d.Reason }

// Load reads the journal of the target, size bytes long, that recipe fills. No
// file gives a fresh Journal. A file that is damaged, or belongs to another
// target, size or recipe, gives a fresh Journal that is Soiled and the error
// *Discarded; with any other error the Journal is nil.
func Load(path, target, recipe string, bytes int64) (*Journal, error) {
	fresh := &Journal{Target: target, Recipe: recipe, Bytes: bytes, VirtualBytes: -1}
	data, err := read(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fresh, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	j, err := Decode(data)
	if err == nil {
		switch {
		case j.Target != target:
			err = fmt.Errorf("it is of target %q, not of %q", j.Target, target)
		case j.Bytes != bytes:
			err = fmt.Errorf("it is of a target of %d bytes, this one has %d", j.Bytes, bytes)
		case j.Recipe != recipe:
			err = fmt.Errorf("it is of another source (recipe %q, now %q)", j.Recipe, recipe)
		}
	}
	if err != nil {
		fresh.Soiled = true
		return fresh, &Discarded{Reason: err.Error()}
	}
	return j, nil
}

// read returns at most one byte more than a journal may have.
func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, MaxBytes+1))
}

// Save replaces the file at path by j, whole or not at all, and returns once
// that is durable. It forgets the smallest ranges of j.Done beyond MaxRanges, and of
// j.Sums what Trim forgets.
func (j *Journal) Save(path string) error {
	j.Done = Largest(j.Done, MaxRanges)
	j.Sums.Trim()
	data, err := j.Encode()
	if err != nil {
		return fmt.Errorf("encode journal: %w", err)
	}
	if err := replace(path, data); err != nil {
		return fmt.Errorf("save journal: %w", err)
	}
	return nil
}

// replace writes data to a temporary name, syncs, renames and syncs the folder.
func replace(path string, data []byte) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Remove takes the journal at path away, and what a killed Save left beside it.
// Without a journal it does nothing.
func Remove(path string) error {
	for _, p := range []string{path, path + ".tmp"} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove journal: %w", err)
		}
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("remove journal: %w", err)
	}
	return nil
}

// Encode returns j as the bytes of a file.
func (j *Journal) Encode() ([]byte, error) {
	facts, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	if len(facts) > maxFacts {
		return nil, fmt.Errorf("facts of %d bytes, at most %d are kept", len(facts), maxFacts)
	}
	ranges := AppendRanges(nil, j.Done)
	sums := j.Sums.Append(nil)
	out := make([]byte, headBytes, headBytes+len(facts)+len(ranges)+len(sums))
	binary.LittleEndian.PutUint32(out[0:], magic)
	binary.LittleEndian.PutUint32(out[4:], version)
	binary.LittleEndian.PutUint32(out[8:], uint32(len(facts)))
	binary.LittleEndian.PutUint32(out[12:], uint32(len(ranges)))
	out = append(append(append(out, facts...), ranges...), sums...)
	binary.LittleEndian.PutUint32(out[16:], sum(out))
	return out, nil
}

// sum is the checksum of all bytes but those that hold it.
func sum(data []byte) uint32 {
	return crc32.Update(crc32.Checksum(data[:16], castagnoli), castagnoli, data[headBytes:])
}

// Decode is the inverse of Encode; the error says what is wrong with data.
func Decode(data []byte) (*Journal, error) {
	if len(data) > MaxBytes {
		return nil, fmt.Errorf("it has more than %d bytes", MaxBytes)
	}
	if len(data) < headBytes || binary.LittleEndian.Uint32(data) != magic {
		return nil, fmt.Errorf("these %d bytes are no journal", len(data))
	}
	if v := binary.LittleEndian.Uint32(data[4:]); v != version {
		return nil, fmt.Errorf("it is of version %d, this program reads version %d", v, version)
	}
	facts := int64(binary.LittleEndian.Uint32(data[8:]))
	ranges := int64(binary.LittleEndian.Uint32(data[12:]))
	if int64(len(data)) < headBytes+facts+ranges {
		return nil, fmt.Errorf("it has %d bytes, its head says at least %d", len(data), headBytes+facts+ranges)
	}
	if got, want := sum(data), binary.LittleEndian.Uint32(data[16:]); got != want {
		return nil, fmt.Errorf("its checksum is %08x, its head says %08x", got, want)
	}
	j := &Journal{}
	if err := json.Unmarshal(data[headBytes:headBytes+facts], j); err != nil {
		return nil, fmt.Errorf("its facts are no JSON: %w", err)
	}
	var err error
	sums := data[headBytes+facts+ranges:]
	if j.Done, err = ParseRanges(data[headBytes+facts:len(data)-len(sums)], j.Bytes); err != nil {
		return nil, err
	}
	if j.Sums, err = digest.Parse(sums); err != nil {
		return nil, err
	}
	return j, nil
}

// AppendRanges appends set to data: of each range the distance from the end of
// the one before and its length, as varints.
func AppendRanges(data []byte, set extent.Set) []byte {
	var at int64
	for _, r := range set.Ranges() {
		data = binary.AppendUvarint(data, uint64(r.Start-at))
		data = binary.AppendUvarint(data, uint64(r.Length))
		at = r.End()
	}
	return data
}

// ParseRanges is the inverse of AppendRanges. It refuses more than MaxRanges
// ranges, and ranges that are empty, touch, or leave [0, bytes).
func ParseRanges(data []byte, bytes int64) (extent.Set, error) {
	var ranges []extent.Range
	var at int64
	for len(data) > 0 {
		gap, n := binary.Uvarint(data)
		if n <= 0 {
			return extent.Set{}, errors.New("a range is cut off")
		}
		length, m := binary.Uvarint(data[n:])
		if m <= 0 {
			return extent.Set{}, errors.New("a range is cut off")
		}
		data = data[n+m:]
		left := uint64(max(bytes-at, 0))
		if length == 0 || gap == 0 && len(ranges) > 0 || gap > left || length > left-gap {
			return extent.Set{}, fmt.Errorf("range %d, %d bytes at %d behind %d, is not in order inside %d bytes", len(ranges), length, gap, at, bytes)
		}
		if len(ranges) == MaxRanges {
			return extent.Set{}, fmt.Errorf("more than %d ranges", MaxRanges)
		}
		r := extent.Range{Start: at + int64(gap), Length: int64(length)}
		ranges = append(ranges, r)
		at = r.End()
	}
	return extent.NewSet(ranges...), nil
}

// Largest returns at most n ranges of set, the longest ones: of all choices of n
// ranges the one that loses the fewest bytes.
func Largest(set extent.Set, n int) extent.Set {
	if set.Len() <= n {
		return set
	}
	ranges := set.Ranges()
	slices.SortFunc(ranges, func(a, b extent.Range) int {
		return cmp.Or(cmp.Compare(b.Length, a.Length), cmp.Compare(a.Start, b.Start))
	})
	return extent.NewSet(ranges[:n]...)
}
