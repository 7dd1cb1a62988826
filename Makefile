# Everything happens in .venv, which is made on first use; only Python >= 3.11 with pip and venv is needed.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
SKY := .venv-sky
RAY := .venv-ray
# The release of vLLM that pyproject.toml pins.
VLLM_PIN = $(shell sed -n 's/^vllm = \["\(.*\)"\]$$/\1/p' pyproject.toml)
BIN := $(VENV)/bin
# Libraries are compiled to bytecode as they are imported, not all of their many files at once.
PIP_QUIET := -m pip install --quiet --no-compile --disable-pip-version-check --no-input
PIP_INSTALL := $(BIN)/python $(PIP_QUIET) -c constraints.txt
# The same with pip's progress, without the lines about what is there already.
PIP_VISIBLE := $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt --progress-bar on

# setuptools would put what it finds of an earlier build into the next one.
BUILD := rm -rf build/lib* build/bdist* build/temp* && POTLUCK_COMPILE=1 $(BIN)/python -m pip
BUILD_OPTIONS := --quiet --disable-pip-version-check --no-input --no-deps --no-build-isolation

# Tests start hundreds of processes: each would compile the source anew where the caller wants no compiled files.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help up demo test test-here test-all test-main test-ready test-beside then-vllm then-behind test-source test-vllm test-vllm-all test-sky test-ray environments lint types format site bench sizes compiled testcompiled wheel lock clean
.DELETE_ON_ERROR:

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

# Options: make up ARGS='potluck.yaml --port 8080'; make up ARGS=--check starts, asks one question and stops.
up: $(VENV)/.serve ## install, then serve a small mixed fleet on this machine, without a GPU; ARGS= for others
	@exec $(BIN)/potluck up $(ARGS)

demo: $(VENV)/.serve ## two minutes of a service's life, told on its page, without a GPU
	@PYTHONPATH=tools exec $(BIN)/python -m demo $(ARGS)

# Each run of pytest has a folder of its own for temporary files: two runs at once would clean up each other's. It is
# kept where a test failed.
define pytest
dir=$$(mktemp -d) && $(1) -m pytest --basetemp="$$dir/t" $(2) && rm -rf "$$dir"
endef
MAIN := OMP_NUM_THREADS=1 $(BIN)/python
RUN_COMPILED := tests/core tests/sim tests/rehearse

# Types are checked while tests run. Three of these at once on two cores: many wait for processes that they started.
test: $(VENV)/.dev ## install, lint, type-check, run all tests but slow ones
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	+@$(MAKE) --no-print-directory -j2 types test-here

test-here: $(VENV)/.warm
	$(call pytest,$(MAIN),-n 3 --dist worksteal -m "not slow")

# Stock vLLM has its own environment: it brings a torch and much else that the other tests must not depend on.
VLLM_PYTHON = PYTHONPATH=src:$(abspath tests/vllm_engine/forked) POTLUCK_PYTHON=$(abspath $(BIN)/python) $(VLLM)/bin/python

test-vllm: $(VLLM)/.made $(VENV)/.dev ## install vLLM for a CPU apart, and run each route through it once (10 minutes)
	$(call pytest,$(VLLM_PYTHON),-q -m "not vllm_all" tests/vllm_engine)

test-vllm-all: $(VLLM)/.made $(VENV)/.dev ## all tests with vLLM, as before a new release of it
	$(call pytest,$(VLLM_PYTHON),-q tests/vllm_engine)

test-ray: $(RAY)/.made $(VENV)/.dev ## install Ray apart, and lose nodes of Ray and Kubernetes clusters that this machine acts as
	$(call pytest,PYTHONPATH=src RAY_USAGE_STATS_ENABLED=0 POTLUCK_PYTHON=$(abspath $(BIN)/python) $(RAY)/bin/python,-q tests/clusters)

test-sky: $(SKY)/.made ## install SkyPilot apart, and let it read what is exported for it
	$(call pytest,PYTHONPATH=src $(SKY)/bin/python,-q tests/export)

testcompiled: compiled ## the tests of decisions and simulator, with the hot code compiled
	$(call pytest,PYTHONPATH=build/compiled $(BIN)/python,-n 2 --dist worksteal --tb=native $(RUN_COMPILED))

# What continuous integration runs. Every test once: those of $(RUN_COMPILED) with the hot code compiled (the others
# run it as source, as do the few files that say so), those of vLLM, SkyPilot and Ray in their environments. What waits
# for fractions of a second has one core to itself, main tests first and then vLLM's; all else is done beside.
test-all: ## everything, each test once: main, compiled, vLLM, SkyPilot, Ray, lint, site
	+$(MAKE) -j2 --output-sync=target test-ready $(VLLM)/.made
	+$(MAKE) -j2 --output-sync=target then-vllm then-behind

test-ready: $(VENV)/.all
	+@$(MAKE) --no-print-directory $(VENV)/.warm

test-main: $(VENV)/.warm
	$(call pytest,$(MAIN),-q -n 3 --dist worksteal $(addprefix --ignore=,$(RUN_COMPILED) tests/export tests/clusters tests/vllm_engine))

then-vllm: test-main
	+@$(MAKE) --no-print-directory test-vllm

# One thing at a time: no place is taken that main tests or vLLM's are to have.
test-beside:
	+MAKEFLAGS= nice -n 5 $(MAKE) lint test-sky compiled site $(RAY)/.made

then-behind: test-main test-beside
	+MAKEFLAGS= nice -n 5 $(MAKE) test-source testcompiled test-ray

test-source: compiled
	$(call pytest,$(MAIN),-q -p no:cacheprovider $(shell grep -lr --include='test_*.py' '__file__.endswith' $(RUN_COMPILED)))

lint: types ## ruff and mypy only
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff put the code in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

site: $(VENV)/.site ## the docs with their references, in site/; a link that leads nowhere fails it
	PYTHONPATH=src:lab:tools $(BIN)/python -m docsite

environments: $(VLLM)/.made $(SKY)/.made $(RAY)/.made ## install vLLM, SkyPilot and Ray, each apart

compiled: build/compiled/.made ## compile the hot code into build/compiled, beside the source (needs a C compiler)

wheel: $(VENV)/.dev ## a wheel with the hot code compiled, in dist/ (needs a C compiler)
	$(BUILD) wheel $(BUILD_OPTIONS) --wheel-dir dist .

bench: $(VENV)/.dev ## run every benchmark in its quick form
	@set -e; for file in benchmarks/*.py; do \
	  echo "== $$file"; $(BIN)/python "$$file" --quick; done

sizes: ## print files and lines of each part
	@$(PYTHON) tools/sizes.py

# The pins do not depend on where they were made: a build of torch for one accelerator (+cpu, +cu...) and
# the libraries that come only with it are left to the machine that installs.
lock: ## write constraints.txt anew from the newest versions that fit pyproject.toml
	@set -eu; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	$(PYTHON) -m venv "$$dir/venv"; pip="$$dir/venv/bin/python -m pip --disable-pip-version-check"; \
	$$pip install --quiet --no-input -e ".[dev,site]"; \
	$$pip freeze --exclude-editable --exclude pip --exclude setuptools --exclude wheel > "$$dir/freeze"; \
	{ echo "# Exact versions that 'make up', 'make test' and 'make site' install. Written by 'make lock'."; \
	  sed -e 's/^\(torch==[^+]*\)+.*/\1/' -e '/^nvidia-/d' -e '/^cuda-/d' -e '/^triton==/d' "$$dir/freeze"; \
	} > "$$dir/constraints"; \
	cp "$$dir/constraints" constraints.txt; echo "constraints.txt: $$(grep -c == constraints.txt) pins"

clean: ## remove .venv, caches and build leftovers
	rm -rf $(VENV) $(VLLM) $(SKY) $(RAY) build dist site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "potluck needs Python 3.11 or newer; '$(PYTHON)' is not: set PYTHON=..., as in: make test PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

# Stamps: a second run installs nothing until the requirements change.
$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

# What a service needs and no more; says what it does, since it takes minutes the first time. Machine code that is made
# at first use is made here, once.
$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing (PyTorch and more, once)"
	@began=$$(date +%s); $(PIP_VISIBLE) -e ".[engine,gateway]" && echo "installed in $$(( $$(date +%s) - began )) s"
	@echo "compiling inner loops"; $(BIN)/python -m potluck.cli.engine.fork_server warm
	@touch $(VENV)/.base $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[dev]"
	@touch $(VENV)/.base $@

$(VENV)/.site: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[gateway,site]"
	@touch $(VENV)/.base $@

$(VENV)/.all: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[dev,site]"
	@touch $(VENV)/.base $(VENV)/.dev $(VENV)/.site $@

# Machine code that is made at first use is made here, once: all that start together would make it, each for itself.
$(VENV)/.warm: tools/warm.py $(shell grep -rl --include='*.py' 'compiled import' src) | $(VENV)/.dev
	PYTHONPATH=src $(BIN)/python tools/warm.py >/dev/null
	@touch $@

# The three that go are of no use here, and hold libraries that not every machine has.
$(VLLM)/.made: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP_QUIET) $(VLLM_PIN) pytest hypothesis
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(SKY)/.made: pyproject.toml
	$(PYTHON) -m venv $(SKY)
	$(SKY)/bin/python $(PIP_QUIET) skypilot==0.14.1 pytest hypothesis kubernetes-validate -e .[gateway]
	@touch $@

$(RAY)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python $(PIP_QUIET) -c constraints.txt ray==2.60.0 pytest hypothesis kubernetes-validate -e .[gateway]
	@touch $@

# From a copy of the source: environments that are made meanwhile write beside the source itself.
build/compiled/.made: setup.py $(shell find src/potluck/core src/potluck/sim -name '*.py') | $(VENV)/.dev
	rm -rf build/compiled build/source
	mkdir -p build/source && cp -r pyproject.toml setup.py README.md LICENSE src build/source && rm -rf build/source/src/*.egg-info
	$(BUILD) install $(BUILD_OPTIONS) --target build/compiled ./build/source
	rm -rf build/source
	PYTHONPATH=build/compiled $(BIN)/python tools/warm.py plan >/dev/null
	@touch $@
