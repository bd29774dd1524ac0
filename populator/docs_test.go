package populator

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// constants are the string constants of a package's files whose names begin so.
func constants(t *testing.T, glob, prefix string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(glob)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %v, %v", glob, files, err)
	}
	found := map[string]bool{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for i, id := range spec.Names {
				if i >= len(spec.Values) || !strings.HasPrefix(id.Name, prefix) {
					continue
				}
				if lit, ok := spec.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
					value, err := strconv.Unquote(lit.Value)
					if err != nil {
						t.Fatal(err)
					}
					found[value] = true
				}
			}
			return true
		})
	}
	if len(found) == 0 {
		t.Fatalf("%s has no constants named %s...", glob, prefix)
	}
	return found
}

func union(sets ...map[string]bool) map[string]bool {
	all := map[string]bool{}
	for _, s := range sets {
		for v := range s {
			all[v] = true
		}
	}
	return all
}

// listed are the names in the first column of a section's table.
func listed(t *testing.T, page, section string) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("../docs/" + page)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(text), "\n## "+section+"\n")
	if !ok {
		t.Fatalf("docs/%s has no section %q", page, section)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	names := map[string]bool{}
	for _, row := range regexp.MustCompile(`(?m)^\| ([^|]+) \|`).FindAllStringSubmatch(rest, -1) {
		for name := range strings.SplitSeq(row[1], ", ") {
			if name = strings.Trim(name, "`"); name != "reason" && name != "annotation" {
				names[name] = true
			}
		}
	}
	return names
}

// The docs list each reason and each annotation, and none that there is not.
func TestDocsListReasonsAndAnnotations(t *testing.T) {
	const claims, nodes = "volumeimportsource.md", "operations.md"
	record := constants(t, "../controllers/*.go", "reason")
	record[ReasonNodeUnavailable] = true
	for _, r := range []struct {
		page, section string
		want          map[string]bool
	}{
		{claims, "Reasons", union(constants(t, "*.go", "Reason"), constants(t, "../nodeplugin/fault/fault.go", ""))},
		{claims, "Annotations", constants(t, "*.go", "Annotation")},
		{nodes, "Conditions of a NodeVolume", record},
		{nodes, "Annotations of nodes", constants(t, "../controllers/*.go", "annotation")},
	} {
		got := listed(t, r.page, r.section)
		for name := range r.want {
			if !got[name] {
				t.Errorf("docs/%s, section %q, does not list %s", r.page, r.section, name)
			}
		}
		for name := range got {
			if !r.want[name] {
				t.Errorf("docs/%s, section %q, lists %s, which the code does not know", r.page, r.section, name)
			}
		}
	}
}
