package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/longshore-io/longshore/nodeplugin/digest"
	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/image"
	"github.com/longshore-io/longshore/nodeplugin/mover"
	"github.com/longshore-io/longshore/nodeplugin/source"
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
	Digest             string   `json:"digest,omitempty"`
	Warnings           []string `json:"warnings"`
}

func inspectCommand() *cobra.Command {
	var from origin
	var output, want string
	var sum bool
	cmd := &cobra.Command{
		Use:   "inspect SOURCE",
		Short: "Say what disk image a URL or a path holds",
		Long: `Say what disk image SOURCE, an http(s):// URL, a path or a block device, holds: format,
virtual size, allocated bytes, compression, warnings. Only headers and metadata are read.

With --digest or --verify all of the disk is read and summed up, as an import of it does.`,
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if output != "" && output != "json" {
				return usage(cmd, fmt.Errorf("output %q: use json", output))
			}
			spec, err := from.spec(args[0])
			if err != nil {
				return usage(cmd, err)
			}
			if _, err := digest.Bytes(want); want != "" && err != nil {
				return usage(cmd, err)
			}
			found, err := from.inspect(cmd.Context(), spec, sum || want != "")
			if err != nil {
				return err
			}
			found.Source = redacted(args[0])
			switch {
			case want != "":
				err = from.verify(cmd.Context(), spec, want)
				found.Digest = want
			case sum:
				var facts mover.Facts
				found.Digest, facts, err = from.digest(cmd.Context(), spec)
				found.VirtualSizeBytes = known(facts.VirtualBytes)
			}
			if err != nil {
				return fmt.Errorf("sum up the disk: %w", err)
			}
			return print(cmd.OutOrStdout(), output, found)
		},
	}
	from.flags(cmd.Flags())
	cmd.Flags().StringVarP(&output, "output", "o", "", "json, or empty for text")
	cmd.Flags().BoolVar(&sum, "digest", false, "read the whole disk and say its digest")
	cmd.Flags().StringVar(&want, "verify", "", "read the whole disk and fail unless it has this digest; zeros may follow, as on a larger device")
	return cmd
}

// inspect looks at an image's headers and metadata. whole: it is read as a whole afterwards,
// so that it does not matter if they tell little.
func (o origin) inspect(ctx context.Context, spec source.Spec, whole bool) (inspection, error) {
	blob, err := localSources.Open(ctx, dial, spec)
	if err != nil {
		return inspection{}, fmt.Errorf("open source: %w", err)
	}
	defer blob.Close()
	v := blob.Validator()
	found := inspection{SourceBytes: known(blob.Size()), ETag: v.ETag, LastModified: v.LastModified, Warnings: []string{}}
	opened, err := image.Open(ctx, blob, image.Options{Format: o.format, Disk: o.disk})
	if f := (*fault.Fault)(nil); errors.As(err, &f) && f.Reason == fault.NeedsSpool {
		if whole {
			return found, nil
		}
		return found, fmt.Errorf("open image: %w (longshore import does that, and longshore inspect --digest)", err)
	}
	if err != nil {
		return found, fmt.Errorf("open image: %w", err)
	}
	defer opened.Close()
	info, err := opened.Measure(ctx)
	if err != nil {
		return found, fmt.Errorf("read the image's metadata: %w", err)
	}
	found.Format, found.Compression, found.Bundle, found.Disk, found.ClusterCompression = info.Format, info.Compression, info.Bundle, info.Disk, info.ClusterCompression
	found.VirtualSizeBytes, found.AllocatedBytes = known(info.VirtualSize), known(info.AllocatedBytes)
	found.Warnings = append(found.Warnings, info.Warnings...)
	return found, nil
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
	row("digest", i.Digest)
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
