# make help says what there is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

VERSION ?= $(shell sed -n 's/^appVersion: *//p' charts/longshore/Chart.yaml)
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/longshore
IMAGE := out/longshore-image.tar

# Of make test-long: of each fuzz test, and how often the rest is repeated.
FUZZTIME ?= 5m
TIMES ?= 5

# Everything is compiled without cgo and with the same flags, so that build, image,
# demo and tests share what is compiled; but for the movers' program and the tests
# of what is in it.
export CGO_ENABLED := 0
BUILDFLAGS ?=
WITH_CGO := CGO_ENABLED=1 go
CGO_TAGS := -tags netgo,osusergo

# Packages of tests that use the machine as a whole: the one cluster it has room
# for, or loop devices and memory in quantity. They run one after the other.
WHOLE_MACHINE := ./test/cluster/... ./test/e2e/... ./sanity/...

# Packages whose tests mount: one after the other too, since a namespace that one
# of them makes would hold what another wants to unmount.
MOUNTING := ./cmd/longshore-mover ./nodeplugin ./nodeplugin/device ./nodeplugin/mover ./nodeplugin/pool ./nodeplugin/sandbox

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

.PHONY: deps
deps: ## install the Debian packages that build and tests need (root)
	@.ci/deps

.PHONY: build
build: ## build bin/longshore and bin/longshore-mover (a release adds BUILDFLAGS=-trimpath)
	@go build $(BUILDFLAGS) -ldflags "-s -w -X main.version=$(VERSION)" -o bin/longshore ./cmd/longshore
	@$(WITH_CGO) build $(BUILDFLAGS) $(CGO_TAGS) -ldflags "-s -w" -o bin/longshore-mover ./cmd/longshore-mover

.PHONY: image
image: build ## put the container image together: out/longshore-image.tar
	@go run ./test/imagebuild -binaries bin/longshore,bin/longshore-mover -version $(VERSION) -o $(IMAGE)

.PHONY: demo
demo: deps image ## a cluster, Longshore on it, and an import to watch (root); URL= names another image
	@go run ./test/demo -image $(IMAGE) -url "$(URL)" up

.PHONY: demo-down
demo-down: ## remove every trace of the demo
	@go run ./test/demo down

# The generators are those of go.mod's tool lines; protoc is Debian's.
.PHONY: generate
generate: ## write everything that is generated
	@mkdir -p bin
	@go build -o bin/ sigs.k8s.io/controller-tools/cmd/controller-gen google.golang.org/grpc/cmd/protoc-gen-go-grpc google.golang.org/protobuf/cmd/protoc-gen-go
	@PATH="$(CURDIR)/bin:$$PATH" protoc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative api/agent/v1/agent.proto
	@bin/controller-gen object paths=./api/v1alpha1
	@go run ./api/crdgen -controller-gen bin/controller-gen -crds charts/longshore/crds -docs docs/api.md
	@bin/controller-gen rbac:roleName=longshore-controller paths=./controllers/... output:rbac:stdout > bin/role.yaml
	@{ echo '# Made by make generate from the markers in controllers/; do not edit.'; cat bin/role.yaml; } > charts/longshore/templates/controller-role.yaml

.PHONY: test
test: deps servers unit machine ## the whole suite (root): at most 45 minutes on two cores with empty caches

# First and alone: with empty caches it takes longer than any test may.
.PHONY: servers
servers: ## build the test cluster's programs, once
	@go run ./test/cluster/run build

.PHONY: unit
unit: servers ## the tests of single packages
	@go test -timeout 20m $$(go list ./... | grep -v -e /test/cluster -e /test/e2e -e /sanity -e /test/bench | grep -vxF "$$(go list $(MOUNTING))")
	@$(WITH_CGO) test $(CGO_TAGS) -timeout 20m ./nodeplugin/native ./nodeplugin/image
	@go test -timeout 20m -p 1 $(MOUNTING)

.PHONY: machine
machine: servers ## the tests that need the whole machine: cluster, user stories, csi-sanity
	@go test -timeout 40m -p 1 $(WHOLE_MACHINE)

.PHONY: test-long
test-long: deps servers ## long fuzzing, large images, kills over and over: what make test has no time for (FUZZTIME=5m, TIMES=5)
	@grep -rl --include='*_test.go' '^func Fuzz' . | while read -r file; do \
		sed -n 's/^func \(Fuzz[A-Za-z0-9]*\)(.*/\1/p' "$$file" | while read -r name; do \
			CGO_ENABLED=$$(grep -q '^//go:build cgo' "$$file" && echo 1 || echo 0) go test $(CGO_TAGS) -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x "$$(dirname "$$file")" || exit; \
		done || exit; \
	done
	@LONGSHORE_LONG=1 go test -count 1 -timeout 2h -run '^(TestMisfortunes|TestMoverKilledAtRandomMoments)$$' ./nodeplugin
	@LONGSHORE_TEST_IMAGE_BYTES=10737418240 go test -count 1 -timeout 1h -run '^TestMemory$$' ./nodeplugin
	@go test -count $(TIMES) -timeout 4h -p 1 -run 'Kill|Crash|Race|Concurrent|Twenty|MidTransfer' $(MOUNTING) ./test/e2e

.PHONY: bench
bench: deps ## comparisons with other tools, see docs/benchmarks.md (root)
	@.ci/deps test/bench/packages.txt
	@go test -timeout 2h -run '^$$' -bench . -benchtime 3x ./test/bench/...

# The linter's many modules stay out of the product's go.mod.
LINT := $(CACHE)/tools/golangci-lint-$(shell sha256sum .ci/golangci-lint.mod .ci/golangci-lint.sum 2>/dev/null | sha256sum | cut -c1-16)

$(LINT):
	@mkdir -p $(@D)
	@go build -modfile=.ci/golangci-lint.mod -o $@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

.PHONY: lint
lint: $(LINT) ## golangci-lint
	@$(LINT) run --allow-serial-runners --config .ci/golangci.yml ./...

.PHONY: clean
clean: ## remove what was built here; caches stay
	@rm -rf bin out
