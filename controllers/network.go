package controllers

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/populator"
)

// Network tells what the cluster's own network is, and which of its addresses are
// those of one namespace's Services (R18).
type Network struct {
	// Client reads Nodes. Live reads what is not cached, since it is asked for only
	// when a transfer starts: Services, EndpointSlices and ServiceCIDRs.
	Client, Live client.Reader
}

// listPage is how many objects are asked for at once.
const listPage = 500

// The API server's own Service belongs to nobody's claims.
const (
	apiNamespace = "default"
	apiService   = "kubernetes"
)

// Reach is what transfers for claims of a namespace may connect to inside the
// cluster, as of now.
func (n *Network) Reach(ctx context.Context, namespace string) (populator.Reach, error) {
	cluster, err := n.cluster(ctx)
	if err != nil {
		return populator.Reach{}, fmt.Errorf("learn the cluster's network: %w", err)
	}
	services, err := n.services(ctx, namespace)
	if err != nil {
		return populator.Reach{}, fmt.Errorf("learn the addresses of namespace %s's Services: %w", namespace, err)
	}
	return populator.Reach{Cluster: ordered(cluster), Services: ordered(services)}, nil
}

func ordered(list []string) []string {
	slices.Sort(list)
	return slices.Compact(list)
}

// cluster lists the ranges of Services and pods, and the addresses of nodes and API
// servers. Pods whose network gives them addresses of its own are not known.
func (n *Network) cluster(ctx context.Context) ([]string, error) {
	networks, err := n.serviceRanges(ctx)
	if err != nil {
		return nil, err
	}
	servers, err := n.endpoints(ctx, apiNamespace, map[string]bool{apiService: true})
	if err != nil {
		return nil, err
	}
	networks = append(networks, servers...)
	var nodes corev1.NodeList
	if err := n.Client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	for i := range nodes.Items {
		node := &nodes.Items[i]
		for _, cidr := range append([]string{node.Spec.PodCIDR}, node.Spec.PodCIDRs...) {
			if _, err := netip.ParsePrefix(cidr); err == nil {
				networks = append(networks, cidr)
			}
		}
		for _, a := range node.Status.Addresses {
			if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
				networks = appendAddress(networks, a.Address)
			}
		}
	}
	return networks, nil
}

// serviceRanges are the ranges that Services get their addresses from; where the
// cluster does not tell them, the addresses of the Services that there are.
func (n *Network) serviceRanges(ctx context.Context) (ranges []string, err error) {
	var cidrs networkingv1.ServiceCIDRList
	err = n.Live.List(ctx, &cidrs)
	for _, c := range cidrs.Items {
		ranges = append(ranges, c.Spec.CIDRs...)
	}
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) || err == nil && len(ranges) == 0 {
		return ranges, n.each(ctx, &corev1.ServiceList{}, func(o runtime.Object) error {
			for _, ip := range o.(*corev1.Service).Spec.ClusterIPs {
				ranges = appendAddress(ranges, ip)
			}
			return nil
		})
	}
	return ranges, err
}

// services are the addresses of a namespace's Services; those without one of their
// own stand for the addresses of their endpoints.
func (n *Network) services(ctx context.Context, namespace string) (addresses []string, err error) {
	headless := map[string]bool{}
	err = n.each(ctx, &corev1.ServiceList{}, func(o runtime.Object) error {
		s := o.(*corev1.Service)
		switch {
		case s.Namespace == apiNamespace && s.Name == apiService, s.Spec.Type == corev1.ServiceTypeExternalName:
		case s.Spec.ClusterIP == corev1.ClusterIPNone:
			headless[s.Name] = true
		default:
			for _, ip := range s.Spec.ClusterIPs {
				addresses = appendAddress(addresses, ip)
			}
		}
		return nil
	}, client.InNamespace(namespace))
	if err != nil || len(headless) == 0 {
		return addresses, err
	}
	endpoints, err := n.endpoints(ctx, namespace, headless)
	return append(addresses, endpoints...), err
}

// endpoints are the addresses behind some Services of a namespace.
func (n *Network) endpoints(ctx context.Context, namespace string, of map[string]bool) (addresses []string, err error) {
	err = n.each(ctx, &discoveryv1.EndpointSliceList{}, func(o runtime.Object) error {
		slice := o.(*discoveryv1.EndpointSlice)
		if !of[slice.Labels[discoveryv1.LabelServiceName]] {
			return nil
		}
		for _, e := range slice.Endpoints {
			for _, a := range e.Addresses {
				addresses = appendAddress(addresses, a)
			}
		}
		return nil
	}, client.InNamespace(namespace))
	return addresses, err
}

// each lists page by page.
func (n *Network) each(ctx context.Context, list client.ObjectList, f func(runtime.Object) error, o ...client.ListOption) error {
	for {
		if err := n.Live.List(ctx, list, append(slices.Clip(o), client.Limit(listPage), client.Continue(list.GetContinue()))...); err != nil {
			return err
		}
		if err := meta.EachListItem(list, f); err != nil || list.GetContinue() == "" {
			return err
		}
	}
}

// appendAddress leaves out what is no address: "None", "", a name.
func appendAddress(list []string, s string) []string {
	if _, err := netip.ParseAddr(s); err != nil {
		return list
	}
	return append(list, s)
}
