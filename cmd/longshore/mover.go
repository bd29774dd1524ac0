package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/longshore-io/longshore/nodeplugin/mover"
)

func moverCommand() *cobra.Command {
	return &cobra.Command{
		Use:    mover.Subcommand,
		Short:  "Run one transfer for the node plugin, which starts it",
		Hidden: true,
		Args:   usageArgs(cobra.NoArgs),
		Run:    func(*cobra.Command, []string) { os.Exit(mover.Main(sources)) },
	}
}
