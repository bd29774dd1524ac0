// Package sanity runs csi-sanity, the conformance suite of the CSI project,
// against a driver that serves somewhere, and reads what it found.
//
// It knows nothing of the driver: it is given two sockets and two folders.
package sanity

import (
	"cmp"
	"context"
	"encoding/xml"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// Options say where the driver is and what to make with it.
type Options struct {
	// Binary is csi-sanity itself.
	Binary string
	// NodeEndpoint and ControllerEndpoint are gRPC addresses, "unix:///csi/csi.sock".
	NodeEndpoint, ControllerEndpoint string
	// Dir is a folder that csi-sanity and the driver both see, in which it makes
	// the staging and target paths; it must be empty.
	Dir string
	// Seen is Dir as this process sees it; "" where that is the same.
	Seen string
	// AccessType is "mount" or "block".
	AccessType string
	// Parameters are those of the StorageClass.
	Parameters map[string]string
	// Volumes have VolumeBytes bytes and are expanded to ExpandBytes.
	VolumeBytes, ExpandBytes int64
	// Command, if set, makes the command that runs csi-sanity, for instance in
	// the mount namespace of a node.
	Command func(ctx context.Context, name string, args ...string) *exec.Cmd
}

// Result is what csi-sanity found; the names are those of its specs.
type Result struct {
	Passed, Failed, Skipped []string
	// Output is what it printed.
	Output string
}

// Line is the result in a line.
func (r Result) Line() string {
	return fmt.Sprintf("csi-sanity: %d passed, %d failed, %d skipped", len(r.Passed), len(r.Failed), len(r.Skipped))
}

// Run runs the suite to its end. Specs that fail are not an error: see Result.
func Run(ctx context.Context, o Options) (Result, error) {
	seen := cmp.Or(o.Seen, o.Dir)
	var text strings.Builder
	for key, value := range o.Parameters {
		fmt.Fprintf(&text, "%s: %s\n", strconv.Quote(key), strconv.Quote(value))
	}
	if err := os.WriteFile(filepath.Join(seen, "parameters.yaml"), []byte(text.String()), 0o644); err != nil {
		return Result{}, err
	}
	command := o.Command
	if command == nil {
		command = exec.CommandContext
	}
	args := []string{
		"--csi.endpoint=" + o.NodeEndpoint,
		"--csi.controllerendpoint=" + o.ControllerEndpoint,
		"--csi.mountdir=" + filepath.Join(o.Dir, "mount"),
		"--csi.stagingdir=" + filepath.Join(o.Dir, "staging"),
		"--csi.testvolumeaccesstype=" + o.AccessType,
		"--csi.testvolumesize=" + strconv.FormatInt(o.VolumeBytes, 10),
		"--csi.testvolumeexpandsize=" + strconv.FormatInt(o.ExpandBytes, 10),
		"--ginkgo.junit-report=" + filepath.Join(o.Dir, "report.xml"),
		"--ginkgo.no-color",
	}
	if len(o.Parameters) > 0 {
		args = append(args, "--csi.testvolumeparameters="+filepath.Join(o.Dir, "parameters.yaml"))
	}
	out, runErr := command(ctx, o.Binary, args...).CombinedOutput()
	xmlText, err := os.ReadFile(filepath.Join(seen, "report.xml"))
	if err != nil {
		return Result{Output: string(out)}, fmt.Errorf("csi-sanity has left no report (%w), it ended with %v and said: %s", err, runErr, out)
	}
	r, err := parse(xmlText)
	r.Output = string(out)
	if err == nil && runErr != nil && len(r.Failed) == 0 {
		err = fmt.Errorf("csi-sanity ended with %w though nothing failed", runErr)
	}
	return r, err
}

// parse reads a JUnit report as ginkgo writes it.
func parse(text []byte) (Result, error) {
	var report struct {
		Suites []struct {
			Cases []struct {
				Name    string    `xml:"name,attr"`
				Status  string    `xml:"status,attr"`
				Skipped *struct{} `xml:"skipped"`
				Failure *struct{} `xml:"failure"`
				Error   *struct{} `xml:"error"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(text, &report); err != nil {
		return Result{}, fmt.Errorf("read the report of csi-sanity: %w", err)
	}
	var r Result
	for _, s := range report.Suites {
		for _, c := range s.Cases {
			name, isSpec := strings.CutPrefix(c.Name, "[It] ")
			switch {
			case c.Failure != nil || c.Error != nil:
				r.Failed = append(r.Failed, name)
			case !isSpec: // [BeforeSuite] and the like
			case c.Skipped != nil:
				r.Skipped = append(r.Skipped, name)
			case c.Status == "passed":
				r.Passed = append(r.Passed, name)
			default:
				r.Failed = append(r.Failed, fmt.Sprintf("%s (%s)", name, c.Status))
			}
		}
	}
	if len(r.Passed)+len(r.Failed) == 0 {
		return r, fmt.Errorf("csi-sanity has run nothing")
	}
	return r, nil
}
