"""Which kernel modules a model needs, and how they are built: nothing is compiled here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.support.backends import CPU
from tests.support.emulated import emulated_package
from tests.support.engines import tiny
from tests.support.tiny import write_tiny
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from twostroke.cli import main
from twostroke.engine.attention import AttentionShape
from twostroke.engine.backend import Activation
from twostroke.engine.cuda.kernels import build, needed, prepare_kernels
from twostroke.errors import BackendUnavailable, UnsupportedModel

NAMES = """
import torch
from twostroke.engine.attention import AttentionShape
from twostroke.engine.backend import Activation
from twostroke.engine.cuda.kernels import needed
from twostroke.engine.cuda.package import load_flashinfer

load_flashinfer()
shape = AttentionShape(heads=4, kv_heads=1, head_dim=256, scale=0.1, windows=(512, None, 512))
print(*(spec.name for spec in needed(shape, torch.bfloat16, Activation.GELU_TANH)), sep="\\n")
"""


@dataclass
class Spec:
    """A module of FlashInfer, as far as building it goes."""

    name: str
    error: Exception | None = None
    others: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def build(self, verbose: bool) -> None:
        assert not verbose
        self.others.wait(10)
        if self.error:
            raise self.error


def test_a_model_needs_attention_for_each_kind_of_window_and_what_lies_between_its_matrices(tmp_path: Path) -> None:
    emulated_package()  # skips where FlashInfer is not installed
    told = {
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "CUDA_HOME": str(tmp_path),
    }
    listed = subprocess.run(
        [sys.executable, "-c", NAMES], env={**os.environ, **told}, check=True, capture_output=True, text=True
    )
    attention, windowed, *rest = listed.stdout.split()
    assert attention.startswith(
        "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head"
    )
    assert "head_dim_qk_256" in attention
    assert "use_swa_False" in attention
    assert windowed == attention.replace("use_swa_False", "use_swa_True")
    assert rest == ["page", "rope", "norm", "gelu_tanh_and_mul"]


def test_heads_that_flashinfer_would_compute_wrongly_are_refused() -> None:
    shape = AttentionShape(heads=4, kv_heads=2, head_dim=80, scale=0.1, windows=(None,))
    with pytest.raises(UnsupportedModel, match="80 dimensions"):
        next(needed(shape, torch.bfloat16, Activation.SILU))


def test_nothing_is_built_for_a_cpu() -> None:
    told: list[str] = []
    prepare_kernels(CPU, tiny().config, told.append)
    assert not told


def test_modules_are_built_at_the_same_time_and_each_is_told() -> None:
    together, told = threading.Barrier(3), []
    build([Spec(name, others=together) for name in "abc"], lambda spec: told.append(spec.name))
    assert told == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Ninja build failed. Ninja output:\nx.cu(3): error: no such header\nmore"), "no such header"),
        (FileNotFoundError(2, "No such file or directory", "ninja"), "ninja"),
    ],
)
def test_a_build_that_fails_says_which_module_and_what_the_compiler_said(error: Exception, words: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"^rope could not be compiled: .*{words}"):
        build([Spec("page"), Spec("rope", error)], lambda spec: None)


def test_warming_up_a_cpu_says_what_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny(tmp_path / "tiny")
    write_tiny_tokenizer(model)
    assert main(["warmup", "--device", "cpu", "--model", str(model)]) == 0
    assert f"{CPU.name} is ready on cpu" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_warming_up_a_gpu_that_is_not_there_fails_with_a_cure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--device", "cuda"]) == 1
    assert "--device cpu" in capsys.readouterr().err
