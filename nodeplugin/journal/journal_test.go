package journal_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/journal"
)

// saver is the argument that turns the test binary into the program that is
// killed while it saves.
const saver = "journal-saver"

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == saver {
		saveForEver(os.Args[2])
	}
	os.Exit(m.Run())
}

// random returns a journal as a transfer may leave it.
func random(r *rand.Rand) *journal.Journal {
	bytes := 1 + r.Int64N(1<<uint(10+r.IntN(40)))
	j := &journal.Journal{
		Target: fmt.Sprintf("pvc-%x", r.Uint64()), Recipe: fmt.Sprintf("%x", r.Uint64()), Bytes: bytes,
		Validator: json.RawMessage(fmt.Sprintf(`{"size":%d}`, r.Int64())),
		Format:    "qcow2", VirtualBytes: bytes, Restarts: r.IntN(2), Read: r.Int64(), Soiled: r.IntN(2) == 0, Zeroed: r.IntN(2) == 0, Complete: r.IntN(2) == 0,
	}
	for range r.IntN(200) {
		start := r.Int64N(bytes)
		j.Done.Add(start, 1+r.Int64N(bytes-start))
		if r.IntN(4) == 0 {
			start := r.Int64N(bytes)
			j.Done.Subtract(start, 1+r.Int64N(bytes-start))
		}
	}
	return j
}

func same(t *testing.T, got, want *journal.Journal) {
	t.Helper()
	if !got.Done.Equal(want.Done) {
		t.Fatalf("done: got %v, want %v", got.Done.Ranges(), want.Done.Ranges())
	}
	g, w := *got, *want
	g.Done, w.Done = extent.Set{}, extent.Set{}
	if !reflect.DeepEqual(g, w) {
		t.Fatalf("got %+v, want %+v", g, w)
	}
}

func TestWhatIsSavedIsLoaded(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	path := filepath.Join(t.TempDir(), "journal")
	for range 60 {
		want := random(r)
		if err := want.Save(path); err != nil {
			t.Fatal(err)
		}
		got, err := journal.Load(path, want.Target, want.Recipe, want.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		same(t, got, want)
	}
}

func TestEveryDamageIsFound(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 60 {
		data, err := random(r).Encode()
		if err != nil {
			t.Fatal(err)
		}
		for range 60 {
			bad := append([]byte(nil), data...)
			switch r.IntN(3) {
			case 0:
				bad[r.IntN(len(bad))] ^= 1 << r.IntN(8)
			case 1:
				bad = bad[:r.IntN(len(bad))]
			case 2:
				bad = append(bad, byte(r.IntN(256)))
			}
			if j, err := journal.Decode(bad); err == nil {
				t.Fatalf("damaged bytes were taken for %+v", j)
			}
		}
	}
}

func FuzzDecode(f *testing.F) {
	data, err := random(rand.New(rand.NewPCG(5, 6))).Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		j, err := journal.Decode(data)
		if err != nil {
			return
		}
		for _, r := range j.Done.Ranges() {
			if r.Start < 0 || r.End() > j.Bytes {
				t.Errorf("range %v outside %d bytes", r, j.Bytes)
			}
		}
	})
}

func FuzzParseRanges(f *testing.F) {
	f.Add([]byte{0, 1, 5, 200, 1}, int64(1<<20))
	f.Fuzz(func(t *testing.T, data []byte, bytes int64) {
		set, err := journal.ParseRanges(data, bytes)
		if err != nil {
			return
		}
		for _, r := range set.Ranges() {
			if r.Start < 0 || r.Length <= 0 || r.End() > bytes {
				t.Fatalf("range %v outside %d bytes", r, bytes)
			}
		}
		again, err := journal.ParseRanges(journal.AppendRanges(nil, set), bytes)
		if err != nil || !again.Equal(set) {
			t.Errorf("got %v, %v, want %v", again.Ranges(), err, set.Ranges())
		}
	})
}

func TestForeignJournalIsDiscardedAndSaidSo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := &journal.Journal{Target: "a", Recipe: "r", Bytes: 4096, VirtualBytes: 4096}
	j.Done.Add(0, 4096)
	if err := j.Save(path); err != nil {
		t.Fatal(err)
	}
	damaged := filepath.Join(t.TempDir(), "damaged")
	if err := os.WriteFile(damaged, []byte("not a journal, but long enough for its head"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name, path, target, recipe string
		bytes                      int64
		reason                     string
	}{
		{"another target", path, "b", "r", 4096, `of target "a"`},
		{"another source", path, "a", "s", 4096, "another source"},
		{"another size", path, "a", "r", 8192, "of 4096 bytes"},
		{"not a journal", damaged, "a", "r", 4096, "no journal"},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := journal.Load(row.path, row.target, row.recipe, row.bytes)
			var discarded *journal.Discarded
			if !errors.As(err, &discarded) || !strings.Contains(discarded.Reason, row.reason) {
				t.Fatalf("got error %v, want one that says %q", err, row.reason)
			}
			same(t, got, &journal.Journal{Target: row.target, Recipe: row.recipe, Bytes: row.bytes, VirtualBytes: -1, Soiled: true})
		})
	}
}

func TestNoJournalIsAFreshOne(t *testing.T) {
	got, err := journal.Load(filepath.Join(t.TempDir(), "journal"), "a", "r", 4096)
	if err != nil {
		t.Fatal(err)
	}
	same(t, got, &journal.Journal{Target: "a", Recipe: "r", Bytes: 4096, VirtualBytes: -1})
}

func TestRemoveTakesAllAndMayBeRepeated(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "journal")
	j := &journal.Journal{Target: "a", Bytes: 1}
	if err := j.Save(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".tmp", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := journal.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// A scattered set is cut to a subset with as many bytes as any choice of n
// ranges can have.
func TestLargestLosesTheFewestBytes(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 200 {
		set := random(r).Done
		n := 1 + r.IntN(20)
		cut := journal.Largest(set, n)
		if cut.Len() > n {
			t.Fatalf("%d ranges, want at most %d", cut.Len(), n)
		}
		var shortest int64 = 1 << 62
		for _, k := range cut.Ranges() {
			if !set.Contains(k.Start, k.Length) {
				t.Fatalf("%v is not of the set", k)
			}
			shortest = min(shortest, k.Length)
		}
		for _, k := range set.Ranges() {
			if !cut.Contains(k.Start, k.Length) && k.Length > shortest {
				t.Fatalf("lost %v while one of %d bytes was kept", k, shortest)
			}
		}
	}
}

func TestFileIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	const bytes = 1 << 50
	var ranges []extent.Range
	for i := range int64(2 * journal.MaxRanges) {
		ranges = append(ranges, extent.Range{Start: i << 20, Length: 1 + i%65536})
	}
	j := &journal.Journal{Target: "a", Bytes: bytes, Done: extent.NewSet(ranges...)}
	if err := j.Save(path); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > journal.MaxBytes {
		t.Errorf("%d bytes, want at most %d", info.Size(), journal.MaxBytes)
	}
	got, err := journal.Load(path, "a", "", bytes)
	if err != nil {
		t.Fatal(err)
	}
	same(t, got, j)
	if got.Done.Len() != journal.MaxRanges {
		t.Errorf("%d ranges, want %d", got.Done.Len(), journal.MaxRanges)
	}
}

// saveForEver saves journals of which each is consistent in itself: Read is n,
// and the first n bytes are done. A line on stdout follows each.
func saveForEver(path string) {
	for n := int64(1); ; n++ {
		j := &journal.Journal{Target: "a", Bytes: 1 << 40, Read: n}
		j.Done.Add(0, n)
		for i := range n % 1000 {
			j.Done.Add(1<<30+i*8192, 4096)
		}
		if err := j.Save(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(n)
	}
}

func TestKilledWhileSaving(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	r := rand.New(rand.NewPCG(9, 10))
	for range 30 {
		cmd := exec.Command("/proc/self/exe", saver, path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// The number of bytes read decides when the kill comes: after some
		// saves, and anywhere in the next.
		said := make([]byte, 1+r.IntN(300))
		var n int
		for n < len(said) {
			m, err := out.Read(said[n:])
			if err != nil {
				t.Fatal(err)
			}
			n += m
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()

		lines := strings.Split(string(said[:n]), "\n")
		var acknowledged int64
		if len(lines) > 1 {
			fmt.Sscan(lines[len(lines)-2], &acknowledged)
		}
		j, err := journal.Load(path, "a", "", 1<<40)
		if err != nil {
			t.Fatalf("killed after save %d: %v", acknowledged, err)
		}
		if j.Read < acknowledged || !j.Done.Contains(0, j.Read) || j.Done.Contains(0, j.Read+1) || j.Done.Len() != 1+int(j.Read%1000) {
			t.Fatalf("killed after save %d: the journal says %d and has %d ranges", acknowledged, j.Read, j.Done.Len())
		}
	}
}
