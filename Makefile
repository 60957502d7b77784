# `make up` and `make test` need Python 3.11 or later and make; the rest goes into .venv.
# Another Python: make test PYTHON=/path/to/python3

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help up test lint types layers tests chaos bench hunt docs rpc clean
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=

help:
	@echo 'make up      set up and start a quorum and candidates to play with (doyen up)'
	@echo 'make test    set up and run every check: lint, types, layers, tests'
	@echo 'make chaos   long trials on real servers, within 90 minutes, with a summary per engine'
	@echo 'make hunt    look for seeds that break a protocol, and for seeds that kill mutants'
	@echo 'make bench   measure'
	@echo 'make docs    build the documentation as a site, in build/docs'
	@echo 'make clean   remove what make has made'

up: $(VENV)/.cli
	@$(BIN)/doyen up

test: lint types layers tests
	@echo; echo 'make test: all passed'

lint: $(VENV)/.dev
	@$(call stage,lint,$(BIN)/ruff check)
	@$(call stage,format,$(BIN)/ruff format --check)

types: $(VENV)/.dev
	@$(call stage,types,$(BIN)/mypy)

layers: $(VENV)/.dev
	@$(call stage,layers,$(BIN)/lint-imports --no-logo)

tests: $(VENV)/.dev
	@$(call stage,tests,$(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder)

chaos: $(VENV)/.dev
	@$(call stage,chaos,$(BIN)/pytest -m chaos --numprocesses 3 --dist loadgroup)

# How long each part of the hunt takes: make hunt LIMIT=1h
LIMIT ?= 10m

hunt: $(VENV)/.dev
	@$(call stage,hunt,$(BIN)/doyen lab hunt --protocols all --limit $(LIMIT))
	@$(call stage,seesaw,$(BIN)/doyen lab hunt --protocols all --faults seesaw --limit $(LIMIT))
	@$(call stage,remnant,$(BIN)/doyen lab hunt --protocols all --faults remnant --limit $(LIMIT))
	@$(call stage,rivals,$(BIN)/doyen lab hunt --faults rivals --limit $(LIMIT))
	@$(call stage,hunt,$(BIN)/doyen lab hunt --world quorum --limit $(LIMIT))
	@$(call stage,mutants,$(BIN)/pytest -m hunt -rP)

docs: $(VENV)/.docs
	@$(call stage,docs,$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/docs)
	@echo 'open build/docs/index.html'

# After a change to a .proto file: what is loaded is its compiled form.
rpc: $(VENV)/.dev
	@cd src/doyen/stores/etcd && $(abspath $(BIN))/python -m grpc_tools.protoc -I. --descriptor_set_out=rpc.binpb rpc.proto

bench: $(VENV)/.dev
	@$(BIN)/python -m bench

clean:
	rm -rf $(VENV) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call stage,name,command): say what runs, and name it again if it fails.
stage = printf '\n== %s: %s\n' '$(1)' '$(2)'; $(2) || { printf '\nmake: %s failed\n' '$(1)' >&2; exit 1; }

$(VENV)/.cli: pyproject.toml | $(BIN)/pip
	@echo '== installing doyen into $(VENV)'
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[cli,quorum,web]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/pip
	@echo '== installing doyen and the development tools into $(VENV)'
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(VENV)/.cli $(VENV)/.docs $@

$(VENV)/.docs: pyproject.toml | $(BIN)/pip
	@echo '== installing what the documentation is built with into $(VENV)'
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

# The first Python that is new enough and can make environments. Debian and Ubuntu ship the latter
# as a package of its own.
$(BIN)/pip:
	@old=; bare=; \
	for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { old="$$old $$version"; continue; }; \
	    "$$python" -c 'import ensurepip, venv' 2>/dev/null || { bare="$$bare $$version"; continue; }; \
	    echo "== creating $(VENV) with Python $$version"; \
	    rm -rf $(VENV) && "$$python" -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); exit 1; \
	done; \
	if [ -n "$$bare" ]; then \
	    echo "Python$$bare is there but cannot create environments: install python3-venv" >&2; \
	    echo '(on Debian and Ubuntu: apt install python3-venv), then run make again.' >&2; \
	else \
	    echo "doyen needs Python 3.11 or later; found:$${old:- none}." >&2; \
	    echo 'Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it:' >&2; \
	    echo '    make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3' >&2; \
	fi; \
	exit 1
