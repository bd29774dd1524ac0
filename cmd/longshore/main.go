// Command longshore loads VM disks into Kubernetes volumes.
package main

func main() {}
