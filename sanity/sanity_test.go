package sanity

import (
	"fmt"
	"testing"
)

func TestReportOfFailures(t *testing.T) {
	r, err := parse([]byte(`<testsuites><testsuite>
		<testcase name="[BeforeSuite]" status="passed"/>
		<testcase name="[It] a works" status="passed"/>
		<testcase name="[It] b fails" status="failed"><failure message="x"/></testcase>
		<testcase name="[It] c is skipped" status="skipped"><skipped/></testcase>
		<testcase name="[It] d hangs" status="interrupted"/>
		<testcase name="[AfterSuite]" status="panicked"><error/></testcase>
	</testsuite></testsuites>`))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(r.Passed, r.Failed, r.Skipped), "[a works] [b fails d hangs (interrupted) [AfterSuite]] [c is skipped]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if _, err := parse([]byte("<testsuites/>")); err == nil {
		t.Error("a report of nothing is taken for a success")
	}
}
