// Package e2e holds the user stories, told on a real Kubernetes: a real API
// server, scheduler, kubelet, containerd and CSI sidecars, with Longshore
// deployed from its chart, and nginx as the world outside.
//
// # Manual
//
// One file per story; each test says in its first lines what a person does and
// what that person must see. All tests of the package share one cluster, which
// TestMain starts and removes (package lab). Run one story with
//
//	go test ./test/e2e -run TestImport -v
//
// LONGSHORE_LAB=keep leaves the cluster up after the tests and prints its
// KUBECONFIG line; the next run uses it again. What the components said is in
// the folder printed at the start, and the state of the cluster is printed
// when a test fails.
//
// Up to eight stories are told at once; those that disturb others are not parallel.
//
// Every test makes a namespace of its own and at its end deletes it and waits
// until the node holds nothing of it: no NodeVolume, loop device, mount, file
// or process. So a leak is a failure of the test that leaked.
package e2e
