package e2e

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/test/e2e/lab"
)

// A node that has imported an image fills the next claim of the namespace with it
// and takes no data from the server; another namespace's claim fetches it itself,
// and one whose credentials the server refuses gets nothing.
func TestCache(t *testing.T) {
	t.Parallel()
	ns := world.NewNamespace(t)
	class := world.StorageClass(t, lab.Class{Pool: lab.CachePool})
	img := lab.Serve(t, lab.Image{Bytes: 48 * mib, User: "tenant", Password: "sesame"})
	login := func(ns, name, password string) {
		secret := &corev1.Secret{StringData: map[string]string{"accessKeyId": "tenant", "secretKey": password}}
		secret.Namespace, secret.Name = ns, name
		world.Must(t, world.Create(t.Context(), secret))
	}
	source := func(ns, name, secret string) {
		world.HTTPSource(t, ns, name, img.URL("qcow2"), func(s *cdiv1.VolumeImportSource) { s.Spec.Source.HTTP.SecretRef = secret })
	}
	// took is what the server sends until a claim is filled and read.
	took := func(ns, name, source string, block bool) int64 {
		t.Helper()
		before := img.Sent()
		claim := world.Claim(t, lab.Claim{Namespace: ns, Name: name, Class: class, Bytes: 96 * mib, Block: block, ImportSource: source})
		world.Bound(t, claim)
		sent := img.Sent() - before
		checkRead(t, world.Output(t, world.Pod(t, claim, "reads-"+name, read(img.Bytes, block))), img, block)
		return sent
	}
	login(ns, "login", "sesame")
	login(ns, "again", "sesame")
	login(ns, "refused", "wrong")
	source(ns, "image", "login")
	source(ns, "same", "again")
	source(ns, "denied", "refused")
	all := took(ns, "first", "image", true)
	if all < img.Bytes/8 {
		t.Fatalf("the first import took %d bytes of an image of %d", all, img.Bytes)
	}
	// What tells of the image has to be read in any case.
	const little = 2 * mib
	for _, r := range []struct {
		claim, source string
		block         bool
	}{{"second", "image", true}, {"filesystem", "image", false}, {"other-secret", "same", true}} {
		if sent := took(ns, r.claim, r.source, r.block); sent > little {
			t.Errorf("claim %s took %d bytes from the server, the first %d", r.claim, sent, all)
		}
		claim := &corev1.PersistentVolumeClaim{}
		world.Must(t, world.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: r.claim}, claim))
		if c := lab.Condition(claim, v1alpha1.ConditionPopulated); c == nil || !strings.Contains(c.Message, "had in its cache") {
			t.Errorf("claim %s does not say where its disk came from: %+v", r.claim, c)
		}
	}
	denied := world.Claim(t, lab.Claim{Namespace: ns, Name: "denied", Class: class, Bytes: 96 * mib, Block: true, ImportSource: "denied"})
	saysOnClaim(t, denied, "Unauthorized")
	elsewhere := world.NewNamespace(t)
	login(elsewhere, "login", "sesame")
	source(elsewhere, "image", "login")
	if sent := took(elsewhere, "first", "image", true); sent < all/2 {
		t.Errorf("the claim of another namespace took %d bytes from the server, the first of all %d", sent, all)
	}
}
