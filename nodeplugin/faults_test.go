package nodeplugin

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/test/peers"
)

// long tells whether there is time for many rounds.
var long = os.Getenv("LONGSHORE_LONG") != ""

// imageKinds are what a disk is served as. command makes $1 of the raw disk $0.
var imageKinds = []struct {
	name, command string
	ranges        bool // what the server has
	// again is how many bytes a mover may read beside what is not recorded yet:
	// metadata, pieces that are whole only together; -1 is the whole file.
	again int64
	// checksum: the file's is named.
	checksum bool
}{
	{"raw", `cp "$0" "$1"`, true, mib, false},
	{"qcow2", `qemu-img convert -c -O qcow2 "$0" "$1"`, true, 3 * mib, false},
	{"vmdk streamOptimized", `qemu-img convert -O vmdk -o subformat=streamOptimized "$0" "$1"`, true, 3 * mib, false},
	{"vhdx", `qemu-img convert -O vhdx -o block_size=1M "$0" "$1"`, true, 3 * mib, false},
	{"raw.xz in blocks", `xz -0 -T2 --block-size=4MiB -c "$0" >"$1"`, true, 12 * mib, false},
	{"raw.gz", `gzip -1 -c "$0" >"$1"`, true, -1, false},
	{"raw.zst", `zstd -1 -q -c "$0" >"$1"`, true, -1, false},
	{"raw without ranges", `cp "$0" "$1"`, false, -1, false},
	{"raw.gz without ranges", `gzip -1 -c "$0" >"$1"`, false, -1, false},
	{"qcow2 without ranges", `qemu-img convert -O qcow2 "$0" "$1"`, false, -1, false},
	{"raw with a checksum", `cp "$0" "$1"`, true, -1, true},
	{"qcow2 with a checksum", `qemu-img convert -c -O qcow2 "$0" "$1"`, true, -1, true},
	{"vmdk in the spool", `qemu-img convert -O vmdk -o subformat=streamOptimized "$0" "$1"`, false, -1, false},
}

// misfortunes are what may happen to an import.
var misfortunes = []struct {
	name string
	// ranged: it takes a server with ranges.
	ranged bool
	// reason is what the Filler is to tell of it; "": the source itself copes.
	reason string
	// strike prepares it and returns what is to be done while the import runs.
	strike func(x *trial) (during func())
	// minutes: it takes long; a few kinds of image must do when there is no time.
	minutes bool
}{
	{"mover killed", false, fault.MoverDied, moverKilled, false},
	{"power cut", false, "", powerCut, false},
	{"connections cut", false, "", connectionsCut, false},
	{"file changes", false, fault.SourceChanged, fileChanges, false},
	{"200 to a range", true, "", func(x *trial) func() { return x.answer(wholeAtFirst, wholeAtFirst) }, false},
	{"416", true, fault.SourceChanged, func(x *trial) func() { return x.answer(peers.Status(416, "Content-Range: bytes */1")) }, false},
	{"429 and 503", false, "", busyServer, false},
	{"signed URLs expire", false, "", signedURLs, false},
	{"no space", false, fault.NoSpace, writesFail(syscall.ENOSPC), false},
	{"writes fail", false, fault.TargetError, writesFail(syscall.EIO), false},
	{"flush fails", false, fault.TargetError, flushFails, false},
	{"server stalls", false, "", func(x *trial) func() { return x.answer(peers.Stall(int(x.random(64 << 10)))) }, true},
}

// Whatever happens in the middle of an import, the volume in the end holds the
// disk, what was recorded is neither read nor written again, and nothing is left.
func TestMisfortunes(t *testing.T) {
	const size = 40 * mib
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir) // of the trials too
	type content struct{ disk, file string }
	disks := []string{noise(t, 21, size), noise(t, 22, size)}
	images := map[string][2]content{}
	for _, k := range imageKinds {
		var both [2]content
		for i, disk := range disks {
			both[i] = content{disk, filepath.Join(t.TempDir(), "image")}
			if out, err := exec.Command("sh", "-c", k.command, disk, both[i].file).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", k.command, err, out)
			}
		}
		images[k.name] = both
	}
	table := &table{}
	t.Run("import", func(t *testing.T) {
		for i, m := range misfortunes {
			for j, k := range imageKinds {
				// Without time each misfortune meets a third of the kinds, another one each.
				if m.ranged && !k.ranges || k.checksum && m.name == "file changes" || !long && ((i+j)%3 != 0 || m.minutes && (i+j)%6 != 0) {
					continue
				}
				rounds := 1
				if long && !m.minutes {
					rounds = 10
				}
				for round := range rounds {
					t.Run(fmt.Sprintf("%s/%s/%d", m.name, k.name, round), func(t *testing.T) {
						t.Parallel()
						both := images[k.name]
						x := newTrial(t, uint64(round), both[0].file, size)
						x.second, x.ranges, x.again, x.reason, x.restarts = both[1].file, k.ranges, k.again, m.reason, m.reason == fault.SourceChanged
						if k.checksum {
							x.job.Recipe.Checksum = fmt.Sprintf("sha256:%x", sha256.Sum256(read(t, both[0].file)))
						}
						x.onDisk()
						x.plan(func(int64, *http.Request) peers.Misdeed { return nil })
						defer table.add(m.name, k.name, x)
						during := m.strike(x)
						x.begin()
						if during != nil {
							during()
						}
						x.ok()
						want := both[0].disk
						if x.changed {
							want = both[1].disk
						}
						equal(t, x.job.Target, want)
						x.identical = true
						x.check()
					})
				}
			}
		}
	})
	groups, err := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/*/longshore-sandbox-%d-*", os.Getpid()))
	must(t, err)
	if left, movers := append(leftOf(t, dir), groups...), movers(t, os.Getpid()); len(left)+len(movers) > 0 {
		t.Errorf("left behind: %v, movers %v", left, movers)
	}
	t.Logf("\n%s", table)
}

// table is what a long run ends with.
type table struct {
	mu   sync.Mutex
	rows []string
}

func (b *table) add(misfortune, kind string, x *trial) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rows = append(b.rows, fmt.Sprintf("%s\t%s\t%d\t%d\t%v\t%.1f\t%.1f\t%d",
		misfortune, kind, x.struck, x.movers, x.identical, float64(x.file)/mib, float64(x.web.sent.Load())/mib, x.rewritten))
}

func (b *table) String() string {
	var s strings.Builder
	w := tabwriter.NewWriter(&s, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "misfortune\timage\ttimes\tmovers\tidentical\tMiB of file\tMiB sent\tbytes written again")
	slices.Sort(b.rows)
	for _, row := range b.rows {
		fmt.Fprintln(w, row)
	}
	w.Flush()
	return s.String()
}

// trial is one import that something happens to.
type trial struct {
	*running
	t      *testing.T
	web    *web
	disk   *peers.Disk
	filler *Filler
	job    Job
	file   int64  // bytes of the image's file
	second string // another content, as the same kind of image
	ranges bool
	again  int64
	reason string // that is to be told
	// restarts: it may begin again, once.
	restarts  bool
	identical bool
	spools    atomic.Int32 // that were made and are not closed

	mu        sync.Mutex
	rnd       *rand.Rand
	struck    int        // how often it has happened
	changed   bool       // the second content is the right one
	movers    int        // that have ended
	mark      int64      // what was sent when the last one ended ...
	recorded  extent.Set // ... and what was recorded then
	rewritten int64      // bytes of that
	lost      int64      // the most that one was sent and was not recorded
	reasons   []string
}

// inSockets is how much more than was read the server may have sent: to a mover that
// was killed, or wanted the first bytes only and got the file.
const inSockets = 8 * mib

func newTrial(t *testing.T, seed uint64, path string, size int64) *trial {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	x := &trial{t: t, web: serveFile(t, path), filler: newFiller(t), file: info.Size(), ranges: true, again: mib, rnd: rand.New(rand.NewPCG(seed, 1))}
	x.job = volume(t, t.TempDir(), size, x.web.url())
	x.job.Spool = func() (Spool, error) {
		f, err := os.Create(filepath.Join(filepath.Dir(path), "spool"))
		if err == nil {
			err = errors.Join(f.Truncate(size), os.Remove(f.Name()))
		}
		x.spools.Add(1)
		return spoolFile{f, size, &x.spools}, err
	}
	x.filler.Launcher.Ended = x.ended
	return x
}

// spoolFile is room for one image.
type spoolFile struct {
	file  *os.File
	bytes int64
	open  *atomic.Int32
}

func (s spoolFile) Files() []*os.File { return []*os.File{s.file} }
func (s spoolFile) Bytes() int64      { return s.bytes }
func (s spoolFile) Close()            { s.file.Close(); s.open.Add(-1) }

// onDisk has it write to a disk that may fail.
func (x *trial) onDisk() {
	x.disk = peers.NewDisk(x.t, x.job.TargetBytes)
	target, err := os.OpenFile(x.disk.Path, os.O_RDWR, 0)
	if err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(func() { target.Close() })
	x.job.Target = target
	x.hook(nil, nil)
}

// begin starts the import, or goes on with it.
func (x *trial) begin() { x.running = fill(x.t, x.filler, x.job) }

// ended looks at what a mover has done.
func (x *trial) ended(mover.Usage) {
	j := recorded(x.t, x.job)
	x.mu.Lock()
	defer x.mu.Unlock()
	sent, most := x.web.sent.Load(), x.file
	if x.again >= 0 && !x.restarts {
		most = min(most, x.job.TargetBytes-x.recorded.Bytes())
	}
	most += max(x.again, 0) + inSockets
	got, recorded := sent-x.mark, x.recorded.Bytes()
	if got > most {
		x.t.Errorf("mover %d was sent %d bytes, with %d of the disk recorded before: want at most %d", x.movers+1, got, recorded, most)
	}
	x.lost = max(x.lost, got-(j.Done.Bytes()-recorded))
	x.movers++
	x.mark, x.recorded = sent, j.Done
}

// hook sets what the disk does; that nothing recorded is written again is looked at
// all the while.
func (x *trial) hook(write, flush func() error) {
	x.disk.Hook(peers.DiskHooks{
		Write: func(off, n int64) error {
			x.mu.Lock()
			defer x.mu.Unlock()
			if !x.restarts {
				x.rewritten += x.recorded.Intersect(off, n).Bytes()
			}
			if write == nil {
				return nil
			}
			return write()
		},
		Flush: flush,
	})
}

// small are requests for the first bytes or for metadata.
const small = 64 << 10

// plan sets what the server does of a request for so many bytes.
func (x *trial) plan(plan func(bytes int64, r *http.Request) peers.Misdeed) {
	x.web.mu.Lock()
	defer x.web.mu.Unlock()
	x.web.plan = func(_ int, r *http.Request) peers.Misdeed {
		bytes := x.file
		var first, last int64
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last); err == nil {
			bytes = last - first + 1
		}
		if !x.ranges {
			r.Header.Del("Range")
		}
		x.mu.Lock()
		defer x.mu.Unlock()
		return plan(bytes, r)
	}
}

// answer has requests for content, in the middle of the file, answered so.
func (x *trial) answer(how ...peers.Misdeed) func() {
	var middle int64
	if x.ranges {
		middle = x.file/3 + x.random(x.file/3)
	}
	x.plan(func(bytes int64, _ *http.Request) peers.Misdeed {
		if bytes <= small || x.struck == len(how) || x.web.sent.Load() < middle {
			return nil
		}
		x.struck++
		return how[x.struck-1]
	})
	return nil
}

// random is a number below n. Hooks and plans, which hold the lock, use rnd.
func (x *trial) random(n int64) int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.rnd.Int64N(n)
}

func (x *trial) happened() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.struck++
}

// check looks at the whole when the import has come to its end.
func (x *trial) check() {
	x.t.Helper()
	for len(x.reports) > 0 {
		if p := <-x.reports; p.Phase == PhaseRetrying {
			x.reasons = append(x.reasons, p.Reason)
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.struck == 0 {
		x.t.Error("nothing happened to the import")
	}
	if x.reason != "" && !slices.Contains(x.reasons, x.reason) {
		x.t.Errorf("the faults %v were told, want %s among them", x.reasons, x.reason)
	}
	if x.rewritten > 0 {
		x.t.Errorf("%d bytes that were recorded were written again", x.rewritten)
	}
	j := recorded(x.t, x.job)
	if !j.Complete || j.Restarts > 1 || j.Restarts > 0 && !x.restarts {
		x.t.Errorf("the journal is complete: %v, after %d restarts", j.Complete, j.Restarts)
	}
	if n := x.spools.Load(); n != 0 {
		x.t.Errorf("%d spools are still there", n)
	}
	if names, err := os.ReadDir(filepath.Dir(x.job.Journal)); err != nil || len(names) != 2 {
		x.t.Errorf("beside the journal: %v, %v", names, err)
	}
}

// after waits until so many more bytes were sent, and lets few more than that be sent.
func (x *trial) after(n int64) {
	x.t.Helper()
	n += x.web.sent.Load()
	x.web.holdAt(n - x.web.sent.Load() + mib)
	x.await("more is sent", func() bool { return x.web.sent.Load() >= n })
}

// await waits for a condition.
func (x *trial) await(what string, is func() bool) {
	x.t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		select {
		case <-x.done:
			x.t.Fatalf("the import ended before %s: %v", what, x.err)
		default:
		}
		if time.Now().After(end) {
			x.t.Fatalf("waited a minute until %s", what)
		}
	}
}

// kill kills the import's mover; false without one.
func (x *trial) kill() bool {
	own, err := x.job.Target.Stat()
	if err != nil {
		x.t.Fatal(err)
	}
	for _, pid := range movers(x.t, os.Getpid()) {
		if target, err := os.Stat(fmt.Sprintf("/proc/%d/fd/4", pid)); err == nil && os.SameFile(own, target) {
			return unix.Kill(pid, unix.SIGKILL) == nil
		}
	}
	return false
}

func moverKilled(x *trial) func() {
	return func() {
		for range 3 {
			x.after(x.file/8 + x.random(x.file/8))
			x.killed()
		}
		x.web.holdAt(-1)
	}
}

// killed kills the mover and waits until that is noticed.
func (x *trial) killed() {
	x.t.Helper()
	x.await("a mover is killed", x.kill)
	x.happened()
	x.told()
}

// told waits for the next fault that the Filler tells.
func (x *trial) told() {
	x.t.Helper()
	p := x.until("a fault is told", func(p Progress) bool { return p.Phase == PhaseRetrying })
	x.reasons = append(x.reasons, p.Reason)
}

// However often the mover of one import is killed, at moments of all kinds, the
// volume is filled, and little is read again each time.
func TestMoverKilledAtRandomMoments(t *testing.T) {
	size, kills := int64(160*mib), 10
	if long {
		size, kills = 1<<30, 200
	}
	path := noise(t, 2, size)
	seed := rand.Uint64()
	t.Log("seed", seed)
	x := newTrial(t, seed, path, size)
	x.reason = fault.MoverDied
	x.begin()
	done, fruitless := int64(0), 0
	for left := kills; left > 0; left-- {
		switch {
		case fruitless == mostDeaths-1: // one more would be the end
			x.web.holdAt(16 * mib)
			x.until("progress", func(p Progress) bool { return copying(p) && p.BytesDone > done })
		case left%10 > 0: // else while the walls are built
			// Early at first, so that there is enough for the kills that are left.
			moment := x.random(2*(size-done)/int64(left+kills/4)) << fruitless
			x.after(min(moment, (size-done)/2))
		}
		x.killed()
		if now := recorded(t, x.job).Done.Bytes(); now > done {
			done, fruitless = now, 0
		} else {
			fruitless++
		}
	}
	x.web.holdAt(-1)
	x.ok()
	equal(t, x.job.Target, path)
	x.check()
	t.Logf("%d kills: %.1f MiB sent for an image of %d MiB, at most %.1f MiB lost by one", x.struck, float64(x.web.sent.Load())/mib, size/mib, float64(x.lost)/mib)
	if x.lost > perKill {
		t.Errorf("a kill cost %d bytes, want at most %d", x.lost, perKill)
	}
}

func powerCut(x *trial) func() {
	return func() {
		for i := range 3 {
			x.after(x.file/8 + x.random(x.file/8))
			if i == 1 { // so much that pieces are complete, however many are on their way
				x.after(x.file / 3)
				x.await("something is recorded, or spooled", func() bool {
					return recorded(x.t, x.job).Done.Len() > 0 || x.spools.Load() > 0
				})
			}
			x.cancel()
			<-x.done
			x.disk.CutPower(i%2 == 0)
			x.happened()
			x.begin()
		}
		x.web.holdAt(-1)
	}
}

func connectionsCut(x *trial) func() {
	most := 8
	if !x.ranges {
		most = 2
	}
	x.plan(func(bytes int64, _ *http.Request) peers.Misdeed {
		if bytes <= small || x.struck == most || x.ranges && x.rnd.IntN(3) > 0 {
			return nil
		}
		x.struck++
		return peers.Cut(int(x.rnd.Int64N(bytes)))
	})
	return nil
}

// wholeAtFirst answers with the beginning of the whole file.
func wholeAtFirst(w http.ResponseWriter, r *http.Request, well http.Handler) {
	r.Header.Del("Range")
	peers.Cut(64<<10)(w, r, well)
}

func busyServer(x *trial) func() {
	return x.answer(peers.Status(429, "Retry-After: 1"), peers.Status(503, "Retry-After: "+time.Now().Add(time.Second).UTC().Format(http.TimeFormat)))
}

// signedURLs has the file behind a redirect to URLs that expire after some uses.
func signedURLs(x *trial) func() {
	uses := 8
	if !x.ranges {
		uses = 1
	}
	var left []int
	x.plan(func(_ int64, r *http.Request) peers.Misdeed {
		var i int
		if _, err := fmt.Sscanf(r.URL.Path, "/signed/%d", &i); err != nil {
			left = append(left, uses)
			return peers.Status(302, fmt.Sprintf("Location: /signed/%d", len(left)-1))
		}
		if left[i]--; left[i] < 0 {
			x.struck++
			return peers.Status(403)
		}
		return nil
	})
	return nil
}

func fileChanges(x *trial) func() {
	return func() {
		x.after(x.file/4 + x.random(x.file/2))
		x.web.change(x.second, `"2"`)
		x.mu.Lock()
		x.changed = true
		x.struck++
		x.mu.Unlock()
		if !x.ranges { // who reads on gets the first content to its end
			x.await("the mover is killed", x.kill)
			x.told()
			if recorded(x.t, x.job).Validator == nil { // it was spooled still: nobody knows the first one
				x.reason = ""
			}
		}
		x.web.holdAt(-1)
	}
}

// fails returns a hook that answers with an error from the n-th call on.
func (x *trial) fails(n int64, err error) func() error {
	return func() error {
		if n--; n >= 0 {
			return nil
		}
		x.struck++
		return err
	}
}

// writesFail has the disk take no write, from one on until that is told.
func writesFail(err error) func(x *trial) func() {
	return func(x *trial) func() {
		x.hook(x.fails(x.random(40), err), nil)
		return func() {
			x.told()
			x.hook(nil, nil)
		}
	}
}

// flushFails has one flush fail, with what that loses.
func flushFails(x *trial) func() {
	fails := x.fails(x.random(2), syscall.EIO)
	x.hook(nil, func() error {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.struck > 0 {
			return nil
		}
		return fails()
	})
	return nil
}
