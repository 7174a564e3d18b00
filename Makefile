# make setup   the environment, in .venv
# make demo    the main job: two worker processes, then one device
# make test    the default tests, in three processes
# make test-full  the full tier: what the default leaves out; as root
# make test-clusters  of it, jobs on a real Slurm, Ray, sshd and namespaces
# make test-engine  of it, the engine and training
# make test-rest  the rest of the full tier, which needs no root
# make coverage  the default tests with what they run of the package
# make slurm   Debian's Slurm and sshd, for the full tier; as root
# make lint    ruff and mypy
# make soak    breaks jobs and compares weights; FAULTS=30 SEED=2
# make docs    the site, in build/site
# make bench   the benchmarks; ONLY=name, ARGS=--continue
# make growth  step time against replicas and parameters
# make parity  the whole parity matrix, up to two hours; writes its tables
# make conformance  what Keras runs against Keras's numbers; writes its table
# make matrix  the tests that no tier has; writes its table
# make gpu-check  what needs a GPU; writes its table
# make mutations  faults that are planted, and which tier sees them
# make test-versions  the default tests with the oldest and newest versions
# make commands  runs the commands of the README; writes their seconds into it
# make release-check  whether the tables are of these sources

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
METADATA := setup.cfg pyproject.toml
SHELL := /bin/bash
# Else each process that imports TensorFlow compiles it, where Python writes no
# bytecode (PYTHONDONTWRITEBYTECODE, as in many images): 19 s instead of 7.
export UV_COMPILE_BYTECODE := 1
# The package and its tests too, in processes that tests start.
export PYTHONDONTWRITEBYTECODE :=
.SHELLFLAGS := -eu -o pipefail -c

.PHONY: commands coverage docs bench conformance gpu-check growth setup demo test test-clusters test-engine test-full test-rest test-versions lint matrix mutations parity release-check slurm soak format clean

setup: $(VENV)/.base

demo: $(VENV)/.base
	$(BIN)/python experiments/demo.py

# More than cores, since some tests wait. What starts clusters comes early.
THREE := --numprocesses=3 --no-loadscope-reorder --max-worker-restart=3
# Half of these wait, for limits of a link or of a task that is lost.
FOUR := --numprocesses=4 --no-loadscope-reorder --max-worker-restart=3

test: $(VENV)/.test
	$(BIN)/python -m pytest $(THREE) $(ARGS)

TESTS ?=
coverage: $(VENV)/.test
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[coverage]'
	rm -rf runs/coverage && mkdir -p runs/coverage
	$(BIN)/python -m coverage run -m pytest $(if $(TESTS),$(TESTS),$(THREE)) $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

test-full: $(VENV)/.test slurm
	$(BIN)/python -m pytest -m 'full and not matrix' $(FOUR) $(ARGS)

test-clusters: $(VENV)/.test slurm
	$(BIN)/python -m pytest -m 'full and not matrix' $(FOUR) tests/cluster tests/launch $(ARGS)

test-engine: $(VENV)/.test
	$(BIN)/python -m pytest -m 'full and not matrix' $(THREE) tests/engine tests/training $(ARGS)

test-rest: $(VENV)/.test
	$(BIN)/python -m pytest -m 'full and not matrix' $(THREE) --ignore=tests/cluster --ignore=tests/launch $(ARGS)

matrix: $(VENV)/.test
	$(BIN)/python -m tests.matrix.run $(ARGS)

gpu-check: $(VENV)/.test
	$(BIN)/python -m tests.gpu.run $(ARGS)

mutations: $(VENV)/.test
	$(BIN)/python -m tests.mutations.run $(ARGS)

commands: $(VENV)/.test
	$(BIN)/python -m tests.readme

ENDS ?= oldest,newest

test-versions: $(VENV)/.test
	$(BIN)/python -m tests.versions.run --ends=$(ENDS) $(ARGS)

release-check: $(VENV)/.test
	$(BIN)/python -m tests.tables

# Its daemons are started by the tests themselves.
SLURM := slurmctld slurmd slurm-client munge iproute2 openssh-server openssh-client

slurm:
	@for program in slurmctld slurmd srun munged ip sshd ssh; do \
	  command -v $$program >/dev/null && continue; \
	  apt-get update --quiet=2; \
	  DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends $(SLURM); \
	  break; \
	done

parity: $(VENV)/.test
	$(BIN)/python -m tests.parity.run $(ARGS)

conformance: $(VENV)/.test
	$(BIN)/python -m tests.conformance.run $(ARGS)

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

FAULTS ?= 30
SEED ?= 2

soak: $(VENV)/.test
	$(BIN)/python -m tests.soak.run --faults=$(FAULTS) --seed=$(SEED)

bench: $(VENV)/.peers
	$(BIN)/python -m experiments.benchmarks --only=$(ONLY) $(ARGS)

growth: $(VENV)/.peers
	$(BIN)/python -m experiments.benchmarks.growth $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venvs build dist *.egg-info runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# uv from the PATH, else from PyPI into the environment itself.
$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mgpu_tf needs Python 3.11 or newer. Received: $$($(PYTHON) --version). Use make PYTHON=python3.12" >&2; exit 2; }
	@if command -v uv >/dev/null; then \
	  uv venv --quiet --allow-existing --python "$$(command -v $(PYTHON))" $(VENV) && ln -sf "$$(command -v uv)" $(BIN)/uv; \
	else \
	  $(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make environments. Run: apt-get install python3-venv" >&2; exit 2; }; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check uv; \
	fi
	@touch $@

$(VENV)/.base: $(VENV)/.uv $(METADATA)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base $(METADATA)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[test]'
	@touch $@

$(VENV)/.peers: $(VENV)/.base $(METADATA)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[plot,peers]'
	@touch $@
