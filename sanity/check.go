package sanity

import (
	_ "embed"
	"slices"
	"strings"
	"testing"
)

//go:embed README.md
var readme string

// Expected lists the specs that may be skipped, as the README has them: those of
// capabilities that the driver does not announce.
func Expected() []string {
	var names []string
	for line := range strings.Lines(readme) {
		if name, ok := strings.CutPrefix(line, "- `"); ok {
			name, _, _ = strings.Cut(name, "`")
			names = append(names, name)
		}
	}
	return names
}

// Check fails the test on specs that failed, that were skipped for no reason
// that the README gives, or that the README lists and that ran.
func Check(t testing.TB, r Result) {
	t.Helper()
	for _, name := range r.Failed {
		t.Errorf("failed: %s", name)
	}
	expected := Expected()
	for _, name := range r.Skipped {
		if !slices.Contains(expected, name) {
			t.Errorf("skipped, and the README does not say why: %s", name)
		}
	}
	for _, name := range append(slices.Clone(r.Passed), r.Failed...) {
		if slices.Contains(expected, name) {
			t.Errorf("the README lists as skipped what has run: %s", name)
		}
	}
	if t.Failed() {
		t.Log(r.Output)
	}
}
