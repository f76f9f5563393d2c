# starwire: `make demo` and `make test` work from a fresh clone; `make help` and `make help-all` list the other targets.
#
# TF_VERSION=2.15.1  build for another TensorFlow than the newest supported (environment in .venvs/)
# VENV=/path         use an existing virtual environment and its TensorFlow
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

DEFAULT_TF_VERSION := 2.21.0
TF_VERSION ?= $(DEFAULT_TF_VERSION)
VENV ?= $(if $(filter $(DEFAULT_TF_VERSION),$(TF_VERSION)),.venv,.venvs/$(TF_VERSION))
PYTHON := $(VENV)/bin/python
CARGO ?= cargo
# The version that the environment contains, if it exists.
INSTALLED = $(or $(shell scripts/venv-tf-version "$(VENV)"),$(TF_VERSION))
FOLDER = target/tf-$(INSTALLED)
PLUGIN = $(FOLDER)/libstarwire.so

# Scripts and tests expect the library in target/.
unexport CARGO_TARGET_DIR
# Tests change folders.
ifdef TMPDIR
export TMPDIR := $(shell realpath "$$TMPDIR")
endif

.PHONY: help
help: ## List the main targets (help-all: all of them)
	@grep -hE '^[a-z-]+:.* ## ' $(MAKEFILE_LIST) | sed -E 's/:.* ## /\t/' | expand -t 16

.PHONY: help-all
help-all:
	@grep -hE '^[a-z0-9-]+:.* (##|#-) ' $(MAKEFILE_LIST) | sed -E 's/:.* (##|#-) /\t/' | expand -t 18

# ---- build

.PHONY: build
build: tools venv ## Create .venv/ with TensorFlow and build the library
	@scripts/build-plugin "$(PYTHON)"

.PHONY: tools
tools:
	@scripts/system-packages build

.PHONY: venv
venv:
	@scripts/make-venv "$(VENV)" $(TF_VERSION)

.PHONY: starctl
starctl: tools ## Build target/release/starctl, which inspects machines and servers
	@$(CARGO) build --release --bin starctl

.PHONY: fail-points
fail-points: tools venv #- Build a library with places where tests kill it, and print its path
	@STARWIRE_CARGO_FLAGS="--features fail-points" scripts/build-plugin "$(PYTHON)" "" "$(FOLDER)/libstarwire-fail-points.so" >&2
	@echo "$(FOLDER)/libstarwire-fail-points.so"

.PHONY: proto
proto: tools #- Make the Rust code of the control plane from proto/
	@$(CARGO) run --quiet --package starwire-proto

.PHONY: print-plugin
print-plugin: #- Print the library's path
	@echo "$$PWD/$(PLUGIN)"

.PHONY: print-python
print-python: #- Print the interpreter's path
	@realpath -s "$(PYTHON)"

.PHONY: print-folder
print-folder:
	@echo $(FOLDER)

# ---- see it work

.PHONY: demo
demo: build ## Train a recommender over grpc, grpc++ and star_server, and compare
	@STARWIRE_LIBRARY="$$PWD/$(PLUGIN)" "$(PYTHON)" examples/recommender/demo.py $(ARGS)

# matplotlib's dependencies stay out of TensorFlow's environment.
BENCH := target/bench
BENCH_ARGS ?=
$(BENCH)/venv/.done: benches/tf/requirements.txt
	@mkdir -p $(BENCH) && rm -rf $(BENCH)/venv
	@"$(PYTHON)" -m venv $(BENCH)/venv
	@$(BENCH)/venv/bin/pip install --quiet --disable-pip-version-check -r benches/tf/requirements.txt
	@touch $@

# The Keras that ParameterServerStrategy supports; TensorFlow 2.12 and 2.13 contain it, and 1.15 has no such strategy. A release candidate may precede
# its Keras.
KERAS = $(BENCH)/keras-$(INSTALLED)
$(BENCH)/keras-%/.done:
	@$(if $(filter 1.15.% 2.12.% 2.13.%,$*),mkdir -p $(@D),"$(PYTHON)" -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) "tf-keras<=$(basename $*).99")
	@touch $@

.PHONY: print-keras
print-keras: $(KERAS)/.done #- Install that Keras aside and print its folder
	@echo "$$PWD/$(KERAS)"

.PHONY: bench
bench: build ## Measure grpc++ against stock grpc (18 min; BENCH_ARGS="--quick": 2 min); writes JSON, table and plot to target/bench/
	@$(MAKE) $(BENCH)/venv/.done $(KERAS)/.done
	@PYTHONPATH="$$PWD/$(KERAS)" "$(PYTHON)" benches/tf/run.py --library "$$PWD/$(PLUGIN)" --out $(BENCH) $(BENCH_ARGS)
	@$(BENCH)/venv/bin/python benches/tf/plot.py $(BENCH)/results.json $(BENCH)/plot.svg

.PHONY: bench-wire
bench-wire: build #- The same over an emulated network, at several rates and delays (1 h; WIRE_ARGS="--quick": 4 min); writes to target/bench/wire/
	@$(MAKE) $(BENCH)/venv/.done $(KERAS)/.done
	@PYTHONPATH="$$PWD/$(KERAS)" "$(PYTHON)" benches/wire/run.py --library "$$PWD/$(PLUGIN)" --out $(BENCH)/wire $(WIRE_ARGS)
	@$(BENCH)/venv/bin/python benches/tf/plot.py $(BENCH)/wire/results.json $(BENCH)/wire/plot.svg

.PHONY: bench-zoo
bench-zoo: build #- Train the models of DeepRec's zoo over every protocol (ZOO_ARGS="--quick": shorter, without one process); writes to target/bench/zoo/
	@$(MAKE) $(BENCH)/venv/.done
	@"$(PYTHON)" benches/tf/run.py --library "$$PWD/$(PLUGIN)" --out $(BENCH)/zoo --protocols grpc,grpc++,grpc++:fuse,star_server,star_server_lite --cases zoo $(ZOO_ARGS)
	@$(BENCH)/venv/bin/python benches/tf/plot.py $(BENCH)/zoo/results.json $(BENCH)/zoo/plot.svg

.PHONY: bench-swarm
bench-swarm: build #- Run many simulated workers against one parameter server (20 min; SWARM_ARGS="--quick": 1 min); writes to target/bench/swarm/
	@$(MAKE) $(BENCH)/venv/.done
	@$(CARGO) build --release --bin swarm
	@"$(PYTHON)" benches/swarm/run.py --library "$$PWD/$(PLUGIN)" --swarm target/release/swarm --out $(BENCH)/swarm $(SWARM_ARGS)
	@$(BENCH)/venv/bin/python benches/swarm/plot.py $(BENCH)/swarm/results.json $(BENCH)/swarm/plot.svg

.PHONY: bench-reconnect
bench-reconnect: build #- Kill and restart a parameter server under 1000 simulated workers (5 min; RECONNECT_ARGS="--quick": 1 min)
	@$(CARGO) build --release --bin swarm
	@"$(PYTHON)" benches/swarm/reconnect.py --library "$$PWD/$(PLUGIN)" --swarm target/release/swarm --out $(BENCH)/reconnect $(RECONNECT_ARGS)

.PHONY: bench-executor
bench-executor: build #- Measure the executors' cost per kernel (1 min)
	@$(MAKE) -f benches/executor/bench.mk FOLDER=$(FOLDER) ROUNDS="$(ROUNDS)" MS="$(MS)"

# ---- check it

# PYTEST_ARGS reaches pytest in each job that runs it: `-k NAME`, or `FILE::TEST` instead of the job's files.
TESTS = VENV="$(VENV)" TF_VERSION=$(TF_VERSION) CARGO="$(CARGO)" python3 scripts/test

.PHONY: test
test: ## Run the tests (14 min; 28 on slow cores; ONLY="rust abi python/star": only these jobs; PYTEST_ARGS="-k name": only these tests of them); times go to target/test/times.json
	@$(TESTS) $(ONLY)

.PHONY: test-deep
test-deep: ## Run variants, sanitizers address and undefined, fuzzing, other TensorFlows, RDMA (hours; SHARD=3/30: a thirtieth; SEED=7: as a failed run)
	@$(TESTS) --deep $(if $(SHARD),--shard $(SHARD)) $(if $(SEED),--seed $(SEED)) $(ONLY)

.PHONY: test-flaky
test-flaky: #- Repeat jobs beside a load on all cores (N=20 ONLY="python/star"; PYTEST_ARGS="-k name": only these tests of them)
	@$(TESTS) --repeat $(or $(N),20) --load $(ONLY)

.PHONY: test-frameworks
test-frameworks: tools #- Run Keras, DeepCTR, TFRA and EasyRec unmodified under `starwire run` (15 min; ARGS="-k deepctr")
	@for version in 2.15.1 2.12.1; do $(MAKE) build TF_VERSION=$$version; done
	@scripts/venv-install .venvs/2.15.1 pytest
	@.venvs/2.15.1/bin/python -m pytest -q -p no:cacheprovider tests/frameworks $(ARGS)

.PHONY: tensorflow-tests
tensorflow-tests: build #- Run TensorFlow's own tests over every protocol (STARWIRE_TF_SOURCE=/its/sources; PROTOCOLS="grpc++", ONLY="remote_test": only these)
	@VENV="$(VENV)" TF_VERSION=$(TF_VERSION) scripts/tensorflow-tests "$(STARWIRE_TF_SOURCE)" $(if $(PROTOCOLS),--protocols $(PROTOCOLS)) $(if $(ONLY),--only $(ONLY))

.PHONY: test-rdma
test-rdma: #- Run the RDMA tests over soft-RoCE in a virtual machine (ARGS="driver engine kill doctor train")
	@VENV="$(VENV)" TF_VERSION=$(TF_VERSION) CARGO="$(CARGO)" tests/rdma/run $(ARGS)

.PHONY: soak
soak: build #- Train for an hour while tasks are killed and stopped, and check for leaks (SOAK_ARGS="--minutes 10 --protocol grpc++")
	@scripts/venv-install "$(VENV)" pytest
	@STARWIRE_LIBRARY="$$PWD/$(PLUGIN)" "$(PYTHON)" tests/soak/soak.py --out target/soak $(SOAK_ARGS)

.PHONY: lint
lint: ## Check formatting, clippy, generated header, crate licences and advisories
	@VENV="$(VENV)" TF_VERSION=$(TF_VERSION) CARGO="$(CARGO)" scripts/lint

.PHONY: header
header: #- Regenerate include/starwire.h from src/ffi
	@UPDATE=1 $(CARGO) test --quiet --test header

.PHONY: format
format: ## Format Rust and C++
	@$(CARGO) fmt
	@git ls-files '*.cc' '*.h' | grep -v '^include/' | xargs --no-run-if-empty clang-format -i

.PHONY: matrix
matrix: tools #- Build and smoke-test for every TensorFlow minor (VERSIONS="2.12.1 2.15.1": only these; FULL=1: all tests that use TensorFlow)
	@FULL=$(FULL) scripts/matrix $(VERSIONS)

.PHONY: watch
watch: build #- Build and try against the newest release candidate and nightly of TensorFlow, and list what they change
	@scripts/watch "$(PYTHON)" "$(PLUGIN)"

.PHONY: bazel
bazel: $(if $(filter 1.%,$(INSTALLED)),build,tools venv) #- Build the plug-in with Bazel (BAZEL=/path) and smoke-test it: bazel/README.md
	@CARGO="$(CARGO)" scripts/bazel-test "$(PYTHON)"

.PHONY: sanitize
sanitize: #- Run the tests under sanitizers (ONLY="address thread shim": only these)
	@VENV="$(VENV)" TF_VERSION=$(TF_VERSION) CARGO="$(CARGO)" scripts/sanitize $(ONLY)

MUTANTS := target/tools/bin/cargo-mutants
$(MUTANTS):
	@echo "starwire: installing cargo-mutants (some minutes)"
	@$(CARGO) install --quiet --locked --root target/tools cargo-mutants@27.1.0

.PHONY: mutants
mutants: tools $(MUTANTS) #- Change the core in one place at a time, and see whether its tests notice (many hours; ARGS="--package starwire-state --shard 0/12": a twelfth)
	@PATH="$$PWD/target/tools/bin:$$PATH" $(CARGO) mutants --output target/mutants $(ARGS)

FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: build #- Fuzz the protocol, the parsers and the tensor decoders, FUZZ_SECONDS=60 each (SEED=7: as a run that printed it)
	@CARGO="$(CARGO)" SEED=$(SEED) scripts/fuzz $(FUZZ_SECONDS)
	@$(CARGO) build --quiet --lib && $(MAKE) -f tests/cc/tests.mk fuzz FOLDER=$(FOLDER) FUZZ_SECONDS=$(FUZZ_SECONDS) SEED=$(SEED)

.PHONY: fuzz-graphs
fuzz-graphs: build #- Compare random graphs over grpc and every protocol, bit for bit, for FUZZ_SECONDS (default 300; ARGS="--seed 1 --seconds 3600 --protocols star_server")
	@scripts/venv-install "$(VENV)" pytest
	@STARWIRE_LIBRARY="$$PWD/$(PLUGIN)" "$(PYTHON)" tests/fuzz_graphs/run.py $(if $(filter file,$(origin FUZZ_SECONDS)),--seconds 300,--seconds $(FUZZ_SECONDS)) $(ARGS)

.PHONY: histories
histories: build #- Kill, stop and cut off tasks at random, and check from the recorded history that no update is lost or doubled (5 min; ARGS="--seconds 3600 --seed 7")
	@STARWIRE_LIBRARY="$${STARWIRE_LIBRARY:-$$PWD/$(PLUGIN)}" "$(PYTHON)" tests/histories/run.py $(ARGS)

.PHONY: simulate
simulate: tools #- Whole engines over a simulated network in virtual time, with other seeds each time, for SECONDS (default 300)
	@$(CARGO) test -p starwire-engine --lib --no-run
	@set -o pipefail; export STARWIRE_SIM_SECONDS=$(or $(SECONDS),300); $(CARGO) test -p starwire-engine --lib -- \
		--ignored --nocapture requests_end_as_they_should_with_any_seed 2>&1 | tee target/simulate.log
	@grep -q "^simulated [1-9][0-9]* seeds" target/simulate.log # the test was there, and ended by itself

# ---- ship it

.PHONY: wheels
wheels: tools ## Build one wheel for all TensorFlows, into target/dist/ (VERSIONS="2.15.1 2.21.0": only these; URL=…: for its metadata)
	@CARGO="$(CARGO)" URL="$(URL)" scripts/wheels $(VERSIONS)

.PHONY: wheel-aarch64
wheel-aarch64: #- Cross-compile a wheel for aarch64 and TensorFlow 2.21; train with it under qemu-user (15 min)
	@CARGO="$(CARGO)" scripts/wheel-aarch64

.PHONY: test-wheel
test-wheel: venv #- Install that wheel where there is no compiler, for each Python at hand; train, restart, upgrade TensorFlow (10 min)
	@scripts/venv-install "$(VENV)" pytest
	@"$(PYTHON)" -m pytest -q -rs -p no:cacheprovider tests/wheel $(ARGS)

.PHONY: release
release: tools #- Check versions; build wheels, source archive, SBOM and checksums into target/dist/ (VERSIONS=…, DIRTY=1: a trial)
	@CARGO="$(CARGO)" URL="$(URL)" scripts/release $(VERSIONS)

.PHONY: docs
docs: ## Build the documentation site into target/docs/site/
	@scripts/docs

.PHONY: clean
clean: #- Remove build outputs; keep the virtual environments
	rm -rf target
