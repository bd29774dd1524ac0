package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin"
	"github.com/longshore-io/longshore/nodeplugin/broker"
	"github.com/longshore-io/longshore/nodeplugin/device"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// nodeConfig is what the flags of `longshore node` say.
type nodeConfig struct {
	node             string
	csiSocket        string
	registrationDir  string
	kubeletCSISocket string
	kubeletDir       string
	udevDir          string
	pools            []string
	agentAddress     string
	metricsAddress   string
	caDir            string
	slots            int
	moverMemoryBytes int64
	fetchAllow       []string
	fetchDeny        []string
	logLevel         string
}

// ownMemoryBytes is what the plugin itself needs beside its movers.
const ownMemoryBytes = 256 << 20

// poolPause is how often a pool whose disk is missing is looked for.
const poolPause = 15 * time.Second

func nodeCommand() *cobra.Command {
	var c nodeConfig
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Run the node plugin: CSI node service, agent and transfers of one node",
		Long: `Run the node plugin, as a privileged DaemonSet does: it serves the CSI node
service to the kubelet, with which it registers itself, and the agent service to
the controller, and moves the bytes.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd.Context()) },
	}
	f := cmd.Flags()
	f.StringVar(&c.node, "node-name", os.Getenv("NODE_NAME"), "name of the node (default $NODE_NAME)")
	f.StringVar(&c.csiSocket, "csi-socket", "/csi/csi.sock", "unix socket of the CSI services")
	f.StringVar(&c.registrationDir, "registration-dir", "/registration", "folder in which the kubelet looks for plugins; empty: do not register")
	f.StringVar(&c.kubeletCSISocket, "kubelet-csi-socket", "/var/lib/kubelet/plugins/"+csi.DriverName+"/csi.sock", "path of --csi-socket as the kubelet sees it")
	f.StringVar(&c.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "the kubelet's folder, mounted with Bidirectional propagation")
	f.StringVar(&c.udevDir, "udev-dir", "", "udev's runtime folder, /run/udev of the host, for rules that make the host ignore guests' disks; empty: write none")
	f.StringArrayVar(&c.pools, "pool", nil, "pool of this node: name=NAME,dir=PATH,bytes=SIZE[,cache=PERCENT] (repeatable); bytes is the size of the file that is made where dir has no reflinks, cache how much of the pool imported images may take while nobody else needs it")
	f.StringVar(&c.agentAddress, "agent-address", ":9443", "address of the agent service (mutual TLS)")
	f.StringVar(&c.metricsAddress, "metrics-address", ":8080", "address of /metrics, /healthz and /readyz")
	f.StringVar(&c.caDir, "ca-dir", "/etc/longshore/ca", "folder of ca.crt, which the controller publishes; it may appear later")
	f.IntVar(&c.slots, "slots", nodeplugin.DefaultSlots, "transfers at the same time")
	f.Int64Var(&c.moverMemoryBytes, "mover-memory-bytes", mover.DefaultMemoryBytes, "memory that one transfer may use, in bytes")
	f.StringArrayVar(&c.fetchAllow, "fetch-allow", nil, "address or CIDR that may be fetched from although it would be refused (repeatable)")
	f.StringArrayVar(&c.fetchDeny, "fetch-deny", nil, "address or CIDR that is never fetched from (repeatable)")
	f.StringVar(&c.logLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

// parsePool reads name=default,dir=/var/lib/longshore/default,bytes=107374182400.
func parsePool(text string) (pool.Config, error) {
	var c pool.Config
	for field := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(field, "=")
		var err error
		switch {
		case ok && key == "name":
			c.Name = value
		case ok && key == "dir":
			c.Dir = value
		case ok && key == "bytes":
			c.Bytes, err = strconv.ParseInt(value, 10, 64)
		case ok && key == "cache":
			c.CachePercent, err = strconv.Atoi(value)
			if err == nil && (c.CachePercent < 0 || c.CachePercent > 90) {
				err = errors.New("want 0 to 90 percent; 0 keeps no images")
			}
		default:
			err = errors.New("want name=NAME,dir=PATH,bytes=SIZE[,cache=PERCENT]")
		}
		if err != nil {
			return c, fmt.Errorf("pool %q: field %q: %w", text, field, err)
		}
	}
	if c.Name == "" || !filepath.IsAbs(c.Dir) || c.Bytes < pool.MinBytes {
		return c, fmt.Errorf("pool %q: a name, an absolute dir and at least bytes=%d are needed", text, pool.MinBytes)
	}
	return c, nil
}

// policy is what may be fetched from. The API server is never meant: it is
// reached from the node's own address, which it may trust more than a tenant's.
func (c nodeConfig) policy() (p broker.FetchPolicy, err error) {
	if p.Allow, err = broker.ParsePrefixes(c.fetchAllow...); err != nil {
		return p, fmt.Errorf("--fetch-allow: %w", err)
	}
	if p.Deny, err = broker.ParsePrefixes(c.fetchDeny...); err != nil {
		return p, fmt.Errorf("--fetch-deny: %w", err)
	}
	if api, err := netip.ParseAddr(os.Getenv("KUBERNETES_SERVICE_HOST")); err == nil {
		p.Deny = append(p.Deny, netip.PrefixFrom(api, api.BitLen()))
	}
	return p, nil
}

// loopFiles are the files, with * for anything, below loop devices that show
// guests' disks: ours, as seen by this plugin and after its mounts are gone with
// it, and the kubelet's second ones, on the device nodes of Block volumes.
func (c nodeConfig) loopFiles(pools []pool.Config) []string {
	files := []string{"/volumes/*/data.raw", filepath.Join(c.kubeletDir, "plugins/kubernetes.io/csi/volumeDevices/*")}
	for _, p := range pools {
		files = append(files, filepath.Join(p.Dir, "*"))
	}
	return files
}

// checkMemory refuses a container that its own movers could get killed (R19);
// limit 0 is none.
func (c nodeConfig) checkMemory(limit int64) error {
	need := int64(c.slots)*c.moverMemoryBytes + ownMemoryBytes
	if limit > 0 && limit < need {
		return fmt.Errorf("the container's memory limit of %d bytes does not hold %d transfers of %d bytes and %d bytes of the plugin itself, %d bytes in all: raise node.resources.limits.memory, or lower slots or mover.memoryBytes",
			limit, c.slots, c.moverMemoryBytes, int64(ownMemoryBytes), need)
	}
	return nil
}

// checkKubeletDir refuses mounts that pods would never see.
func checkKubeletDir(dir string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(dir))
	if err != nil {
		return fmt.Errorf("look how %s is mounted: %w", dir, err)
	}
	if len(mounts) > 0 && !strings.Contains(mounts[0].Optional, "shared:") {
		return fmt.Errorf("%s is not a shared mount, so pods would not see what is mounted there: set mountPropagation: Bidirectional", dir)
	}
	return nil
}

// run is the node plugin from start to end.
func (c nodeConfig) run(ctx context.Context) error {
	log := newLogger(c.logLevel)
	if c.node == "" {
		return errors.New("the node's name is not known: set --node-name or $NODE_NAME")
	}
	var pools []pool.Config
	for _, text := range c.pools {
		p, err := parsePool(text)
		if err != nil {
			return err
		}
		pools = append(pools, p)
	}
	policy, err := c.policy()
	if err != nil {
		return err
	}
	limit, err := memoryLimit("/")
	if err != nil {
		return err
	}
	if err := errors.Join(c.checkMemory(limit), checkKubeletDir(c.kubeletDir)); err != nil {
		return err
	}
	cluster, err := rest.InClusterConfig()
	if err != nil {
		return fmt.Errorf("reach the API server: %w", err)
	}
	client, err := kubernetes.NewForConfig(cluster)
	if err != nil {
		return fmt.Errorf("reach the API server: %w", err)
	}

	if c.udevDir != "" {
		// Not worth going without volumes.
		if err := device.IgnoreLoops(c.udevDir, c.loopFiles(pools)...); err != nil {
			log.Warn("the host's udev may look into guests' disks", "error", err)
		}
	}

	program, err := moverProgram()
	if err != nil {
		return err
	}
	if program == "" {
		log.Info("movers decompress in Go: no longshore-mover is beside this program")
	} else {
		log.Info("movers decompress with C libraries", "program", program)
	}
	metrics := newNodeMetrics()
	filler := &nodeplugin.Filler{
		Launcher: mover.Launcher{Program: program, MemoryBytes: c.moverMemoryBytes, Ended: metrics.moverEnded},
		Policy:   policy, Slots: c.slots, Log: log,
	}
	stager, report, err := nodeplugin.New(ctx, nodeplugin.Config{Pools: pools, Fill: filler, Log: log})
	if err != nil {
		return err
	}
	defer stager.Close()
	for _, line := range report {
		log.Info("put in order", "what", line)
	}
	metrics.stager = stager

	identity := &agentIdentity{csrs: client.CertificatesV1().CertificateSigningRequests(), node: c.node, caFile: filepath.Join(c.caDir, "ca.crt"), log: log}
	reg := &kubeletRegistration{endpoint: c.kubeletCSISocket, log: log}
	ready := func(context.Context) error {
		return errors.Join(identity.ready(), reg.ready(c.registrationDir != ""))
	}

	g, ctx := errgroup.WithContext(ctx)
	csiServer := grpc.NewServer(grpc.UnaryInterceptor(csi.Log(log)))
	csispec.RegisterIdentityServer(csiServer, &csi.Identity{Version: version})
	csispec.RegisterNodeServer(csiServer, &csi.Node{Stager: stager, Name: c.node})
	if err := serveSocket(ctx, g, csiServer, c.csiSocket); err != nil {
		return err
	}
	if c.registrationDir != "" {
		regServer := grpc.NewServer()
		registration.RegisterRegistrationServer(regServer, reg)
		if err := serveSocket(ctx, g, regServer, filepath.Join(c.registrationDir, csi.DriverName+"-reg.sock")); err != nil {
			return err
		}
	}
	agentServer := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(identity.serverTLS())),
		// The controller pings more often than gRPC allows by itself.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	)
	agentv1.RegisterAgentServer(agentServer, &nodeplugin.Agent{Stager: stager})
	listener, err := net.Listen("tcp", c.agentAddress)
	if err != nil {
		return fmt.Errorf("serve the agent: %w", err)
	}
	serveGRPC(ctx, g, agentServer, listener)
	if err := serveHTTP(ctx, g, c.metricsAddress, metrics.handler(ready)); err != nil {
		return err
	}
	g.Go(func() error { return identity.keep(ctx) })
	g.Go(func() error {
		every := time.NewTicker(poolPause)
		defer every.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-every.C:
				if err := stager.LookForPools(ctx); err != nil {
					log.Warn("a pool can't be used", "error", err)
				}
				if err := stager.TrimCaches(); err != nil {
					log.Warn("cached images that should make way stay", "error", err)
				}
			}
		}
	})
	log.Info("node plugin runs", "node", c.node, "version", version)
	return g.Wait()
}

// serveSocket serves on a unix socket, in the place of one that a killed
// predecessor may have left.
func serveSocket(ctx context.Context, g *errgroup.Group, s *grpc.Server, path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("serve %s: remove what is there: %w", path, err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("serve %s: %w", path, err)
	}
	serveGRPC(ctx, g, s, l)
	return nil
}

// serveGRPC serves until ctx ends. Calls that run then are cut off: they are
// all such as may be repeated.
func serveGRPC(ctx context.Context, g *errgroup.Group, s *grpc.Server, l net.Listener) {
	g.Go(func() error {
		if err := s.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return fmt.Errorf("serve %s: %w", l.Addr(), err)
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		s.Stop()
		return nil
	})
}

func serveHTTP(ctx context.Context, g *errgroup.Group, address string, h http.Handler) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("serve metrics: %w", err)
	}
	s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	g.Go(func() error {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve metrics: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		return s.Close()
	})
	return nil
}

// memoryLimit is the memory limit of the container below root, in bytes; 0 is none.
func memoryLimit(root string) (int64, error) {
	for _, name := range []string{"sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		text, err := os.ReadFile(filepath.Join(root, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("read the memory limit: %w", err)
		}
		value := strings.TrimSpace(string(text))
		if value == "max" {
			return 0, nil
		}
		limit, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read the memory limit: %s holds %q", name, value)
		}
		if limit > 1<<60 { // how cgroup v1 says none
			return 0, nil
		}
		return limit, nil
	}
	return 0, nil
}
