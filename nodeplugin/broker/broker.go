// Package broker makes network connections for those who may not make them
// themselves, to the addresses that a policy allows.
//
// It knows nothing of what is spoken on a connection, nor of how it reaches the
// one who asked for it.
package broker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

const (
	dialTimeout = 30 * time.Second
	keepAlive   = 15 * time.Second
	maxAddress  = 512
)

// FetchPolicy says which addresses may be connected to. The zero policy allows
// all but those that lie inside this machine or next to it: loopback,
// link-local with the clouds' metadata services, multicast and the like.
type FetchPolicy struct {
	// Deny lists more addresses that are refused.
	Deny []netip.Prefix
	// Allow lists addresses that are allowed whatever else denies them.
	Allow []netip.Prefix
	// Cluster is the cluster's own network, refused but for Services: those of whoever
	// it is that the connection is for. They lift nothing else, or the owner of a
	// Service could lead it to a metadata service or to the API server.
	Cluster, Services []netip.Prefix
}

// AllowAll is the policy of someone who connects with rights of their own.
func AllowAll() FetchPolicy {
	return FetchPolicy{Allow: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}}
}

// ParsePrefixes reads prefixes or plain addresses, "10.0.0.0/8" or "fd00::1".
func ParsePrefixes(list ...string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			addr, aerr := netip.ParseAddr(s)
			if aerr != nil {
				return nil, fmt.Errorf("%q is neither an address nor a prefix such as 10.0.0.0/8", s)
			}
			addr = addr.Unmap().WithZone("")
			p = netip.PrefixFrom(addr, addr.BitLen())
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// denied is what the zero policy refuses, and what to call it.
var denied = []struct {
	prefix netip.Prefix
	what   string
}{
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("::1/128"), "loopback"},
	{netip.MustParsePrefix("0.0.0.0/8"), "this host"},
	{netip.MustParsePrefix("::/128"), "this host"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local"},
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
	{netip.MustParsePrefix("255.255.255.255/32"), "broadcast"},
	// Metadata services of clouds that are not link-local.
	{netip.MustParsePrefix("fd00:ec2::254/128"), "a cloud's metadata service"},
	{netip.MustParsePrefix("fd20:ce::254/128"), "a cloud's metadata service"},
	{netip.MustParsePrefix("100.100.100.200/32"), "a cloud's metadata service"},
	{netip.MustParsePrefix("168.63.129.16/32"), "a cloud's metadata service"},
	{netip.MustParsePrefix("192.0.0.192/32"), "a cloud's metadata service"},
}

// nat64 is where an IPv6 address carries an IPv4 address (RFC 6052 section 2.1).
var nat64 = netip.MustParsePrefix("64:ff9b::/96")

// refuses returns what addr is that it is refused for, "" if it is allowed, and
// what else than the administrator's word would have it allowed.
func (p FetchPolicy) refuses(addr netip.Addr) (what, remedy string) {
	addr = addr.Unmap().WithZone("")
	if nat64.Contains(addr) {
		b := addr.As16()
		if what, remedy := p.refuses(netip.AddrFrom4([4]byte(b[12:]))); what != "" && !in(p.Allow, addr).IsValid() {
			return what, remedy
		}
	}
	if in(p.Allow, addr).IsValid() {
		return "", ""
	}
	for _, d := range denied {
		if d.prefix.Contains(addr) {
			return d.what, ""
		}
	}
	if in(p.Deny, addr).IsValid() {
		return "denied by the fetch policy", ""
	}
	if own := in(p.Cluster, addr); own.IsValid() && !in(p.Services, addr).IsValid() {
		return fmt.Sprintf("an address of the cluster's own network (%s)", own), "name a Service of the claim's own namespace, or "
	}
	return "", ""
}

// in is the first prefix that holds addr; invalid without one.
func in(list []netip.Prefix, addr netip.Addr) netip.Prefix {
	for _, p := range list {
		if p.Contains(addr) {
			return p
		}
	}
	return netip.Prefix{}
}

// Check returns the fault AddressNotAllowed if host, which has the address addr,
// may not be connected to.
func (p FetchPolicy) Check(host string, addr netip.Addr) error {
	what, remedy := p.refuses(addr)
	if what == "" {
		return nil
	}
	addr = addr.Unmap().WithZone("")
	return fault.Terminal(fault.AddressNotAllowed,
		fmt.Errorf("connect to %s: its address %s is not allowed (%s): if it shall be, %sadd %s to the Helm value fetchPolicy.allow",
			host, addr, what, remedy, netip.PrefixFrom(addr, addr.BitLen())))
}

// Broker connects.
type Broker struct {
	Policy FetchPolicy
	// Resolver of names; nil is the system's.
	Resolver *net.Resolver
}

// DialContext connects by TCP to "host:port", where host is a name or an IP
// address. The policy is asked about the very address that the kernel is about
// to connect to, so that a name cannot be checked with one address and used
// with another. The addresses of a name are tried as RFC 8305 has it. Errors
// are faults.
func (b Broker) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	switch network {
	case "tcp", "tcp4", "tcp6":
	default:
		return nil, fault.Terminal(fault.AddressNotAllowed, fmt.Errorf("connect by %.16q: only tcp is allowed", network))
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil || host == "" || len(address) > maxAddress {
		return nil, fault.Terminal(fault.InvalidSource, fmt.Errorf("connect to %.64q: it is not host:port", address))
	}
	d := net.Dialer{
		Timeout: dialTimeout, KeepAlive: keepAlive, Resolver: b.Resolver,
		ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
			ap, err := netip.ParseAddrPort(address)
			if err != nil {
				return fmt.Errorf("check the address %q: %w", address, err)
			}
			return b.Policy.Check(host, ap.Addr())
		},
	}
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, classify(ctx, host, address, err)
	}
	return conn, nil
}

func classify(ctx context.Context, host, address string, err error) error {
	var f *fault.Fault
	var dns *net.DNSError
	switch {
	case errors.As(err, &f):
		return f
	case ctx.Err() != nil:
		return fmt.Errorf("connect to %s: %w", address, context.Cause(ctx))
	case errors.As(err, &dns):
		why := dns.Err
		if dns.IsTimeout {
			why = "the name servers do not answer"
		}
		return fault.Transient(fault.UnknownHost, fmt.Errorf("look up %s: %s: correct the name, or make it resolve for the node plugin's pod", host, strings.TrimSpace(why)))
	}
	return fault.Transient(fault.ConnectionFailed, fmt.Errorf("connect to %s: %w: is the server up, and does the network let the node plugin's pod reach it?", address, cause(err)))
}

// cause is err without what the message says already.
func cause(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		if op.Timeout() {
			return errors.New("no answer in time")
		}
		return op.Err
	}
	return err
}
