package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/longshore-io/longshore/nodeplugin/image"
)

// inspection is what -o json prints. Sizes are bytes, null where unknown.
type inspection struct {
	Source             string   `json:"source"`
	SourceBytes        *int64   `json:"sourceBytes"`
	ETag               string   `json:"etag,omitempty"`
	LastModified       string   `json:"lastModified,omitempty"`
	Format             string   `json:"format"`
	Compression        string   `json:"compression,omitempty"`
	Bundle             string   `json:"bundle,omitempty"`
	Disk               string   `json:"disk,omitempty"`
	ClusterCompression string   `json:"clusterCompression,omitempty"`
	VirtualSizeBytes   *int64   `json:"virtualSizeBytes"`
	AllocatedBytes     *int64   `json:"allocatedBytes"`
	Warnings           []string `json:"warnings"`
}

func inspectCommand() *cobra.Command {
	var from origin
	var output string
	cmd := &cobra.Command{
		Use:   "inspect SOURCE",
		Short: "Say what disk image a URL or a path holds",
		Long: `Say what disk image SOURCE, an http(s):// URL or a path, holds: format, virtual
size, allocated bytes, compression, warnings. Only headers and metadata are read.`,
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if output != "" && output != "json" {
				return usage(cmd, fmt.Errorf("output %q: use json", output))
			}
			spec, err := from.spec(args[0])
			if err != nil {
				return usage(cmd, err)
			}
			blob, err := localSources.Open(cmd.Context(), dial, spec)
			if err != nil {
				return fmt.Errorf("open source: %w", err)
			}
			defer blob.Close()
			opened, err := image.Open(cmd.Context(), blob, image.Options{Format: from.format, Disk: from.disk})
			if err != nil {
				return fmt.Errorf("open image: %w", err)
			}
			defer opened.Close()
			info, err := opened.Measure(cmd.Context())
			if err != nil {
				return fmt.Errorf("read the image's metadata: %w", err)
			}
			v := blob.Validator()
			return print(cmd.OutOrStdout(), output, inspection{
				Source: redacted(args[0]), SourceBytes: known(blob.Size()), ETag: v.ETag, LastModified: v.LastModified,
				Format: info.Format, Compression: info.Compression, Bundle: info.Bundle, Disk: info.Disk, ClusterCompression: info.ClusterCompression,
				VirtualSizeBytes: known(info.VirtualSize), AllocatedBytes: known(info.AllocatedBytes),
				Warnings: append([]string{}, info.Warnings...),
			})
		},
	}
	from.flags(cmd.Flags())
	cmd.Flags().StringVarP(&output, "output", "o", "", "json, or empty for text")
	return cmd
}

func known(n int64) *int64 {
	if n < 0 {
		return nil
	}
	return &n
}

func print(w io.Writer, output string, i inspection) error {
	if output == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(i)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, value string) {
		if value != "" {
			fmt.Fprintf(t, "%s:\t%s\n", name, value)
		}
	}
	row("source", i.Source)
	row("source size", bytesOrUnknown(i.SourceBytes))
	row("format", i.Format)
	row("compression", i.Compression)
	row("bundle", i.Bundle)
	row("disk", i.Disk)
	row("cluster compression", i.ClusterCompression)
	row("virtual size", bytesOrUnknown(i.VirtualSizeBytes))
	row("allocated", bytesOrUnknown(i.AllocatedBytes))
	row("etag", i.ETag)
	row("last modified", i.LastModified)
	for _, warning := range i.Warnings {
		row("warning", warning)
	}
	return t.Flush()
}

func bytesOrUnknown(n *int64) string {
	if n == nil {
		return "unknown until all of it is read"
	}
	return fmt.Sprintf("%d bytes (%s)", *n, human(*n))
}

// human is n bytes with a unit, for reading only.
func human(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, u := float64(n), -1
	for f >= 1024 && u < len(units)-1 {
		f, u = f/1024, u+1
	}
	return fmt.Sprintf("%.1f %ciB", f, units[u])
}
