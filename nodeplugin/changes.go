package nodeplugin

import "sync"

// changes tells its watchers which volumes are no longer what they were. It
// never waits for a watcher, and tells a slow one each volume once.
type changes struct {
	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

// watcher collects what has changed since it last took.
type watcher struct {
	of *changes
	// ready holds a value while there is something to take.
	ready chan struct{}
	ids   map[string]struct{}
}

func (c *changes) subscribe() *watcher {
	w := &watcher{of: c, ready: make(chan struct{}, 1), ids: map[string]struct{}{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.watchers == nil {
		c.watchers = map[*watcher]struct{}{}
	}
	c.watchers[w] = struct{}{}
	return w
}

// tell tells that the volume, or with "" only a pool, has changed.
func (c *changes) tell(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for w := range c.watchers {
		w.ids[id] = struct{}{}
		select {
		case w.ready <- struct{}{}:
		default:
		}
	}
}

func (w *watcher) take() map[string]struct{} {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	ids := w.ids
	w.ids = map[string]struct{}{}
	return ids
}

func (w *watcher) stop() {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	delete(w.of.watchers, w)
}
