# Every target makes the environment it needs, once: .venv, from constraints.txt. Tests and documentation need more of it
# than the demo, and add it.
# With NEWEST=1 it is .venv-newest, with the newest releases on the package index; remove it to get newer ones.
#
#   make demo                        the main job on real text: a ladder of recipes and its report
#   make demo DATA=a.jsonl VAL=b.jsonl
#   make quick                       a minute: the bits still hold
#   make test                        the bits are proved
#   make help                        the rest

PYTHON ?= python3
GPU_PYTHON ?= python3
GPU_JOBS ?=
MXREF_BACKEND ?= numba
MXREF_BROWSER ?= chromium
OUT ?= runs/demo
DATA ?= builtin
VAL ?=
TOKENIZER ?=
FORMAT ?=
CHECKOUTS ?=
URL ?=
REFS ?= main
VERSION ?=
ONLY ?=
TRITON ?=

NEWEST ?=

VENV := .venv$(if $(NEWEST),-newest)
BIN := $(VENV)/bin
RELEASES := $(if $(NEWEST),,--constraint constraints.txt)
# Tests of one file share what they compile and train, so a file stays in one process. tests/conftest.py orders the files.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
USUAL := not gpu and not long and not study
QUICK := $(addprefix tests/mxref/test_,$(addsuffix .py,scale rounding random hadamard formats packed_codes quantization gemm linear)) \
    tests/mxref/vectors/test_vectors.py::test_reference_gives_every_result tests/oracle tests/torch/layer/test_layer.py \
    tests/backends/mxref_numba/test_numba_columns.py \
    tests/backends/mxref_numba/test_numba_gemm_formats.py::test_scales_at_the_limits_of_float32
# RUNS: what training needs; STAMP: that, Triton, and what tests and documentation need.
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
TITAN := .venv-torchtitan

.DEFAULT_GOAL := help
.PHONY: help env demo demo-takes quick test test-compiled test-conformance test-older-cpu test-one-core test-model test-aot test-studies test-faults test-long test-explorer test-pages test-gpu test-torchtitan bench-gpu exhaustive prove clauses lint format docs docs-versions tables vectors release bench warm-up aot peers matrix relock freeze clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env: $(STAMP)  ## make .venv and install mxref into it, editable, with all that CPU work, tests and documentation need

$(RUNS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mxref needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(BIN)/pip install --quiet --disable-pip-version-check $(RELEASES) torch
	$(BIN)/pip install --quiet --disable-pip-version-check $(RELEASES) --editable '.[numba,training]'
	touch $@

$(STAMP): $(RUNS)
	$(BIN)/pip install --quiet --disable-pip-version-check $(RELEASES) --editable '.[all]'
	touch $@

demo: demo-takes $(RUNS)  ## train the ladder `demo` on 2 CPU cores and write runs/demo/report.html (DATA=, VAL=, MXREF_BACKEND=, OUT=)
	MXREF_BACKEND=$(MXREF_BACKEND) $(BIN)/mxref ablate demo --jobs auto \
	    --set 'data.train=$(DATA)' $(if $(VAL),--set 'data.val=$(VAL)') $(if $(TOKENIZER),--set 'data.tokenizer=$(TOKENIZER)') --out '$(OUT)'

demo-takes:
	@echo 'make demo: $(if $(wildcard $(RUNS)),,2 minutes and 1.5 GB for $(VENV) with the CPU build of PyTorch, then )4 to 5 minutes and 0.1 GB on 2 cores'

# Many processes import the packages and the tests. Each would compile them anew where PYTHONDONTWRITEBYTECODE is set.
test: $(STAMP)  ## prove the bits, and everything around them (NEWEST=1: on the newest releases of PyTorch, Triton and the rest)
	$(BIN)/python -m compileall -q mxref backends training
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest $(PARALLEL) -m '$(USUAL)'

quick: $(STAMP)  ## one minute from an edit to "the bits still hold": known answers, the oracle, both backends, Triton, a layer
	$(BIN)/pytest -q $(PARALLEL) $(QUICK)
	$(BIN)/mxref conform --quick --jobs 2 --backend reference --format mxfp4 --format mxfp8_e4m3
	$(BIN)/mxref conform --quick --jobs 2 --backend numba --format mxfp4 --format mxfp8_e4m3 --format mxfp6_e2m3
	TRITON_INTERPRET=1 $(BIN)/mxref conform --quick --jobs 2 --backend triton --format mxfp4 \
	    --clause scale.rule.even --clause rounding.rne

test-older-cpu: $(STAMP)  ## make test on the code paths of an older x86-64 CPU: other sums in BLAS, other exp and log, kernels for AVX2
	PYTHONPATH=tests $(BIN)/python -m older_cpu $(BIN)/pytest $(PARALLEL) -m '$(USUAL)'

test-one-core: $(STAMP)  ## make test on one core of this machine
	taskset --cpu-list "$$($(BIN)/python -c 'import os; print(min(os.sched_getaffinity(0)))')" $(BIN)/pytest -m '$(USUAL)'

test-model: $(STAMP)  ## execute every compiled variant of every kernel in the software model of gfx950 (minutes)
	$(BIN)/pytest tests/gfx950

test-aot: $(STAMP)  ## compile the GPU kernels for gfx950 and sm_90 with no GPU, and hold them to goals, budgets and recorded counts
	$(BIN)/pytest tests/aot

test-studies: $(STAMP)  ## try the tools beside the product whole: sweeps, projection, peers, benchmarks, the pages they write (minutes)
	$(BIN)/pytest $(PARALLEL) -m 'study and not gpu and not long' --ignore tests/gfx950 --ignore tests/aot tests

test-conformance: $(STAMP)  ## ask the reference and Numba for every format at level full (a minute)
	MXREF_CONFORMANCE_ALL=1 $(BIN)/pytest tests/mxref/conformance/test_conformance.py -k 'the_reference_passes or numba_passes'

test-compiled: $(STAMP)  ## compare the gradients of every recipe, compiled by inductor too, with the eager ones (minutes)
	MXREF_COMPILE_ALL=1 $(BIN)/pytest tests/torch/test_compiled.py

test-faults: $(STAMP)  ## spoil every file operation of `train` and `ablate`, and cut the power (an hour)
	MXREF_FAULTS_ALL=1 $(BIN)/pytest -s tests/faults/test_faults.py

test-long: $(STAMP)  ## train on several ranks of this machine in many layouts, and kill and resume such runs (many minutes)
	$(BIN)/pytest -s -m long tests
test-explorer: $(STAMP)  ## try the explorer page in a headless browser (MXREF_BROWSER=chromium); screenshots in runs/explorer
	MXREF_BROWSER=$(MXREF_BROWSER) $(BIN)/pytest tests/explorer

test-pages: docs  ## open every page of the documentation in a headless browser: wide, narrow, light, dark; contact sheets in runs/pages
	MXREF_BROWSER=$(MXREF_BROWSER) MXREF_PAGES=docs/_build/html $(BIN)/pytest tests/pages

# pytest-benchmark, where it is installed, stops beside pytest-xdist. Warnings of a machine's own torch are shown, not raised.
test-gpu:  ## prove the bits on this machine's GPU, with the Python that holds its torch (GPU_PYTHON=, GPU_JOBS=8 with pytest-xdist); summary in runs/gpu
	PYTHONPATH=.:backends:training:tests $(GPU_PYTHON) -m pytest -p no:benchmark -W default -m gpu $(if $(GPU_JOBS),-n $(GPU_JOBS) --dist loadgroup) tests/gpu

bench-gpu:  ## time the kernels on this machine's GPU, the bits checked first, then whole training steps, alone and side by side; numbers in runs/gpu
	PYTHONPATH=.:backends:training:tests $(GPU_PYTHON) -m bench.bench_gpu --json runs/gpu/bench.json
	PYTHONPATH=.:backends:training:tests $(GPU_PYTHON) -m bench.bench_gpu_step --json runs/gpu/step.json
	PYTHONPATH=.:backends:training:tests $(GPU_PYTHON) -m bench.bench_gpu_together --json runs/gpu/together.json

exhaustive: $(STAMP)  ## hold every float32 bit pattern to the exact oracle (over an hour); tables in runs/exhaustive
	PYTHONPATH=tests $(BIN)/python -m exhaustive --out runs/exhaustive

lint: $(STAMP)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## build the documentation into docs/_build/html, and try its links, its search and its tables (URL=https://...: with a sitemap)
	rm -rf docs/_build/html/_modules    # Sphinx keeps pages of sources whose links have moved
	MXREF_DOCS_URL='$(URL)' $(BIN)/sphinx-build --fail-on-warning --fresh-env --quiet -b html docs docs/_build/html
	MXREF_BUILT_DOCS=docs/_build/html $(BIN)/pytest -q tests/docs/test_built.py tests/docs/test_docs.py
	@echo docs/_build/html/index.html

docs-versions: $(STAMP)  ## build the documentation of branches and tags into docs/_build/site (REFS='main v0.1.0', URL=https://...)
	MXREF_DOCS_URL='$(URL)' $(BIN)/python docs/_ext/versions.py docs/_build/site $(REFS)

release: $(STAMP)  ## build dist/ and try the wheel in an empty environment without a network (VERSION=0.1.0: ready to publish)
	PYTHONPATH=tests $(BIN)/python -m release $(if $(VERSION),--version '$(VERSION)')

tables: $(STAMP)  ## write the tables of measurements and peers into the pages that have them, from docs/records
	PYTHONPATH=tests $(BIN)/python docs/_ext/committed.py

vectors: $(STAMP)  ## write the golden vectors, from the scalar oracle, into spec/vectors (FORMAT=mxfp8_e5m2: only this format's)
	PYTHONPATH=tests $(BIN)/python -m golden $(if $(FORMAT),--format '$(FORMAT)')

bench: $(STAMP)  ## time the CPU backend and its peers, bits first (QUICK=1: a minute; RECORD=1: into docs/records)
	PYTHONPATH=tests $(BIN)/python -m bench.bench_cpu --backend '$(MXREF_BACKEND)' $(if $(QUICK),--quick) $(if $(RECORD),--record)

warm-up: $(STAMP)  ## compile every kernel of the backend ahead of its first use
	$(BIN)/mxref warm-up --backend '$(MXREF_BACKEND)'

aot: $(STAMP)  ## compile the GPU kernels for gfx950 and sm_90 with no GPU, count, check budgets (RECORD=1: into docs/records; TRITON=3.6.0: by that release)
	$(if $(TRITON),test -d runs/triton-$(TRITON)/triton-$(TRITON).dist-info || $(BIN)/pip install --quiet --no-deps --target runs/triton-$(TRITON) triton==$(TRITON))
	PYTHONPATH=$(if $(TRITON),$(CURDIR)/runs/triton-$(TRITON):)tests $(BIN)/python -m aot --check --json runs/aot.json
	$(if $(RECORD),PYTHONPATH=tests $(BIN)/python -m bench.render_aot runs/aot.json)

prove: $(STAMP)  ## prove for all inputs that row kernels are their clauses, where no certificate is valid (ONLY='mxfp4.*'; FOREIGN=checkouts: kernels of other projects; into docs/records)
	PYTHONPATH=tests $(BIN)/python -m prove $(if $(ONLY),--only '$(ONLY)') $(if $(FOREIGN),--foreign --sources '$(FOREIGN)')

clauses: $(STAMP)  ## write the clauses as SMT-LIB text into spec/smt
	PYTHONPATH=tests $(BIN)/python -m prove --clauses

format: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

peers:  ## run other implementations of MXFP4, in .venv-peers, and record what they store in docs/records; then make tables
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[peers]'
	PYTHONPATH=tests .venv-peers/bin/python -m peers

matrix:  ## ask every implementation, clause by clause, in .venv-matrix, and record it in docs/records (CHECKOUTS='--microxcaling ../mx'); then make tables
	test -x .venv-matrix/bin/python || $(PYTHON) -m venv .venv-matrix
	.venv-matrix/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-matrix/bin/pip install --quiet --disable-pip-version-check --upgrade --editable '.[peers,matrix]'
	SKIP_CUDA_BUILD=1 .venv-matrix/bin/pip install --quiet --disable-pip-version-check --upgrade --no-build-isolation --no-deps amd-quark fouroversix
	PYTHONPATH=tests .venv-matrix/bin/python -m peers.matrix $(CHECKOUTS)

test-torchtitan: $(TITAN)/.installed  ## train the Llama of torchtitan by mxref's recipes, in .venv-torchtitan
	$(TITAN)/bin/python -m pytest tests/torchtitan

# On top of .venv, whose packages it sees: torchtitan and what it needs beyond them take half a minute.
$(TITAN)/.installed: $(STAMP)
	test -x $(TITAN)/bin/python || $(BIN)/python -m venv $(TITAN)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(TITAN)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(TITAN)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torchtitan]'
	touch $@

relock: $(STAMP)  ## lock the clauses of the specification, once the tests of an edited clause were read again
	$(BIN)/python docs/_ext/clauses.py relock

freeze: $(STAMP)  ## record the clauses of the specification as those of a released version
	$(BIN)/python docs/_ext/clauses.py freeze

clean:  ## remove what was built; .venv stays
	rm -rf build dist docs/_build docs/_measured .pytest_cache .mypy_cache .ruff_cache .hypothesis
