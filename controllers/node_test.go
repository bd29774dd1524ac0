package controllers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/api/v1alpha1"
)

func testLogger() logr.Logger { return logr.FromSlogHandler(slog.NewTextHandler(os.Stderr, nil)) }

// node plays a node: a Node object, the plugin's pod, and an agent that keeps
// volumes in memory and holds the controller to its promises.
type node struct {
	agentv1.UnimplementedAgentServer
	t    *testing.T
	name string
	pod  *corev1.Pod
	cert tls.Certificate
	addr string

	mu       sync.Mutex
	server   *grpc.Server
	pool     *agentv1.Pool
	volumes  map[string]*agentv1.Volume
	orders   []*agentv1.PopulateRequest
	deleted  []string
	asked    map[string][]time.Time // to make a volume
	full     bool                   // whatever the pool says
	watchers map[chan struct{}]bool
	// verify answers for a volume, with n locked.
	verify func(id string) (*agentv1.VerifyVolumeResponse, error)
	// lies are reported, and are no volumes of this node.
	lies []*agentv1.Volume
}

// newNode starts a node whose pool of the test's own name has so many bytes.
func newNode(t *testing.T, pool string, bytes int64) *node {
	t.Helper()
	i := world.nodes.Add(1)
	n := &node{
		t: t, name: fmt.Sprintf("node-%d", i), addr: fmt.Sprintf("127.1.%d.%d", i/250, i%250+1),
		pool:    &agentv1.Pool{Name: pool, Uuid: fmt.Sprintf("uuid-%d", i), TotalBytes: bytes, AvailableBytes: bytes},
		volumes: map[string]*agentv1.Volume{}, watchers: map[chan struct{}]bool{}, asked: map[string][]time.Time{},
	}
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	must(t, world.Create(t.Context(), object))
	t.Cleanup(func() { must(t, client.IgnoreNotFound(world.Delete(context.Background(), object))) })
	object.Spec.Taints = nil // new nodes are not ready until their kubelet says so
	must(t, world.Update(t.Context(), object))
	token, pod := tokenOn(t, "longshore-node", n.name)
	n.pod, n.cert = pod, serverCertificate(t, token, n.name)
	n.start()
	t.Cleanup(n.stop)
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: n.addr, PodIPs: []corev1.PodIP{{IP: n.addr}}}
	must(t, world.Status().Update(t.Context(), pod))
	n.connected(true)
	return n
}

func (n *node) start() {
	roots := x509.NewCertPool()
	roots.AddCert(world.ca.cert)
	server := grpc.NewServer(grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second}), grpc.Creds(credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{n.cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots,
		VerifyConnection: func(s tls.ConnectionState) error {
			if cn := s.PeerCertificates[0].Subject.CommonName; cn != controllerName {
				return fmt.Errorf("%q is not the controller", cn)
			}
			return nil
		},
	})))
	agentv1.RegisterAgentServer(server, n)
	l, err := net.Listen("tcp", net.JoinHostPort(n.addr, strconv.Itoa(world.port)))
	must(n.t, err)
	n.mu.Lock()
	n.server = server
	n.mu.Unlock()
	go server.Serve(l) //nolint:errcheck // ends with stop
}

func (n *node) stop() {
	n.mu.Lock()
	s := n.server
	n.mu.Unlock()
	s.Stop()
}

// restart is kill -9 of the plugin: no transfer survives.
func (n *node) restart() {
	n.stop()
	n.connected(false)
	n.mu.Lock()
	for _, v := range n.volumes {
		if v.State == agentv1.State_STATE_FILLING {
			v.State, v.Progress = agentv1.State_STATE_EMPTY, nil
		}
	}
	n.mu.Unlock()
	n.start()
	n.connected(true)
}

func (n *node) connected(want bool) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("node %s is connected: %v", n.name, want), func(context.Context) error {
		if got := world.volumes.Agents.Nodes()[n.name]; got != want {
			return fmt.Errorf("it is not")
		}
		return nil
	})
}

// change does f to a volume and reports it.
func (n *node) change(id string, f func(*agentv1.Volume)) {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	v := n.volumes[id]
	if v == nil {
		n.t.Fatalf("node %s has no volume %s, but %v", n.name, id, slices.Collect(maps.Keys(n.volumes)))
	}
	f(v)
	n.tell()
}

func (n *node) fill(id string, done, total int64) {
	n.t.Helper()
	n.change(id, func(v *agentv1.Volume) {
		v.State = agentv1.State_STATE_FILLING
		v.Progress = &agentv1.Progress{BytesDone: done, BytesTotal: total, BytesPerSecond: mib, Format: "qcow2"}
	})
}

func (n *node) populate(id string) {
	n.t.Helper()
	n.change(id, func(v *agentv1.Volume) { v.State = agentv1.State_STATE_POPULATED })
}

func (n *node) fail(id, reason string) {
	n.t.Helper()
	n.change(id, func(v *agentv1.Volume) {
		v.State = agentv1.State_STATE_FAILED
		v.Failure = &agentv1.Failure{Terminal: true, Reason: reason, Message: "401 at example.com"}
	})
}

// ordered waits for the count-th order to fill a volume.
func (n *node) ordered(id string, count int) *agentv1.PopulateRequest {
	n.t.Helper()
	var last *agentv1.PopulateRequest
	eventually(n.t, fmt.Sprintf("order %d to fill %s", count, id), func(context.Context) error {
		orders := n.ordersOf(id)
		if len(orders) < count {
			return fmt.Errorf("there were %d", len(orders))
		}
		last = orders[count-1]
		return nil
	})
	return last
}

func (n *node) ordersOf(id string) []*agentv1.PopulateRequest {
	n.mu.Lock()
	defer n.mu.Unlock()
	var orders []*agentv1.PopulateRequest
	for _, o := range n.orders {
		if o.Id == id {
			orders = append(orders, o)
		}
	}
	return orders
}

func (n *node) has(id string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.volumes[id] != nil
}

// tell has all watchers send a report.
func (n *node) tell() {
	used := int64(0)
	for _, v := range n.volumes {
		used += v.CapacityBytes
	}
	n.pool.ProvisionedBytes, n.pool.AvailableBytes = used, n.pool.TotalBytes-used
	for w := range n.watchers {
		select {
		case w <- struct{}{}:
		default:
		}
	}
}

// recorded holds the controller to R1: nothing is asked for that is not written down.
func (n *node) recorded(ctx context.Context, id string) error {
	nv := &v1alpha1.NodeVolume{}
	if err := world.Get(ctx, client.ObjectKey{Name: id}, nv); err != nil {
		n.t.Errorf("node %s is asked for %s, of which there is no record: %v", n.name, id, err)
		return err
	}
	if nv.Spec.Node != n.name || len(nv.Finalizers) == 0 {
		n.t.Errorf("node %s is asked for %s; its record: node %s, finalizers %v", n.name, id, nv.Spec.Node, nv.Finalizers)
	}
	return nil
}

func (n *node) make(ctx context.Context, v *agentv1.Volume) (*agentv1.Volume, error) {
	if err := n.recorded(ctx, v.Id); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if old := n.volumes[v.Id]; old != nil {
		if old.CapacityBytes != v.CapacityBytes || old.SourceId != v.SourceId {
			return nil, status.Error(codes.AlreadyExists, "exists differently")
		}
		return proto.Clone(old).(*agentv1.Volume), nil
	}
	if n.full {
		return nil, status.Errorf(codes.ResourceExhausted, "pool %q has no room: its disk is full", n.pool.Name)
	}
	if v.CapacityBytes > n.pool.AvailableBytes {
		return nil, status.Errorf(codes.ResourceExhausted, "pool %q has no room: need %d bytes, free %d bytes", n.pool.Name, v.CapacityBytes, n.pool.AvailableBytes)
	}
	v.Pool, v.PoolUuid, v.CreatedAt = n.pool.Name, n.pool.Uuid, 1700000000
	n.volumes[v.Id] = v
	n.tell()
	return proto.Clone(v).(*agentv1.Volume), nil
}

// askedFor is when the node was asked to make a volume.
func (n *node) askedFor(id string) []time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.asked[id])
}

func (n *node) CreateVolume(ctx context.Context, r *agentv1.CreateVolumeRequest) (*agentv1.Volume, error) {
	n.mu.Lock()
	n.asked[r.Id] = append(n.asked[r.Id], time.Now())
	n.mu.Unlock()
	v := &agentv1.Volume{Id: r.Id, CapacityBytes: r.CapacityBytes, Mode: r.Mode, FsType: r.FsType, SourceId: r.From, State: agentv1.State_STATE_POPULATED}
	if r.AwaitsData {
		v.State = agentv1.State_STATE_EMPTY
	}
	return n.make(ctx, v)
}

func (n *node) CreateSnapshot(ctx context.Context, r *agentv1.CreateSnapshotRequest) (*agentv1.Volume, error) {
	n.mu.Lock()
	of := n.volumes[r.VolumeId]
	n.mu.Unlock()
	if of == nil || of.State != agentv1.State_STATE_POPULATED {
		return nil, status.Error(codes.FailedPrecondition, "not populated")
	}
	return n.make(ctx, &agentv1.Volume{Id: r.Id, CapacityBytes: of.CapacityBytes, Mode: of.Mode, SourceId: of.Id, Snapshot: true, State: agentv1.State_STATE_POPULATED})
}

func (n *node) ExpandVolume(_ context.Context, r *agentv1.ExpandVolumeRequest) (*agentv1.Volume, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	v := n.volumes[r.Id]
	if grow := r.CapacityBytes - v.CapacityBytes; grow > n.pool.AvailableBytes {
		return nil, status.Error(codes.ResourceExhausted, "no room")
	}
	v.CapacityBytes = r.CapacityBytes
	n.tell()
	return proto.Clone(v).(*agentv1.Volume), nil
}

func (n *node) delete(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.volumes, id)
	n.deleted = append(n.deleted, id)
	n.tell()
}

func (n *node) VerifyVolume(_ context.Context, r *agentv1.VerifyVolumeRequest) (*agentv1.VerifyVolumeResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.verify(r.GetId())
}

func (n *node) DeleteVolume(_ context.Context, r *agentv1.DeleteVolumeRequest) (*agentv1.DeleteVolumeResponse, error) {
	n.delete(r.Id)
	return &agentv1.DeleteVolumeResponse{}, nil
}

func (n *node) DeleteSnapshot(_ context.Context, r *agentv1.DeleteSnapshotRequest) (*agentv1.DeleteSnapshotResponse, error) {
	n.delete(r.Id)
	return &agentv1.DeleteSnapshotResponse{}, nil
}

func (n *node) Populate(_ context.Context, r *agentv1.PopulateRequest) (*agentv1.Volume, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	v := n.volumes[r.Id]
	if v == nil {
		return nil, status.Error(codes.NotFound, "no such volume")
	}
	n.orders = append(n.orders, r)
	v.State, v.Recipe, v.Failure = agentv1.State_STATE_FILLING, r.Recipe, nil
	n.tell()
	return proto.Clone(v).(*agentv1.Volume), nil
}

func (n *node) Watch(_ *agentv1.WatchRequest, s grpc.ServerStreamingServer[agentv1.Report]) error {
	changed := make(chan struct{}, 1)
	n.mu.Lock()
	n.watchers[changed] = true
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		delete(n.watchers, changed)
		n.mu.Unlock()
	}()
	sent := map[string]bool{}
	var pool *agentv1.Pool
	for {
		n.mu.Lock()
		r := &agentv1.Report{}
		if !proto.Equal(pool, n.pool) {
			pool = proto.Clone(n.pool).(*agentv1.Pool)
			r.Pools = append(r.Pools, pool)
		}
		for id, v := range n.volumes {
			sent[id] = true
			r.Volumes = append(r.Volumes, proto.Clone(v).(*agentv1.Volume))
		}
		for id := range sent {
			if n.volumes[id] == nil {
				r.RemovedVolumes = append(r.RemovedVolumes, id)
				delete(sent, id)
			}
		}
		r.Volumes = append(r.Volumes, n.lies...)
		n.mu.Unlock()
		if err := s.Send(r); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-s.Context().Done():
			return nil
		}
	}
}
