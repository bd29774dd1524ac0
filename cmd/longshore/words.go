package main

import "strings"

// inShell words for a person at a shell what the engine says to one who wrote a
// manifest: what is a field there is an argument here.
var inShell = strings.NewReplacer(
	"name a secret with the keys accessKeyId and secretKey in spec.source.http.secretRef", "give --user and --password-file",
	"correct the keys accessKeyId and secretKey of the secret in spec.source.http.secretRef", "correct --user and --password-file",
	"give access to the user of the secret in spec.source.http.secretRef", "give access to the user named by --user",
	"correct the config map named in spec.source.http.certConfigMap", "correct the file named by --ca-file",
	"in spec.source.http.certConfigMap", "with --ca-file",
	"name that url in spec.source.http.url", "name that url as SOURCE",
	"give the file's own address in spec.source.http.url", "give the file's own address",
	"spec.source.http.extraHeaders or the secrets in spec.source.http.secretExtraHeaders", "--header",
	"spec.source.http.extraHeaders or spec.source.http.secretExtraHeaders", "--header",
	"in spec.source.http.url", "in the url",
	"spec.source.http.url and the cluster's DNS", "the url and this machine's DNS",
	"spec.source.http.url", "the url",
	" (spec.resources.requests.storage of the claim)", "",
	" or the annotation longshore.dev/image-format: raw on the VolumeImportSource", "",
	", or the annotation longshore.dev/image-format: vhd on the VolumeImportSource", "",
	"the annotation longshore.dev/image-disk on the VolumeImportSource, or --disk", "--disk",
	"can be reached from the node", "can be reached from here",
	"the network between node and server", "the network between here and the server",
	"make it resolve for the node plugin's pod", "make it resolve here",
	"let the node plugin's pod reach it", "let this machine reach it",
)
