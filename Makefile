# One command each; every target sets up what it needs once and is quick the second time. `make help` lists them.
# From a bare machine: Python >= 3.11 with venv and pip, nothing else.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-all triton real check bench proto map site gpu-check wheels clean

# The first interpreter that runs and is new enough: python3, where it is, is the one the machine's wheels are for.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LINK := .build/tk
# Compiled modules are kept, even where the environment says otherwise: without them `import torch` takes three times as
# long, in each of the hundreds of processes that tests start.
export PYTHONDONTWRITEBYTECODE :=
# Two cores, one process each; what a test itself starts shares them.
WORKERS ?= -n 2 --dist worksteal

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- set-up -------------------------------------------------------------------------------------------------------
# --no-compile: most of what is installed is never imported; what is, is compiled then. It halves the time. Two processes
# install half of the packages each, torch is quickly unpacked; the third step adds what torch needs on this machine,
# while what everything imports of torch is compiled: the processes of tests would do it side by side.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
HALF := '^(torch=|[a-k])'
$(READY): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "tk needs Python 3.11 or newer with venv and pip (Debian: apt install python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps -r <(grep -E $(HALF) $<) & $(PIP) --no-deps -r <(grep -vE $(HALF) $<) && wait $$!
	$(PIP) --no-build-isolation -r $< --editable . & $(BIN)/python -c 'import torch.distributed.fsdp, torch.testing' 2>/dev/null; wait $$!
	@for cc in $$CC cc gcc clang; do command -v "$$cc" && break; done >/dev/null || \
		$(PIP) 'ziglang>=0.13' || \
		echo "This machine has no C compiler, and ziglang could not be installed: serving will use torch's kernels." >&2
	@touch $@

# The repository root under the package's name: what mypy, protoc and an uninstalled python see as `tk`.
$(LINK):
	@mkdir -p .build && ln -sfn .. $@

# ---- what it is for -----------------------------------------------------------------------------------------------
demo: $(READY) ## corpus -> train -> checkpoint -> reshard -> serve -> text, on this machine (ARGS="--out DIR")
	@$(BIN)/tk demo $(ARGS)

test: $(READY) $(LINK) ## the tests, of matrices a choice (ARGS="tests/core -k box")
	@CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-all: ## every test that this machine can run: whole matrices and long runs, too
	@TK_FOREIGN_MATRIX=.build/foreign-modules.md TK_EVERY_EXAMPLE=1 \
		$(MAKE) --no-print-directory test ARGS="-m 'not gpu and not real and not triton' --timeout 3600 $(ARGS)"
	@$(if $(ARGS),true,$(MAKE) --no-print-directory triton)

# Needs the package registry the first time (two wheels of 200 MB); without one, it says so and leaves the tests out.
triton: $(READY) $(LINK) ## tests of the GPU kernels in Triton's interpreter, and the gate that compiles them for GPUs
	@if $(BIN)/python scripts/triton_versions.py; then \
		CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/.build/triton/newest \
			$(BIN)/python -m pytest tests/infer/engine/kernels/triton -m triton $(ARGS); fi

# Needs the package registries the first time; what cannot be installed is left out, with the reason.
real: $(READY) $(LINK) ## tests with other people's clients, a browser and a trained model (ARGS="-m real": long ones, too)
	@$(BIN)/python scripts/real_parts.py
	@CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real -m "real and not matrix" $(ARGS)

check: $(READY) $(LINK) ## format, lint, types, import floors
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@find . \( -name .venv -o -name .build \) -prune -o -name '*.[ch]' -print | xargs $(BIN)/clang-format --dry-run -Werror
	@MYPYPATH=.build $(BIN)/mypy -p tk
	@$(BIN)/python -m pytest --quiet tests/house/test_floors.py

bench: $(READY) $(LINK) ## every benchmark in benchmarks/, one after the other
	@set -e; for f in benchmarks/bench_*.py; do echo "== $$f"; $(BIN)/python "$$f" $(ARGS); done

# ---- generated files ----------------------------------------------------------------------------------------------
# The generator lives in an environment of its own: its protobuf is older than the one that we run with.
proto: $(READY) $(LINK) ## write proto/*/*_pb2* from the .proto
	@scripts/proto $(BIN)/python

map: $(READY) ## write docs/modules.md, docs/commands.md and the tables of docs/sizing.md
	@$(BIN)/python scripts/module_map.py
	@$(BIN)/python scripts/command_page.py
	@$(BIN)/python scripts/sizing_tables.py

# Sphinx lives in an environment of its own, in exact versions: scripts/website/requirements.txt.
site: $(READY) ## build the pages of docs/ as a site with search, in .build/website
	@$(BIN)/python scripts/website/build.py

# ---- machines with a GPU ------------------------------------------------------------------------------------------
wheels: $(READY) ## fill .build/wheels with what a GPU machine without network may lack
	@$(BIN)/python scripts/gpu_wheels.py

gpu-check: ## what needs CUDA (PART="kernels speed", OUT=folder), with this machine's own python and no installation
	@$(or $(GPU_PYTHON),python3) scripts/gpu_check.py $(PART) $(if $(OUT),--out $(OUT)) $(ARGS)

clean: ## remove what was built, .venv included; runs/ stays
	rm -rf $(VENV) .build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
