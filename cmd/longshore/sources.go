package main

import (
	"github.com/longshore-io/longshore/nodeplugin/source/file"
	"github.com/longshore-io/longshore/nodeplugin/source/kinds"
)

// localSources are the kinds of the command line. A path is one of this
// machine, so a node must not have it.
var localSources = append(kinds.Node[:len(kinds.Node):len(kinds.Node)], file.Kind)
