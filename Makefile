# `make demo` and `make test` need nothing but python3 and make (without Go, Java or
# Maven some tests are skipped, and say so): they create .venv and reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS ?=
# Many tests wait for real processes, so three workers keep two cores busy.
WORKERS ?= 3
SEEDS ?= 1000

# Tests start hundreds of nodes: they would compile every module each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all sim model check format sync docs chaos bench clean tools try-tools

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m raftq_demo

# toxiproxy-server, for faults of links, and TLC, for the model of replication: into .tools.
tools: $(STAMP)
	@PYTHON=$(PYTHON) .ci/get_tools.sh toxiproxy tla

try-tools: $(STAMP)
	@PYTHON=$(PYTHON) .ci/get_tools.sh toxiproxy || { \
	echo "======================================================================" >&2; \
	echo "NO TOXIPROXY: it could not be built. Tests of links under faults are" >&2; \
	echo "SKIPPED. Install Go or put toxiproxy-server into PATH, then make tools." >&2; \
	echo "======================================================================" >&2; }
	@.ci/get_tools.sh tla || { \
	echo "======================================================================" >&2; \
	echo "NO TLC: it could not be downloaded or run. The model of replication is" >&2; \
	echo "NOT CHECKED. Install Java and Maven, then make tools." >&2; \
	echo "======================================================================" >&2; }

# Some of every kind, for each change; the slowest are told, for whoever made `make test` slow.
test: $(STAMP) try-tools
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not full" --durations 10 $(TESTS)

test-all: $(STAMP) try-tools
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 10 $(TESTS)

# Logs and queue under simulated crashes, damage and full disks, with more seeds than `make test-all`.
sim: $(STAMP)
	@RAFTQ_SIM_SEEDS=$(SEEDS) $(BIN)/python -m pytest -n auto tests/sim $(TESTS)

# The model of replication, also in the scopes that take minutes.
model: $(STAMP)
	@.ci/get_tools.sh tla
	@RAFTQ_MODEL=deep $(BIN)/python -m pytest tests/model $(TESTS)

check: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python .ci/make_sync.py --check
	@$(BIN)/python .ci/make_configuration.py --check
	@$(BIN)/mypy
	@cd src && ../$(BIN)/lint-imports --no-cache --config ../pyproject.toml
	@$(BIN)/python -m pytest -q tests/unit/test_repository.py tests/unit/test_documents.py

# The blocking clients, made from the asyncio ones.
sync: $(STAMP)
	@$(BIN)/python .ci/make_sync.py

# The documents that are made from the code.
docs: $(STAMP)
	@$(BIN)/python .ci/make_configuration.py

format: sync
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Every scenario of faults against real nodes, two at a time; `make chaos SEED=7` repeats a run.
JOBS ?= 2
chaos: $(STAMP) try-tools
	@$(BIN)/raftq chaos run --all --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

bench: $(STAMP)
	@$(BIN)/python -m raftq_bench $(BENCH)

clean:
	rm -rf $(VENV) .bench .tools build dist *.egg-info
