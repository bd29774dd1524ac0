// Package fault gives an error what the machines around it need to act on it: a
// class that says whether trying again helps, and a reason that a condition, an
// event and an exit code can carry.
//
// It knows nothing of what went wrong: whoever words the error decides its class.
package fault

import "errors"

// Reasons, CamelCase as conditions and events want them.
const (
	AddressNotAllowed  = "AddressNotAllowed"  // the fetch policy refuses the address
	BackingFile        = "BackingFile"        // the image refers to another file for its content
	CertificateError   = "CertificateError"   // the server's certificate is not trusted
	ChecksumMismatch   = "ChecksumMismatch"   // the source's bytes are not those that were promised
	ConnectionFailed   = "ConnectionFailed"   // no connection, or it broke
	ContentDiffers     = "ContentDiffers"     // the disk is not the one that its digest is of
	CorruptImage       = "CorruptImage"       // the image contradicts itself
	EncryptedImage     = "EncryptedImage"     // the image needs a key
	Error              = "Error"              // an error that nobody classed
	ExternalDataFile   = "ExternalDataFile"   // the image keeps its content in another file
	Forbidden          = "Forbidden"          // the credentials do not suffice
	FormatNotSupported = "FormatNotSupported" // the image is of a known format, or a variant of it, that is not read
	ImageTooLarge      = "ImageTooLarge"      // the disk does not fit the volume
	InvalidSource      = "InvalidSource"      // the source's parameters make no sense
	MoverDied          = "MoverDied"          // the mover ended without a result
	MoverMemory        = "MoverMemory"        // the mover wanted more memory than it may have
	NoSpace            = "NoSpace"            // the target's filesystem is full
	NeedsSpool         = "NeedsSpool"         // the image comes once and has to be read again
	NotAnArchive       = "NotAnArchive"       // what the source serves is no archive
	NotADiskImage      = "NotADiskImage"      // what the source serves is no disk image
	NotFound           = "NotFound"           // the source has no such object
	PoolFull           = "PoolFull"           // the pool has no room for the volume
	ServerError        = "ServerError"        // the server answers that it cannot
	SourceChanged      = "SourceChanged"      // the source is no longer what the transfer began with
	SourceNotSupported = "SourceNotSupported" // no such kind of source here
	TargetError        = "TargetError"        // the target does not take or keep what is written
	TooManyRetries     = "TooManyRetries"     // the retry budget is used up
	TooSlow            = "TooSlow"            // the source delivers less than the least acceptable rate
	Unauthorized       = "Unauthorized"       // the source wants (other) credentials
	UnknownHost        = "UnknownHost"        // the name does not resolve
	UnsafeArchive      = "UnsafeArchive"      // the archive has a member that lies, or leads, out of it, or that nobody may make
)

// Fault is an error with a class and a reason.
type Fault struct {
	// Terminal: trying again is useless until somebody changes something. Else
	// the fault is transient: the same attempt may go well later.
	Terminal bool
	Reason   string
	Err      error
}

func (f *Fault) Error() string { return f.Err.Error() }
func (f *Fault) Unwrap() error { return f.Err }

// Terminal classes err as one that no retry cures. It returns nil for nil.
func Terminal(reason string, err error) error {
	if err == nil {
		return nil
	}
	return &Fault{Terminal: true, Reason: reason, Err: err}
}

// Transient classes err as one that a later attempt may be spared. It returns nil for nil.
func Transient(reason string, err error) error {
	if err == nil {
		return nil
	}
	return &Fault{Reason: reason, Err: err}
}

// Of returns the fault in err, with the whole text of err: what callers wrapped
// around a fault stays in its message. An error without a class is transient
// with the reason Error; nil gives nil.
func Of(err error) *Fault {
	if err == nil {
		return nil
	}
	if f, ok := err.(*Fault); ok { //nolint:errorlint // only the outermost error has the whole text already
		return f
	}
	var f *Fault
	if errors.As(err, &f) {
		return &Fault{Terminal: f.Terminal, Reason: f.Reason, Err: err}
	}
	return &Fault{Reason: Error, Err: err}
}
