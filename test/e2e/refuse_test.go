package e2e

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/longshore-io/longshore/test/e2e/lab"
	"github.com/longshore-io/longshore/test/peers"
)

// What a person does wrong is said on the claim and on the source, with what to do, before a byte is written.
func TestRefuse(t *testing.T) {
	web := lab.Web(t, peers.NginxOptions{Extra: `
location /401 { return 401; }
location /403 { return 403; }`})
	secure := lab.Web(t, peers.NginxOptions{TLS: true})
	lab.Tool(t, web.Root, "qemu-img", "create", "-f", "qcow2", "large.qcow2", "1G")
	lab.Tool(t, web.Root, "qemu-img", "create", "-f", "qcow2", "small.qcow2", "16M")
	lab.Tool(t, web.Root, "qemu-img", "create", "-f", "qcow2", "base.qcow2", "16M")
	lab.Tool(t, web.Root, "qemu-img", "create", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw", "backed.qcow2", "16M")
	lab.Tool(t, web.Root, "qemu-img", "create", "-f", "qcow2", "-o", "data_file=/etc/shadow,data_file_raw=on", "datafile.qcow2", "16M")
	web.Put("page.img", []byte("<!DOCTYPE html><html><body>Please log in</body></html>"+strings.Repeat(" ", 4096)))
	rows := []struct {
		name   string
		url    string
		source func(*cdiv1.VolumeImportSource)
		reason string
		words  []string
	}{
		{"an image larger than the volume", web.URL("large.qcow2"), nil, "ImageTooLarge", []string{"1073741824"}},
		{"a backing file", web.URL("backed.qcow2"), nil, "BackingFile", []string{"/etc/passwd"}},
		{"an external data file", web.URL("datafile.qcow2"), nil, "ExternalDataFile", nil},
		{"an HTML page", web.URL("page.img"), nil, "NotADiskImage", []string{"HTML"}},
		{"a page that wants a password", web.URL("401"), nil, "Unauthorized", []string{"secretRef"}},
		{"a forbidden page", web.URL("403"), nil, "Forbidden", nil},
		{"no such page", web.URL("404"), nil, "NotFound", []string{"url"}},
		{"an unknown host", "http://no-such-host.example.com/disk.img", nil, "UnknownHost", []string{"no-such-host.example.com"}},
		{"a certificate of an unknown authority", secure.URL("disk.img"), nil, "CertificateError", []string{"certConfigMap"}},
		{"an address that the administrator does not allow", "http://169.254.169.254/latest/meta-data", nil, "AddressNotAllowed", []string{"169.254.169.254"}},
		{"another checksum", web.URL("small.qcow2"), func(s *cdiv1.VolumeImportSource) {
			s.Spec.Source.HTTP.Checksum = "sha256:" + strings.Repeat("0", 64)
		}, "ChecksumMismatch", []string{strings.Repeat("0", 64)}},
		{"a source that is not supported yet", "", func(s *cdiv1.VolumeImportSource) {
			s.Spec.Source = &cdiv1.ImportSourceType{S3: &cdiv1.DataVolumeSourceS3{URL: "http://s3.example.com/bucket/disk.img"}}
		}, "SourceNotSupported", []string{"s3", "http"}},
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			ns := world.NewNamespace(t)
			class := world.StorageClass(t, lab.Class{})
			var more []func(*cdiv1.VolumeImportSource)
			if r.source != nil {
				more = append(more, r.source)
			}
			source := world.HTTPSource(t, ns, "image", r.url, more...)
			claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: 64 * mib, Block: true, ImportSource: "image"})
			saysOnClaim(t, claim, r.reason, r.words...)
			world.Eventually(t, "events name "+r.reason, func(ctx context.Context) error {
				onClaim, err := world.Events(ctx, claim)
				if err != nil {
					return err
				}
				onSource, err := world.Events(ctx, source)
				if err != nil {
					return err
				}
				for what, events := range map[string][]string{"claim": onClaim, "source": onSource} {
					if !strings.Contains(strings.Join(events, "\n"), r.reason) {
						return fmt.Errorf("events on the %s: %q", what, events)
					}
				}
				return nil
			})
			world.Eventually(t, "the source says "+r.reason, func(ctx context.Context) error {
				out, err := world.Cluster.Kubectl(ctx, "-n", ns, "get", "volumeimportsource", "image", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")]}`)
				if err != nil {
					return err
				}
				if !strings.Contains(string(out), r.reason) {
					return fmt.Errorf("condition Ready is %s", out)
				}
				return nil
			})
			world.Must(t, world.Get(t.Context(), keyOf(claim), claim))
			if claim.Status.Phase != corev1.ClaimPending {
				t.Errorf("claim is %s, want Pending", claim.Status.Phase)
			}
		})
	}
}

// A claim that failed for good is filled once the person has mended what the message named.
func TestMend(t *testing.T) {
	t.Parallel()
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{})
	img := lab.Serve(t, lab.Image{Bytes: 16 * mib, User: "tenant", Password: "sesame"})
	world.HTTPSource(t, ns, "image", img.URL("qcow2"), func(s *cdiv1.VolumeImportSource) { s.Spec.Source.HTTP.SecretRef = "login" })
	claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: class, Bytes: 16 * mib, Block: true, ImportSource: "image"})
	saysOnClaim(t, claim, "SecretNotFound", "login")
	secret := &corev1.Secret{StringData: map[string]string{"accessKeyId": "tenant", "secretKey": "wrong"}}
	secret.Namespace, secret.Name = ns, "login"
	world.Must(t, world.Create(t.Context(), secret))
	saysOnClaim(t, claim, "Unauthorized", "login")
	secret.StringData = map[string]string{"secretKey": "sesame"}
	world.Must(t, world.Update(t.Context(), secret))
	checkRead(t, world.Output(t, world.Pod(t, claim, "consumer", read(img.Bytes, true))), img, true)
}

// An image that a Service serves is fetched for claims of the Service's own
// namespace, and for no others; nor is anything else of the cluster's network (R18).
func TestServices(t *testing.T) {
	t.Parallel()
	ns, other := world.NewNamespace(t), world.NewNamespace(t)
	img := lab.Serve(t, lab.Image{Bytes: 16 * mib})
	own, theirs := serviceFor(t, ns, img), serviceFor(t, other, img)
	var nodes corev1.NodeList
	world.Must(t, world.List(t.Context(), &nodes))
	node := nodes.Items[0].Status.Addresses[0].Address
	class := world.StorageClass(t, lab.Class{})
	for i, r := range []struct{ name, host, address string }{
		{"a Service of another namespace by its address", theirs.Spec.ClusterIP, theirs.Spec.ClusterIP},
		{"a Service of another namespace by its name", dnsName(theirs), theirs.Spec.ClusterIP},
		{"the API server", "kubernetes.default.svc.cluster.local", ""},
		{"a node", node, node},
	} {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			name := fmt.Sprintf("refused-%d", i)
			world.HTTPSource(t, ns, name, at(t, img, r.host))
			claim := world.Claim(t, lab.Claim{Namespace: ns, Name: name, Class: class, Bytes: 16 * mib, Block: true, ImportSource: name})
			saysOnClaim(t, claim, "AddressNotAllowed", r.address, "fetchPolicy.allow")
		})
	}
	t.Run("a Service of the claim's namespace", func(t *testing.T) {
		t.Parallel()
		world.HTTPSource(t, ns, "image", at(t, img, dnsName(own)))
		waits := world.StorageClass(t, lab.Class{Wait: true})
		claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "disk", Class: waits, Bytes: 16 * mib, Block: true, ImportSource: "image"})
		checkRead(t, world.Output(t, world.Pod(t, claim, "consumer", read(img.Bytes, true))), img, true)
		// Clients that read events take this one for the end (R5).
		events, err := world.Events(t.Context(), claim)
		world.Must(t, err)
		if all := strings.Join(events, "\n"); strings.Contains(all, "ProvisioningFailed") || !strings.Contains(all, "importSucceeded") {
			t.Errorf("events of the claim:\n%s", all)
		}
	})
}

// serviceFor makes a Service of a namespace that leads to the image's server.
func serviceFor(t *testing.T, ns string, img *lab.Served) *corev1.Service {
	t.Helper()
	u, err := url.Parse(img.URL("raw"))
	world.Must(t, err)
	port, err := strconv.ParseInt(u.Port(), 10, 32)
	world.Must(t, err)
	number, tcp := int32(port), corev1.ProtocolTCP
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "images"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: number}}}}
	world.Must(t, world.Create(t.Context(), s))
	world.Must(t, world.Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: ns, GenerateName: "images-", Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{u.Hostname()}}},
		Ports: []discoveryv1.EndpointPort{{Port: &number, Protocol: &tcp}},
	}))
	return s
}

func dnsName(s *corev1.Service) string {
	return fmt.Sprintf("%s.%s.svc.cluster.local", s.Name, s.Namespace)
}

// at is the image's URL on another host.
func at(t *testing.T, img *lab.Served, host string) string {
	t.Helper()
	u, err := url.Parse(img.URL("qcow2"))
	world.Must(t, err)
	u.Host = net.JoinHostPort(host, u.Port())
	return u.String()
}
