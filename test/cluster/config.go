package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// writeConfigs writes the components' configuration files.
func (c *Cluster) writeConfigs(o Options) error {
	servers, err := resolvers()
	if err != nil {
		return err
	}
	resolv := ""
	for _, s := range servers {
		resolv += "nameserver " + s + "\n"
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	if runc, err = filepath.Abs(runc); err != nil {
		return err
	}
	files := map[string]string{
		"resolv.conf":     resolv,
		"scheduler.yaml":  c.schedulerConfig(o),
		"containerd.toml": c.containerdConfig(runc),
		// Under the name of a node that will exist: kube-proxy waits for it.
		"proxy-hub.yaml": c.proxyConfig(nodeName(1)),
	}
	for n := 1; n <= o.Nodes; n++ {
		files["kubelet-"+nodeName(n)+".yaml"] = c.kubeletConfig(n)
		files["proxy-"+nodeName(n)+".yaml"] = c.proxyConfig(nodeName(n))
	}
	for name, text := range files {
		if err := os.WriteFile(c.confFile(name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) schedulerConfig(o Options) string {
	text := `apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: "` + c.pkiFile("scheduler.kubeconfig") + `"}
leaderElection: {leaderElect: false}
# What could not be placed is looked at again before anybody tires of waiting.
podMaxBackoffSeconds: 2
`
	if o.BindTimeout > 0 {
		text += fmt.Sprintf(`profiles:
- schedulerName: default-scheduler
  pluginConfig:
  - name: VolumeBinding
    args: {bindTimeoutSeconds: %d}
`, max(1, int(o.BindTimeout.Seconds())))
	}
	return text
}

func (c *Cluster) proxyConfig(node string) string {
	return `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ` + proxyMode() + `
hostnameOverride: ` + node + `
clientConnection: {kubeconfig: "` + c.pkiFile("proxy.kubeconfig") + `"}
clusterCIDR: ` + podNet + `
detectLocalMode: ClusterCIDR
# The kernel's limits can be set only outside of a network namespace.
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`
}

func (c *Cluster) kubeletConfig(n int) string {
	node := nodeName(n)
	return `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: "` + c.pkiFile("ca.crt") + `"}
authorization: {mode: Webhook}
tlsCertFile: "` + c.pkiFile("kubelet-"+node+".crt") + `"
tlsPrivateKeyFile: "` + c.pkiFile("kubelet-"+node+".key") + `"
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
failCgroupV1: false
failSwapOn: false
cgroupDriver: cgroupfs
cgroupRoot: /` + cgroupName + "/" + node + `
clusterDomain: cluster.local
clusterDNS: [` + dnsIP + `]
resolvConf: "` + c.confFile("resolv.conf") + `"
volumePluginDir: /var/lib/kubelet/volumeplugins
podLogsDir: /var/log/pods
# A test machine's disk may be as full as it likes.
evictionHard: {memory.available: 100Mi, nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%", imagefs.inodesFree: "0%"}
imageGCHighThresholdPercent: 100
syncFrequency: 10s
nodeStatusUpdateFrequency: 4s
nodeLeaseDurationSeconds: 8
`
}

// containerdConfig is the same for all nodes: each has its own /run and
// /var/lib/containerd.
func (c *Cluster) containerdConfig(runc string) string {
	return strings.NewReplacer("@SHIM@", c.Bin("containerd-shim-runc-v2"), "@RUNC@", runc, "@CNI@", cniBin).Replace(`version = 3
root = '/var/lib/containerd'
state = '/run/containerd/state'
disabled_plugins = [
  'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.zfs', 'io.containerd.snapshotter.v1.devmapper',
  'io.containerd.snapshotter.v1.blockfile', 'io.containerd.nri.v1.nri',
  'io.containerd.tracing.processor.v1.otlp', 'io.containerd.internal.v1.tracing',
]
[grpc]
  address = '/run/containerd/containerd.sock'
[ttrpc]
  address = '/run/containerd/containerd.sock.ttrpc'
[plugins.'io.containerd.internal.v1.opt']
  path = '/var/lib/containerd/opt'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = 'cluster.test/pause:1'
[plugins.'io.containerd.cri.v1.runtime']
  # Where root may not lower it, no pod would start otherwise.
  restrict_oom_score_adj = true
  # A profile would stay in the kernel after Down.
  disable_apparmor = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['@CNI@']
    conf_dir = '/etc/cni/net.d'
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      runtime_path = '@SHIM@'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = '@RUNC@'
        SystemdCgroup = false
`)
}

// conflist is the pods' network of node n.
func conflist(n int) []byte {
	return []byte(`{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [
    {
      "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
      "ipam": {
        "type": "host-local", "dataDir": "/var/lib/cni/ipam",
        "ranges": [[{"subnet": "` + podNetOf(n) + `"}]],
        "routes": [{"dst": "0.0.0.0/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`)
}
