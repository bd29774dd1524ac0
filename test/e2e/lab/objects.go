package lab

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/longshore-io/longshore/csi"
)

// StorageClass makes a class of the test's own and returns its name.
func (l *Lab) StorageClass(t testing.TB, c Class) string {
	t.Helper()
	expand := true
	reclaim := corev1.PersistentVolumeReclaimDelete
	mode := storagev1.VolumeBindingImmediate
	if c.Wait {
		mode = storagev1.VolumeBindingWaitForFirstConsumer
	}
	sc := &storagev1.StorageClass{
		ObjectMeta:           metav1.ObjectMeta{GenerateName: "story-"},
		Provisioner:          csi.DriverName,
		Parameters:           map[string]string{},
		VolumeBindingMode:    &mode,
		ReclaimPolicy:        &reclaim,
		AllowVolumeExpansion: &expand,
	}
	if c.Pool != "" {
		sc.Parameters[csi.ParameterPool] = c.Pool
	}
	if c.Populate != "" {
		sc.Parameters[csi.ParameterPopulate] = c.Populate
	}
	if c.FSType != "" {
		sc.Parameters[csi.ParameterFSType] = c.FSType
	}
	l.Must(t, l.Create(t.Context(), sc))
	t.Cleanup(func() {
		if err := l.Delete(context.Background(), sc); err != nil {
			t.Error(err)
		}
	})
	return sc.Name
}

// HTTPSource makes a VolumeImportSource for a URL.
func (l *Lab) HTTPSource(t testing.TB, ns, name, url string, more ...func(*cdiv1.VolumeImportSource)) *cdiv1.VolumeImportSource {
	t.Helper()
	s := &cdiv1.VolumeImportSource{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec:       cdiv1.VolumeImportSourceSpec{Source: &cdiv1.ImportSourceType{HTTP: &cdiv1.DataVolumeSourceHTTP{URL: url}}},
	}
	for _, m := range more {
		m(s)
	}
	l.Must(t, l.Create(t.Context(), s))
	return s
}

// Claim describes a PVC.
type Claim struct {
	Namespace, Name, Class string
	Bytes                  int64
	Block                  bool
	ImportSource           string
	Annotations            map[string]string
	DataSource             *corev1.TypedLocalObjectReference
}

// Claim makes a PVC.
func (l *Lab) Claim(t testing.TB, c Claim) *corev1.PersistentVolumeClaim {
	t.Helper()
	mode := corev1.PersistentVolumeFilesystem
	if c.Block {
		mode = corev1.PersistentVolumeBlock
	}
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name, Annotations: c.Annotations},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &c.Class,
			VolumeMode:       &mode,
			AccessModes:      []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:        corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: Size(c.Bytes)}},
			DataSource:       c.DataSource,
		},
	}
	if c.ImportSource != "" {
		group := cdiv1.SchemeGroupVersion.Group
		pvc.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: &group, Kind: "VolumeImportSource", Name: c.ImportSource}
	}
	l.Must(t, l.Create(t.Context(), pvc))
	return pvc
}

// Pod makes a pod that runs a shell script with the claim at /data (Filesystem) or /dev/disk (Block).
func (l *Lab) Pod(t testing.TB, claim *corev1.PersistentVolumeClaim, name, script string) *corev1.Pod {
	t.Helper()
	c := corev1.Container{
		Name: "sh", Image: ShellImage, ImagePullPolicy: corev1.PullNever,
		Command: []string{"sh", "-c", script},
	}
	if *claim.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		c.VolumeDevices = []corev1.VolumeDevice{{Name: "disk", DevicePath: "/dev/disk"}}
	} else {
		c.VolumeMounts = []corev1.VolumeMount{{Name: "disk", MountPath: "/data"}}
	}
	none := int64(0)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: name},
		Spec: corev1.PodSpec{
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: &none,
			Containers:                    []corev1.Container{c},
			Volumes: []corev1.Volume{{Name: "disk", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim.Name}}}},
		},
	}
	l.Must(t, l.Create(t.Context(), pod))
	return pod
}

// Output waits until the pod has ended well and returns what it printed.
func (l *Lab) Output(t testing.TB, pod *corev1.Pod) string {
	t.Helper()
	l.Eventually(t, "pod "+pod.Name+" ends well", func(ctx context.Context) error {
		if err := l.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
			return err
		}
		switch pod.Status.Phase {
		case corev1.PodSucceeded:
			return nil
		case corev1.PodFailed:
			out, _ := l.Logs(ctx, pod)
			t.Fatalf("pod %s failed: %s", pod.Name, out)
		}
		return fmt.Errorf("pod is %s", pod.Status.Phase)
	})
	out, err := l.Logs(t.Context(), pod)
	l.Must(t, err)
	return strings.TrimSpace(out)
}

// Logs is what the pod has printed.
func (l *Lab) Logs(ctx context.Context, pod *corev1.Pod) (string, error) {
	out, err := l.pods.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
	return string(out), err
}

// Bound waits until the claim is bound.
func (l *Lab) Bound(t testing.TB, claim *corev1.PersistentVolumeClaim) {
	t.Helper()
	l.Eventually(t, "claim "+claim.Name+" is bound", func(ctx context.Context) error {
		if err := l.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
			return err
		}
		if claim.Status.Phase != corev1.ClaimBound {
			return fmt.Errorf("claim is %s: %s", claim.Status.Phase, conditions(claim))
		}
		return nil
	})
}

// Condition returns the claim's condition of a type; nil when it has none.
func Condition(claim *corev1.PersistentVolumeClaim, typ string) *corev1.PersistentVolumeClaimCondition {
	for i, c := range claim.Status.Conditions {
		if string(c.Type) == typ {
			return &claim.Status.Conditions[i]
		}
	}
	return nil
}

func conditions(claim *corev1.PersistentVolumeClaim) string {
	var s []string
	for _, c := range claim.Status.Conditions {
		s = append(s, fmt.Sprintf("%s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message))
	}
	return strings.Join(s, "; ")
}

// Events returns "Type Reason: message" of the events about an object, oldest first.
func (l *Lab) Events(ctx context.Context, o client.Object) ([]string, error) {
	var list corev1.EventList
	if err := l.List(ctx, &list, client.InNamespace(o.GetNamespace())); err != nil {
		return nil, err
	}
	var s []string
	for _, e := range list.Items {
		if e.InvolvedObject.UID == o.GetUID() {
			s = append(s, fmt.Sprintf("%s %s: %s", e.Type, e.Reason, e.Message))
		}
	}
	return s, nil
}
