# Short ways to what there is to run. `make` alone lists them. .ci/run is the whole, from nothing.
.DEFAULT_GOAL := help
.PHONY: help build demo test race e2e lint check update bench ci clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## the binary, dist/grapevine (CGO_ENABLED=0 for one without GPU memory)
	go build -o dist/ ./cmd/grapevine

demo: ## four simulated replicas against round robin, one minute
	go run ./cmd/grapevine demo

test: ## the tests, under 3 minutes on 2 cores
	go test ./...

race: ## the tests under the race detector
	go test -race ./...

e2e: ## real processes, real llama.cpp (built once, 3 to 14 minutes), official clients
	test/engines/install.sh llamacpp
	go test -count=1 -v -timeout 25m ./test/e2e -long

lint: ## golangci-lint with .golangci.yml (built once, 2 minutes)
	.ci/run lint_install lint

check: ## the short loop: format, vet, lint, test
	.ci/run gofmt vet lint_install lint test

update: ## rewrites the generated parts of README.md and the golden files of the end-to-end tests
	go test ./test/conventions -update
	go test ./test/e2e -run 'TestStartUp|TestWrongVariables' -long -update

bench: ## what a pick and a record cost
	go test -run '^$$' -bench . -benchmem ./routing ./gossip

ci: ## all that a change must pass (.ci/run), under an hour
	.ci/run

clean: ## removes dist
	rm -rf dist
