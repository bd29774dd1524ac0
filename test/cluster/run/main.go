// Command run starts and stops the test cluster by hand.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/longshore-io/longshore/test/cluster"
)

const usage = `usage: run [flags] COMMAND

  build              build what a cluster runs
  up                 start a cluster
  down               end it and remove its folder
  logs               print the folder of the logs
  kubectl ARG...     run kubectl on the host
  helm ARG...        run helm on the host
  exec NODE CMD...   run a command in a node's namespaces, or in those of hub
  load IMAGE.tar     give the nodes an image
  kill NODE          cut a node's power
  start NODE         boot it again
  kubelet NODE       kill and start its kubelet
  env                print what a shell evaluates to use kubectl on the host

flags:
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.ExitCode() > 0 {
			os.Exit(exit.ExitCode())
		}
		fmt.Fprintln(os.Stderr, "run:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var o cluster.Options
	dirs := ""
	flag.StringVar(&o.Dir, "dir", "/var/lib/longshore-cluster", "the cluster's `folder`")
	flag.IntVar(&o.Nodes, "nodes", 1, "number of nodes")
	flag.DurationVar(&o.BindTimeout, "bind-timeout", 0, "the scheduler's patience with a volume")
	flag.BoolVar(&o.Wait, "wait", false, "wait for another cluster to end")
	flag.BoolVar(&o.Reuse, "reuse", false, "be content with a cluster that runs already")
	flag.StringVar(&dirs, "node-dirs", "", "more folders that each node has to itself, with commas")
	flag.Usage = func() {
		fmt.Fprint(os.Stderr, usage)
		flag.PrintDefaults()
	}
	flag.Parse()
	if dirs != "" {
		o.NodeDirs = strings.Split(dirs, ",")
	}
	o.Log = os.Stderr
	args := flag.Args()
	if len(args) == 0 {
		flag.Usage()
		os.Exit(2)
	}
	command, args := args[0], args[1:]
	switch command {
	case "build":
		_, err := cluster.Build(ctx, os.Stderr)
		return err
	case "up":
		_, err := cluster.Up(ctx, o)
		return err
	case "down":
		return cluster.Down(o.Dir, true)
	}
	c, err := cluster.Attach(o.Dir)
	if err != nil {
		return err
	}
	if need := map[string]int{"exec": 2, "load": 1, "kill": 1, "start": 1, "kubelet": 1}[command]; len(args) < need {
		flag.Usage()
		os.Exit(2)
	}
	switch command {
	case "logs":
		fmt.Println(c.Logs())
		return nil
	case "env":
		fmt.Printf("export KUBECONFIG=%s PATH=%s:$PATH\n", c.Kubeconfig(), strings.TrimSuffix(c.Bin("kubectl"), "/kubectl"))
		return nil
	case "kubectl", "helm":
		return attached(c.HostCommand(ctx, command, args...))
	case "exec":
		where := args[0]
		if where == "hub" {
			where = ""
		}
		return attached(c.Command(ctx, where, args[1], args[2:]...))
	case "load":
		return c.LoadImage(ctx, args[0])
	case "kill":
		return c.KillNode(ctx, args[0])
	case "start":
		return c.StartNode(ctx, args[0])
	case "kubelet":
		return c.RestartKubelet(ctx, args[0])
	}
	return fmt.Errorf("no command %q", command)
}

func attached(cmd *exec.Cmd) error {
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}
