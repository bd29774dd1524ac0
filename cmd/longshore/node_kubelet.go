package main

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/longshore-io/longshore/csi"
)

// kubeletRegistration answers the kubelet, which finds the socket in its plugin
// folder, asks who is there, and tells what came of it; again after each restart
// of the kubelet.
type kubeletRegistration struct {
	registration.UnimplementedRegistrationServer
	endpoint string
	log      *slog.Logger

	mu         sync.Mutex
	registered bool
	failure    string
}

func (r *kubeletRegistration) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: csi.DriverName, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (r *kubeletRegistration) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.registered, r.failure = s.GetPluginRegistered(), s.GetError()
	if r.registered {
		r.log.Info("registered with the kubelet")
	} else {
		r.log.Error("the kubelet does not take the plugin", "error", r.failure)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

// ready is nil once the kubelet has taken the plugin, if that is wanted.
func (r *kubeletRegistration) ready(wanted bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.registered || !wanted:
		return nil
	case r.failure != "":
		return errors.New("the kubelet does not take the plugin: " + r.failure)
	}
	return errors.New("the kubelet has not found the plugin yet")
}
