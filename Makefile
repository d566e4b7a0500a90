# Two commands: `make run` and `make test`. Each makes .venv and installs what it needs, pinned by constraints.txt.

PYTHON ?= python3
CONFIG ?= configs/vit_base_keep_qkv.yaml
# Index of torch's wheels, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cu130; empty: pip's own configuration.
TORCH_INDEX ?=
BIN := .venv/bin
PIP := $(BIN)/pip install -qq --progress-bar off --disable-pip-version-check --root-user-action ignore --no-warn-script-location

.PHONY: run test test-all test-fast pytest lint types site docs gallery bench clean

run: .venv/run
	$(BIN)/onnxline run $(CONFIG) $(ARGS)

# One thread for each worker of the tests: there is a worker for each core and one more (tests/conftest.py), and more
# threads only wait for each other.
# Compiled modules are kept, even where PYTHONDONTWRITEBYTECODE is set: the tests start hundreds of processes.
# A test that runs make is no part of this make.
TEST_ENV := MAKEFLAGS= OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# pyright takes a minute of one core. It runs beside the tests, which wait for processes a fourth of their time.
test: .venv/test
	@$(MAKE) --no-print-directory -j2 lint site
	@$(MAKE) --no-print-directory -j2 types pytest

# As `test`, with the tests and the parameters that it leaves out (tests/support/one_of_each.py).
test-all: .venv/test
	@$(MAKE) --no-print-directory -j2 lint site
	@$(MAKE) --no-print-directory -j2 types pytest ALL=--all

pytest: .venv/test
	$(TEST_ENV) $(BIN)/python -m pytest -n auto --dist worksteal $(ALL) $(ARGS)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/test
	$(BIN)/pyright

site: .venv/test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

# About a minute on two cores: no families of models, no tutorials, no whole runs, no Ray, no browser (tests/conftest.py).
test-fast: .venv/test
	$(TEST_ENV) $(BIN)/python -m pytest -n auto --dist worksteal --fast $(ARGS)

# Warnings are errors (strict in mkdocs.yml). The pages are in runs/site/.
docs: .venv/test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Reports of shipped configurations, which `make docs` puts on the page Gallery.
GALLERY := attention_block vit_base_keep_qkv minilm resnet own_pass
gallery: .venv/run
	for name in $(GALLERY); do $(BIN)/onnxline run configs/$$name.yaml --out runs/gallery/$$name || exit; done

bench: .venv/run
	$(BIN)/python -m benchmarks.run_vs_bare
	$(BIN)/python -m benchmarks.passes_cost
	$(BIN)/python -m benchmarks.keep_families
	$(BIN)/python -m benchmarks.diffs
	$(BIN)/python -m benchmarks.bisect_cost
	$(BIN)/python -m benchmarks.audit

# What torch needs comes with the rest: torch's own index has few releases of it, and perhaps not the pinned ones.
# The stamps are made last, so that an interrupted install is done again.
.venv/run: .venv/made pyproject.toml constraints.txt
	@echo "installing onnxline with torch into .venv, which takes minutes once"
	@$(PIP) --no-deps -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) -c constraints.txt -e '.[torch,models]'
	@touch $@

.venv/test: .venv/run
	@$(PIP) -c constraints.txt -e '.[torch,models,onnxslim,ray,dev]'
	@touch $@

.venv/made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("onnxline needs Python 3.11 or later, and $(PYTHON) is Python %s; name another one: make run PYTHON=python3.11" % ".".join(map(str, sys.version_info[:2])))'
	@$(PYTHON) -m venv --clear .venv || { rm -rf .venv; exit 1; }
	@touch $@

clean:
	rm -rf .venv runs
