// Package fault gives errors a class: terminal, never retried until something
// changes, or transient, retried with backoff; and a CamelCase reason that
// conditions and events carry.
//
// It knows nothing of where an error comes from or who is told of it.
package fault

import "errors"

// Fault is an error with a class.
type Fault struct {
	Terminal bool
	Reason   string
	Err      error
}

func (f *Fault) Error() string { return f.Err.Error() }
func (f *Fault) Unwrap() error { return f.Err }

// Terminal returns err as one that no retry mends; nil for a nil err.
func Terminal(reason string, err error) error {
	if err == nil {
		return nil
	}
	return &Fault{Terminal: true, Reason: reason, Err: err}
}

// Transient returns err as one that a later try may not meet; nil for a nil err.
func Transient(reason string, err error) error {
	if err == nil {
		return nil
	}
	return &Fault{Reason: reason, Err: err}
}

// Of returns the class of err, the outermost where several are wrapped: nil for
// nil, and transient with the reason "Error" for an error without one. Its
// message is the whole of err's, with what was wrapped around the fault.
func Of(err error) *Fault {
	if err == nil {
		return nil
	}
	var f *Fault
	if errors.As(err, &f) {
		return &Fault{Terminal: f.Terminal, Reason: f.Reason, Err: err}
	}
	return &Fault{Reason: "Error", Err: err}
}
