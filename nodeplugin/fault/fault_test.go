package fault_test

import (
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/longshore-io/longshore/nodeplugin/fault"
)

func TestOf(t *testing.T) {
	notFound := fault.Terminal(fault.NotFound, errors.New("get a.img: 404"))
	for _, row := range []struct {
		name     string
		err      error
		terminal bool
		reason   string
		text     string
	}{
		{"a fault is itself", notFound, true, fault.NotFound, "get a.img: 404"},
		{"a wrapped fault keeps its class and the whole text", fmt.Errorf("open source: %w", notFound), true, fault.NotFound, "open source: get a.img: 404"},
		{"the outer of two classes wins", fault.Transient(fault.ServerError, notFound), false, fault.ServerError, "get a.img: 404"},
		{"an error without a class is transient", io.ErrUnexpectedEOF, false, fault.Error, "unexpected EOF"},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := fault.Of(row.err)
			if f.Terminal != row.terminal || f.Reason != row.reason || f.Error() != row.text {
				t.Errorf("got terminal %v, %s, %q; want %v, %s, %q", f.Terminal, f.Reason, f.Error(), row.terminal, row.reason, row.text)
			}
			if !errors.Is(f, row.err) && f != row.err { //nolint:errorlint // identity is meant
				t.Errorf("the fault lost %v", row.err)
			}
		})
	}
}

func TestNilStaysNil(t *testing.T) {
	if fault.Of(nil) != nil || fault.Terminal(fault.NotFound, nil) != nil || fault.Transient(fault.NotFound, nil) != nil {
		t.Error("nil became an error")
	}
}
