# Every command of the README; each sets up what it needs. `make help` lists them.
#
# Two variants. CPU: cargo takes LIBTORCH from .cargo/config.toml and builds in target/. CUDA (a GPU is there, or
# LOCDIFF_CUDA=1): LIBTORCH is .libtorch/cuda, and the target folder is its own, because a change of LIBTORCH
# rebuilds torch-sys, which takes minutes. A LIBTORCH that is already set is used as it is.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help tools setup build demo test bench doc audit install clean

PYTHON ?= python3
PREFIX ?= /usr/local
DESTDIR ?=

# Set but empty would hide the value of .cargo/config.toml.
ifeq ($(LIBTORCH),)
unexport LIBTORCH
endif

# Asked once, and only by the targets that need it. Where it fails, so does the set-up, which says why.
VARIANT = $(eval VARIANT := $$(shell LOCDIFF_CUDA='$$(LOCDIFF_CUDA)' LIBTORCH='$$(LIBTORCH)' $$(PYTHON) setup/libtorch.py --print-variant 2>/dev/null))$(VARIANT)
TARGET_BASE := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
TARGET = $(TARGET_BASE)$(if $(filter cuda,$(VARIANT)),/cuda)
CUDA_ENVIRONMENT = $(if $(LIBTORCH),,LIBTORCH='$(CURDIR)/.libtorch/cuda') CARGO_TARGET_DIR='$(TARGET)'
ENVIRONMENT = $(if $(filter cuda,$(VARIANT)),$(CUDA_ENVIRONMENT))
CARGO = $(ENVIRONMENT) cargo
LAUNCH = $(TARGET)/release/locdiff-launch

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18
	@echo 'LOCDIFF_CUDA=1 or 0 chooses the CUDA or the CPU variant; LIBTORCH names a libtorch of your own.'

tools:
	@command -v cargo >/dev/null || { echo 'make: no cargo; install Rust 1.88 or newer with rustup' >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo 'make: no $(PYTHON); install Python 3.8 or newer with pip (Debian, Ubuntu: apt install python3 python3-pip)' >&2; exit 1; }
	@set -- $${CXX:-c++}; command -v "$$1" >/dev/null || { echo "make: no C++ compiler ($$1); install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set CXX" >&2; exit 1; }

setup: tools ## prepare libtorch in .libtorch/ (CPU, or CUDA where there is a GPU) and GeoCLIP's weights in .geoclip/
	@$(PYTHON) setup/libtorch.py --set auto
	@$(PYTHON) setup/geoclip.py

# There are no examples; but with this, dependencies get the features that the tests want, and `make test` builds none again.
build: setup ## build both binaries
	$(CARGO) build --release --workspace --bins --examples

demo: build ## build and run the demonstration
	'$(LAUNCH)' $(if $(filter cuda,$(VARIANT)),,--workers 2 --device cpu) demo

# Beside the CPU variant, the CUDA one is compiled and linked too; with a LIBTORCH of the user's own nothing is downloaded.
test: CUDA_LINK = $(if $(LIBTORCH)$(filter cuda,$(VARIANT)),,yes)
test: tools ## run every check: format, lints, docs, audit, tests, link of the CUDA variant
	@$(ENVIRONMENT) $(PYTHON) -B setup/run_tests.py $(if $(CUDA_LINK),--libtorch link --cuda-link)

bench: build ## build and measure the collectives
	'$(LAUNCH)' $(if $(filter cuda,$(VARIANT)),,--workers 2 --device cpu) bench collectives

doc: setup ## build the API documentation
	$(CARGO) doc --release --workspace --no-deps
	@echo 'doc: $(TARGET)/doc/locdiff/index.html'

audit: tools ## check the dependencies: bans, licences, sources, advisories
	@$(PYTHON) -B setup/audit.py

install: build ## install into PREFIX (default /usr/local) with the libraries of the worker
	@$(PYTHON) -B setup/install.py --binaries '$(TARGET)/release' --prefix '$(PREFIX)' --destdir '$(DESTDIR)'

clean: ## remove what was built; .libtorch/, .geoclip/ and .tools/ stay
	rm -rf '$(TARGET_BASE)'
