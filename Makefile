# Every target needs Python 3.11 or newer with venv (Debian, Ubuntu: apt install python3-venv) and a network.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help install train test lint bench report clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*##/\t/' | expand -t 12

install: .venv/installed  ## make .venv with all packages

.venv/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[dev,figures]'
	touch $@

train: install  ## train the default model
	$(BIN)/python scripts/train.py loss=fused chunk=1024

test: install  ## run the whole suite; tests that need a GPU say that they were skipped
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: install  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: install  ## compare implementations of the loss on two small shapes; a GPU deserves larger ones
	$(BIN)/python scripts/bench.py --shapes 2048x4096x128,2048x4096 --dtype fp32 --inputs peaked

RESULTS := $(addprefix docs/results/,austen_small_h200 frontier_h200 bench_h200/head.jsonl bench_h200/scaling.jsonl)

report: install  ## make docs/report, docs/calculator.html and docs/peers.md from the records in docs/results
	$(BIN)/python scripts/report.py $(RESULTS) --out docs/report
	mv docs/report/calculator.html docs
	$(BIN)/python scripts/peers.py $(addprefix docs/results/bench_h200/,head.jsonl head_65536.jsonl) --out docs/peers.md

clean:  ## remove .venv and caches, keep runs
	rm -rf .venv .pytest_cache .ruff_cache logitless.egg-info
