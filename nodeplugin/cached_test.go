package nodeplugin

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/journal"
	"github.com/longshore-io/longshore/nodeplugin/pool"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/httpsrc"
)

func TestImageKey(t *testing.T) {
	strong := source.Validator{Size: 5, ETag: `"1"`}
	order := Order{Owner: "ns", Recipe: Recipe{Source: source.Spec{Kind: "http"}, Digest: "content"}}
	key := func(v source.Validator, change func(*Order)) (pool.ImageKey, bool) {
		o := order
		if change != nil {
			change(&o)
		}
		return imageKey(o, v)
	}
	want, ok := key(strong, nil)
	if !ok {
		t.Fatal("a strong validator gives no key")
	}
	for name, row := range map[string]struct {
		v      source.Validator
		change func(*Order)
		ok     bool
	}{
		"another namespace": {strong, func(o *Order) { o.Owner = "other" }, true},
		"another source":    {strong, func(o *Order) { o.Recipe.Digest = "other" }, true},
		"a checksum":        {strong, func(o *Order) { o.Recipe.Checksum = "md5:00" }, true},
		"another kind":      {strong, func(o *Order) { o.Recipe.Source.Kind = "s3" }, true},
		"another entity":    {source.Validator{Size: 5, ETag: `"2"`}, nil, true},
		"another size":      {source.Validator{Size: 6, ETag: `"1"`}, nil, true},
		"a digest":          {source.Validator{Size: 5, ETag: `"1"`, Digest: "sha256:00"}, nil, true},
		"a weak validator":  {source.Validator{Size: 5, ETag: `W/"1"`}, nil, false},
		"only a date":       {source.Validator{Size: 5, LastModified: "Sun, 09 Sep 2001 01:46:40 GMT"}, nil, false},
		"no namespace":      {strong, func(o *Order) { o.Owner = "" }, false},
		"no name of source": {strong, func(o *Order) { o.Recipe.Digest = "" }, false},
		"preallocated":      {strong, func(o *Order) { o.Recipe.Preallocate = true }, false},
	} {
		if got, ok := key(row.v, row.change); ok != row.ok || ok && got == want {
			t.Errorf("%s: key %+v, %t; want one: %t", name, got, ok, row.ok)
		}
	}
	// Credentials are not in the locator: each claim shows its own.
	if got, ok := key(strong, func(o *Order) { o.Recipe.Source.Params = []byte("secret") }); !ok || got != want {
		t.Errorf("with other credentials: %+v, %t", got, ok)
	}
}

// A second import of an image takes no byte of it from its server, whatever kind of
// volume the first and the second are; one that may not have it gets nothing.
func TestSecondImportMovesNothing(t *testing.T) {
	const imageBytes = 40 * testMiB
	image := noise(t, 9, imageBytes)
	f := start(t, 2400*testMiB, nil)
	f.shut(t)
	pools := poolConfig(f.pool, 2400*testMiB)
	pools[0].CachePercent = 50
	s, _, err := New(t.Context(), Config{Pools: pools, Fill: newFiller(t), Log: slog.New(slog.DiscardHandler), StageWait: 50 * time.Millisecond})
	must(t, err)
	f.Stager = s
	specs := map[string]pool.Spec{
		"block": {Bytes: 64 * testMiB, Mode: pool.Block},
		"ext4":  {Bytes: 640 * testMiB, Mode: pool.Filesystem, FSType: "ext4"}, // mkfs gives smaller ones blocks of 1024 bytes
		"xfs":   {Bytes: 400 * testMiB, Mode: pool.Filesystem, FSType: "xfs"},
	}
	file, err := os.Open(image)
	must(t, err)
	defer file.Close()
	sum := sumOf(t, file, imageBytes)
	w := serveFile(t, image)
	ctx := t.Context()
	ask := func(t *testing.T, id, kind, owner, auth string) (sent int64) {
		t.Helper()
		spec := specs[kind]
		spec.ID, spec.AwaitsData = id, true
		f.create(t, spec)
		params := httpsrc.Params{URL: w.url()}
		if auth != "" {
			params.Headers = []string{"Authorization: " + auth}
		}
		o := Order{Attempt: id, Owner: owner, Recipe: httpRecipe(t, params)}
		before := w.sent.Load()
		must(t, f.Populate(ctx, id, o))
		f.eventually(t, id+" has ended", func() bool { return f.job(id) == nil })
		return w.sent.Load() - before
	}
	check := func(t *testing.T, id, kind string) {
		t.Helper()
		if got := f.state(id); got != pool.Populated {
			t.Fatalf("%s is %s", id, got)
		}
		use := csi.Use{Mode: csi.Mode(specs[kind].Mode), FSType: specs[kind].FSType}
		must(t, f.Stage(ctx, id, f.path("s-"+id), use))
		must(t, f.Publish(ctx, id, f.path("s-"+id), f.path("t-"+id), use))
		name := f.path("t-" + id)
		if kind != "block" {
			checkDiskImage(t, name, specs[kind].Bytes)
			name = filepath.Join(name, "disk.img")
		}
		disk, err := os.Open(name)
		must(t, err)
		equal(t, disk, image)
		must(t, disk.Close())
		must(t, f.Unpublish(ctx, id, f.path("t-"+id)))
		must(t, f.Unstage(ctx, id, f.path("s-"+id)))
		must(t, f.Delete(ctx, id, "", ""))
	}
	// What a server sends to tell what it has: a recogniser's first bytes.
	const little = 4 * testMiB
	for first := range specs {
		t.Run("first "+first, func(t *testing.T) {
			owner := "ns-" + first
			if sent := ask(t, "first", first, owner, ""); sent < imageBytes/2 {
				t.Fatalf("the first import took %d bytes from the server", sent)
			}
			check(t, "first", first) // and its volume is written to and deleted
			for second := range specs {
				if sent := ask(t, "second", second, owner, ""); sent > little {
					t.Errorf("the import to a %s volume took %d bytes from the server", second, sent)
				}
				_, v, err := f.pools.find("second")
				must(t, err)
				if facts := factsOf(v); !facts.Cached || facts.VirtualBytes != imageBytes || facts.Digest != sum {
					t.Errorf("the volume's facts are %+v, want the digest %s", facts, sum)
				}
				check(t, "second", second)
			}
		})
	}
	w.mu.Lock()
	w.auth = "right"
	w.mu.Unlock()
	if ask(t, "refused", "block", "ns-block", "wrong"); f.state("refused") == pool.Populated {
		t.Error("a claim that the server refuses was filled from the cache")
	}
	if sent := ask(t, "allowed", "block", "ns-block", "right"); sent > little {
		t.Errorf("a claim with other credentials that are accepted took %d bytes", sent)
	}
	check(t, "allowed", "block")
	w.change(image, `"2"`)
	if sent := ask(t, "changed", "block", "ns-block", "right"); sent < imageBytes/2 {
		t.Errorf("the image has changed, and %d bytes were taken from the server", sent)
	}
	must(t, f.Delete(ctx, "refused", "", ""))
	check(t, "changed", "block")
}

// A node plugin that is killed while a volume takes its disk from the cache finds it
// soiled: nothing of what was there may stay, and the disk comes from the source.
func TestKilledWhileTakingFromTheCache(t *testing.T) {
	image := noise(t, 12, 20*testMiB)
	w := serveFile(t, image)
	job := volume(t, t.TempDir(), 32*testMiB, w.url())
	_, err := job.Target.WriteAt([]byte(strings.Repeat("of another disk ", 1<<16)), 24*testMiB) // some of what a clone had put there
	must(t, err)
	must(t, (&journal.Journal{Target: job.Volume, Recipe: job.Recipe.Digest, Bytes: job.TargetBytes, VirtualBytes: -1, Soiled: true}).Save(job.Journal))
	job.Cached = func(source.Validator) *pool.CachedImage {
		if !recorded(t, job).Zeroed {
			t.Error("the cache is asked for a volume that is not empty")
		}
		return nil
	}
	if res := fill(t, newFiller(t), job).ok(); res.Cached || res.VirtualSize != 20*testMiB {
		t.Errorf("%+v", res)
	}
	equal(t, job.Target, image)
	if recorded(t, job).Soiled {
		t.Error("the volume is complete and recorded as soiled")
	}
	behind := make([]byte, 12*testMiB)
	_, err = job.Target.ReadAt(behind, 20*testMiB)
	if must(t, err); len(bytes.Trim(behind, "\x00")) > 0 {
		t.Error("behind the disk's end something else stays")
	}
}
