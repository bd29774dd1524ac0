package e2e

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/longshore-io/longshore/test/e2e/lab"
)

// world is the cluster that all stories share.
var world *lab.Lab

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	// Stories wait for the cluster more than they compute; -parallel still has the last word.
	err := flag.Set("test.parallel", "8")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	world, err = lab.Start(context.Background(), os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "the cluster does not start:", err)
		return 1
	}
	code := m.Run()
	if err := world.Close(); err != nil {
		fmt.Fprintln(os.Stderr, "the cluster does not end:", err)
		return 1
	}
	return code
}
