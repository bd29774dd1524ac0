package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/longshore-io/longshore/nodeplugin/broker"
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/file"
	"github.com/longshore-io/longshore/nodeplugin/source/httpsrc"
)

// dial connects with the rights of the person who runs the command.
var dial = broker.Broker{Policy: broker.AllowAll()}.DialContext

// formats can be named by --format.
var formats = []string{"raw", "iso", "qcow2", "vmdk", "vhd", "vhdx", "vdi"}

// origin is what the flags of a SOURCE say.
type origin struct {
	format             string
	disk               string
	checksum           string // of imports
	user               string
	passwordFile       string
	headers            []string
	caFile             string
	insecureSkipVerify bool
}

func (o *origin) flags(f *pflag.FlagSet) {
	f.StringVar(&o.format, "format", "", "format of the image: "+strings.Join(formats, ", ")+"; empty: recognise it")
	f.StringVar(&o.disk, "disk", "", "of several disks in a tar or OVA: the file's name, its id in the OVA or its number from 1")
	f.StringVar(&o.user, "user", "", "user name for HTTP basic authentication")
	f.StringVar(&o.passwordFile, "password-file", "", "file with the password of --user in its first line")
	f.StringArrayVar(&o.headers, "header", nil, `further header of each HTTP request, "Name: value" (repeatable); sent to no other host`)
	f.StringVar(&o.caFile, "ca-file", "", "PEM file of certificates to trust beside the system's")
	f.BoolVar(&o.insecureSkipVerify, "insecure-skip-verify", false, "trust any certificate of the server")
}

// spec is the source that arg, a URL or a path, and the flags name; its errors
// are wrong uses.
func (o *origin) spec(arg string) (source.Spec, error) {
	if o.format != "" && !slices.Contains(formats, o.format) {
		return source.Spec{}, fmt.Errorf("format %q: use one of %s", o.format, strings.Join(formats, ", "))
	}
	scheme, _, isURL := strings.Cut(arg, "://")
	if !isURL {
		if o.user != "" || o.passwordFile != "" || o.headers != nil || o.caFile != "" || o.insecureSkipVerify {
			return source.Spec{}, fmt.Errorf("%s is a path: --user, --password-file, --header, --ca-file and --insecure-skip-verify are for http:// and https://", arg)
		}
		path, err := filepath.Abs(arg)
		if err != nil {
			return source.Spec{}, err
		}
		params, err := json.Marshal(file.Params{Path: path})
		return source.Spec{Kind: file.Kind.Name, Params: params}, err
	}
	if s := strings.ToLower(scheme); s != "http" && s != "https" {
		return source.Spec{}, fmt.Errorf("source %s: use an http:// or https:// URL, or a path", redacted(arg))
	}
	p := httpsrc.Params{URL: arg, User: o.user, InsecureSkipVerify: o.insecureSkipVerify}
	for _, h := range o.headers {
		// It may hold a token: it is not sent to whom the server redirects to.
		p.SecretHeaders = append(p.SecretHeaders, source.Secret(h))
	}
	if o.passwordFile != "" {
		if o.user == "" {
			return source.Spec{}, errors.New("--password-file needs --user")
		}
		content, err := os.ReadFile(o.passwordFile)
		if err != nil {
			return source.Spec{}, fmt.Errorf("password file: %w", err)
		}
		line, _, _ := strings.Cut(string(content), "\n")
		p.Password = source.Secret(strings.TrimSuffix(line, "\r"))
	}
	if o.caFile != "" {
		content, err := os.ReadFile(o.caFile)
		if err != nil {
			return source.Spec{}, fmt.Errorf("file of certificates: %w", err)
		}
		p.CABundle = string(content)
	}
	params, err := p.Reveal()
	return source.Spec{Kind: httpsrc.Kind.Name, Params: params}, err
}

// recipe is a digest of what decides the content that arg gives. Credentials are
// not in it: with new ones an import goes on.
func (o *origin) recipe(arg string) (string, error) {
	if u, err := url.Parse(arg); err == nil && u.Scheme != "" {
		u.User = nil
		arg = u.String()
	} else if arg, err = filepath.Abs(arg); err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(o.format + "\n" + o.disk + "\n" + arg))
	return hex.EncodeToString(sum[:]), nil
}

// redacted is arg without a password, also where it is not quite a URL.
func redacted(arg string) string {
	scheme, rest, isURL := strings.Cut(arg, "://")
	if !isURL {
		return arg
	}
	u, err := url.Parse(arg)
	if err != nil {
		return scheme + "://" + rest[strings.LastIndex(rest, "@")+1:]
	}
	return u.Redacted()
}
