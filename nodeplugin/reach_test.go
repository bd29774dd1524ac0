package nodeplugin

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/nodeplugin/broker"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// What an order says of the cluster's network, and of the image's format, is what
// its transfer goes by.
func TestOrderTellsWhatCanBeReached(t *testing.T) {
	f := start(t, 400*testMiB, complete)
	f.create(t, pool.Spec{ID: "v", Bytes: 32 * testMiB, Mode: pool.Block, AwaitsData: true})
	c := f.dial(t)
	order := &agentv1.PopulateRequest{
		Id: "v", SourceKind: "test", Recipe: "r", Format: "raw", ClusterNetworks: []string{"10.96.0.0/12", "fd12::/64", "somewhere"}, OwnServices: []string{"10.96.0.7"},
	}
	_, err := c.Populate(t.Context(), order)
	code(t, err, codes.InvalidArgument)
	if err != nil && !strings.Contains(err.Error(), `"somewhere"`) {
		t.Errorf("%v does not name what is no address", err)
	}
	order.ClusterNetworks = order.ClusterNetworks[:2]
	_, err = c.Populate(t.Context(), order)
	must(t, err)
	f.eventually(t, "the volume is filled", func() bool { return f.state("v") == pool.Populated })
	r := f.fill.seen()[0].Recipe
	if got, want := fmt.Sprintf("%v %v %s", r.Cluster, r.Services, r.Format), "[10.96.0.0/12 fd12::/64] [10.96.0.7/32] raw"; got != want {
		t.Errorf("the transfer goes by %s, want %s", got, want)
	}
}

// The mover's connections are made by the policy and by what the order says.
func TestTransferIsRefusedTheClustersNetwork(t *testing.T) {
	cluster, err := broker.ParsePrefixes("192.0.2.0/24")
	must(t, err)
	r := &filling{filler: &Filler{}, job: Job{Recipe: Recipe{Cluster: cluster}}}
	_, err = r.Dial(t.Context(), "tcp", "192.0.2.7:80")
	if got := fault.Of(err); got == nil || !got.Terminal || got.Reason != fault.AddressNotAllowed || !strings.Contains(got.Error(), "192.0.2.0/24") {
		t.Errorf("got %v, want %s that names the network", err, fault.AddressNotAllowed)
	}
}
