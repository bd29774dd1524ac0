package nodeplugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// pools are the node's pools. One whose disk is not mounted is looked for again
// when it is asked for; it is never made anew while somebody knows it.
type pools []*pool.Pool

func openPools(ctx context.Context, configs []pool.Config) (pools, error) {
	var ps pools
	for _, c := range configs {
		p, err := pool.Open(ctx, c)
		if err != nil {
			return nil, err
		}
		ps = append(ps, p)
	}
	return ps, nil
}

// find looks for a volume or snapshot in all pools. While one of them has a
// problem, a volume that is in no other may be in that one: ErrUnavailable.
func (ps pools) find(id string) (*pool.Pool, pool.Volume, error) {
	err := fmt.Errorf("volume %s: %w", id, csi.ErrNotFound)
	for _, p := range ps {
		v, perr := p.Get(id)
		switch {
		case perr == nil:
			return p, v, nil
		case errors.Is(perr, pool.ErrNotFound), errors.Is(perr, pool.ErrNoPool):
		case errors.Is(perr, pool.ErrUnavailable):
			err = fmt.Errorf("volume %s may be in a pool that can't be used: %w: %w", id, perr, csi.ErrUnavailable)
		default:
			return nil, pool.Volume{}, fmt.Errorf("volume %s: %w", id, perr)
		}
	}
	return nil, pool.Volume{}, err
}

// named returns a pool, which must have the given UUID unless that is "". A pool
// that is not there is looked for again: its disk may have been mounted since.
// came tells that it was found so.
func (ps pools) named(ctx context.Context, name, uuid string) (p *pool.Pool, came bool, err error) {
	for _, p = range ps {
		if p.Name() == name {
			break
		}
	}
	if p == nil || p.Name() != name {
		return nil, false, fmt.Errorf("this node has no pool %q: %w", name, csi.ErrInvalid)
	}
	if p.Problem() != "" || uuid != "" && p.UUID() == "" {
		err := p.Look(ctx)
		if err != nil {
			return nil, false, fmt.Errorf("%w: %w", err, csi.ErrUnavailable)
		}
		came = p.UUID() != ""
	}
	switch {
	case uuid == "" || p.UUID() == uuid:
		return p, came, nil
	case p.UUID() == "":
		return nil, came, fmt.Errorf("pool %s, known as %s, is not there: mount its disk: %w", name, uuid, csi.ErrUnavailable)
	}
	return nil, came, fmt.Errorf("pool %s is %s, not the %s that is known: mount the right disk: %w", name, p.UUID(), uuid, csi.ErrUnavailable)
}
