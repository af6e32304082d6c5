# `make demo` and `make test` do everything on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo test check torture bench size clean

demo: $(READY)
	$(BIN)/surefoot demo

test: $(READY) check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

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

size:
	@$(PYTHON) tools/size.py

# Made anew whenever what it holds may have changed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet torch -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[dev,gguf,math]' -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) demo
