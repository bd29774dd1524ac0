package device

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What udev makes of the rules is shown in test/udev.
func TestIgnoreLoops(t *testing.T) {
	dir := t.TempDir()
	rules := filepath.Join(dir, "rules.d", udevRules)
	if err := IgnoreLoops(dir, "/pool/*"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Dir(rules)); !os.IsNotExist(err) {
		t.Errorf("something was written for a udev that does not run: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "control"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, paths := range [][]string{{"/pool/*"}, {"/pool/*", `/with "quotes"|and [more]/*`}} {
		if err := IgnoreLoops(dir, paths...); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(rules)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for line := range strings.Lines(string(text)) {
			if p, ok := strings.CutPrefix(line, `ATTRS{loop/backing_file}=="`); ok {
				p, _, _ = strings.Cut(p, `"`)
				got = append(got, p)
			}
		}
		if want := []string{"/pool/*", "/with??quotes??and??more?/*"}[:len(paths)]; !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	entries, err := os.ReadDir(filepath.Dir(rules))
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 {
		t.Errorf("beside the rules there is %v", entries)
	}
}

// An unchanged file keeps its time, so that udev does not read all rules again.
func TestIgnoreLoopsLeavesWhatIsRight(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "control"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var before os.FileInfo
	for range 2 {
		if err := IgnoreLoops(dir, "/pool/*"); err != nil {
			t.Fatal(err)
		}
		now, err := os.Stat(filepath.Join(dir, "rules.d", udevRules))
		if err != nil {
			t.Fatal(err)
		}
		if before != nil && !os.SameFile(before, now) {
			t.Error("the same rules were written again")
		}
		before = now
	}
}
