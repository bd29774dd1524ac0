package e2e

import (
	"strings"
	"testing"

	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/longshore-io/longshore/test/e2e/lab"
	"github.com/longshore-io/longshore/test/images"
	"github.com/longshore-io/longshore/test/peers"
)

func archive(s *cdiv1.VolumeImportSource) { s.Spec.ContentType = cdiv1.DataVolumeArchive }

// A person applies a PVC that names an archive; the pod finds its files in the volume.
func TestArchive(t *testing.T) {
	t.Parallel()
	web := lab.Web(t, peers.NginxOptions{})
	folder := images.Folder("site/empty")
	folder.Mode = 0o1770
	script := images.File("site/run", "#!/bin/sh\necho it runs\n")
	script.Mode = 0o755
	web.Put("site.tar", images.Archive(t, images.Folder("."), folder, script, images.File("site/a file", "content\n"), images.Link("site/hard", "site/run"), images.Symlink("link", "site/a file")))
	lab.Tool(t, web.Root, "gzip", "-k", "site.tar")
	for _, r := range []struct {
		name, file string
		class      lab.Class
	}{
		{"waits for its consumer, bind, tar", "site.tar", lab.Class{Wait: true, Populate: "bind"}},
		{"immediate, xfs, stage, tar.gz", "site.tar.gz", lab.Class{Populate: "stage", FSType: "xfs"}},
	} {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			ns := world.NewNamespace(t)
			class := world.StorageClass(t, r.class)
			world.HTTPSource(t, ns, "archive", web.URL(r.file), archive)
			claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "files", Class: class, Bytes: size(r.class), ImportSource: "archive"})
			out := world.Output(t, world.Pod(t, claim, "consumer", `cd /data
cat link
./site/hard
stat -c '%n %u:%g %a %h %Y' link site/empty site/run 'site/a file'
ls -A . site | grep -v lost+found`))
			want := `content
it runs
link 107:107 777 1 1000000000
site/empty 107:107 1770 2 1000000000
site/run 107:107 755 2 1000000000
site/a file 107:107 644 1 1000000000
.:
link
site

site:
a file
empty
hard
run`
			if out != want {
				t.Errorf("the pod prints\n%s\nwant\n%s", out, want)
			}
		})
	}
}

// An archive that is no good is refused on the claim, with the member that is, and one for a
// Block volume before anything is fetched.
func TestArchiveRefused(t *testing.T) {
	t.Parallel()
	web := lab.Web(t, peers.NginxOptions{})
	good := images.File("good", strings.Repeat("good ", 1<<20))
	web.Put("up.tar", images.Archive(t, good, images.File("../../etc/passwd", "x")))
	web.Put("link.tar", images.Archive(t, good, images.Symlink("link", "/etc")))
	lab.Tool(t, web.Root, "gzip", "-k", "link.tar")
	web.Put("page.tar", []byte("<!DOCTYPE html><html><body>Please log in</body></html>"+strings.Repeat(" ", 4096)))
	for _, r := range []struct {
		name, file string
		block      bool
		reason     string
		words      []string
	}{
		{"a name that leads out", "up.tar", false, "UnsafeArchive", []string{"../../etc/passwd"}},
		{"a link that leads out, compressed", "link.tar.gz", false, "UnsafeArchive", []string{`"link"`, `"/etc"`}},
		{"an HTML page", "page.tar", false, "NotAnArchive", []string{"DOCTYPE"}},
		{"for a Block volume", "up.tar", true, "InvalidClaim", []string{"volumeMode"}},
	} {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			ns := world.NewNamespace(t)
			class := world.StorageClass(t, lab.Class{})
			world.HTTPSource(t, ns, "archive", web.URL(r.file), archive)
			claim := world.Claim(t, lab.Claim{Namespace: ns, Name: "files", Class: class, Bytes: 64 * mib, Block: r.block, ImportSource: "archive"})
			saysOnClaim(t, claim, r.reason, r.words...)
		})
	}
}
