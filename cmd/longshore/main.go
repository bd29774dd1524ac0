// Command longshore loads VM disks into Kubernetes volumes: the node plugin, the
// controller, and the engine for a person's shell are one program.
//
// It knows flags and exit codes; what the subcommands do is in the packages that
// they call.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(execute()) }

// The exit codes that docs/cli.md promises.
const (
	exitOK          = 0
	exitInternal    = 1
	exitUsage       = 2
	exitTerminal    = 3
	exitTransient   = 4
	exitInterrupted = 130
)

func execute() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal does not wait for anything
	err := rootCommand().ExecuteContext(ctx)
	code := exitCode(ctx, err)
	var goOn interrupted
	switch {
	case err == nil:
	case errors.As(err, &goOn):
		fmt.Fprintln(os.Stderr, "longshore: interrupted:", goOn)
	case code == exitInterrupted:
		fmt.Fprintln(os.Stderr, "longshore: interrupted")
	default:
		fmt.Fprintln(os.Stderr, "longshore:", inShell.Replace(err.Error()))
	}
	return code
}

// interrupted is the end that a signal made, with what a person can do now.
type interrupted string

func (i interrupted) Error() string      { return string(i) }
func (interrupted) Is(target error) bool { return target == context.Canceled }

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "longshore",
		Short:         "Load VM disks into Kubernetes volumes",
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
		// Commands that do not exist are errors of usage, as flags are.
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usage(cmd, err) })
	root.AddCommand(nodeCommand(), controllerCommand(), importCommand(), inspectCommand(), moverCommand())
	return root
}

// usageError is a wrong command line; the usage says what is right.
type usageError struct{ error }

func usage(cmd *cobra.Command, err error) error {
	return &usageError{fmt.Errorf("%w: see %s --help", err, cmd.CommandPath())}
}

func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usage(cmd, err)
		}
		return nil
	}
}

func exitCode(ctx context.Context, err error) int {
	var wrong *usageError
	var f *fault.Fault
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &wrong):
		return exitUsage
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.As(err, &f) && f.Terminal:
		return exitTerminal
	case errors.As(err, &f):
		return exitTransient
	}
	return exitInternal
}

// newLogger writes JSON lines to standard error. A level that does not exist is
// told in the first of them and taken for info.
func newLogger(level string) *slog.Logger {
	var l slog.Level
	err := l.UnmarshalText([]byte(level))
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: l}))
	if err != nil {
		log.Warn("unknown log level, using info; known are debug, info, warn, error", "level", level)
	}
	return log
}
