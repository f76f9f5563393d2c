# starwire: `make build`, `make demo`, `make test`; `make help` lists the rest.
#
# TF_VERSION=2.15.1 chooses a TensorFlow (default: the newest supported); VENV=/path uses a virtual environment that exists.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

DEFAULT_TF_VERSION := 2.21.0
TF_VERSION ?= $(DEFAULT_TF_VERSION)
VENV ?= $(if $(filter $(DEFAULT_TF_VERSION),$(TF_VERSION)),.venv,.venvs/$(TF_VERSION))
PYTHON := $(abspath $(VENV))/bin/python
# The version that is really installed there, once there is one.
INSTALLED = $(or $(shell scripts/venv-tf-version $(VENV)),$(TF_VERSION))
PLUGIN = $(abspath target)/tf-$(INSTALLED)/libstarwire.so
CARGO ?= cargo

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: build
build: venv tools ## Make .venv/ with TensorFlow, and the library
	@scripts/build-plugin $(PYTHON)

.PHONY: tools
tools:
	@scripts/system-packages build

.PHONY: venv
venv:
	@scripts/make-venv $(VENV) $(TF_VERSION)

.PHONY: print-plugin
print-plugin: ## Print the library's path
	@echo $(PLUGIN)

.PHONY: print-python
print-python: ## Print the interpreter's path
	@echo $(PYTHON)

# What matplotlib needs stays out of the environment that TensorFlow runs in.
BENCH := target/bench
BENCH_ARGS ?=
$(BENCH)/venv/.done: benches/tf/requirements.txt
	@mkdir -p $(BENCH) && rm -rf $(BENCH)/venv
	@$(PYTHON) -m venv $(BENCH)/venv
	@$(BENCH)/venv/bin/pip install --quiet --disable-pip-version-check -r benches/tf/requirements.txt
	@touch $@

.PHONY: bench
bench: build ## Measure grpc++ against stock grpc (12 min; BENCH_ARGS="--quick": 90 s); JSON, table and plot go to target/bench/
	@$(MAKE) $(BENCH)/venv/.done
	@$(PYTHON) benches/tf/run.py --library $(PLUGIN) --out $(BENCH) $(BENCH_ARGS)
	@$(BENCH)/venv/bin/python benches/tf/plot.py $(BENCH)/results.json $(BENCH)/plot.svg
