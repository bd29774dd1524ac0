package populator

import (
	"cmp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// KinOf is the key by which claims belong to one machine, so that their volumes
// shall be on one node; "" for a claim that belongs to none.
func KinOf(claim *corev1.PersistentVolumeClaim) string {
	for _, o := range claim.OwnerReferences {
		if o.Kind == "VirtualMachine" || o.Kind == "VirtualMachineInstance" {
			return "owner/" + string(o.UID)
		}
	}
	if id := claim.Labels["vmID"]; id != "" {
		return "vm/" + claim.Namespace + "/" + id
	}
	if name := strings.TrimSpace(claim.Annotations[AnnotationGroup]); name != "" {
		return "group/" + claim.Namespace + "/" + name
	}
	return ""
}

// Spot is a pool of a node.
type Spot struct {
	Node, Pool string
}

// Member is one claim of a machine: with its node, or still to be placed in a pool
// of whatever node.
type Member struct {
	Kin string
	Spot
	Bytes int64
	// Since is when it was placed.
	Since time.Time
}

// Kin is what is known of one machine.
type Kin struct {
	// Nodes have volumes of it, since then.
	Nodes map[string]time.Time
	// Needs are the bytes, by pool, of its claims that are still to be placed: all of Unplaced.
	Needs    map[string]int64
	Unplaced Sum
}

// On tells whether a volume of the machine is on the node.
func (k Kin) On(node string) bool {
	_, on := k.Nodes[node]
	return on
}

// Kins are all machines, by KinOf.
type Kins map[string]Kin

// KinsOf sums up all members of all machines.
func KinsOf(members []Member) Kins {
	kins := Kins{}
	for _, m := range members {
		k, ok := kins[m.Kin]
		if !ok {
			k = Kin{Nodes: map[string]time.Time{}, Needs: map[string]int64{}}
		}
		if m.Node == "" {
			k.Needs[m.Pool] += m.Bytes
			k.Unplaced.Claims++
			k.Unplaced.Bytes += m.Bytes
		} else if !k.On(m.Node) || m.Since.Before(k.Nodes[m.Node]) {
			k.Nodes[m.Node] = m.Since
		}
		kins[m.Kin] = k
	}
	return kins
}

// Held are the bytes that are kept free for claims still to be placed, since other
// volumes of their machines are on that node, as the machine `key` ("": none) finds
// it (R4). Of two machines on one node the one that came first has the first call on
// its room: what is kept for the other does not concern it, or each could wait for
// room that is kept for the other.
func (ks Kins) Held(key string) map[Spot]int64 {
	held, own := map[Spot]int64{}, ks[key]
	for other, k := range ks {
		for node, since := range k.Nodes {
			if other == key || own.On(node) && cmp.Or(own.Nodes[node].Compare(since), strings.Compare(key, other)) < 0 {
				continue
			}
			for pool, bytes := range k.Needs {
				held[Spot{node, pool}] += bytes
			}
		}
	}
	return held
}
