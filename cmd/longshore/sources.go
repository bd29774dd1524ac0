package main

import (
	"github.com/longshore-io/longshore/nodeplugin/source"
	"github.com/longshore-io/longshore/nodeplugin/source/blank"
	"github.com/longshore-io/longshore/nodeplugin/source/file"
	"github.com/longshore-io/longshore/nodeplugin/source/httpsrc"
)

// sources are the kinds that a node fills volumes from.
var sources = source.Kinds{blank.Kind, httpsrc.Kind}

// localSources are the kinds of the command line. A path is one of this
// machine, so a node must not have it.
var localSources = append(sources[:len(sources):len(sources)], file.Kind)
