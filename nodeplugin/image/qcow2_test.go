package image

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// A zstd cluster is written to its own bytes and none behind them, where another reader may
// have put another cluster; its decoder serves the next one, however far it has read.
func TestZstdClustersStayApart(t *testing.T) {
	const cluster = 32 << 10
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	q := &qcow2{qcow2Header: qcow2Header{clusterBits: 15, zstd: true}, odd: make(chan struct{}, 1)}
	for range 200 {
		content := make([]byte, cluster)
		for i := range content {
			content[i] = byte(rnd.ExpFloat64() * 3)
		}
		in := append(w.EncodeAll(content, nil), 0xff, 0xff)
		disk := bytes.Repeat([]byte{0xa5}, 2*cluster)
		if err := q.decode(segment{length: cluster}, disk[:cluster], in); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(disk[:cluster], content) || len(bytes.Trim(disk[cluster:], "\xa5")) > 0 {
			t.Fatal("another cluster, or bytes behind it")
		}
		if err := q.decode(segment{length: 100, skip: 10}, disk[:100], in); err != nil || !bytes.Equal(disk[:100], content[10:110]) {
			t.Fatalf("a part of it: %v", err)
		}
	}
}
