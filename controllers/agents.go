package controllers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
)

const (
	// callTimeout bounds one call of an agent; making a filesystem is the longest.
	callTimeout = 60 * time.Second
	// A node that was cut off answers no ping: its word counts no more after this.
	pingEvery, pingTimeout = 15 * time.Second, 10 * time.Second

	firstRetry, lastRetry = 200 * time.Millisecond, 10 * time.Second
)

// Agents holds one connection to the agent of each node, with all that the node
// says of its pools and volumes. What a node says is believed only of volumes
// whose NodeVolume places them there: see Volume.
type Agents struct {
	// TLS is how to speak to a node: the server must prove to be that node.
	TLS func(node string) *tls.Config
	Log logr.Logger

	mu        sync.Mutex
	nodes     map[string]*agent
	listeners []Listener
	running   sync.WaitGroup
	closed    bool
}

// Listener hears of changes; its functions must return at once. A nil function hears nothing.
type Listener struct {
	// Volume: what a node says of a volume has changed.
	Volume func(id string)
	// Node: a node came or went, or its pools have changed.
	Node func(node string)
}

// agent is one node. Its mutable fields are guarded by Agents.mu.
type agent struct {
	node, address string
	stop          context.CancelFunc
	conn          *grpc.ClientConn
	connected     bool
	pools         map[string]*agentv1.Pool
	volumes       map[string]*agentv1.Volume
	// reports counts the reports of each volume, in all streams: an answer that was
	// overtaken by one is no news.
	reports map[string]uint64
}

// Listen adds a listener.
func (a *Agents) Listen(l Listener) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.listeners = append(a.listeners, l)
}

// Set has the node's agent reached at address, "host:port"; "" forgets the node.
// Called again with the same address it does nothing.
func (a *Agents) Set(node, address string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	old := a.nodes[node]
	if a.closed || old != nil && old.address == address || old == nil && address == "" {
		return nil
	}
	if old != nil {
		old.stop()
		delete(a.nodes, node)
		a.tellLocked(old, slices.Collect(maps.Keys(old.volumes)), true)
	}
	if address == "" {
		return nil
	}
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(a.TLS(node))),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingEvery, Timeout: pingTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)), // the first report tells of thousands of volumes
	)
	if err != nil {
		return fmt.Errorf("agent of node %s at %s: %w", node, address, err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ag := &agent{node: node, address: address, stop: stop, conn: conn, reports: map[string]uint64{}}
	if a.nodes == nil {
		a.nodes = map[string]*agent{}
	}
	a.nodes[node] = ag
	a.running.Go(func() {
		defer conn.Close() //nolint:errcheck // nothing is buffered
		a.follow(ctx, ag)
	})
	return nil
}

// Start ends all connections when ctx does. It implements manager.Runnable.
func (a *Agents) Start(ctx context.Context) error {
	<-ctx.Done()
	a.mu.Lock()
	a.closed = true
	for _, ag := range a.nodes {
		ag.stop()
	}
	a.mu.Unlock()
	a.running.Wait()
	return nil
}

// follow watches an agent until ctx ends, and connects again when it must.
func (a *Agents) follow(ctx context.Context, ag *agent) {
	wait := firstRetry
	for {
		heard, err := a.watch(ctx, ag)
		a.disconnected(ag)
		if ctx.Err() != nil {
			return
		}
		if heard {
			wait = firstRetry
			a.Log.Info("agent connection ended", "node", ag.node, "address", ag.address, "error", err.Error())
		} else {
			a.Log.V(1).Info("agent does not answer", "node", ag.node, "address", ag.address, "error", err.Error())
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait)):
		}
		wait = min(2*wait, lastRetry)
	}
}

// watch follows one stream to its end; heard tells whether anything came.
func (a *Agents) watch(ctx context.Context, ag *agent) (heard bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := agentv1.NewAgentClient(ag.conn).Watch(ctx, &agentv1.WatchRequest{})
	for first := true; err == nil; first = false {
		var r *agentv1.Report
		if r, err = stream.Recv(); err == nil {
			a.report(ag, r, first)
			heard = true
		}
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("the agent has ended the stream")
	}
	return heard, err
}

// report takes in what an agent says; the first report of a stream says all.
func (a *Agents) report(ag *agent, r *agentv1.Report, first bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var changed []string
	if first {
		changed = slices.Collect(maps.Keys(ag.volumes)) // those that are missing now, too
		ag.connected, ag.pools, ag.volumes = true, map[string]*agentv1.Pool{}, map[string]*agentv1.Volume{}
	}
	for _, p := range r.GetPools() {
		ag.pools[p.GetName()] = p
	}
	for _, v := range r.GetVolumes() {
		ag.volumes[v.GetId()] = v
		changed = append(changed, v.GetId())
	}
	for _, id := range r.GetRemovedVolumes() {
		delete(ag.volumes, id)
		changed = append(changed, id)
	}
	for _, id := range changed {
		ag.reports[id]++
	}
	a.tellLocked(ag, changed, first || len(r.GetPools()) > 0)
}

func (a *Agents) disconnected(ag *agent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ag.connected {
		ag.connected = false
		a.tellLocked(ag, slices.Collect(maps.Keys(ag.volumes)), true)
	}
}

func (a *Agents) tellLocked(ag *agent, volumes []string, node bool) {
	for _, l := range a.listeners {
		if l.Volume != nil {
			for _, id := range volumes {
				l.Volume(id)
			}
		}
		if l.Node != nil && node {
			l.Node(ag.node)
		}
	}
}

// Volume is what a node says of a volume: nil when it knows none of that id.
// While connected is false the word is an old one.
func (a *Agents) Volume(node, id string) (v *agentv1.Volume, connected bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ag := a.nodes[node]; ag != nil {
		return ag.volumes[id], ag.connected
	}
	return nil, false
}

// Pool is what a connected node says of a pool; nil when it has none of that
// name, or is not connected.
func (a *Agents) Pool(node, name string) (p *agentv1.Pool, connected bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ag := a.nodes[node]; ag != nil && ag.connected {
		return ag.pools[name], true
	}
	return nil, false
}

// Nodes lists the nodes whose plugin is known, and whether each is connected.
func (a *Agents) Nodes() map[string]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	nodes := map[string]bool{}
	for name, ag := range a.nodes {
		nodes[name] = ag.connected
	}
	return nodes
}

// Volumes lists the ids of all volumes of connected nodes.
func (a *Agents) Volumes() map[string][]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	volumes := map[string][]string{}
	for name, ag := range a.nodes {
		if ag.connected {
			volumes[name] = slices.Collect(maps.Keys(ag.volumes))
		}
	}
	return volumes
}

// Pools lists all pools of connected nodes.
func (a *Agents) Pools() map[string][]*agentv1.Pool {
	a.mu.Lock()
	defer a.mu.Unlock()
	pools := map[string][]*agentv1.Pool{}
	for name, ag := range a.nodes {
		if ag.connected {
			pools[name] = slices.Collect(maps.Values(ag.pools))
		}
	}
	return pools
}

// ask calls a connected agent about one volume, and takes in the answer, so that
// what follows need not wait for the report: nil when the volume is gone. Errors
// wrap csi.Err*, and say the deed.
func (a *Agents) ask(ctx context.Context, node, id, deed string, f func(context.Context, agentv1.AgentClient) (*agentv1.Volume, error)) (*agentv1.Volume, error) {
	ag, before := a.agentFor(node, id)
	if ag == nil {
		return nil, fmt.Errorf("%s: the Longshore plugin of node %s is not connected: %w", deed, node, csi.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	v, err := f(ctx, agentv1.NewAgentClient(ag.conn))
	if err != nil {
		return nil, fmt.Errorf("%s on node %s: %w", deed, node, kindOf(err))
	}
	a.learn(ag, id, v, before)
	return v, nil
}

// agentFor is a connected agent, and how often it has reported the volume.
func (a *Agents) agentFor(node, id string) (*agent, uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ag := a.nodes[node]; ag != nil && ag.connected {
		return ag, ag.reports[id]
	}
	return nil, 0
}

// learn takes in an answer that no report has overtaken.
func (a *Agents) learn(ag *agent, id string, v *agentv1.Volume, before uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case !ag.connected || ag.reports[id] != before:
		return
	case v == nil:
		delete(ag.volumes, id)
	default:
		ag.volumes[id] = v
	}
	a.tellLocked(ag, []string{id}, false)
}

// kindOf words an agent's error, of the kind that its code stands for.
func kindOf(err error) error {
	s := status.Convert(err)
	kinds := map[codes.Code]error{
		codes.NotFound: csi.ErrNotFound, codes.AlreadyExists: csi.ErrExists, codes.ResourceExhausted: csi.ErrFull, codes.Aborted: csi.ErrBusy,
		codes.FailedPrecondition: csi.ErrPrecondition, codes.InvalidArgument: csi.ErrInvalid, codes.OutOfRange: csi.ErrOutOfRange,
		codes.Unavailable: csi.ErrUnavailable, codes.DeadlineExceeded: csi.ErrUnavailable, codes.Canceled: csi.ErrUnavailable,
	}
	if kind, ok := kinds[s.Code()]; ok {
		return fmt.Errorf("%s: %w", strings.TrimSuffix(s.Message(), ": "+kind.Error()), kind)
	}
	return fmt.Errorf("%s (%s)", s.Message(), s.Code())
}

// CreateVolume, Expand, Snapshot, Populate and Delete ask the node's agent; see agent.proto.
func (a *Agents) CreateVolume(ctx context.Context, node string, r *agentv1.CreateVolumeRequest) (*agentv1.Volume, error) {
	return a.ask(ctx, node, r.GetId(), "make volume "+r.GetId(), func(ctx context.Context, c agentv1.AgentClient) (*agentv1.Volume, error) {
		return c.CreateVolume(ctx, r)
	})
}

func (a *Agents) Expand(ctx context.Context, node, id string, bytes int64) (*agentv1.Volume, error) {
	return a.ask(ctx, node, id, fmt.Sprintf("grow volume %s to %d bytes", id, bytes), func(ctx context.Context, c agentv1.AgentClient) (*agentv1.Volume, error) {
		return c.ExpandVolume(ctx, &agentv1.ExpandVolumeRequest{Id: id, CapacityBytes: bytes})
	})
}

func (a *Agents) Snapshot(ctx context.Context, node, id, volume string) (*agentv1.Volume, error) {
	return a.ask(ctx, node, id, "snapshot volume "+volume, func(ctx context.Context, c agentv1.AgentClient) (*agentv1.Volume, error) {
		return c.CreateSnapshot(ctx, &agentv1.CreateSnapshotRequest{Id: id, VolumeId: volume})
	})
}

func (a *Agents) Populate(ctx context.Context, node string, r *agentv1.PopulateRequest) (*agentv1.Volume, error) {
	return a.ask(ctx, node, r.GetId(), "fill volume "+r.GetId(), func(ctx context.Context, c agentv1.AgentClient) (*agentv1.Volume, error) {
		return c.Populate(ctx, r)
	})
}

// Verify has the node compare a volume with the digest of what filled it: as long as that takes.
func (a *Agents) Verify(ctx context.Context, node, id string) (*agentv1.VerifyVolumeResponse, error) {
	deed := "verify volume " + id
	ag, _ := a.agentFor(node, id)
	if ag == nil {
		return nil, fmt.Errorf("%s: the Longshore plugin of node %s is not connected: %w", deed, node, csi.ErrUnavailable)
	}
	r, err := agentv1.NewAgentClient(ag.conn).VerifyVolume(ctx, &agentv1.VerifyVolumeRequest{Id: id})
	if err != nil {
		return nil, fmt.Errorf("%s on node %s: %w", deed, node, kindOf(err))
	}
	return r, nil
}

// errNoPool: a node is not configured with the pool that holds the data.
var errNoPool = fmt.Errorf("pool not configured: %w", csi.ErrUnavailable)

// Delete has the node delete a volume or snapshot that is recorded in a pool there;
// pool "" is none in particular.
func (a *Agents) Delete(ctx context.Context, node, id, pool, poolUUID string, snapshot bool) error {
	if p, connected := a.Pool(node, pool); connected && p == nil && pool != "" {
		return fmt.Errorf("delete %s: its data is in pool %q, which is not configured on node %s: configure the pool there again (Helm value pools, same name and folder), or, if the data is gone for good, take the finalizer %s off NodeVolume %s: %w",
			id, pool, node, v1alpha1.Finalizer, id, errNoPool)
	}
	_, err := a.ask(ctx, node, id, "delete "+id, func(ctx context.Context, c agentv1.AgentClient) (*agentv1.Volume, error) {
		if snapshot {
			_, err := c.DeleteSnapshot(ctx, &agentv1.DeleteSnapshotRequest{Id: id, Pool: pool, PoolUuid: poolUUID})
			return nil, err
		}
		_, err := c.DeleteVolume(ctx, &agentv1.DeleteVolumeRequest{Id: id, Pool: pool, PoolUuid: poolUUID})
		return nil, err
	})
	return err
}

// NodePlugins tells Agents where the node plugins' pods are.
type NodePlugins struct {
	Client client.Reader
	Agents *Agents
	Port   int
}

// indexPodNode lists node plugin pods by node.
const indexPodNode = "spec.nodeName"

// Reconcile finds the pod of one node.
func (p *NodePlugins) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var pods corev1.PodList
	if err := p.Client.List(ctx, &pods, client.MatchingFields{indexPodNode: req.Name}); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, p.Agents.Set(req.Name, p.address(pods.Items))
}

// address is that of the pod that will be there longest; "" without one.
func (p *NodePlugins) address(pods []corev1.Pod) string {
	var best *corev1.Pod
	for i := range pods {
		pod := &pods[i]
		if pod.Status.PodIP == "" || pod.Status.Phase != corev1.PodRunning {
			continue
		}
		newer := best != nil && best.CreationTimestamp.Before(&pod.CreationTimestamp)
		if best == nil || best.DeletionTimestamp != nil && pod.DeletionTimestamp == nil || newer && pod.DeletionTimestamp == nil {
			best = pod
		}
	}
	if best == nil {
		return ""
	}
	return net.JoinHostPort(best.Status.PodIP, strconv.Itoa(p.Port))
}

// SetupWithManager starts the reconciler; the manager's cache of pods holds node plugins only.
func (p *NodePlugins) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	nodeOf := func(o client.Object) string { return o.(*corev1.Pod).Spec.NodeName }
	if err := mgr.GetFieldIndexer().IndexField(ctx, &corev1.Pod{}, indexPodNode, func(o client.Object) []string { return []string{nodeOf(o)} }); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(mgr).Named("nodeplugins").
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			if nodeOf(o) == "" {
				return nil
			}
			return []reconcile.Request{{NamespacedName: client.ObjectKey{Name: nodeOf(o)}}}
		})).
		Complete(p)
}
