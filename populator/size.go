package populator

import (
	"fmt"
	"math/big"
	"regexp"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

const mib = 1 << 20

// minimumXFSBytes is the smallest volume that mkfs.xfs takes (xfsprogs 5.19 and later).
const minimumXFSBytes = 300 * mib

// VolumeBytes is the capacity in bytes of the volume for a claim that requests so
// many: whole MiB, and no less than the filesystem ("" for Block) needs.
func VolumeBytes(request int64, fsType string) int64 {
	least := int64(mib)
	if fsType == "xfs" {
		least = minimumXFSBytes
	}
	return max(roundUp(request), least)
}

// Overhead is the part of a volume that its filesystem keeps for itself, in
// thousandths of what is left for the disk.
type Overhead int64

// DefaultOverhead is 6 %, the value of clusters that configure none.
const DefaultOverhead Overhead = 60

var overheadPattern = regexp.MustCompile(`^(0(\.[0-9]{1,3})?|1(\.0{1,3})?)$`)

// ParseOverhead reads a fraction between 0 and 1 with at most three decimals, as
// CDIConfig gives it. What is none is an error and the default.
func ParseOverhead(s string) (Overhead, error) {
	if !overheadPattern.MatchString(s) {
		return DefaultOverhead, fmt.Errorf("filesystem overhead %q: give a number between 0 and 1 with at most three decimals", s)
	}
	whole, decimals, _ := strings.Cut(s, ".")
	n, err := strconv.ParseInt(whole+(decimals + "000")[:3], 10, 64)
	return Overhead(n), err
}

// OverheadOf is o for Filesystem volumes; a Block volume loses nothing.
func OverheadOf(mode corev1.PersistentVolumeMode, o Overhead) Overhead {
	if mode == corev1.PersistentVolumeBlock {
		return 0
	}
	return o
}

// Request is the size in bytes of a claim whose disk shall have so many:
// ceil(roundup(disk, 1 MiB) * (1 + overhead)).
func (o Overhead) Request(disk int64) int64 {
	return scale(roundUp(disk), 1000+int64(o), 1000)
}

// Usable is the size in bytes of the largest disk where so many are available:
// rounddown(ceil(available / (1 + overhead)), 1 MiB).
func (o Overhead) Usable(available int64) int64 {
	return scale(available, 1000, 1000+int64(o)) / mib * mib
}

func roundUp(n int64) int64 { return (n + mib - 1) / mib * mib }

// scale is ceil(n * numerator / denominator).
func scale(n, numerator, denominator int64) int64 {
	q, rest := multiply(n, numerator, denominator)
	if rest > 0 {
		q++
	}
	return q
}

// multiply is n * numerator / denominator and the rest; products of exbibytes do not fit 64 bits.
func multiply(n, numerator, denominator int64) (quotient, rest int64) {
	p := new(big.Int).Mul(big.NewInt(n), big.NewInt(numerator))
	q, r := p.QuoRem(p, big.NewInt(denominator), new(big.Int))
	return q.Int64(), r.Int64()
}
