package main

import (
	"bufio"
	"os"
	"slices"
	"sort"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// allowed are the differences from the published API, each with its reason.
// They are additions: a client of the published types never meets them.
var allowed = map[string]string{
	"status.conditions[]":                    "where a person looks for why an import does not go on; see addConditions",
	"status.conditions[].lastTransitionTime": "member of metav1.Condition",
	"status.conditions[].message":            "member of metav1.Condition",
	"status.conditions[].observedGeneration": "member of metav1.Condition",
	"status.conditions[].reason":             "member of metav1.Condition",
	"status.conditions[].status":             "member of metav1.Condition",
	"status.conditions[].type":               "member of metav1.Condition",
}

// testdata/volumeimportsource-fields.tsv holds the rows of kind VolumeImportSource
// of the project's table of API facts (cdi-v1beta1-fields.tsv, taken from CDI's
// CRDs after v1.66.0, storage version v1beta1), unchanged.
func TestVolumeImportSourceHasThePublishedFields(t *testing.T) {
	crd, err := read("../../charts/longshore/crds/cdi.kubevirt.io_volumeimportsources.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want, scope := published(t, "testdata/volumeimportsource-fields.tsv")
	if got := at(crd, "spec", "scope"); got != scope {
		t.Errorf("scope = %v, want %v", got, scope)
	}
	if got := at(crd, "spec", "group"); got != "cdi.kubevirt.io" {
		t.Errorf("group = %v", got)
	}
	if got := at(crd, "spec", "names", "shortNames"); got != nil {
		t.Errorf("shortNames = %v, want none", got)
	}
	schema, err := schemaOf(crd)
	if err != nil {
		t.Fatal(err)
	}
	version := at(crd, "spec", "versions").([]any)[0].(object)
	if version["name"] != "v1beta1" || version["served"] != true || version["storage"] != true {
		t.Errorf("version %v served %v storage %v, want v1beta1 true true", version["name"], version["served"], version["storage"])
	}
	if version["subresources"] != nil {
		t.Errorf("subresources = %v: the published kind has none, and clients write the whole object", version["subresources"])
	}

	got := map[string]row{}
	for _, f := range fields(schema) {
		if _, ok := allowed[f.path]; ok {
			continue
		}
		got[f.path] = row{Type: f.kind, Required: f.required, Enum: strings.Join(f.enum, "|"), Default: f.fallback}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("fields differ from the published ones (-published +ours); an intended difference belongs into allowed with its reason:\n%s", diff)
	}
	var paths []string
	for _, f := range fields(schema) {
		paths = append(paths, f.path)
	}
	for path := range allowed {
		if !slices.Contains(paths, path) {
			t.Errorf("allowed difference %s is not in the definition", path)
		}
	}
}

type row struct {
	Type          string
	Required      bool
	Enum, Default string
}

// published reads the table. What it calls "not schema-enforced" or "runtime" is
// the business of webhooks and controllers, not of the schema.
func published(t *testing.T, path string) (rows map[string]row, scope string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows = map[string]row{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "#") || strings.HasPrefix(lines.Text(), "kind\t") {
			continue
		}
		c := strings.Split(lines.Text(), "\t")
		if len(c) != 9 || c[0] != "VolumeImportSource" {
			t.Fatalf("row %q has %d columns, want 9 of VolumeImportSource", lines.Text(), len(c))
		}
		r := row{Type: c[4], Required: c[5] == "y"}
		if !strings.HasPrefix(c[6], "(") {
			r.Enum = c[6]
		}
		if !strings.HasPrefix(c[7], "(") {
			r.Default = c[7]
		}
		rows[c[3]] = r
		scope = c[1]
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	if len(rows) == 0 {
		t.Fatal("no rows")
	}
	return rows, scope
}

func TestFieldsOfASchema(t *testing.T) {
	schema := object{
		"required": []any{"spec"},
		"properties": object{
			"spec": object{
				"type":     "object",
				"required": []any{"names"},
				"properties": object{
					"names": object{"type": "array", "items": object{"type": "string"}},
					"steps": object{"type": "array", "items": object{
						"type": "object", "required": []any{"id"},
						"properties": object{"id": object{"type": "string", "enum": []any{"a", "b"}}},
					}},
					"labels": object{"type": "object", "additionalProperties": object{"type": "string"}},
				},
			},
		},
	}
	var got []string
	for _, f := range fields(schema) {
		must := ""
		if f.required {
			must = " required"
		}
		got = append(got, f.path+" "+f.kind+must+" "+strings.Join(f.enum, "|"))
	}
	sort.Strings(got)
	want := []string{
		"spec object required ",
		"spec.labels map[string]string ",
		"spec.names []string required ",
		"spec.steps[] []object ",
		"spec.steps[].id string required a|b",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestConditionsAreAddedOnce(t *testing.T) {
	definition := func(status object) object {
		return object{"spec": object{"versions": []any{object{"schema": object{"openAPIV3Schema": object{
			"properties": object{"status": status},
		}}}}}}
	}
	own := definition(object{"properties": object{"conditions": object{"type": "array"}}})
	crd := definition(object{"type": "object"})
	if err := addConditions(crd, own); err != nil {
		t.Fatal(err)
	}
	schema, err := schemaOf(crd)
	if err != nil {
		t.Fatal(err)
	}
	if got := at(schema, "properties", "status", "properties", "conditions", "type"); got != "array" {
		t.Errorf("conditions of type %v, want array", got)
	}
	if err := addConditions(crd, own); err == nil {
		t.Error("conditions that are already there were replaced")
	}
}
