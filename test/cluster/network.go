package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
)

// The network, all of it fixed. The hub's bridge is the switch that nodes and host
// are plugged into; a node's pods hang off a bridge of its own.
//
//	198.51.100.1         hub: API server
//	198.51.100.254       host, by the link longshore0
//	198.51.100.(10+N)    node N
//	10.244.N.0/24     pods of node N
//	10.96.0.0/24      services
const (
	hubIP       = "198.51.100.1"
	hostIP      = "198.51.100.254"
	machineNet  = "198.51.100.0/24"
	podNet      = "10.244.0.0/16"
	serviceNet  = "10.96.0.0/24"
	dnsIP       = "10.96.0.10"
	hostLink    = "longshore0"
	maxNodes    = 99
	forwardFile = "/proc/sys/net/ipv4/ip_forward"
)

// HostIP is the host's address in the cluster's network: what listens on it can
// be reached from nodes and pods.
const HostIP = hostIP

func nodeName(n int) string { return fmt.Sprintf("node%d", n) }
func nodeIP(n int) string   { return fmt.Sprintf("198.51.100.%d", 10+n) }
func podNetOf(n int) string { return fmt.Sprintf("10.244.%d.0/24", n) }
func linkOf(n int) string   { return fmt.Sprintf("veth%d", n) }
func podRoute(n int) string { return "route add " + podNetOf(n) + " via " + nodeIP(n) }

// Where a tool runs: the network of a process, or the host's.
func inNet(pid int) []string { return []string{"nsenter", "-t", fmt.Sprint(pid), "-n", "--"} }
func onHost() []string       { return nil }

// output runs a program and returns its output; the last line of what it complains
// of is in the error.
func output(ctx context.Context, stdin string, argv ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stdin = strings.NewReader(stdin)
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(complaint.String()), "\n")
		return out.Bytes(), fmt.Errorf("%s: %s: %w", strings.Join(argv, " "), lines[len(lines)-1], err)
	}
	return out.Bytes(), nil
}

// ip runs commands of ip(8), one a line, where in says.
func ip(ctx context.Context, in []string, lines ...string) error {
	_, err := output(ctx, strings.Join(lines, "\n")+"\n", append(in, "ip", "-batch", "-")...)
	return err
}

// sysctl sets a file below /proc/sys/net, which shows the caller's namespace.
func sysctl(ctx context.Context, in []string, file, value string) error {
	_, err := output(ctx, value, append(in, "tee", "/proc/sys/net/"+file)...)
	return err
}

// checkNetwork refuses a machine that has our addresses in use.
func checkNetwork() error {
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Name == hostLink {
			continue
		}
		addresses, err := l.Addrs()
		if err != nil {
			return err
		}
		for _, a := range addresses {
			prefix, err := netip.ParsePrefix(a.String())
			if err != nil {
				return err
			}
			for _, ours := range []string{machineNet, podNet, serviceNet} {
				if prefix.Overlaps(netip.MustParsePrefix(ours)) {
					return fmt.Errorf("%s of this machine has %s, and a cluster needs %s for itself", l.Name, prefix, ours)
				}
			}
		}
	}
	return nil
}

func (c *Cluster) layHubNetwork(ctx context.Context) error {
	hub := c.state.Hub.Pid
	lines := []string{
		"link set lo up",
		"link add br0 address 02:00:c0:00:02:01 type bridge",
		"addr add " + hubIP + "/24 dev br0",
		"link set br0 up",
		"route add default via " + hostIP,
		// A service's address is exchanged on the way out, and a way out must exist.
		"route add " + serviceNet + " dev br0 src " + hubIP,
	}
	for n := 1; n <= c.state.Nodes; n++ {
		lines = append(lines, podRoute(n))
	}
	if err := ip(ctx, inNet(hub), lines...); err != nil {
		return err
	}
	if err := sysctl(ctx, inNet(hub), "ipv4/ip_forward", "1"); err != nil {
		return err
	}
	// The bridge is a switch here: its frames are none of the hub's rules' business.
	if exists("/proc/sys/net/bridge/bridge-nf-call-iptables") {
		if err := sysctl(ctx, inNet(hub), "bridge/bridge-nf-call-iptables", "0"); err != nil {
			return err
		}
	}
	if err := ip(ctx, onHost(), fmt.Sprintf("link add %s type veth peer name host0 netns %d", hostLink, hub)); err != nil {
		return err
	}
	if err := ip(ctx, inNet(hub), "link set host0 master br0 up"); err != nil {
		return err
	}
	return ip(ctx, onHost(), "addr add "+hostIP+"/24 dev "+hostLink, "link set "+hostLink+" up")
}

func (c *Cluster) layNodeNetwork(ctx context.Context, n int) error {
	node, err := c.initPid(ctx, nodeName(n))
	if err != nil {
		return err
	}
	hub := inNet(c.state.Hub.Pid)
	if err := ip(ctx, hub, fmt.Sprintf("link add %s type veth peer name eth0 netns %d", linkOf(n), node), "link set "+linkOf(n)+" master br0 up"); err != nil {
		return err
	}
	lines := []string{
		"link set lo up",
		"addr add " + nodeIP(n) + "/24 dev eth0",
		"link set eth0 up",
		"route add default via " + hostIP,
	}
	for other := 1; other <= c.state.Nodes; other++ {
		if other != n {
			lines = append(lines, podRoute(other))
		}
	}
	if err := ip(ctx, inNet(node), lines...); err != nil {
		return err
	}
	if err := sysctl(ctx, inNet(node), "ipv4/ip_forward", "1"); err != nil {
		return err
	}
	// Here the rules must see bridged frames: of a pod that reaches itself or its
	// neighbour by way of a service.
	if exists("/proc/sys/net/bridge/bridge-nf-call-iptables") {
		if err := sysctl(ctx, inNet(node), "bridge/bridge-nf-call-iptables", "1"); err != nil {
			return err
		}
	} else {
		c.warn("the kernel module br_netfilter is missing: services do not reach pods of the caller's node")
	}
	// Outside of the pods' network no one knows the way to a pod.
	return c.masquerade(ctx, nodeName(n), podNet)
}

// masquerade lets a node's pods out under the node's address.
func (c *Cluster) masquerade(ctx context.Context, where, from string) error {
	argv := []string{"iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-s", from, "!", "-d", from, "-j", "MASQUERADE"}
	stdin := ""
	if proxyMode() == "nftables" {
		argv = []string{"nft", "-f", "-"}
		stdin = nftMasquerade(from)
	}
	cmd := c.Command(ctx, where, argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("masquerade pods of %s: %s: %w", where, bytes.TrimSpace(out), err)
	}
	return nil
}

func nftMasquerade(from string) string {
	return `table ip longshore {
	chain post {
		type nat hook postrouting priority srcnat;
		ip saddr ` + from + ` ip daddr != ` + from + ` masquerade
	}
}
`
}

// proxyMode of kube-proxy: what this machine has the tool for.
func proxyMode() string {
	if firewall() == "iptables" {
		return "iptables"
	}
	return "nftables"
}

// firewall is the tool that this machine has for the kernel's rules, or empty.
func firewall() string {
	for _, t := range []string{"iptables", "nft"} {
		if _, err := exec.LookPath(t); err == nil {
			return t
		}
	}
	return ""
}

// hostRules lead the cluster's traffic to the outside world and its answers back.
var hostRules = [][]string{
	{"nat", "POSTROUTING", "-s", machineNet, "!", "-d", machineNet, "-j", "MASQUERADE"},
	{"filter", "FORWARD", "-i", hostLink, "-j", "ACCEPT"},
	{"filter", "FORWARD", "-o", hostLink, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"},
}

// openHost makes the host the cluster's router. Without a tool for it the cluster
// works all the same, but sees only itself and the host.
func (c *Cluster) openHost(ctx context.Context) error {
	tool := firewall()
	if tool == "" {
		c.warn("neither iptables nor nft is here: the cluster does not reach the outside world")
		return nil
	}
	forward, err := os.ReadFile(forwardFile)
	if err != nil {
		return err
	}
	c.state.Forward, c.state.Firewall = strings.TrimSpace(string(forward)), tool
	if err := c.state.write(c.dir); err != nil {
		return err
	}
	if err := os.WriteFile(forwardFile, []byte("1"), 0o644); err != nil {
		c.warn("the cluster does not reach the outside world: %v", err)
		return nil
	}
	if tool == "nft" {
		if _, err := output(ctx, nftMasquerade(machineNet), "nft", "-f", "-"); err != nil {
			c.warn("the cluster does not reach the outside world: %v", err)
		}
		return nil
	}
	for _, r := range hostRules {
		if _, err := output(ctx, "", iptables("-I", r)...); err != nil {
			c.warn("the cluster does not reach the outside world: %v", err)
			return nil
		}
	}
	return nil
}

func iptables(deed string, rule []string) []string {
	return append([]string{"iptables", "-w", "-t", rule[0], deed, rule[1]}, rule[2:]...)
}

// closeHost undoes openHost and takes the host's link away.
func (s *state) closeHost(ctx context.Context) error {
	var errs []error
	switch s.Firewall {
	case "nft":
		if _, err := output(ctx, "", "nft", "list", "table", "ip", "longshore"); err == nil {
			_, err := output(ctx, "", "nft", "delete", "table", "ip", "longshore")
			errs = append(errs, err)
		}
	case "iptables":
		for _, r := range hostRules {
			for {
				if _, err := output(ctx, "", iptables("-C", r)...); err != nil {
					break // not there, or not any more
				}
				if _, err := output(ctx, "", iptables("-D", r)...); err != nil {
					errs = append(errs, err)
					break
				}
			}
		}
	}
	if s.Forward != "" {
		errs = append(errs, os.WriteFile(forwardFile, []byte(s.Forward), 0o644))
	}
	if exists("/sys/class/net/" + hostLink) {
		if err := ip(ctx, onHost(), "link del "+hostLink); err != nil && exists("/sys/class/net/"+hostLink) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// resolvers are the name servers of the host that the cluster can reach too.
func resolvers() ([]string, error) {
	for _, file := range []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"} {
		content, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var found []string
		for line := range strings.Lines(string(content)) {
			f := strings.Fields(line)
			if len(f) < 2 || f[0] != "nameserver" {
				continue
			}
			if a, err := netip.ParseAddr(f[1]); err == nil && a.Is4() && !a.IsLoopback() {
				found = append(found, f[1])
			}
		}
		if len(found) > 0 {
			return found, nil
		}
	}
	return nil, nil
}
