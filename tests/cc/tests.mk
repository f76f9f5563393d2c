# The gtests. `abi`: the C ABI, linked with the core only. `shim`: the TensorFlow side, linked with the objects of cc/ (FOLDER=target/tf-VERSION).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules -j2
CORE := target/debug/libstarwire.so
GTEST := -lgtest -lgtest_main -lpthread
# tests/runner/times.py reads it.
GTEST_REPORT := $(if $(STARWIRE_TEST_TIMES),"--gtest_output=json:$$STARWIRE_TEST_TIMES")
-include $(FOLDER)/flags.mk
# The precompiled header of the library's build, if there is one, halves the time of a file.
SHIM_PCH := $(if $(wildcard $(FOLDER)/pch/pch.h.gch),-include $(FOLDER)/pch/pch.h)

ABI_OUT := target/test/abi
ABI_OBJECTS := $(patsubst tests/cc/abi/%.cc,$(ABI_OUT)/%.o,$(wildcard tests/cc/abi/*.cc))

.PHONY: abi
abi: $(ABI_OUT)/abi_test
	$< $(GTEST_REPORT)

$(ABI_OUT)/abi_test: $(ABI_OBJECTS) $(CORE)
	g++ -o $@ $(ABI_OBJECTS) $(CORE) -Wl,-rpath,"$$PWD/$(dir $(CORE))" $(GTEST)

$(ABI_OUT)/%.o: tests/cc/abi/%.cc
	@mkdir -p $(@D)
	g++ -std=c++17 -O1 -g -Wall -Werror -Iinclude -MMD -MP -c -o $@ $<

SHIM_OUT := $(FOLDER)/test
# TensorFlow's headers take most of a file's time, so each of these units includes every fifth file.
SHIM_UNITS := 0 1 2 3 4
SHIM_TESTS := $(SHIM_UNITS:%=$(SHIM_OUT)/unit-%.o)

.PHONY: shim
shim: $(SHIM_OUT)/shim_test
	@# TensorFlow logs complaints about hostile test input, so its log is shown only after a failure.
	LD_LIBRARY_PATH="$(SHIM_TF):$$PWD/$(dir $(CORE))" $< $(GTEST_REPORT) 2>$(SHIM_OUT)/stderr.log || { tail -n 50 $(SHIM_OUT)/stderr.log >&2; exit 1; }

$(SHIM_OUT)/shim_test: $(SHIM_TESTS) $(SHIM_OBJECTS) $(CORE)
	$(SHIM_CXX) -o $@ $(SHIM_TESTS) $(SHIM_OBJECTS) $(CORE) -Wl,--no-as-needed $(SHIM_LINK) \
	  -Wl,--allow-shlib-undefined $(GTEST)

$(SHIM_TESTS:.o=.cc): $(SHIM_OUT)/unit-%.cc: FORCE
	@mkdir -p $(@D)
	@ls tests/cc/shim/*.cc | awk 'NR % $(words $(SHIM_UNITS)) == $* {printf "#include \"%s\"\n", $$0}' >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:
.SECONDARY: $(SHIM_TESTS:.o=.cc)

# -O1 takes three quarters of the time of -O2, and gcc uses the header with both.
$(SHIM_TESTS): $(SHIM_OUT)/unit-%.o: $(SHIM_OUT)/unit-%.cc $(FOLDER)/flags.mk
	$(SHIM_CXX) $(SHIM_CXXFLAGS) -O1 $(SHIM_PCH) -MMD -MP -c -o $@ $<

# The decoders of peers' messages, on their fuzz corpus and mutations of it (fuzz/README.md). Counts all memory that they allocate.
LINK_TF = -Wl,--no-as-needed $(SHIM_LINK) -Wl,--allow-shlib-undefined -lpthread
DECODERS := $(patsubst fuzz/decoders/%.cc,$(SHIM_OUT)/decoders-%.o,$(wildcard fuzz/decoders/*.cc))
DECODER_ROUNDS ?= 20000
# The mutations of `decoders` are the same each time.

.PHONY: decoders
decoders: $(SHIM_OUT)/decoders
	LD_LIBRARY_PATH="$(SHIM_TF):$$PWD/$(dir $(CORE))" $< rounds=$(DECODER_ROUNDS) findings=$(SHIM_OUT) fuzz/corpus/decoders 2>$(SHIM_OUT)/decoders.log || \
	  { tail -n 50 $(SHIM_OUT)/decoders.log >&2; exit 1; }

$(SHIM_OUT)/decoders: $(DECODERS) $(SHIM_OBJECTS) $(CORE)
	$(SHIM_CXX) -rdynamic -o $@ $(DECODERS) $(SHIM_OBJECTS) $(CORE) $(LINK_TF)

$(SHIM_OUT)/decoders-%.o: fuzz/decoders/%.cc $(FOLDER)/flags.mk
	@mkdir -p $(@D)
	$(SHIM_CXX) $(SHIM_CXXFLAGS) $(SHIM_PCH) -MMD -MP -c -o $@ $<

# The same with cc/ compiled for gcc's sanitizers, except: vptr (needs type information that TensorFlow hides), null and nonnull (gcc cannot compile absl's
# constant expressions with them; a null pointer crashes anyway), container overflow (TensorFlow fills containers without annotations).
SANITIZED_OUT := $(FOLDER)/sanitized
# NDEBUG_SANITIZER keeps the layout of absl's tables as in TensorFlow.
SANITIZE := -U_FORTIFY_SOURCE -DNDEBUG_SANITIZER -fsanitize=address,undefined -fno-sanitize=vptr,null,nonnull-attribute,returns-nonnull-attribute -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1
SANITIZED_SOURCES := $(shell find cc -name '*.cc') $(wildcard tests/cc/shim/*.cc)
SANITIZED_OBJECTS := $(foreach source,$(SANITIZED_SOURCES),$(SANITIZED_OUT)/$(subst /,-,$(source:.cc=.o)))

# TensorFlow's static initialisers call free() on memory from operator new.
ASAN := detect_leaks=0:detect_container_overflow=0:detect_odr_violation=0:alloc_dealloc_mismatch=0

.PHONY: print-sanitize print-asan
print-sanitize:
	@echo '$(SANITIZE)'
print-asan:
	@echo '$(ASAN)'

.PHONY: sanitized
sanitized: $(SANITIZED_OUT)/shim_test
	LD_LIBRARY_PATH="$(SHIM_TF):$$PWD/$(dir $(CORE))" ASAN_OPTIONS=$(ASAN) UBSAN_OPTIONS=print_stacktrace=1 \
	  $< 2>$(SANITIZED_OUT)/stderr.log || { tail -n 80 $(SANITIZED_OUT)/stderr.log >&2; exit 1; }

$(SANITIZED_OUT)/shim_test: $(SANITIZED_OBJECTS) $(CORE)
	$(SHIM_CXX) $(SANITIZE) -o $@ $(SANITIZED_OBJECTS) $(CORE) -Wl,--no-as-needed $(SHIM_LINK) \
	  -Wl,--allow-shlib-undefined $(GTEST)

define SANITIZED_RULE
$(SANITIZED_OUT)/$(subst /,-,$(1:.cc=.o)): $(1) $(FOLDER)/flags.mk
	@mkdir -p $$(@D)
	$$(SHIM_CXX) $$(SHIM_CXXFLAGS) $$(SANITIZE) -MMD -MP -c -o $$@ $$<
endef
$(foreach source,$(SANITIZED_SOURCES),$(eval $(call SANITIZED_RULE,$(source))))

# The fuzz target: the code that reads peers' bytes is compiled for coverage and sanitizers (FUZZ_SECONDS; FINDINGS: a folder).
FUZZED_OUT := $(FOLDER)/fuzzed
FUZZED_SOURCES := $(wildcard cc/tensor/*.cc) cc/star/value_codec.cc cc/star/call_codec.cc cc/base/status_codec.cc fuzz/decoders/target.cc
FUZZED_OBJECTS := $(foreach source,$(FUZZED_SOURCES),$(FUZZED_OUT)/$(subst /,-,$(source:.cc=.o)))
FUZZ_SECONDS ?= 60
FINDINGS ?= target/fuzz/findings

.PHONY: fuzz
fuzz: $(FUZZED_OUT)/decoders
	@mkdir -p "$(FINDINGS)"
	@seed=$(or $(SEED),$$RANDOM); echo "fuzz: decoders: SEED=$$seed"; \
	  LD_LIBRARY_PATH="$(SHIM_TF):$$PWD/$(dir $(CORE))" ASAN_OPTIONS=$(ASAN):handle_segv=0:handle_abort=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 $< seconds=$(FUZZ_SECONDS) seed=$$seed findings="$(FINDINGS)" fuzz/corpus/decoders

# The objects of cc/ have this code once more; the first definition counts.
$(FUZZED_OUT)/decoders: $(FUZZED_OBJECTS) $(FUZZED_OUT)/main.o $(SHIM_OBJECTS) $(CORE)
	$(SHIM_CXX) $(SANITIZE) -Wl,--allow-multiple-definition -o $@ $(FUZZED_OBJECTS) $(FUZZED_OUT)/main.o $(SHIM_OBJECTS) $(CORE) $(LINK_TF)

$(FUZZED_OUT)/main.o: fuzz/decoders/main.cc $(FOLDER)/flags.mk
	@mkdir -p $(@D)
	$(SHIM_CXX) $(SHIM_CXXFLAGS) $(SANITIZE) -MMD -MP -c -o $@ $<

define FUZZED_RULE
$(FUZZED_OUT)/$(subst /,-,$(1:.cc=.o)): $(1) $(FOLDER)/flags.mk
	@mkdir -p $$(@D)
	$$(SHIM_CXX) $$(SHIM_CXXFLAGS) $$(SANITIZE) -fsanitize-coverage=trace-pc -MMD -MP -c -o $$@ $$<
endef
$(foreach source,$(FUZZED_SOURCES),$(eval $(call FUZZED_RULE,$(source))))

-include $(wildcard $(ABI_OUT)/*.d $(SHIM_OUT)/*.d $(SANITIZED_OUT)/*.d $(FUZZED_OUT)/*.d)
