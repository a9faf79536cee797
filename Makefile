# `make demo` and `make test` are all that a fresh machine needs: Python 3.11+, make and a package index.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Waiting threads sleep soon: spinning ones take cores from other processes, and from each other.
ifndef OMP_WAIT_POLICY
export GOMP_SPINCOUNT ?= 10000
endif

.PHONY: demo gpu test test-fast check docs notebooks format clean

demo: .venv/installed
	$(BIN)/python -m scripts.demo --resume $(ARGS)

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

# For the work in between, in two minutes: all tests that stay in their process and need less than a
# second (a test that starts a process, compiles a graph or works for longer is marked `slow`).
test-fast: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

# On a machine with a GPU, in an environment with '.[dev]' and a build of torch for it: compares it with the CPU, then
# measures it (benchmarks/models/results/gpu_NAME.json).
gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu
	$(PYTHON) -m scripts.benchmark gpu $(ARGS)

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: .venv/installed
	rm -rf build/docs docs/api/modules
	$(BIN)/sphinx-build -W --keep-going -n -j auto docs build/docs

# Runs the notebooks and stores what they show in them; without progress bars, and a warning that ipywidgets is missing.
notebooks: .venv/notebooks
	OMP_NUM_THREADS=1 HF_HUB_DISABLE_PROGRESS_BARS=1 PYTHONWARNINGS=ignore:IProgress \
	  $(BIN)/jupyter execute --inplace notebooks/*.ipynb

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/notebooks: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[notebooks]'
	touch $@

clean:
	rm -rf .venv runs
