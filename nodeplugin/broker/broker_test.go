package broker_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/longshore-io/longshore/nodeplugin/broker"
	"github.com/longshore-io/longshore/nodeplugin/fault"
)

func prefixes(t *testing.T, list ...string) []netip.Prefix {
	t.Helper()
	p, err := broker.ParsePrefixes(list...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPolicy(t *testing.T) {
	deny := prefixes(t, "10.96.0.0/12", "fd12::/64", "198.51.100.7")
	for _, row := range []struct {
		name    string
		allow   []string
		addr    string
		allowed bool
	}{
		{"a public address", nil, "203.0.113.9", true},
		{"a public IPv6 address", nil, "2001:db8::1", true},
		{"a private network is a usual place for a mirror", nil, "192.168.1.1", true},
		{"loopback", nil, "127.0.0.1", false},
		{"any of loopback", nil, "127.255.255.254", false},
		{"IPv6 loopback", nil, "::1", false},
		{"loopback mapped into IPv6", nil, "::ffff:127.0.0.1", false},
		{"loopback behind NAT64", nil, "64:ff9b::127.0.0.1", false},
		{"a public address behind NAT64", nil, "64:ff9b::203.0.113.9", true},
		{"metadata", nil, "169.254.169.254", false},
		{"metadata mapped into IPv6", nil, "::ffff:169.254.169.254", false},
		{"metadata behind NAT64", nil, "64:ff9b::a9fe:a9fe", false},
		{"metadata over IPv6", nil, "fd00:ec2::254", false},
		{"link-local", nil, "fe80::1", false},
		{"link-local with a zone", nil, "fe80::1%eth0", false},
		{"the end of link-local", nil, "febf::1", false},
		{"unspecified", nil, "0.0.0.0", false},
		{"the rest of unspecified", nil, "0.1.2.3", false},
		{"unspecified IPv6", nil, "::", false},
		{"unspecified mapped into IPv6", nil, "::ffff:0.0.0.0", false},
		{"multicast", nil, "224.0.0.1", false},
		{"IPv6 multicast", nil, "ff02::1", false},
		{"multicast mapped into IPv6", nil, "::ffff:239.1.1.1", false},
		{"broadcast", nil, "255.255.255.255", false},
		{"a cluster service", nil, "10.96.0.1", false},
		{"a cluster service mapped into IPv6", nil, "::ffff:10.96.0.1", false},
		{"a denied plain address", nil, "198.51.100.7", false},
		{"its neighbour", nil, "198.51.100.8", true},
		{"a denied IPv6 network", nil, "fd12::1", false},
		{"allow wins over deny", []string{"10.96.5.0/24"}, "10.96.5.1", true},
		{"but not for its neighbours", []string{"10.96.5.0/24"}, "10.96.6.1", false},
		{"allow wins over the built-in list", []string{"127.0.0.1"}, "127.0.0.1", true},
		{"also where it is mapped", []string{"127.0.0.1"}, "::ffff:127.0.0.1", true},
		{"everything", []string{"0.0.0.0/0", "::/0"}, "fe80::1", true},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := broker.FetchPolicy{Deny: deny, Allow: prefixes(t, row.allow...)}
			err := p.Check("host.example", netip.MustParseAddr(row.addr))
			if row.allowed {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			f := fault.Of(err)
			if f == nil || !f.Terminal || f.Reason != fault.AddressNotAllowed {
				t.Fatalf("got %v, want a terminal AddressNotAllowed", err)
			}
			for _, part := range []string{"host.example", netip.MustParseAddr(row.addr).Unmap().WithZone("").String(), "fetchPolicy.allow"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
		})
	}
}

// The cluster's own network is refused but for the Services of whoever asks, and
// those lift nothing else (R18).
func TestClusterNetwork(t *testing.T) {
	p := broker.FetchPolicy{
		Deny:     prefixes(t, "10.96.0.1"),
		Allow:    prefixes(t, "10.244.9.0/24"),
		Cluster:  prefixes(t, "10.96.0.0/12", "10.244.0.0/16", "192.0.2.11", "fd12::/64"),
		Services: prefixes(t, "10.96.0.7", "10.96.0.1", "10.244.1.3", "fd12::7", "169.254.169.254", "100.100.100.200"),
	}
	for _, row := range []struct {
		name, addr string
		refused    string // what the message calls it; "" for an address that is allowed
	}{
		{"another's Service", "10.96.0.8", "an address of the cluster's own network (10.96.0.0/12)"},
		{"another's Service mapped into IPv6", "::ffff:10.96.0.8", "(10.96.0.0/12)"},
		{"another's Service behind NAT64", "64:ff9b::10.96.0.8", "(10.96.0.0/12)"},
		{"another's Service over IPv6", "fd12::8", "(fd12::/64)"},
		{"another's pod", "10.244.1.4", "(10.244.0.0/16)"},
		{"a node", "192.0.2.11", "(192.0.2.11/32)"},
		{"the node's neighbour", "192.0.2.12", ""},
		{"a Service of the namespace", "10.96.0.7", ""},
		{"the same mapped into IPv6", "::ffff:10.96.0.7", ""},
		{"the same over IPv6", "fd12::7", ""},
		{"a pod behind a headless Service of the namespace", "10.244.1.3", ""},
		{"a pod that the administrator allows", "10.244.9.9", ""},
		{"the API server, though a Service of the namespace", "10.96.0.1", "denied by the fetch policy"},
		{"metadata, though a Service leads there", "169.254.169.254", "link-local"},
		{"a cloud's metadata, though a Service leads there", "100.100.100.200", "metadata"},
		{"the world", "203.0.113.9", ""},
	} {
		err := p.Check("host.example", netip.MustParseAddr(row.addr))
		if row.refused == "" {
			if err != nil {
				t.Errorf("%s: %v", row.name, err)
			}
			continue
		}
		f := fault.Of(err)
		if f == nil || !f.Terminal || f.Reason != fault.AddressNotAllowed || !strings.Contains(err.Error(), row.refused) {
			t.Errorf("%s: got %v, want %s", row.name, err, row.refused)
			continue
		}
		if strings.Contains(row.refused, "(") && !strings.Contains(err.Error(), "Service of the claim's own namespace") {
			t.Errorf("%s: %q does not say what else would do", row.name, err)
		}
	}
}

func TestAllowAll(t *testing.T) {
	for _, addr := range []string{"127.0.0.1", "::1", "169.254.169.254", "2001:db8::1"} {
		if err := broker.AllowAll().Check("h", netip.MustParseAddr(addr)); err != nil {
			t.Error(err)
		}
	}
}

func TestParsePrefixesSaysWhatIsWrong(t *testing.T) {
	if _, err := broker.ParsePrefixes("10.0.0.0/8", "example.org"); err == nil || !strings.Contains(err.Error(), `"example.org"`) {
		t.Errorf("got %v", err)
	}
}

// listener counts and greets the connections to 127.0.0.1.
func listener(t *testing.T) (port string, count *atomic.Int32) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	count = new(atomic.Int32)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			count.Add(1)
			io.WriteString(c, "hello")
			c.Close()
		}
	}()
	_, port, err = net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port, count
}

// nameServer answers the nth question for an A record with the nth list of addresses,
// the last one again and again; without lists it says that there is no such name.
func nameServer(t *testing.T, answers ...[]string) *net.Resolver {
	t.Helper()
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pc.Close() })
	go func() {
		asked := 0
		buf := make([]byte, 1500)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
			q := m.Questions[0]
			switch {
			case len(answers) == 0:
				m.RCode = dnsmessage.RCodeNameError
			case q.Type == dnsmessage.TypeA:
				for _, a := range answers[min(asked, len(answers)-1)] {
					m.Answers = append(m.Answers, dnsmessage.Resource{
						Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET},
						Body:   &dnsmessage.AResource{A: netip.MustParseAddr(a).As4()},
					})
				}
				asked++
			}
			if out, err := m.Pack(); err == nil {
				pc.WriteTo(out, from)
			}
		}
	}()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp4", pc.LocalAddr().String())
	}}
}

func TestDial(t *testing.T) {
	port, count := listener(t)
	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := free.Addr().String()
	free.Close()
	allowed := broker.FetchPolicy{Allow: prefixes(t, "127.0.0.1")}
	for _, row := range []struct {
		name, network, address string
		b                      broker.Broker
		reason                 string // "" is a connection
		terminal               bool
	}{
		{"an allowed address", "tcp", "127.0.0.1:" + port, broker.Broker{Policy: allowed}, "", false},
		{"an allowed name", "tcp", "mirror.example:" + port, broker.Broker{Policy: allowed, Resolver: nameServer(t, []string{"127.0.0.1"})}, "", false},
		{"the second address of a name, when the first is not allowed", "tcp", "mirror.example:" + port, broker.Broker{Policy: allowed, Resolver: nameServer(t, []string{"127.0.0.2", "127.0.0.1"})}, "", false},
		{"a denied address", "tcp", "127.0.0.1:" + port, broker.Broker{}, fault.AddressNotAllowed, true},
		{"a name of a denied address", "tcp", "innocent.example:" + port, broker.Broker{Resolver: nameServer(t, []string{"127.0.0.1"})}, fault.AddressNotAllowed, true},
		{"a denied address in disguise", "tcp", "[::ffff:127.0.0.1]:" + port, broker.Broker{}, fault.AddressNotAllowed, true},
		{"no host is this host", "tcp", ":" + port, broker.Broker{Policy: allowed}, fault.InvalidSource, true},
		{"a unix socket", "unix", "/run/x.sock", broker.Broker{Policy: broker.AllowAll()}, fault.AddressNotAllowed, true},
		{"a name that is not there", "tcp", "nowhere.example:80", broker.Broker{Policy: allowed, Resolver: nameServer(t)}, fault.UnknownHost, false},
		{"a port where nobody listens", "tcp", closed, broker.Broker{Policy: allowed}, fault.ConnectionFailed, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			before := count.Load()
			conn, err := row.b.DialContext(t.Context(), row.network, row.address)
			if row.reason == "" {
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				if said, err := io.ReadAll(conn); err != nil || string(said) != "hello" {
					t.Errorf("read %q, %v", said, err)
				}
				return
			}
			f := fault.Of(err)
			if f == nil || f.Reason != row.reason || f.Terminal != row.terminal {
				t.Fatalf("got %+v, want %s, terminal %v", f, row.reason, row.terminal)
			}
			if n := count.Load(); n != before {
				t.Errorf("%d connections were made", n-before)
			}
		})
	}
}

// The policy sees each connection's own address, so a name server that changes
// its answer between two of them gains nothing.
func TestRebinding(t *testing.T) {
	port, count := listener(t)
	b := broker.Broker{
		Policy:   broker.FetchPolicy{Allow: prefixes(t, "127.0.0.1")},
		Resolver: nameServer(t, []string{"127.0.0.1"}, []string{"127.0.0.2"}),
	}
	conn, err := b.DialContext(t.Context(), "tcp", "rebind.example:"+port)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(conn); err != nil { // the listener has counted it
		t.Fatal(err)
	}
	conn.Close()
	before := count.Load()
	_, err = b.DialContext(t.Context(), "tcp", "rebind.example:"+port)
	if f := fault.Of(err); f == nil || f.Reason != fault.AddressNotAllowed || !strings.Contains(err.Error(), "127.0.0.2") {
		t.Errorf("got %v, want AddressNotAllowed of 127.0.0.2", err)
	}
	if n := count.Load(); n != before {
		t.Error("the listener was reached")
	}
}

func TestCancelledDialSaysSo(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (broker.Broker{Policy: broker.AllowAll()}).DialContext(ctx, "tcp", "127.0.0.1:1"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
