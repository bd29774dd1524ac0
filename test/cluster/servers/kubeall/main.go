// Command kubeall is Kubernetes in one binary: etcd, the control plane, the
// kubelet, kube-proxy and kubectl.
//
// The program is chosen by the name it was called with, or by the first
// argument. One file means that the text is linked, stored and mapped once.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	if program(name) == nil && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	run := program(name)
	if run == nil {
		fmt.Fprintf(os.Stderr, "kubeall: no program %q\n", name)
		os.Exit(2)
	}
	os.Exit(run())
}

func program(name string) func() int {
	switch name {
	case "etcd":
		return func() int { etcdmain.Main(os.Args); return 0 }
	case "kube-apiserver":
		return func() int { return cli.Run(apiserver.NewAPIServerCommand()) }
	case "kube-controller-manager":
		return func() int { return cli.Run(controllers.NewControllerManagerCommand()) }
	case "kube-scheduler":
		return func() int { return cli.Run(scheduler.NewSchedulerCommand()) }
	case "kubelet":
		return func() int { return cli.Run(kubelet.NewKubeletCommand(context.Background())) }
	case "kube-proxy":
		return func() int { return cli.Run(proxy.NewProxyCommand()) }
	case "kubectl":
		return func() int { return cli.Run(kubectl.NewDefaultKubectlCommand()) }
	}
	return nil
}
