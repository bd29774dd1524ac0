// Package arrows holds the import arrows of the layout: who may know whom.
package arrows

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/longshore-io/longshore/"

// may lists for each folder of the product which folders of the product its
// packages may import directly. A folder stands for what is in it and below,
// unless something more exact is listed. What no row names may import nothing.
var may = []struct {
	from string
	to   []string
}{
	{"cmd/longshore", []string{"api", "controllers", "csi", "inventory", "nodeplugin", "populator", "provider", "upload", "webhook"}},
	// What is compiled with cgo is small: no client, no flags.
	{"cmd/longshore-mover", []string{"nodeplugin/mover", "nodeplugin/source/kinds"}},
	{"controllers", []string{"api", "csi", "populator", "provider"}},
	{"webhook", []string{"api", "populator"}},
	{"upload", []string{"api", "populator"}},
	{"populator", []string{"api", "populator"}},
	{"provider", []string{"provider"}},
	{"inventory", []string{"provider"}},
	{"api/crdgen", nil},
	{"api", []string{"api"}},
	{"csi", nil},

	// The stager joins all parts of the engine.
	{"nodeplugin", []string{"api/agent", "csi", "nodeplugin"}},
	{"nodeplugin/mover", []string{"nodeplugin/archive", "nodeplugin/blockcopy", "nodeplugin/device", "nodeplugin/digest", "nodeplugin/extent", "nodeplugin/fault", "nodeplugin/image", "nodeplugin/journal", "nodeplugin/sandbox", "nodeplugin/source"}},
	{"nodeplugin/image", []string{"nodeplugin/extent", "nodeplugin/fault", "nodeplugin/native", "nodeplugin/nbd", "nodeplugin/sandbox"}},
	{"nodeplugin/archive", []string{"nodeplugin/fault"}},
	{"nodeplugin/blockcopy", []string{"nodeplugin/extent", "nodeplugin/fault"}},
	{"nodeplugin/device", []string{"nodeplugin/extent", "nodeplugin/fault"}},
	{"nodeplugin/journal", []string{"nodeplugin/digest", "nodeplugin/extent", "nodeplugin/fault"}},
	{"nodeplugin/broker", []string{"nodeplugin/fault"}},
	{"nodeplugin/source", []string{"nodeplugin/fault", "nodeplugin/source"}},
	{"nodeplugin/instant", []string{"nodeplugin/nbd", "nodeplugin/sandbox", "nodeplugin/device", "nodeplugin/extent", "nodeplugin/fault"}},
	{"nodeplugin/pool", []string{"nodeplugin/device"}},
	{"nodeplugin/sandbox", nil},
	{"nodeplugin/nbd", nil},
	{"nodeplugin/native", nil},
	{"nodeplugin/digest", []string{"nodeplugin/extent"}},
	{"nodeplugin/extent", nil},
	{"nodeplugin/fault", nil},
}

// never lists for each folder the modules that its packages may not even reach
// through others.
var never = []struct {
	from  string
	paths []string
	why   string
}{
	{"cmd/longshore-mover", []string{"k8s.io", "google.golang.org/grpc", "github.com/spf13"}, "it is compiled with cgo, beside everything else"},
	{"nodeplugin", []string{"k8s.io/client-go", "sigs.k8s.io/controller-runtime"}, "what the node plugin needs of Kubernetes is an interface that it declares"},
	{"populator", []string{"k8s.io/client-go", "sigs.k8s.io/controller-runtime"}, "decisions have no client"},
	{"csi", []string{"k8s.io"}, "csi checks, calls and translates"},
	{"api/agent", []string{"k8s.io"}, "the agent's contract is plain gRPC"},
}

// noNames say nothing about what is in a package.
var noNames = []string{"common", "util", "utils", "helper", "helpers", "base", "manager"}

type pkg struct {
	ImportPath, Name, Dir string
	Imports, Deps         []string
}

func TestArrows(t *testing.T) {
	all := list(t)
	product := 0
	for _, p := range all {
		path := strings.TrimPrefix(p.ImportPath, module)
		if strings.HasPrefix(path, "test/") || strings.HasPrefix(path, "sanity") || path == "nodeplugin/source/sourcetest" {
			continue // tests may import what they test
		}
		product++
		allowed, ok := allowedOf(path)
		if !ok {
			t.Errorf("%s is in no folder of the layout: add a row to the table, or move it", path)
		}
		for _, i := range p.Imports {
			to, ours := strings.CutPrefix(i, module)
			if !ours {
				continue
			}
			if !slices.ContainsFunc(allowed, func(a string) bool { return within(to, a) }) {
				t.Errorf("%s imports %s; it may import: %s", path, to, strings.Join(allowed, ", "))
			}
		}
		for _, n := range never {
			if !within(path, n.from) {
				continue
			}
			for _, d := range p.Deps {
				if slices.ContainsFunc(n.paths, func(bad string) bool { return within(d, bad) }) {
					t.Errorf("%s reaches %s: %s", path, d, n.why)
				}
			}
		}
	}
	if product < 15 {
		t.Errorf("saw %d packages of the product, the list is not complete", product)
	}
}

func TestNames(t *testing.T) {
	for _, p := range list(t) {
		if slices.Contains(noNames, p.Name) || slices.Contains(noNames, filepath.Base(p.Dir)) {
			t.Errorf("package %s: a name that says what is in it", p.ImportPath)
		}
	}
}

// The top level is a table of contents; a new entry is a change of the layout.
func TestTopLevel(t *testing.T) {
	known := []string{".ci", ".git", ".gitignore", "LICENSE", "Makefile", "README.md", "go.mod", "go.sum",
		"api", "bin", "charts", "cmd", "controllers", "csi", "docs", "inventory", "nodeplugin", "out", "populator", "provider", "sanity", "test", "upload", "webhook"}
	tracked, err := exec.Command("git", "ls-files", "--full-name", "../..").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Fields(string(tracked)) {
		top, _, _ := strings.Cut(line, "/")
		if !slices.Contains(known, top) {
			t.Errorf("%s at the top level is not in the layout", top)
		}
	}
}

func TestWithin(t *testing.T) {
	for _, c := range []struct {
		path, folder string
		want         bool
	}{
		{"nodeplugin/image", "nodeplugin", true},
		{"nodeplugin", "nodeplugin", true},
		{"nodepluginx", "nodeplugin", false},
		{"k8s.io/api/core/v1", "k8s.io", true},
		{"csi", "nodeplugin", false},
	} {
		if got := within(c.path, c.folder); got != c.want {
			t.Errorf("within(%q, %q) = %v", c.path, c.folder, got)
		}
	}
	if to, ok := allowedOf("nodeplugin/source/httpsrc"); !ok || !slices.Contains(to, "nodeplugin/source") {
		t.Errorf("the most exact row does not win: %v", to)
	}
	if _, ok := allowedOf("elsewhere"); ok {
		t.Error("a folder without a row has one")
	}
}

func within(path, folder string) bool {
	return path == folder || strings.HasPrefix(path, folder+"/")
}

// allowedOf is the most exact row for path.
func allowedOf(path string) (to []string, ok bool) {
	longest := -1
	for _, row := range may {
		if within(path, row.from) && len(row.from) > longest {
			to, ok, longest = row.to, true, len(row.from)
		}
	}
	return to, ok
}

func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps=false", "-e=false", "-json=ImportPath,Name,Dir,Imports,Deps", "./...")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "GOFLAGS=")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, errs.String())
	}
	var all []pkg
	d := json.NewDecoder(bytes.NewReader(out))
	for {
		var p pkg
		err := d.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}
