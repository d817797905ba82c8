# Needs Python 3.11 or newer, pip and make. Everything is installed into .venv, beside this file.
PYTHON ?= python3
ARGS ?=
# make chaos SEED=7 draws other faults and kill points; hypothesis takes the seed too.
SEED ?=
# Processes that test, each with servers and clusters of its own: unit tests compute, the others also
# wait. One that has run out of tests takes some of another's. ARGS="-n 0" runs all in one, for a debugger.
COMPUTING := -n 2 --dist worksteal
WAITING := -n 3 --dist worksteal

# Where a process may not keep what it compiled, each compiles the package anew, for a third of a second.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
# Without --quiet, which would hide warnings from --strict too. Silent about the theme's end of life, 2027-05; Zensical, which follows it, reads the same mkdocs.yml.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
PYTEST := $(if $(SEED),PTD_SEED=$(SEED)) $(BIN)/python -m pytest $(if $(SEED),--hypothesis-seed=$(SEED))

.DEFAULT_GOAL := help
.PHONY: help train nightly stop test lint docs integration long more chaos gpu wheel bench bench-peers clean system-packages

help: ## show this
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo '  PYTHON=python3.12 chooses the interpreter of a new .venv; ARGS="-k gang" is handed on to the command'

train: $(VENV)/.installed ## train and evaluate the digits example on this machine, under a local Prefect server
	$(BIN)/python -m prefect_torch_ddp train $(ARGS)

stop: ## stop the local Prefect server that make train left running for its UI
	@if [ -x $(BIN)/prefect ]; then $(BIN)/prefect server stop; else echo 'nothing is installed here, so nothing runs'; fi

nightly: $(VENV)/.installed ## deploy nightly and the examples, on a local Prefect server if none is configured; run a worker
	PATH="$(CURDIR)/$(BIN):$$PATH" deployments/nightly.sh $(ARGS)

# Unit tests run before any cluster's threads are in their process: some compare what a process has
# once, a random generator say. 5 is pytest's word for no test, which ARGS="-k gang" may leave of one.
test: $(VENV)/.installed-dev ## run the unit tests and the quick ones with real processes; 9 to 13 minutes
	$(PYTEST) tests/unit $(COMPUTING) $(ARGS) || [ $$? = 5 ]
	$(PYTEST) tests/integration -m "not (extended or long or more)" $(WAITING) $(ARGS) || [ $$? = 5 ]

lint: $(VENV)/.installed-dev ## check style, formatting, types, the layers and the manual
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MKDOCS) build --strict

docs: $(VENV)/.installed-docs ## build the manual as a site, build/docs/index.html; ARGS=serve shows it while you write
	$(MKDOCS) $(or $(ARGS),build) --strict

integration: $(VENV)/.installed-dev system-packages ## run more of them: Ceph, browsers, tables, many kill points; 16 to 24 minutes
	$(PYTEST) tests/integration -m "extended and not (long or more)" $(WAITING) $(ARGS)

long: $(VENV)/.installed-dev system-packages ## run the longest: Slurm, PBS, the manual as typed, whole nights; 33 minutes
	$(PYTEST) tests/integration -m "long and not more" $(WAITING) $(ARGS)

# Not in CI, which has another case of each of them.
more: $(VENV)/.installed-dev system-packages ## run further cases: PBS, Accelerate, Lightning, MLflow, long waits; 20 minutes
	$(PYTEST) tests/integration -m more $(WAITING) $(ARGS)

chaos: $(VENV)/.installed-dev system-packages ## kill, stop and starve processes at many points; SEED= draws other ones
	$(PYTEST) tests/chaos $(ARGS)

gpu: $(VENV)/.installed-dev ## run the tests that need a CUDA device; elsewhere they are skipped
	$(PYTEST) tests/gpu $(ARGS)

wheel: $(VENV)/.installed-dev ## install the wheel with the lowest and newest versions, run the README, time newcomers
	PTD_PYTHON=$(PYTHON) $(PYTEST) tests/wheel -s $(ARGS)

bench: $(VENV)/.installed-dev system-packages ## measure; wants a quiet machine
	$(PYTEST) tests/benchmarks -s -o python_files='bench_*.py test_*.py' $(ARGS)

bench-peers: $(VENV)/.installed-dev ## compare with Ray Train, Lightning, Accelerate, dask-pytorch-ddp; 75 minutes, a quiet machine
	$(BIN)/python -m tests.benchmarks.peers $(ARGS)

clean: ## remove .venv, .peers, caches and builds; trained models stay where they are
	rm -rf $(VENV) .peers build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's packages for make integration, chaos and bench: Slurm's own daemons, and Ceph's, an S3
# store, Postgres, a Prefect server's database, tcsh and modules as HPC sites have them, and a
# browser; nginx serves files in benchmarks.
# Elsewhere than as root on Debian or Ubuntu those tests are skipped, and say what to install. None
# of them is to run as a service of this machine: policy-rc.d is how Debian is told so.
SYSTEM_PACKAGES := slurmctld slurmd slurm-client munge ceph-mon ceph-osd radosgw ceph-common openssl nginx-light postgresql tcsh environment-modules
BROWSER := chromium
SYSTEM_COMMANDS := slurmctld slurmd munged sbatch ceph-mon ceph-osd radosgw radosgw-admin openssl nginx postgres tcsh modulecmd $(BROWSER)
POLICY := /usr/sbin/policy-rc.d
system-packages:
	@missing=$$(PATH="$$PATH:/usr/sbin:$$(echo /usr/lib/postgresql/*/bin | tr " " :)"; for name in $(SYSTEM_COMMANDS); do command -v $$name >/dev/null || printf '%s ' $$name; done); \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo 'installing $(SYSTEM_PACKAGES) $(BROWSER) for the tests'; \
	    if [ ! -e $(POLICY) ]; then \
	      printf '#!/bin/sh\nexit 101\n' >$(POLICY) && chmod +x $(POLICY); trap 'rm -f $(POLICY)' EXIT; fi; \
	    apt-get update -qq >/dev/null 2>&1; \
	    for packages in '$(SYSTEM_PACKAGES)' $(BROWSER); do \
	      DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $$packages >/dev/null 2>&1 || \
	      echo "apt-get could not install $$packages; the tests that need them will be skipped" >&2; done; \
	  else echo "tests that need $${missing}will be skipped: apt-get install $(SYSTEM_PACKAGES) $(BROWSER)" >&2; fi; fi

# The stamps make a second call quick; a newer pyproject.toml or constraints.txt installs again.
$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	$(INSTALL) --editable '.[aws]'
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-docs

$(VENV)/.installed-docs: $(INPUTS) | $(BIN)/python
	$(INSTALL) --editable '.[docs]'
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) was not found; name one: make train PYTHON=python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed and $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make train PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo '$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
