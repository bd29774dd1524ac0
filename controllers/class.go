package controllers

import (
	"fmt"
	"maps"
	"regexp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

var poolPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$`)

// classOf reads a StorageClass, by the rules that CreateVolume has for its parameters.
func classOf(sc *storagev1.StorageClass) *populator.Class {
	c := &populator.Class{
		Name: sc.Name, Pool: "default", FSType: "ext4", Populate: v1alpha1.PopulateBind,
		ReclaimPolicy: corev1.PersistentVolumeReclaimDelete, MountOptions: sc.MountOptions,
		WaitsForConsumer: sc.VolumeBindingMode != nil && *sc.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer,
	}
	if sc.ReclaimPolicy != nil {
		c.ReclaimPolicy = *sc.ReclaimPolicy
	}
	for _, key := range slices.Sorted(maps.Keys(sc.Parameters)) {
		value := sc.Parameters[key]
		ok, allowed := true, ""
		switch key {
		case csi.ParameterPool:
			c.Pool = value
			ok, allowed = poolPattern.MatchString(value), "the name of a pool (lower-case letters, digits, '-')"
		case csi.ParameterPopulate:
			c.Populate = v1alpha1.PopulateMode(value)
			ok, allowed = c.Populate == v1alpha1.PopulateBind || c.Populate == v1alpha1.PopulateStage, "bind or stage"
		case csi.ParameterFSType:
			c.FSType = value
			ok, allowed = value == "ext4" || value == "xfs", "ext4 or xfs"
		default:
			c.Problem = fmt.Sprintf("unknown parameter %s (value %q), known are %s, %s, %s", key, value, csi.ParameterPool, csi.ParameterPopulate, csi.ParameterFSType)
		}
		if !ok {
			c.Problem = fmt.Sprintf("parameter %s has the value %q, allowed is %s", key, value, allowed)
		}
		if c.Problem != "" {
			return c
		}
	}
	return c
}
