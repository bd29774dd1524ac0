package populator

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"

	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/longshore-io/longshore/api/v1alpha1"
)

// Problem is why a claim cannot go on now. Terminal: not before somebody changes something.
type Problem struct {
	Reason, Message string
	Terminal        bool
}

func terminal(reason, format string, args ...any) *Problem {
	return &Problem{Reason: reason, Message: fmt.Sprintf(format, args...), Terminal: true}
}

func transient(reason, format string, args ...any) *Problem {
	return &Problem{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Keys of the Secret that secretRef names.
const (
	secretUser     = "accessKeyId"
	secretPassword = "secretKey"
)

// AnnotationImageFormat on a VolumeImportSource names the format of an image that
// cannot be recognised, or not in time: raw, for a disk that bears no signature, and
// vhd, for a fixed one from a source that has no ranges.
const AnnotationImageFormat = "longshore.dev/image-format"

// AnnotationImageDisk on a VolumeImportSource chooses one of several disks in a tar or
// OVA: by its file's name, its id in the OVA's description or its number from 1.
const AnnotationImageDisk = "longshore.dev/image-disk"

const formatRaw, formatVHD = "raw", "vhd"

var checksumLengths = map[string]int{"md5": 32, "sha1": 40, "sha256": 64, "sha512": 128}

var checksumPattern = regexp.MustCompile(`^([a-z0-9]+):([0-9a-fA-F]+)$`)

// supported is what CheckSource tells those who ask for something else.
const supported = "http and blank are supported"

// CheckSource tells what of a VolumeImportSource makes no sense, or is not
// supported yet; nil when it can be imported.
func CheckSource(source *cdiv1.VolumeImportSource) *Problem {
	spec := &source.Spec
	members := membersOf(spec.Source)
	format := source.Annotations[AnnotationImageFormat]
	switch {
	case format != "" && format != formatRaw && format != formatVHD:
		return terminal(ReasonInvalidSource, "the annotation %s is %q: use %s or %s, or leave it out to have the image's format recognised", AnnotationImageFormat, format, formatRaw, formatVHD)
	case len(members) == 0:
		return terminal(ReasonInvalidSource, "spec.source has no member: give exactly one of http, s3, registry, gcs, blank, imageio, vddk (%s)", supported)
	case len(members) > 1:
		return terminal(ReasonInvalidSource, "spec.source has the members %s: give exactly one", strings.Join(members, ", "))
	}
	switch spec.ContentType {
	case "", cdiv1.DataVolumeKubeVirt:
	case cdiv1.DataVolumeArchive:
		if members[0] == "blank" {
			return terminal(ReasonInvalidSource, "spec.contentType is archive, but an empty disk is none: use kubevirt")
		}
		for _, a := range []string{AnnotationImageFormat, AnnotationImageDisk} {
			if source.Annotations[a] != "" {
				return terminal(ReasonInvalidSource, "spec.contentType is archive, and the annotation %s is for images of disks: leave one of them out", a)
			}
		}
	default:
		return terminal(ReasonInvalidSource, "spec.contentType is %q: use kubevirt or archive", spec.ContentType)
	}
	if len(spec.Checkpoints) > 0 {
		return terminal(ReasonSourceNotSupported, "spec.checkpoints are not supported yet: leave them out")
	}
	switch members[0] {
	case "blank":
		return nil
	case "http":
		return checkHTTP(spec.Source.HTTP)
	}
	return terminal(ReasonSourceNotSupported, "spec.source.%s is not supported yet: %s", members[0], supported)
}

func membersOf(s *cdiv1.ImportSourceType) []string {
	var m []string
	if s == nil {
		return m
	}
	for _, x := range []struct {
		name string
		set  bool
	}{
		{"http", s.HTTP != nil}, {"s3", s.S3 != nil}, {"registry", s.Registry != nil}, {"gcs", s.GCS != nil},
		{"blank", s.Blank != nil}, {"imageio", s.Imageio != nil}, {"vddk", s.VDDK != nil},
	} {
		if x.set {
			m = append(m, x.name)
		}
	}
	return m
}

func checkHTTP(h *cdiv1.DataVolumeSourceHTTP) *Problem {
	if h.URL == "" {
		return terminal(ReasonInvalidSource, "spec.source.http.url is empty: give the URL of the image")
	}
	u, err := url.Parse(h.URL)
	switch {
	case err != nil:
		// The error would repeat the URL, with the password that may be in it.
		return terminal(ReasonInvalidSource, "spec.source.http.url is no URL: give http://host/path or https://host/path")
	case u.Scheme != "http" && u.Scheme != "https":
		return terminal(ReasonInvalidSource, "spec.source.http.url has the scheme %q: use http or https", u.Scheme)
	case u.Host == "":
		return terminal(ReasonInvalidSource, "spec.source.http.url names no host")
	}
	for _, header := range h.ExtraHeaders {
		if !headerPattern.MatchString(header) {
			return terminal(ReasonInvalidSource, `spec.source.http.extraHeaders has an entry that is not "Name: value"`)
		}
	}
	if h.Checksum == "" {
		return nil
	}
	m := checksumPattern.FindStringSubmatch(h.Checksum)
	if m == nil || len(m[2]) != checksumLengths[m[1]] {
		return terminal(ReasonInvalidSource, "spec.source.http.checksum is %q: give algorithm:hex with md5, sha1, sha256 or sha512", h.Checksum)
	}
	return nil
}

var headerPattern = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\x00]*$")

// Needs names the Secrets and ConfigMaps of the claim's namespace that a source refers to.
type Needs struct {
	Secrets, ConfigMaps []string
}

// NeedsOf lists what a source refers to, each name once.
func NeedsOf(s *cdiv1.ImportSourceType) Needs {
	var n Needs
	if s == nil || s.HTTP == nil {
		return n
	}
	for _, name := range append([]string{s.HTTP.SecretRef}, s.HTTP.SecretExtraHeaders...) {
		if name != "" && !slices.Contains(n.Secrets, name) {
			n.Secrets = append(n.Secrets, name)
		}
	}
	if s.HTTP.CertConfigMap != "" {
		n.ConfigMaps = []string{s.HTTP.CertConfigMap}
	}
	return n
}

// names lists the objects for a message: Secret "a", ConfigMap "b".
func (n Needs) names() []string {
	var s []string
	for _, name := range n.Secrets {
		s = append(s, fmt.Sprintf("Secret %q", name))
	}
	for _, name := range n.ConfigMaps {
		s = append(s, fmt.Sprintf("ConfigMap %q", name))
	}
	return s
}

// Material is what the objects of Needs hold, by name and key; an object that
// does not exist is absent.
type Material struct {
	// Source is that of the VolumeImportSource as it is now, nil where that is gone:
	// what may be a password there is in no record.
	Source     *cdiv1.ImportSourceType
	Secrets    map[string]map[string][]byte
	ConfigMaps map[string]map[string][]byte
}

// Recipe is everything that decides how a volume is filled. Params hold
// credentials: a Recipe is handed to one node and never printed.
type Recipe struct {
	Kind        string
	Params      json.RawMessage
	Preallocate bool
	// Digest stands for all of it, and for the claim's wish to try again.
	Digest string
	// Content stands for what alone decides the bytes: with other credentials a transfer
	// goes on where it was.
	Content string
	// Format of the image where the source's author names it; "" has it recognised.
	Format string
	// Disk of a bundle where the source's author chooses one.
	Disk string
	// Archive: the source is a tar, which is unpacked into the volume's filesystem.
	Archive bool
	// Checksum that the source's bytes must have, "algorithm:hex"; "" is none.
	Checksum string
	// Reach is as of now, and no part of what the digests stand for.
	Reach Reach
}

// Reach is what a transfer may connect to inside the cluster: of Cluster, nothing
// but Services. Both list addresses and CIDRs.
type Reach struct {
	Cluster, Services []string
}

// Attempt names the recipe, and what it could reach, for the node to remember.
func (r Recipe) Attempt() string {
	return r.Digest + "." + digest(nil, r.Reach.Services...)[:16]
}

// tried tells whether an attempt, which failed for good, would be no other today.
// Services that come and go matter to one that was refused an address, and to no other.
func (r Recipe) tried(attempt, failed string) bool {
	if failed == ReasonAddressNotAllowed {
		return attempt == r.Attempt()
	}
	was, _, _ := strings.Cut(attempt, ".")
	return was == r.Digest
}

func (r Recipe) String() string   { return r.Kind + " " + r.Digest }
func (r Recipe) GoString() string { return r.String() }

// httpParams are the parameters of source kind http, as the node plugin reads them.
type httpParams struct {
	URL                string   `json:"url"`
	User               string   `json:"user,omitempty"`
	Password           string   `json:"password,omitempty"`
	Headers            []string `json:"headers,omitempty"`
	SecretHeaders      []string `json:"secretHeaders,omitempty"`
	CABundle           string   `json:"caBundle,omitempty"`
	InsecureSkipVerify bool     `json:"insecureSkipVerify,omitempty"`
}

// RecipeOf puts source and material together. key makes the digest one that
// nobody can use to guess a password; retry is the claim's annotation.
func RecipeOf(i *v1alpha1.Import, m Material, retry string, key []byte) (*Recipe, *Problem) {
	r := &Recipe{Preallocate: i.Preallocation, Format: i.Format, Disk: i.Disk, Archive: i.ContentType == cdiv1.DataVolumeArchive}
	var params any = struct{}{}
	switch s := i.Source; {
	case s == nil:
		return nil, terminal(ReasonInvalidSource, "the record of the volume names no source: delete the claim and make it again")
	case s.Blank != nil:
		r.Kind = "blank"
	case s.HTTP != nil:
		p, problem := httpOf(s.HTTP, m)
		if problem != nil {
			return nil, problem
		}
		r.Kind, params = "http", p
	default:
		return nil, terminal(ReasonSourceNotSupported, "this kind of source is not supported yet: %s", supported)
	}
	var err error
	if r.Params, err = json.Marshal(params); err != nil {
		return nil, terminal(ReasonInvalidSource, "the source's parameters are no JSON: %v", err)
	}
	if h := i.Source.HTTP; h != nil {
		r.Checksum = h.Checksum
	}
	all := []string{r.Kind, string(r.Params), fmt.Sprint(r.Preallocate), retry, r.Format, r.Disk, r.Checksum}
	content := []string{r.Kind, r.Format, r.Disk}
	if r.Archive {
		all, content = append(all, "archive"), append(content, "archive")
	}
	r.Digest = digest(key, all...)
	if h := i.Source.HTTP; h != nil {
		content = append(content, h.URL)
	}
	r.Content = digest(key, content...)
	return r, nil
}

func digest(key []byte, parts ...string) string {
	mac := hmac.New(sha256.New, key)
	for _, part := range parts {
		fmt.Fprintf(mac, "%d:%s", len(part), part)
	}
	return hex.EncodeToString(mac.Sum(nil))
}

func httpOf(h *cdiv1.DataVolumeSourceHTTP, m Material) (*httpParams, *Problem) {
	p := &httpParams{URL: h.URL, InsecureSkipVerify: h.InsecureSkipVerify != nil && *h.InsecureSkipVerify}
	if m.Source != nil && m.Source.HTTP != nil && withoutUser(m.Source.HTTP.URL) == h.URL {
		p.URL, p.Headers = m.Source.HTTP.URL, m.Source.HTTP.ExtraHeaders
	}
	if h.SecretRef != "" {
		secret, ok := m.Secrets[h.SecretRef]
		if !ok {
			return nil, transient(ReasonSecretNotFound, "Secret %q of spec.source.http.secretRef does not exist in the claim's namespace: create it with the keys %s and %s", h.SecretRef, secretUser, secretPassword)
		}
		for _, k := range []string{secretUser, secretPassword} {
			if _, ok := secret[k]; !ok {
				return nil, transient(ReasonSecretKeyNotFound, "Secret %q of spec.source.http.secretRef has no key %s: add it", h.SecretRef, k)
			}
		}
		p.User, p.Password = string(secret[secretUser]), string(secret[secretPassword])
	}
	for _, name := range h.SecretExtraHeaders {
		secret, ok := m.Secrets[name]
		if !ok {
			return nil, transient(ReasonSecretNotFound, `Secret %q of spec.source.http.secretExtraHeaders does not exist in the claim's namespace: create it; each key holds lines "Name: value"`, name)
		}
		for _, k := range slices.Sorted(maps.Keys(secret)) {
			for line := range strings.Lines(string(secret[k])) {
				line = strings.TrimSpace(line)
				switch {
				case line == "":
				case !headerPattern.MatchString(line):
					return nil, transient(ReasonSecretInvalid, `Secret %q of spec.source.http.secretExtraHeaders has a line in key %s that is not "Name: value": correct it`, name, k)
				default:
					p.SecretHeaders = append(p.SecretHeaders, line)
				}
			}
		}
	}
	if h.CertConfigMap != "" {
		cm, ok := m.ConfigMaps[h.CertConfigMap]
		if !ok {
			return nil, transient(ReasonConfigMapNotFound, "ConfigMap %q of spec.source.http.certConfigMap does not exist in the claim's namespace: create it; each key holds certificates in PEM", h.CertConfigMap)
		}
		var pem strings.Builder
		for _, k := range slices.Sorted(maps.Keys(cm)) {
			pem.WriteString(strings.TrimSpace(string(cm[k])) + "\n")
		}
		if !x509.NewCertPool().AppendCertsFromPEM([]byte(pem.String())) {
			return nil, transient(ReasonConfigMapInvalid, "ConfigMap %q of spec.source.http.certConfigMap holds no certificate in PEM: correct it", h.CertConfigMap)
		}
		p.CABundle = pem.String()
	}
	return p, nil
}
