# Every target works on a fresh machine: it first makes .venv (again only when pyproject.toml or the launch shim changes).
# Another interpreter: `make PYTHON=python3.12 test`. Fewer tests: `make test ARGS="tests/cli/test_cli.py -k demo"`;
# tests run on all cores, in one process with `-n 0` among ARGS.
# The first interpreter that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
ARGS ?=
# Installed first and by exact version: the version the tests are run with, and on an index that offers CPU builds the
# pin takes that build instead of gigabytes of CUDA. A torch of your own is kept if you install into your own venv.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# CuTe DSL that `make test-dsl` tests the exports with: one that competition runners have.
VERSION ?= 4.3.5
DSL := .venv/dsl-$(VERSION)
# transformers that `make test-transformers` tests the models with.
TRANSFORMERS ?= transformers>=5.17,<5.25
HF := .venv/transformers
# What makes a venv whose packages are found behind its own in .venv; its argument is the venv.
BEHIND = $(1)/bin/python -c "import pathlib, sys, sysconfig; pathlib.Path(sysconfig.get_path('purelib'), 'zz_base.pth') \
  .write_text(f'import site; site.addsitedir({sys.argv[1]!r})')" \
  "$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-dsl test-transformers lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' Makefile

demo: .venv/installed  ## run the sm_100a kernel on the emulator and compare every output bit (no GPU needed)
	$(BIN)/nvfp4-cute demo $(ARGS)

test: .venv/installed  ## the fast tests, under 15 minutes on two cores
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

test-all: .venv/installed  ## every test, the long matrices included
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-dsl: $(DSL)/installed  ## the exported submissions on an older CuTe DSL: make test-dsl VERSION=4.5.2
	$(DSL)/bin/python -m pytest -n auto --dist worksteal tests/competition/test_shapes.py tests/competition/test_versions.py \
	  -k "first_shapes or chosen_configs" $(ARGS)

test-transformers: $(HF)/installed  ## whole models through transformers, on the CPU
	$(HF)/bin/python -m pytest -n auto --dist worksteal tests/models $(ARGS)

lint: .venv/installed-dev  ## ruff (rules and format) and mypy, at the versions that pyproject.toml pins
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv, caches, and build products
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis nvfp4_cute/emulator/fronts/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.10 or newer found; name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	"$(PYTHON)" -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml nvfp4_cute/emulator/fronts/launch_shim.c
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e ".[test]"
	@touch $@

# Only the DSL differs: all else is found in .venv, behind it.
$(DSL)/installed: .venv/installed
	$(BIN)/python -m venv $(DSL)
	$(call BEHIND,$(DSL))
	$(DSL)/bin/python -m pip install nvidia-cutlass-dsl==$(VERSION)
	@touch $@

$(HF)/installed: .venv/installed
	$(BIN)/python -m venv $(HF)
	$(call BEHIND,$(HF))
	$(HF)/bin/python -m pip install "$(TORCH)" "$(TRANSFORMERS)" safetensors accelerate
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install -e ".[dev]"
	@touch $@
