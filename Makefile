# `make verify` and `make test` need CPython 3.11 with pip, git, and a package index that pip reaches.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: help
help:  ## show the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: verify
verify: .venv/.made-cli  ## check every delta against every declared lane; needs no vLLM
	@$(BIN)/python -m balance_patcher verify

# Each of these is one process that keeps one core busy, so they run side by side, and each one's output is shown
# as a whole when it ends. Real engines fill the machine, and their tests look at the clock: they run alone, after.
SIDE_BY_SIDE = $(MAKE) --no-print-directory --keep-going --jobs=3 --output-sync=target
# The names of the lanes, with options of tools.lanes; pytest in the Python of one; and a command, with its options,
# for each $$name: all of them are done, and those that fail are told.
LANES = $$($(BIN)/python -m tools.lanes $(1) --list | cut -d' ' -f1)
IN_LANE = PYTHONPATH='$(CURDIR)' ".lanes/$$name/bin/python" -m pytest -W default
define on_each_lane
@names=$(call LANES,$(2)); failed=; \
for name in $$names; do \
	$(1) || failed+=" $$name"; \
done; \
if [ -n "$$failed" ]; then echo "failed on:$$failed" >&2; exit 1; fi
endef

.PHONY: test
test: .venv/.made-dev  ## all tests: the unit tests and real schedulers on each lane, then real engines on each
	@names=$(call LANES); more=$(call LANES,--test); \
	$(SIDE_BY_SIDE) test-unit $$(printf 'test-lane-%s ' $$names) $$(printf 'test-only-%s ' $$more)
	@$(MAKE) --no-print-directory test-engines

.PHONY: test-unit
test-unit: .venv/.made-dev  ## the tests that need no vLLM
	@$(BIN)/python -m tools.chromium >/dev/null
	@$(BIN)/python -m pytest

# Watching each branch makes the same tests take nearly twice as long, so it has a target of its own.
.PHONY: coverage
coverage: .venv/.made-dev  ## the same tests, with the branches of the package that they miss
	@$(BIN)/coverage run -m pytest
	@$(BIN)/coverage report
	@$(BIN)/coverage report --format=total | sed 's/.*/branch coverage: &%/'

.PHONY: model
model: .venv/.made-dev  ## explore the ranks' protocol: the deadlocks of a misplaced gather, none of the shipped one
	@$(BIN)/python -m tests.model

.PHONY: test-lanes
test-lanes: .venv/.made-dev  ## tests/lane and tests/engine on each lane's real vLLM
	@names=$(call LANES); more=$(call LANES,--test); \
	$(SIDE_BY_SIDE) $$(printf 'test-lane-%s ' $$names) $$(printf 'test-only-%s ' $$more)
	@$(MAKE) --no-print-directory test-engines

# -W default: vLLM and torch warn on import. The other settings of pyproject.toml hold.
test-lane-%: .venv/.made-dev
	@$(BIN)/python -m tools.lanes $*
	@echo 'lane $*: tests'
	@name='$*'; $(IN_LANE) tests/lane

# A lane that is there for these tests only: it has what the others have not.
test-only-%: .venv/.made-dev
	@$(BIN)/python -m tools.lanes --test $*
	@echo 'lane $*: tests'
	@name='$*'; $(IN_LANE) tests/lane/third

# As tests/lane/conftest.py sets it for its own: engines that are small and take one core each.
LIGHT := BALANCE_PATCHER=off OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1

.PHONY: test-engines
test-engines: lanes
	$(call on_each_lane,echo "lane $$name: engines"; $(LIGHT) $(IN_LANE) tests/engine)

.PHONY: test-all
test-all: test  ## what `make test` does, branch coverage, every way to start engines, and the other releases of vllm-ascend
	@[ -d .lanes/main/ray ] || $(PIP) --no-deps --target .lanes/main/ray --group ray
	$(call on_each_lane,echo "lane $$name: every way to start engines"; $(IN_LANE) tests/engine/test_launches.py --launches rest)
	@$(MAKE) --no-print-directory coverage
	@$(BIN)/python -m tools.lanes --extra
	$(call on_each_lane,echo "lane $$name: tests"; $(IN_LANE) tests/wheels,--extra)

# WAVES=… of each scheduling mode on each lane; SEED=… repeats a soak, whose seed is printed.
.PHONY: soak
soak: lanes  ## 1,000 random waves over both lanes and both scheduling modes, in real engines; some twenty minutes
	$(call on_each_lane,SOAK_WAVES='$(or $(WAVES),250)' SOAK_SEED='$(SEED)' $(IN_LANE) -q -s tests/engine/test_soak.py)

# PART=install, schedule, gather, verify, drift or engine; CHECK=1 fails, unless every target is met for sure.
.PHONY: bench
bench: lanes  ## what the patch costs beside upstream's own work, on each lane; a table, and JSON in .bench/; a quarter of an hour
	@$(BIN)/python -m tools.bench $(addprefix --part ,$(PART)) $(if $(CHECK),--check)

.PHONY: lanes
lanes: .venv/.made-dev  ## make the environment of each lane; nothing is done for one that is up to date
	@$(BIN)/python -m tools.lanes

.PHONY: demo
demo: .venv/.made-dev  ## balance off beside on in real engine cores, on this machine's CPU
	@$(BIN)/python -m tools.lanes main
	@PYTHONPATH='$(CURDIR)' VLLM_CACHE_ROOT='$(CURDIR)/.lanes/main/cache' .lanes/main/bin/python -m balance_patcher demo

.PHONY: simulate
simulate: .venv/.made-dev  ## balance off beside on at 2 and 16 ranks, with real schedulers: tables, CSV and plots in .simulated/
	@$(BIN)/python -m tools.lanes main
	@$(BIN)/python -m tools.simulate run --lane main --ranks 2,16 --requests 1200 --closed 40 --output-dir .simulated

.PHONY: lint
lint: .venv/.made-dev  ## ruff, mypy --strict, and the layers of the package
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: clean
clean:  ## remove the environments and everything else that was made
	rm -rf .venv .lanes .cache .bench .simulated build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache .coverage htmlcov

.venv/.made-cli: pyproject.toml
	@echo 'making .venv for the command line'
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	@$(PIP) -e '.[cli]'
	@touch $@

# pip reads dependency groups from 25.1 on.
.venv/.made-dev: pyproject.toml | .venv/.made-cli
	@echo 'adding the tools and what the tests need'
	@$(PIP) --upgrade 'pip>=25.1'
	@$(PIP) -e '.[tools]' --group dev
	@touch $@
