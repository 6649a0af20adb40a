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

.PHONY: test
test: test-unit test-lanes  ## all tests: the unit tests, then real schedulers and engines on each lane

.PHONY: test-unit
test-unit: .venv/.made-dev  ## the tests that need no vLLM
	@$(BIN)/coverage run -m pytest
	@$(BIN)/coverage report --format=total | sed 's/.*/branch coverage: &%/'

.PHONY: model
model: .venv/.made-dev  ## explore the ranks' protocol: the deadlocks of a misplaced gather, none of the shipped one
	@$(BIN)/python -m tests.model

# -W default: vLLM and torch warn on import. The other settings of pyproject.toml hold.
.PHONY: test-lanes
test-lanes: lanes  ## tests/lane and tests/engine on each lane's real vLLM
	@names=$$($(BIN)/python -m tools.lanes --list | cut -d' ' -f1); failed=; \
	for name in $$names; do \
		echo "lane $$name: tests"; \
		PYTHONPATH='$(CURDIR)' ".lanes/$$name/bin/python" -m pytest -W default tests/lane tests/engine || failed+=" $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed on:$$failed" >&2; exit 1; fi

.PHONY: test-all
test-all: test  ## what `make test` does, and the other releases of vllm-ascend, each on its vLLM
	@$(BIN)/python -m tools.lanes --extra
	@names=$$($(BIN)/python -m tools.lanes --extra --list | cut -d' ' -f1); failed=; \
	for name in $$names; do \
		echo "lane $$name: tests"; \
		PYTHONPATH='$(CURDIR)' ".lanes/$$name/bin/python" -m pytest -W default tests/wheels || failed+=" $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed on:$$failed" >&2; exit 1; fi

.PHONY: bench
bench: lanes  ## ratios to upstream's own work on each lane's real vLLM; JSON in .bench/
	@mkdir -p .bench; names=$$($(BIN)/python -m tools.lanes --list | cut -d' ' -f1); \
	for name in $$names; do \
		echo "lane $$name: benchmarks"; \
		PYTHONPATH='$(CURDIR)' ".lanes/$$name/bin/python" -m pytest -W default -q tests/bench \
			--benchmark-group-by=group --benchmark-columns=median,min,rounds --benchmark-json=".bench/$$name.json"; \
	done

.PHONY: lanes
lanes: .venv/.made-dev  ## make the environment of each lane; nothing is done for one that is up to date
	@$(BIN)/python -m tools.lanes

.PHONY: demo
demo: .venv/.made-dev  ## balance off beside on in real engine cores, on this machine's CPU
	@$(BIN)/python -m tools.lanes main
	@PYTHONPATH='$(CURDIR)' VLLM_CACHE_ROOT='$(CURDIR)/.lanes/main/cache' .lanes/main/bin/python -m balance_patcher demo

.PHONY: lint
lint: .venv/.made-dev  ## ruff, mypy --strict, and the layers of the package
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: clean
clean:  ## remove the environments and everything else that was made
	rm -rf .venv .lanes .cache .bench build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache \
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
