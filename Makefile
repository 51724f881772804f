# Everything runs from .venv. `make test` and `make demo` work on a fresh clone.
PYTHON ?= python3
# On PyPI this version is a small CPU wheel; a bare `torch` pulls gigabytes of CUDA.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)

.PHONY: setup test demo lint format sanitize clean

setup: $(STAMP)

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(STAMP)

test: lint
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p antiphon

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# csrc without Python, under the sanitizers; `make -C tests/csrc run` is the same without them.
sanitize:
	$(MAKE) -C tests/csrc run SANITIZE=address,undefined
	$(MAKE) -C tests/csrc run SANITIZE=thread

demo: setup
	$(BIN)/antiphon models fetch all
	$(BIN)/python benchmarks/demo.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/antiphon.egg-info kernels/_native*.so $(STAMP)
