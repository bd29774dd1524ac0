package cluster

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

//go:embed manifests/coredns.yaml
var corednsManifest string

//go:embed manifests/snapshot-controller.yaml
var snapshotManifest string

// run starts everything and waits until it works.
func (c *Cluster) run(ctx context.Context, o Options, lock *os.File) error {
	if err := c.startHub(o.DieWithParent, lock); err != nil {
		return err
	}
	if err := c.waitMachine(ctx, ""); err != nil {
		return err
	}
	c.say("the hub runs")
	if err := c.layHubNetwork(ctx); err != nil {
		return fmt.Errorf("lay the hub's network: %w", err)
	}
	if err := c.openHost(ctx); err != nil {
		return fmt.Errorf("route through the host: %w", err)
	}
	if err := c.startAPI(ctx); err != nil {
		return err
	}
	// A node's images are unpacked while the API server starts.
	nodes := make(chan error, o.Nodes)
	for n := 1; n <= o.Nodes; n++ {
		go func() { nodes <- c.startContainers(ctx, n) }()
	}
	err := c.waitAPI(ctx)
	for range o.Nodes {
		err = errors.Join(err, <-nodes)
	}
	if err != nil {
		return err
	}
	if err := c.startControllers(ctx); err != nil {
		return err
	}
	for n := 1; n <= o.Nodes; n++ {
		if err := c.startKubelet(ctx, n); err != nil {
			return err
		}
	}
	if err := c.deploy(ctx); err != nil {
		return err
	}
	if err := c.waitReady(ctx); err != nil {
		return err
	}
	c.state.Ready = true
	return c.state.write(c.dir)
}

// startHub makes the namespaces of the control plane, with a machine as their
// process 1.
func (c *Cluster) startHub(dieWithParent bool, lock *os.File) error {
	spec, err := json.Marshal(machineSpec{Name: "hub", Socket: "hub.sock"})
	if err != nil {
		return err
	}
	log, err := os.OpenFile(c.logFile("", "machine"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	theirs, ours, err := os.Pipe()
	if err != nil {
		return err
	}
	defer theirs.Close()
	path := c.state.Bin.machinePath()
	p, err := os.StartProcess(path, []string{path, string(spec)}, &os.ProcAttr{
		Dir:   c.sockets(),
		Env:   c.env(),
		Files: []*os.File{null, log, log, theirs, lock},
		Sys: &syscall.SysProcAttr{
			Setsid:     true,
			Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS,
		},
	})
	if err != nil {
		ours.Close()
		return fmt.Errorf("start %s: %w", path, err)
	}
	go p.Wait() // it ends when Down kills it; till then nobody else collects it
	// It waits for our word, so that it never runs without being written down.
	if c.state.Hub, err = processOf(p.Pid); err == nil {
		err = c.state.write(c.dir)
	}
	if err != nil {
		ours.Close()
		return err
	}
	word := "k"
	if dieWithParent {
		word = "d"
		c.alive = ours
	} else {
		defer ours.Close()
	}
	_, err = ours.WriteString(word)
	return err
}

func (b Bin) machinePath() string { return filepath.Join(b.machine, "machine") }

// waitMachine waits for process 1 of the hub or of a node.
func (c *Cluster) waitMachine(ctx context.Context, where string) error {
	return poll(ctx, time.Minute, func() error {
		conn, err := c.dial(ctx, where)
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

func (c *Cluster) startAPI(ctx context.Context) error {
	if err := c.start(ctx, "", "etcd",
		"--data-dir="+filepath.Join(c.dir, "etcd"),
		"--listen-client-urls=http://127.0.0.1:2379",
		"--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380",
		"--unsafe-no-fsync", // it lives no longer than the machine
	); err != nil {
		return err
	}
	return c.start(ctx, "", "kube-apiserver",
		"--etcd-servers=http://127.0.0.1:2379",
		"--service-cluster-ip-range="+serviceNet,
		"--secure-port=6443",
		"--bind-address=0.0.0.0",
		"--advertise-address="+hubIP,
		"--tls-cert-file="+c.pkiFile("apiserver.crt"),
		"--tls-private-key-file="+c.pkiFile("apiserver.key"),
		"--client-ca-file="+c.pkiFile("ca.crt"),
		"--token-auth-file="+c.pkiFile("tokens.csv"),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+c.pkiFile("sa.pub"),
		"--service-account-signing-key-file="+c.pkiFile("sa.key"),
		"--kubelet-client-certificate="+c.pkiFile("kubelet-client.crt"),
		"--kubelet-client-key="+c.pkiFile("kubelet-client.key"),
		"--kubelet-certificate-authority="+c.pkiFile("ca.crt"),
		"--kubelet-preferred-address-types=InternalIP",
		"--requestheader-client-ca-file="+c.pkiFile("ca.crt"),
		"--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file="+c.pkiFile("front-proxy.crt"),
		"--proxy-client-key-file="+c.pkiFile("front-proxy.key"),
		"--allow-privileged=true",
	)
}

func (c *Cluster) startControllers(ctx context.Context) error {
	kubeconfigs := func(name string) []string {
		file := c.pkiFile(name + ".kubeconfig")
		return []string{"--authentication-kubeconfig=" + file, "--authorization-kubeconfig=" + file, "--bind-address=127.0.0.1"}
	}
	if err := c.start(ctx, "", "kube-controller-manager", append(kubeconfigs("controller-manager"),
		"--kubeconfig="+c.pkiFile("controller-manager.kubeconfig"),
		"--leader-elect=false",
		"--root-ca-file="+c.pkiFile("ca.crt"),
		"--service-account-private-key-file="+c.pkiFile("sa.key"),
		"--use-service-account-credentials=true",
		"--cluster-signing-cert-file="+c.pkiFile("ca.crt"),
		"--cluster-signing-key-file="+c.pkiFile("ca.key"),
		// Each controller asks for a token of its own; at the usual pace they take 10 s.
		"--kube-api-qps=500",
		"--kube-api-burst=1000",
		// A dead node shows after 8 s instead of a minute; kubelet's lease goes with it.
		"--node-monitor-period=1s",
		"--node-monitor-grace-period=8s",
	)...); err != nil {
		return err
	}
	if err := c.start(ctx, "", "kube-scheduler", append(kubeconfigs("scheduler"), "--config="+c.confFile("scheduler.yaml"))...); err != nil {
		return err
	}
	// For webhooks and aggregated APIs, which the API server calls by way of services.
	return c.start(ctx, "", "kube-proxy", "--config="+c.confFile("proxy-hub.yaml"))
}

func (c *Cluster) deploy(ctx context.Context) error {
	if _, err := c.Kubectl(ctx, "apply", "--server-side", "-f", c.state.Bin.crds()); err != nil {
		return err
	}
	servers, err := resolvers()
	if err != nil {
		return err
	}
	foreign := "template IN ANY . {\n            rcode NXDOMAIN\n        }"
	if len(servers) > 0 {
		foreign = "forward . " + strings.Join(servers, " ") + "\n        cache 30"
	}
	return c.Apply(ctx, strings.ReplaceAll(corednsManifest, "@FOREIGN@", foreign)+"---\n"+snapshotManifest)
}

// api is a client of the API server as the administrator, for what is asked often.
type api struct {
	client *http.Client
	token  string
}

func (c *Cluster) newAPI() (*api, error) {
	ca, err := os.ReadFile(c.pkiFile("ca.crt"))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, errors.New("no certificate in ca.crt")
	}
	tokens, err := os.ReadFile(c.pkiFile("tokens.csv"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(tokens)) {
		if f := strings.Split(line, ","); f[1] == "admin" {
			return &api{&http.Client{
				Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true},
				Timeout:   30 * time.Second,
			}, f[0]}, nil
		}
	}
	return nil, errors.New("no administrator in tokens.csv")
}

func (a *api) get(ctx context.Context, path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+hubIP+":6443"+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+a.token)
	resp, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: %s", path, resp.Status)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(body, into)
}

// waitFor polls f, but gives up as soon as one of the named programs has ended.
func (c *Cluster) waitFor(ctx context.Context, what string, d time.Duration, where string, programs []string, f func() error) error {
	err := poll(ctx, d, func() error {
		for _, name := range programs {
			a, err := c.ask(ctx, where, request{Op: "list"})
			if err != nil {
				return final{err}
			}
			if s := a.Programs[name]; s.Exit != "" {
				return final{fmt.Errorf("%s ended: %s", name, s.Exit)}
			}
		}
		return f()
	})
	if err == nil {
		c.say("%s", what)
		return nil
	}
	err = fmt.Errorf("wait until %s: %w", what, err)
	for _, name := range programs {
		err = fmt.Errorf("%w\n%s", err, tail(c.logFile(where, name)))
	}
	return err
}

func (c *Cluster) waitAPI(ctx context.Context) error {
	a, err := c.newAPI()
	if err != nil {
		return err
	}
	return c.waitFor(ctx, "the API server answers", 2*time.Minute, "", []string{"etcd", "kube-apiserver"}, func() error {
		return a.get(ctx, "/readyz", nil)
	})
}

func (c *Cluster) waitReady(ctx context.Context) error {
	a, err := c.newAPI()
	if err != nil {
		return err
	}
	for n := 1; n <= c.state.Nodes; n++ {
		if err := c.waitNode(ctx, a, n); err != nil {
			return err
		}
	}
	err = c.waitFor(ctx, "pods have a service account", time.Minute, "", []string{"kube-controller-manager"}, func() error {
		return a.get(ctx, "/api/v1/namespaces/default/serviceaccounts/default", nil)
	})
	if err != nil {
		return err
	}
	for _, name := range []string{"coredns", "snapshot-controller"} {
		err := c.waitFor(ctx, name+" is available", 2*time.Minute, "", []string{"kube-controller-manager", "kube-scheduler"}, func() error {
			var d struct {
				Status struct{ AvailableReplicas int }
			}
			if err := a.get(ctx, "/apis/apps/v1/namespaces/kube-system/deployments/"+name, &d); err != nil {
				return err
			}
			if d.Status.AvailableReplicas == 0 {
				return fmt.Errorf("%s has no available pod", name)
			}
			return nil
		})
		if err != nil {
			pods, _ := c.Kubectl(ctx, "-n", "kube-system", "describe", "pods")
			return fmt.Errorf("%w\n%s", err, pods)
		}
	}
	return nil
}
