package nodeplugin

import (
	"encoding/json"
	"fmt"

	"github.com/longshore-io/longshore/nodeplugin/pool"
)

// facts are what the Stager knows of a volume's content; they are kept in the
// pool's metadata. A clone may inherit them: they are as true of it.
type facts struct {
	// Filesystem tells how far mkfs has come: "", fsMaking, fsMade. Content
	// that was there before fsMaking is never formatted over.
	Filesystem string `json:"filesystem,omitempty"`
	// Of the image that filled the volume.
	Format       string          `json:"format,omitempty"`
	VirtualBytes int64           `json:"virtualBytes,omitempty"`
	Validator    json.RawMessage `json:"validator,omitempty"`
	// Digest of the VirtualBytes that it filled the volume with.
	Digest   string   `json:"digest,omitempty"`
	Warnings []string `json:"warnings,omitempty"`
	// Cached: the image came from the node's cache.
	Cached bool `json:"cached,omitempty"`
}

const (
	fsMaking = "making"
	fsMade   = "made"
)

// factsOf reads the facts of v; those that cannot be read are none.
func factsOf(v pool.Volume) facts {
	var f facts
	if err := json.Unmarshal(v.Source, &f); err != nil {
		return facts{}
	}
	return f
}

func (f facts) into(v *pool.Volume) error {
	b, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("facts of volume %s: %w", v.ID, err)
	}
	v.Source = b
	return nil
}

// setFacts changes the facts of a volume, durably.
func setFacts(p *pool.Pool, id string, change func(*facts)) error {
	var failed error
	_, err := p.Update(id, func(v *pool.Volume) {
		f := factsOf(*v)
		change(&f)
		failed = f.into(v)
	})
	if err == nil {
		err = failed
	}
	return err
}
