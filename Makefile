# SPDX-License-Identifier: Apache-2.0
# The front door. Everything is done by cmake and by scripts; this file only names them.
#
#   make            build/libfusedmoe.so, build/libfusedmoe.a, build/fusedmoe (needs gcc, make, cmake)
#   make test       every test, with sanitizers, closing with one line of counts
#   make bench      time the layer:  make bench ARGS="--T 512 --dtype bf16"
#   make install    PREFIX=/usr/local by default
#   make setup      .venv with the Python package;  make run: the fine-tuning example in it
#   make format     clang-format over the C sources;  make clean

SHELL := /bin/bash
BUILD := build
PREFIX ?= /usr/local
ARGS ?=
FMOE_PYTHON ?=
GENERATOR := $(if $(shell command -v ninja),Ninja,Unix Makefiles)

.PHONY: all build test bench install setup run format clean
.DEFAULT_GOAL := all

all: build

$(BUILD)/CMakeCache.txt:
	cmake -S . -B $(BUILD) -G "$(GENERATOR)" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=$(PREFIX)

build: $(BUILD)/CMakeCache.txt
	cmake --build $(BUILD) --parallel

test:
	tests/run.sh

bench: build
	$(BUILD)/fusedmoe bench $(ARGS)

install: build
	cmake --install $(BUILD) --prefix $(PREFIX)

# The Python side brings its own script; it does nothing when nothing has changed.
setup:
	@if [ -x python/setup.sh ]; then FMOE_PYTHON="$(FMOE_PYTHON)" python/setup.sh; \
	else echo "python/setup.sh is not in this tree: there is no Python package to set up" >&2; exit 1; fi

run: setup
	.venv/bin/python examples/finetune.py $(ARGS)

format:
	clang-format -i include/*.h src/*.[ch] src/cpu/*.[ch] src/ascend/*.[ch] cli/*.c tests/*.[ch] examples/*.c

clean:
	rm -rf $(BUILD)
