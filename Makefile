# Every target makes the environment it needs, once: .venv, from constraints.txt.
#
#   make demo                        the main job on real text: a ladder of recipes and its report
#   make demo DATA=a.jsonl VAL=b.jsonl
#   make test                        the bits are proved
#   make help                        the rest

PYTHON ?= python3
MXREF_BACKEND ?= numba
OUT ?= runs/demo
DATA ?= builtin
VAL ?=
TOKENIZER ?=

BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help env demo test exhaustive lint format docs bench peers relock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env: $(STAMP)  ## make .venv and install mxref into it, editable, with all that CPU work needs

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mxref needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[numba,triton,training,docs,dev]'
	touch $@

demo: $(STAMP)  ## train the ladder `paper` on 2 CPU cores and write runs/demo/report.html (DATA=, VAL=, MXREF_BACKEND=, OUT=)
	MXREF_BACKEND=$(MXREF_BACKEND) $(BIN)/mxref ablate paper --jobs auto --data '$(DATA)' $(if $(VAL),--val '$(VAL)') \
	    $(if $(TOKENIZER),--tokenizer '$(TOKENIZER)') --out '$(OUT)'

test: $(STAMP)  ## prove the bits, and everything around them
	$(BIN)/pytest -m 'not gpu'

exhaustive: $(STAMP)  ## hold every float32 bit pattern to the exact oracle (an hour); table in runs/exhaustive
	PYTHONPATH=tests $(BIN)/python -m exhaustive --out runs/exhaustive

lint: $(STAMP)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## build the documentation into docs/_build/html
	$(BIN)/sphinx-build --fail-on-warning --fresh-env --quiet -b html docs docs/_build/html
	@echo docs/_build/html/index.html

bench: $(STAMP)  ## time the backends against their peers; the bits are checked first
	NUMBA_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python tests/bench/bench_cpu.py

format: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

peers:  ## run other implementations of MXFP4, in .venv-peers, and write the table of docs/peers.rst
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[peers]'
	PYTHONPATH=tests .venv-peers/bin/python -m peers

relock: $(STAMP)  ## lock the clauses of the specification, once the tests of an edited clause were read again
	$(BIN)/python docs/_ext/clauses.py relock

clean:  ## remove what was built; .venv stays
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
