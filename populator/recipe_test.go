package populator

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"strings"
	"testing"

	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/nodeplugin/source/httpsrc"
)

func http(change func(*cdiv1.DataVolumeSourceHTTP)) cdiv1.VolumeImportSourceSpec {
	h := &cdiv1.DataVolumeSourceHTTP{URL: "https://example.com/disk"}
	if change != nil {
		change(h)
	}
	return cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{HTTP: h}}
}

func with(spec cdiv1.VolumeImportSourceSpec, change func(*cdiv1.VolumeImportSourceSpec)) cdiv1.VolumeImportSourceSpec {
	change(&spec)
	return spec
}

func TestCheckSource(t *testing.T) {
	blank := cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{Blank: &cdiv1.DataVolumeBlankImage{}}}
	url := func(u string) cdiv1.VolumeImportSourceSpec {
		return http(func(h *cdiv1.DataVolumeSourceHTTP) { h.URL = u })
	}
	sum := func(s string) cdiv1.VolumeImportSourceSpec {
		return http(func(h *cdiv1.DataVolumeSourceHTTP) { h.Checksum = s })
	}
	rows := []struct {
		name   string
		spec   cdiv1.VolumeImportSourceSpec
		reason string
		words  string
	}{
		{"http", http(nil), "", ""},
		{"blank", blank, "", ""},
		{"content kubevirt", with(http(nil), func(s *cdiv1.VolumeImportSourceSpec) { s.ContentType = "kubevirt" }), "", ""},
		{"nothing", cdiv1.VolumeImportSourceSpec{}, "InvalidSource", "exactly one"},
		{"an empty source", cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{}}, "InvalidSource", "exactly one"},
		{"two members", cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{Blank: blank.Source.Blank, GCS: &cdiv1.DataVolumeSourceGCS{}}}, "InvalidSource", "gcs, blank"},
		{"registry", cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{Registry: &cdiv1.DataVolumeSourceRegistry{}}}, "SourceNotSupported", "registry"},
		{"imageio", cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{Imageio: &cdiv1.DataVolumeSourceImageIO{}}}, "SourceNotSupported", "imageio"},
		{"vddk", cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{VDDK: &cdiv1.DataVolumeSourceVDDK{}}}, "SourceNotSupported", "http and blank"},
		{"an archive", with(http(nil), func(s *cdiv1.VolumeImportSourceSpec) { s.ContentType = "archive" }), "", ""},
		{"an empty archive", with(blank, func(s *cdiv1.VolumeImportSourceSpec) { s.ContentType = "archive" }), "InvalidSource", "archive"},
		{"other content", with(http(nil), func(s *cdiv1.VolumeImportSourceSpec) { s.ContentType = "tar" }), "InvalidSource", `"tar"`},
		{"checkpoints", with(http(nil), func(s *cdiv1.VolumeImportSourceSpec) { s.Checkpoints = []cdiv1.DataVolumeCheckpoint{{}} }), "SourceNotSupported", "checkpoints"},
		{"no URL", url(""), "InvalidSource", "empty"},
		{"a garbled URL", url("http://exa mple.com:password"), "InvalidSource", "no URL"},
		{"another scheme", url("ftp://example.com/disk"), "InvalidSource", `"ftp"`},
		{"a file", url("/etc/passwd"), "InvalidSource", "scheme"},
		{"no host", url("https:///disk"), "InvalidSource", "host"},
		{"a header without a colon", http(func(h *cdiv1.DataVolumeSourceHTTP) { h.ExtraHeaders = []string{"X-Token"} }), "InvalidSource", "extraHeaders"},
		{"a header that is two", http(func(h *cdiv1.DataVolumeSourceHTTP) { h.ExtraHeaders = []string{"A: b\r\nHost: evil"} }), "InvalidSource", "extraHeaders"},
		{"a checksum", sum("md5:" + strings.Repeat("a", 32)), "", ""},
		{"a checksum of the wrong length", sum("sha256:" + strings.Repeat("a", 32)), "InvalidSource", "algorithm:hex"},
		{"a checksum of an unknown kind", sum("crc32:aaaaaaaa"), "InvalidSource", "algorithm:hex"},
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			p := CheckSource(&cdiv1.VolumeImportSource{Spec: r.spec})
			switch {
			case p == nil:
				if r.reason != "" {
					t.Errorf("passes, want %s", r.reason)
				}
			case p.Reason != r.reason || !strings.Contains(p.Message, r.words) || !p.Terminal:
				t.Errorf("got %+v, want %s %q", p, r.reason, r.words)
			case strings.Contains(p.Message, "password"):
				t.Errorf("the message repeats the URL: %s", p.Message)
			}
		})
	}
}

// An archive is another content than a disk of the same address, and chooses no disk.
func TestArchive(t *testing.T) {
	source := &cdiv1.VolumeImportSource{Spec: http(nil)}
	disk, problem := RecipeOf(ImportOf(source, v1alpha1.PopulateBind), Material{}, "", nil)
	if problem != nil || disk.Archive {
		t.Fatalf("%+v, %v", disk, problem)
	}
	source.Spec.ContentType = cdiv1.DataVolumeArchive
	r, problem := RecipeOf(ImportOf(source, v1alpha1.PopulateBind), Material{}, "", nil)
	if problem != nil || !r.Archive || r.Digest == disk.Digest || r.Content == disk.Content {
		t.Errorf("%+v, %v; of the disk %+v", r, problem, disk)
	}
	for _, a := range []string{AnnotationImageFormat, AnnotationImageDisk} {
		source.Annotations = map[string]string{a: "raw"}
		if p := CheckSource(source); p == nil || !p.Terminal || p.Reason != ReasonInvalidSource || !strings.Contains(p.Message, a) {
			t.Errorf("with %s: %+v", a, p)
		}
	}
}

// The formats that a person may name are raw and vhd.
func TestImageFormat(t *testing.T) {
	source := &cdiv1.VolumeImportSource{Spec: http(nil)}
	source.Annotations = map[string]string{AnnotationImageFormat: "raw", AnnotationImageDisk: "vm-disk1.vmdk"}
	if p := CheckSource(source); p != nil {
		t.Errorf("raw: %+v", p)
	}
	i := ImportOf(source, v1alpha1.PopulateBind)
	if r, problem := RecipeOf(i, Material{}, "", nil); problem != nil || r.Format != "raw" || r.Disk != "vm-disk1.vmdk" {
		t.Errorf("the recipe is %+v, %v", r, problem)
	}
	source.Annotations[AnnotationImageFormat] = "vhd"
	if p := CheckSource(source); p != nil {
		t.Errorf("vhd: %+v", p)
	}
	for _, format := range []string{"qcow2", "Raw", "auto"} {
		source.Annotations[AnnotationImageFormat] = format
		p := CheckSource(source)
		if p == nil || !p.Terminal || p.Reason != ReasonInvalidSource {
			t.Fatalf("%s: %+v", format, p)
		}
		for _, word := range []string{AnnotationImageFormat, `"` + format + `"`, "use raw or vhd"} {
			if !strings.Contains(p.Message, word) {
				t.Errorf("%q does not say %q", p.Message, word)
			}
		}
	}
}

// What can be reached is no part of the digests, but of the attempt.
func TestAttempt(t *testing.T) {
	r, problem := RecipeOf(importOf(http(nil)), Material{}, "", []byte("key"))
	if problem != nil {
		t.Fatal(problem)
	}
	before := *r
	r.Reach = Reach{Cluster: []string{"10.0.0.0/8"}, Services: []string{"10.0.0.7"}}
	if r.Digest != before.Digest || r.Content != before.Content || r.Attempt() == before.Attempt() {
		t.Errorf("%s %s, before %s %s", r.Attempt(), r.Content, before.Attempt(), before.Content)
	}
	ranges := *r
	ranges.Reach.Cluster = nil
	if ranges.Attempt() != r.Attempt() {
		t.Error("ranges of the cluster make another attempt")
	}
	if !r.tried(before.Attempt(), "Unauthorized") || r.tried(before.Attempt(), ReasonAddressNotAllowed) || !r.tried(r.Attempt(), ReasonAddressNotAllowed) {
		t.Error("only what was refused an address is another attempt where other Services are")
	}
}

func certificate(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func importOf(spec cdiv1.VolumeImportSourceSpec) *v1alpha1.Import {
	return &v1alpha1.Import{Source: spec.Source}
}

// The parameters are those that the node's http source reads, field for field. What of
// the source may be a password is in them, and not in the record.
func TestRecipeOfHTTP(t *testing.T) {
	insecure := true
	ca := certificate(t)
	source := &cdiv1.VolumeImportSource{Spec: http(func(h *cdiv1.DataVolumeSourceHTTP) {
		h.URL = "https://me:a%20@word@example.com/di@sk"
		h.SecretRef, h.SecretExtraHeaders, h.CertConfigMap = "login", []string{"h1", "login2"}, "ca"
		h.ExtraHeaders, h.InsecureSkipVerify = []string{"A: 1"}, &insecure
	})}
	i := ImportOf(source, v1alpha1.PopulateBind)
	if h := i.Source.HTTP; h.URL != "https://example.com/di@sk" || h.ExtraHeaders != nil {
		t.Errorf("the record has the URL %s and the headers %s", h.URL, h.ExtraHeaders)
	}
	m := Material{
		Source: source.Spec.Source,
		Secrets: map[string]map[string][]byte{
			"login":  {"accessKeyId": []byte("user"), "secretKey": []byte("sesame")},
			"h1":     {"b": []byte("B: 2\n\nC: 3\r\n"), "a": []byte("D: 4")},
			"login2": {"x": []byte("E: 5")},
		},
		ConfigMaps: map[string]map[string][]byte{"ca": {"one": []byte(ca), "two": []byte(ca)}},
	}
	r, problem := RecipeOf(i, m, "", []byte("key"))
	if problem != nil {
		t.Fatal(problem)
	}
	d := json.NewDecoder(strings.NewReader(string(r.Params)))
	d.DisallowUnknownFields()
	var p httpsrc.Params
	if err := d.Decode(&p); err != nil {
		t.Fatalf("the http source does not read %v", err)
	}
	if p.URL != source.Spec.Source.HTTP.URL || p.User != "user" || p.Password.Reveal() != "sesame" || !p.InsecureSkipVerify || p.CABundle != ca+ca {
		t.Errorf("params are %+v", p)
	}
	var secret []string
	for _, h := range p.SecretHeaders {
		secret = append(secret, h.Reveal())
	}
	if got := fmt.Sprint(p.Headers, secret); got != "[A: 1] [D: 4 B: 2 C: 3 E: 5]" {
		t.Errorf("headers are %s", got)
	}
	m.Source = nil
	if r, problem = RecipeOf(i, m, "", []byte("key")); problem != nil || json.Unmarshal(r.Params, &p) != nil || p.URL != i.Source.HTTP.URL {
		t.Errorf("without the source: %v, %+v, %s", problem, p, r)
	}
	elsewhere := http(func(h *cdiv1.DataVolumeSourceHTTP) { h.URL = "https://me:hush@example.org/disk" })
	m.Source = elsewhere.Source
	if r, problem = RecipeOf(i, m, "", []byte("key")); problem != nil || strings.Contains(string(r.Params), "hush") {
		t.Errorf("another host's password: %v, %s", problem, r.Params)
	}
	for _, text := range []string{fmt.Sprint(*r), fmt.Sprintf("%v", r), fmt.Sprintf("%#v", *r), fmt.Sprintf("%+v", r)} {
		if strings.Contains(text, "sesame") {
			t.Errorf("printed, the recipe shows the password: %s", text)
		}
	}
}

func TestRecipeMisses(t *testing.T) {
	login := importOf(http(func(h *cdiv1.DataVolumeSourceHTTP) { h.SecretRef = "login" }))
	headers := importOf(http(func(h *cdiv1.DataVolumeSourceHTTP) { h.SecretExtraHeaders = []string{"headers"} }))
	ca := importOf(http(func(h *cdiv1.DataVolumeSourceHTTP) { h.CertConfigMap = "ca" }))
	rows := []struct {
		name     string
		i        *v1alpha1.Import
		m        Material
		reason   string
		words    string
		terminal bool
	}{
		{"the Secret", login, Material{}, "SecretNotFound", `"login"`, false},
		{"the Secret's user", login, Material{Secrets: map[string]map[string][]byte{"login": {"secretKey": nil}}}, "SecretKeyNotFound", "accessKeyId", false},
		{"the Secret's password", login, Material{Secrets: map[string]map[string][]byte{"login": {"accessKeyId": nil}}}, "SecretKeyNotFound", "secretKey", false},
		{"the headers", headers, Material{}, "SecretNotFound", `"headers"`, false},
		{"a colon in a header", headers, Material{Secrets: map[string]map[string][]byte{"headers": {"k": []byte("tokentoken")}}}, "SecretInvalid", "key k", false},
		{"the ConfigMap", ca, Material{}, "ConfigMapNotFound", `"ca"`, false},
		{"certificates in it", ca, Material{ConfigMaps: map[string]map[string][]byte{"ca": {"k": []byte("x")}}}, "ConfigMapInvalid", "PEM", false},
		{"the source", &v1alpha1.Import{}, Material{}, "InvalidSource", "names no source", true},
		{"support", importOf(cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{S3: &cdiv1.DataVolumeSourceS3{}}}), Material{}, "SourceNotSupported", "http and blank", true},
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			recipe, p := RecipeOf(r.i, r.m, "", nil)
			if recipe != nil || p == nil || p.Reason != r.reason || p.Terminal != r.terminal || !strings.Contains(p.Message, r.words) {
				t.Fatalf("got %v, %+v, want %s %q", recipe, p, r.reason, r.words)
			}
			if strings.Contains(p.Message, "tokentoken") {
				t.Errorf("the message shows the Secret: %s", p.Message)
			}
		})
	}
}

// The digest changes with whatever may change the outcome, the content's with the image only.
func TestDigests(t *testing.T) {
	material := func(password string) Material {
		return Material{Secrets: map[string]map[string][]byte{"login": {"accessKeyId": []byte("u"), "secretKey": []byte(password)}}}
	}
	i := importOf(http(func(h *cdiv1.DataVolumeSourceHTTP) { h.SecretRef = "login" }))
	elsewhere := i.DeepCopy()
	elsewhere.Source.HTTP.URL += "2"
	raw := i.DeepCopy()
	raw.Format = "raw"
	second := i.DeepCopy()
	second.Disk = "2"
	summed := i.DeepCopy()
	summed.Source.HTTP.Checksum = "md5:" + strings.Repeat("a", 32)
	allocated := i.DeepCopy()
	allocated.Preallocation = true
	base, _ := RecipeOf(i, material("a"), "", []byte("key"))
	for _, r := range []struct {
		what                string
		i                   *v1alpha1.Import
		password, retry     string
		key                 string
		sameDigest, content bool
	}{
		{"nothing", i, "a", "", "key", true, true},
		{"the password", i, "b", "", "key", false, true},
		{"the wish to try again", i, "a", "1", "key", false, true},
		{"preallocation", allocated, "a", "", "key", false, true},
		{"the URL", elsewhere, "a", "", "key", false, false},
		{"the format", raw, "a", "", "key", false, false},
		{"the disk of a bundle", second, "a", "", "key", false, false},
		{"the checksum", summed, "a", "", "key", false, true},
		{"the key", i, "a", "", "other", false, false},
	} {
		got, problem := RecipeOf(r.i, material(r.password), r.retry, []byte(r.key))
		if problem != nil {
			t.Fatal(problem)
		}
		if (got.Digest == base.Digest) != r.sameDigest || (got.Content == base.Content) != r.content {
			t.Errorf("%s changes: same digest %v, same content %v", r.what, got.Digest == base.Digest, got.Content == base.Content)
		}
	}
	if b, problem := RecipeOf(importOf(cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{Blank: &cdiv1.DataVolumeBlankImage{}}}), Material{}, "", nil); problem != nil || b.Kind != "blank" || string(b.Params) != "{}" {
		t.Errorf("blank is %v, %v", b, problem)
	}
}

func TestNeedsOf(t *testing.T) {
	spec := http(func(h *cdiv1.DataVolumeSourceHTTP) {
		h.SecretRef, h.SecretExtraHeaders, h.CertConfigMap = "a", []string{"b", "a"}, "c"
	})
	if got := fmt.Sprint(NeedsOf(spec.Source)); got != "{[a b] [c]}" {
		t.Errorf("needs are %s", got)
	}
}
