# Two commands do everything, set-up included: `make demo` and `make test`.
#   PYTHON=python3.12   the interpreter that the environment is made with
#   TORCH=2.13.0        the torch release to take; another one than this gets an environment of its own
#   ARGS='...'          more arguments for demo, test, slow or bench

PYTHON ?= python3
TORCH ?= 2.13.0
ARGS ?=
VENV := .venv$(if $(filter 2.13.0,$(TORCH)),,-$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CPU_INDEX := https://download.pytorch.org/whl/cpu
TREE := build/lint

# On Linux a plain `torch` brings gigabytes of CUDA libraries. The build named +cpu never does; elsewhere there is no other.
ifeq ($(shell uname -s),Linux)
TORCH_SPEC := torch==$(TORCH)+cpu
else
TORCH_SPEC := torch==$(TORCH)
endif

.PHONY: demo test slow bench lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/fxoverlap demo $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/fxoverlap bench two-hosts $(ARGS)
	$(BIN)/fxoverlap bench overhead
	$(BIN)/fxoverlap bench memory
	$(BIN)/fxoverlap bench transform

# Types and imports are checked in a tree of links laid out as the package is installed.
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TREE) && mkdir -p $(TREE)/fxoverlap
	ln -s $(CURDIR)/fxoverlap/* $(CURDIR)/passes $(CURDIR)/benchmarks $(TREE)/fxoverlap/
	cd $(TREE) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p fxoverlap
	cd $(TREE) && $(CURDIR)/$(BIN)/lint-imports $(CURDIR)/pyproject.toml --no-cache

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-* build dist *.egg-info

# The configured index is asked first: where it has no CPU build it says so at once, and PyTorch's own CPU index is next.
# A plain build runs on a CPU too, with gigabytes of libraries that nothing uses.
$(VENV)/.torch-$(TORCH):
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH_SPEC)"
	@$(PIP) '$(TORCH_SPEC)' 2>/dev/null \
	  || $(PIP) --index-url $(CPU_INDEX) --extra-index-url https://pypi.org/simple '$(TORCH_SPEC)' \
	  || { echo "no CPU build found, installing torch==$(TORCH)"; $(PIP) 'torch==$(TORCH)'; } \
	  || { echo "no build '$(TORCH_SPEC)' on the configured package index or on $(CPU_INDEX): install" \
	       "torch>=2.11,<2.15 yourself in an environment of your own and run 'pip install -e .[test]' there" >&2; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.torch-$(TORCH) pyproject.toml
	$(PIP) -e '.[test,hf]'
	@touch $@
