package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion of this package's kinds.
var GroupVersion = schema.GroupVersion{Group: "longshore.dev", Version: "v1alpha1"}

// AddToScheme registers the kinds.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &NodeVolume{}, &NodeVolumeList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
