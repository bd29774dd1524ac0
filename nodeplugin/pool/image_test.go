package pool

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/device"
)

func testKey(validator string) ImageKey {
	return ImageKey{Scope: "ns", Locator: "http:x", Validator: validator}
}

// keep keeps the first two MiB of a volume, swapped.
func keep(p *Pool, v Volume, validator string) error {
	f, err := os.Open(v.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	return p.KeepImage(context.Background(), Image{ImageKey: testKey(validator), Format: "raw", VirtualBytes: 2*mib - 10}, f,
		[]device.Mapped{{Logical: 0, Physical: mib, Length: mib}, {Logical: mib, Physical: 0, Length: mib}})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// cachePool is an embedded pool that may be all cache.
func cachePool(t *testing.T, percent int) *Pool {
	t.Helper()
	p := newPool(t, MinBytes)
	p.cfg.CachePercent = percent
	return p
}

func has(t *testing.T, p *Pool, validator string) bool {
	t.Helper()
	c := p.FindImage(testKey(validator))
	if c == nil {
		return false
	}
	must(t, c.Close())
	return true
}

func TestImage(t *testing.T) {
	p := cachePool(t, 50)
	v := create(t, p, Spec{ID: "v", Bytes: 3 * mib})
	data := writeRandom(t, v.Path, 0, 3*mib)
	if has(t, p, "1") {
		t.Error("found what was never kept")
	}
	before, err := p.Stats()
	must(t, err)
	must(t, keep(p, v, "1"))
	must(t, keep(p, v, "1"))
	after, err := p.Stats()
	must(t, err)
	if before.AvailableBytes != after.AvailableBytes || before.ProvisionedBytes != after.ProvisionedBytes {
		t.Errorf("the cache counts as used: %+v, before %+v", after, before)
	}
	for _, k := range []ImageKey{
		{Scope: "other", Locator: "http:x", Validator: "1"}, {Scope: "ns", Locator: "http:y", Validator: "1"}, testKey("2"),
		{Scope: "n", Locator: "shttp:x", Validator: "1"}, {},
	} {
		if p.FindImage(k) != nil {
			t.Errorf("an image was found by %+v", k)
		}
	}
	writeRandom(t, v.Path, 0, 3*mib) // its owner uses the volume
	must(t, p.Delete(t.Context(), "v"))
	p.forget()
	p = open(t, Config{Name: "test", Dir: p.cfg.Dir, Bytes: MinBytes, CachePercent: 50})
	c := p.FindImage(testKey("1"))
	if c == nil {
		t.Fatal("the image is gone after a restart")
	}
	w := create(t, p, Spec{ID: "w", Bytes: 4 * mib})
	f, err := os.OpenFile(w.Path, os.O_RDWR, 0)
	must(t, err)
	must(t, p.DropImage(testKey("1"))) // evicted under the reader
	must(t, c.CloneTo(f))
	must(t, errors.Join(c.Close(), f.Close()))
	want := append(append(bytes.Clone(data[mib:2*mib]), data[:mib]...), make([]byte, 2*mib)...)
	if !bytes.Equal(read(t, w.Path, 0, 4*mib), want) {
		t.Error("the clone holds something else")
	}
	if s := p.CacheStats(); s.Hits != 1 || s.Misses != 0 || s.Evictions != 1 || s.Images != 0 || s.Bytes != 0 {
		t.Errorf("got %+v", s)
	}
}

func TestCacheMakesWay(t *testing.T) {
	p := cachePool(t, 90)
	v := create(t, p, Spec{ID: "v", Bytes: 3 * mib})
	writeRandom(t, v.Path, 0, 3*mib)
	for _, name := range []string{"1", "2", "3"} {
		must(t, keep(p, v, name))
	}
	now := time.Now()
	for name, age := range map[string]time.Duration{"1": 2 * time.Hour, "2": 3 * time.Hour, "3": time.Hour} {
		i := p.images[testKey(name).id()]
		i.UsedAt = now.Add(-age)
		p.images[testKey(name).id()] = i
	}
	s, err := p.Stats()
	must(t, err)
	// Two images' room is left as it is.
	create(t, p, Spec{ID: "most", Bytes: s.AvailableBytes - 4*mib})
	if s := p.CacheStats(); s.Images != 2 || s.Evictions != 1 {
		t.Errorf("got %+v, want one image evicted", s)
	}
	if has(t, p, "2") || !has(t, p, "1") || !has(t, p, "3") {
		t.Error("the wrong image was evicted")
	}
	// One that would need another's room: the oldest goes, and no volume's room.
	must(t, keep(p, v, "4"))
	if has(t, p, "1") || !has(t, p, "3") || !has(t, p, "4") {
		t.Error("an image of now did not replace the oldest")
	}
	if s, err = p.Stats(); err != nil || s.AvailableBytes != 4*mib {
		t.Errorf("available %d bytes, %v, want 4 MiB", s.AvailableBytes, err)
	}
	create(t, p, Spec{ID: "rest", Bytes: s.AvailableBytes})
	if s := p.CacheStats(); s.Images != 0 {
		t.Errorf("got %+v, want no image", s)
	}
	must(t, keep(p, v, "5"))
	if has(t, p, "5") {
		t.Error("an image was kept in room that volumes were promised")
	}
}

func TestCacheHasALimit(t *testing.T) {
	p := cachePool(t, 1)
	v := create(t, p, Spec{ID: "v", Bytes: 3 * mib})
	writeRandom(t, v.Path, 0, 3*mib)
	must(t, keep(p, v, "1"))
	must(t, keep(p, v, "2"))
	if s := p.CacheStats(); s.Images != 1 || s.Bytes > p.usable/100 || !has(t, p, "2") {
		t.Errorf("a cache of at most %d bytes: %+v", p.usable/100, s)
	}
	p.cfg.CachePercent = 0
	must(t, keep(p, v, "3"))
	if has(t, p, "2") || has(t, p, "3") {
		t.Error("a cache that is switched off is used")
	}
}

// What is wrong with an image on the disk is found at the start, and it goes.
func TestDamagedImage(t *testing.T) {
	for name, damage := range map[string]func(folder string) error{
		"record":         func(f string) error { return os.WriteFile(filepath.Join(f, metaName), []byte("{"), 0o600) },
		"no data":        func(f string) error { return os.Remove(filepath.Join(f, dataName)) },
		"short data":     func(f string) error { return os.Truncate(filepath.Join(f, dataName), mib) },
		"another's name": func(f string) error { return os.Rename(f, f[:len(f)-1]+"_") },
	} {
		t.Run(name, func(t *testing.T) {
			p := cachePool(t, 50)
			v := create(t, p, Spec{ID: "v", Bytes: 3 * mib})
			writeRandom(t, v.Path, 0, 3*mib)
			must(t, keep(p, v, "1"))
			must(t, damage(filepath.Join(p.root, imagesName, testKey("1").id())))
			p.forget()
			p = open(t, Config{Name: "test", Dir: p.cfg.Dir, Bytes: MinBytes, CachePercent: 50})
			if has(t, p, "1") || len(p.Repairs()) != 1 {
				t.Errorf("image found: %t, repairs %q", has(t, p, "1"), p.Repairs())
			}
			checkFiles(t, p, "after the repair")
		})
	}
}

// Images are kept, found, cloned and evicted at once, and volumes made.
func TestImagesAtOnce(t *testing.T) {
	p := cachePool(t, 2) // room for two or three
	v := create(t, p, Spec{ID: "v", Bytes: 3 * mib})
	data := writeRandom(t, v.Path, 0, 3*mib)
	want := append(bytes.Clone(data[mib:2*mib]), data[:mib]...)
	var wg sync.WaitGroup
	for worker := range 4 {
		w := create(t, p, Spec{ID: "w" + string(rune('0'+worker)), Bytes: 2 * mib})
		wg.Go(func() {
			f, err := os.OpenFile(w.Path, os.O_RDWR, 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			for n := range 25 {
				name := string(rune('a' + (n+worker)%5))
				if err := keep(p, v, name); err != nil {
					t.Error(err)
				}
				c := p.FindImage(testKey(name))
				if c == nil {
					continue
				}
				if n%3 == 0 {
					if err := p.DropImage(testKey(name)); err != nil {
						t.Error(err)
					}
				}
				if err := errors.Join(c.CloneTo(f), c.Close()); err != nil {
					t.Error(err)
				} else if !bytes.Equal(read(t, w.Path, 0, 2*mib), want) {
					t.Error("a clone holds something else")
				}
			}
		})
	}
	wg.Wait()
	checkFiles(t, p, "at the end")
}
