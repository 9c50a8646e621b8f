# Every target sets up what it needs; the only thing to have is Python 3.10 to 3.13.
#   make demo                    the demonstration, under three minutes on two cores
#   make test PYTHON=python3.12  with another interpreter (after `make clean`)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DOCS_STAMP := $(VENV)/.stamp-docs
INTEGRATIONS_STAMP := $(VENV)/.stamp-integrations
RAY_STAMP := $(VENV)/.stamp-ray
PAGE_STAMP := $(VENV)/.stamp-page
# Twice quiet: errors only. Torch's own index may lack metadata pip warns about.
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
# One thread per process: ranks on one machine fight for cores otherwise. Bytecode is
# kept even where an image says not to: tests start processes by the hundred.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Test processes at a time; 0 runs all tests in this one.
WORKERS ?= 2
# Ranks mostly wait, for each other and for emulated devices. A file stays with one
# process, and files come in their order, so that rank pools are kept and no long file
# is left for the end.
BY_FILE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests of what is not installed for the others, or changes torch; each has a target.
WITHOUT := $(addprefix --ignore=tests/,integrations ray page device)
# Of the pure tests, those of many simulated runs and searches for plans are left out.
QUICK := tests/cadence tests/coordination tests/monitor tests/schedule tests/sim \
	tests/test_architecture.py tests/test_config.py \
	tests/test_imports.py tests/test_layers.py \
	$(addprefix --ignore=tests/,cadence/test_chooser.py \
	cadence/test_shares_come_back.py \
	schedule/generators/test_auto.py schedule/planning schedule/test_independent.py \
	$(addprefix sim/test_,auto.py efficiency.py membership.py non_finite.py \
	properties.py slow_link.py) sim/golden)

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-full test-tenth test-integrations test-ray test-ray-full \
	test-page test-device test-wheel test-floor fuzz lint types docs figures format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 20

demo: $(STAMP) ## train a small GPT on two unequal workers and compare
	$(BIN)/elche demo

quick: lint types ## for every edit: lint, types and the quick ones of the pure tests
	$(PYTEST) -q -m "not slow" -n $(WORKERS) --dist worksteal $(QUICK)

test: $(STAMP) ## the tests, without the slow ones
	$(PYTEST) -m "not slow" $(WITHOUT) $(BY_FILE)

test-full: $(STAMP) ## the slow ones as well
	$(PYTEST) $(WITHOUT) $(BY_FILE)
	$(PYTEST) tests/device

# Another tenth every hundred commits, so that a landing is tried with one of them.
TENTH ?= $(shell { git rev-list --count HEAD 2>/dev/null || echo 0; } | sed 's/..$$//; s/.*\(.\)$$/\1/')
test-tenth: $(STAMP) ## a tenth of the slow ones (TENTH=0 to 9)
	$(PYTEST) -m slow --tenth $(TENTH) $(WITHOUT) $(BY_FILE)

# With the transformers of constraints.txt; two lines name it and the registry's newest,
# which NEWEST=1 installs (until `make clean`). Without a registry they are missing.
test-integrations: $(INTEGRATIONS_STAMP) ## the tests with transformers, peft, Lightning
	@$(if $(NEWEST),$(PIP) install --upgrade transformers)
	@$(BIN)/python -m pip --timeout 10 --retries 0 index versions transformers 2>&1 | \
		sed -n -e 's/^ *INSTALLED: */transformers here: /p' \
		-e 's/^ *LATEST: */transformers in the registry: /p'
	HF_HUB_OFFLINE=1 $(PYTEST) tests/integrations

test-ray: $(RAY_STAMP) ## runs on a Ray cluster of several nodes on this machine
	$(PYTEST) -m "not slow" tests/ray

test-ray-full: $(RAY_STAMP) $(INTEGRATIONS_STAMP) ## the slow ones as well
	$(PYTEST) tests/ray

test-page: $(PAGE_STAMP) ## the live page in Chromium; screenshots go to build/page
	@sh .ci/chromium
	$(PYTEST) tests/page

# The test device is built beforehand, so that no test's time is spent on it. On another
# one, tests of what only the test device has are skipped by name.
DEVICE ?= tdev
test-device: $(STAMP) ## on the test device (C++ compiler), or DEVICE=cuda, xpu, mps, hpu
	TEST_DEVICE=$(DEVICE) $(BIN)/python -m tests.device.build
	TEST_DEVICE=$(DEVICE) $(PYTEST) -m "not slow" tests/device

test-wheel: $(STAMP) ## two ranks from the wheel, installed without extras
	rm -rf build/wheel build/bare
	@$(PIP) wheel --no-deps --wheel-dir build/wheel .
	@PYTHON="$(PYTHON)" sh .ci/venv build/bare
	@$(PIP) --python build/bare/bin/python install -c constraints.txt build/wheel/*.whl
	OMP_NUM_THREADS=1 build/bare/bin/elche run --nproc 2 examples/tokens.py

test-floor: $(STAMP) ## torch's private names and comm/ on the oldest torch (2.9)
	@PYTHON="$(PYTHON)" sh .ci/venv build/floor
	@grep -v '^torch==' constraints.txt >build/floor/constraints.txt
	@$(PIP) --python build/floor/bin/python install 'torch==2.9.*' \
		-c build/floor/constraints.txt -e '.[dev]'
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 build/floor/bin/python -m pytest \
		-m "not slow" $(BY_FILE) tests/test_torch_internals.py tests/comm tests/ddp \
		tests/by_hand

fuzz: $(STAMP) ## property tests, FUZZ_EXAMPLES (10000) each, and loops on late streams
	HYPOTHESIS_PROFILE=fuzz $(PYTEST) -m hypothesis --timeout=0
	FUZZ_LOOPS=$${FUZZ_LOOPS:-1000} FUZZ_PAIRS=$${FUZZ_PAIRS:-100} FUZZ_FIRST=$$(date +%s) \
		$(PYTEST) tests/device/test_fuzz.py --timeout=0

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

docs: $(DOCS_STAMP) ## the user documents as a site, to build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# ONLY=memory,ddp measures these; LIST=1 measures nothing and prints their age.
figures: $(STAMP) ## measure all figures of README and docs/benchmarks.md (hours)
	$(BIN)/python -m benchmarks.figures $(if $(LIST),--list) $(if $(ONLY),--only $(ONLY))

format: $(STAMP) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

# Torch goes first and alone, exactly as constrained: the resolver then keeps the
# build that it found instead of weighing others.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (the first time takes minutes: torch is large)"
	@PYTHON="$(PYTHON)" sh .ci/venv $(VENV)
	@$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

$(RAY_STAMP): $(STAMP)
	@$(PIP) install -c constraints.txt -e '.[dev,ray]' 'ray[train]'
	@touch $@

$(PAGE_STAMP): $(STAMP)
	@$(PIP) install -c constraints.txt -e '.[dev,page]' selenium
	@touch $@

$(INTEGRATIONS_STAMP): $(STAMP)
	@$(PIP) install -c constraints.txt -e '.[dev,integrations]'
	@touch $@
