# Builds and runs the executor benchmark from TensorFlow, the executor's part of cc/ and the library
# (FOLDER=target/tf-VERSION).
SHELL := /bin/bash
.DELETE_ON_ERROR:
include $(FOLDER)/flags.mk
OUT := $(FOLDER)/bench
OBJECTS := $(patsubst %,$(OUT)/cc/%.o,base/guard executor/subgraph executor/subgraph_table executor/scratch)
# Rounds per graph; milliseconds per round and executor.
ROUNDS := $(or $(ROUNDS),11)
MS := $(or $(MS),10)

.PHONY: run
run: $(OUT)/executor
	@LD_LIBRARY_PATH="$(SHIM_TF):$$PWD/$(FOLDER)" TF_CPP_MIN_LOG_LEVEL=2 $< $(ROUNDS) $(MS)

$(OUT)/executor: $(OUT)/main.o $(OBJECTS) $(FOLDER)/libstarwire.so
	$(SHIM_CXX) -o $@ $^ -Wl,--no-as-needed $(SHIM_LINK) -Wl,--allow-shlib-undefined -lpthread

$(OUT)/main.o: benches/executor/main.cc $(FOLDER)/flags.mk
	@mkdir -p $(@D)
	$(SHIM_CXX) $(SHIM_CXXFLAGS) -MMD -MP -c -o $@ $<

$(OUT)/cc/%.o: cc/%.cc $(FOLDER)/flags.mk
	@mkdir -p $(@D)
	$(SHIM_CXX) $(SHIM_CXXFLAGS) -MMD -MP -c -o $@ $<

-include $(wildcard $(OUT)/*.d $(OUT)/cc/*/*.d)
