package sandbox

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// prefix starts the name of every cgroup that this package makes; the id of the
// process that made it and a number follow.
const prefix = "longshore-sandbox-"

// hierarchy is the cgroup under which the groups of sandboxes are made.
type hierarchy struct {
	dir     string
	unified bool // version 2
}

// group is the memory cgroup of one sandbox.
type group struct {
	hierarchy
}

var groups atomic.Int64

// parent looks once where groups can be made and clears away what an earlier
// instance, killed, has left there.
var parent = sync.OnceValues(func() (*hierarchy, error) {
	h, err := find("/proc/self/cgroup", "/proc/self/mountinfo")
	if h != nil {
		h.sweep()
	}
	return h, err
})

// newGroup makes a group bounded to so many bytes. It returns nil, nil where
// this process may make none.
func newGroup(bytes int64) (*group, error) {
	h, err := parent()
	if h == nil || err != nil {
		return nil, err
	}
	g := &group{hierarchy{filepath.Join(h.dir, fmt.Sprintf("%s%d-%d", prefix, os.Getpid(), groups.Add(1))), h.unified}}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a memory cgroup: %w", err)
	}
	limits := map[string]string{"memory.limit_in_bytes": strconv.FormatInt(bytes, 10)}
	if g.unified {
		limits = map[string]string{"memory.max": strconv.FormatInt(bytes, 10), "memory.swap.max": "0", "memory.oom.group": "1"}
	}
	for file, value := range limits {
		err := g.write(file, value)
		if errors.Is(err, fs.ErrNotExist) && file == "memory.swap.max" {
			continue // a kernel without swap
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("bound a memory cgroup: %w", err), g.remove())
		}
	}
	return g, nil
}

func (h *hierarchy) write(file, value string) error {
	return os.WriteFile(filepath.Join(h.dir, file), []byte(value), 0o644)
}

func (h *hierarchy) kind() string {
	if h.unified {
		return "cgroup v2"
	}
	return "cgroup v1"
}

func (g *group) add(pid int) error {
	if err := g.write("cgroup.procs", strconv.Itoa(pid)); err != nil {
		return fmt.Errorf("put process %d into its memory cgroup: %w", pid, err)
	}
	return nil
}

// peak is the most bytes that the group had, 0 where the kernel does not say.
func (g *group) peak() int64 {
	file := "memory.max_usage_in_bytes"
	if g.unified {
		file = "memory.peak"
	}
	data, err := os.ReadFile(filepath.Join(g.dir, file))
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	return n
}

// oomKills counts the processes of the group that died of its bound.
func (g *group) oomKills() int64 {
	file := "memory.oom_control"
	if g.unified {
		file = "memory.events"
	}
	data, err := os.ReadFile(filepath.Join(g.dir, file))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
			kills, _ := strconv.ParseInt(strings.TrimSpace(n), 10, 64)
			return kills
		}
	}
	return 0
}

// remove takes the group away; its processes are dead. The kernel may need a
// moment to see that.
func (g *group) remove() error {
	var err error
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if err = unix.Rmdir(g.dir); !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove memory cgroup %s: %w", g.dir, err)
	}
	return nil
}

// sweep removes the groups of processes that are no more. Of this process there
// are none yet: what bears its id is of an earlier one, as in a container, where
// the plugin has the same id each time.
func (h *hierarchy) sweep() {
	list, err := os.ReadDir(h.dir)
	if err != nil {
		return
	}
	for _, e := range list {
		rest, ok := strings.CutPrefix(e.Name(), prefix)
		if !ok {
			continue
		}
		maker, _, _ := strings.Cut(rest, "-")
		pid, err := strconv.Atoi(maker)
		if err != nil || pid != os.Getpid() && !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			continue
		}
		// One that is in use stays: rmdir refuses.
		_ = unix.Rmdir(filepath.Join(h.dir, e.Name()))
	}
}

// find returns where this process can make memory cgroups; nil, nil is nowhere.
func find(cgroupFile, mountinfoFile string) (*hierarchy, error) {
	paths, err := membership(cgroupFile)
	if err != nil {
		return nil, err
	}
	mounts, err := cgroupMounts(mountinfoFile)
	if err != nil {
		return nil, err
	}
	for _, m := range mounts {
		controller := ""
		if m.legacy {
			controller = "memory"
		}
		path, ok := paths[controller]
		if !ok {
			continue
		}
		h := &hierarchy{dir: m.locate(path), unified: !m.legacy}
		if unix.Access(h.dir, unix.W_OK) != nil || readOnlyMount(h.dir) {
			continue
		}
		if h.unified && !h.delegate() {
			continue
		}
		return h, nil
	}
	return nil, nil
}

// delegate makes h, the version 2 group of this process, one that can have
// groups with a memory bound below it; a group can have either processes or
// such children, so this process moves to a leaf beside them.
func (h *hierarchy) delegate() bool {
	controllers, err := os.ReadFile(filepath.Join(h.dir, "cgroup.controllers"))
	if err != nil || !slices.Contains(strings.Fields(string(controllers)), "memory") {
		return false
	}
	const own = "longshore-node"
	if filepath.Base(h.dir) == own { // this program executed itself anew
		h.dir = filepath.Dir(h.dir)
	}
	leaf := hierarchy{dir: filepath.Join(h.dir, own), unified: true}
	if err := os.Mkdir(leaf.dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return false
	}
	procs, err := os.ReadFile(filepath.Join(h.dir, "cgroup.procs"))
	if err != nil {
		return false
	}
	for _, pid := range strings.Fields(string(procs)) {
		if err := leaf.write("cgroup.procs", pid); err != nil && !errors.Is(err, unix.ESRCH) {
			return false
		}
	}
	return h.write("cgroup.subtree_control", "+memory") == nil
}

func readOnlyMount(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) != nil || st.Flags&unix.ST_RDONLY != 0
}

// membership reads a file like /proc/self/cgroup: the path of the process by
// controller, "" for version 2.
func membership(file string) (map[string]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read the own cgroups: %w", err)
	}
	defer f.Close()
	paths := map[string]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		part := strings.SplitN(lines.Text(), ":", 3)
		if len(part) != 3 {
			continue
		}
		for _, controller := range strings.Split(part[1], ",") {
			paths[controller] = part[2]
		}
	}
	return paths, lines.Err()
}

// cgroupMount is a mounted hierarchy with the memory controller, or of version 2.
type cgroupMount struct {
	root, at string
	legacy   bool
}

// cgroupMounts reads a file like /proc/self/mountinfo (proc_pid_mountinfo(5)).
// A hierarchy of version 1 with the memory controller comes first: where there
// is one, version 2 has no such controller.
func cgroupMounts(file string) ([]cgroupMount, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read the mounts: %w", err)
	}
	defer f.Close()
	var v1, v2 []cgroupMount
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		own, super, ok := strings.Cut(lines.Text(), " - ")
		fields, tail := strings.Fields(own), strings.Fields(super)
		if !ok || len(fields) < 6 || len(tail) < 3 {
			continue
		}
		m := cgroupMount{root: fields[3], at: fields[4]}
		switch {
		case tail[0] == "cgroup" && slices.Contains(strings.Split(tail[2], ","), "memory"):
			m.legacy = true
			v1 = append(v1, m)
		case tail[0] == "cgroup2":
			v2 = append(v2, m)
		}
	}
	return append(v1, v2...), lines.Err()
}

// locate is where the group at path, as /proc/self/cgroup has it, shows. In a
// container without a cgroup namespace the mount's root is the container's own
// group, in one with it path is relative to that.
func (m cgroupMount) locate(path string) string {
	if rest, ok := strings.CutPrefix(path, m.root); ok && (m.root == "/" || rest == "" || rest[0] == '/') {
		return filepath.Join(m.at, rest)
	}
	return filepath.Join(m.at, path)
}
