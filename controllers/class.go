package controllers

import (
	"cmp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/longshore-io/longshore/api/v1alpha1"
	"github.com/longshore-io/longshore/csi"
	"github.com/longshore-io/longshore/populator"
)

// classOf reads a StorageClass.
func classOf(sc *storagev1.StorageClass) *populator.Class {
	c := &populator.Class{
		Name:             sc.Name,
		ReclaimPolicy:    corev1.PersistentVolumeReclaimDelete,
		MountOptions:     sc.MountOptions,
		WaitsForConsumer: sc.VolumeBindingMode != nil && *sc.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer,
	}
	if sc.ReclaimPolicy != nil {
		c.ReclaimPolicy = *sc.ReclaimPolicy
	}
	p, err := csi.ParseClass(sc.Parameters)
	if err != nil {
		c.Problem = strings.TrimSuffix(err.Error(), ": "+csi.ErrInvalid.Error())
	}
	c.Pool, c.Populate, c.FSType = p.Pool, v1alpha1.PopulateMode(p.Populate), cmp.Or(p.FSType, "ext4")
	return c
}
