// Package kinds lists the sources that a node fills volumes from.
//
// It is a list and nothing else: the node plugin's program and its movers'
// program must have the same one.
package kinds

import (
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/blank"
	"github.com/longshore-io/longshore/nodeplugin/source/httpsrc"
)

// Node are those sources.
var Node = source.Kinds{blank.Kind, httpsrc.Kind}
