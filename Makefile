# Two commands matter: `make demo` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# TORCH=cpu installs PyTorch's CPU build (about 1.2 GB less to load, 5 GB less on disk) through
# uv's --torch-backend, from PyTorch's own index, instead of the build that the lock names.
TORCH ?= registry

# Compiled into the source tree by the build hook; without a compiler plain torch serves.
KERNELS := kernels/hatch_build.py kernels/fairlead_kernels/cpu/compilation.py \
  $(wildcard kernels/fairlead_kernels/csrc/*)

# Where `make images` writes operator.tar and runtime.tar, and where the tests look for them.
IMAGES_OUT ?= build/images
# The program that builds images (docker, podman or buildah), the image to start from, and which
# images: operator, runtime, runtime-cuda. MAX_JOBS=N: the compilers that run at a time for the last.
BUILDER ?=
BASE ?=
NAMES ?= operator runtime

PYTEST := $(BIN)/python -m pytest
# Unit tests that take more than a moment: compilers, Triton's interpreter, whole rigs on the
# stand-ins of GPUs. They run beside the functional tests.
LONG_UNITS := $(addprefix tests/unit/, \
  $(addprefix device/test_,decode_steps.py determinism.py launches_never_wait.py) \
  $(addprefix kernels/test_,attention_timing.py cpu_attention.py cpu_layers.py fixed_kernels.py \
    gpu_operations.py humming_compiles.py library.py triton_attention.py triton_cuts.py) \
  images/test_cpu_torch.py images/test_keep_names.py processes/test_lean_imports.py)

# Python keeps what it compiles, also where the environment says otherwise, as in many containers:
# else each process that imports torch and transformers compiles them first, for 5 to 10 seconds.
export PYTHONDONTWRITEBYTECODE :=

# What needs a GPU. The CUDA image's packages are installed, nvcc among them. SETUP=0: with PYTHON as
# it is, nothing is installed, the project is found by its path; WHEELS="PATH ...": wheels, or
# folders of them, that are unpacked for it (flashinfer's).
SETUP ?= 1
WHEELS ?=
GPU_SETUP := $(if $(filter 0,$(SETUP)),,$(VENV)/.gpu)
GPU_PYTHON := $(if $(GPU_SETUP),$(BIN)/python,$(PYTHON)) scripts/gpu_python.py $(addprefix --wheels ,$(WHEELS)) --
GPU_NVCC := $(if $(GPU_SETUP),PATH="$(CURDIR)/$(BIN):$$PATH" CUDA_HOME="$$(echo $(CURDIR)/$(VENV)/lib/python3*/site-packages/nvidia/cu[0-9]*)")
# The most minutes that each of them takes; a run that is over says what it left out, and fails.
MINUTES ?= 10
GPU_RUN := timeout --signal=INT --kill-after=10 $$(($(MINUTES) * 60 - 15)) env TRITON_INTERPRET=0 \
  FAIRLEAD_MINUTES=$(MINUTES) PYTHONUNBUFFERED=1 $(GPU_NVCC) $(GPU_PYTHON)
# Seconds of a test, which may compile. No signal ends one that waits for a GPU that hangs: the thread
# that watches it ends the process.
GPU_LIMIT := --timeout=1800 --timeout-method=thread
# Which tests `make gpu` runs, and its options for pytest.
TESTS ?= tests/gpu
# One file's tests share a worker, and with it the cluster and the servers that they start.
WORKERS ?= 2
BY_FILE := --dist loadfile --no-loadscope-reorder
PARALLEL := -n $(WORKERS) $(BY_FILE)

.PHONY: help setup demo quick check lint style types imports fast test functional cluster e2e test-full generate images test-images plant gpu gpu-soak bench bench-gpu lock clean
help: ## print this list
	@grep -E '^[a-z0-9-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/'

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "Python 3.11, 3.12 or 3.13 is needed: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.13")'
	@echo "setup: a virtual environment in $(VENV), and uv"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.ready: requirements.lock requirements-gpu.lock pyproject.toml scripts/setup.sh scripts/without_list.py docker/keep_names.py $(KERNELS) | $(BIN)/uv
	@TORCH=$(TORCH) bash scripts/setup.sh $(VENV)
	@touch $@

$(VENV)/.gpu: $(VENV)/.ready docker/requirements-cuda.lock scripts/gpu_setup.sh
	bash scripts/gpu_setup.sh $(VENV)
	touch $@

setup: $(VENV)/.ready ## create .venv from the lock

demo: setup ## start the real server on the demo model and ask it something
	@$(BIN)/python scripts/demo.py

quick: setup ## the inner loop: operator, scheduling, sizing, api and contract tests that need no torch
	$(PYTEST) -q $(PARALLEL) --torchless -m "not gpu and not full" \
	  tests/contract $(addprefix tests/unit/,operator scheduling sizing api)

check: setup ## lint, types, import contracts, unit and contract tests, side by side
	@$(MAKE) --no-print-directory --keep-going --jobs=3 --output-sync=target style types imports fast

lint: style types imports ## ruff, mypy, import-linter

# The most percent of each package's names that may be pronouns and participles alone. They only fall.
ODD_NAMES := operator=1 runtime=1 kernels=1

style: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python scripts/count_odd_names.py --limit $(ODD_NAMES)

# What mypy knows of torch takes it a minute to find out: kept outside the clone, which CI has anew.
MYPY_CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fairlead/mypy

types: setup
	$(BIN)/mypy --cache-dir $(MYPY_CACHE)

imports: setup
	$(BIN)/lint-imports

fast: setup
	$(PYTEST) -q $(PARALLEL) -m "not gpu and not full" tests/unit tests/contract $(LONG_UNITS:%=--ignore=%)

test: setup ## everything that needs no GPU, long forms shortened; the fast parts first
	@$(PYTHON) scripts/steps.py check functional+cluster

# One worker more: they wait for the servers and browsers that they start, four tenths of their time.
functional: setup
	$(PYTEST) -n $$(($(WORKERS) + 1)) $(BY_FILE) -m "not gpu and not full" tests/functional $(LONG_UNITS)

cluster: setup
	$(PYTEST) $(PARALLEL) -m "not gpu and not full" --durations=10 tests/cluster

e2e: setup ## the images on a real node, in a sandbox of its own: after `make images`, as root
	IMAGES_OUT=$(abspath $(IMAGES_OUT)) FAIRLEAD_FULL=$(FULL) PYTHONPATH=tests $(BIN)/python -m e2e

test-full: lint plant ## everything that needs no GPU, long forms whole
	FAIRLEAD_FULL=1 $(PYTEST) $(PARALLEL) -m "not gpu" --timeout=14400 tests/unit tests/contract
	FAIRLEAD_FULL=1 $(PYTEST) $(PARALLEL) -m "not gpu" --timeout=14400 tests/functional
	FAIRLEAD_FULL=1 $(PYTEST) -m "not gpu" --timeout=14400 tests/cluster

# Measurements and pictures of them are not made here, nor are the locks and the demo model: another
# run gives others.
generate: setup ## write what git tracks and other files determine: tables, OpenAPI, the drawing, the chart's CRD
	cp crds/inferencedeployments.yaml charts/fairlead/crds/
	$(BIN)/python scripts/make_field_types.py
	$(BIN)/python scripts/make_docs.py
	$(BIN)/python scripts/make_resource_docs.py
	$(BIN)/python scripts/make_openapi.py
	$(BIN)/python scripts/draw_architecture.py

images: ## the container images, as tar files in IMAGES_OUT: BUILDER=docker|podman|buildah, BASE=IMAGE
	$(PYTHON) scripts/build_images.py --out $(IMAGES_OUT) \
	  $(if $(BUILDER),--builder $(BUILDER)) $(if $(BASE),--base $(BASE)) $(NAMES)

test-images: setup ## what the images hold and how they run: after `make images`, as root; FULL=1 builds them twice
	IMAGES_OUT=$(abspath $(IMAGES_OUT)) FAIRLEAD_FULL=$(FULL) \
	  $(PYTEST) -m "images$(if $(FULL),, and not full)" tests/images

plant: setup ## plant known bugs one at a time; the tests must catch every one
	$(BIN)/python scripts/plant_bugs.py
	$(BIN)/python scripts/plant_package_bugs.py

bench: setup ## the benchmarks that need no GPU, with other engines; FULL=1: all models, five rounds
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/step_host_work.py
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python -m benchmarks.cpu_peers $(if $(FULL),--full)

gpu: $(GPU_SETUP) ## the tests that need an NVIDIA GPU; SETUP=0: with PYTHON as it is; FULL=1: all of them
	$(GPU_RUN) -m pytest $(GPU_LIMIT) -m "gpu and not soak$(if $(FULL),, and not full)" --durations=15 $(TESTS)

gpu-soak: $(GPU_SETUP) ## eight minutes of mixed load on a GPU, after which nothing has grown; SETUP=0 as above
	$(GPU_RUN) -m pytest $(GPU_LIMIT) -m soak -s tests/gpu

bench-gpu: $(GPU_SETUP) ## the benchmark of a GPU, beside transformers' continuous batching; SETUP=0 as above
	$(GPU_RUN) -m benchmarks.gpu $(ARGS)

# The CUDA image's packages have the versions of requirements.lock. Only cuda-bindings has not:
# cuda-python names its version, and lags behind.
LOCK := pip compile --quiet -p $(BIN)/python --universal --generate-hashes --no-emit-index-url --no-header --upgrade
lock: $(BIN)/uv ## renew requirements.lock, that of the CUDA image and that of the GPU packages in tests
	$(BIN)/uv $(LOCK) --group test --extra operator --extra runtime --extra tracing pyproject.toml -o requirements.lock
	sed -n '/^cuda-bindings==/d; s/^\([a-z].*==.*\) \\$$/\1/p' requirements.lock > $(VENV)/versions.txt
	$(BIN)/uv $(LOCK) --group cuda-kernels --extra cuda --extra tracing -c $(VENV)/versions.txt \
	  pyproject.toml -o docker/requirements-cuda.lock
	$(BIN)/uv $(LOCK) --no-deps --group gpu -o requirements-gpu.lock

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
