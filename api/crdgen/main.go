// Command crdgen makes what is generated of the API beyond Go code: the
// CustomResourceDefinitions of the chart and docs/api.md.
//
// It knows nothing of what the kinds mean: schemas are controller-gen's, of our
// own types and of the published module of the cdi.kubevirt.io types.
//
//	crdgen -controller-gen bin/controller-gen -crds charts/longshore/crds -docs docs/api.md
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"

	"sigs.k8s.io/yaml"
)

const (
	ownPackage = "github.com/longshore-io/longshore/api/v1alpha1"
	cdiPackage = "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ownFile    = "longshore.dev_nodevolumes.yaml"
)

// cdiFiles are the kinds of cdi.kubevirt.io that the controller serves; the
// package has more, and a definition without a controller would only mislead.
var cdiFiles = []string{"cdi.kubevirt.io_volumeimportsources.yaml"}

type object = map[string]any

func main() {
	log.SetFlags(0)
	log.SetPrefix("crdgen: ")
	controllerGen := flag.String("controller-gen", "bin/controller-gen", "the built controller-gen")
	crds := flag.String("crds", "charts/longshore/crds", "folder that gets the definitions")
	docs := flag.String("docs", "docs/api.md", "file that gets the reference of the fields")
	flag.Parse()
	if err := run(*controllerGen, *crds, *docs); err != nil {
		log.Fatal(err)
	}
}

func run(controllerGen, crds, docs string) error {
	tmp, err := os.MkdirTemp("", "crdgen-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	for _, pkg := range []string{ownPackage, cdiPackage} {
		cmd := exec.Command(controllerGen, "crd", "paths="+pkg, "output:crd:dir="+tmp)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s of %s: %s: %w", controllerGen, pkg, bytes.TrimSpace(out), err)
		}
	}
	own, err := read(filepath.Join(tmp, ownFile))
	if err != nil {
		return err
	}
	definitions := map[string]object{ownFile: own}
	for _, name := range cdiFiles {
		crd, err := read(filepath.Join(tmp, name))
		if err != nil {
			return err
		}
		if err := addConditions(crd, own); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		definitions[name] = crd
	}
	var names []string
	for name, crd := range definitions {
		names = append(names, name)
		content, err := yaml.Marshal(crd)
		if err != nil {
			return err
		}
		header := "# Made by make generate from Go types; do not edit.\n---\n"
		if err := os.WriteFile(filepath.Join(crds, name), append([]byte(header), content...), 0o644); err != nil {
			return err
		}
	}
	sort.Strings(names)
	var page bytes.Buffer
	page.WriteString(pageHead)
	for _, name := range names {
		if err := describe(&page, definitions[name]); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return os.WriteFile(docs, page.Bytes(), 0o644)
}

func read(path string) (object, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var o object
	if err := yaml.Unmarshal(content, &o); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return o, nil
}

// addConditions gives crd's status the list of conditions that own's status has.
//
// The published status of this kind is an empty object, so an apiserver would
// drop whatever is written there, and a person who asks why an import does not
// start would find nothing at the source that they wrote. The addition changes
// no field that exists: clients of the published types read and write as before.
func addConditions(crd, own object) error {
	from, err := schemaOf(own)
	if err != nil {
		return err
	}
	conditions, ok := at(from, "properties", "status", "properties", "conditions").(object)
	if !ok {
		return errors.New("no status.conditions in " + ownFile)
	}
	to, err := schemaOf(crd)
	if err != nil {
		return err
	}
	status, ok := at(to, "properties", "status").(object)
	if !ok {
		return errors.New("no status")
	}
	if _, taken := at(status, "properties", "conditions").(object); taken {
		return errors.New("the published type has conditions of its own now: remove addConditions")
	}
	properties, ok := status["properties"].(object)
	if !ok {
		properties = object{}
		status["properties"] = properties
	}
	properties["conditions"] = conditions
	return nil
}

// schemaOf is the schema of the only version of crd.
func schemaOf(crd object) (object, error) {
	versions, _ := at(crd, "spec", "versions").([]any)
	if len(versions) != 1 {
		return nil, fmt.Errorf("%d versions, want 1", len(versions))
	}
	version, _ := versions[0].(object)
	schema, ok := at(version, "schema", "openAPIV3Schema").(object)
	if !ok {
		return nil, errors.New("no schema")
	}
	return schema, nil
}

func at(o object, path ...string) any {
	var v any = o
	for _, key := range path {
		m, ok := v.(object)
		if !ok {
			return nil
		}
		v = m[key]
	}
	return v
}

const pageHead = `# API reference

Made by ` + "`make generate`" + ` from the Go types; do not edit. Sizes are bytes unless a quantity is named.
What the fields do in practice: [volumeimportsource.md](volumeimportsource.md).
`

func describe(w *bytes.Buffer, crd object) error {
	schema, err := schemaOf(crd)
	if err != nil {
		return err
	}
	versions := at(crd, "spec", "versions").([]any)
	names := at(crd, "spec", "names").(object)
	fmt.Fprintf(w, "\n## %v\n\n`%v/%v`, %v\n\n", names["kind"], at(crd, "spec", "group"), versions[0].(object)["name"], at(crd, "spec", "scope"))
	if text, ok := schema["description"].(string); ok {
		fmt.Fprintf(w, "%s\n\n", oneLine(text))
	}
	fmt.Fprintln(w, "| field | type | required | what it says |")
	fmt.Fprintln(w, "|---|---|---|---|")
	for _, f := range fields(schema) {
		required := ""
		if f.required {
			required = "yes"
		}
		text := strings.ReplaceAll(f.description, "|", `\|`)
		if len(f.enum) > 0 {
			text = strings.TrimSpace(text + " One of: " + strings.Join(f.enum, ", ") + ".")
		}
		fmt.Fprintf(w, "| `%s` | %s | %s | %s |\n", f.path, f.kind, required, text)
	}
	return nil
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// field is one line of a schema, named as in the tables of API facts: a.b[].c.
type field struct {
	path, kind  string
	required    bool
	enum        []string
	fallback    string
	description string
}

// fields lists the schema's fields below spec and status, in order of path.
func fields(schema object) []field {
	var all []field
	properties, _ := schema["properties"].(object)
	for _, name := range []string{"spec", "status"} {
		if p, ok := properties[name].(object); ok {
			all = append(all, walk(name, p, required(schema, name))...)
		}
	}
	sort.SliceStable(all, func(i, j int) bool { return all[i].path < all[j].path })
	return all
}

func walk(path string, schema object, must bool) []field {
	f := field{path: path, required: must}
	f.kind, _ = schema["type"].(string)
	if text, ok := schema["description"].(string); ok {
		f.description = oneLine(text)
	}
	if values, ok := schema["enum"].([]any); ok {
		for _, v := range values {
			f.enum = append(f.enum, fmt.Sprint(v))
		}
	}
	if v, ok := schema["default"]; ok {
		f.fallback = fmt.Sprint(v)
	}
	inner, prefix := schema, path+"."
	switch f.kind {
	case "array":
		items, _ := schema["items"].(object)
		kind, _ := items["type"].(string)
		f.kind = "[]" + kind
		inner = items
		if kind == "object" {
			f.path += "[]"
			prefix = f.path + "."
		}
	case "object":
		if values, ok := schema["additionalProperties"].(object); ok {
			f.kind = fmt.Sprintf("map[string]%v", values["type"])
		}
	}
	all := []field{f}
	properties, _ := inner["properties"].(object)
	for name, p := range properties {
		if p, ok := p.(object); ok {
			all = append(all, walk(prefix+name, p, required(inner, name))...)
		}
	}
	return all
}

func required(schema object, name string) bool {
	names, _ := schema["required"].([]any)
	for _, n := range names {
		if n == name {
			return true
		}
	}
	return false
}
