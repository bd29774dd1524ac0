// Package controllers carries out, one reconciler per kind and file, what package
// populator decides and what the CSI sidecars ask for.
//
// It knows nothing of how a node keeps or fills a volume: that is asked of the
// node's agent (api/agent/v1). What is durable stands in NodeVolumes, which are
// written before an agent is asked for anything.
package controllers

// What the controller reads and writes in the cluster. Secrets are read one by
// one, when a transfer needs them: they are neither listed nor watched.
//
// +kubebuilder:rbac:groups=longshore.dev,resources=nodevolumes,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=longshore.dev,resources=nodevolumes/status,verbs=patch
// +kubebuilder:rbac:groups="",resources=persistentvolumeclaims,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups="",resources=persistentvolumeclaims/status,verbs=patch
// +kubebuilder:rbac:groups="",resources=persistentvolumes,verbs=get;list;watch;create
// +kubebuilder:rbac:groups="",resources=nodes,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups="",resources=secrets;configmaps,verbs=get
// +kubebuilder:rbac:groups="",resources=events,verbs=create;patch
// +kubebuilder:rbac:groups="",resources=services,verbs=list
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=list
// +kubebuilder:rbac:groups=networking.k8s.io,resources=servicecidrs,verbs=list
// +kubebuilder:rbac:groups=storage.k8s.io,resources=storageclasses,verbs=get;list;watch
// +kubebuilder:rbac:groups=cdi.kubevirt.io,resources=volumeimportsources,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=certificates.k8s.io,resources=certificatesigningrequests,verbs=get;list;watch
// +kubebuilder:rbac:groups=certificates.k8s.io,resources=certificatesigningrequests/approval;certificatesigningrequests/status,verbs=update
// +kubebuilder:rbac:groups=certificates.k8s.io,resources=signers,resourceNames=longshore.dev/agent,verbs=approve;sign
