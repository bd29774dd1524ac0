package populator

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestKinOf(t *testing.T) {
	s := seen()
	if got := KinOf(s.Claim); got != "" {
		t.Errorf("a claim of no machine has the kin %q", got)
	}
	s.Claim.Annotations[AnnotationGroup] = "db"
	if got := KinOf(s.Claim); got != "group/tenant/db" {
		t.Errorf("by annotation: %q", got)
	}
	s.Claim.Labels = map[string]string{"vmID": "42"}
	if got := KinOf(s.Claim); got != "vm/tenant/42" {
		t.Errorf("by label: %q", got)
	}
	s.Claim.OwnerReferences = []metav1.OwnerReference{{Kind: "DataVolume", UID: "1"}, {Kind: "VirtualMachine", UID: "2"}}
	if got := KinOf(s.Claim); got != "owner/2" {
		t.Errorf("by owner: %q", got)
	}
}

// Whatever the machines, their claims and the nodes: where the first volume of a
// machine went to a node with room for all, all go there, whoever comes between (R4).
func TestMachinesStayTogether(t *testing.T) {
	for seed := range uint64(2000) {
		random := rand.New(rand.NewPCG(seed, 1))
		pools := []string{"fast", "slow"}
		size := map[Spot]int64{}
		nodes := make([]string, 1+random.IntN(4))
		for i := range nodes {
			nodes[i] = fmt.Sprintf("node-%d", i)
			for _, p := range pools {
				size[Spot{nodes[i], p}] = random.Int64N(40)
			}
		}
		var claims []Member
		for i := range 1 + random.IntN(12) {
			// Machine 0 is none: its claims are on their own.
			kin := ""
			if k := random.IntN(4); k > 0 {
				kin = fmt.Sprintf("machine-%d", k)
			}
			claims = append(claims, Member{Kin: kin, Spot: Spot{Pool: pools[i%2]}, Bytes: 1 + random.Int64N(12)})
		}
		promised := map[string]string{}
		for step, i := range random.Perm(len(claims)) {
			c := &claims[i]
			kins := KinsOf(ofMachines(claims))
			kin, held := kins[c.Kin], kins.Held(c.Kin)
			free := func(s Spot) int64 {
				left := size[s] - held[s]
				for _, other := range claims {
					if other.Spot == s {
						left -= other.Bytes
					}
				}
				return left
			}
			var places []Place
			for _, n := range nodes {
				p := Place{Node: n, FreeBytes: free(Spot{n, c.Pool}), Kin: kin.On(n), Whole: true}
				for pool, need := range kin.Needs {
					p.Whole = p.Whole && free(Spot{n, pool}) >= need
				}
				places = append(places, p)
			}
			best, _, _ := choose(places, c.Bytes)
			if node := promised[c.Kin]; node != "" && (best == nil || best.Node != node) {
				t.Fatalf("seed %d: claim %d of %s goes to %+v, the others are on %s", seed, i, c.Kin, best, node)
			}
			if best == nil {
				continue
			}
			c.Since = time.Unix(int64(step), 0)
			if c.Node = best.Node; c.Kin != "" && best.Whole && len(kin.Nodes) == 0 {
				promised[c.Kin] = best.Node
			}
			for s, bytes := range size {
				if free(s)+held[s] < 0 {
					t.Fatalf("seed %d: pool %v of %d bytes is overfull", seed, s, bytes)
				}
			}
		}
	}
}

// ofMachines leaves out claims that belong to none.
func ofMachines(claims []Member) []Member {
	var of []Member
	for _, c := range claims {
		if c.Kin != "" {
			of = append(of, c)
		}
	}
	return of
}
