package controllers

import (
	"context"
	"errors"
	"testing"

	"github.com/go-logr/logr"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/longshore-io/longshore/api/agent/v1"
	"github.com/longshore-io/longshore/csi"
)

// An answer that a report has overtaken is no news: a transfer that ended while
// the order to start it was being answered stays ended.
func TestAnswerOvertakenByReport(t *testing.T) {
	pool := &agentv1.Pool{Name: "default"}
	filling := &agentv1.Volume{Id: "v", State: agentv1.State_STATE_FILLING}
	populated := &agentv1.Volume{Id: "v", State: agentv1.State_STATE_POPULATED}
	ag := &agent{node: "n", reports: map[string]uint64{}}
	a := &Agents{Log: logr.Discard(), nodes: map[string]*agent{"n": ag}}
	a.report(ag, &agentv1.Report{Pools: []*agentv1.Pool{pool}}, true)

	_, before := a.agentFor("n", "v")
	a.learn(ag, "v", filling, before)
	if v, _ := a.Volume("n", "v"); v != filling {
		t.Fatalf("an answer in time is not learned: %v", v)
	}
	_, before = a.agentFor("n", "v")
	a.report(ag, &agentv1.Report{Volumes: []*agentv1.Volume{populated}}, false)
	a.learn(ag, "v", filling, before)
	if v, _ := a.Volume("n", "v"); v != populated {
		t.Errorf("the late answer wins: %v", v)
	}
	_, before = a.agentFor("n", "v")
	a.report(ag, &agentv1.Report{Volumes: []*agentv1.Volume{populated}}, true) // another stream
	a.learn(ag, "v", nil, before)
	if v, _ := a.Volume("n", "v"); v != populated {
		t.Errorf("a late deletion wins: %v", v)
	}
}

// A report of a new stream says all: what it does not tell of is no more.
func TestFirstReportSaysAll(t *testing.T) {
	ag := &agent{node: "n", reports: map[string]uint64{}}
	a := &Agents{Log: logr.Discard(), nodes: map[string]*agent{"n": ag}}
	var heard []string
	a.Listen(Listener{Volume: func(id string) { heard = append(heard, id) }})
	a.report(ag, &agentv1.Report{Volumes: []*agentv1.Volume{{Id: "a"}, {Id: "b"}}}, true)
	a.disconnected(ag)
	if v, connected := a.Volume("n", "a"); v == nil || connected {
		t.Errorf("while it is away: %v, connected %v; want the old word", v, connected)
	}
	if p, connected := a.Pool("n", "default"); p != nil || connected {
		t.Error("a node that is away offers a pool")
	}
	heard = nil
	a.report(ag, &agentv1.Report{Volumes: []*agentv1.Volume{{Id: "b"}}}, true)
	if v, connected := a.Volume("n", "a"); v != nil || !connected {
		t.Errorf("a volume that is no more: %v", v)
	}
	if len(heard) != 3 { // a and b of before, b of now
		t.Errorf("heard of %v", heard)
	}
}

func TestKindOfAnswers(t *testing.T) {
	for code, kind := range map[codes.Code]error{
		codes.NotFound: csi.ErrNotFound, codes.AlreadyExists: csi.ErrExists, codes.ResourceExhausted: csi.ErrFull, codes.Aborted: csi.ErrBusy,
		codes.FailedPrecondition: csi.ErrPrecondition, codes.Unavailable: csi.ErrUnavailable, codes.DeadlineExceeded: csi.ErrUnavailable,
		codes.InvalidArgument: csi.ErrInvalid, codes.OutOfRange: csi.ErrOutOfRange,
	} {
		if err := kindOf(status.Error(code, "why")); !errors.Is(err, kind) {
			t.Errorf("%s becomes %v, want %v", code, err, kind)
		}
	}
	if err := kindOf(status.Error(codes.Internal, "why")); err.Error() != "why (Internal)" {
		t.Errorf("Internal becomes %v", err)
	}
	a := &Agents{}
	if _, err := a.CreateVolume(context.Background(), "nowhere", &agentv1.CreateVolumeRequest{Id: "v"}); !errors.Is(err, csi.ErrUnavailable) {
		t.Errorf("a node that is unknown: %v", err)
	}
}

// Of two pods on a node, as in a rolling update, the one that stays is asked.
func TestAddressOfTheNewestPod(t *testing.T) {
	p := &NodePlugins{Port: 9443}
	pod := func(ip string, born int64, change func(*corev1.Pod)) corev1.Pod {
		pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.Unix(born, 0)}, Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip}}
		if change != nil {
			change(&pod)
		}
		return pod
	}
	ending := func(pod *corev1.Pod) { pod.DeletionTimestamp = &metav1.Time{} }
	pending := func(pod *corev1.Pod) { pod.Status.Phase = corev1.PodPending }
	for _, r := range []struct {
		what string
		pods []corev1.Pod
		want string
	}{
		{"no pod", nil, ""},
		{"one that runs", []corev1.Pod{pod("10.0.0.1", 1, nil)}, "10.0.0.1:9443"},
		{"one without address", []corev1.Pod{pod("", 1, nil)}, ""},
		{"one that does not run yet", []corev1.Pod{pod("10.0.0.1", 1, pending)}, ""},
		{"the last one ends", []corev1.Pod{pod("10.0.0.1", 1, ending), pod("10.0.0.2", 2, nil)}, "10.0.0.2:9443"},
		{"the newer one ends", []corev1.Pod{pod("10.0.0.1", 1, nil), pod("10.0.0.2", 2, ending)}, "10.0.0.1:9443"},
		{"two that run", []corev1.Pod{pod("10.0.0.2", 2, nil), pod("10.0.0.1", 1, nil)}, "10.0.0.2:9443"},
		{"only one that ends", []corev1.Pod{pod("10.0.0.1", 1, ending)}, "10.0.0.1:9443"},
		{"an address of the new kind", []corev1.Pod{pod("fd00::1", 1, nil)}, "[fd00::1]:9443"},
	} {
		if got := p.address(r.pods); got != r.want {
			t.Errorf("%s: %q, want %q", r.what, got, r.want)
		}
	}
}
