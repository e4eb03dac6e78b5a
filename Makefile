# Thin: every target is a few commands that one could type. `make help` lists them.
# CMAKE_FLAGS is handed to cmake (for instance CMAKE_FLAGS=-DHEADWATER_WERROR=ON), JOBS is the number of parallel jobs.
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
CMAKE_FLAGS ?=
BUILD := build/release
CUDA_TESTS = $(shell grep -oE 'cuda_[a-z_]+_test' tests/cuda/CMakeLists.txt | sort -u) cuda_decode_example
CLANG_FORMAT ?= clang-format-16
SOURCES = $(shell git ls-files '*.cc' '*.c' '*.h' '*.cu' '*.cuh')

.PHONY: help run build test test-cuda test-torch test-python-cuda bench format format-check lint install clean

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

run:  ## build, fetch the example model, answer 16 questions about one document with flat and with cascade attention
	@tools/install_deps.sh build
	@echo "== building"
	@mkdir -p build && cmake --preset release $(CMAKE_FLAGS) >build/configure.log 2>&1 || { cat build/configure.log; exit 1; }
	@cmake --build $(BUILD) -j $(JOBS) --target headwater_cli
	@tools/demo.sh $(BUILD)/cli/headwater

build:  ## everything: library, engine, command, tests
	@tools/install_deps.sh build
	cmake --preset release $(CMAKE_FLAGS)
	cmake --build $(BUILD) -j $(JOBS)

test: build  ## build and run every test
	ctest --preset release -j $(JOBS)

test-cuda:  ## build the CUDA back end (a named subset of its kernels), run its tests; without a GPU most of them skip
	@tools/install_deps.sh build cuda
	cmake --preset cuda -DCMAKE_CUDA_COMPILER="$$(tools/find_nvcc.sh)" $(CMAKE_FLAGS)
	cmake --build --preset cuda -j $(JOBS) --target $(CUDA_TESTS) headwater_cli
	ctest --preset cuda

test-torch:  ## install the Python package with torch (several GB) into build/python-torch, run all its tests
	@tools/install_deps.sh build
	tools/test_python.sh build/python-torch torch -- $(CMAKE_FLAGS)

test-python-cuda:  ## on a machine with a GPU: install the Python package with torch and CUDA, run its GPU tests; skips fail
	@tools/install_deps.sh build cuda
	tools/test_python.sh build/python-cuda cuda -- -DHEADWATER_BUILD_ENGINE=OFF '-DHEADWATER_CUDA_HEAD_DIMS=64;128' $(CMAKE_FLAGS)

bench: build  ## the layer benchmark at its defaults
	$(BUILD)/cli/headwater bench

format:  ## rewrite all sources in the project's style
	@tools/install_deps.sh check
	@$(CLANG_FORMAT) -i $(SOURCES)

format-check:  ## fail if `make format` would change anything
	@tools/install_deps.sh check
	@$(CLANG_FORMAT) --dry-run --Werror $(SOURCES)

lint: build  ## clang-tidy over the project's code, warnings are errors
	@tools/install_deps.sh check
	tools/lint.sh $(BUILD) $(JOBS)

install: build  ## cmake --install (PREFIX=/usr/local)
	cmake --install $(BUILD) --prefix $(or $(PREFIX),/usr/local)

clean:  ## remove build/release
	rm -rf $(BUILD)
