package digest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/zeebo/blake3"

	"github.com/longshore-io/longshore/nodeplugin/extent"
)

// naive is the algorithm as docs/digest.md tells it.
func naive(disk []byte) string {
	sum := func(p []byte) []byte { h := blake3.Sum256(p); return h[:] }
	var level [][]byte
	for at := 0; at < len(disk); at += Block {
		block := make([]byte, Block)
		copy(block, disk[at:])
		level = append(level, sum(block))
	}
	zero := sum(make([]byte, Block))
	for len(level) == 0 || len(level)&(len(level)-1) != 0 {
		level = append(level, zero)
	}
	for ; len(level) > 1; level = level[:len(level)/2] {
		for i := range len(level) / 2 {
			level[i] = sum(append(bytes.Clone(level[2*i]), level[2*i+1]...))
		}
	}
	return fmt.Sprintf("blake3-64k:%d:%s", len(disk), hex.EncodeToString(sum(binary.LittleEndian.AppendUint64(level[0], uint64(len(disk))))))
}

// memory is a disk with holes where holes says so, which has zeros there.
type memory struct {
	b     []byte
	holes extent.Set
}

func (m *memory) Size() int64 { return int64(len(m.b)) }

func (m *memory) Extents(_ context.Context, off, n int64) (list []extent.Extent, err error) {
	for at := off; at < off+n; {
		end := off + n
		kind := extent.Hole
		if gaps := m.holes.Missing(at, end-at); len(gaps) > 0 && gaps[0].Start == at {
			kind, end = extent.Data, gaps[0].End()
		} else if len(gaps) > 0 {
			end = gaps[0].Start
		}
		list = extent.Append(list, extent.Extent{Start: at, Length: end - at, Kind: kind})
		at = end
	}
	return list, nil
}

func (m *memory) ReadAtContext(_ context.Context, p []byte, off int64) (int, error) {
	return copy(p, m.b[off:]), nil
}

// random is a disk of some blocks, many of which are zeros.
func random(r *rand.Rand) *memory {
	m := &memory{b: make([]byte, r.IntN(40*Block))}
	if r.IntN(3) == 0 {
		m.b = m.b[:len(m.b)/Block*Block]
	}
	for at := 0; at < len(m.b); at += Block {
		switch end := min(at+Block, len(m.b)); r.IntN(3) {
		case 0:
			m.b[at+r.IntN(end-at)] = 1 + byte(r.IntN(255))
		case 1:
			m.holes.Add(int64(at), int64(end-at))
		}
	}
	return m
}

// of sums up a whole disk.
func of(ctx context.Context, d Disk) (string, error) {
	t := &Tree{}
	if err := t.Complete(ctx, d, d.Size()); err != nil {
		return "", err
	}
	return t.Sum(d.Size())
}

// However a disk is cut and in whatever order its parts come, written down and read
// again in between, its digest is what the definition says.
func TestDigest(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 0))
		m := random(r)
		want := naive(m.b)
		if got, err := of(t.Context(), m); err != nil || got != want {
			t.Fatalf("seed %d: %d bytes: got %s, %v; want %s", seed, len(m.b), got, err, want)
		}
		if n, err := Bytes(want); err != nil || n != m.Size() {
			t.Fatalf("%s: %d, %v", want, n, err)
		}
		var parts []extent.Range
		for at := 0; at < len(m.b); {
			n := min(Block*(1+r.IntN(9)), len(m.b)-at)
			parts = append(parts, extent.Range{Start: int64(at), Length: int64(n)})
			at += n
		}
		r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		twice := r.IntN(2) * r.IntN(len(parts)+1)
		parts = append(parts, parts[:twice]...)
		tree, batch := &Tree{}, &Tree{}
		for _, p := range parts {
			data := m.b[p.Start:p.End()]
			sums := Sums(p.Start, data)
			if len(bytes.Trim(data, "\x00")) == 0 && r.IntN(2) == 0 {
				sums = nil
			}
			if err := batch.Add(p.Start, p.Length, sums); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if r.IntN(3) == 0 {
				tree.Join(batch)
				batch = &Tree{}
			}
			if r.IntN(5) == 0 {
				back, err := Parse(tree.Append(nil))
				if err != nil || !slices.Equal(back.Missing(m.Size()), tree.Missing(m.Size())) {
					t.Fatalf("seed %d: %v", seed, err)
				}
				*tree = back
			}
		}
		tree.Join(batch)
		if gaps := tree.Missing(m.Size()); len(gaps) > 0 && twice == 0 {
			t.Fatalf("seed %d: missing %v", seed, gaps)
		}
		if err := tree.Complete(t.Context(), m, m.Size()); err != nil {
			t.Fatal(err)
		}
		if got, err := tree.Sum(m.Size()); err != nil || got != want {
			t.Fatalf("seed %d: in parts: got %s, %v; want %s", seed, got, err, want)
		}
		if n := len(tree.hashes); n > 12 {
			t.Errorf("seed %d: a whole tree of %d bytes keeps %d hashes", seed, len(m.b), n)
		}
	}
}

// What is written again counts, and what is forgotten is missing until it is read.
func TestChange(t *testing.T) {
	m := &memory{b: make([]byte, 33*Block+5)}
	for i := range m.b {
		m.b[i] = byte(i / 1000)
	}
	tree := &Tree{}
	if err := tree.Complete(t.Context(), m, m.Size()); err != nil {
		t.Fatal(err)
	}
	m.b[5*Block] ^= 1
	if err := tree.Add(5*Block, Block, Sums(5*Block, m.b[5*Block:6*Block])); err != nil {
		t.Fatal(err)
	}
	if _, err := tree.Sum(m.Size()); err == nil {
		t.Error("a digest of what is not known")
	}
	for _, gap := range tree.Missing(m.Size()) {
		if gap.Start <= 5*Block && gap.End() > 5*Block {
			t.Errorf("%v is missing, and it was told", gap)
		}
	}
	if err := tree.Complete(t.Context(), m, m.Size()); err != nil {
		t.Fatal(err)
	}
	if got, err := tree.Sum(m.Size()); err != nil || got != naive(m.b) {
		t.Errorf("got %s, %v; want %s", got, err, naive(m.b))
	}
	if _, err := tree.Sum(m.Size() - 6); err == nil {
		t.Error("a digest of a part of what is known")
	}
}

// Hashes that come from elsewhere must be those of the range.
func TestAddRefuses(t *testing.T) {
	tree := &Tree{}
	for _, err := range []error{
		tree.Add(1, Block, nil), tree.Add(0, 0, nil), tree.Add(-Block, Block, nil), tree.Add(1<<62, Block, nil),
		tree.Add(0, 3*Block, make([]Hash, 3)), tree.Add(0, Block, []Hash{}),
	} {
		if err == nil {
			t.Error("taken")
		}
	}
	if len(tree.hashes) > 0 {
		t.Errorf("kept %v", tree.hashes)
	}
}

// However scattered a disk is, a bounded number of hashes is kept.
func TestTrim(t *testing.T) {
	tree := &Tree{}
	for i := range int64(MaxNodes + 100) {
		if err := tree.Add(2*i*Block, Block, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := tree.Add(1<<40, 1<<30, nil); err != nil {
		t.Fatal(err)
	}
	tree.Trim()
	back, err := Parse(tree.Append(nil))
	if err != nil || len(back.hashes) != MaxNodes {
		t.Fatalf("%d hashes, %v", len(back.hashes), err)
	}
	if gaps := back.known.Missing(1<<40/Block, 1<<30/Block); len(gaps) > 0 {
		t.Errorf("the largest part is forgotten: %v", gaps)
	}
}

// A disk is compared with the digest of one that is as long, longer or shorter, and what
// lies behind, and in the last block, counts.
func TestCompare(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 1))
		m := random(r)
		text := naive(m.b)
		check := func(what string, change func(b []byte) []byte, want string) {
			t.Helper()
			d, err := Compare(t.Context(), &memory{b: change(bytes.Clone(m.b))}, text)
			if err != nil || !strings.HasPrefix(d.String(), want) {
				t.Errorf("seed %d, %d bytes, %s: %q, %v; want %q", seed, len(m.b), what, d, err, want)
			}
		}
		check("the same", func(b []byte) []byte { return b }, "it is the same")
		check("zeros follow", func(b []byte) []byte { return append(b, make([]byte, r.IntN(5*Block))...) }, "it is the same")
		check("something follows", func(b []byte) []byte { return append(b, append(make([]byte, 3*Block), 1)...) }, "behind its end")
		if len(m.b) > 0 {
			check("a byte is another", func(b []byte) []byte { b[r.IntN(len(b))] ^= 1; return b }, "its digest is blake3-64k:")
			check("it is empty", func([]byte) []byte { return nil }, "it has 0 bytes only")
			check("it is shorter", func(b []byte) []byte { return b[:len(b)-1] }, "it has ")
		}
		if len(m.b)%Block > 0 && len(m.b)%Block < Block-1 {
			check("something follows in the last block", func(b []byte) []byte { return append(b, 1) }, "its digest is ")
		}
	}
}

// Petabytes of nothing cost nothing.
func TestHoles(t *testing.T) {
	const size = 1 << 60
	tree := &Tree{}
	if err := tree.Add(0, size, nil); err != nil {
		t.Fatal(err)
	}
	want := blake3.Sum256(binary.LittleEndian.AppendUint64(zeros[44][:], size))
	if got, err := tree.Sum(size); err != nil || got != fmt.Sprintf("blake3-64k:%d:%x", int64(size), want) {
		t.Errorf("got %s, %v", got, err)
	}
}

func TestBytes(t *testing.T) {
	digits := strings.Repeat("0", 64)
	for _, text := range []string{"", "blake3-64k:", "sha256:" + digits, "blake3-64k:" + digits, "blake3-64k:-1:" + digits, "blake3-64k:01:" + digits, "blake3-64k:9223372036854775807:" + digits,
		"blake3-64k:1:" + digits[1:], "blake3-64k:1:" + strings.Repeat("A", 64), "blake3-64k:1:" + digits + ":"} {
		if _, err := Bytes(text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

func FuzzParse(f *testing.F) {
	tree := &Tree{}
	_ = tree.Add(0, 5*Block, make([]Hash, 2))
	f.Add(tree.Append(nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		tree, err := Parse(data)
		if err != nil {
			return
		}
		back, err := Parse(tree.Append(nil))
		if err != nil || !slices.Equal(back.Missing(1<<62), tree.Missing(1<<62)) {
			t.Errorf("%x comes back as another: %v", data, err)
		}
		_, _ = tree.Sum(1 << 40)
	})
}
