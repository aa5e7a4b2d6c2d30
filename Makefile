# Everything happens in .venv, which the first target that needs it creates; nothing is installed outside the clone.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
CONFIG ?= configs/default.yaml
SERVE_ARGS ?=
PYTEST_ARGS ?=
CHAOS_MINUTES ?= 2

# One stamp per set of dependencies (run, demo, dev, ray); changing the pins or the set-up itself makes them stale.
STAMP := .venv/stamp-
$(STAMP)%: pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh $*

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

.PHONY: demo
demo: $(STAMP)demo kernels ## serve the bundled models, segment a sample stack, draw the result, stop
	$(BIN)/python scripts/demo.py

.PHONY: serve
serve: $(STAMP)run kernels ## serve until interrupted (CONFIG=configs/default.yaml SERVE_ARGS="--port 8000")
	$(BIN)/stackseg serve --config $(CONFIG) $(SERVE_ARGS)

.PHONY: kernels
kernels: $(STAMP)run ## compile the C++ kernels for this processor again, where their sources have changed
	@$(BIN)/python hatch_build.py

# Many tests wait for servers, so that two at a time take little longer than one. Those of a module share its servers,
# and idle threads of one process leave the processor to the others.
.PHONY: test
test: lint ## every check: lint, then the tests (PYTEST_ARGS="-k windows", --cov, or -n 0 to have one at a time)
	$(BIN)/python hatch_build.py --all
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n auto --maxprocesses 4 --dist loadscope $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(STAMP)ray test ## the tests, the thorough ones too, then random faults at a running server for CHAOS_MINUTES=2; a release wants 10
	$(BIN)/pytest -m thorough --timeout 1200
	$(BIN)/python benchmarks/chaos.py --minutes $(CHAOS_MINUTES)

.PHONY: lint
lint: $(STAMP)dev ## style, types, import rules, dependencies, shell scripts, container files
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/shellcheck .ci/run scripts/*.sh benchmarks/*.sh
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml docker/compose.cpu.yaml
	@if command -v npm >/dev/null; then $(MAKE) lint-page; else echo "There is no npm: the page is not checked." >&2; fi

# package.json pins exact versions, and these depend on nothing but their own binaries.
PAGE_TOOLS := node_modules/.stamp
$(PAGE_TOOLS): package.json
	npm install --no-package-lock --ignore-scripts --no-audit --no-fund
	@touch $@

.PHONY: lint-page
lint-page: $(STAMP)dev $(PAGE_TOOLS) ## style and types of the page's modules (needs npm)
	node_modules/.bin/biome check
	$(BIN)/python scripts/page_types.py
	node_modules/.bin/tsc -p .

.PHONY: format
format: $(STAMP)dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	@if command -v npm >/dev/null; then $(MAKE) $(PAGE_TOOLS) && node_modules/.bin/biome check --write; fi

.PHONY: train-bundled
train-bundled: $(STAMP)dev ## train the bundled models from nothing into build/models, on from where it was interrupted
	scripts/train_bundled.sh

.PHONY: container
container: ## build the CPU image, run it locked down, segment a stack through it, stop it (GPU image: scripts/container.sh gpu)
	scripts/container.sh

CRDS ?=
.PHONY: manifests
manifests: ## check the Kubernetes manifests (needs kubectl; CRDS="ray.io_rayclusters.yaml ..." for custom resources)
	python3 -m venv .cache/manifests
	.cache/manifests/bin/pip install --quiet kubernetes-validate==1.37.0
	.cache/manifests/bin/python scripts/manifests.py $(CRDS)

.PHONY: constraints
constraints: ## pin the newest versions that pyproject.toml allows (needs uv)
	scripts/constraints.sh

.PHONY: clean
clean: ## remove the virtual environment and every cache
	rm -rf .venv .cache node_modules demo-output build dist service/core/native/kernels-*.so .coverage .*_cache .hypothesis
