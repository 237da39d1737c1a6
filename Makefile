# make demo · make test (lint and test-cpu) · make test-fast · make test-newest · make test-gpu · make test-gpus · make lint · make bench · make bench-check · make docs · make wheel: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# the GPU tests run with a Python that has torch for CUDA, triton, pytest, pytest-timeout, pytest-xdist and hypothesis: make test-gpu GPU_PYTHON=…
GPU_PYTHON ?= $(PYTHON)

.PHONY: demo test test-cpu test-fast test-newest test-gpu test-gpus lint bench bench-check docs docs-serve wheel clean

# a third of the pinned versions need Python 3.11; an older one takes what its index offers
PINS := $(shell $(PYTHON) -c 'import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")')

# install NAME: makes the environment and installs the package with an extra
define install
$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian: apt install python3-venv" >&2; exit 1; }
$(BIN)/python -m pip install --quiet --upgrade pip $(PINS)
$(BIN)/python -m pip install --quiet -e ".[$(1)]" $(PINS)
touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,dev)

# what the demo needs is a third of what the tests need; where they are installed it has all
$(VENV)/.installed-demo: pyproject.toml constraints.txt
	$(call install,train)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-demo)
	$(BIN)/python examples/train_longnet.py --expect-below-bigram
	$(BIN)/python examples/block_sparse.py

# lint while the tests run, for mypy has one process; an error of either ends make with an error, when the tests have ended
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 lint test-cpu

# one torch thread a worker: two workers with a thread pool each would fight over the cores. Compiled modules are kept: else the dozens of
# processes that tests start compile the package again, and pytest rewrites 150 modules in each worker
test-cpu: $(STAMP)
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal

# for the inner loop: no slow test, none of several processes, and a few cases of each of the others, always the same ones
test-fast: $(STAMP)
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow and not distributed and not sweep and not gpu"

# the newest releases of what models come from and are trained with, in place of the pinned ones: those tests again
NEWEST := transformers tokenizers huggingface-hub accelerate peft trl datasets

test-newest: $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target build/newest $(NEWEST)
	$(BIN)/python -c "import sys, importlib.metadata as m; sys.path.insert(0, 'build/newest'); print({n: m.version(n) for n in '$(NEWEST)'.split()})"
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 PYTHONPATH=build/newest $(BIN)/python -m pytest -q -n auto --dist worksteal tests/integrations

# every test of one GPU to its end, in 12 minutes on an H200 with 16 cores; build/test-gpu.md says what passed and why others did not run
test-gpu:
	$(GPU_PYTHON) -m tests.gpu_suite

# the same of 2 to 4 GPUs over NCCL; build/test-gpus.md
test-gpus:
	$(GPU_PYTHON) -m tests.gpu_suite --several

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet dilated_attention benchmarks examples tests setup.py
	$(BIN)/mypy

# in its small form, minutes on 2 idle cores, into bench-results; python -m benchmarks SUITE --help has what else can be measured
bench: $(STAMP)
	for suite in speed extreme train-infer; do $(BIN)/python -m benchmarks $$suite --size small || exit 1; done

# into build/site; a broken link, a page outside of the navigation, a docstring that cannot be read or a notebook that fails stops it.
# It runs the notebooks, a minute on 2 idle cores; NOTEBOOKS=false make docs does not, and shows their code alone
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "the site: build/site/index.html"

# dist/dilated_attention-….whl, for Python 3.10 and later
wheel: $(STAMP)
	rm -rf build/lib
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

docs-serve: $(STAMP)
	NOTEBOOKS=false NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict

# what got slower since the run that wrote AGAINST, with exit code 1; on other hardware than its an error says so. To have one:
# python -m benchmarks speed --output FOLDER, before the change
bench-check: $(STAMP)
	$(if $(AGAINST),,$(error give AGAINST=FOLDER of an earlier run: python -m benchmarks speed --output FOLDER))
	$(BIN)/python -m benchmarks speed --against $(AGAINST) --output build/bench-check

clean:
	rm -rf $(VENV) runs build *.egg-info
