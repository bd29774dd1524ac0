package controllers

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/longshore-io/longshore/api/v1alpha1"
)

// Config is what the reconcilers must be told.
type Config struct {
	// Namespace is the controller's and the node plugins'.
	Namespace string
	// NodeServiceAccount is the node plugins' service account in it.
	NodeServiceAccount string
	// AgentPort is where node plugins serve the agent.
	AgentPort int
	CA        *CA
	Events    record.EventRecorder
}

// componentLabel tells node plugins' pods.
const componentLabel = "app.kubernetes.io/component"

// Scheme knows all kinds that the controllers speak of.
func Scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	return s, errors.Join(clientgoscheme.AddToScheme(s), v1alpha1.AddToScheme(s), cdiv1.AddToScheme(s))
}

// ManagerOptions are those of a manager for Setup: of pods it caches the node
// plugins' only, Secrets and ConfigMaps not at all.
func ManagerOptions(namespace string) (ctrl.Options, error) {
	scheme, err := Scheme()
	return ctrl.Options{
		Scheme:  scheme,
		Metrics: server.Options{BindAddress: "0"}, // served beside the health checks
		Cache: cache.Options{
			DefaultTransform: cache.TransformStripManagedFields(),
			ByObject: map[client.Object]cache.ByObject{&corev1.Pod{}: {
				Namespaces: map[string]cache.Config{namespace: {}},
				Label:      labels.SelectorFromSet(labels.Set{componentLabel: "node"}),
			}},
		},
		Client: client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&corev1.Secret{}, &corev1.ConfigMap{}}}},
	}, err
}

// Setup adds all reconcilers to the manager, and returns what the CSI service and
// Prometheus ask.
func Setup(ctx context.Context, mgr ctrl.Manager, c Config) (*Volumes, *Metrics, error) {
	key, err := c.CA.DigestKey()
	if err != nil {
		return nil, nil, err
	}
	agents := &Agents{TLS: c.CA.ClientTLS, Log: mgr.GetLogger().WithName("agents")}
	room := &Room{Client: mgr.GetClient(), Agents: agents}
	network := &Network{Client: mgr.GetClient(), Live: mgr.GetAPIReader()}
	if err := errors.Join(
		mgr.Add(agents),
		(&NodePlugins{Client: mgr.GetClient(), Agents: agents, Port: c.AgentPort}).SetupWithManager(ctx, mgr),
		(&NodeCertificates{Client: mgr.GetClient(), CA: c.CA, User: fmt.Sprintf("system:serviceaccount:%s:%s", c.Namespace, c.NodeServiceAccount)}).SetupWithManager(mgr),
		(&NodeVolumes{Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Agents: agents}).SetupWithManager(mgr),
		(&NodeKeeper{Client: mgr.GetClient()}).SetupWithManager(mgr),
		(&Verify{Client: mgr.GetClient(), Agents: agents, Events: c.Events}).SetupWithManager(mgr),
		(&Populate{Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Agents: agents, Room: room, Network: network, Events: c.Events, DigestKey: key}).SetupWithManager(ctx, mgr),
	); err != nil {
		return nil, nil, fmt.Errorf("set up the reconcilers: %w", err)
	}
	return &Volumes{Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Agents: agents, Room: room},
		&Metrics{Client: mgr.GetClient(), Agents: agents}, nil
}
