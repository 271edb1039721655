# Two commands matter: `make demo` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# TORCH=cpu installs PyTorch's CPU build (about 1.2 GB less to load, 5 GB less on disk) through
# uv's --torch-backend, from PyTorch's own index, instead of the build that the lock names.
TORCH ?= registry

.PHONY: help setup demo test test-full lint lock gpu bench clean
help: ; @grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(BIN)/uv:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "Python 3.11, 3.12 or 3.13 is needed: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv

$(VENV)/.ready: requirements.lock pyproject.toml scripts/setup.sh | $(BIN)/uv
	TORCH=$(TORCH) bash scripts/setup.sh $(VENV)
	touch $@

setup: $(VENV)/.ready ## create .venv from the lock

demo: setup ## start the real server on the demo model and ask it something
	$(BIN)/python scripts/demo.py

lint: setup ## ruff, mypy, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## everything that needs no GPU, long forms shortened
	$(BIN)/python -m pytest -m "not gpu and not full"

test-full: lint ## everything that needs no GPU, long forms whole
	FAIRLEAD_FULL=1 $(BIN)/python -m pytest -m "not gpu" --timeout=14400

gpu: setup ## what needs an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

lock: $(BIN)/uv ## renew requirements.lock
	$(BIN)/uv pip compile --quiet -p $(BIN)/python --universal --generate-hashes --no-emit-index-url --no-header --upgrade \
	  --extra test --extra operator --extra runtime pyproject.toml -o requirements.lock

clean: ; rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
