package controllers

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/populator"
)

// Whoever asks for a claim's volume to be verified is answered once for each time, by
// annotation and event; a node that is busy is asked again.
func TestVerifyContent(t *testing.T) {
	t.Parallel()
	ns, pool := namespace(t), poolName(t)
	n := newNode(t, pool, 200*mib)
	importSource(t, ns, nil)
	claim := claimOf(t, ns, "disk", class(t, pool, nil), 64*mib, nil)
	id := populator.VolumeName(claim)
	n.ordered(id, 1)
	n.populate(id)
	bound(t, claim)
	answers := []struct {
		request, event, says string
		busy                 bool
		answer               *agentv1.VerifyVolumeResponse
		err                  error
	}{
		{"1", "Normal " + eventVerified, "is what it was filled with (blake3-64k:1:00)", true, &agentv1.VerifyVolumeResponse{Digest: "blake3-64k:1:00"}, nil},
		{"2", "Warning " + eventDiffers, "(blake3-64k:1:00): its digest is other", false, &agentv1.VerifyVolumeResponse{Digest: "blake3-64k:1:00", Difference: "its digest is other"}, nil},
		{"2b", "Warning " + eventNotVerified, "no image has filled it", false, nil, status.Error(codes.FailedPrecondition, "no image has filled it")},
	}
	for _, a := range answers {
		asked := 0
		n.mu.Lock()
		n.verify = func(string) (*agentv1.VerifyVolumeResponse, error) {
			if asked++; a.busy && asked == 1 {
				return nil, status.Error(codes.Aborted, "a pod uses it")
			}
			return a.answer, a.err
		}
		n.mu.Unlock()
		annotate(t, claim, populator.AnnotationVerify, a.request)
		eventually(t, "answer to "+a.request, func(ctx context.Context) error {
			if err := world.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
				return err
			}
			if got := claim.Annotations[populator.AnnotationVerified]; !strings.HasPrefix(got, a.request+": 2") || !strings.Contains(got, a.says) {
				return fmt.Errorf("it says %q", got)
			}
			return nil
		})
		told(t, claim, a.event, a.says)
		if a.busy {
			told(t, claim, "Normal "+eventNotVerified, "a pod uses it")
		}
		n.mu.Lock()
		if want := map[bool]int{true: 2, false: 1}[a.busy]; asked != want {
			t.Errorf("request %s: asked %d times, want %d", a.request, asked, want)
		}
		n.mu.Unlock()
	}
	other := &corev1.PersistentVolumeClaim{}
	must(t, world.Get(t.Context(), client.ObjectKeyFromObject(claim), other))
	if asksToVerify(other) {
		t.Error("an answered claim asks still")
	}
}
