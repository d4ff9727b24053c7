# Everything a checkout needs. `make help` lists the targets; GNU make 3.81 is new enough.

PYTHON ?= python3
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
CHAOS_ARGS ?=
BENCHMARKS ?= convergence transport allreduce codecs coordinator recovery

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
INSTALLED := .venv/.installed

.PHONY: help install demo test test-all docs soak chaos check bench dist deploy-check clean
.DEFAULT_GOAL := help

help:
	@echo 'make install   make .venv and install Shoal into it, with the versions of constraints.txt'
	@echo 'make demo      train a small run with several peers on this machine      DEMO_ARGS=…'
	@echo '               a model in stages, which none of them can hold            DEMO_ARGS=--pipeline'
	@echo 'make test      run the tests                                             PYTEST_ARGS=…'
	@echo 'make test-all  run the cases that `make test` leaves out                 PYTEST_ARGS=…'
	@echo 'make soak      twelve peers that are killed and started for ten minutes  SOAK_ARGS=…'
	@echo 'make chaos     all further cases: faults at every step, long attacks, NATs; hours  CHAOS_ARGS=…'
	@echo 'make check     lint, format check and types, of benchmarks and examples too'
	@echo 'make docs      make the generated pages of docs/: run-file.md, events.md, metrics.md, the tree'
	@echo 'make bench     run the benchmarks, results in benchmarks/results/        BENCHMARKS=… BENCH_ARGS=…'
	@echo 'make dist      make sdist and wheel in dist/, and run the demo from them where nothing else is installed'
	@echo 'make deploy-check  check the launchers in deploy/ with all of their validators; minutes'
	@echo 'make clean     remove caches and build outputs; .venv stays'
	@echo
	@echo 'PYTHON=…       the Python that makes .venv, 3.11 or newer (now: $(PYTHON))'

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/shoal demo $(DEMO_ARGS)

# Tests with real processes come last, one more at a time than there are cores: they wait for half of their time. Exit
# code 5 of pytest: PYTEST_ARGS chose no test of that kind.
test test-all: TOGETHER = $(shell $(BIN)/python -c 'import os; print((os.cpu_count() or 1) + 1)')
test: $(INSTALLED)
	@$(BIN)/python -m pytest -n auto -m 'not integration and not matrix' $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@$(BIN)/python -m pytest -n $(TOGETHER) --dist worksteal -m 'integration and not slow and not matrix' $(PYTEST_ARGS) || [ $$? -eq 5 ]

test-all: $(INSTALLED)
	@$(BIN)/python -m pytest -n $(TOGETHER) --dist worksteal -m 'slow and integration and not matrix' $(PYTEST_ARGS) || [ $$? -eq 5 ]

soak: $(INSTALLED)
	$(BIN)/python -m tests.chaos.soak $(SOAK_ARGS)

chaos: $(INSTALLED)
	$(BIN)/python -m pytest -n auto -m matrix tests $(CHAOS_ARGS)
	$(BIN)/python -m pytest -n auto tests/chaos/pipeline_matrix.py tests/chaos/real/fault_matrix.py $(CHAOS_ARGS)

docs: $(INSTALLED)
	$(BIN)/python docs/make_pages.py
	$(BIN)/python docs/make_tree.py

# Benchmarks are scripts that import each other by name, and codecs.py has that of a standard module: for the types of
# everything else it has to have another one.
check: TYPED := build/benchmarks
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@rm -rf $(TYPED) && mkdir -p $(TYPED) && ln -s $(CURDIR)/benchmarks/*.py $(TYPED) && cd $(TYPED) && mv codecs.py codecs_.py
	MYPYPATH=$(TYPED) $(BIN)/mypy $(TYPED) examples

# One after the other, whatever -j says: they would disturb each other's clocks.
bench: $(INSTALLED)
	@mkdir -p benchmarks/results
	@for name in $(BENCHMARKS); do \
	    echo "== $$name"; \
	    $(BIN)/python benchmarks/$$name.py --json benchmarks/results/$$name.json $(BENCH_ARGS) || exit 1; \
	done

# The wheel is made of the sdist, so that both are tried: in an environment with what the wheel asks for and no more.
dist: $(INSTALLED)
	rm -rf dist build/bare
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'
	$(PIP) wheel --no-deps --no-build-isolation -w dist dist/shoal-*.tar.gz
	$(PYTHON) -m venv build/bare
	build/bare/bin/python -m pip --quiet --disable-pip-version-check --no-input install -c constraints.txt dist/shoal-*.whl
	cd build/bare && SHOAL_HOME=$(CURDIR)/build/bare/home bin/shoal demo --minutes 0.2 --peers 2

# Validators of dstack, SkyPilot, Kubeflow and others, each in an environment of its own.
deploy-check: dist
	deploy/check.sh

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is what `venv` writes last: an environment without it is a failed one, and is made again.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
	    echo "make: there is no '$(PYTHON)' here; name a Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: Shoal needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	         "name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# The build backend goes in first, so that its version is a pinned one too.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing Shoal into .venv (the first time takes some minutes)'
	@$(PIP) install -c constraints.txt scikit-build-core
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
