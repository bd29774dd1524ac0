package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"sigs.k8s.io/yaml"
)

func TestManifestIsFilledIn(t *testing.T) {
	text, err := os.ReadFile("../../" + manifest)
	if err != nil {
		t.Fatal(err)
	}
	objects, err := fill(string(text), disk{url: "http://192.0.2.254:8000/disk.qcow2", bytes: 5<<20 + 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"url: http://192.0.2.254:8000/disk.qcow2", "storage: 6Mi"} {
		if !strings.Contains(objects, want) {
			t.Errorf("no %q in\n%s", want, objects)
		}
	}
	kinds := ""
	for doc := range strings.SplitSeq(objects, "\n---\n") {
		var o struct{ Kind string }
		if err := yaml.UnmarshalStrict([]byte(doc), &map[string]any{}); err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			t.Fatal(err)
		}
		kinds += o.Kind + " "
	}
	if kinds != "StorageClass VolumeImportSource PersistentVolumeClaim Pod " {
		t.Errorf("kinds %s", kinds)
	}
	if _, err := fill("url: elsewhere", disk{}); err == nil {
		t.Error("a manifest without the places to fill in was taken")
	}
}

func TestServerKeepsItsRate(t *testing.T) {
	content := bytes.Repeat([]byte("longshore"), 40<<10) // 360 KiB
	limit := rate.NewLimiter(rate.Limit(512<<10), burst)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(&slow{w, r.Context(), limit}, r, "x", time.Time{}, bytes.NewReader(content))
	}))
	defer s.Close()
	start := time.Now()
	resp, err := http.Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got bytes.Buffer
	if _, err := got.ReadFrom(resp.Body); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), content) {
		t.Error("other bytes came")
	}
	// 360 KiB less the first burst at 512 KiB/s.
	if took := time.Since(start); took < 500*time.Millisecond {
		t.Errorf("%d bytes took %s, too fast for the rate", got.Len(), took)
	}
}

func TestIndenter(t *testing.T) {
	var b bytes.Buffer
	w := indented(&b)
	for _, p := range []string{"a\nb", "c\n"} {
		if n, err := w.Write([]byte(p)); n != len(p) || err != nil {
			t.Errorf("%d %v", n, err)
		}
	}
	if got := b.String(); got != "   a\n   bc\n" {
		t.Errorf("%q", got)
	}
}
