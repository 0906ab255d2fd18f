PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
PIP_OPTIONS ?= --disable-pip-version-check
BIN := $(VENV)/bin
DEMO := $(BUILD)/gemma3_270m
PROMPT ?= The history of falconry begins
TOKENS ?= 128

.PHONY: demo test test-gpu lint clean help

help:
	@echo 'make demo    install, lower Gemma 3 270M for cpu, stream text'
	@echo 'make test    lint and run the whole suite'
	@echo 'make test-gpu  run the tests of the CUDA kernels on a GPU, with the python that PYTHON names'
	@echo 'make clean   remove what demo and test made here (compiled code stays in the user cache)'

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	@echo '[make] virtual environment in $(VENV)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	@command -v $${CXX:-g++} >/dev/null || { echo 'a C++ compiler is needed: install g++, or set CXX'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo '[make] torch'
	$(BIN)/pip install $(PIP_OPTIONS) -c constraints.txt torch
	@echo '[make] eyas and what it needs'
	$(BIN)/pip install $(PIP_OPTIONS) -c constraints.txt -e '.[demo,test]'
	@touch $@

demo: $(VENV)/.installed
	@echo '[make] lowering for cpu into $(DEMO) (about a minute and a half the first time, seconds afterwards)'
	$(BIN)/python -m eyas.tools.lower --target gemma3_270m --device cpu -o $(DEMO) --quiet
	@echo '[make] generating'
	$(BIN)/python -m eyas.tools.run $(DEMO) --prompt '$(PROMPT)' --max-new-tokens $(TOKENS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --confcutdir tests/cuda tests/cuda

test-gpu:
	$(PYTHON) -m pytest --confcutdir tests/cuda --durations 5 tests/cuda

clean:
	rm -rf $(VENV) $(BUILD) .pytest_cache .ruff_cache .hypothesis eyas.egg-info
