package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/extent"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/httpsrc"
	"github.com/longshore-io/longshore/test/peers"
)

const (
	diskBytes = 2 << 30
	dataBytes = 800 << 20
)

// recipes make each image from disk.raw, in its folder.
var recipes = map[string]string{
	"disk.qcow2":      "qemu-img convert -f raw -O qcow2 disk.raw $out",
	"disk-zlib.qcow2": "qemu-img convert -f raw -O qcow2 -c -W -m 8 disk.raw $out",
	"disk-zstd.qcow2": "qemu-img convert -f raw -O qcow2 -c -o compression_type=zstd -W -m 8 disk.raw $out",
	"disk.vmdk":       "qemu-img convert -f raw -O vmdk -o subformat=streamOptimized disk.raw $out",
	"disk.vhdx":       "qemu-img convert -f raw -O vhdx disk.raw $out",
	"disk.vhd":        "qemu-img convert -f raw -O vpc -o force_size disk.raw $out",
	"disk.vdi":        "qemu-img convert -f raw -O vdi disk.raw $out",
	"disk.raw.gz":     "pigz -6 -c disk.raw >$out",
	"disk.raw.zst":    "zstd -q -3 -T0 -c disk.raw >$out",
	"disk.blocks.xz":  "xz -2 -T2 --block-size=16MiB -c disk.raw >$out",
	"disk.raw.xz":     "xz -2 -T1 -c disk.raw >$out",
	"disk.qcow2.gz":   "pigz -6 -c disk.qcow2 >$out",
	"disk.qcow2.xz":   "xz -2 -T1 -c disk.qcow2 >$out",
}

// What people use today, as shell commands that end with the target flushed:
// $url is the image, $format its format for qemu-img, $target the raw disk, $scratch
// a file that the command may leave behind.
const (
	scratch  = `curl -sS -o $scratch $url && qemu-img convert -t writeback -f $format -O raw $scratch $target && sync $target`
	nbdkit   = `nbdkit -U - --run 'qemu-img convert -W -m 16 -f $format -O raw $nbd $target' curl url=$url && sync $target`
	nbdcopy  = `nbdkit -U - --run 'nbdcopy --flush $uri $target' curl url=$url`
	gunzip   = `curl -sS $url | gzip -dc | dd of=$target bs=1M iflag=fullblock conv=sparse,notrunc,fsync status=none`
	igzip    = `curl -sS $url | igzip -dc >/dev/null`
	unzstd   = `curl -sS $url | zstd -qdc | dd of=$target bs=1M iflag=fullblock conv=sparse,notrunc,fsync status=none`
	unxz     = `curl -sS $url | xz -T0 -dc | dd of=$target bs=1M iflag=fullblock conv=sparse,notrunc,fsync status=none`
	unxzOne  = `curl -sS $url | xz -dc | dd of=$target bs=1M iflag=fullblock conv=sparse,notrunc,fsync status=none`
	unzstdTo = `curl -sS $url | zstd -qdc >$scratch && qemu-img convert -t writeback -f raw -O raw $scratch $target && sync $target`
	gunzipTo = `curl -sS $url | gzip -dc >$scratch && qemu-img convert -t writeback -f qcow2 -O raw $scratch $target && sync $target`
	unxzTo   = `curl -sS $url | xz -T0 -dc >$scratch && qemu-img convert -t writeback -f qcow2 -O raw $scratch $target && sync $target`
	floor    = `curl -sS -o /dev/null $url & dd if=/dev/zero of=$target bs=1M count=$allocated oflag=direct conv=notrunc,fsync status=none && wait $!`
)

const (
	onFile  = "file"
	onBlock = "block"

	near    = "loopback"
	slow    = "25 MB/s per connection"
	distant = "20 ms per request"
)

// A row compares us with one rival: one image, target and network.
type row struct {
	image, format, target, network, rival, command string
	most                                           float64 // our wall time / theirs
}

var rows = []row{
	{"disk.raw", "raw", onBlock, near, "S", scratch, 0.25},
	{"disk.raw", "raw", onFile, near, "S", scratch, 0.35},
	{"disk.raw", "raw", onFile, near, "C", nbdcopy, 0.35},
	{"disk.raw", "raw", onFile, near, "F", floor, 1.1},
	{"disk.qcow2", "qcow2", onFile, near, "S", scratch, 0.25},
	{"disk.qcow2", "qcow2", onFile, near, "F", floor, 1.1},
	{"disk-zlib.qcow2", "qcow2", onFile, slow, "S", scratch, 0.25},
	{"disk-zlib.qcow2", "qcow2", onFile, near, "S", scratch, 0.45},
	{"disk-zlib.qcow2", "qcow2", onBlock, near, "S", scratch, 0.45},
	{"disk-zlib.qcow2", "qcow2", onFile, near, "N", nbdkit, 0.45},
	{"disk-zlib.qcow2", "qcow2", onFile, distant, "S", scratch, 0.5},
	{"disk-zlib.qcow2", "qcow2", onFile, distant, "N", nbdkit, 0.15},
	{"disk-zstd.qcow2", "qcow2", onFile, near, "S", scratch, 0.50},
	{"disk.raw.gz", "raw", onFile, near, "P", gunzip, 0.20},
	{"disk.raw.gz", "raw", onFile, near, "igzip", igzip, 1.1},
	{"disk.vmdk", "vmdk", onFile, near, "S", scratch, 0.30},
	{"disk.raw.zst", "raw", onFile, near, "S", unzstdTo, 0.5},
	{"disk.raw.zst", "raw", onFile, near, "P", unzstd, 0},
	{"disk.blocks.xz", "raw", onFile, near, "P", unxz, 0.6},
	{"disk.raw.xz", "raw", onFile, near, "P", unxzOne, 1.05},
	{"disk.vhdx", "vhdx", onFile, near, "S", scratch, 0.35},
	{"disk.vhd", "vpc", onFile, near, "S", scratch, 0.35},
	{"disk.vdi", "vdi", onFile, near, "S", scratch, 0.35},
	{"disk.qcow2.gz", "qcow2", onFile, near, "P", gunzipTo, 0.6},
	{"disk.qcow2.xz", "qcow2", onFile, near, "P", unxzTo, 0.6},
}

// BenchmarkNetwork imports a disk of 2 GiB with 800 MiB of this machine's files
// over HTTP, in turns by a mover in its sandbox, as a node does it, and by what
// people use. What it prints are medians; it needs root and pays 10 GB of disk.
//
// LONGSHORE_BENCH_DIR keeps the images for the next time.
func BenchmarkNetwork(b *testing.B) {
	dir := cmp.Or(os.Getenv("LONGSHORE_BENCH_DIR"), b.TempDir())
	program := filepath.Join(b.TempDir(), "longshore-mover")
	build := exec.Command("go", "build", "-tags", "netgo,osusergo", "-ldflags", "-s -w", "-o", program, "../../cmd/longshore-mover")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("go build: %v: %s", err, out)
	}
	work := filepath.Join(dir, "work")
	must(b, os.MkdirAll(work, 0o755))
	b.Cleanup(func() { os.RemoveAll(work) })
	servers := map[string]func(string) string{
		near:    peers.Nginx(b, peers.NginxOptions{Root: dir, Extra: "sendfile on; tcp_nopush on;"}).URL,
		slow:    peers.Nginx(b, peers.NginxOptions{Root: dir, LimitRate: 25e6, Extra: "sendfile on; tcp_nopush on;"}).URL,
		distant: farAway(b, dir),
	}
	for _, r := range rows {
		b.Run(strings.ReplaceAll(fmt.Sprintf("%s to %s, %s, against %s", r.image, r.target, r.network, r.rival), " ", "_"), func(b *testing.B) {
			makeImage(b, dir, r.image)
			url := servers[r.network](r.image)
			var ours, theirs []taken
			for range b.N {
				ours = append(ours, onTarget(b, work, r.target, func(target string) facts { return us(b, program, url, target) }))
				theirs = append(theirs, onTarget(b, work, r.target, func(target string) facts {
					return them(b, work, target, url, r, ours[0].allocated)
				}))
			}
			us, it := median(ours), median(theirs)
			ratio := us.wall.Seconds() / it.wall.Seconds()
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(ratio, "wall-ratio")
			b.ReportMetric(r.most, "goal")
			b.ReportMetric(us.cpu.Seconds()/it.cpu.Seconds(), "cpu-ratio")
			b.ReportMetric(us.wall.Seconds(), "ours-s")
			b.ReportMetric(it.wall.Seconds(), "theirs-s")
			b.ReportMetric(float64(us.peak)/(1<<20), "peak-MiB")
			if info, err := os.Stat(filepath.Join(dir, r.image)); err == nil {
				b.ReportMetric(float64(us.read)/float64(info.Size()), "read/image")
			}
			b.ReportMetric(float64(us.written)/float64(us.allocated), "written/allocated")
			if it.allocated > 0 {
				b.ReportMetric(float64(us.allocated)/float64(it.allocated), "allocated-ratio")
			}
		})
	}
}

// facts are what is known of a run beside its time.
type facts struct{ peak, read int64 }

// taken is one run: wall time, the CPU time of this process and of its children,
// bytes of the target that are allocated and that the children wrote past the
// page cache.
type taken struct {
	wall, cpu          time.Duration
	allocated, written int64
	facts
}

func median(of []taken) taken {
	slices.SortFunc(of, func(a, b taken) int { return cmp.Compare(a.wall, b.wall) })
	return of[len(of)/2]
}

// onTarget makes a target, empty and new, and measures run on it.
func onTarget(b *testing.B, dir, kind string, run func(target string) facts) (t taken) {
	b.Helper()
	file := filepath.Join(dir, "target")
	f, err := os.Create(file)
	must(b, err)
	defer os.Remove(file)
	defer f.Close()
	must(b, f.Truncate(diskBytes))
	target := file
	if kind == onBlock {
		out, err := exec.Command("losetup", "--find", "--show", "--direct-io=on", file).Output()
		must(b, err)
		target = strings.TrimSpace(string(out))
		defer func() { must(b, exec.Command("losetup", "--detach", target).Run()) }()
	}
	syscall.Sync()
	cpu, blocks := spent()
	start := time.Now()
	t.facts = run(target)
	t.wall = time.Since(start)
	cpu2, blocks2 := spent()
	t.cpu, t.written = cpu2-cpu, (blocks2-blocks)*512
	var st syscall.Stat_t
	must(b, syscall.Stat(file, &st))
	t.allocated = st.Blocks * 512
	return t
}

// spent is the CPU time, and the blocks written by children.
func spent() (cpu time.Duration, blocks int64) {
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var u syscall.Rusage
		if err := syscall.Getrusage(who, &u); err != nil {
			panic(err)
		}
		cpu += time.Duration(u.Utime.Nano() + u.Stime.Nano())
		blocks = u.Oublock
	}
	return cpu, blocks
}

// node is what a mover has of a node plugin, without the journal.
type node struct {
	target *os.File
	mu     sync.Mutex
	read   int64
}

func (n *node) Began(context.Context, mover.Facts) error { return nil }

func (n *node) Commit(context.Context, []extent.Range, *digest.Tree) error {
	return syscall.Fdatasync(int(n.target.Fd()))
}

func (n *node) Hashed(mover.HashState) {}

func (n *node) Moved(_, read int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.read = read
}

func (n *node) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, address)
}

func us(b *testing.B, program, url, path string) facts {
	b.Helper()
	target, err := os.OpenFile(path, os.O_RDWR, 0)
	must(b, err)
	defer target.Close()
	params, err := httpsrc.Params{URL: url}.Reveal()
	must(b, err)
	var f facts
	l := mover.Launcher{Program: program, Ended: func(u mover.Usage) { f.peak = u.PeakBytes }}
	n := &node{target: target}
	job := mover.Job{Source: source.Spec{Kind: "http", Params: params}, TargetBytes: diskBytes, KnownZero: true}
	_, err = l.Move(b.Context(), target, job, n)
	if f := fault.Of(err); f != nil && f.Reason == fault.NeedsSpool { // only then a node gives it one
		spool, err := os.CreateTemp(filepath.Dir(path), "spool")
		must(b, err)
		defer spool.Close()
		must(b, errors.Join(os.Remove(spool.Name()), spool.Truncate(diskBytes)))
		job.Spool, job.SpoolBytes = []*os.File{spool}, diskBytes
		_, err = l.Move(b.Context(), target, job, n)
		must(b, err)
	} else {
		must(b, err)
	}
	must(b, target.Sync())
	f.read = n.read
	return f
}

func them(b *testing.B, dir, target, url string, r row, allocated int64) facts {
	b.Helper()
	left := filepath.Join(dir, "scratch")
	defer os.Remove(left)
	cmd := exec.CommandContext(b.Context(), "bash", "-euo", "pipefail", "-c", r.command)
	cmd.Env = append(os.Environ(), "url="+url, "target="+target, "format="+r.format, "scratch="+left, fmt.Sprint("allocated=", allocated>>20))
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("%s: %v: %s", r.command, err, out)
	}
	return facts{}
}

// makeImage makes the image that is called name in dir, where there is none.
func makeImage(b *testing.B, dir, name string) {
	b.Helper()
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err == nil {
		return
	}
	if name == "disk.raw" {
		makeRaw(b, dir, path)
		return
	}
	for _, from := range []string{"disk.raw", "disk.qcow2"} {
		if strings.Contains(recipes[name], from+" ") {
			makeImage(b, dir, from)
		}
	}
	cmd := exec.Command("bash", "-euc", recipes[name])
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "out="+path+".tmp")
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("%s: %v: %s", recipes[name], err, out)
	}
	must(b, os.Rename(path+".tmp", path))
}

// makeRaw makes a filesystem with files of this machine.
func makeRaw(b *testing.B, dir, path string) {
	b.Helper()
	tree := filepath.Join(dir, "tree")
	must(b, os.Mkdir(tree, 0o755))
	defer os.RemoveAll(tree)
	var total int64
	must(b, filepath.WalkDir("/usr", func(from string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil || info.Size() > 64<<20 {
			return err
		}
		if total += info.Size(); total > dataBytes {
			return fs.SkipAll
		}
		to := filepath.Join(tree, from)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		content, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		return os.WriteFile(to, content, 0o644)
	}))
	f, err := os.Create(path + ".tmp")
	must(b, err)
	defer f.Close()
	must(b, f.Truncate(diskBytes))
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", "-d", tree, path+".tmp").CombinedOutput(); err != nil {
		b.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	must(b, os.Rename(path+".tmp", path))
}

// farAway serves dir, and answers each request 20 ms later.
func farAway(b *testing.B, dir string) func(string) string {
	files := http.FileServer(http.Dir(dir))
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(20 * time.Millisecond)
		if _, err := os.Stat(filepath.Join(dir, r.URL.Path)); err != nil {
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, err.Error())
			return
		}
		files.ServeHTTP(w, r)
	}))
	b.Cleanup(s.Close)
	return func(name string) string { return s.URL + "/" + name }
}

func must(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}
