package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync/atomic"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/longshore-io/longshore/controllers"
	"github.com/longshore-io/longshore/csi"
)

// controllerConfig is what the flags of `longshore controller` say.
type controllerConfig struct {
	csiSocket          string
	namespace          string
	agentPort          int
	nodeServiceAccount string
	metricsAddress     string
	leaderElect        bool
	logLevel           string
}

func controllerCommand() *cobra.Command {
	var c controllerConfig
	cmd := &cobra.Command{
		Use:   "controller",
		Short: "Run the controller: CSI controller service, populators and all reconcilers",
		Long: `Run the controller, as a Deployment does: it decides where volumes are and how
claims are filled, has the node plugins carry it out, and serves the CSI
controller service to the standard sidecars.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd.Context()) },
	}
	f := cmd.Flags()
	f.StringVar(&c.csiSocket, "csi-socket", "/csi/csi.sock", "unix socket of the CSI services")
	f.StringVar(&c.namespace, "namespace", os.Getenv("POD_NAMESPACE"), "namespace of controller and node plugins (default $POD_NAMESPACE)")
	f.IntVar(&c.agentPort, "agent-port", 9443, "port of the node plugins' agent service")
	f.StringVar(&c.nodeServiceAccount, "node-service-account", "longshore-node", "service account of the node plugins, which gets their certificates")
	f.StringVar(&c.metricsAddress, "metrics-address", ":8080", "address of /metrics, /healthz and /readyz")
	f.BoolVar(&c.leaderElect, "leader-elect", true, "reconcile only while holding the lease longshore-controller")
	f.StringVar(&c.logLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

// run is the controller from start to end.
func (c controllerConfig) run(ctx context.Context) error {
	if c.namespace == "" {
		return errors.New("the controller's namespace is not known: set --namespace or $POD_NAMESPACE")
	}
	log := newLogger(c.logLevel)
	logger := logr.FromSlogHandler(log.Handler())
	ctrl.SetLogger(logger)
	klog.SetLogger(logger)
	cluster, err := ctrl.GetConfig()
	if err != nil {
		return fmt.Errorf("reach the API server: %w", err)
	}
	cluster.QPS, cluster.Burst = 100, 200 // a hundred claims at once are a few hundred writes
	options, err := controllers.ManagerOptions(c.namespace)
	if err != nil {
		return err
	}
	options.LeaderElection, options.LeaderElectionID, options.LeaderElectionNamespace = c.leaderElect, "longshore-controller", c.namespace
	options.LeaderElectionReleaseOnCancel = true
	mgr, err := ctrl.NewManager(cluster, options)
	if err != nil {
		return fmt.Errorf("reach the API server: %w", err)
	}
	direct, err := client.New(cluster, client.Options{Scheme: mgr.GetScheme()})
	if err != nil {
		return fmt.Errorf("reach the API server: %w", err)
	}
	ca, err := controllers.EnsureCA(ctx, direct, c.namespace)
	if err != nil {
		return err
	}
	clientset, err := kubernetes.NewForConfig(cluster)
	if err != nil {
		return fmt.Errorf("reach the API server: %w", err)
	}
	events := record.NewBroadcaster(record.WithContext(ctx))
	defer events.Shutdown()
	events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: clientset.CoreV1().Events("")})
	volumes, figures, err := controllers.Setup(ctx, mgr, controllers.Config{
		Namespace: c.namespace, NodeServiceAccount: c.nodeServiceAccount, AgentPort: c.agentPort, CA: ca,
		Events: events.NewRecorder(mgr.GetScheme(), corev1.EventSource{Component: "longshore-controller"}),
	})
	if err != nil {
		return err
	}
	if err := metrics.Registry.Register(figures); err != nil {
		return fmt.Errorf("register the metrics: %w", err)
	}

	ready := &readiness{}
	if err := mgr.Add(manager.RunnableFunc(ready.whenSynced(mgr))); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(csi.Log(log)))
	csispec.RegisterIdentityServer(server, &csi.Identity{Version: version, Ready: ready.check})
	csispec.RegisterControllerServer(server, &csi.Controller{Volumes: volumes})
	if err := serveSocket(ctx, g, server, c.csiSocket); err != nil {
		return err
	}
	if err := serveHTTP(ctx, g, c.metricsAddress, controllerHandler(ready)); err != nil {
		return err
	}
	g.Go(func() error { return mgr.Start(ctx) })
	log.Info("controller runs", "namespace", c.namespace, "version", version)
	return g.Wait()
}

// readiness is reached when this process leads and all caches are filled.
type readiness struct{ reached atomic.Bool }

func (r *readiness) whenSynced(mgr manager.Manager) func(context.Context) error {
	return func(ctx context.Context) error {
		if mgr.GetCache().WaitForCacheSync(ctx) {
			r.reached.Store(true)
		}
		return nil
	}
}

func (r *readiness) check(context.Context) error {
	if !r.reached.Load() {
		return errors.New("the caches are not filled, or another controller leads")
	}
	return nil
}

func controllerHandler(r *readiness) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/healthz", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, req *http.Request) {
		if err := r.check(req.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	return mux
}
