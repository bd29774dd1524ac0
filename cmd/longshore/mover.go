package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source/kinds"
)

func moverCommand() *cobra.Command {
	return &cobra.Command{
		Use:    mover.Subcommand,
		Short:  "Run one transfer for the node plugin, which starts it",
		Hidden: true,
		Args:   usageArgs(cobra.NoArgs),
		Run:    func(*cobra.Command, []string) { os.Exit(mover.Main(kinds.Node)) },
	}
}

// moverProgram returns the path of the program beside this one that runs movers
// with C libraries; "" where there is none, and this program runs them itself.
func moverProgram() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this program: %w", err)
	}
	path := filepath.Join(filepath.Dir(self), "longshore-mover")
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	return path, nil
}
