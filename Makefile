# SPDX-License-Identifier: Apache-2.0
# The front door. Everything is done by cmake and by scripts; this file only names them.
#
#   make            build/libfusedmoe.so, build/libfusedmoe.a, build/fusedmoe (needs gcc, make, cmake);
#                   where there is nvcc, build/libfusedmoe_cuda.so too, unless FMOE_CUDA=OFF: make FMOE_CUDA=OFF
#   make test       what a newcomer runs, in a few minutes, closing with one line of counts
#   make test-full  everything: also sanitizers, fuzzing, emulators, CUDA on a simulated device, older packages; new draws in every run
#   make bench      time the layer:  make bench ARGS="--T 512 --dtype bf16"
#   make install    PREFIX=/usr/local by default
#   make setup      .venv with the Python package;  make run: the fine-tuning example in it
#   make ascend-report   count launches and bytes on the simulated NPU, into docs/ascend.md
#   make lint       ruff, mypy, clang-format, clang-tidy, shellcheck;  make format: mend what they can mend
#   make docs       the documentation as a site, build/site
#   make wheel      a manylinux wheel, dist/, tried in an empty environment (with CUDA: make wheel FMOE_CUDA=ON)
#   make clean

SHELL := /bin/bash
BUILD := build
PREFIX ?= /usr/local
ARGS ?=
FMOE_PYTHON ?=
FMOE_CUDA ?=
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
GENERATOR := $(if $(shell command -v ninja),Ninja,Unix Makefiles)

.PHONY: all build test test-full bench install setup run ascend-report lint format docs wheel clean
.DEFAULT_GOAL := all

all: build

$(BUILD)/CMakeCache.txt:
	cmake -S . -B $(BUILD) -G "$(GENERATOR)" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=$(PREFIX) \
	    $(if $(FMOE_CUDA),-DFMOE_CUDA=$(FMOE_CUDA))

build: $(BUILD)/CMakeCache.txt
	$(if $(FMOE_CUDA),cmake -S . -B $(BUILD) -DFMOE_CUDA=$(FMOE_CUDA))
	cmake --build $(BUILD) --parallel $(JOBS)

test:
	tests/run.sh $(ARGS)

test-full:
	tests/run.sh --full $(ARGS)

bench: build
	$(BUILD)/fusedmoe bench $(ARGS)

install: build
	cmake --install $(BUILD) --prefix $(PREFIX)

# The Python side brings its own script; it does nothing when nothing has changed.
setup:
	FMOE_PYTHON="$(FMOE_PYTHON)" python/setup.sh

run: setup
	.venv/bin/python examples/finetune.py $(ARGS)

# Launches, bytes and kept memory beside LLaMA-Factory's own kernel, on the simulated CANN: the tables of docs/ascend.md.
ascend-report: build
	cmake --build $(BUILD) --parallel $(JOBS) --target fmoe_tests
	tests/ascend/run_torch.sh report docs/ascend.md $(BUILD)

# The tools are installed into .venv, in the versions of tools/requirements-*.txt.
lint: setup
	tools/lint.sh

format:
	tools/lint.sh --fix

docs:
	tools/need.sh docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

wheel:
	FMOE_CUDA="$(or $(FMOE_CUDA),OFF)" tools/wheel.sh

clean:
	rm -rf $(BUILD)
