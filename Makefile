# Each line is a command you could type. `make demo` and `make test` each set everything up by themselves.
PYTHON ?= python3
VENV ?= .venv
# A CPU build of torch is enough. TORCH_INDEX=<URL of PyTorch's CPU wheels> makes the install much smaller.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := $(VENV)/bin
RUN := $(BIN)/benchlib
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo)
APT = $(AS_ROOT) apt-get update -q && $(AS_ROOT) apt-get install -qy --no-install-recommends
LATEX := latexmk texlive-latex-base texlive-latex-extra texlive-science texlive-fonts-recommended texlive-pictures

.PHONY: help demo test check test-engine detection test-gate test-sglang-cpu test-latex test-browser bench-client bench-engine lab report-demo latex browser docs clean
help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/  -/'

$(VENV)/torch.done:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(VENV)/demo.done: pyproject.toml | $(VENV)/torch.done
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[reference]'
	@touch $@

$(VENV)/dev.done: pyproject.toml | $(VENV)/torch.done
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[reference,dev]'
	@touch $@

demo: $(VENV)/demo.done  ## the laptop campaign on the embedded engine, then its report: a few minutes
	$(RUN) sweep notebooks/sweeps/laptop.toml
	$(RUN) report laptop

test: $(VENV)/dev.done  ## the tests that need neither a GPU nor SGLang nor LaTeX
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --cov=benchlib --cov-report=term:skip-covered --cov-fail-under=90

check: $(VENV)/dev.done  ## format, lint and types
	$(BIN)/ruff format --check benchlib tests
	$(BIN)/ruff check benchlib tests
	$(BIN)/mypy

test-engine: $(VENV)/dev.done  ## the full grid of the embedded engine: an hour
	$(BIN)/python -m pytest -q -m 'engine or slow' --timeout 3600

detection: $(VENV)/dev.done  ## the detection table of the report's appendix anew: a quarter hour
	$(BIN)/python -m tests.gate

test-gate: $(VENV)/dev.done  ## leaks planted in servers are caught, 50 clean servers pass: ten minutes
	$(BIN)/python -m pytest -q -m slow --timeout 3600 tests/gate

latex:  ## LaTeX, by apt-get where it is missing
	command -v latexmk > /dev/null || { $(APT) $(LATEX); }

browser:  ## Chromium, by apt-get where it is missing
	command -v chromium || command -v chromium-browser || command -v google-chrome || { $(APT) chromium; }

test-latex: $(VENV)/dev.done latex  ## every table compiled by LaTeX
	$(BIN)/python -m pytest -q -m latex

test-browser: $(VENV)/dev.done browser  ## the HTML report in headless Chromium
	$(BIN)/python -m pytest -q -m browser

test-sglang-cpu: $(VENV)/dev.done .venv-sglang/done  ## the chain against a stock SGLang on the CPU (installs 11 GB)
	BENCHLIB_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python $(BIN)/python -m pytest -q -m sglang --timeout 900

.venv-sglang/done:
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check sglang==0.5.23
	@touch $@

bench-client: $(VENV)/dev.done  ## our client beside SGLang's two, where BENCHLIB_SGLANG_PYTHON has one (CLIENT_FLAGS=--fifo on a busy machine)
	$(BIN)/python -m tests.bench_client.compare $(CLIENT_FLAGS)

bench-engine: $(VENV)/dev.done  ## the embedded engine by itself, beside transformers
	$(BIN)/python -m benchlib.reference_engine.bench

lab: $(VENV)/demo.done  ## JupyterLab on the notebooks
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[reference,lab]'
	$(BIN)/jupyter lab notebooks

report-demo: $(VENV)/demo.done latex  ## HTML and PDF from the demo's records, or from those that come with the repository
	$(RUN) report $(if $(wildcard results/laptop/*/record.json),laptop,results/laptop-sample)

docs: $(VENV)/dev.done  ## results/SCHEMA.md, from the models
	$(BIN)/python -m benchlib.schema

clean:  ## remove what was installed and generated
	rm -rf $(VENV) .venv-sglang build report/tables report/figures
