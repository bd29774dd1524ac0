package controllers

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/populator"
)

func service(t *testing.T, ns, name string, change func(*corev1.ServiceSpec)) *corev1.Service {
	t.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	if change != nil {
		change(&s.Spec)
	}
	must(t, world.Create(t.Context(), s))
	return s
}

func endpoints(t *testing.T, ns, of string, addresses ...string) {
	t.Helper()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: ns, GenerateName: of + "-", Labels: map[string]string{discoveryv1.LabelServiceName: of}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: addresses}},
	}
	must(t, world.Create(t.Context(), slice))
}

func headless(s *corev1.ServiceSpec) { s.ClusterIP = corev1.ClusterIPNone }

// olderCluster does not serve ServiceCIDRs.
type olderCluster struct{ client.Reader }

func (o olderCluster) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if _, ok := list.(*networkingv1.ServiceCIDRList); ok {
		return &meta.NoKindMatchError{GroupKind: schema.GroupKind{Group: "networking.k8s.io", Kind: "ServiceCIDR"}, SearchedVersions: []string{"v1"}}
	}
	return o.Reader.List(ctx, list, opts...)
}

// The cluster's network is told as far as the cluster tells it, and the Services of
// one namespace without those of another.
func TestReach(t *testing.T) {
	t.Parallel()
	mine, other := namespace(t), namespace(t)
	web, theirs := service(t, mine, "web", nil), service(t, other, "web", nil)
	service(t, mine, "direct", headless)
	endpoints(t, mine, "direct", "10.244.7.9", "10.244.7.8")
	service(t, other, "direct", headless)
	endpoints(t, other, "direct", "10.244.7.10")
	endpoints(t, mine, "nobody", "10.244.7.11")
	service(t, mine, "alias", func(s *corev1.ServiceSpec) {
		s.Type, s.ExternalName, s.Ports = corev1.ServiceTypeExternalName, "10.244.7.12", nil
	})
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{GenerateName: "reach-"}, Spec: corev1.NodeSpec{PodCIDR: "10.244.7.0/24", PodCIDRs: []string{"10.244.7.0/24", "fd12:7::/64"}}}
	must(t, world.Create(t.Context(), node))
	t.Cleanup(func() { must(t, world.Delete(context.Background(), node)) })
	node.Status.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: "192.0.2.77"}, {Type: corev1.NodeExternalIP, Address: "203.0.113.77"}, {Type: corev1.NodeHostName, Address: "reach"},
	}
	must(t, world.Status().Update(t.Context(), node))
	var cidrs networkingv1.ServiceCIDRList
	must(t, world.List(t.Context(), &cidrs))
	api := &corev1.Service{}
	must(t, world.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "kubernetes"}, api))

	reach := func(live client.Reader, ns string) populator.Reach {
		t.Helper()
		r, err := (&Network{Client: world.Client, Live: live}).Reach(t.Context(), ns)
		must(t, err)
		return r
	}
	got := reach(world.Client, mine)
	want := ordered([]string{web.Spec.ClusterIP, "10.244.7.9", "10.244.7.8"})
	if !slices.Equal(got.Services, want) {
		t.Errorf("services are %v, want %v", got.Services, want)
	}
	for _, n := range append([]string{"10.244.7.0/24", "fd12:7::/64", "192.0.2.77", "203.0.113.77"}, cidrs.Items[0].Spec.CIDRs...) {
		if !slices.Contains(got.Cluster, n) {
			t.Errorf("the cluster's network %v lacks %s", got.Cluster, n)
		}
	}
	if again := reach(world.Client, mine); !slices.Equal(again.Services, got.Services) {
		t.Errorf("the same Services are told as %v, then %v", got.Services, again.Services)
	}
	if r := reach(world.Client, "default"); slices.Contains(r.Services, api.Spec.ClusterIP) {
		t.Errorf("the API server is told as a Service of namespace default: %v", r.Services)
	}
	older := reach(olderCluster{world.Client}, mine)
	for _, ip := range []string{web.Spec.ClusterIP, theirs.Spec.ClusterIP, api.Spec.ClusterIP} {
		if !slices.Contains(older.Cluster, ip) {
			t.Errorf("without ServiceCIDRs the cluster's network %v lacks %s", older.Cluster, ip)
		}
	}
}

// Each order tells what can be reached as of then; what was refused an address is
// tried again once the namespace has other Services.
func TestServicesComeLater(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 100*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	first := n.ordered(id, 1)
	if len(first.ClusterNetworks) == 0 || len(first.OwnServices) > 0 {
		t.Errorf("the first order tells of the networks %v and the Services %v", first.ClusterNetworks, first.OwnServices)
	}
	n.fail(id, populator.ReasonAddressNotAllowed)
	says(t, claim, populator.ReasonAddressNotAllowed, "Services")
	web := service(t, ns, "web", nil)
	second := n.ordered(id, 2)
	if !slices.Equal(second.OwnServices, web.Spec.ClusterIPs) {
		t.Errorf("the second order tells of the Services %v, want %v", second.OwnServices, web.Spec.ClusterIPs)
	}
	if second.Content != first.Content {
		t.Error("the second order begins anew")
	}
}
