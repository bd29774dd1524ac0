package nodeplugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/broker"
	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/blank"
	"github.com/longshore-io/longshore/nodeplugin/source/httpsrc"
	"github.com/longshore-io/longshore/test/peers"
)

const mib = 1 << 20

// fillerArg makes the test binary a node plugin that fills one volume.
const fillerArg = "node-plugin-that-fills"

// A mover is this very program started again, whose other tests have a TestMain
// of their own; what the program is must be settled before that.
func init() {
	if len(os.Args) < 2 {
		return
	}
	switch os.Args[1] {
	case mover.Subcommand:
		os.Exit(mover.Main(source.Kinds{httpsrc.Kind, blank.Kind, spy, hog}))
	case fillerArg:
		fillAsOtherProcess(os.Args[2:])
	}
}

// web is a file server that counts what it sends, and that can be stopped.
type web struct {
	t    testing.TB
	addr string
	sent atomic.Int64

	mu       sync.Mutex
	file     string
	etag     string
	modified time.Time
	hold     int64 // no more than so many bytes are sent; -1 for all
	freed    chan struct{}
	server   *http.Server
	auth     string
	requests int
	plan     func(n int, r *http.Request) peers.Misdeed // as peers.Faulty has it
}

func serveFile(t testing.TB, path string) *web {
	w := &web{t: t, addr: "127.0.0.1:0", file: path, etag: `"1"`, modified: time.Unix(1e9, 0), hold: -1, freed: make(chan struct{})}
	w.start()
	t.Cleanup(w.stop)
	return w
}

func (w *web) start() {
	w.t.Helper()
	l, err := net.Listen("tcp4", w.addr)
	if err != nil {
		w.t.Fatal(err)
	}
	w.addr = l.Addr().String()
	w.server = &http.Server{Handler: w}
	go w.server.Serve(l)
}

// stop breaks every connection.
func (w *web) stop() { w.server.Close() }

func (w *web) url() string { return "http://" + w.addr + "/disk.img" }

// change makes it serve another content.
func (w *web) change(path, etag string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.file, w.etag = path, etag
}

// holdAt lets it send n bytes more than so far and then wait; -1 lets it go on.
func (w *web) holdAt(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n >= 0 {
		n += w.sent.Load()
	}
	w.hold = n
	close(w.freed)
	w.freed = make(chan struct{})
}

func (w *web) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	w.requests++
	n, path, etag, modified, auth, plan := w.requests, w.file, w.etag, w.modified, w.auth, w.plan
	w.mu.Unlock()
	if auth != "" && r.Header.Get("Authorization") != auth {
		rw.WriteHeader(http.StatusUnauthorized)
		return
	}
	f, err := os.Open(path)
	if err != nil {
		http.NotFound(rw, r)
		return
	}
	defer f.Close()
	well := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if etag != "" {
			rw.Header().Set("ETag", etag)
		}
		http.ServeContent(rw, r, "disk.img", modified, f)
	})
	c := &counter{rw, w, r.Context()}
	if plan != nil {
		if do := plan(n, r); do != nil {
			do(c, r, well)
			return
		}
	}
	well.ServeHTTP(c, r)
}

// counter hides ReaderFrom, so that every byte is seen.
type counter struct {
	http.ResponseWriter
	w   *web
	ctx context.Context
}

func (c *counter) Write(p []byte) (int, error) {
	for {
		c.w.mu.Lock()
		hold, freed := c.w.hold, c.w.freed
		c.w.mu.Unlock()
		if hold < 0 || c.w.sent.Load() < hold {
			break
		}
		select {
		case <-freed:
		case <-c.ctx.Done():
			return 0, c.ctx.Err()
		}
	}
	n, err := c.ResponseWriter.Write(p)
	c.w.sent.Add(int64(n))
	return n, err
}

func (c *counter) Flush() { c.ResponseWriter.(http.Flusher).Flush() }

// noise writes a file of random bytes that begins as no image does, with a hole
// in each 16 MiB.
func noise(t testing.TB, seed byte, size int64) string {
	t.Helper()
	return specks(t, seed, size, 15)
}

// specks is noise of which only the first full MiB of each 16 hold data; the
// others take no room on the disk.
func specks(t testing.TB, seed byte, size int64, full int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), fmt.Sprintf("noise-%d", seed))
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rnd := rand.NewChaCha8([32]byte{seed})
	buf := make([]byte, mib)
	for off := int64(0); off < size; off += mib {
		rnd.Read(buf)
		if off == 0 {
			copy(buf[510:], "\x55\xaa") // a boot sector
		}
		if off/mib%16 >= full {
			continue
		}
		if _, err := f.WriteAt(buf[:min(mib, size-off)], off); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return path
}

// volume is an empty file of size bytes, and a journal's path, in dir.
func volume(t testing.TB, dir string, size int64, url string) Job {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "data.raw"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return Job{Volume: "pvc-1", Owner: "a", Target: f, TargetBytes: size, KnownZero: true, Recipe: httpRecipe(t, httpsrc.Params{URL: url}), Journal: filepath.Join(dir, "journal")}
}

func httpRecipe(t testing.TB, p httpsrc.Params) Recipe {
	t.Helper()
	params, err := p.Reveal()
	if err != nil {
		t.Fatal(err)
	}
	return Recipe{Source: source.Spec{Kind: "http", Params: params}, Digest: "recipe"}
}

// newFiller is a Filler that may connect to this machine and does not wait long.
func newFiller(t testing.TB) *Filler {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	if t, ok := t.(*testing.T); ok {
		log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	return &Filler{Policy: broker.AllowAll(), Backoff: time.Millisecond, MaxBackoff: 20 * time.Millisecond, Log: log}
}

// equal checks that the target has the file's bytes, and zeros behind.
func equal(t testing.TB, target *os.File, path string) {
	t.Helper()
	want, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer want.Close()
	got, err := os.Open(target.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	a, b := make([]byte, mib), make([]byte, mib)
	for off := int64(0); ; off += mib {
		n, err := io.ReadFull(got, a)
		if err == io.EOF {
			return
		}
		clear(b)
		if _, err := io.ReadFull(want, b); err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
			t.Fatal(err)
		}
		if !bytes.Equal(a[:n], b[:n]) {
			for i := range n {
				if a[i] != b[i] {
					t.Fatalf("byte %d is %#x, want %#x", off+int64(i), a[i], b[i])
				}
			}
		}
	}
}

// movers returns the movers that this process, or the given one, has.
func movers(t testing.TB, parent int) []int {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(data), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 2 || fields[0] == "Z" || fields[1] != strconv.Itoa(parent) {
			continue
		}
		line, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		if args := strings.Split(string(line), "\x00"); len(args) > 1 && args[1] == mover.Subcommand {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// filling of a volume in the background.
type running struct {
	t       testing.TB
	job     Job
	cancel  context.CancelFunc
	reports chan Progress
	done    chan struct{}
	result  Result
	err     error
}

func fill(t testing.TB, f *Filler, job Job) *running {
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{t: t, job: job, cancel: cancel, reports: make(chan Progress, 1<<16), done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.result, r.err = f.Fill(ctx, job, func(p Progress) { r.reports <- p })
	}()
	t.Cleanup(func() { cancel(); <-r.done })
	return r
}

// until waits for a report.
func (r *running) until(what string, is func(Progress) bool) Progress {
	r.t.Helper()
	deadline := time.After(2 * time.Minute)
	for {
		select {
		case p := <-r.reports:
			if is(p) {
				return p
			}
		case <-r.done:
			r.t.Fatalf("the filling ended before %s: %v", what, r.err)
		case <-deadline:
			r.t.Fatalf("no %s within two minutes", what)
		}
	}
}

// ok waits for the end, which is to be a good one: whatever came to pass, the digest is
// that of what the volume holds.
func (r *running) ok() Result {
	r.t.Helper()
	<-r.done
	if r.err != nil {
		r.t.Fatal(r.err)
	}
	if sum := sumOf(r.t, r.job.Target, r.result.VirtualSize); r.result.Digest != sum {
		r.t.Errorf("the digest is %s and the volume's %s", r.result.Digest, sum)
	}
	return r.result
}

// sumOf is the digest of the first bytes of a file.
func sumOf(t testing.TB, f *os.File, size int64) string {
	t.Helper()
	tree := digest.Tree{}
	buf := make([]byte, mib)
	for off := int64(0); off < size; off += mib {
		p := buf[:min(mib, size-off)]
		_, err := f.ReadAt(p, off)
		must(t, err)
		must(t, tree.Add(off, int64(len(p)), digest.Sums(off, p)))
	}
	sum, err := tree.Sum(size)
	must(t, err)
	return sum
}

// fails waits for the end, which is to be a fault.
func (r *running) fails(reason string) *fault.Fault {
	r.t.Helper()
	<-r.done
	f := fault.Of(r.err)
	if f == nil || !f.Terminal || f.Reason != reason {
		r.t.Fatalf("got %+v, want a terminal %s", f, reason)
	}
	return f
}

func copying(p Progress) bool { return p.Phase == PhaseCopying && p.BytesDone > 0 }

// recorded is what the volume's journal has.
func recorded(t testing.TB, job Job) *journal.Journal {
	t.Helper()
	j, err := journal.Load(job.Journal, job.Volume, job.Recipe.Digest, job.TargetBytes)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func TestFill(t *testing.T) {
	path := noise(t, 1, 40*mib+12345)
	w := serveFile(t, path)
	job := volume(t, t.TempDir(), 64*mib, w.url())
	r := fill(t, newFiller(t), job)
	res := r.ok()
	if res.Format != "raw" || res.VirtualSize != 40*mib+12345 || res.Validator.ETag != `"1"` {
		t.Errorf("result %+v", res)
	}
	equal(t, job.Target, path)
	if !recorded(t, job).Complete {
		t.Error("the journal does not say that the volume is complete")
	}
	// Filled again, after a crash before that was recorded, nothing is fetched.
	before := w.sent.Load()
	if again := fill(t, newFiller(t), job).ok(); again.VirtualSize != res.VirtualSize || again.Validator != res.Validator {
		t.Errorf("again: %+v, first %+v", again, res)
	}
	if n := w.sent.Load() - before; n > 0 {
		t.Errorf("%d bytes fetched for a complete volume", n)
	}
}

// sole returns the one mover that a process has.
func sole(t testing.TB, parent int) int {
	t.Helper()
	pids := movers(t, parent)
	if len(pids) != 1 {
		t.Fatalf("movers %v, want one", pids)
	}
	return pids[0]
}

const perKill = 64 * mib // what a kill may cost, counted at the server

// fillAsOtherProcess fills the volume in a folder from a URL and says what comes
// to pass: it is killed, as node plugins are.
func fillAsOtherProcess(args []string) {
	dir, url := args[0], args[1]
	target, err := os.OpenFile(filepath.Join(dir, "data.raw"), os.O_RDWR, 0)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	info, err := target.Stat()
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	params, err := httpsrc.Params{URL: url}.Reveal()
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	f := &Filler{Policy: broker.AllowAll(), Backoff: time.Millisecond}
	_, err = f.Fill(context.Background(), Job{
		Volume: "pvc-1", Target: target, TargetBytes: info.Size(), KnownZero: true, Journal: filepath.Join(dir, "journal"),
		Recipe: Recipe{Source: source.Spec{Kind: "http", Params: params}, Digest: "recipe"},
	}, func(p Progress) { fmt.Println(p.Phase, p.BytesDone) })
	fmt.Println("end", err)
	os.Exit(0)
}

func TestNodePluginKilled(t *testing.T) {
	const size = 256 * mib
	path := noise(t, 3, size)
	w := serveFile(t, path)
	dir := t.TempDir()
	job := volume(t, dir, size, w.url())
	var sent, durable int64
	for kills := 1; kills <= 3; kills++ {
		w.holdAt(72 * mib)
		cmd := exec.Command("/proc/self/exe", fillerArg, dir, w.url())
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for {
			var phase string
			var done int64
			if _, err := fmt.Fscanln(out, &phase, &done); err != nil {
				cmd.Wait()
				t.Fatalf("the node plugin ended: %s %v", phase, err)
			}
			if phase == PhaseCopying && done >= durable+48*mib {
				break
			}
		}
		orphan := sole(t, cmd.Process.Pid)
		fd, err := unix.PidfdOpen(orphan, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000)
		unix.Close(fd)
		if n != 1 {
			t.Fatalf("mover %d still runs 10 s after its node plugin (%v)", orphan, err)
		}
		j := recorded(t, job)
		now, done := w.sent.Load(), j.Done.Bytes()
		for _, gap := range j.Sums.Missing(size) { // what is done need not be read to be summed up
			if n := j.Done.Intersect(gap.Start, gap.Length).Bytes(); n > 0 {
				t.Errorf("kill %d: %d bytes at %d are done, and no hash of them is recorded", kills, n, gap.Start)
			}
		}
		if lost := (now - sent) - (done - durable); lost > perKill {
			t.Errorf("kill %d: %d bytes are sent again, want at most %d", kills, lost, perKill)
		}
		sent, durable = now, done
	}
	w.holdAt(-1)
	fill(t, newFiller(t), job).ok()
	equal(t, job.Target, path)
	t.Logf("3 kills, %d MiB sent for an image of %d MiB", w.sent.Load()/mib, size/mib)
	if over := w.sent.Load() - size; over > 3*perKill {
		t.Errorf("%d bytes sent again", over)
	}
}

func TestWebServerKilledAndStarted(t *testing.T) {
	const size = 128 * mib
	path := noise(t, 4, size)
	w := serveFile(t, path)
	job := volume(t, t.TempDir(), size, w.url())
	w.holdAt(64 * mib)
	r := fill(t, newFiller(t), job)
	r.until("copied bytes", func(p Progress) bool { return copying(p) && p.BytesDone >= 24*mib })
	w.stop()
	p := r.until("a retry", func(p Progress) bool { return p.Phase == PhaseRetrying })
	if p.Reason != fault.ConnectionFailed {
		t.Errorf("reason %s: %s", p.Reason, p.Message)
	}
	r.until("a second retry", func(p Progress) bool { return p.Phase == PhaseRetrying && p.Retries > 1 })
	w.holdAt(-1)
	w.start()
	r.ok()
	equal(t, job.Target, path)
	if over := w.sent.Load() - size; over > perKill {
		t.Errorf("%d bytes sent again, want at most %d", over, perKill)
	}
}

// The source changes in mid-transfer: once the volume is begun again, and holds
// nothing of the first content; the second time is the end.
func TestSourceChanges(t *testing.T) {
	const size = 96 * mib
	first, second := noise(t, 5, size), filepath.Join(t.TempDir(), "second")
	// The second content has data where the first has none and the other way round.
	f, err := os.Create(second)
	if err != nil {
		t.Fatal(err)
	}
	f.Write(append(bytes.Repeat([]byte{1}, 510), 0x55, 0xaa))
	f.WriteAt(bytes.Repeat([]byte{2}, mib), 15*mib)
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	f.Close()
	for _, row := range []struct {
		name          string
		before, after string // ETags; "" leaves them out
	}{
		{"and its ETag tells", `"1"`, `"2"`},
		{"and only its bytes tell", "", ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			w := serveFile(t, first)
			w.change(first, row.before)
			job := volume(t, t.TempDir(), size, w.url())
			w.holdAt(64 * mib)
			r := fill(t, newFiller(t), job)
			r.until("copied bytes", func(p Progress) bool { return copying(p) && recorded(t, job).Done.Bytes() > 0 })
			w.change(second, row.after)
			if row.after == "" { // else nothing would be noticed before the next attempt
				unix.Kill(sole(t, os.Getpid()), unix.SIGKILL)
			}
			w.holdAt(-1)
			r.until("a restart", func(p Progress) bool { return p.Phase == PhaseRetrying && p.Reason == fault.SourceChanged })
			r.ok()
			equal(t, job.Target, second)
			if n := recorded(t, job).Restarts; n != 1 {
				t.Errorf("%d restarts on record", n)
			}
		})
	}
	t.Run("twice", func(t *testing.T) {
		w := serveFile(t, first)
		job := volume(t, t.TempDir(), size, w.url())
		w.holdAt(64 * mib)
		r := fill(t, newFiller(t), job)
		r.until("copied bytes", func(p Progress) bool { return copying(p) && recorded(t, job).Done.Bytes() > 0 })
		w.change(first, `"2"`)
		w.holdAt(64 * mib)
		r.until("a restart", func(p Progress) bool { return p.Phase == PhaseRetrying && p.Reason == fault.SourceChanged })
		r.until("copied bytes", func(p Progress) bool { return copying(p) && recorded(t, job).Done.Bytes() > 0 })
		w.change(first, `"3"`)
		w.holdAt(-1)
		r.fails(fault.SourceChanged)
	})
}

// Without a validator that proves anything a transfer goes on too, after a look.
func TestWeakValidatorGoesOn(t *testing.T) {
	const size = 128 * mib
	path := noise(t, 6, size)
	w := serveFile(t, path)
	w.change(path, "")
	job := volume(t, t.TempDir(), size, w.url())
	w.holdAt(80 * mib)
	r := fill(t, newFiller(t), job)
	r.until("recorded bytes", func(p Progress) bool { return copying(p) && recorded(t, job).Done.Bytes() >= 32*mib })
	unix.Kill(sole(t, os.Getpid()), unix.SIGKILL)
	w.holdAt(-1)
	r.ok()
	equal(t, job.Target, path)
	if over := w.sent.Load() - size; over > perKill {
		t.Errorf("%d bytes sent again, want at most %d", over, perKill)
	}
	if n := recorded(t, job).Restarts; n != 0 {
		t.Errorf("%d restarts", n)
	}
}

// A full filesystem under the volume is waited out.
func TestNoSpace(t *testing.T) {
	const size = 96 * mib
	path := noise(t, 7, size)
	w := serveFile(t, path)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=40m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	job := volume(t, dir, size, w.url())
	f := newFiller(t)
	f.Backoff, f.MaxBackoff = 100*time.Millisecond, 200*time.Millisecond
	r := fill(t, f, job)
	p := r.until("a fault", func(p Progress) bool { return p.Phase == PhaseRetrying })
	if p.Reason != fault.NoSpace || !strings.Contains(p.Message, "free space") {
		t.Errorf("reason %s: %s", p.Reason, p.Message)
	}
	r.until("a second one", func(p Progress) bool { return p.Phase == PhaseRetrying && p.Retries > 1 })
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT, "size=200m"); err != nil {
		t.Fatal(err)
	}
	r.ok()
	equal(t, job.Target, path)
}

func TestCancelLeavesNothingButTheJournal(t *testing.T) {
	const size = 96 * mib
	path := noise(t, 8, size)
	w := serveFile(t, path)
	job := volume(t, t.TempDir(), size, w.url())
	w.holdAt(48 * mib)
	r := fill(t, newFiller(t), job)
	r.until("recorded bytes", func(p Progress) bool { return copying(p) && recorded(t, job).Done.Bytes() > 0 })
	pid := sole(t, os.Getpid())
	group := memoryGroup(t, pid)
	mounts := mountTable(t)
	start := time.Now()
	r.cancel()
	<-r.done
	if !errors.Is(r.err, context.Canceled) {
		t.Errorf("got %v", r.err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("mover %d is there: %v", pid, err)
	}
	if group != "" {
		if _, err := os.Stat(group); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("cgroup %s is there: %v", group, err)
		}
	}
	if now := mountTable(t); now != mounts {
		t.Errorf("mounts were\n%s\nand are\n%s", mounts, now)
	}
	sent, durable := w.sent.Load(), recorded(t, job).Done.Bytes()
	w.holdAt(-1)
	fill(t, newFiller(t), job).ok()
	equal(t, job.Target, path)
	if more := w.sent.Load() - sent; more > size-durable+2*mib {
		t.Errorf("%d bytes were sent for the %d that were missing", more, size-durable)
	}
}

// memoryGroup is the folder of a mover's cgroup, "" without one of its own.
func memoryGroup(t testing.TB, pid int) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) == 3 && part[1] == "memory" && strings.Contains(part[2], "longshore-sandbox-") {
			return filepath.Join("/sys/fs/cgroup/memory", part[2])
		}
	}
	return ""
}

func mountTable(t testing.TB) string {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// What lets one in shows nowhere but in the mover's memory.
func TestCredentialsStayInside(t *testing.T) {
	const secret = "hunter2-of-the-tenant"
	path := noise(t, 9, 64*mib)
	w := serveFile(t, path)
	w.auth = "Bearer " + secret
	job := volume(t, t.TempDir(), 64*mib, w.url())
	job.Recipe = httpRecipe(t, httpsrc.Params{URL: w.url(), SecretHeaders: []source.Secret{"Authorization: Bearer " + secret}})
	var log bytes.Buffer
	f := newFiller(t)
	f.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	w.holdAt(32 * mib)
	r := fill(t, f, job)
	r.until("copied bytes", copying)
	pid := sole(t, os.Getpid())
	for _, file := range []string{"cmdline", "environ"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(data, []byte(secret)) {
			t.Errorf("%s shows the secret: %q", file, data)
		}
	}
	unix.Kill(pid, unix.SIGKILL) // so that something is logged
	w.holdAt(-1)
	r.ok()
	equal(t, job.Target, path)
	for name, data := range map[string][]byte{"log": log.Bytes(), "journal": read(t, job.Journal)} {
		if len(data) == 0 || bytes.Contains(data, []byte(secret)) {
			t.Errorf("the %s shows the secret, or nothing: %q", name, data)
		}
	}
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestTerminalFaults(t *testing.T) {
	path := noise(t, 10, 8*mib)
	w := serveFile(t, path)
	denied := newFiller(t)
	denied.Policy = broker.FetchPolicy{}
	for _, row := range []struct {
		name    string
		filler  *Filler
		bytes   int64
		url     string
		reason  string
		message []string
	}{
		{"an image that is larger than the volume", newFiller(t), 4 * mib, w.url(), fault.ImageTooLarge, []string{"8388608", "4194304", "request at least"}},
		{"an address that is not allowed", denied, 8 * mib, w.url(), fault.AddressNotAllowed, []string{"127.0.0.1", "fetchPolicy.allow"}},
		{"no such kind of source", newFiller(t), 8 * mib, "", fault.SourceNotSupported, []string{"http", "blank"}},
		{"a volume of an odd size", newFiller(t), 8*mib + 512, w.url(), fault.TargetError, []string{"4096"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			before := w.sent.Load()
			job := volume(t, t.TempDir(), row.bytes, row.url)
			if row.url == "" {
				job.Recipe.Source.Kind = "carrier-pigeon"
			}
			f := fill(t, row.filler, job).fails(row.reason)
			for _, part := range row.message {
				if !strings.Contains(f.Error(), part) {
					t.Errorf("%q does not say %q", f, part)
				}
			}
			if n := w.sent.Load() - before; n > 2*mib {
				t.Errorf("%d bytes were fetched", n)
			}
			if recorded(t, job).Done.Len() > 0 {
				t.Error("something was written")
			}
		})
	}
}

func TestBlankAndPreallocated(t *testing.T) {
	for _, row := range []struct {
		name        string
		preallocate bool
	}{{"sparse", false}, {"preallocated", true}} {
		t.Run(row.name, func(t *testing.T) {
			job := volume(t, t.TempDir(), 32*mib, "")
			job.Recipe = Recipe{Source: source.Spec{Kind: "blank", Params: json.RawMessage("{}")}, Preallocate: row.preallocate, Digest: "recipe"}
			if res := fill(t, newFiller(t), job).ok(); res.Format != "raw" {
				t.Errorf("result %+v", res)
			}
			var st unix.Stat_t
			if err := unix.Stat(job.Target.Name(), &st); err != nil {
				t.Fatal(err)
			}
			if full := st.Blocks*512 >= 32*mib; full != row.preallocate {
				t.Errorf("%d bytes allocated of 32 MiB", st.Blocks*512)
			}
			equal(t, job.Target, os.DevNull)
		})
	}
}

// A target that is not known to be zero is, where the image has nothing.
func TestOldContentIsGone(t *testing.T) {
	path := noise(t, 11, 24*mib)
	w := serveFile(t, path)
	job := volume(t, t.TempDir(), 32*mib, w.url())
	job.KnownZero = false
	if _, err := job.Target.WriteAt(bytes.Repeat([]byte("old"), 32*mib/3), 0); err != nil {
		t.Fatal(err)
	}
	fill(t, newFiller(t), job).ok()
	equal(t, job.Target, path)
}

// A volume partly filled by another recipe, or with a damaged journal, is begun
// again and holds nothing of what was there.
func TestForeignJournal(t *testing.T) {
	path := noise(t, 12, 24*mib)
	w := serveFile(t, path)
	for _, row := range []struct {
		name  string
		spoil func(*testing.T, *Job)
	}{
		{"another recipe", func(_ *testing.T, j *Job) { j.Recipe.Digest = "other" }},
		{"damaged", func(t *testing.T, j *Job) {
			if err := os.WriteFile(j.Journal, []byte("rubbish"), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			job := volume(t, t.TempDir(), 32*mib, w.url())
			fill(t, newFiller(t), job).ok()
			if _, err := job.Target.WriteAt(bytes.Repeat([]byte{9}, 2*mib), 15*mib); err != nil {
				t.Fatal(err)
			}
			row.spoil(t, &job)
			fill(t, newFiller(t), job).ok()
			equal(t, job.Target, path)
		})
	}
}

// memoryRow is an image at path of the disk at raw, of size bytes.
type memoryRow struct {
	name, path, raw string
	size, most      int64
	checksum        string
}

// The mover's memory, with the page cache that it causes, is bounded whatever
// the size of the image: by what a compression wants to look back, and 64 MiB.
func TestMemory(t *testing.T) {
	size, full := int64(1<<30), int64(15)
	if s := os.Getenv("LONGSHORE_TEST_IMAGE_BYTES"); s != "" {
		var err error
		if size, err = strconv.ParseInt(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	} else if os.Getenv("LONGSHORE_LONG") != "" {
		size = 10 << 30
	}
	if size > 4<<30 {
		full = 8 // half of it, so that a disk has room for three
	}
	raw := specks(t, 13, size, full)
	qcow2 := filepath.Join(t.TempDir(), "disk.qcow2")
	if out, err := exec.Command("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, qcow2).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	rows := []memoryRow{
		{".raw", raw, raw, size, 64 * mib, ""}, {".qcow2", qcow2, raw, size, 64 * mib, ""},
		{".raw with a checksum", raw, raw, size, 64 * mib, sumsOf(t, raw)[0]}, {".qcow2 with a checksum", qcow2, raw, size, 64 * mib, sumsOf(t, qcow2)[1]},
	}
	const small = 320 * mib // longer than any window
	disk := specks(t, 17, small, 1)
	for _, packer := range []struct {
		command string
		window  int64
	}{
		{"gzip -1", 0}, {"xz -0 --lzma2=preset=0,dict=64MiB", 64 * mib}, {"xz -0 -T2 --block-size=24MiB", 96 * mib}, {"zstd -1 --long=27", 128 * mib},
	} {
		path := filepath.Join(t.TempDir(), "packed")
		if out, err := exec.Command("sh", "-c", packer.command+` -c <"$0" >"$1"`, disk, path).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", packer.command, err, out)
		}
		rows = append(rows, memoryRow{packer.command, path, disk, small, 64*mib + packer.window, ""})
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			w := serveFile(t, row.path)
			job := volume(t, t.TempDir(), row.size, w.url())
			job.Recipe.Checksum = row.checksum
			f := newFiller(t)
			var usage mover.Usage
			f.Launcher.Ended = func(u mover.Usage) { usage = u }
			start := time.Now()
			fill(t, f, job).ok()
			t.Logf("%d MiB in %v, at most %.1f MiB of memory (%s)", row.size/mib, time.Since(start).Round(time.Millisecond), float64(usage.PeakBytes)/mib, usage.Bound)
			equal(t, job.Target, row.raw)
			if usage.Bound == "rlimit" {
				t.Fatal("no memory cgroup could be made: nothing was measured")
			}
			if usage.PeakBytes <= 0 || usage.PeakBytes >= row.most {
				t.Errorf("the mover had %d bytes, want less than %d", usage.PeakBytes, row.most)
			}
		})
	}
}

func TestDecide(t *testing.T) {
	transient := &fault.Fault{Reason: fault.ServerError, Err: errors.New("502")}
	terminal := &fault.Fault{Terminal: true, Reason: fault.NotFound, Err: errors.New("404")}
	changed := &fault.Fault{Reason: fault.SourceChanged, Err: errors.New("other ETag")}
	died := &fault.Fault{Reason: fault.MoverDied, Err: errors.New("killed")}
	for _, row := range []struct {
		name string
		s    setback
		want verdict
		give string
	}{
		{"the first transient fault is retried", setback{Fault: transient}, verdict{Fruitless: 1}, ""},
		{"the fifth without progress waits longer", setback{Fault: transient, Fruitless: 4}, verdict{Fruitless: 5}, ""},
		{"progress makes it the first again", setback{Fault: transient, Fruitless: 4, Progressed: true}, verdict{Fruitless: 1}, ""},
		{"a terminal fault is the end", setback{Fault: terminal}, verdict{Fruitless: 1}, fault.NotFound},
		{"a change loses what was recorded", setback{Fault: changed, Recorded: true}, verdict{Fruitless: 1, Restart: true}, ""},
		{"a change before anything was recorded loses nothing", setback{Fault: changed, Restarts: 1}, verdict{Fruitless: 1, Restart: true}, ""},
		{"a second change is the end", setback{Fault: changed, Recorded: true, Restarts: 1}, verdict{Fruitless: 1}, fault.SourceChanged},
		{"a mover died", setback{Fault: died, Deaths: 3}, verdict{Fruitless: 1, Deaths: 4}, ""},
		{"five died in a row", setback{Fault: died, Deaths: 4}, verdict{Fruitless: 1, Deaths: 5}, fault.MoverDied},
		{"but not where each made progress", setback{Fault: died, Deaths: 4, Progressed: true}, verdict{Fruitless: 1, Deaths: 1}, ""},
		{"other faults do not count as deaths", setback{Fault: transient, Deaths: 4}, verdict{Fruitless: 1, Deaths: 4}, ""},
		{"three times the image was read again", setback{Fault: transient, ImageBytes: 1 << 30, Read: 4<<30 + 64<<20}, verdict{Fruitless: 1}, ""},
		{"more than that is the end", setback{Fault: transient, ImageBytes: 1 << 30, Read: 4<<30 + 64<<20 + 1}, verdict{Fruitless: 1}, fault.TooManyRetries},
		{"also with progress", setback{Fault: transient, ImageBytes: 1 << 30, Read: 5 << 30, Progressed: true}, verdict{Fruitless: 1}, fault.TooManyRetries},
		{"an image of unknown size has no budget yet", setback{Fault: transient, ImageBytes: -1, Read: 5 << 30}, verdict{Fruitless: 1}, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			got := row.s.decide()
			give := got.Give
			got.Give = nil
			if got != row.want {
				t.Errorf("got %+v, want %+v", got, row.want)
			}
			switch {
			case row.give == "" && give != nil:
				t.Errorf("gave up: %v", give)
			case row.give != "" && (give == nil || !give.Terminal || give.Reason != row.give || !errors.Is(give, row.s.Fault.Err)):
				t.Errorf("got %+v, want a terminal %s that wraps its cause", give, row.give)
			}
		})
	}
}

func TestBackoff(t *testing.T) {
	for n, want := range map[int]time.Duration{0: time.Second, 1: time.Second, 2: 2 * time.Second, 5: 16 * time.Second, 8: 2 * time.Minute, 1000: 2 * time.Minute} {
		for range 100 {
			if got := backoff(n, 0, 0); got > want || got < want/2 {
				t.Fatalf("after %d attempts %v, want %v to %v", n, got, want/2, want)
			}
		}
	}
}

func TestRate(t *testing.T) {
	var r rate
	now := time.Unix(0, 0)
	r.add(now, 0)
	var got int64
	for i := int64(1); i <= 60; i++ {
		got = r.add(now.Add(time.Duration(i)*time.Second), i*1000)
	}
	if got != 1000 {
		t.Errorf("a steady 1000 bytes/s is shown as %d", got)
	}
	if got = r.add(now.Add(61*time.Second), 60*1000+11_000); got < 1500 || got > 3000 {
		t.Errorf("one second of 11000 bytes/s shows %d", got)
	}
}

// Slots go round by owner: one with many volumes does not keep another waiting.
func TestSlotsGoRoundByOwner(t *testing.T) {
	s := newSlots(1)
	release, err := s.acquire(t.Context(), "z")
	if err != nil {
		t.Fatal(err)
	}
	order := make(chan string, 16)
	var wg sync.WaitGroup
	enter := func(owner string) {
		wg.Go(func() {
			release, err := s.acquire(t.Context(), owner)
			if err != nil {
				t.Error(err)
				return
			}
			order <- owner
			release()
		})
		waiting := func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return slices.Contains(s.turn, owner)
		}
		for !waiting() {
			time.Sleep(time.Millisecond)
		}
	}
	count := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		n := 0
		for _, w := range s.waiting {
			n += len(w)
		}
		return n
	}
	for _, owner := range []string{"a", "a", "a", "b", "c", "c"} {
		before := count()
		enter(owner)
		for count() == before {
			time.Sleep(time.Millisecond)
		}
	}
	// One that gives up leaves its place to the others.
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if _, err := s.acquire(ctx, "d"); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}()
	for count() < 7 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	<-gone
	release()
	wg.Wait()
	close(order)
	var got []string
	for o := range order {
		got = append(got, o)
	}
	if want := []string{"a", "b", "c", "a", "c", "a"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if s.free != 1 || len(s.waiting) > 0 || len(s.turn) > 0 {
		t.Errorf("at the end %d free, %v waiting", s.free, s.waiting)
	}
}

func TestSlotsBoundMovers(t *testing.T) {
	path := noise(t, 14, 8*mib)
	w := serveFile(t, path)
	f := newFiller(t)
	f.Slots = 2
	w.holdAt(mib)
	var all []*running
	for range 4 {
		all = append(all, fill(t, f, volume(t, t.TempDir(), 8*mib, w.url())))
	}
	running := func() int { return len(movers(t, os.Getpid())) }
	for running() < 2 {
		time.Sleep(time.Millisecond)
	}
	if n := running(); n != 2 {
		t.Errorf("%d movers, want 2", n)
	}
	w.holdAt(-1)
	for _, r := range all {
		r.ok()
	}
}
