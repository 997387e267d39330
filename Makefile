# make test, make demo: set up a private environment in .venv (once), then run.
#   DEVICE=cpu|cuda      where the ranks run (default: cpu)
#   PYTHON=python3.12    the Python that .venv is made from (default: python3; 3.11 or newer)
#   COMFYUI_DIR=folder   the ComfyUI to use (default: one is obtained)
PYTHON ?= python3
DEVICE ?= cpu

.PHONY: setup test demo faults soak clean

setup:
	@$(PYTHON) launch/setup_env.py --device $(DEVICE) $(if $(filter file,$(origin PYTHON)),--any-python)

test: setup
	DEVICE=$(DEVICE) .venv/bin/python -m pytest

# Every fault in every phase on three ranks, three times in a row; `make test` takes each on one rank, once.
faults: setup
	for round in 1 2 3; do FAULTS=all .venv/bin/python -m pytest tests/faults || exit 1; done

# 500 short prompts on a real ComfyUI with random cancels and faults; SEED=number repeats a run.
soak: setup
	SOAK=500 .venv/bin/python -m pytest -s tests/soak

demo: setup
	.venv/bin/phase-parallel demo --device $(DEVICE)

# Removes what the other targets made, and nothing else.
clean:
	rm -rf .venv .hosts demo_output
