package device

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// ToolError is a run of a program that did not succeed.
type ToolError struct {
	Tool string
	Args []string
	// ExitCode is -1 when the program was killed or could not be started.
	ExitCode int
	// Line is the line of its standard error that says why; "" when it wrote none.
	Line string
	Err  error
}

func (e *ToolError) Error() string {
	if e.Line != "" {
		return fmt.Sprintf("%s %s: exit code %d: %s", e.Tool, strings.Join(e.Args, " "), e.ExitCode, e.Line)
	}
	return fmt.Sprintf("%s %s: %v", e.Tool, strings.Join(e.Args, " "), e.Err)
}

func (e *ToolError) Unwrap() error { return e.Err }

// run runs a program to its end in the C locale; it dies with ctx.
func run(ctx context.Context, tool string, args ...string) error {
	cmd := exec.CommandContext(ctx, find(tool), args...)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + strings.Join(toolFolders, ":")}
	cmd.WaitDelay = 5 * time.Second
	var stderr lastBytes
	cmd.Stderr = &stderr
	err := cmd.Run()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	e := &ToolError{Tool: filepath.Base(tool), Args: args, ExitCode: -1, Line: stderr.line(), Err: err}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		e.ExitCode = exit.ExitCode()
	}
	return e
}

// toolFolders is where the tools of a distribution lie; a person's PATH often
// lacks the first and the third.
var toolFolders = []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin"}

func find(tool string) string {
	for _, folder := range toolFolders {
		if p := filepath.Join(folder, tool); isFile(p) {
			return p
		}
	}
	return tool // exec says that it is missing
}

func isFile(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular()
}

// lastBytes keeps the first and the last 2 KiB of what is written to it.
type lastBytes struct{ head, tail []byte }

const keptBytes = 2048

func (b *lastBytes) Write(p []byte) (int, error) {
	if room := keptBytes - len(b.head); room > 0 {
		b.head = append(b.head, p[:min(room, len(p))]...)
	}
	b.tail = append(b.tail, p...)
	if extra := len(b.tail) - keptBytes; extra > 0 {
		b.tail = append(b.tail[:0], b.tail[extra:]...)
	}
	return len(p), nil
}

// line is the last line that is not empty, or, from a program that prints its
// usage after its complaint, the line before that.
func (b *lastBytes) line() string {
	if before, _, usage := bytes.Cut(b.head, []byte("\nUsage:")); usage {
		return lastLine(before)
	}
	return lastLine(b.tail)
}

func lastLine(p []byte) string {
	p = bytes.TrimSpace(p)
	return string(bytes.TrimSpace(p[bytes.LastIndexByte(p, '\n')+1:]))
}
