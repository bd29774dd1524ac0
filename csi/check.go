package csi

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

const (
	mib = 1 << 20

	// DefaultBytes is the capacity of a volume whose request names none.
	DefaultBytes = 1 << 30
	// MinimumXFSBytes is the smallest volume that mkfs.xfs takes (xfsprogs 5.19 and later).
	MinimumXFSBytes = 300 * mib

	// CSI spec, "Size Limits": strings are at most 128 bytes.
	maxNameBytes = 128
)

// idPattern is what Kubernetes takes as the name of an object.
var idPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// idOf turns a CSI name into an id: itself where Kubernetes would take it as the
// name of an object (external-provisioner's pvc-<uid> is), otherwise its digest.
func idOf(name string) (string, error) {
	switch {
	case name == "":
		return "", fmt.Errorf("no name given: %w", ErrInvalid)
	case len(name) > maxNameBytes:
		return "", fmt.Errorf("name of %d bytes, at most %d are allowed: %w", len(name), maxNameBytes, ErrInvalid)
	case idPattern.MatchString(name):
		return name, nil
	}
	sum := sha256.Sum256([]byte(name))
	return "n-" + hex.EncodeToString(sum[:20]), nil
}

// Class is what the parameters of a StorageClass say.
type Class struct {
	Pool string
	// Populate is bind or stage.
	Populate string
	// FSType is ext4, xfs, or empty where the class leaves it to the claim.
	FSType string

	claimNamespace, claimName string
}

func allowed(parameter, value string, values ...string) error {
	if slices.Contains(values, value) {
		return nil
	}
	return fmt.Errorf("parameter %s has the value %q, allowed are %s: %w", parameter, value, strings.Join(values, ", "), ErrInvalid)
}

// ParseClass reads the parameters of a StorageClass, with what external-provisioner
// adds to them. It refuses what it does not know: a misspelt parameter that is
// ignored shows only when it is too late.
func ParseClass(parameters map[string]string) (Class, error) {
	p := Class{Pool: "default", Populate: "bind"}
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		value := parameters[key]
		switch key {
		case ParameterPool:
			if !idPattern.MatchString(value) || len(value) > 63 {
				return p, fmt.Errorf("parameter %s has the value %q, allowed is the name of a pool (lower-case letters, digits, '-'): %w", key, value, ErrInvalid)
			}
			p.Pool = value
		case ParameterPopulate:
			if value == "instant" {
				return p, fmt.Errorf("parameter %s has the value %q, which this version does not offer yet; allowed are bind, stage: %w", key, value, ErrInvalid)
			}
			if err := allowed(key, value, "bind", "stage"); err != nil {
				return p, err
			}
			p.Populate = value
		case ParameterFSType:
			if err := allowed(key, value, "ext4", "xfs"); err != nil {
				return p, err
			}
			p.FSType = value
		case "csi.storage.k8s.io/pvc/namespace":
			p.claimNamespace = value
		case "csi.storage.k8s.io/pvc/name":
			p.claimName = value
		case "csi.storage.k8s.io/pv/name":
		default:
			return p, fmt.Errorf("unknown parameter %s (value %q), known are %s, %s, %s: %w", key, value, ParameterPool, ParameterPopulate, ParameterFSType, ErrInvalid)
		}
	}
	return p, nil
}

// checkSnapshotParameters takes what external-snapshotter adds and nothing else.
func checkSnapshotParameters(parameters map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		switch key {
		case "csi.storage.k8s.io/volumesnapshot/name", "csi.storage.k8s.io/volumesnapshot/namespace", "csi.storage.k8s.io/volumesnapshotcontent/name":
		default:
			return fmt.Errorf("unknown parameter %s (value %q); a VolumeSnapshotClass of this driver takes none: %w", key, parameters[key], ErrInvalid)
		}
	}
	return nil
}

// use turns a capability into a Use, or says why it is not offered.
func use(c *csi.VolumeCapability) (Use, error) {
	var u Use
	switch mode := c.GetAccessMode().GetMode(); mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER:
		u.SingleWriter = true
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
		u.ReadOnly = true
	default:
		return u, fmt.Errorf("access mode %s: a volume lives on one node; allowed are ReadWriteOnce and ReadWriteOncePod (SINGLE_NODE_*): %w", mode, ErrInvalid)
	}
	switch {
	case c.GetBlock() != nil:
		u.Mode = Block
	case c.GetMount() != nil:
		u.Mode = Filesystem
		// Empty is whatever the volume was made for.
		if u.FSType = c.GetMount().GetFsType(); u.FSType != "" {
			if err := allowed(ParameterFSType, u.FSType, "ext4", "xfs"); err != nil {
				return u, err
			}
		}
		for _, flag := range c.GetMount().GetMountFlags() {
			for option := range strings.SplitSeq(flag, ",") {
				// The content is a tenant's: what protects the host from it is not for sale.
				if option == "suid" || option == "dev" || option == "symfollow" {
					return u, fmt.Errorf("mount option %q is not allowed: volumes are mounted nosuid,nodev,nosymfollow: %w", option, ErrInvalid)
				}
				if option == "ro" {
					u.ReadOnly = true
				}
				u.MountOptions = append(u.MountOptions, option)
			}
		}
	default:
		return u, fmt.Errorf("a capability is neither block nor mount: %w", ErrInvalid)
	}
	return u, nil
}

// useOf merges the capabilities of one request, which must agree.
func useOf(cs []*csi.VolumeCapability) (Use, error) {
	if len(cs) == 0 {
		return Use{}, fmt.Errorf("no volume capabilities given: %w", ErrInvalid)
	}
	var first Use
	for i, c := range cs {
		u, err := use(c)
		switch {
		case err != nil:
			return u, err
		case i == 0:
			first = u
		case u.Mode != first.Mode || u.FSType != first.FSType:
			return u, fmt.Errorf("a volume is either %s %s or %s %s, not both: %w", first.Mode, first.FSType, u.Mode, u.FSType, ErrInvalid)
		}
	}
	return first, nil
}

// bytesOf rounds a capacity range up to whole MiB and at least to minimum.
func bytesOf(r *csi.CapacityRange, minimum int64) (int64, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	if required < 0 || limit < 0 {
		return 0, fmt.Errorf("capacity of %d to %d bytes is negative: %w", required, limit, ErrInvalid)
	}
	if limit > 0 && required > limit {
		return 0, fmt.Errorf("capacity: %d bytes required exceed the limit of %d bytes: %w", required, limit, ErrInvalid)
	}
	if required == 0 {
		required = DefaultBytes
		if limit > 0 {
			required = min(required, limit/mib*mib)
		}
	}
	required = max(required, minimum, mib)
	if required > 1<<62 {
		return 0, fmt.Errorf("capacity of %d bytes: %w", required, ErrOutOfRange)
	}
	bytes := (required + mib - 1) / mib * mib
	if limit > 0 && bytes > limit {
		return 0, fmt.Errorf("capacity: %d bytes, rounded up to whole MiB from at least %d, exceed the limit of %d bytes: %w", bytes, required, limit, ErrOutOfRange)
	}
	return bytes, nil
}

// nodesOf lists the nodes that a request allows, the preferred first; none means any.
func nodesOf(r *csi.TopologyRequirement) ([]string, error) {
	var nodes []string
	requisite := map[string]bool{}
	for _, t := range r.GetRequisite() {
		if node, ok := t.GetSegments()[TopologyKey]; ok {
			requisite[node] = true
		}
	}
	if len(r.GetRequisite()) > 0 && len(requisite) == 0 {
		return nil, fmt.Errorf("no requisite topology has the key %s: %w", TopologyKey, ErrInvalid)
	}
	for _, t := range append(slices.Clone(r.GetPreferred()), r.GetRequisite()...) {
		node, ok := t.GetSegments()[TopologyKey]
		if !ok || slices.Contains(nodes, node) || len(requisite) > 0 && !requisite[node] {
			continue
		}
		nodes = append(nodes, node)
	}
	return nodes, nil
}

// errToken is what a token of nobody's making is.
var errToken = errors.New("starting_token is not one that this driver has given")

const tokenPrefix = "after:"

// token tells where a list goes on: after the id that it names. The volume
// itself may be gone by then.
func token(id string) string {
	if id == "" {
		return ""
	}
	return hex.EncodeToString([]byte(tokenPrefix + id))
}

func startOf(token string) (string, error) {
	if token == "" {
		return "", nil
	}
	b, err := hex.DecodeString(token)
	id, ok := strings.CutPrefix(string(b), tokenPrefix)
	if err != nil || !ok || id == "" {
		return "", fmt.Errorf("list from %q: %w", token, errToken)
	}
	return id, nil
}
