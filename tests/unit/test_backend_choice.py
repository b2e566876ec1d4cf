"""Which device computes, with which values, and what is said where a GPU cannot be used."""

from __future__ import annotations

import importlib.metadata
import logging
from types import SimpleNamespace

import pytest
import torch

from tests.support.backends import native_backend
from twostroke.engine.backends import flashinfer
from twostroke.engine.backends.choice import Device, choose_backend, default_mode
from twostroke.engine.backends.native import NativeBackend
from twostroke.engine.backends.torch import TorchBackend
from twostroke.engine.cache import kv_dtype
from twostroke.engine.cuda import package
from twostroke.engine.mode import KvMode, WeightMode
from twostroke.errors import BackendUnavailable, Internal
from twostroke.settings import InvalidSetting

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@without_gpu
def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error_with_a_cure() -> None:
    with pytest.raises(BackendUnavailable, match="no CUDA device") as refused:
        choose_backend(Device.CUDA)
    assert "--device cpu" in refused.value.cure


@without_gpu
def test_auto_computes_on_the_cpu_and_says_why_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="twostroke.engine.backends.choice"):
        assert choose_backend(Device.AUTO).device.type == "cpu"
    assert [each.message for each in caplog.records if "CUDA" in each.message] == [
        "the CPU computes: torch sees no CUDA device"
    ]


@pytest.mark.parametrize("mode", [WeightMode.F32, WeightMode.INT8])
def test_values_that_a_gpu_does_not_compute_with_are_refused_by_name(
    mode: WeightMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "require_device", lambda: torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match=f"{mode.value}: use --weights bf16 or f16"):
        flashinfer.open_flashinfer(mode)


def test_a_gpu_of_an_older_generation_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {
        "is_available": lambda: True,
        "get_device_capability": lambda _: (7, 5),
        "get_device_name": lambda _: "Tesla T4",
    }
    for name, answer in old.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    with pytest.raises(BackendUnavailable, match=r"Tesla T4 has compute capability 7\.5; 8\.0 is needed"):
        package.require_device()


@pytest.mark.parametrize("version", ["0.6.7", "0.8.0", "0.8", "1.0", "0.6.post1"])
def test_a_package_of_another_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(BackendUnavailable, match=r"from 0\.6\.8 up to 0\.8 is needed"):
        package.load_flashinfer()


def test_a_package_that_is_absent_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(BackendUnavailable, match=r"twostroke\[gpu\]"):
        package.load_flashinfer()


def test_each_device_has_its_own_values_unless_told_otherwise() -> None:
    assert default_mode(TorchBackend(packs=False)) is WeightMode.F16
    assert default_mode(SimpleNamespace(device=torch.device("cuda"))) is WeightMode.BF16  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", WeightMode)
def test_on_a_cpu_keys_and_values_keep_all_bits_beside_weights_that_do(weights: WeightMode) -> None:
    expected = "float32" if weights is WeightMode.F32 else "float16"
    assert kv_dtype(KvMode.AUTO, weights, torch.float32) == expected
    chosen = {kv: kv_dtype(kv, weights, torch.float32) for kv in (KvMode.F32, KvMode.F16, KvMode.BF16)}
    assert chosen == {KvMode.F32: "float32", KvMode.F16: "float16", KvMode.BF16: "bfloat16"}


def test_beside_activations_in_16_bits_keys_and_values_are_like_them_or_refused_by_name() -> None:
    assert kv_dtype(KvMode.AUTO, WeightMode.BF16, torch.bfloat16) == "bfloat16"
    assert kv_dtype(KvMode.F16, WeightMode.F16, torch.float16) == "float16"
    with pytest.raises(InvalidSetting, match="--kv-dtype f32: beside activations in bfloat16"):
        kv_dtype(KvMode.F32, WeightMode.BF16, torch.bfloat16)
    with pytest.raises(Internal, match="float64"):
        kv_dtype(KvMode.AUTO, WeightMode.F32, torch.float64)


def test_mode_f32_keeps_all_bits_in_attention_too() -> None:
    native_backend()  # skips where nothing compiles
    backend = choose_backend(Device.CPU, mode=WeightMode.F32)
    assert isinstance(backend, NativeBackend)
    assert not backend.on_tiles
