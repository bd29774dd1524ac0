// Package digest sums up what a disk holds: block by block in any order, so that whoever
// copies a disk sums it up on the way, and holes cost nothing.
//
// It knows nothing of images, sources or volumes. The algorithm, which docs/digest.md tells
// to those who want to write it once more, is that of a hash tree over blocks of 64 KiB.
package digest

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/zeebo/blake3"

	"github.com/longshore-io/longshore/nodeplugin/extent"
)

const (
	// Block is how many bytes a leaf of the tree stands for.
	Block = 64 << 10
	// Algorithm is what the text of a digest begins with; after colons follow the
	// disk's size in bytes and 64 hexadecimal digits.
	Algorithm = "blake3-64k"
	// MaxNodes is how many hashes of a Tree are kept at most by Trim.
	MaxNodes = 4096

	// HashBytes is how long a Hash is.
	HashBytes = 32

	maxLevel = 48 // a tree of 2^63 bytes has 47 levels
)

// Hash is that of a leaf or of a node of the tree.
type Hash [HashBytes]byte

// node is where a hash belongs: it stands for 2^level blocks, from block index<<level.
type node struct {
	level int
	index int64
}

func (n node) first() int64 { return n.index << n.level }
func (n node) end() int64   { return (n.index + 1) << n.level }

var zeroBlock [Block]byte

// zeros are the hashes of nothing but zeros, by level.
var zeros = func() (z [maxLevel + 1]Hash) {
	z[0] = blake3.Sum256(zeroBlock[:])
	for i := range maxLevel {
		z[i+1] = join(z[i], z[i])
	}
	return z
}()

func join(left, right Hash) Hash {
	var b [64]byte
	copy(b[:32], left[:])
	copy(b[32:], right[:])
	return blake3.Sum256(b[:])
}

// nodes are the largest ones of which [first, end), in blocks, consists, in order.
func nodes(first, end int64, visit func(node)) {
	for first < end {
		level := min(bits.TrailingZeros64(uint64(first)|1<<maxLevel), bits.Len64(uint64(end-first))-1)
		visit(node{level, first >> level})
		first += 1 << level
	}
}

// blocks are the ones of [off, off+n), which is whole blocks, save at the disk's end.
func blocks(off, n int64) (first, end int64) { return off / Block, (off + n + Block - 1) / Block }

// Sums returns the hashes of the bytes at off, a multiple of Block, for Tree.Add: none of
// nothing. p is whole blocks, or ends where the disk does.
func Sums(off int64, p []byte) []Hash {
	first, end := blocks(off, int64(len(p)))
	var out []Hash
	nodes(first, end, func(n node) {
		at := (n.first() - first) * Block
		out = append(out, sum(n.level, p[at:min(at+Block<<n.level, int64(len(p)))]))
	})
	return out
}

// sum is the hash of a node of that level with the bytes p and zeros behind them.
func sum(level int, p []byte) Hash {
	switch half := Block << max(level-1, 0); {
	case len(p) == 0:
		return zeros[level]
	case level > 0 && len(p) > half:
		return join(sum(level-1, p[:half]), sum(level-1, p[half:]))
	case level > 0:
		return join(sum(level-1, p), zeros[level-1])
	case bytes.Equal(p, zeroBlock[:len(p)]):
		return zeros[0]
	case len(p) == Block:
		return blake3.Sum256(p)
	}
	var whole [Block]byte
	copy(whole[:], p)
	return blake3.Sum256(whole[:])
}

// Tree holds the hashes of those parts of a disk that are known. The zero Tree is empty.
// It is not for use by many at once.
type Tree struct {
	known  extent.Set // in blocks
	hashes map[node]Hash
}

// Add tells what is in [off, off+n), which is whole blocks save at the disk's end: Sums of
// it, or nil where it is zeros. What was known of it before is forgotten. An error says that
// sums are those of another range.
func (t *Tree) Add(off, n int64, sums []Hash) error {
	if off < 0 || n <= 0 || off%Block != 0 || off > 1<<62-n {
		return fmt.Errorf("hashes of %d bytes at %d: not whole blocks", n, off)
	}
	first, end := blocks(off, n)
	if sums != nil {
		count := 0
		if nodes(first, end, func(node) { count++ }); count != len(sums) {
			return fmt.Errorf("%d hashes of %d bytes at %d, want %d", len(sums), n, off, count)
		}
	}
	t.forget(first, end)
	i := 0
	nodes(first, end, func(at node) {
		h := zeros[at.level]
		if sums != nil {
			h = sums[i]
		}
		i++
		t.put(at, h)
	})
	return nil
}

// put enters a hash and joins it with its neighbours.
func (t *Tree) put(at node, h Hash) {
	if t.hashes == nil {
		t.hashes = map[node]Hash{}
	}
	t.known.Add(at.first(), at.end()-at.first())
	for at.level < maxLevel {
		side := node{at.level, at.index ^ 1}
		other, ok := t.hashes[side]
		if !ok {
			break
		}
		delete(t.hashes, side)
		if at.index&1 == 0 {
			h = join(h, other)
		} else {
			h = join(other, h)
		}
		at = node{at.level + 1, at.index >> 1}
	}
	t.hashes[at] = h
}

// forget takes out every hash that has to do with [first, end).
func (t *Tree) forget(first, end int64) {
	if t.known.Intersect(first, end-first).Len() == 0 {
		return
	}
	for n := range t.hashes {
		if n.first() < end && first < n.end() {
			t.drop(n)
		}
	}
}

func (t *Tree) drop(n node) {
	delete(t.hashes, n)
	t.known.Subtract(n.first(), n.end()-n.first())
}

// Join adds what o knows.
func (t *Tree) Join(o *Tree) {
	for n := range o.hashes {
		t.forget(n.first(), n.end())
	}
	for n, h := range o.hashes {
		t.put(n, h)
	}
}

// Missing are the parts of a disk of size bytes that are not known.
func (t *Tree) Missing(size int64) []extent.Range {
	_, end := blocks(0, size)
	gaps := t.known.Missing(0, end)
	for i, g := range gaps {
		from, to := g.Start*Block, min(g.End()*Block, size)
		gaps[i] = extent.Range{Start: from, Length: to - from}
	}
	return gaps
}

// Sum returns the digest of a disk of size bytes, all of which must be known.
func (t *Tree) Sum(size int64) (string, error) {
	if gaps := t.Missing(size); len(gaps) > 0 || size < 0 {
		return "", fmt.Errorf("digest of a disk of %d bytes: %d parts of it are not known", size, len(gaps))
	}
	_, end := blocks(0, size)
	level := 0
	if end > 1 {
		level = bits.Len64(uint64(end - 1))
	}
	whole := &Tree{hashes: maps.Clone(t.hashes)}
	nodes(end, 1<<level, func(n node) { whole.put(n, zeros[n.level]) })
	root, ok := whole.hashes[node{level, 0}]
	if !ok || len(whole.hashes) > 1 {
		return "", fmt.Errorf("digest of a disk of %d bytes: something behind its end was summed up", size)
	}
	h := blake3.Sum256(binary.LittleEndian.AppendUint64(root[:], uint64(size)))
	return fmt.Sprintf("%s:%d:%x", Algorithm, size, h), nil
}

// Bytes returns the size of the disk whose digest text is, or what is wrong with that.
func Bytes(text string) (int64, error) {
	p := strings.Split(text, ":")
	if len(p) == 3 && p[0] == Algorithm {
		size, serr := strconv.ParseUint(p[1], 10, 62)
		b, herr := hex.DecodeString(p[2])
		if serr == nil && herr == nil && len(b) == HashBytes && text == fmt.Sprintf("%s:%d:%x", Algorithm, size, b) {
			return int64(size), nil
		}
	}
	return 0, fmt.Errorf("digest %q: give %s:, the disk's size in bytes, a colon and %d hexadecimal digits, as longshore import prints it", text, Algorithm, 2*HashBytes)
}

// Trim forgets the hashes that stand for the fewest blocks, so that MaxNodes are left.
func (t *Tree) Trim() {
	if len(t.hashes) <= MaxNodes {
		return
	}
	for _, n := range t.sorted(func(a, b node) int { return cmp.Or(cmp.Compare(b.level, a.level), cmp.Compare(a.index, b.index)) })[MaxNodes:] {
		t.drop(n)
	}
}

func (t *Tree) sorted(order func(a, b node) int) []node {
	all := make([]node, 0, len(t.hashes))
	for n := range t.hashes {
		all = append(all, n)
	}
	slices.SortFunc(all, order)
	return all
}

// Append appends t to data, for Parse: of each hash the distance from the end of the one
// before in blocks and its level as varints, and the hash.
func (t *Tree) Append(data []byte) []byte {
	at := int64(0)
	for _, n := range t.sorted(func(a, b node) int { return cmp.Compare(a.first(), b.first()) }) {
		data = binary.AppendUvarint(data, uint64(n.first()-at))
		data = binary.AppendUvarint(data, uint64(n.level))
		h := t.hashes[n]
		data = append(data, h[:]...)
		at = n.end()
	}
	return data
}

var errDamaged = errors.New("the hashes of a digest are damaged")

// Parse is the inverse of Append. It refuses more than MaxNodes hashes.
func Parse(data []byte) (Tree, error) {
	t := Tree{}
	at := int64(0)
	for count := 0; len(data) > 0; count++ {
		gap, n := binary.Uvarint(data)
		if n <= 0 || gap > 1<<maxLevel || count == MaxNodes {
			return Tree{}, errDamaged
		}
		level, m := binary.Uvarint(data[n:])
		if m <= 0 || level > maxLevel || len(data) < n+m+HashBytes {
			return Tree{}, errDamaged
		}
		first := at + int64(gap)
		if first%(1<<level) != 0 || first >= 1<<maxLevel {
			return Tree{}, errDamaged
		}
		where := node{int(level), first >> level}
		t.put(where, Hash(data[n+m:n+m+HashBytes]))
		data, at = data[n+m+HashBytes:], where.end()
	}
	return t, nil
}
