// Command longshore-mover runs one transfer for the node plugin, which starts it
// in a sandbox. Built with cgo it decompresses with C libraries.
//
// It knows nothing of Kubernetes and has no flags. It is a program of its own so
// that nothing else is compiled with cgo; see docs/decisions/mover-program.md.
package main

import (
	"os"

	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source/kinds"
)

func main() { os.Exit(mover.Main(kinds.Node)) }
