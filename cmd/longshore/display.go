package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"

	"github.com/longshore-io/longshore/nodeplugin/mover"
)

// lineEvery is how often a line tells the progress where no terminal shows a bar.
const lineEvery = 2 * time.Second

// display shows how far an import is: a bar on a terminal, lines elsewhere.
type display struct {
	w     io.Writer
	quiet bool
	tty   bool

	bars *mpb.Progress
	bar  *mpb.Bar
	end  chan struct{}
	wait sync.WaitGroup
	// began is the time since start.
	began func() time.Duration
}

func newDisplay(w io.Writer, quiet bool) *display {
	f, isFile := w.(*os.File)
	return &display{w: w, quiet: quiet, tty: isFile && term.IsTerminal(int(f.Fd()))}
}

// say prints a line; above the bar, if there is one.
func (d *display) say(line string) {
	switch {
	case d.quiet:
	case d.bars != nil:
		fmt.Fprintln(d.bars, line)
	default:
		fmt.Fprintln(d.w, line)
	}
}

// start begins to show moved, of total bytes (-1 unknown), of which done were
// there before.
func (d *display) start(total, done int64, moved *mover.Moved) {
	if d.quiet {
		return
	}
	d.end = make(chan struct{})
	began := time.Now()
	d.began = func() time.Duration { return time.Since(began) }
	if d.tty {
		d.bars = mpb.New(mpb.WithOutput(d.w), mpb.WithWidth(40), mpb.WithRefreshRate(100*time.Millisecond))
		left := decor.CountersKibiByte("% .1f of % .1f")
		if total < 0 {
			left = decor.CurrentKibiByte("% .1f")
		}
		d.bar = d.bars.AddBar(max(total, 0),
			mpb.PrependDecorators(left),
			mpb.AppendDecorators(
				decor.Any(func(decor.Statistics) string { return rate(done, moved.Done.Load(), d.began()) }),
				decor.Any(func(decor.Statistics) string { return eta(total, done, moved.Done.Load(), d.began()) }),
			))
		d.bar.SetRefill(done)
	}
	d.wait.Add(1)
	go func() {
		defer d.wait.Done()
		every := lineEvery
		if d.tty {
			every = 100 * time.Millisecond
		}
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-d.end:
				return
			case <-tick.C:
			}
			now := moved.Done.Load()
			if d.tty {
				d.bar.SetCurrent(now)
				continue
			}
			of := ""
			if total > 0 {
				of = fmt.Sprintf(" of %s (%d %%)", human(total), now*100/total)
			}
			fmt.Fprintf(d.w, "%s%s%s%s\n", human(now), of, rate(done, now, d.began()), eta(total, done, now, d.began()))
		}
	}()
}

// stop ends the display; called again it does nothing.
func (d *display) stop() {
	if d.end == nil {
		return
	}
	close(d.end)
	d.wait.Wait()
	d.end = nil
	if d.bars != nil {
		d.bar.Abort(false)
		d.bars.Wait()
		d.bars = nil
	}
}

func rate(before, now int64, took time.Duration) string {
	if took < 500*time.Millisecond || now <= before {
		return ""
	}
	return fmt.Sprintf(", %s/s", human(int64(float64(now-before)/took.Seconds())))
}

func eta(total, before, now int64, took time.Duration) string {
	if total <= 0 || took < time.Second || now <= before {
		return ""
	}
	left := time.Duration(float64(took) * float64(total-now) / float64(now-before))
	return fmt.Sprintf(", %s left", left.Round(time.Second))
}
