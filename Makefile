# The commands that the README describes. Each target first sets up the tools and libraries that it needs. `make help`
# lists the targets.
#
# There are two variants. In the CPU variant, cargo takes LIBTORCH from .cargo/config.toml and builds in target/. In the
# CUDA variant, LIBTORCH is .libtorch/cuda and cargo builds in target/cuda: with a common target folder, each change of
# LIBTORCH would rebuild torch-sys, which takes minutes. The variant is CUDA if the machine has a GPU; LOCDIFF_CUDA=1 or
# 0 overrides this. If the user sets LIBTORCH to another libtorch, it is used instead and determines the variant.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help tools setup build demo paper test bench doc audit install uninstall clean

PYTHON ?= python3
PREFIX ?= /usr/local
DESTDIR ?=

# An empty LIBTORCH would override the value in .cargo/config.toml.
ifeq ($(LIBTORCH),)
unexport LIBTORCH
endif

# The variant, cpu or cuda. It is determined at most once, and only by targets that need it. Error messages are
# discarded: if this command fails, the set-up fails with the same error and prints it.
VARIANT = $(eval VARIANT := $$(shell LOCDIFF_CUDA='$$(LOCDIFF_CUDA)' LIBTORCH='$$(LIBTORCH)' $$(PYTHON) setup/libtorch.py --print-variant 2>/dev/null))$(VARIANT)
TARGET_BASE := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
TARGET = $(TARGET_BASE)$(if $(filter cuda,$(VARIANT)),/cuda)
CUDA_ENVIRONMENT = $(if $(LIBTORCH),,LIBTORCH='$(CURDIR)/.libtorch/cuda') CARGO_TARGET_DIR='$(TARGET)'
ENVIRONMENT = $(if $(filter cuda,$(VARIANT)),$(CUDA_ENVIRONMENT))
CARGO = $(ENVIRONMENT) cargo
LAUNCH = $(TARGET)/release/locdiff-launch

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18
	@echo 'LOCDIFF_CUDA=1 or 0 chooses the CUDA or the CPU variant; LIBTORCH points to your own libtorch.'

tools:
	@command -v cargo >/dev/null || { echo 'make: no cargo; install Rust 1.88 or newer with rustup' >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo 'make: no $(PYTHON); install Python 3.8 or newer with pip (Debian, Ubuntu: apt install python3 python3-pip)' >&2; exit 1; }
	@set -- $${CXX:-c++}; command -v "$$1" >/dev/null || { echo "make: no C++ compiler ($$1); install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set CXX" >&2; exit 1; }

setup: tools ## download libtorch to .libtorch/ (CUDA if there is a GPU, else CPU) and GeoCLIP's weights to .geoclip/
	@$(PYTHON) setup/libtorch.py --set auto
	@$(PYTHON) setup/geoclip.py

# The project has no examples. The option --examples only makes cargo enable the dependency features that the tests
# need, so that `make test` does not rebuild dependencies.
build: setup ## build both binaries
	$(CARGO) build --release --workspace --bins --examples

demo: build ## build and run the demo
	'$(LAUNCH)' $(if $(filter cuda,$(VARIANT)),,--workers 2 --device cpu) demo

paper: build ## build, and repeat the paper's experiments on simulated photos (about 15 minutes on two CPU cores)
	$(PYTHON) -B setup/paper.py '$(LAUNCH)' $(if $(filter cuda,$(VARIANT)),--gpus 1,--workers 2 --device cpu)

# In the CPU variant, the tests also compile and link the CUDA variant. They do not if the user sets LIBTORCH, because
# then no libtorch is downloaded.
test: CUDA_LINK = $(if $(LIBTORCH)$(filter cuda,$(VARIANT)),,yes)
test: tools ## run all checks: format, lints, docs, audit, tests, linking the CUDA variant
	@$(ENVIRONMENT) $(PYTHON) -B setup/run_tests.py $(if $(CUDA_LINK),--libtorch link --cuda-link)

bench: build ## build, then compare the speed with PyTorch, and time collective operations
	$(PYTHON) -B tests/bench/speed.py '$(LAUNCH)' --device $(if $(filter cuda,$(VARIANT)),cuda,cpu)
	'$(LAUNCH)' $(if $(filter cuda,$(VARIANT)),,--workers 2 --device cpu) bench collectives

doc: setup ## build the API documentation
	$(CARGO) doc --release --workspace --no-deps
	@echo 'doc: $(TARGET)/doc/locdiff/index.html'

audit: tools ## check the dependencies: bans, licences, sources, advisories
	@$(PYTHON) -B setup/audit.py

install: build ## install programs, libraries, completions and documents into PREFIX (default /usr/local)
	@$(PYTHON) -B setup/install.py --binaries '$(TARGET)/release' --prefix '$(PREFIX)' --destdir '$(DESTDIR)'

uninstall: ## remove what `make install` installed into PREFIX
	@$(PYTHON) -B setup/install.py --uninstall --prefix '$(PREFIX)' --destdir '$(DESTDIR)'

clean: ## remove build output; keeps .libtorch/, .geoclip/ and .tools/
	rm -rf '$(TARGET_BASE)'
