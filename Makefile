# All targets use .venv, which is created when first needed. Nothing is installed outside of the clone.

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

# One stamp per set of dependencies (run, demo, dev, ray). Changes of the pins or of the setup script make them stale.
STAMP := .venv/stamp-
$(STAMP)%: pyproject.toml hashes.txt scripts/setup.sh scripts/install.sh
	scripts/setup.sh $*

.PHONY: help
help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

.PHONY: demo
demo: $(STAMP)demo kernels ## start the service, segment a sample stack, plot the result, and stop the service
	$(BIN)/python scripts/demo.py

.PHONY: serve
serve: $(STAMP)run kernels ## run the service until interrupted (CONFIG=configs/default.yaml SERVE_ARGS="--port 8000")
	$(BIN)/stackseg serve --config $(CONFIG) $(SERVE_ARGS)

.PHONY: kernels
kernels: $(STAMP)run ## compile the C++ kernels for this processor if their sources have changed
	@$(BIN)/python hatch_build.py

# Many tests wait for servers, so running two tests in parallel takes little longer than one. The tests of a module share
# servers, and so do the modules of the web UI if they are not reordered. With the passive wait policy, idle OpenMP threads
# do not block the CPU for other processes. Without cached bytecode, every worker would rewrite the assertions of all test
# modules at every start.
.PHONY: test
test: lint ## run lint and all tests (PYTEST_ARGS="-k windows", --cov, or -n 0 to run one test at a time)
	$(BIN)/python hatch_build.py --all
	PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/pytest -n auto --maxprocesses 4 --dist loadscope \
	  --no-loadscope-reorder $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(STAMP)ray test ## run all tests, including thorough ones, and inject random faults for CHAOS_MINUTES=2 (10 for a release)
	$(BIN)/pytest -m thorough --timeout 1200
	@if command -v xvfb-run >/dev/null; then $(MAKE) test-napari; else echo "xvfb-run is not installed; the napari plugin is not tested." >&2; fi
	$(BIN)/python benchmarks/chaos.py --minutes $(CHAOS_MINUTES)

# napari and Qt have an environment of their own, so that the pinned dependencies of the service do not depend on them.
.PHONY: test-napari
test-napari: $(STAMP)run ## test the napari plugin with a real server (needs xvfb-run)
	$(BIN)/python -m venv .venv/napari
	.venv/napari/bin/pip install --quiet --require-hashes --requirement clients/napari/test-hashes.txt
	PYTHONPATH=clients/python:clients/napari xvfb-run -a .venv/napari/bin/python -m pytest \
	  -c /dev/null --rootdir . --confcutdir tests/clients/napari tests/clients/napari

.PHONY: lint
lint: $(STAMP)dev ## check style, types, import rules, dependencies, shell scripts and container files
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .
	cd clients/python && ../../$(BIN)/deptry .
	cd clients/napari && ../../$(BIN)/deptry .
	$(BIN)/shellcheck .ci/run scripts/*.sh benchmarks/*.sh
	$(BIN)/hadolint docker/Dockerfile docker/workflows.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml docker/compose.cpu.yaml
	@if command -v npm >/dev/null; then $(MAKE) lint-page; else echo "npm is not installed; the web UI is not checked." >&2; fi

# npm refuses packages whose hash is not the one in package-lock.json.
PAGE_TOOLS := node_modules/.stamp
$(PAGE_TOOLS): package.json package-lock.json
	npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

.PHONY: lint-page
lint-page: $(STAMP)dev $(PAGE_TOOLS) ## check style and types of the web UI (needs npm)
	node_modules/.bin/biome check
	$(BIN)/python scripts/page_types.py
	node_modules/.bin/tsc -p .

.PHONY: format
format: $(STAMP)dev ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	@if command -v npm >/dev/null; then $(MAKE) $(PAGE_TOOLS) && node_modules/.bin/biome check --write; fi

.PHONY: train-bundled
train-bundled: $(STAMP)dev ## train the bundled models from scratch into build/models, or resume an interrupted training
	scripts/train_bundled.sh

.PHONY: container
container: ## build and test the CPU image in a restricted container (GPU image: scripts/container.sh gpu)
	scripts/container.sh

CRDS ?=
.PHONY: manifests
manifests: ## validate the Kubernetes manifests (needs kubectl; CRDS="ray.io_rayclusters.yaml ..." for custom resources)
	python3 -m venv .cache/manifests
	scripts/install.sh .cache/manifests/bin/python --quiet kubernetes-validate
	.cache/manifests/bin/python scripts/manifests.py $(CRDS)

.PHONY: constraints
constraints: ## pin the newest versions that pyproject.toml allows, with their hashes (needs uv)
	scripts/constraints.sh

# The hashes are stored without the address of the registry.
.PHONY: page-lock
page-lock: ## record the hashes of the packages in package.json (needs npm)
	rm -f package-lock.json
	npm install --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --no-audit --no-fund

.PHONY: base-image
base-image: ## pin the current base image of docker/Dockerfile by its digest (needs docker and a network)
	docker pull --quiet debian:bookworm-slim
	digest=$$(docker image inspect --format '{{index .RepoDigests 0}}' debian:bookworm-slim) && \
		sed -i "s|^ARG BASE=.*|ARG BASE=debian:bookworm-slim@$${digest#*@}|" docker/Dockerfile

.PHONY: clean
clean: ## remove the virtual environment, caches and build outputs
	rm -rf .venv .cache node_modules demo-output build dist service/core/native/kernels-*.so .coverage .*_cache .hypothesis
